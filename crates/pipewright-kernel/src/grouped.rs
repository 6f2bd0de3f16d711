//! Rows that are grouped by expert, and products of each group with the expert's matrix.
//!
//! A token that chose `count` experts has that many *assignments*. Sorted by expert, the assignments of an
//! expert are consecutive rows of one matrix, so an expert is a matrix product over only its own rows.

use std::ops::Range;

use half::bf16;
use multiversion::multiversion;

use super::clamped_gate::{self, Bounds};
use super::element::Element;
use super::product::Matrix;
use super::product::Sums;
use super::quantised::{QuantisedMatrix, QuantisedOperand, Rounding};
use super::relu_squared;
use super::simd::sum;
use super::swiglu;

/// The matrix of an expert.
#[derive(Clone, Copy, Debug)]
pub enum ExpertMatrix<'a, T> {
    /// Elements in row-major order.
    Held(&'a [T]),
    /// Quantised elements, whose rows are the outputs. They are rounded before they are multiplied in single precision.
    Quantised(&'a QuantisedMatrix, Rounding),
}

/// The assignments in the order of their experts; the assignments of one expert are in the order of the
/// tokens.
#[derive(Clone, Debug)]
pub struct Groups {
    /// The index of each sorted row among the assignments as they were chosen.
    assignments: Vec<usize>,
    /// The first row of each expert, and the number of rows at the end.
    starts: Vec<usize>,
    /// The number of assignments of a token.
    count: usize,
    /// The number of tokens, including tokens without rows.
    tokens: usize,
}

impl Groups {
    /// Sorts the assignments; each token has `count` neighbouring ones in `chosen`.
    pub fn new(chosen: &[usize], experts: usize, count: usize) -> Self {
        Self::among(chosen, &(0..experts).map(Some).collect::<Vec<_>>(), count)
    }

    /// Like [`Groups::new`], for some of the experts: `indices` has the index of each expert among these, and
    /// `None` for every other expert, whose assignments get no rows.
    pub fn among(chosen: &[usize], indices: &[Option<usize>], count: usize) -> Self {
        let held = indices.iter().flatten().count();
        let mut starts = vec![0; held + 1];
        chosen.iter().filter_map(|&expert| indices[expert]).for_each(|index| starts[index + 1] += 1);
        for index in 0..held {
            starts[index + 1] += starts[index];
        }
        let mut next = starts.clone();
        let mut assignments = vec![0; starts[held]];
        for (assignment, &expert) in chosen.iter().enumerate() {
            if let Some(index) = indices[expert] {
                assignments[next[index]] = assignment;
                next[index] += 1;
            }
        }
        Self { assignments, starts, count, tokens: chosen.len() / count }
    }

    /// Returns groups of these sizes of rows that are sorted already. Each row is a token of its own.
    pub fn of_sizes(sizes: impl IntoIterator<Item = usize>) -> Self {
        let mut starts = vec![0];
        starts.extend(sizes.into_iter().scan(0, |end, size| {
            *end += size;
            Some(*end)
        }));
        let rows = starts[starts.len() - 1];
        Self { assignments: (0..rows).collect(), starts, count: 1, tokens: rows }
    }

    /// Returns the number of rows of all groups.
    pub fn rows(&self) -> usize {
        self.assignments.len()
    }

    /// Returns the rows of each expert.
    pub fn ranges(&self) -> impl Iterator<Item = Range<usize>> {
        self.starts.windows(2).map(|pair| pair[0]..pair[1])
    }

    /// Returns the assignment of each sorted row.
    pub fn assignments(&self) -> &[usize] {
        &self.assignments
    }

    /// Returns the token of each sorted row.
    pub fn tokens(&self) -> impl Iterator<Item = usize> {
        self.assignments.iter().map(|assignment| assignment / self.count)
    }

    /// Copies the row of each assignment's token.
    pub fn gather<T: Copy>(&self, rows: &[T], width: usize) -> Vec<T> {
        let mut gathered = Vec::with_capacity(self.rows() * width);
        for token in self.tokens() {
            gathered.extend_from_slice(&rows[token * width..][..width]);
        }
        gathered
    }

    /// Returns the sum of each token's rows, zeros for a token without rows. Row `i` is multiplied by
    /// `factors[i]`.
    pub fn scatter(&self, rows: &[f32], factors: Option<&[f32]>, width: usize) -> Vec<f32> {
        let mut sums = vec![0.0; self.tokens * width];
        for (row, token) in self.tokens().enumerate() {
            let factor = factors.map_or(1.0, |factors| factors[row]);
            add_scaled(&mut sums[token * width..][..width], &rows[row * width..][..width], factor);
        }
        sums
    }

    // A crate that calls these functions compiles them, because they are generic; in tests it does so without
    // optimisation. Nothing is lost: they only loop over tokens and experts. The functions that they call for
    // the elements of each are not generic, so they are compiled with this crate's optimisation.

    /// Multiplies the rows of each expert by its matrix: `[inputs, outputs]`, or the transpose of
    /// `[outputs, inputs]` if `transposed`.
    pub fn product<'m, T: Element + 'm>(
        &self,
        rows: &[T],
        matrices: impl IntoIterator<Item = ExpertMatrix<'m, T>>,
        size: [usize; 2],
        transposed: bool,
    ) -> Vec<f32> {
        let mut out = vec![0.0; self.rows() * size[1]];
        self.each_group(rows, matrices, size, transposed, |elements, rows, matrix| {
            multiply(Sums::Single(&mut out[elements]), size[1], rows, matrix);
        });
        out
    }

    /// Like [`Groups::product`], with results rounded to the type of the operands.
    pub fn rounded_product<'m, T: Element + 'm>(
        &self,
        rows: &[T],
        matrices: impl IntoIterator<Item = ExpertMatrix<'m, T>>,
        size: [usize; 2],
        transposed: bool,
    ) -> Vec<T> {
        let mut out = vec![T::rounded(0.0); self.rows() * size[1]];
        self.each_group(rows, matrices, size, transposed, |elements, rows, matrix| {
            multiply(Sums::Rounded(&mut out[elements]), size[1], rows, matrix);
        });
        out
    }

    /// Like [`Groups::product`], but adds to `out`.
    pub fn add_product<'m, T: Element + 'm>(
        &self,
        out: &mut [f32],
        rows: &[T],
        matrices: impl IntoIterator<Item = ExpertMatrix<'m, T>>,
        size: [usize; 2],
        transposed: bool,
    ) {
        self.each_group(rows, matrices, size, transposed, |elements, rows, matrix| {
            multiply(Sums::Added(&mut out[elements]), size[1], rows, matrix);
        });
    }

    /// Returns a row for each assignment: its expert's bias times `factor`, zeros for an expert without one.
    /// Such rows are what [`Groups::add_product`] adds the products to.
    pub fn biases<'b>(
        &self,
        biases: impl IntoIterator<Item = Option<&'b [f32]>>,
        width: usize,
        factor: f32,
    ) -> Vec<f32> {
        let mut rows = Vec::with_capacity(self.rows() * width);
        for (range, bias) in self.ranges().zip(biases) {
            let start = rows.len();
            match bias {
                _ if range.is_empty() => continue,
                Some(bias) => rows.extend(bias.iter().map(|element| factor * element)),
                None => rows.resize(start + width, 0.0),
            }
            for _ in 1..range.len() {
                rows.extend_from_within(start..start + width);
            }
        }
        rows
    }

    /// Calls `multiply` for each expert with rows: with the elements of their result, the rows, and the matrix.
    fn each_group<'m, T: Element + 'm>(
        &self,
        rows: &[T],
        matrices: impl IntoIterator<Item = ExpertMatrix<'m, T>>,
        [inputs, outputs]: [usize; 2],
        transposed: bool,
        mut multiply: impl FnMut(Range<usize>, Matrix<'_, T>, Right<'_, T>),
    ) {
        for (Range { start, end }, matrix) in self.ranges().zip(matrices) {
            if start == end {
                continue;
            }
            let rows = Matrix::new(&rows[start * inputs..end * inputs], end - start, inputs);
            let matrix = match matrix {
                ExpertMatrix::Held(matrix) if transposed => {
                    Right::Held(Matrix::new(matrix, outputs, inputs).transposed())
                }
                ExpertMatrix::Held(matrix) => Right::Held(Matrix::new(matrix, inputs, outputs)),
                ExpertMatrix::Quantised(matrix, rounding) => {
                    let operand =
                        if transposed { QuantisedOperand::plain } else { QuantisedOperand::transposed };
                    Right::Quantised(operand(matrix), rounding)
                }
            };
            multiply(start * outputs..end * outputs, rows, matrix);
        }
    }
}

/// The right operand of a product.
enum Right<'a, T> {
    Held(Matrix<'a, T>),
    Quantised(QuantisedOperand<'a>, Rounding),
}

/// Computes `a b` in rows of `columns` elements.
fn multiply<T: Element>(sums: Sums<'_, T>, columns: usize, a: Matrix<'_, T>, b: Right<'_, T>) {
    match (sums, b) {
        (sums, Right::Quantised(b, rounding)) => T::quantised_product(sums, columns, a, b, rounding),
        (Sums::Single(out), Right::Held(b)) => T::product_into(out, columns, a, b),
        (Sums::Rounded(out), Right::Held(b)) => T::rounded_product_into(out, columns, a, b),
        (Sums::Added(out), Right::Held(b)) => T::add_product(out, columns, a, b),
    }
}

#[multiversion(targets = "simd")]
fn add_scaled(sums: &mut [f32], row: &[f32], factor: f32) {
    for (sum, element) in sums.iter_mut().zip(row) {
        *sum += factor * element;
    }
}

/// The rows of an expert, in the element type of its products' operands.
pub trait ExpertElement: Element {
    /// Returns the gradients of `gate` and `up`: [`swiglu::backward`].
    fn swiglu_backward(gate: &[Self], up: &[Self], gradient: &[f32]) -> (Vec<Self>, Vec<Self>);

    /// Returns the gradient of `up`: [`relu_squared::backward`].
    fn relu_squared_backward(up: &[Self], gradient: &[f32]) -> Vec<Self>;

    /// Returns the gradients of `gate` and `up`: [`clamped_gate::backward`].
    fn clamped_gate_backward(
        gate: &[Self],
        up: &[Self],
        gradient: &[f32],
        bounds: Bounds,
    ) -> (Vec<Self>, Vec<Self>);

    /// Returns the scalar product of each pair of rows.
    fn row_products(a: &[Self], b: &[f32], width: usize) -> Vec<f32>;

    /// Multiplies row `i` by `factors[i]`.
    fn scale_rows(rows: &mut [Self], factors: &[f32], width: usize);

    /// Returns the sum of the rows.
    fn sum_rows(rows: &[Self], width: usize) -> Vec<f32>;
}

/// Implements [`ExpertElement`] with functions that are not generic, so that their loops are compiled with
/// this crate's optimisation. Provided methods of the trait would be compiled by the crate that calls them.
macro_rules! expert_element {
    ($element:ty, $swiglu_backward:path, $relu_squared_backward:path, $clamped_gate_backward:path) => {
        impl ExpertElement for $element {
            fn swiglu_backward(gate: &[Self], up: &[Self], gradient: &[f32]) -> (Vec<Self>, Vec<Self>) {
                $swiglu_backward(gate, up, gradient)
            }

            fn relu_squared_backward(up: &[Self], gradient: &[f32]) -> Vec<Self> {
                $relu_squared_backward(up, gradient)
            }

            fn clamped_gate_backward(
                gate: &[Self],
                up: &[Self],
                gradient: &[f32],
                bounds: Bounds,
            ) -> (Vec<Self>, Vec<Self>) {
                $clamped_gate_backward(gate, up, gradient, bounds)
            }

            fn row_products(a: &[Self], b: &[f32], width: usize) -> Vec<f32> {
                row_products(a, b, width)
            }

            fn scale_rows(rows: &mut [Self], factors: &[f32], width: usize) {
                scale_rows(rows, factors, width);
            }

            fn sum_rows(rows: &[Self], width: usize) -> Vec<f32> {
                sum_rows(rows, width)
            }
        }
    };
}

expert_element!(f32, swiglu::backward, relu_squared::backward, clamped_gate::backward);
expert_element!(
    bf16,
    swiglu::backward_bf16_from_single,
    relu_squared::backward_bf16_from_single,
    clamped_gate::backward_bf16_from_single
);

#[multiversion(targets = "simd")]
fn scale_rows<T: Element>(rows: &mut [T], factors: &[f32], width: usize) {
    for (row, factor) in rows.chunks_exact_mut(width).zip(factors) {
        row.iter_mut().for_each(|element| *element = T::rounded(element.single() * factor));
    }
}

#[multiversion(targets = "simd")]
fn sum_rows<T: Element>(rows: &[T], width: usize) -> Vec<f32> {
    let mut sums = vec![0.0; width];
    for row in rows.chunks_exact(width) {
        sums.iter_mut().zip(row).for_each(|(sum, element)| *sum += element.single());
    }
    sums
}

#[multiversion(targets = "simd")]
fn row_products<T: Element>(a: &[T], b: &[f32], width: usize) -> Vec<f32> {
    let rows = a.chunks_exact(width).zip(b.chunks_exact(width));
    rows.map(|(a, b)| sum(width, |i| a[i].single() * b[i])).collect()
}

#[cfg(test)]
mod tests {
    use super::super::half::Half;
    use super::super::numbers::numbers;
    use super::*;

    #[test]
    fn rows_go_to_their_expert_and_back() {
        // Three tokens with two choices of four experts each; no token chose expert 2.
        let groups = Groups::new(&[1, 0, 3, 1, 0, 3], 4, 2);
        assert_eq!(groups.ranges().collect::<Vec<_>>(), [0..2, 2..4, 4..4, 4..6]);
        assert_eq!(groups.tokens().collect::<Vec<_>>(), [0, 2, 0, 1, 1, 2]);
        let gathered = groups.gather(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], 2);
        assert_eq!(gathered, [1.0, 2.0, 5.0, 6.0, 1.0, 2.0, 3.0, 4.0, 3.0, 4.0, 5.0, 6.0]);
        assert_eq!(groups.scatter(&gathered, None, 2), [2.0, 4.0, 6.0, 8.0, 10.0, 12.0]);
        let factors = [1.0, 0.0, 0.0, 2.0, 0.0, 3.0];
        assert_eq!(groups.scatter(&gathered, Some(&factors), 2), [1.0, 2.0, 6.0, 8.0, 15.0, 18.0]);
    }

    #[test]
    fn assignments_to_experts_that_are_not_there_have_no_rows() {
        // Experts 1 and 3 of four; the second token chose neither.
        let groups = Groups::among(&[1, 0, 0, 2, 3, 1], &[None, Some(0), None, Some(1)], 2);
        assert_eq!(groups.ranges().collect::<Vec<_>>(), [0..2, 2..3]);
        assert_eq!(groups.assignments(), [0, 5, 4]);
        assert_eq!(groups.gather(&[1.0, 2.0, 3.0], 1), [1.0, 3.0, 3.0]);
        assert_eq!(groups.scatter(&[1.0, 2.0, 4.0], None, 1), [1.0, 0.0, 6.0]);
        let none = Groups::among(&[0, 0], &[None, Some(0)], 1);
        assert_eq!((none.rows(), none.scatter(&[], None, 2)), (0, vec![0.0; 4]));
    }

    #[test]
    fn sorted_rows_are_groups_of_the_given_sizes() {
        let groups = Groups::of_sizes([2, 0, 1]);
        assert_eq!(groups.ranges().collect::<Vec<_>>(), [0..2, 2..2, 2..3]);
        assert_eq!((groups.rows(), groups.gather(&[1.0, 2.0, 3.0], 1)), (3, vec![1.0, 2.0, 3.0]));
        assert_eq!(Groups::of_sizes([]).rows(), 0);
    }

    #[test]
    fn each_group_is_multiplied_by_its_own_matrix() {
        let groups = Groups::new(&[2, 0, 2], 3, 1);
        let matrices: [&[f32]; 3] = [&[1.0, 2.0], &[f32::NAN; 2], &[10.0, 20.0]];
        let matrices = matrices.map(ExpertMatrix::Held);
        // Sorted rows: token 1, then tokens 0 and 2.
        let rows = [5.0, 6.0, 7.0];
        assert_eq!(groups.product(&rows, matrices, [1, 2], false), [5.0, 10.0, 60.0, 120.0, 70.0, 140.0]);
        let pairs = [1.0, 1.0, 1.0, 0.0, 0.0, 1.0];
        assert_eq!(groups.product(&pairs, matrices, [2, 1], true), [3.0, 10.0, 20.0]);
        let mut out = vec![1.0; 3];
        groups.add_product(&mut out, &pairs, matrices, [2, 1], true);
        assert_eq!(out, [4.0, 11.0, 21.0]);
    }

    #[test]
    fn each_group_has_the_rows_of_its_bias_and_a_sum() {
        // Sorted rows: token 1 for expert 0, tokens 0 and 2 for expert 2, and token 3 for expert 3.
        let groups = Groups::new(&[2, 0, 2, 3], 4, 1);
        let biases = [Some(&[1.0, 2.0][..]), Some(&[f32::NAN; 2]), Some(&[3.0, -4.0]), None];
        assert_eq!(groups.biases(biases, 2, 0.5), [0.5, 1.0, 1.5, -2.0, 1.5, -2.0, 0.0, 0.0]);
        let rows = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0];
        let expected = [[1.0, 2.0], [0.0; 2], [8.0, 10.0], [7.0, 8.0]];
        for (range, expected) in groups.ranges().zip(expected) {
            let elements = 2 * range.start..2 * range.end;
            assert_eq!(f32::sum_rows(&rows[elements.clone()], 2), expected);
            assert_eq!(bf16::sum_rows(&bf16::narrowed(&rows)[elements], 2), expected);
        }
    }

    #[test]
    fn rows_of_bf16_are_the_rounded_rows() {
        let (b, factors) = (numbers(21, 1), numbers(21, 2));
        let [gate, up] = [3, 4].map(|seed| bf16::narrowed(&numbers(21, seed)));
        let [wide_gate, wide_up] = [&gate, &up].map(|rows| bf16::widened(rows));
        let (d_gate, d_up) = bf16::swiglu_backward(&gate, &up, &b);
        let (wide_d_gate, wide_d_up) = f32::swiglu_backward(&wide_gate, &wide_up, &b);
        assert_eq!([d_gate, d_up], [wide_d_gate, wide_d_up].map(|d| bf16::narrowed(&d)));
        let bounds = Bounds { alpha: 1.5, limit: 0.4 };
        let (d_gate, d_up) = bf16::clamped_gate_backward(&gate, &up, &b, bounds);
        let (wide_d_gate, wide_d_up) = f32::clamped_gate_backward(&wide_gate, &wide_up, &b, bounds);
        assert_eq!([d_gate, d_up], [wide_d_gate, wide_d_up].map(|d| bf16::narrowed(&d)));
        let activated = clamped_gate::forward(&wide_gate, &wide_up, bounds);
        assert_eq!(clamped_gate::forward_bf16(&gate, &up, bounds), bf16::narrowed(&activated));
        let d_up = f32::relu_squared_backward(&wide_up, &b);
        assert_eq!(bf16::relu_squared_backward(&up, &b), bf16::narrowed(&d_up));
        assert_eq!(bf16::row_products(&gate, &b, 7), f32::row_products(&wide_gate, &b, 7));
        let (mut rows, mut wide_rows) = (up, wide_up);
        bf16::scale_rows(&mut rows, &factors, 7);
        f32::scale_rows(&mut wide_rows, &factors, 7);
        assert_eq!(rows, bf16::narrowed(&wide_rows));
    }

    #[test]
    fn rounded_products_are_rounded_once() {
        let groups = Groups::new(&[1, 0, 1], 2, 1);
        let rows = bf16::narrowed(&[1.5, -2.25, 0.3, 4.1, 7.7, -0.9]);
        let matrices = [bf16::narrowed(&[0.7, 1.9]), bf16::narrowed(&[-0.4, 3.3])];
        let matrices = || matrices.iter().map(|matrix| ExpertMatrix::Held(matrix));
        let single = groups.product(&rows, matrices(), [2, 1], false);
        assert_eq!(groups.rounded_product(&rows, matrices(), [2, 1], false), bf16::narrowed(&single));
    }
}
