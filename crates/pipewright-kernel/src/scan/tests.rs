//! Tests of the chunked scan against the recurrence.

use super::*;

/// A scan that stops and continues from its state gives each token the result that it has in the whole
/// sequence.
#[test]
#[cfg_attr(miri, ignore = "takes minutes under Miri")]
fn a_state_continues_a_sequence() {
    let dims = Dims { batch: 1, sequence: 140, heads: 4, head_dim: 2, groups: 2, state: 3 };
    let numbers = |count: usize, scale: f32| {
        (0..count).map(|i| ((i * 37) % 19) as f32 / 19.0 * scale).collect::<Vec<f32>>()
    };
    let (u, steps) = (numbers(140 * dims.channels(), 1.0), numbers(4 * 140, 0.3));
    let part = |tokens: std::ops::Range<usize>| {
        let steps = steps.chunks(140).flat_map(|head| head[tokens.clone()].to_vec()).collect::<Vec<f32>>();
        let u = u[tokens.start * dims.channels()..tokens.end * dims.channels()].to_vec();
        (Dims { sequence: tokens.len(), ..dims }, u, steps)
    };
    let inputs = |(dims, u, steps): &(Dims, Vec<f32>, Vec<f32>), run: &mut dyn FnMut(Inputs<'_>)| {
        let (rates, skip) = (&[-0.5, -1.0, -2.0, -30.0], &[1.0, 0.5, 0.0, 2.0]);
        run(Inputs { dims: *dims, u, steps, rates, skip, documents: None });
    };
    let mut expected = Vec::new();
    inputs(&part(0..140), &mut |inputs| expected = forward::<f32>(inputs));
    // Sequences of whole chunks and of others.
    for first in [1, 63, 64, 65, 100, 130] {
        let (mut found, mut states) = (Vec::new(), Vec::new());
        inputs(&part(0..first), &mut |inputs| (found, states) = forward_with_state(inputs));
        assert_eq!(states.len(), 4 * 2 * 3);
        for rest in [first..first + 1, first + 1..140] {
            inputs(&part(rest), &mut |inputs| found.extend(step(inputs, &mut states)));
        }
        let close = found.iter().zip(&expected).all(|(a, b)| (a - b).abs() <= 1e-5 * b.abs().max(1.0));
        assert!(found.len() == expected.len() && close, "{first}");
    }
}

/// Rates at which `exp` of a running sum is 0 and `exp` of its negative would overflow.
#[test]
#[cfg_attr(miri, ignore = "takes minutes under Miri")]
fn fast_decays_stay_finite() {
    let dims = Dims { batch: 1, sequence: 130, heads: 1, head_dim: 2, groups: 1, state: 2 };
    let (u, steps) = (vec![0.5; 130 * dims.channels()], vec![20.0; 130]);
    let inputs = Inputs { dims, u: &u, steps: &steps, rates: &[-16.0], skip: &[0.0], documents: None };
    let y: Vec<f32> = forward(inputs);
    assert!(y.iter().all(|y| (y - 20.0 * 0.5 * 0.5).abs() < 1e-4), "only the token itself is left: {y:?}");
    let found = backward(inputs, &vec![1.0; y.len()]);
    assert!(found.u.iter().chain(&found.steps).chain(&found.rates).all(|d| d.is_finite()));
}
