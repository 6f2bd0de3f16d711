//! Operations whose results are written to memory that is not initialised yet, on sizes that are not a
//! multiple of any vector's. They are compared with their definitions, and are small enough for Miri.

use half::bf16;
use pipewright_kernel::cross_entropy::Smoothing;
use pipewright_kernel::half::Half;
use pipewright_kernel::{cross_entropy, rms_norm, swiglu, vocabulary_part};

const WIDTH: usize = 5;
const ROWS: usize = 3;

/// Returns `count` numbers between -1 and 1.
fn numbers(count: usize, seed: usize) -> Vec<f32> {
    (0..count).map(|i| ((i * 37 + seed * 11) % 64) as f32 / 32.0 - 1.0).collect()
}

/// Returns numbers in bfloat16, and the same numbers in single precision.
fn both_precisions(count: usize, seed: usize) -> (Vec<bf16>, Vec<f32>) {
    let narrow = bf16::narrowed(&numbers(count, seed).iter().map(|x| x * 1.7).collect::<Vec<_>>());
    let wide = bf16::widened(&narrow);
    (narrow, wide)
}

fn check(found: &[f32], expected: impl Fn(usize) -> f64) {
    for (i, found) in found.iter().enumerate() {
        let expected = expected(i);
        assert!((f64::from(*found) - expected).abs() < 1e-5, "element {i}: {found} instead of {expected}");
    }
}

/// Returns the row of element `i` in single precision, widened.
fn row(values: &[f32], i: usize) -> Vec<f64> {
    values[i / WIDTH * WIDTH..][..WIDTH].iter().copied().map(f64::from).collect()
}

fn sigmoid(x: f32) -> f64 {
    1.0 / (1.0 + f64::from(-x).exp())
}

#[test]
fn swiglu_is_its_definition() {
    let [gate, up, g] = [1, 2, 3].map(|seed| numbers(WIDTH * ROWS, seed));
    let of = |values: &[f32], i: usize| f64::from(values[i]);
    check(&swiglu::forward(&gate, &up), |i| of(&gate, i) * sigmoid(gate[i]) * of(&up, i));
    let (d_gate, d_up) = swiglu::backward(&gate, &up, &g);
    let derivative = |i: usize| sigmoid(gate[i]) * (1.0 + of(&gate, i) * (1.0 - sigmoid(gate[i])));
    check(&d_gate, |i| of(&g, i) * of(&up, i) * derivative(i));
    check(&d_up, |i| of(&g, i) * of(&gate, i) * sigmoid(gate[i]));
}

#[test]
fn rms_norm_is_its_definition() {
    let (x, weight, g) = (numbers(WIDTH * ROWS, 4), numbers(WIDTH, 5), numbers(WIDTH * ROWS, 6));
    let scale = |i: usize| {
        let mean_square = row(&x, i).iter().map(|x| x * x).sum::<f64>() / WIDTH as f64;
        1.0 / (mean_square + 1e-6).sqrt()
    };
    let weight_of = |i: usize| f64::from(weight[i % WIDTH]);
    let (y, scales) = rms_norm::forward(&x, &weight, 1e-6);
    check(&y, |i| f64::from(x[i]) * scale(i) * weight_of(i));
    let (dx, dw) = rms_norm::backward(&x, &weight, &scales, &g);
    let along = |i: usize| {
        let products =
            row(&x, i).into_iter().zip(row(&g, i)).zip(&weight).map(|((x, g), w)| x * g * f64::from(*w));
        products.sum::<f64>() / WIDTH as f64 * scale(i) * scale(i)
    };
    check(&dx, |i| scale(i) * (f64::from(g[i]) * weight_of(i) - f64::from(x[i]) * along(i)));
    let column = |i: usize| (0..ROWS).map(move |row| row * WIDTH + i);
    check(&dw, |i| column(i).map(|i| f64::from(g[i]) * f64::from(x[i]) * scale(i)).sum());
    assert_eq!(rms_norm::input_gradient(&x, &weight, &scales, &g), dx);
    assert_eq!(rms_norm::weight_gradient(&x, &scales, &g, WIDTH), dw);
}

/// Compares the loss and its gradient with their definition, for targets that share this part with all ids.
fn check_cross_entropy(share: f64) {
    let (logits, targets) = (numbers(WIDTH * ROWS, 7), [1, 4, 0]);
    let smoothing = Smoothing::new(share, WIDTH);
    let sum = |i: usize| row(&logits, i).into_iter().map(f64::exp).sum::<f64>();
    let probability = |i: usize| {
        let of_target = if targets[i / WIDTH] == i % WIDTH { 1.0 - share } else { 0.0 };
        of_target + share / WIDTH as f64
    };
    let (loss, normalisers) = cross_entropy::forward(&logits, &targets, WIDTH, smoothing);
    let loss_of = |row: usize| {
        let compared = (row * WIDTH..(row + 1) * WIDTH).map(|i| probability(i) * f64::from(logits[i]));
        sum(row * WIDTH).ln() - compared.sum::<f64>()
    };
    check(&[loss], |_| (0..ROWS).map(loss_of).sum::<f64>() / ROWS as f64);
    let mut d_logits = logits.clone();
    cross_entropy::backward(&mut d_logits, &targets, &normalisers, smoothing, 2.0);
    check(&d_logits, |i| 2.0 * (f64::from(logits[i]).exp() / sum(i) - probability(i)) / ROWS as f64);
}

#[test]
fn cross_entropy_is_its_definition() {
    check_cross_entropy(0.0);
    check_cross_entropy(0.1);
    check_cross_entropy(1.0);
}

#[test]
fn a_share_of_0_smooths_nothing() {
    assert_eq!(Smoothing::new(0.0, WIDTH), Smoothing::NONE);
}

#[test]
fn rows_without_a_target_do_not_count_in_the_cross_entropy() {
    let mut logits = numbers(WIDTH * ROWS, 7);
    // Such a row may have any logits.
    logits[WIDTH..WIDTH + 3].copy_from_slice(&[f32::NAN, f32::INFINITY, 1e30]);
    let targets = [1, cross_entropy::IGNORED_TARGET, 0];
    let counted = [&logits[..WIDTH], &logits[2 * WIDTH..]].concat();
    let (loss, normalisers) = cross_entropy::forward(&logits, &targets, WIDTH, Smoothing::NONE);
    let (expected, expected_normalisers) = cross_entropy::forward(&counted, &[1, 0], WIDTH, Smoothing::NONE);
    assert_eq!(
        (loss, normalisers[0], normalisers[2]),
        (expected, expected_normalisers[0], expected_normalisers[1])
    );
    let (mut d_logits, mut d_counted) = (logits.clone(), counted);
    cross_entropy::backward(&mut d_logits, &targets, &normalisers, Smoothing::NONE, 2.0);
    cross_entropy::backward(&mut d_counted, &[1, 0], &expected_normalisers, Smoothing::NONE, 2.0);
    assert_eq!(d_logits, [&d_counted[..WIDTH], &[0.0; WIDTH], &d_counted[WIDTH..]].concat());
    let none = [cross_entropy::IGNORED_TARGET; ROWS];
    let (loss, normalisers) = cross_entropy::forward(&logits, &none, WIDTH, Smoothing::NONE);
    assert_eq!(loss, 0.0);
    cross_entropy::backward(&mut logits, &none, &normalisers, Smoothing::NONE, 2.0);
    assert_eq!(logits, [0.0; WIDTH * ROWS]);
}

#[test]
#[cfg_attr(miri, ignore = "Miri rounds `ln` at random")]
fn cross_entropy_of_bf16_is_rounded_once() {
    let targets = [1, cross_entropy::IGNORED_TARGET, 4];
    for seed in 0..20 {
        let smoothing = Smoothing::new(if seed < 10 { 0.0 } else { 0.1 }, WIDTH);
        let (mut logits, mut wide) = both_precisions(WIDTH * ROWS, seed);
        let (loss, normalisers) = cross_entropy::forward(&wide, &targets, WIDTH, smoothing);
        let found = cross_entropy::forward_bf16(&logits, &targets, WIDTH, smoothing);
        assert_eq!(found, (loss, normalisers.clone()));
        cross_entropy::backward(&mut wide, &targets, &normalisers, smoothing, 1.4);
        cross_entropy::backward_bf16(&mut logits, &targets, &normalisers, smoothing, 1.4);
        assert_eq!(logits, bf16::narrowed(&wide));
    }
}

#[test]
#[cfg_attr(miri, ignore = "Miri rounds `ln` at random")]
fn parts_of_a_vocabulary_in_bf16_are_rounded_once() {
    // The second row has its target in another part.
    let columns = [1, usize::MAX, 4];
    let earlier = [0.5, 0.25, f32::NEG_INFINITY, 0.0, -1.0, 2.0];
    let gradient = [0.7, -0.3, 1.1, 0.25, 0.13, -0.6];
    for seed in 0..20 {
        let smoothing = Smoothing::new(if seed < 10 { 0.0 } else { 0.1 }, WIDTH);
        let (mut logits, mut wide) = both_precisions(WIDTH * ROWS, seed);
        let later = vocabulary_part::forward(&wide, &columns, &earlier, smoothing);
        assert_eq!(vocabulary_part::forward_bf16(&logits, &columns, &earlier, smoothing), later);
        let d_earlier =
            vocabulary_part::backward(&mut wide, &columns, (&earlier, &later), smoothing, &gradient);
        let found =
            vocabulary_part::backward_bf16(&mut logits, &columns, (&earlier, &later), smoothing, &gradient);
        assert_eq!((logits, found), (bf16::narrowed(&wide), d_earlier));
    }
}
