//! Products of every kernel that the processor has, against their definition in scalar code, to the bit.

use half::bf16;
use rayon::ThreadPoolBuilder;

use super::blocked::Target;
use super::definition::{BLOCK, sum_of_blocks, sum_of_pairs};
use super::functions::multiply;
use super::kernel::Kernel;
use super::matrix::PARALLEL_FROM;
use super::{Join, Matrix, Order, add_product, product, product_into};
use crate::numbers::{Kind, Random};

/// An operand with three elements between its rows.
struct Operand {
    elements: Vec<f32>,
    size: [usize; 2],
    is_transposed: bool,
}

impl Operand {
    fn new([rows, columns]: [usize; 2], is_transposed: bool, number: impl FnMut() -> f32) -> Self {
        let size = if is_transposed { [columns, rows] } else { [rows, columns] };
        let elements = std::iter::repeat_with(number).take(size[0] * (size[1] + 3)).collect();
        Self { elements, size, is_transposed }
    }

    fn matrix(&self) -> Matrix<'_> {
        let [rows, columns] = self.size;
        let matrix = Matrix::strided(&self.elements, rows, columns, columns + 3);
        if self.is_transposed { matrix.transposed() } else { matrix }
    }
}

/// Checks a product of `[m, k]` and `[k, n]` in all orientations.
fn check(order: Order, size: [usize; 3], kind: Kind) {
    for are_transposed in [[false; 2], [false, true], [true, false], [true; 2]] {
        check_oriented(order, size, kind, are_transposed);
    }
}

/// Checks a product with every kernel.
fn check_oriented(order: Order, [m, n, k]: [usize; 3], kind: Kind, are_transposed: [bool; 2]) {
    let mut random = Random::new(((m * 70 + n) * 70 + k) as u64);
    let mut number = || match order {
        Order::Blocks => random.number(kind),
        _ => bf16::from_f32(random.number(kind)).to_f32(),
    };
    let a = Operand::new([m, k], are_transposed[0], &mut number);
    let b = Operand::new([k, n], are_transposed[1], &mut number);
    let stride = n + 2;
    let mut old: Vec<f32> = std::iter::repeat_with(&mut number).take(m * stride).collect();
    old.iter_mut().step_by(7).for_each(|old| *old = -0.0);
    let (left, right) = (a.matrix(), b.matrix());
    let joins: &[Join] = match order {
        Order::Blocks => &[Join::Replace, Join::Add, Join::Continue],
        _ if k <= BLOCK => &[Join::Replace, Join::Add],
        _ => &[Join::Replace],
    };
    for &join in joins {
        let mut expected = old.clone();
        for (row, column) in (0..m).flat_map(|row| (0..n).map(move |column| (row, column))) {
            let factors = |k: usize| [left.at(row, k), right.at(k, column)];
            let sum = &mut expected[row * stride + column];
            *sum = match (order, join) {
                (Order::Blocks, Join::Replace) => sum_of_blocks(None, k, factors),
                (Order::Blocks, Join::Add) => sum_of_blocks(Some(*sum), k, factors),
                (Order::Blocks, Join::Continue) => {
                    (0..k).map(factors).fold(*sum, |sum, [a, b]| a.mul_add(b, sum))
                }
                (_, Join::Add) if k == 0 => *sum,
                (_, Join::Add) => *sum + sum_of_pairs(0.0, k, factors),
                _ => sum_of_pairs(0.0, k, factors),
            };
        }
        for kernel in Kernel::all() {
            let mut out = old.clone();
            let target = Target { start: out.as_mut_ptr(), row_stride: stride, join };
            // SAFETY: the processor has the kernel, and `out` has `m` rows of `n` elements.
            unsafe { multiply(kernel, order, target, left, right) };
            for (index, (found, expected)) in out.iter().zip(&expected).enumerate() {
                let are_equal = found.to_bits() == expected.to_bits() || found.is_nan() && expected.is_nan();
                let place = [index / stride, index % stride];
                assert!(
                    are_equal,
                    "{kernel:?} {order:?} {join:?} {m} {n} {k} {kind:?} {place:?}: {found:e} {expected:e}"
                );
            }
        }
    }
}

/// Calls `check` with each size from 1 to 70 in one dimension, and with sizes around the ends of blocks and tiles.
fn each_size(mut check: impl FnMut([usize; 3])) {
    let most = if cfg!(miri) { 6 } else { 70 };
    for size in 1..=most {
        let [first, second] = [size * 7 % 31 + 1, size * 11 % 37 + 1];
        [[size, first, second], [first, size, second], [first, second, size]]
            .into_iter()
            .for_each(&mut check);
    }
    [[3, 5, 0], [0, 3, 4], [4, 0, 3], [2, 3, BLOCK - 1], [15, 33, BLOCK], [1, 4, BLOCK + 1]]
        .into_iter()
        .for_each(&mut check);
    if !cfg!(miri) {
        [[29, 17, 2 * BLOCK + 3], [1030, 3, 530], [3, 40, 3 * BLOCK]].into_iter().for_each(&mut check);
        // Few rows.
        [[5, 300, 600], [1, 200, 530], [4, 131, 21], [16, 129, 40], [14, 160, 1040], [6, 550, 17]]
            .into_iter()
            .for_each(&mut check);
    }
}

#[test]
fn kernels_have_the_bits_of_the_definition() {
    for kind in [Kind::Usual, Kind::Tiny, Kind::Any] {
        each_size(|size| check(Order::Blocks, size, kind));
    }
}

#[test]
fn pairs_have_the_bits_of_the_definition() {
    each_size(|size| check(Order::Pairs, size, Kind::Usual));
    for kind in [Kind::Usual, Kind::Tiny, Kind::Least, Kind::Any] {
        each_size(|size| check(Order::FlushedPairs, size, kind));
    }
}

#[test]
#[cfg_attr(miri, ignore = "takes minutes under Miri")]
fn products_have_the_same_bits_on_any_number_of_threads() {
    let mut random = Random::new(7);
    const { assert!(300 * 170 * 700 >= PARALLEL_FROM && 5 * 1501 * 1100 >= PARALLEL_FROM) };
    // Many rows, and few.
    for ([m, n, k], is_transposed) in
        [([300, 170, 700], true), ([5, 1501, 1100], false), ([5, 1501, 1100], true)]
    {
        let a = Operand::new([m, k], false, || random.number(Kind::Usual));
        let b = Operand::new([k, n], is_transposed, || random.number(Kind::Usual));
        let on_threads = |threads| {
            let pool = ThreadPoolBuilder::new().num_threads(threads).build().expect("threads");
            pool.install(|| product(a.matrix(), b.matrix()))
        };
        let expected = on_threads(1);
        for threads in [2, 3, 8] {
            assert_eq!(on_threads(threads), expected, "{threads} threads, {m} {n} {k} {is_transposed}");
        }
    }
}

#[test]
fn results_are_written_or_added_in_strided_rows() {
    let numbers = |count: usize, seed: usize| -> Vec<f32> {
        (0..count).map(|i| ((i * 37 + seed * 11) % 19) as f32 - 9.0).collect()
    };
    let [m, n, k] = [17, 9, 33];
    let (a, b) = (numbers(m * k, 1), numbers(k * n, 2));
    let (left, right) = (Matrix::new(&a, m, k), Matrix::new(&b, k, n));
    let expected = product(left, right);
    let mut out = vec![1.0; m * (n + 3)];
    add_product(&mut out, n + 3, left, right);
    for (row, expected) in out.chunks(n + 3).zip(expected.chunks(n)) {
        assert!(row[..n].iter().zip(expected).all(|(found, expected)| *found == expected + 1.0));
        assert_eq!(row[n..], [1.0; 3]);
    }
    product_into(&mut out, n + 3, left, right);
    assert!(out.chunks(n + 3).zip(expected.chunks(n)).all(|(row, expected)| row[..n] == *expected));
}

#[test]
#[should_panic = "do not fit"]
fn a_stride_that_wraps_is_refused() {
    Matrix::strided(&[0.0; 10], 3, 1, 1 << 63);
}

#[test]
#[should_panic(expected = "at most usize::MAX elements")]
fn a_size_that_wraps_is_refused() {
    let (rows, columns) = (1 << (usize::BITS - 1), 2);
    product(Matrix::new(&[], rows, 0), Matrix::new(&[], 0, columns));
}

#[test]
fn a_matrix_ends_with_its_last_element() {
    let lengths = [[2, 3], [1, 9], [0, 3], [3, 0]]
        .map(|[rows, columns]| Matrix::strided(&[0.0; 20], rows, columns, 5).data.len());
    assert_eq!(lengths, [8, 9, 0, 0]);
}

#[test]
fn only_the_lines_of_a_matrix_are_widened() {
    let halves: Vec<bf16> = (0..20).map(|i| bf16::from_f32(i as f32)).collect();
    for [rows, columns, stride] in [[3, 2, 6], [4, 5, 5], [1, 3, 1], [3, 1, 4], [2, 0, 4], [0, 2, 4]] {
        let matrix = Matrix::strided(&halves, rows, columns, stride);
        let expected: Vec<f32> =
            (0..rows * columns).map(|i| (i / columns * stride + i % columns) as f32).collect();
        let widened = matrix.widened_lines();
        assert_eq!(widened, expected, "{rows} {columns} {stride}");
        assert_eq!(matrix.transposed().widened_lines(), expected, "{rows} {columns} {stride}");
        let (found, turned) = (matrix.with_lines(&widened), matrix.transposed().with_lines(&widened));
        for (row, column) in (0..rows).flat_map(|row| (0..columns).map(move |column| (row, column))) {
            let expected = matrix.at(row, column).to_f32();
            assert_eq!([found.at(row, column), turned.at(column, row)], [expected; 2]);
        }
    }
}

#[test]
#[should_panic(expected = "do not fit")]
fn a_matrix_stays_in_its_slice() {
    Matrix::strided(&[0.0; 10], 2, 4, 7);
}
