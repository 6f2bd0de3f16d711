//! The bias of scores by relations between tokens, and the gradient of its table.

use super::inputs::{Bias, Dims, Rows};

impl<'a> Bias<'a> {
    /// Returns the masks of a row of queries, one for each relation, from key `low` to `end`.
    fn masks(
        self,
        dims: Dims,
        batch: usize,
        query: usize,
        low: usize,
        end: usize,
    ) -> impl Iterator<Item = &'a [u8]> {
        let of =
            move |relation| ((batch * self.relations + relation) * dims.sequence + query) * dims.sequence;
        (0..self.relations).map(move |relation| &self.mask[of(relation) + low..of(relation) + end])
    }

    /// Adds the bias of a head to the scores of a block.
    pub(super) fn add(self, dims: Dims, batch: usize, head: usize, rows: Rows<'_>, scores: &mut [f32]) {
        let Rows { first, low, end, .. } = rows;
        for (row, scores) in scores.chunks_exact_mut(end - low).enumerate() {
            for (relation, mask) in self.masks(dims, batch, first + row, low, end).enumerate() {
                let bias = self.table[relation * dims.heads + head];
                scores.iter_mut().zip(mask).for_each(|(score, &holds)| *score += bias * f32::from(holds));
            }
        }
    }

    /// Adds the gradient of a head's entries of the table, from the gradient of a block's scores.
    pub(super) fn add_gradient(
        self,
        dims: Dims,
        batch: usize,
        head: usize,
        rows: Rows<'_>,
        d_scores: &[f32],
        d_table: &mut [f32],
    ) {
        let Rows { first, low, end, .. } = rows;
        for (row, d_scores) in d_scores.chunks_exact(end - low).enumerate() {
            for (relation, mask) in self.masks(dims, batch, first + row, low, end).enumerate() {
                let sum: f32 = d_scores.iter().zip(mask).map(|(d, &holds)| d * f32::from(holds)).sum();
                d_table[relation * dims.heads + head] += sum;
            }
        }
    }
}
