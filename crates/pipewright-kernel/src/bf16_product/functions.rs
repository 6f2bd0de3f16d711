//! The products, with the instruction or without it.

use half::bf16;

use super::instruction::Instruction;
use super::widened::{self, Left};
#[cfg(target_arch = "x86_64")]
use super::{
    available::{Available, leave_out_tiles},
    blocked::{self, Target},
    few_rows,
    right::Right,
    tile::{Output, Update},
};
use crate::half::Half;
use crate::product::{Join, Matrix, Sums, assert_fits};
use crate::quantised::QuantisedOperand;
#[cfg(target_arch = "x86_64")]
use crate::{
    product::product_size,
    simd::{fresh, written},
};

/// Returns the instruction that the functions of this module use, the same one from the first product or [`leave_out_amx`] on.
/// Without it, they widen their operands.
pub fn instruction() -> Option<Instruction> {
    #[cfg(target_arch = "x86_64")]
    return Available::detect().map(Available::instruction);
    #[cfg(not(target_arch = "x86_64"))]
    return None;
}

/// Turns off AMX for this process, so that its products have the same bits on every processor. Returns `false` if a product has
/// used AMX before; the process then keeps using it.
pub fn leave_out_amx() -> bool {
    #[cfg(target_arch = "x86_64")]
    return leave_out_tiles();
    #[cfg(not(target_arch = "x86_64"))]
    return true;
}

/// Computes `a b` into new memory, in row-major order. Each element is rounded once.
pub fn product(a: Matrix<'_, bf16>, b: Matrix<'_, bf16>) -> Vec<bf16> {
    #[cfg(target_arch = "x86_64")]
    if let Some(available) = Available::detect() {
        // SAFETY: the function writes each element.
        return unsafe { new_memory(available, a, b, Output::Rounded, None) };
    }
    bf16::narrowed(&product_in_single(a, b))
}

/// Computes `a b + c d` into new memory, in row-major order: `a` and `b` in bfloat16, and `c` and `d` in single
/// precision. `c` and `d` are in row-major order, and their inner dimension is `rank`. Each element is rounded
/// once.
pub fn product_with_update(
    a: Matrix<'_, bf16>,
    b: Matrix<'_, bf16>,
    [c, d]: [&[f32]; 2],
    rank: usize,
) -> Vec<bf16> {
    assert_eq!([c.len(), d.len()], [a.rows * rank, rank * b.columns], "sizes of the products agree");
    #[cfg(target_arch = "x86_64")]
    if let Some(available) = Available::detect() {
        let update = Update { rank, left: c.as_ptr(), right: d.as_ptr(), stride: b.columns };
        // SAFETY: the function writes each element, and the assertion bounds the operands of the update.
        return unsafe { new_memory(available, a, b, Output::Rounded, Some(update)) };
    }
    let sums = widen(a, b, widened::product_in_single);
    widened::rounded_with_update(sums, Matrix::new(c, a.rows, rank), Matrix::new(d, rank, b.columns))
}

/// Computes `a b` into new memory in single precision, in row-major order.
pub fn product_in_single(a: Matrix<'_, bf16>, b: Matrix<'_, bf16>) -> Vec<f32> {
    #[cfg(target_arch = "x86_64")]
    if let Some(available) = Available::detect() {
        // SAFETY: the function writes each element.
        return unsafe { new_memory(available, a, b, Output::Single, None) };
    }
    widen(a, b, widened::product_in_single)
}

/// Computes `out = a b`, in rows that begin `row_stride` elements apart.
pub fn product_into(out: &mut [f32], row_stride: usize, a: Matrix<'_, bf16>, b: Matrix<'_, bf16>) {
    #[cfg(target_arch = "x86_64")]
    if let Some(available) = Available::detect() {
        return into_rows(available, (out, row_stride), a, Right::Held(b), Output::Single);
    }
    widen(a, b, |a, b| a.join(Join::Replace, (out, row_stride), b));
}

/// Like [`product_into`], with each element rounded once.
pub fn rounded_product_into(out: &mut [bf16], row_stride: usize, a: Matrix<'_, bf16>, b: Matrix<'_, bf16>) {
    #[cfg(target_arch = "x86_64")]
    if let Some(available) = Available::detect() {
        return into_rows(available, (out, row_stride), a, Right::Held(b), Output::Rounded);
    }
    let columns = b.columns;
    assert_fits(out.len(), a.rows, columns, row_stride);
    for (row, elements) in product(a, b).chunks_exact(columns.max(1)).enumerate() {
        out[row * row_stride..][..columns].copy_from_slice(elements);
    }
}

/// Computes `out += a b`, in rows that begin `row_stride` elements apart. Without an inner dimension, nothing is added.
pub fn add_product(out: &mut [f32], row_stride: usize, a: Matrix<'_, bf16>, b: Matrix<'_, bf16>) {
    #[cfg(target_arch = "x86_64")]
    if let Some(available) = Available::detect() {
        return into_rows(available, (out, row_stride), a, Right::Held(b), Output::Added);
    }
    widen(a, b, |a, b| a.join(Join::Add, (out, row_stride), b));
}

/// Computes `a b`, and adds `c d` of an inner dimension if they are given, for a quantised `b`. Returns `None` without the
/// instruction. The operands `c` and `d` have as many rows and columns as the result.
pub(crate) fn quantised_product(
    a: Matrix<'_, bf16>,
    b: QuantisedOperand<'_>,
    update: Option<([&[f32]; 2], usize)>,
) -> Option<Vec<bf16>> {
    #[cfg(target_arch = "x86_64")]
    {
        let available = Available::detect()?;
        let columns = b.columns();
        let update = update.map(|([c, d], rank)| {
            assert_eq!([c.len(), d.len()], [a.rows * rank, rank * columns], "sizes of the products agree");
            Update { rank, left: c.as_ptr(), right: d.as_ptr(), stride: columns }
        });
        let size = a.rows.checked_mul(columns).expect("a product has at most usize::MAX elements");
        let mut out = fresh::<bf16>(size);
        let target = Target { output: Output::Rounded(out.as_mut_ptr().cast()), row_stride: columns, update };
        // SAFETY: `out` has an element for each of the result, and each is written. The assertion bounds the
        // operands of the update.
        unsafe {
            multiply(available, a, Right::Quantised(b), target);
            Some(written(out))
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        let _ = (a, b, update);
        None
    }
}

/// Computes `a b` for a quantised `b`, in rows that begin `row_stride` elements apart. Returns `false` without the
/// instruction.
pub(crate) fn quantised_product_into(
    sums: &mut Sums<'_, bf16>,
    row_stride: usize,
    a: Matrix<'_, bf16>,
    b: QuantisedOperand<'_>,
) -> bool {
    #[cfg(target_arch = "x86_64")]
    if let Some(available) = Available::detect() {
        let b = Right::Quantised(b);
        match sums {
            Sums::Single(out) => into_rows(available, (out, row_stride), a, b, Output::Single),
            Sums::Rounded(out) => into_rows(available, (out, row_stride), a, b, Output::Rounded),
            Sums::Added(out) => into_rows(available, (out, row_stride), a, b, Output::Added),
        }
        return true;
    }
    let _ = (sums, row_stride, a, b);
    false
}

/// Returns `a b` in row-major order.
///
/// # Safety
/// The output that `output` makes must write each element and read none. The operands of the update must have
/// as many rows and columns as the result.
#[cfg(target_arch = "x86_64")]
unsafe fn new_memory<T>(
    available: Available,
    a: Matrix<'_, bf16>,
    b: Matrix<'_, bf16>,
    output: fn(*mut T) -> Output,
    update: Option<Update>,
) -> Vec<T> {
    let mut out = fresh::<T>(product_size(a, b));
    let target = Target { output: output(out.as_mut_ptr().cast()), row_stride: b.columns, update };
    // SAFETY: `out` has an element for each of the result, and each is written, as the caller says.
    unsafe {
        multiply(available, a, Right::Held(b), target);
        written(out)
    }
}

/// Computes `a b` in rows of `out` that begin `row_stride` elements apart.
#[cfg(target_arch = "x86_64")]
fn into_rows<T>(
    available: Available,
    (out, row_stride): (&mut [T], usize),
    a: Matrix<'_, bf16>,
    b: Right<'_>,
    output: fn(*mut T) -> Output,
) {
    assert_fits(out.len(), a.rows, b.columns(), row_stride);
    let target = Target { output: output(out.as_mut_ptr()), row_stride, update: None };
    // SAFETY: the assertion bounds every element of the result.
    unsafe { multiply(available, a, b, target) };
}

/// Computes `a b`.
///
/// # Safety
/// As [`blocked::multiply`].
#[cfg(target_arch = "x86_64")]
unsafe fn multiply(available: Available, a: Matrix<'_, bf16>, b: Right<'_>, target: Target) {
    // SAFETY: as the caller says.
    unsafe {
        match b {
            Right::Held(b) if few_rows::is_faster(available.instruction(), a, b) => {
                few_rows::multiply(a, b, target);
            }
            b => blocked::multiply(available, a, b, target),
        }
    }
}

/// Calls `multiply` with the operands in single precision.
fn widen<R>(a: Matrix<'_, bf16>, b: Matrix<'_, bf16>, multiply: impl FnOnce(Left<'_>, Matrix<'_>) -> R) -> R {
    let (left, right) = (a.widened_lines(), b.widened_lines());
    multiply(Left::new(a.with_lines(&left)), b.with_lines(&right))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::numbers::{Kind, Random, numbers};
    use crate::product::{flushed, sum_of_pairs};
    use crate::testing::{run_without_instruction, run_without_tiles};

    #[test]
    fn updates_are_added_before_the_sum_is_rounded() {
        for (m, n, k, rank) in
            [(1, 1, 2, 1), (15, 33, 6, 4), (29, 70, 40, 16), (14, 32, 8, 0), (16, 40, 6, 130)]
        {
            let [a, b] = [(m * k, 1), (k * n, 2)].map(|(len, seed)| bf16::narrowed(&numbers(len, seed)));
            let (c, d) = (numbers(m * rank, 3), numbers(rank * n, 4));
            let (left, right) = (Matrix::new(&a, m, k), Matrix::new(&b, k, n));
            let found = bf16::widened(&product_with_update(left, right, [&c, &d], rank));
            let whole = product_in_single(left, right);
            for (index, found) in found.into_iter().enumerate() {
                let (row, column) = (index / n, index % n);
                let update: f32 = (0..rank).map(|i| c[row * rank + i] * d[i * n + column]).sum();
                let expected = whole[index] + update;
                // Half of the last place of bfloat16, and the rounding of the sums.
                assert!((found - expected).abs() <= expected.abs() / 256.0 + 1e-5, "{found} {expected}");
            }
        }
    }

    /// Both paths are compared with the definition: this one, and in a process without the instruction the other one. With AMX,
    /// whose order is another one, processes without it compare both.
    #[test]
    fn products_have_the_bits_of_the_definition() {
        if instruction() == Some(Instruction::Amx) {
            return;
        }
        for kind in [Kind::Usual, Kind::Tiny, Kind::Least, Kind::Any] {
            for size in [
                [1, 1, 1],
                [3, 33, 2],
                [30, 40, 4],
                [15, 17, 31],
                [16, 50, 64],
                [5, 20, 1031],
                [0, 3, 2],
                [2, 2, 0],
                // Few rows.
                [1, 200, 31],
                [8, 161, 18],
                [12, 130, 31],
                [13, 161, 18],
                [16, 128, 64],
                // Two strips of columns.
                if cfg!(miri) { [1, 1, 2] } else { [8, 1100, 18] },
                if cfg!(miri) { [1, 1, 2] } else { [15, 700, 18] },
                // Several strips of rows, whose sums several threads add.
                if cfg!(miri) { [1, 1, 2] } else { [520, 70, 514] },
            ] {
                check(size, kind, true);
                check(size, kind, false);
            }
        }
    }

    /// Compares products of `[m, k]` and `[k, n]` with the definition.
    fn check([m, n, k]: [usize; 3], kind: Kind, is_transposed: bool) {
        let mut random = Random::new((m * n * k) as u64);
        let mut halves =
            |count| -> Vec<bf16> { (0..count).map(|_| bf16::from_f32(random.number(kind))).collect() };
        let (a, b) = (halves(m * (k + 3)), halves((n + 5) * (k + 5)));
        let left = Matrix::strided(&a, m, k, k + 3);
        let right = if is_transposed {
            Matrix::strided(&b, n, k, k + 5).transposed()
        } else {
            Matrix::strided(&b, k, n, n + 5)
        };
        let sum = |row: usize, column: usize| {
            sum_of_pairs(0.0, k, |k| [left.at(row, k).to_f32(), right.at(k, column).to_f32()])
        };
        let sums: Vec<f32> = (0..m * n).map(|i| sum(i / n, i % n)).collect();
        assert_same(&product_in_single(left, right), &sums, kind);

        let mut old = bf16::widened(&halves(m * (n + 2)));
        old.iter_mut().step_by(3).for_each(|old| *old = -0.0);
        let mut added = old.clone();
        add_product(&mut added, n + 2, left, right);
        let mut expected = old;
        let is_added = |i: &usize| k > 0 && i % (n + 2) < n;
        for i in (0..expected.len()).filter(is_added) {
            expected[i] += sums[i / (n + 2) * n + i % (n + 2)];
        }
        assert_same(&added, &expected, kind);

        let [c, d] = [3 * m, 3 * n].map(|count| bf16::widened(&halves(count)));
        let updated = |i: usize| {
            let products = (0..3).map(|rank| (c[i / n * 3 + rank], d[rank * n + i % n]));
            flushed(products.fold(sums[i], |sum, (c, d)| c.mul_add(d, sum)))
        };
        let expected: Vec<f32> = (0..m * n).map(updated).collect();
        let expected = bf16::widened(&bf16::narrowed(&expected));
        let found = product_with_update(left, right, [&c, &d], 3);
        assert_same(&bf16::widened(&found), &expected, kind);
    }

    /// Compares bits. Any NaN is like another.
    fn assert_same(found: &[f32], expected: &[f32], kind: Kind) {
        assert_eq!(found.len(), expected.len());
        for (index, (found, expected)) in found.iter().zip(expected).enumerate() {
            let are_equal = found.to_bits() == expected.to_bits() || found.is_nan() && expected.is_nan();
            assert!(are_equal, "{kind:?}: element {index} is {found:e} instead of {expected:e}");
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri starts no processes")]
    fn all_without_the_instruction() {
        run_without_instruction("bf16_product::functions");
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri starts no processes")]
    fn all_with_avx_without_the_instruction_of_amx() {
        if instruction() == Some(Instruction::Amx) {
            run_without_tiles("bf16_product::functions");
        }
    }
}
