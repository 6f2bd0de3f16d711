//! Products of bfloat16 operands: against a sum in double precision, and to the bit in the order of AVX512-BF16, which
//! processors without it have too, or of AMX. With AMX, all tests also run with AVX512-BF16.

use std::io::Write;
use std::sync::Once;

use half::bf16;
use pipewright_kernel::bf16_product::testing::{run_without_instruction, run_without_tiles};
use pipewright_kernel::bf16_product::{
    Instruction, add_product, instruction, leave_out_amx, product, product_in_single, product_into,
    product_with_update, rounded_product_into,
};
use pipewright_kernel::product::Matrix;
use rayon::ThreadPoolBuilder;

/// An operand with some elements between its rows.
struct Operand {
    elements: Vec<bf16>,
    rows: usize,
    columns: usize,
    row_stride: usize,
    is_transposed: bool,
}

impl Operand {
    /// Returns numbers between -4 and 4 that have all bits of bfloat16's mantissa.
    fn new([rows, columns]: [usize; 2], gap: usize, is_transposed: bool, seed: u32) -> Self {
        let [rows, columns] = if is_transposed { [columns, rows] } else { [rows, columns] };
        let mut state = seed;
        let mut number = || {
            // The constants of Numerical Recipes' generator of 32 bits.
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            bf16::from_f32(((state >> 8) as f32 / (1 << 23) as f32 - 1.0) * 4.0)
        };
        let row_stride = columns + gap;
        let elements = (0..rows * row_stride).map(|_| number()).collect();
        Self { elements, rows, columns, row_stride, is_transposed }
    }

    fn matrix(&self) -> Matrix<'_, bf16> {
        let matrix = Matrix::strided(&self.elements, self.rows, self.columns, self.row_stride);
        if self.is_transposed { matrix.transposed() } else { matrix }
    }

    fn at(&self, row: usize, column: usize) -> f32 {
        let [row, column] = if self.is_transposed { [column, row] } else { [row, column] };
        self.elements[row * self.row_stride + column].to_f32()
    }
}

/// Returns the sum of an element's products in the order of the instruction. A product of two numbers of 8
/// bits is exact in single precision.
fn in_order(instruction: Instruction, a: &Operand, b: &Operand, [row, column, inner]: [usize; 3]) -> f32 {
    let term = |i: usize| if i < inner { a.at(row, i) * b.at(i, column) } else { 0.0 };
    match instruction {
        Instruction::Avx512Bf16 => (0..inner).step_by(2).fold(0.0, |sum, i| (sum + term(i + 1)) + term(i)),
        Instruction::Amx => (0..inner).step_by(32).fold(0.0, |sum, start| {
            let [even, odd] =
                [0, 1].map(|first| (start + first..start + 32).step_by(2).fold(0.0, |sum, i| sum + term(i)));
            sum + (even + odd)
        }),
    }
}

/// Checks a product of `[m, k]` and `[k, n]` in all orientations.
fn check([m, n, k]: [usize; 3], gap: usize) {
    let order = available().unwrap_or(Instruction::Avx512Bf16);
    for (left, right) in [(false, false), (false, true), (true, false), (true, true)] {
        let (a, b) = (Operand::new([m, k], gap, left, 1), Operand::new([k, n], gap, right, 2));
        let single = product_in_single(a.matrix(), b.matrix());
        let rounded = product(a.matrix(), b.matrix());
        assert_eq!((single.len(), rounded.len()), (m * n, m * n));
        let stride = n + gap;
        let mut sums = vec![0.5; m * stride];
        add_product(&mut sums, stride, a.matrix(), b.matrix());
        let mut set = vec![0.5; m * stride];
        product_into(&mut set, stride, a.matrix(), b.matrix());
        let mut set_rounded = vec![bf16::ONE; m * stride];
        rounded_product_into(&mut set_rounded, stride, a.matrix(), b.matrix());
        for index in 0..m * n {
            let (row, column) = (index / n, index % n);
            let case = format!("{m} {n} {k}, {left} {right}: [{row}, {column}]");
            let terms: Vec<f64> =
                (0..k).map(|i| f64::from(a.at(row, i)) * f64::from(b.at(i, column))).collect();
            let (expected, magnitude) =
                (terms.iter().sum::<f64>(), terms.iter().map(|x| x.abs()).sum::<f64>());
            let found = single[index];
            // Each of `k` additions rounds a sum that is at most the magnitude.
            let bound = magnitude * f64::from(f32::EPSILON) * k as f64;
            assert!((f64::from(found) - expected).abs() <= bound, "{case}: {found} instead of {expected}");
            let expected = in_order(order, &a, &b, [row, column, k]);
            assert_eq!(found.to_bits(), expected.to_bits(), "{case}, {order}");
            assert_eq!(rounded[index].to_bits(), bf16::from_f32(found).to_bits(), "{case}");
            assert_eq!(set[row * stride + column], found, "{case}");
            assert_eq!(set_rounded[row * stride + column], rounded[index], "{case}");
            let added = sums[row * stride + column];
            assert!((added - (found + 0.5)).abs() <= bound as f32 + f32::EPSILON, "{case}: {added}");
        }
        let gaps = sums.chunks(stride.max(1)).chain(set.chunks(stride.max(1)));
        assert!(gaps.flat_map(|row| &row[n.min(row.len())..]).all(|&gap| gap == 0.5), "{m} {n} {k}");
        let mut gaps = set_rounded.chunks(stride.max(1)).flat_map(|row| &row[n.min(row.len())..]);
        assert!(gaps.all(|&gap| gap == bf16::ONE), "{m} {n} {k}");
    }
}

/// Returns the instruction; says once which instructions are not tested.
fn available() -> Option<Instruction> {
    static SAID: Once = Once::new();
    let skipped = match instruction() {
        None => "the instructions AVX512-BF16 and AMX, which are",
        Some(Instruction::Avx512Bf16) => "AMX, which is",
        Some(Instruction::Amx) => return instruction(),
    };
    SAID.call_once(|| {
        let _said = writeln!(std::io::stderr(), "SKIPPED: the bits of {skipped} not available");
    });
    instruction()
}

/// Without this test, a processor's instruction could stay unused and each comparison of bits be skipped.
#[test]
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
fn the_instruction_is_available_if_the_kernel_lists_it() {
    use pipewright_kernel::bf16_product::testing::{are_tiles_hidden, is_hidden};

    let file = std::fs::read_to_string("/proc/cpuinfo").expect("Linux describes the processor");
    let flags = file.lines().find(|line| line.starts_with("flags")).expect("processors have flags");
    let has = |flag: &str| flags.split_whitespace().any(|listed| listed == flag);
    let has_registers = ["avx512f", "avx512bw", "avx512vl", "avx512_bf16"].into_iter().all(has);
    let has_tiles = ["amx_tile", "amx_bf16"].into_iter().all(has);
    let expected = match (has_registers && !is_hidden(), has_tiles && !are_tiles_hidden()) {
        (false, _) => None,
        (true, false) => Some(Instruction::Avx512Bf16),
        (true, true) => Some(Instruction::Amx),
    };
    assert_eq!(instruction(), expected);
}

#[test]
fn a_process_that_has_used_amx_keeps_using_it() {
    check([2, 2, 2], 0);
    assert_eq!(leave_out_amx(), instruction() != Some(Instruction::Amx));
}

#[test]
fn products_have_tests_without_the_instruction() {
    run_without_instruction("");
}

#[test]
fn products_have_tests_with_avx_without_the_instruction_of_amx() {
    if available() == Some(Instruction::Amx) {
        run_without_tiles("");
    }
}

#[test]
fn products_equal_their_definition() {
    // Around the tiles of 14 x 32 and 32 x 32, the 16 lanes and the pairs.
    for m in [1, 2, 13, 14, 15, 17, 29, 33] {
        for n in [1, 15, 17, 31, 32, 33, 65] {
            for k in [1, 2, 3, 31, 33, 64] {
                check([m, n, k], 0);
            }
        }
    }
    check([5, 40, 301], 0);
}

#[test]
fn rows_may_be_apart() {
    check([15, 33, 7], 3);
    check([28, 64, 34], 5);
}

#[test]
fn empty_products_are_zero() {
    for size in [[0, 3, 2], [3, 0, 2], [3, 2, 0], [0, 0, 0]] {
        check(size, 0);
    }
}

#[test]
#[should_panic(expected = "at most usize::MAX elements")]
fn a_size_that_wraps_is_refused() {
    product(Matrix::new(&[], 1 << (usize::BITS - 1), 0), Matrix::new(&[], 0, 2));
}

#[test]
fn any_number_of_rows_may_have_no_columns() {
    let (rows, none) = (Matrix::new(&[], usize::MAX, 0), Matrix::new(&[], 0, 0));
    assert_eq!((product(rows, none), product_in_single(none, rows.transposed())), (vec![], vec![]));
}

#[test]
fn every_number_of_rows_has_its_tile() {
    (1..=32).for_each(|m| check([m, 34, 5], 1));
}

#[test]
fn rows_have_the_same_bits_on_any_number_of_threads() {
    rows_are_equal([300, 200, 150]);
    // Fewer panels of columns than threads.
    rows_are_equal([2400, 20, 160]);
}

/// Compares products of `[m, k]` and `[k, n]`, without and with an update, on several threads and in parts.
fn rows_are_equal([m, n, k]: [usize; 3]) {
    const RANK: usize = 16;
    let (a, b) = (Operand::new([m, k], 0, false, 3), Operand::new([k, n], 0, false, 4));
    let [c, d] = [[m, RANK], [RANK, n]].map(|shape| {
        Operand::new(shape, 0, false, 5).elements.into_iter().map(bf16::to_f32).collect::<Vec<_>>()
    });
    let products = |rows: &[bf16], of_update: &[f32]| {
        let rows = Matrix::new(rows, rows.len() / k, k);
        let updated = product_with_update(rows, b.matrix(), [of_update, &d], RANK);
        (product_in_single(rows, b.matrix()), updated)
    };
    let on_threads = |threads: usize| {
        let pool = ThreadPoolBuilder::new().num_threads(threads).build().expect("threads");
        pool.install(|| products(&a.elements, &c))
    };
    let whole = on_threads(1);
    for threads in [2, 3] {
        assert_eq!(on_threads(threads), whole, "{threads} threads");
    }
    // As microbatches of other sizes.
    for size in [1, 17, 100] {
        let parts = a.elements.chunks(size * k).zip(c.chunks(size * RANK));
        let (plain, updated): (Vec<_>, Vec<_>) =
            parts.map(|(rows, of_update)| products(rows, of_update)).unzip();
        assert!((plain.concat(), updated.concat()) == whole, "in parts of {size} rows");
    }
}

/// Returns the product of two numbers, in single precision.
fn multiply(a: f32, b: f32) -> f32 {
    let [a, b] = [a, b].map(|x| [bf16::from_f32(x)]);
    product_in_single(Matrix::new(&a, 1, 1), Matrix::new(&b, 1, 1))[0]
}

#[test]
fn numbers_that_are_not_finite_stay_so() {
    assert_eq!(multiply(f32::INFINITY, 2.0), f32::INFINITY);
    assert_eq!(multiply(f32::INFINITY, -2.0), f32::NEG_INFINITY);
    assert!(multiply(f32::INFINITY, 0.0).is_nan());
    assert!(multiply(f32::NAN, 1.0).is_nan());
    assert_eq!(multiply(3e38, 3e38), f32::INFINITY);
    let (infinite, one) = ([bf16::INFINITY], [bf16::ONE]);
    assert_eq!(product(Matrix::new(&infinite, 1, 1), Matrix::new(&one, 1, 1)), [bf16::INFINITY]);
    let not_a_number = product(Matrix::new(&[bf16::NAN], 1, 1), Matrix::new(&one, 1, 1));
    assert!(not_a_number[0].is_nan());
}

#[test]
fn subnormal_numbers_count_as_zero() {
    assert_eq!(multiply(1e-39, 1e10), 0.0);
    assert_eq!(multiply(1e-30, 1e-10), 0.0);
    assert!(multiply(1.5e-38, 1.0) > 1e-38);
}
