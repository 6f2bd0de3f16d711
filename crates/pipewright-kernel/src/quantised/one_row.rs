//! The product of one row with the transpose of a quantised matrix in single precision, without a decoded panel: in
//! generation, each element of the matrix is used once. A sum has another order than in products of several rows.

use multiversion::multiversion;
use rayon::prelude::*;

use super::matrix::{Form, QuantisedMatrix};
use crate::simd::sum;

/// The elements that are decoded at once. They stay in a first-level cache.
const DECODED: usize = 512;

/// The outputs that a thread computes at a time.
const OUTPUTS: usize = 32;

/// Products of fewer elements stay on one thread.
const PARALLEL_FROM: usize = 1 << 18;

/// Computes `w x` for a row `x` into new memory.
pub fn row_product(matrix: &QuantisedMatrix, x: &[f32]) -> Vec<f32> {
    let (rows, columns) = (matrix.rows(), matrix.columns());
    assert_eq!(x.len(), columns, "inner dimensions of a product agree");
    let mut out = vec![0.0; rows];
    let spread = spread(x);
    let compute = |(chunk, out): (usize, &mut [f32])| {
        for (row, out) in (chunk * OUTPUTS..).zip(out) {
            *out = of_row(matrix, row, x, &spread);
        }
    };
    if rows * columns >= PARALLEL_FROM && rayon::current_num_threads() > 1 {
        out.par_chunks_mut(OUTPUTS).enumerate().for_each(compute);
    } else {
        out.chunks_mut(OUTPUTS).enumerate().for_each(compute);
    }
    out
}

/// Returns the even and then the odd ones of each 32 elements: the order in which halves of bytes are looked up.
fn spread(x: &[f32]) -> Vec<f32> {
    let even = |part: &[f32; 32]| -> [f32; 32] {
        std::array::from_fn(|index| if index < 16 { part[2 * index] } else { part[2 * index - 31] })
    };
    x.as_chunks::<32>().0.iter().flat_map(even).collect()
}

fn of_row(matrix: &QuantisedMatrix, row: usize, x: &[f32], spread: &[f32]) -> f32 {
    #[cfg(target_arch = "x86_64")]
    if let Form::Codebook(codebook) = matrix.form()
        && let Some(product) = codebook.row_product(row, spread)
    {
        return product;
    }
    let _ = spread;
    let mut room = [0.0; DECODED];
    let of_part = |(index, x): (usize, &[f32])| {
        let (start, room) = (index * DECODED, &mut room[..x.len()]);
        matrix.decode_row(row, start..start + x.len(), room);
        product(room, x)
    };
    x.chunks(DECODED).enumerate().map(of_part).sum()
}

#[multiversion(targets = "simd")]
fn product(a: &[f32], b: &[f32]) -> f32 {
    sum(a.len(), |index| a[index] * b[index])
}
