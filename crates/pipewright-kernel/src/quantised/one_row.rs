//! The product of one row with the transpose of a quantised matrix in single precision, without a decoded panel: in
//! generation, each element of the matrix is used once. A sum has another order than in products of several rows.
//!
//! Elements of four bits are looked up in registers if each eight neighbours have one scale ([`eights`]). Other elements
//! are decoded in parts of a row that stay in a cache, or in registers with the same bits.

use multiversion::multiversion;
use rayon::prelude::*;

use super::eights::{self, EIGHT, InEights, Instructions, Spread};
use super::matrix::{Form, QuantisedMatrix};
use crate::simd::sum;

/// The elements that are decoded at once. They stay in a first-level cache.
const DECODED: usize = 512;

/// The least and the most outputs that a thread computes at a time. Many share the room for their scales, and few divide
/// the work evenly among many threads.
const OUTPUTS: [usize; 2] = [32, 128];

/// Products of fewer elements stay on one thread.
const PARALLEL_FROM: usize = 1 << 18;

/// Computes `w x` for a row `x` into new memory.
pub fn row_product(matrix: &QuantisedMatrix, x: &[f32]) -> Vec<f32> {
    assert_eq!(x.len(), matrix.columns(), "inner dimensions of a product agree");
    #[cfg(target_arch = "x86_64")]
    if let Form::Blocks(blocks) = matrix.form()
        && let Some(available) = blocks.wide().filter(|_| blocks.is_whole())
    {
        let size = [matrix.rows(), x.len()];
        return in_chunks(size, |first, out| blocks.products(available, first, x, DECODED, out));
    }
    match matrix.form() {
        Form::Codebook(codebook) if codebook.is_in_runs(EIGHT) => in_eights(codebook, matrix.rows(), x),
        Form::Grouped(grouped) if grouped.is_in_runs(EIGHT) => in_eights(grouped, matrix.rows(), x),
        _ => in_chunks([matrix.rows(), x.len()], |first, out| {
            for (row, out) in (first..).zip(out) {
                *out = of_row(matrix, row, x);
            }
        }),
    }
}

fn in_eights<M: InEights + Sync>(matrix: &M, rows: usize, x: &[f32]) -> Vec<f32> {
    let (instructions, spread) = (Instructions::detect(), Spread::new(x));
    in_chunks([rows, x.len()], |first, out| eights::products(instructions, matrix, first, &spread, out))
}

/// Returns a number for each row. `compute` gets the index of a row, and writes the numbers from that row on.
fn in_chunks([rows, columns]: [usize; 2], compute: impl Fn(usize, &mut [f32]) + Sync) -> Vec<f32> {
    let mut out = vec![0.0; rows];
    let threads = rayon::current_num_threads();
    if rows * columns >= PARALLEL_FROM && threads > 1 {
        let outputs = (rows / (4 * threads)).clamp(OUTPUTS[0], OUTPUTS[1]);
        out.par_chunks_mut(outputs).enumerate().for_each(|(chunk, out)| compute(chunk * outputs, out));
    } else {
        compute(0, &mut out);
    }
    out
}

fn of_row(matrix: &QuantisedMatrix, row: usize, x: &[f32]) -> f32 {
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
