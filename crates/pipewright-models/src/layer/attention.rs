//! Causal attention with grouped queries.
//!
//! Rows of queries are taken in chunks, each against the keys up to the chunk's end alone: a fraction `(n - 1) / 2n` of
//! the work falls away with `n` chunks, and the scores of a chunk stay in cache. The sum that normalises a softmax is a
//! further column of the product with the values, where it costs nothing in either direction; dividing by it later, on
//! `head_dim` columns instead of `sequence`, also makes the copy that the head permutation needs.

use burn::tensor::{Device, Tensor, TensorData};

use super::linearized;

/// Rows in a chunk are at least this many: shorter products run below the speed of longer ones.
const MIN_CHUNK: usize = 128;
/// And at most this many chunks: each chunk's backward pass touches all keys and values once.
const MAX_CHUNKS: usize = 4;

/// What each chunk of query rows may not see, for one sequence length.
#[derive(Debug, Clone)]
pub(crate) struct CausalMask {
    chunk: usize,
    /// `[1, 1, chunk, 1, width]`, to be added to scores: in row `r`, columns up to `r + width - chunk` are zero, the
    /// others minus infinity. Chunk `i` finds its own mask `(i + 1) chunk` columns from the right.
    table: Tensor<5>,
}

impl CausalMask {
    pub(crate) fn new(sequence: usize, device: &Device) -> Self {
        Self::with_chunk(sequence, sequence.div_ceil(MAX_CHUNKS).max(MIN_CHUNK).min(sequence), device)
    }

    fn with_chunk(sequence: usize, chunk: usize, device: &Device) -> Self {
        let width = sequence.div_ceil(chunk) * chunk;
        let hidden = |row: usize, column: usize| column + chunk > row + width;
        let values: Vec<f32> = (0..chunk)
            .flat_map(|row| (0..width).map(move |c| if hidden(row, c) { f32::NEG_INFINITY } else { 0.0 }))
            .collect();
        let table = Tensor::from_data(TensorData::new(values, [1, 1, chunk, 1, width]), device);
        Self { chunk, table }
    }

    /// For query rows `start..end` and keys `0..end`.
    fn rows(&self, start: usize, end: usize) -> Tensor<5> {
        let width = self.table.dims()[4];
        self.table.clone().narrow(2, 0, end - start).narrow(4, width - start - self.chunk, end)
    }
}

/// `softmax(q kᵀ + mask) v` per head.
///
/// Shapes: `q [batch, sequence, heads, head_dim]`, already scaled by `1 / sqrt(head_dim)`; `k` and `v`
/// `[batch, sequence, kv_heads, head_dim]`, of which each serves `heads / kv_heads` neighbouring query heads; result
/// `[batch * sequence, heads * head_dim]`.
pub(crate) fn causal_attention(q: Tensor<4>, k: Tensor<4>, v: Tensor<4>, mask: &CausalMask) -> Tensor<2> {
    let [batch, sequence, heads, head_dim] = q.dims();
    let kv_heads = k.dims()[2];
    let group = heads / kv_heads;

    let q = group_queries(q, kv_heads);
    let k = k.permute([0, 2, 3, 1]);
    let v = v.swap_dims(1, 2);
    let ones = Tensor::ones([batch, kv_heads, sequence, 1], &v.device());
    let v = Tensor::cat(vec![v, ones], 3);

    let chunk = |start: usize| {
        let end = (start + mask.chunk).min(sequence);
        let q = q.clone().narrow(2, start * group, (end - start) * group);
        attend(q, k.clone().narrow(3, 0, end), v.clone().narrow(2, 0, end), mask.rows(start, end))
    };
    let chunks: Vec<Tensor<5>> = (0..sequence).step_by(mask.chunk).map(chunk).collect();
    Tensor::cat(chunks, 1).reshape([batch * sequence, heads * head_dim])
}

/// `[batch, sequence, heads, head_dim]` to `[batch, kv_heads, sequence * group, head_dim]`: the queries of a group are
/// neighbouring rows, so that one product serves them all and no key is repeated.
fn group_queries(q: Tensor<4>, kv_heads: usize) -> Tensor<4> {
    let [batch, sequence, heads, head_dim] = q.dims();
    let group = heads / kv_heads;
    if group == 1 {
        // The same elements, without the copy that the general path makes.
        return q.swap_dims(1, 2);
    }
    q.reshape([batch, sequence, kv_heads, group, head_dim]).swap_dims(1, 2).reshape([
        batch,
        kv_heads,
        sequence * group,
        head_dim,
    ])
}

/// One chunk: `q [batch, kv_heads, rows * group, head_dim]`, `k [batch, kv_heads, head_dim, keys]`, `v` with its column
/// of ones `[batch, kv_heads, keys, head_dim + 1]`, `mask [1, 1, rows, 1, keys]`; result
/// `[batch, rows, kv_heads, group, head_dim]`.
fn attend(q: Tensor<4>, k: Tensor<4>, v: Tensor<4>, mask: Tensor<5>) -> Tensor<5> {
    let [batch, kv_heads, grouped_rows, head_dim] = q.dims();
    let rows = mask.dims()[2];
    let group = grouped_rows / rows;

    let scores = q.matmul(k);
    let weights = masked_exponentials(scores.clone().inner(), mask);
    let weights = linearized(scores, weights.clone(), weights);

    let sums = weights.matmul(v).reshape([batch, kv_heads, rows, group, head_dim + 1]).swap_dims(1, 2);
    let normaliser = sums.clone().narrow(4, head_dim, 1);
    sums.narrow(4, 0, head_dim) / normaliser
}

/// `exp(scores + mask - the row's maximum)`, in the scores' shape.
fn masked_exponentials(scores: Tensor<4>, mask: Tensor<5>) -> Tensor<4> {
    let [batch, kv_heads, grouped_rows, keys] = scores.dims();
    let rows = mask.dims()[2];
    let masked = scores.reshape([batch, kv_heads, rows, grouped_rows / rows, keys]) + mask;
    let maximum = masked.clone().max_dim(4);
    (masked - maximum).exp().reshape([batch, kv_heads, grouped_rows, keys])
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Bool, activation};

    use super::super::check::check as check_layer;
    use super::*;

    /// Softmax over a masked score matrix, with keys and values repeated for each query head.
    fn definition(q: Tensor<4>, k: Tensor<4>, v: Tensor<4>) -> Tensor<2> {
        let [batch, sequence, heads, head_dim] = q.dims();
        let group = heads / k.dims()[2];
        let repeated = |x: Tensor<4>| {
            let copies = (0..heads).map(|head| x.clone().narrow(2, head / group, 1)).collect();
            Tensor::cat(copies, 2).swap_dims(1, 2)
        };
        let scores = q.swap_dims(1, 2).matmul(repeated(k).transpose());
        let future = Tensor::<2, Bool>::tril_mask([sequence, sequence], 0, &scores.device());
        let weights = activation::softmax(scores.mask_fill(future.unsqueeze(), f32::NEG_INFINITY), 3);
        weights.matmul(repeated(v)).swap_dims(1, 2).reshape([batch * sequence, heads * head_dim])
    }

    fn check(sequence: usize, chunk: usize, heads: usize, kv_heads: usize, scale: f32) {
        let split = |x: Tensor<4>| {
            let part = |start, len| x.clone().narrow(2, start, len);
            (part(0, heads), part(heads, kv_heads), part(heads + kv_heads, kv_heads))
        };
        let mask = CausalMask::with_chunk(sequence, chunk, &Device::flex());
        let layer = |x| {
            let (q, k, v) = split(x);
            causal_attention(q, k, v, &mask)
        };
        let plain = |x| {
            let (q, k, v) = split(x);
            definition(q, k, v)
        };
        check_layer([2, sequence, heads + 2 * kv_heads, 4], scale, layer, plain);
    }

    #[test]
    fn one_chunk() {
        check(6, 6, 3, 3, 1.0);
    }

    #[test]
    fn chunks_of_equal_size() {
        check(8, 4, 2, 2, 1.0);
    }

    #[test]
    fn a_short_last_chunk() {
        check(11, 4, 2, 2, 1.0);
    }

    #[test]
    fn grouped_queries() {
        check(7, 3, 6, 2, 1.0);
        check(5, 5, 4, 1, 1.0);
    }

    #[test]
    fn a_single_position() {
        check(1, 1, 2, 1, 1.0);
    }

    #[test]
    fn large_scores_stay_finite() {
        check(9, 4, 2, 2, 8.0);
    }
}
