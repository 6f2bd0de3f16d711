//! Operations on whole vectors with AVX-512, in single precision and in bfloat16.
//!
//! In the loops that the compiler makes of [`swiglu`](crate::swiglu) and [`rms_norm`](crate::rms_norm), each
//! operation needs the result of the one before, so the processor finds few operations that it can run at the
//! same time. The functions here apply each operation to [`VECTORS`] independent vectors before the next one,
//! so it can run about as many operations at the same time. Conversion between precisions takes two or three
//! instructions for a vector.
//!
//! Each result has the bits of those loops: the operations are the same, in the same order. One product is
//! contracted with a subtraction. It is exact, so this does not change the bits.

use std::arch::x86_64::*;
use std::mem::MaybeUninit;

use half::bf16;

use super::bf16_instructions::{Instructions, round};
use super::exp::{COEFFICIENTS, LARGEST, LN_2_HIGH, LN_2_LOW, ROUND, SMALLEST};
use super::simd::{LANES, fold};

/// Vectors to which each operation is applied before the next one.
const VECTORS: usize = 4;

/// The elements of these vectors.
pub(crate) const BLOCK: usize = VECTORS * LANES;

/// Bytes.
const CACHE_LINE: usize = 64;

/// Rows of a norm in bfloat16 whose sums are computed at the same time. In single precision, reading the rows
/// takes longer than adding, and rows are read faster one after another.
const HALF_ROWS: usize = 4;

pub(crate) type Vectors = [__m512; VECTORS];

/// An element type in memory.
pub trait Stored: Copy {
    /// Returns [`BLOCK`] elements in single precision.
    ///
    /// # Safety
    /// The elements from `at` on must exist, and the processor must have the instructions.
    unsafe fn load(at: *const Self) -> Vectors;

    /// Writes [`BLOCK`] elements, each rounded to this type.
    ///
    /// # Safety
    /// As [`Stored::load`]; the elements may be uninitialised.
    unsafe fn store(at: *mut Self, elements: Vectors);
}

impl Stored for f32 {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
    unsafe fn load(at: *const Self) -> Vectors {
        let mut elements = [_mm512_setzero_ps(); VECTORS];
        for (i, elements) in elements.iter_mut().enumerate() {
            // SAFETY: the caller has these elements.
            *elements = unsafe { _mm512_loadu_ps(at.add(i * LANES)) };
        }
        elements
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
    unsafe fn store(at: *mut Self, elements: Vectors) {
        for (i, elements) in elements.into_iter().enumerate() {
            // SAFETY: the caller has memory for these elements.
            unsafe { _mm512_storeu_ps(at.add(i * LANES), elements) };
        }
    }
}

impl Stored for bf16 {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
    unsafe fn load(at: *const Self) -> Vectors {
        let mut elements = [_mm512_setzero_ps(); VECTORS];
        for (i, elements) in elements.iter_mut().enumerate() {
            // SAFETY: the caller has these elements.
            let words = _mm512_cvtepu16_epi32(unsafe { _mm256_loadu_si256(at.add(i * LANES).cast()) });
            *elements = _mm512_castsi512_ps(_mm512_slli_epi32::<16>(words));
        }
        elements
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
    unsafe fn store(at: *mut Self, elements: Vectors) {
        for (i, &[low, high]) in elements.as_chunks::<2>().0.iter().enumerate() {
            // SAFETY: the caller has memory for these elements.
            unsafe { _mm512_storeu_si512(at.add(2 * i * LANES).cast(), round(low, high)) };
        }
    }
}

/// Writes `silu(gate) up` for the first elements, and returns how many.
pub(crate) fn swiglu<T: Stored>(_: Instructions, gate: &[T], up: &[T], y: &mut [MaybeUninit<T>]) -> usize {
    assert_eq!((gate.len(), gate.len()), (up.len(), y.len()), "all have the same length");
    // SAFETY: the processor has the instructions, and the slices have the same length.
    unsafe { swiglu_blocks(gate, up, y.as_mut_ptr().cast()) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
unsafe fn swiglu_blocks<T: Stored>(gate: &[T], up: &[T], y: *mut T) -> usize {
    let whole = gate.len() - gate.len() % BLOCK;
    for start in (0..whole).step_by(BLOCK) {
        // SAFETY: the block ends at `whole` or before.
        unsafe {
            let gates = T::load(gate.as_ptr().add(start));
            let activated = mul(mul(gates, sigmoid(gates)), T::load(up.as_ptr().add(start)));
            T::store(y.add(start), activated);
        }
    }
    whole
}

/// Writes the gradients of `gate` and `up` for the first elements, and returns how many.
pub(crate) fn swiglu_backward<T: Stored, G: Stored>(
    _: Instructions,
    (gate, up, gradient): (&[T], &[T], &[G]),
    d_gate: &mut [MaybeUninit<T>],
    d_up: &mut [MaybeUninit<T>],
) -> usize {
    assert_eq!((gate.len(), gate.len()), (up.len(), gradient.len()), "all have the same length");
    assert_eq!((gate.len(), gate.len()), (d_gate.len(), d_up.len()), "all have the same length");
    let outputs = [d_gate.as_mut_ptr().cast(), d_up.as_mut_ptr().cast()];
    // SAFETY: the processor has the instructions, and the slices have the same length.
    unsafe { swiglu_backward_blocks(gate, up, gradient, outputs) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
unsafe fn swiglu_backward_blocks<T: Stored, G: Stored>(
    gate: &[T],
    up: &[T],
    gradient: &[G],
    [d_gate, d_up]: [*mut T; 2],
) -> usize {
    let whole = gate.len() - gate.len() % BLOCK;
    for start in (0..whole).step_by(BLOCK) {
        // SAFETY: the block ends at `whole` or before.
        unsafe {
            let gates = T::load(gate.as_ptr().add(start));
            let s = sigmoid(gates);
            let g = G::load(gradient.as_ptr().add(start));
            T::store(d_up.add(start), mul(mul(g, gates), s));
            let one = splat(1.0);
            let slope = add(one, mul(gates, sub(one, s)));
            let ups = T::load(up.as_ptr().add(start));
            T::store(d_gate.add(start), mul(mul(mul(g, ups), s), slope));
        }
    }
    whole
}

/// Returns the logistic function of each element.
#[inline]
#[target_feature(enable = "avx512f")]
fn sigmoid(x: Vectors) -> Vectors {
    let one = splat(1.0);
    div(one, add(one, exp(negate(x))))
}

/// Returns `e^x` of each element, with the bits of [`exp`](crate::exp::exp).
#[inline]
#[target_feature(enable = "avx512f")]
fn exp(x: Vectors) -> Vectors {
    let (largest, smallest) = (splat(LARGEST), splat(SMALLEST));
    // If one operand is NaN, these return the second.
    let clamped = max(smallest, min(largest, x));
    let round = splat(ROUND);
    let shifted = add(mul(clamped, splat(std::f32::consts::LOG2_E)), round);
    let n = sub(shifted, round);
    // `n` has 8 bits and the constant 9, so the product is exact.
    let high = minus_product(clamped, n, splat(LN_2_HIGH));
    let r = sub(high, mul(n, splat(LN_2_LOW)));
    let mut p = splat(COEFFICIENTS[0]);
    for coefficient in &COEFFICIENTS[1..] {
        p = add(mul(p, r), splat(*coefficient));
    }
    let result = mul(add(add(mul(mul(p, r), r), r), splat(1.0)), powers(shifted));
    bounded(result, x)
}

/// Returns `2^n` for the integers in the low bits of `shifted`.
#[inline]
#[target_feature(enable = "avx512f")]
fn powers(shifted: Vectors) -> Vectors {
    let mut powers = shifted;
    for power in &mut powers {
        let exponent = _mm512_slli_epi32::<23>(_mm512_castps_si512(*power));
        let one = _mm512_set1_epi32(1f32.to_bits().cast_signed());
        *power = _mm512_castsi512_ps(_mm512_add_epi32(exponent, one));
    }
    powers
}

/// Returns infinity where `x` is above [`LARGEST`], zero where it is below [`SMALLEST`], and otherwise
/// `result`.
#[inline]
#[target_feature(enable = "avx512f")]
fn bounded(mut result: Vectors, x: Vectors) -> Vectors {
    let infinity = _mm512_set1_ps(f32::INFINITY);
    for (result, x) in result.iter_mut().zip(x) {
        let is_above = _mm512_cmp_ps_mask::<_CMP_GT_OQ>(x, _mm512_set1_ps(LARGEST));
        let is_not_below = _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(x, _mm512_set1_ps(SMALLEST));
        let with_infinity = _mm512_mask_mov_ps(*result, is_above, infinity);
        *result = _mm512_maskz_mov_ps(is_not_below, with_infinity);
    }
    result
}

/// Defines an operation on pairs of vectors.
macro_rules! pairwise {
    ($($name:ident, $instruction:ident);* $(;)?) => {$(
        #[inline]
        #[target_feature(enable = "avx512f")]
        fn $name(mut a: Vectors, b: Vectors) -> Vectors {
            for (a, b) in a.iter_mut().zip(b) {
                *a = $instruction(*a, b);
            }
            a
        }
    )*};
}

pairwise! {
    add, _mm512_add_ps;
    sub, _mm512_sub_ps;
    mul, _mm512_mul_ps;
    div, _mm512_div_ps;
    min, _mm512_min_ps;
    max, _mm512_max_ps;
}

/// Returns `a - b c`, rounded once.
#[inline]
#[target_feature(enable = "avx512f")]
fn minus_product(mut a: Vectors, b: Vectors, c: Vectors) -> Vectors {
    for (a, (b, c)) in a.iter_mut().zip(b.into_iter().zip(c)) {
        *a = _mm512_fnmadd_ps(b, c, *a);
    }
    a
}

#[inline]
#[target_feature(enable = "avx512f")]
fn negate(mut x: Vectors) -> Vectors {
    let sign = _mm512_set1_epi32((-0f32).to_bits().cast_signed());
    for x in &mut x {
        *x = _mm512_castsi512_ps(_mm512_xor_si512(_mm512_castps_si512(*x), sign));
    }
    x
}

#[inline]
#[target_feature(enable = "avx512f")]
fn splat(number: f32) -> Vectors {
    [_mm512_set1_ps(number); VECTORS]
}

/// The inputs of the backward of a norm.
#[derive(Clone, Copy)]
pub(crate) struct NormGradient<'a, T> {
    pub(crate) x: &'a [T],
    pub(crate) weight: &'a [T],
    pub(crate) scales: &'a [f32],
    pub(crate) gradient: &'a [T],
}

/// Writes the normalised rows and their scales. The width is a multiple of [`BLOCK`].
pub(crate) fn norm<T: Stored>(
    _: Instructions,
    x: &[T],
    weight: &[T],
    epsilon: f32,
    y: &mut [MaybeUninit<T>],
    scales: &mut [f32],
) {
    let width = weight.len();
    assert!(width.is_multiple_of(BLOCK), "the width is a multiple of a block");
    assert_eq!((x.len(), y.len()), (scales.len() * width, x.len()), "rows are whole");
    let (x, y) = (x.as_ptr(), y.as_mut_ptr().cast::<T>());
    // SAFETY: the processor has the instructions, and each scale has a row in both slices.
    unsafe {
        if size_of::<T>() == size_of::<f32>() {
            norm_groups::<T, 1>(x, weight, epsilon, y, scales);
        } else {
            norm_groups::<T, HALF_ROWS>(x, weight, epsilon, y, scales);
        }
    }
}

/// Computes a row for each scale, `R` rows at the same time.
///
/// # Safety
/// The processor must have the instructions, and both pointers must point to as many rows as there are scales.
unsafe fn norm_groups<T: Stored, const R: usize>(
    x: *const T,
    weight: &[T],
    epsilon: f32,
    y: *mut T,
    scales: &mut [f32],
) {
    let width = weight.len();
    let (groups, rest) = scales.as_chunks_mut::<R>();
    let rest_start = groups.len() * R * width;
    // SAFETY: as the caller says.
    unsafe {
        for (group, scales) in groups.iter_mut().enumerate() {
            let start = group * R * width;
            norm_rows(x.add(start), weight, epsilon, y.add(start), scales);
        }
        for (row, scale) in rest.iter_mut().enumerate() {
            let start = rest_start + row * width;
            norm_rows(x.add(start), weight, epsilon, y.add(start), std::array::from_mut(scale));
        }
    }
}

/// Computes `R` rows.
///
/// # Safety
/// The processor must have the instructions, and both pointers must point to `R` rows.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
unsafe fn norm_rows<T: Stored, const R: usize>(
    x: *const T,
    weight: &[T],
    epsilon: f32,
    y: *mut T,
    scales: &mut [f32; R],
) {
    let width = weight.len();
    let mut sums = [_mm512_setzero_ps(); R];
    for start in (0..width).step_by(BLOCK) {
        for (row, sum) in sums.iter_mut().enumerate() {
            // SAFETY: the block ends in the row.
            for x in unsafe { T::load(x.add(row * width + start)) } {
                *sum = _mm512_add_ps(*sum, _mm512_mul_ps(x, x));
            }
        }
    }
    for (scale, sum) in scales.iter_mut().zip(sums) {
        *scale = 1.0 / (total(sum) / width as f32 + epsilon).sqrt();
    }
    for start in (0..width).step_by(BLOCK) {
        // SAFETY: the block ends in the weight and in each row.
        unsafe {
            let weight = T::load(weight.as_ptr().add(start));
            for (row, &scale) in scales.iter().enumerate() {
                let at = row * width + start;
                prefetch(x, R * width + at);
                T::store(y.add(at), mul(mul(T::load(x.add(at)), splat(scale)), weight));
            }
        }
    }
}

/// Writes the gradient of `x`, and adds the gradient of the weight to `dw` if it is wanted. The width is a
/// multiple of [`BLOCK`].
pub(crate) fn norm_backward<T: Stored>(
    _: Instructions,
    inputs: NormGradient<'_, T>,
    dx: &mut [MaybeUninit<T>],
    dw: Option<&mut [f32]>,
) {
    let NormGradient { x, weight, scales, gradient } = inputs;
    let width = weight.len();
    assert!(width.is_multiple_of(BLOCK), "the width is a multiple of a block");
    assert!(dw.as_ref().is_none_or(|dw| dw.len() == width), "the gradient has the weight's width");
    assert_eq!(
        (x.len(), gradient.len(), dx.len()),
        (scales.len() * width, x.len(), x.len()),
        "rows are whole"
    );
    let (inputs, dx) = ([x.as_ptr(), gradient.as_ptr()], dx.as_mut_ptr().cast::<T>());
    let dw = dw.map(<[f32]>::as_mut_ptr);
    // SAFETY: the processor has the instructions, and each scale has a row in all slices.
    unsafe {
        if size_of::<T>() == size_of::<f32>() {
            norm_backward_groups::<T, 1>(inputs, weight, scales, dx, dw);
        } else {
            norm_backward_groups::<T, HALF_ROWS>(inputs, weight, scales, dx, dw);
        }
    }
}

/// Computes a row for each scale, `R` rows at the same time.
///
/// # Safety
/// As [`norm_groups`].
unsafe fn norm_backward_groups<T: Stored, const R: usize>(
    inputs: [*const T; 2],
    weight: &[T],
    scales: &[f32],
    dx: *mut T,
    dw: Option<*mut f32>,
) {
    let width = weight.len();
    let (groups, rest) = scales.as_chunks::<R>();
    let rest_start = groups.len() * R * width;
    // SAFETY: as the caller says.
    unsafe {
        for (group, scales) in groups.iter().enumerate() {
            let start = group * R * width;
            norm_backward_rows(inputs.map(|input| input.add(start)), weight, scales, dx.add(start), dw);
        }
        for (row, scale) in rest.iter().enumerate() {
            let start = rest_start + row * width;
            let scales = std::array::from_ref(scale);
            norm_backward_rows(inputs.map(|input| input.add(start)), weight, scales, dx.add(start), dw);
        }
    }
}

/// Computes `R` rows.
///
/// # Safety
/// The processor must have the instructions, and all pointers must point to `R` rows.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
unsafe fn norm_backward_rows<T: Stored, const R: usize>(
    [x, gradient]: [*const T; 2],
    weight: &[T],
    scales: &[f32; R],
    dx: *mut T,
    dw: Option<*mut f32>,
) {
    let width = weight.len();
    let mut sums = [_mm512_setzero_ps(); R];
    for start in (0..width).step_by(BLOCK) {
        // SAFETY: the block ends in the weight and in each row.
        unsafe {
            let weight = T::load(weight.as_ptr().add(start));
            for (row, sum) in sums.iter_mut().enumerate() {
                let at = row * width + start;
                for term in mul(mul(T::load(gradient.add(at)), weight), T::load(x.add(at))) {
                    *sum = _mm512_add_ps(*sum, term);
                }
            }
        }
    }
    let mut along = [0.0; R];
    for ((along, sum), scale) in along.iter_mut().zip(sums).zip(scales) {
        *along = scale * scale * (total(sum) / width as f32);
    }
    for start in (0..width).step_by(BLOCK) {
        // SAFETY: the block ends in the weight, in its gradient and in each row.
        unsafe {
            let weight = T::load(weight.as_ptr().add(start));
            let weight_gradient = dw.map(|dw| dw.add(start));
            let mut sums = weight_gradient.map_or_else(|| splat(0.0), |at| f32::load(at));
            for (row, (&scale, &along)) in scales.iter().zip(&along).enumerate() {
                let at = row * width + start;
                prefetch(x, R * width + at);
                prefetch(gradient, R * width + at);
                let (x, g, scale) = (T::load(x.add(at)), T::load(gradient.add(at)), splat(scale));
                T::store(dx.add(at), mul(scale, sub(mul(g, weight), mul(x, splat(along)))));
                if weight_gradient.is_some() {
                    sums = add(sums, mul(mul(g, x), scale));
                }
            }
            if let Some(at) = weight_gradient {
                f32::store(at, sums);
            }
        }
    }
}

/// Prefetches the block at `index`, which need not exist. The processor does not predict that the next rows
/// follow, because several rows are read at the same time.
#[inline]
fn prefetch<T>(start: *const T, index: usize) {
    for line in (0..BLOCK).step_by(CACHE_LINE / size_of::<T>()) {
        // SAFETY: each processor has the instruction, and it may be given any address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(start.wrapping_add(index + line).cast()) };
    }
}

/// Returns the sum of the lanes, added pairwise.
#[inline]
#[target_feature(enable = "avx512f")]
fn total(sum: __m512) -> f32 {
    let mut lanes = [0f32; LANES];
    // SAFETY: the array has the elements of one register.
    unsafe { _mm512_storeu_ps(lanes.as_mut_ptr(), sum) };
    fold(lanes, |a, b| a + b)
}
