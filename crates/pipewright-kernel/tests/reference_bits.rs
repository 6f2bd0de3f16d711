//! The bits of operations on whole slices, compared with their formulas element by element in single
//! precision: lengths that are not a multiple of any vector's, infinities, NaN and subnormal numbers. The
//! result does not depend on which instructions the processor has, so the formulas are the same everywhere.

use half::bf16;
use pipewright_kernel::half::Half;
use pipewright_kernel::testing::run_without_instruction;
use pipewright_kernel::{addition, relu_squared, rms_norm, swiglu};

/// Lengths of rows and slices; blocks have 32 and 64 elements.
const LENGTHS: [usize; 10] = [1, 15, 16, 31, 33, 64, 65, 192, 511, 1063];

const SPECIAL: [f32; 14] = [
    f32::NAN,
    f32::INFINITY,
    f32::NEG_INFINITY,
    0.0,
    -0.0,
    1e-40,
    -1e-45,
    f32::MIN_POSITIVE,
    f32::MAX,
    f32::MIN,
    88.5,
    -88.5,
    -87.31,
    1e-38,
];

/// Which numbers inputs have.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    /// From 1e-3 to 10.
    Usual,
    /// Some are special.
    Any,
    /// All results are subnormal.
    Tiny,
}

const KINDS: [Kind; 3] = [Kind::Usual, Kind::Any, Kind::Tiny];

fn numbers(count: usize, seed: usize, kind: Kind) -> Vec<f32> {
    let number = |i: usize| {
        let number = ((i * 37 + seed * 11) % 257) as f32 / 128.0 - 1.003;
        match kind {
            Kind::Any if (i + seed).is_multiple_of(7) => SPECIAL[(i / 7 + seed) % SPECIAL.len()],
            Kind::Tiny => number * 1e-39,
            _ => number * [0.1, 1.0, 10.0][(i + seed) % 3],
        }
    };
    (0..count).map(number).collect()
}

/// Returns numbers in bfloat16, and the same numbers in single precision.
fn half_numbers(count: usize, seed: usize, kind: Kind) -> (Vec<bf16>, Vec<f32>) {
    let half: Vec<bf16> = numbers(count, seed, kind).into_iter().map(bf16::from_f32).collect();
    let single = half.iter().map(|x| x.to_f32()).collect();
    (half, single)
}

/// Checks the bits. The bits of NaN depend on the order of operands, which a compiler may choose.
fn check(found: &[f32], expected: &[f32], place: &str) {
    assert_eq!(found.len(), expected.len(), "{place}");
    for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
        let are_equal = found.to_bits() == expected.to_bits() || found.is_nan() && expected.is_nan();
        assert!(are_equal, "{place}: element {i} is {found:e} instead of {expected:e}");
    }
}

fn check_half(found: &[bf16], expected: &[f32], place: &str) {
    let [found, expected]: [Vec<f32>; 2] = [
        found.iter().map(|x| x.to_f32()).collect(),
        expected.iter().map(|&x| bf16::from_f32(x).to_f32()).collect(),
    ];
    check(&found, &expected, place);
}

/// Runs `check` for all lengths and kinds of numbers.
fn each(check: impl Fn(usize, Kind, &str)) {
    for kind in KINDS {
        for length in LENGTHS {
            check(length, kind, &format!("{length} elements, {kind:?}"));
        }
    }
}

/// The exponential of this crate.
fn exp(x: f32) -> f32 {
    let clamped = if x > 88.0 { 88.0 } else { x };
    let clamped = if clamped < -87.3 { -87.3 } else { clamped };
    let shifted = clamped * std::f32::consts::LOG2_E + 12_582_912.0;
    let n = shifted - 12_582_912.0;
    let r = clamped - n * 0.693_359_4 - n * -2.121_944_4e-4;
    let mut p = 1.987_569_1e-4;
    for coefficient in [1.398_2e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5] {
        p = p * r + coefficient;
    }
    let power = f32::from_bits((shifted.to_bits() << 23).wrapping_add(1f32.to_bits()));
    let result = (p * r * r + r + 1.0) * power;
    let result = if x > 88.0 { f32::INFINITY } else { result };
    if x < -87.3 { 0.0 } else { result }
}

fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// Returns the sum in 16 lanes, which are added pairwise.
fn sum(terms: impl Iterator<Item = f32>) -> f32 {
    let mut lanes = [0f32; 16];
    for (i, term) in terms.enumerate() {
        lanes[i % 16] += term;
    }
    for width in [8, 4, 2, 1] {
        for lane in 0..width {
            lanes[lane] += lanes[lane + width];
        }
    }
    lanes[0]
}

#[test]
fn bits_of_gated_activations() {
    let forward = |gate: &[f32], up: &[f32]| -> Vec<f32> {
        gate.iter().zip(up).map(|(&gate, up)| gate * sigmoid(gate) * up).collect()
    };
    let backward = |gate: &[f32], up: &[f32], g: &[f32]| -> (Vec<f32>, Vec<f32>) {
        let both = |((&gate, up), g): ((&f32, &f32), &f32)| {
            let s = sigmoid(gate);
            (g * up * s * (1.0 + gate * (1.0 - s)), g * gate * s)
        };
        gate.iter().zip(up).zip(g).map(both).unzip()
    };
    each(|length, kind, place| {
        let [gate, up, g] = [1, 2, 3].map(|seed| numbers(length, seed, kind));
        check(&swiglu::forward(&gate, &up), &forward(&gate, &up), place);
        let (d_gate, d_up) = swiglu::backward(&gate, &up, &g);
        let expected = backward(&gate, &up, &g);
        check(&d_gate, &expected.0, place);
        check(&d_up, &expected.1, place);

        let [(gate, wide_gate), (up, wide_up), (g, wide_g)] =
            [1, 2, 3].map(|seed| half_numbers(length, seed, kind));
        check_half(&swiglu::forward_bf16(&gate, &up), &forward(&wide_gate, &wide_up), place);
        let expected = backward(&wide_gate, &wide_up, &wide_g);
        let from_half = swiglu::backward_bf16(&gate, &up, &g);
        let from_single = swiglu::backward_bf16_from_single(&gate, &up, &wide_g);
        for (d_gate, d_up) in [from_half, from_single] {
            check_half(&d_gate, &expected.0, place);
            check_half(&d_up, &expected.1, place);
        }
    });
}

/// Rows of a norm, which may be computed four at a time.
const ROWS: usize = 6;

/// The results of a norm's forward and backward.
struct Norm {
    y: Vec<f32>,
    scales: Vec<f32>,
    dx: Vec<f32>,
    dw: Vec<f32>,
}

fn norm(x: &[f32], weight: &[f32], g: &[f32]) -> Norm {
    let width = weight.len();
    let mut norm = Norm { y: vec![], scales: vec![], dx: vec![], dw: vec![0.0; width] };
    for (x, g) in x.chunks_exact(width).zip(g.chunks_exact(width)) {
        let scale = 1.0 / (sum(x.iter().map(|x| x * x)) / width as f32 + 1e-6).sqrt();
        norm.scales.push(scale);
        norm.y.extend(x.iter().zip(weight).map(|(x, w)| x * scale * w));
        let all = || x.iter().zip(g).zip(weight);
        let along = scale * scale * (sum(all().map(|((x, g), w)| g * w * x)) / width as f32);
        norm.dx.extend(all().map(|((x, g), w)| scale * (g * w - x * along)));
        norm.dw.iter_mut().zip(x).zip(g).for_each(|((dw, x), g)| *dw += g * x * scale);
    }
    norm
}

#[test]
fn bits_of_norms() {
    each(|width, kind, place| {
        let (x, weight, g) =
            (numbers(ROWS * width, 4, kind), numbers(width, 5, kind), numbers(ROWS * width, 6, kind));
        let expected = norm(&x, &weight, &g);
        let (y, scales) = rms_norm::forward(&x, &weight, 1e-6);
        check(&y, &expected.y, place);
        check(&scales, &expected.scales, place);
        let (dx, dw) = rms_norm::backward(&x, &weight, &scales, &g);
        check(&dx, &expected.dx, place);
        check(&dw, &expected.dw, place);
        check(&rms_norm::input_gradient(&x, &weight, &scales, &g), &expected.dx, place);
        check(&rms_norm::weight_gradient(&x, &scales, &g, width), &expected.dw, place);

        let [(x, wide_x), (g, wide_g)] = [4, 6].map(|seed| half_numbers(ROWS * width, seed, kind));
        let (weight, wide_weight) = half_numbers(width, 5, kind);
        let expected = norm(&wide_x, &wide_weight, &wide_g);
        let (y, scales) = rms_norm::forward_bf16(&x, &weight, 1e-6);
        check_half(&y, &expected.y, place);
        check(&scales, &expected.scales, place);
        let (dx, dw) = rms_norm::backward_bf16(&x, &weight, &scales, &g);
        check_half(&dx, &expected.dx, place);
        check(&dw, &expected.dw, place);
        check_half(&rms_norm::input_gradient_bf16(&x, &weight, &scales, &g), &expected.dx, place);
        check(&rms_norm::weight_gradient_bf16(&x, &scales, &g, width), &expected.dw, place);
    });
}

#[test]
fn bits_of_additions() {
    each(|length, kind, place| {
        let [(a, wide_a), (b, wide_b)] = [1, 2].map(|seed| half_numbers(length, seed, kind));
        let expected: Vec<f32> = wide_a.iter().zip(&wide_b).map(|(a, b)| a + b).collect();
        check_half(&addition::add_bf16(&a, &b), &expected, place);
        let mut sums = a;
        addition::add_assign_bf16(&mut sums, &b);
        check_half(&sums, &expected, place);
    });
}

#[test]
fn bits_of_squared_rectifiers() {
    each(|length, kind, place| {
        let ((x, wide_x), (g, wide_g)) = (half_numbers(length, 1, kind), half_numbers(length, 2, kind));
        // NaN stays NaN.
        let rectified = |x: f32| if x <= 0.0 { 0.0 } else { x };
        let expected: Vec<f32> = wide_x.iter().map(|&x| rectified(x) * rectified(x)).collect();
        check_half(&relu_squared::forward_bf16(&x), &expected, place);
        let expected: Vec<f32> = wide_x.iter().zip(&wide_g).map(|(&x, g)| 2.0 * g * rectified(x)).collect();
        check_half(&relu_squared::backward_bf16(&x, &g), &expected, place);
        check_half(&relu_squared::backward_bf16_from_single(&x, &wide_g), &expected, place);
    });
}

#[test]
fn bits_of_conversions() {
    each(|length, kind, place| {
        let numbers = numbers(length, 1, kind);
        check_half(&bf16::narrowed(&numbers), &numbers, place);
        let (half, single) = half_numbers(length, 2, kind);
        check(&bf16::widened(&half), &single, place);
    });
}

/// Returns numbers with these distances between their bit patterns, which begin with the edges of rounding.
fn patterns(step: usize) -> Vec<f32> {
    let edges = [
        0x0000_0001,
        0x807f_ffff,
        0x7f7f_ffff,
        0x7f80_0000,
        0xff80_0000,
        0x7f80_0001,
        0xffc0_0000,
        0x3f80_8000,
        0x3f81_8000,
        0x3f80_8001,
        0x0080_0000,
        0x0000_8000,
        0x007f_8000,
    ];
    edges.into_iter().chain((0..=u32::MAX).step_by(step)).map(f32::from_bits).collect()
}

#[test]
#[cfg_attr(miri, ignore = "takes minutes under Miri")]
fn bits_of_roundings() {
    let mut numbers = patterns(65_521 * 7);
    // First with subnormal numbers in some blocks, then without.
    for _ in 0..2 {
        for (number, found) in numbers.iter().zip(bf16::narrowed(&numbers)) {
            let expected = bf16::from_f32(*number);
            assert_eq!(found.to_bits(), expected.to_bits(), "{number} ({:#x})", number.to_bits());
        }
        numbers.retain(|number| !number.is_subnormal());
    }
}

#[test]
#[cfg_attr(miri, ignore = "takes minutes under Miri")]
fn bits_of_sums_of_all_numbers() {
    let mut all: Vec<bf16> = (0..=u16::MAX).map(|bits| bf16::from_bits(bits.wrapping_mul(40_503))).collect();
    for _ in 0..2 {
        for distance in [1, 7, 4_000] {
            let other = [&all[distance..], &all[..distance]].concat();
            let expected: Vec<f32> = all.iter().zip(&other).map(|(a, b)| a.to_f32() + b.to_f32()).collect();
            check_half(&addition::add_bf16(&all, &other), &expected, "all numbers");
        }
        // Sums of these are not subnormal.
        all.retain(|number| number.to_f32().abs() > 1e-30);
    }
}

#[test]
#[cfg_attr(miri, ignore = "Miri starts no processes")]
fn bits_do_not_change_without_the_instruction() {
    run_without_instruction("bits_of");
}
