//! The Mamba-2 mixer on bfloat16 against the mixer in single precision on the same numbers.

use half::bf16;
use pipewright_kernel::half::Half;
use pipewright_kernel::mamba::{
    Gradients, Inputs, gated, gated_backward, gated_backward_bf16, gated_bf16, scanned, scanned_backward,
    scanned_backward_bf16, scanned_bf16,
};
use pipewright_kernel::{convolution, scan};

/// Returns `count` numbers from -1 to 1.
fn numbers(count: usize, seed: usize) -> Vec<f32> {
    (0..count).map(|i| ((i * 37 + seed * 11) % 257) as f32 / 128.0 - 1.0).collect()
}

/// Compares the mixer on bfloat16 with the mixer on the same numbers in single precision, for sequences of
/// so many rows.
fn check(sequences: usize, sequence: usize, documents: Option<&[u32]>) {
    let (heads, head_dim, groups, state, taps) = (4, 3, 2, 5, 4);
    let scan = scan::Dims { batch: sequences, sequence, heads, head_dim, groups, state };
    let (width, channels, rows) = (scan.width(), scan.channels(), scan.rows());
    let stride = width + channels + heads;
    let [weight, bias] = [channels * taps, channels].map(|count| numbers(count, 1));
    let [dt_bias, log_rates, skip] = [2, 3, 4].map(|seed| numbers(heads, seed));
    let norm = numbers(width, 5);
    let [projected, gradient] =
        [(rows * stride, 6), (rows * width, 7)].map(|(count, seed)| bf16::narrowed(&numbers(count, seed)));
    let [wide_projected, wide_gradient] = [&projected, &gradient].map(|narrow| bf16::widened(narrow));
    let convolution = convolution::Dims { sequence, channels, taps, stride, start: width };
    let steps = scan::Steps { heads, stride, start: width + channels, limits: (0.0, f32::INFINITY) };
    let half = Inputs {
        projected: &projected,
        convolution,
        scan,
        steps,
        weight: &weight,
        bias: Some(&bias),
        dt_bias: &dt_bias,
        log_rates: &log_rates,
        skip: &skip,
        norm: &norm,
        epsilon: 1e-5,
        documents,
    };
    let Inputs { weight, bias, dt_bias, log_rates, skip, norm, epsilon, .. } = half;
    let single = Inputs {
        projected: &wide_projected,
        convolution,
        scan,
        steps,
        weight,
        bias,
        dt_bias,
        log_rates,
        skip,
        norm,
        epsilon,
        documents,
    };

    let y = scanned_bf16(half);
    assert_eq!(y, bf16::narrowed(&scanned(single)));
    let wide_y = bf16::widened(&y);
    let ((out, scales), (expected, expected_scales)) = (gated_bf16(half, &y), gated(single, &wide_y));
    assert_eq!((out, &scales), (bf16::narrowed(&expected), &expected_scales));
    let found = gated_backward_bf16(half, &y, &scales, &gradient);
    let expected = gated_backward(single, &wide_y, &scales, &wide_gradient);
    let (found, expected) = (scanned_backward_bf16(half, found), scanned_backward(single, expected));
    let projected = bf16::narrowed(&expected.projected);
    assert_eq!(found, Gradients { projected, others: expected.others });
}

#[test]
fn results_and_gradients_of_bf16_are_rounded_once() {
    check(2, 7, None);
    // Several chunks; the last one is shorter.
    check(1, 150, None);
    let documents: Vec<u32> = (0..140).map(|t| u32::from(t >= 30) + u32::from(t >= 71)).collect();
    check(2, 70, Some(&documents));
}
