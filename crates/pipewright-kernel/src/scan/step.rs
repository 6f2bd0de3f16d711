//! A scan that continues from a state, token by token, for generation.

use multiversion::multiversion;

use super::chunks::Inputs;
use crate::pointwise::exp;

/// Returns the results of the tokens after a state, rows of all heads, and turns the state into the one after
/// these tokens. It is the state that [`forward_with_state`](super::forward_with_state) returns. There is one
/// sequence, and its tokens are of one document.
pub fn step(inputs: Inputs<'_>, states: &mut [f32]) -> Vec<f32> {
    let dims = inputs.dims;
    let wide = dims.group_width();
    let mut y = vec![0f32; dims.rows() * dims.width()];
    let (mut decays, mut given) = (vec![0f32; wide], vec![0f32; wide]);
    for (token, (u, y)) in
        inputs.u.chunks_exact(dims.channels()).zip(y.chunks_exact_mut(dims.width())).enumerate()
    {
        for (group, state) in states.chunks_exact_mut(dims.state * wide).enumerate() {
            let x = &u[dims.x(group)..][..wide];
            let y = &mut y[dims.x(group)..][..wide];
            for channel in 0..wide {
                let head = group * dims.group_heads() + channel / dims.head_dim;
                let step = inputs.steps[head * dims.rows() + token];
                decays[channel] = exp(step * inputs.rates[head]);
                given[channel] = step * x[channel];
                y[channel] = inputs.skip[head] * x[channel];
            }
            let directions = [dims.b(group), dims.c(group)].map(|column| &u[column..][..dims.state]);
            advance(state, (&decays, &given), directions, y);
        }
    }
    y
}

/// Turns the state of a group before a token into the one after it, and adds its part to the result.
#[multiversion(targets = "simd")]
fn advance(state: &mut [f32], (decays, given): (&[f32], &[f32]), [b, c]: [&[f32]; 2], y: &mut [f32]) {
    for ((state, b), c) in state.chunks_exact_mut(y.len()).zip(b).zip(c) {
        for (((state, decay), given), y) in state.iter_mut().zip(decays).zip(given).zip(y.iter_mut()) {
            *state = decay * *state + given * b;
            *y += *state * c;
        }
    }
}
