//! The results of a scan, chunk by chunk.

use multiversion::multiversion;

use super::chunks::{CHUNK, Chunk, Inputs};
use super::decays::{Decays, scale_heads, scale_state, weigh};
use crate::element::Element;
use crate::product::{Matrix, add_product, product_into};

/// Returns the result, rows of all heads, each element rounded once.
pub(crate) fn forward<T: Element>(inputs: Inputs<'_>) -> Vec<T> {
    run(inputs, None)
}

/// Returns the result, rows of all heads, and the states after the last token of each sequence:
/// `[sequences, groups, state, heads of the group * head_dim]`.
pub fn forward_with_state(inputs: Inputs<'_>) -> (Vec<f32>, Vec<f32>) {
    let mut states = Vec::with_capacity(inputs.dims.batch * inputs.dims.width() * inputs.dims.state);
    let y = run(inputs, Some(&mut states));
    (y, states)
}

/// Returns the result, and appends the states after the last tokens to `states`.
fn run<T: Element>(inputs: Inputs<'_>, mut states: Option<&mut Vec<f32>>) -> Vec<T> {
    let dims = inputs.dims;
    let (width, wide, channels) = (dims.width(), dims.group_width(), dims.channels());
    let mut y = vec![T::rounded(0.0); dims.rows() * width];
    let mut decays = Decays::new(dims.group_heads());
    let (mut scores, mut weights) = (vec![0f32; CHUNK * CHUNK], vec![0f32; CHUNK * CHUNK]);
    let mut state = vec![0f32; dims.state * wide];
    // Sums of several products, which are rounded at the end.
    let [mut sums, mut scratch] = [(); 2].map(|()| vec![0f32; CHUNK * wide]);
    for (batch, group) in dims.parts() {
        for chunk in dims.chunks(batch) {
            let Chunk { first, len, .. } = chunk;
            let (scores, weights) = (&mut scores[..len * len], &mut weights[..len * len]);
            decays.fill(&inputs, group, chunk);
            let [b, c] = inputs.directions(group, chunk);
            let x = &inputs.u[first * channels + dims.x(group)..];
            let sums = &mut sums[..len * wide];
            product_into(scores, len, c, b.transposed());
            if chunk.index > 0 {
                product_into(&mut scratch, wide, c, Matrix::new(&state, dims.state, wide));
                scale_heads(dims.heads_of(chunk), &decays.enter, (&scratch, wide), (sums, wide));
            } else {
                sums.fill(0.0);
            }
            for index in 0..dims.group_heads() {
                weigh(&decays, index, len, scores, weights);
                let column = index * dims.head_dim;
                let x = Matrix::strided(&x[column..], len, dims.head_dim, channels);
                add_product(&mut sums[column..], wide, Matrix::new(weights, len, len), x);
            }
            add_skip(&inputs, group, chunk, sums, &mut y[first * width + dims.x(group)..]);
            if !chunk.is_last || states.is_some() {
                advance(&inputs, group, chunk, &decays, &mut state, &mut scratch);
            }
        }
        states.iter_mut().for_each(|states| states.extend(&state));
    }
    y
}

/// Turns the state before a chunk into the one after it.
pub(super) fn advance(
    inputs: &Inputs<'_>,
    group: usize,
    chunk: Chunk,
    decays: &Decays,
    state: &mut [f32],
    scratch: &mut [f32],
) {
    let dims = inputs.dims;
    let (wide, channels) = (dims.group_width(), dims.channels());
    let x = &inputs.u[chunk.first * channels + dims.x(group)..];
    scale_heads(dims.heads_of(chunk), &decays.give, (x, channels), (scratch, wide));
    if chunk.index == 0 {
        state.fill(0.0);
    } else {
        scale_state(state, &decays.pass, dims.head_dim);
    }
    let [b, _] = inputs.directions(group, chunk);
    add_product(state, wide, b.transposed(), Matrix::new(scratch, chunk.len, wide));
}

/// Writes the rows of a chunk: `D x` and the sums of its products, `[len, channels of the group]`.
#[multiversion(targets = "simd")]
fn add_skip<T: Element>(inputs: &Inputs<'_>, group: usize, chunk: Chunk, sums: &[f32], y: &mut [T]) {
    let (dims, wide) = (inputs.dims, inputs.dims.group_width());
    let skip = &inputs.skip[group * dims.group_heads()..][..dims.group_heads()];
    for (t, sums) in sums.chunks_exact(wide).enumerate() {
        let x = &inputs.u[(chunk.first + t) * dims.channels() + dims.x(group)..][..wide];
        let y = &mut y[t * dims.width()..][..wide];
        let (x, sums) = (x.chunks_exact(dims.head_dim), sums.chunks_exact(dims.head_dim));
        for (((x, sums), y), skip) in x.zip(sums).zip(y.chunks_exact_mut(dims.head_dim)).zip(skip) {
            for ((y, sum), x) in y.iter_mut().zip(sums).zip(x) {
                *y = T::rounded(sum + skip * x);
            }
        }
    }
}
