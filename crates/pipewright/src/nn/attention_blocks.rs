//! The passes of an attention that has no kernel. They are composed of Burn's operations, in blocks of rows, key
//! heads and queries.
//!
//! The tape keeps the queries, keys and values, and the logarithm of the sum of the exponentials of each row
//! of scores. The backward pass computes the scores again (Dao et al., 2022,
//! <https://arxiv.org/abs/2205.14135>). The scores of one block exist at a time, in both passes. The blocks
//! depend on the shapes alone, so results have the same bits for every cut into stages.
//!
//! In half precision, products have operands of half precision, and scores have single precision.

mod sizes;

use std::ops::Range;
use std::sync::Arc;

use burn::tensor::{Bool, Int, Tensor, TensorData};
use pipewright_kernel::attention::Dims;

pub(super) use self::sizes::BlockSizes;
use super::composed::at_least_single;
use super::relations::Relations;
use crate::autodiff::{Rule, inner_of, record_four};

/// An attention without its inputs.
#[derive(Clone, Debug)]
pub(super) struct BlockAttention {
    pub(super) dims: Dims,
    /// The cosines and sines of positions, in single precision, `[1 or batch, 1, positions, pairs]`.
    pub(super) tables: [Tensor<4>; 2],
    /// The factor of the scores.
    pub(super) scale: f64,
    /// The bound of the scores, if they have one.
    pub(super) cap: Option<f64>,
    /// The first key that each query of each row sees; `None` if all see the first one.
    pub(super) starts: Option<Arc<[u32]>>,
    pub(super) further: FurtherInput,
    pub(super) sizes: BlockSizes,
}

/// The input that an attention may have besides queries, keys and values.
#[derive(Clone, Debug)]
pub(super) enum FurtherInput {
    /// The input is not used.
    Unused,
    /// The sink of each head, `[1, heads]`.
    Sinks,
    /// The bias of each relation, `[relations, heads]`.
    Biases(Relations),
}

/// Queries whose scores are computed together.
#[derive(Clone, Debug)]
struct Block {
    rows: Range<usize>,
    kv_heads: Range<usize>,
    queries: Range<usize>,
    /// The keys that any of the queries sees.
    keys: Range<usize>,
}

impl BlockAttention {
    /// Returns the result, `[batch * sequence, heads * value_dim]`, on the tape of the inputs: queries, keys,
    /// values, and the further input, if it is used. They have the rows of all sequences.
    pub(super) fn forward(self, inputs: [Tensor<2>; 3], further: Option<Tensor<2>>) -> Tensor<2> {
        let batch = self.dims.batch;
        let [k, v] = [&inputs[1], &inputs[2]].map(|x| {
            let [rows, width] = x.dims();
            vec![x.clone().reshape([batch, rows / batch, width])]
        });
        self.forward_slices(inputs, further, [k, v])
    }

    /// Like [`BlockAttention::forward`]. `slices` has keys and values again, cut along the sequences as the
    /// backward pass keeps them, `[batch, length, width]` each.
    pub(super) fn forward_slices(
        self,
        inputs: [Tensor<2>; 3],
        further: Option<Tensor<2>>,
        slices: [Vec<Tensor<3>>; 2],
    ) -> Tensor<2> {
        let [q, k, v] = inputs;
        // A rule of four inputs has no gradient for one that is not used, whichever tensor it is.
        let inputs = [q.clone(), k, v, further.unwrap_or(q)];
        let [q, whole_k, whole_v, further] = inputs.clone().map(inner_of);
        let [k, v] = slices.map(|slices| slices.into_iter().map(inner_of).collect());
        let saved = Saved { attention: self, q, k, v, further };
        let (out, normalisers) = saved.forward(whole_k, whole_v);
        record_four(inputs, out, Arc::new(AttentionRule { saved, normalisers }))
    }

    /// Returns the blocks in order: queries change first, then key heads, then rows.
    fn blocks(&self) -> impl Iterator<Item = Block> {
        let Dims { batch, sequence, earlier, kv_heads, .. } = self.dims;
        let BlockSizes { rows, kv_heads: heads, queries } = self.sizes;
        cut(batch, rows).flat_map(move |rows| {
            cut(kv_heads, heads).flat_map(move |kv_heads| {
                let rows = rows.clone();
                cut(sequence, queries).map(move |queries| {
                    let first = rows.clone().flat_map(|row| self.starts_of(row, &queries)).min();
                    let keys = first.map_or(0, |&first| first as usize)..earlier + queries.end;
                    Block { rows: rows.clone(), kv_heads: kv_heads.clone(), queries, keys }
                })
            })
        })
    }

    /// Joins the tensors of all blocks, `[rows, heads, queries, width]` each, to one tensor.
    fn join(&self, mut parts: Vec<Tensor<4>>) -> Tensor<4> {
        let (Dims { sequence, kv_heads, .. }, sizes) = (self.dims, self.sizes);
        let counts = [(2, sequence.div_ceil(sizes.queries)), (1, kv_heads.div_ceil(sizes.kv_heads))];
        for (dim, count) in counts {
            parts = parts.chunks(count).map(|parts| concatenate(parts, dim)).collect();
        }
        concatenate(&parts, 0)
    }

    /// Returns the first keys that queries of a row see; none if all see the first one.
    fn starts_of(&self, row: usize, queries: &Range<usize>) -> &[u32] {
        self.starts.as_ref().map_or(&[], |starts| &starts[row * self.dims.sequence..][queries.clone()])
    }

    /// Returns the query heads that belong to the key heads of a block.
    fn query_heads(&self, block: &Block) -> Range<usize> {
        let shared = self.dims.heads / self.dims.kv_heads;
        block.kv_heads.start * shared..block.kv_heads.end * shared
    }

    /// Returns heads with each pair of elements turned by the angle of its position, in at least single
    /// precision, or turned `back`, which is the gradient of a turn. The first position is `first`. All
    /// elements are multiplied by `scale`.
    fn turned(&self, x: Tensor<4>, first: usize, scale: f64, back: bool) -> Tensor<4> {
        let (x, [_, _, positions, width]) = (at_least_single(x.clone()), x.dims());
        let pairs = self.tables[0].dims()[3];
        let [cos, sin] = self.tables.each_ref().map(|table| {
            let table = table.clone().narrow(2, first, positions).cast(x.dtype());
            if scale == 1.0 { table } else { table * scale }
        });
        let sin = if back { sin.neg() } else { sin };
        let (a, b) = (x.clone().narrow(3, 0, pairs), x.clone().narrow(3, pairs, pairs));
        let turned = a.clone() * cos.clone() - b.clone() * sin.clone();
        let mut parts = vec![turned, b * cos + a * sin];
        if width > 2 * pairs {
            let rest = x.narrow(3, 2 * pairs, width - 2 * pairs);
            parts.push(if scale == 1.0 { rest } else { rest * scale });
        }
        Tensor::cat(parts, 3)
    }

    /// Returns which keys of a block its queries do not see, `[1 or rows, 1, queries, keys]`. `places` has the
    /// index of each key, `[keys]`.
    fn hidden(&self, block: &Block, places: &Tensor<1, Int>) -> Tensor<4, Bool> {
        let earlier = self.dims.earlier;
        let Block { rows, queries, keys, .. } = block;
        let shape = |rows| [rows, 1, queries.len(), keys.len()];
        let own = places.clone().narrow(0, earlier + queries.start, queries.len());
        let own = own.reshape([1, 1, queries.len(), 1]);
        let keys = places.clone().narrow(0, keys.start, keys.len()).reshape([1, 1, 1, keys.len()]);
        let later = keys.clone().expand(shape(1)).greater(own.expand(shape(1)));
        if self.starts.is_none() {
            return later;
        }
        let first = self.starts_of(rows.start, queries);
        let are_alike = rows.clone().all(|row| self.starts_of(row, queries) == first);
        let count = if are_alike { 1 } else { rows.len() };
        let starts = rows.clone().take(count).flat_map(|row| self.starts_of(row, queries));
        let starts: Vec<i64> = starts.map(|&start| start.into()).collect();
        let starts = TensorData::new(starts, [count, 1, queries.len(), 1]);
        let starts = Tensor::<4, Int>::from_data(starts, &places.device());
        let shape = shape(count);
        keys.expand(shape).lower(starts.expand(shape)).bool_or(later.expand(shape))
    }

    /// Returns rows `[batch * length, heads * width]` as heads, `[batch, heads, length, width]`.
    fn heads(&self, x: Tensor<2>, heads: usize) -> Tensor<4> {
        let ([rows, width], batch) = (x.dims(), self.dims.batch);
        x.reshape([batch, rows / batch, heads, width / heads]).swap_dims(1, 2)
    }

    /// Returns heads `[batch, heads, length, width]` as rows `[batch * length, heads * width]`.
    fn rows(x: Tensor<4>) -> Tensor<2> {
        let [batch, heads, length, width] = x.dims();
        x.swap_dims(1, 2).reshape([batch * length, heads * width])
    }

    /// Returns heads `[rows, heads, queries, width]` as the matrices that their key heads are multiplied with:
    /// the queries of all heads that share one.
    fn matrices(&self, x: Tensor<4>) -> Tensor<3> {
        let Dims { heads, kv_heads, .. } = self.dims;
        let ([rows, query_heads, queries, width], shared) = (x.dims(), heads / kv_heads);
        x.reshape([rows * query_heads / shared, shared * queries, width])
    }

    /// Returns the matrices of a block as heads, the reverse of [`BlockAttention::matrices`].
    fn unstack(&self, x: Tensor<3>, block: &Block) -> Tensor<4> {
        let [_, _, width] = x.dims();
        x.reshape([block.rows.len(), self.query_heads(block).len(), block.queries.len(), width])
    }

    /// Returns the queries of a block, of heads `[batch, heads, sequence, width]`.
    fn at_queries(&self, x: &Tensor<4>, block: &Block) -> Tensor<4> {
        part(x, [&block.rows, &self.query_heads(block), &block.queries])
    }

    /// Returns 1 for each relation that holds between a query and a key of a block, and 0 for the others,
    /// `[rows, relations, queries * keys]`.
    fn flags(&self, relations: &Relations, block: &Block, like: &Tensor<4>) -> Tensor<3> {
        let Dims { sequence, .. } = self.dims;
        let Block { rows, queries, keys, .. } = block;
        let shape = [rows.len(), relations.count, queries.len() * keys.len()];
        let mut flags = Vec::with_capacity(shape.iter().product());
        let row = relations.count * sequence * sequence;
        let mask = &relations.mask[rows.start * row..rows.end * row];
        for matrix in mask.chunks_exact(sequence * sequence) {
            for query in queries.clone() {
                flags.extend(matrix[query * sequence..][keys.clone()].iter().map(|&holds| f32::from(holds)));
            }
        }
        Tensor::<3>::from_data(TensorData::new(flags, shape), &like.device()).cast(like.dtype())
    }
}

/// The inputs that the tape keeps, off the tape.
#[derive(Debug)]
struct Saved {
    attention: BlockAttention,
    q: Tensor<2>,
    /// Of each slice of the sequences; one if they are whole.
    k: Vec<Tensor<3>>,
    v: Vec<Tensor<3>>,
    /// Any tensor if the input is not used.
    further: Tensor<2>,
}

/// The inputs of all products, in the precision of the queries, and the indices of the keys.
struct Operands {
    /// Turned and scaled, `[batch, heads, sequence, head_dim]`.
    q: Tensor<4>,
    /// Turned, `[batch, kv_heads, keys, head_dim]`.
    k: Tensor<4>,
    /// `[batch, kv_heads, keys, value_dim]`.
    v: Tensor<4>,
    /// The index of each key, `[keys]`.
    places: Tensor<1, Int>,
}

impl Saved {
    /// `k` and `v` have the rows of all keys and values.
    fn operands(&self, k: Tensor<2>, v: Tensor<2>) -> Operands {
        let Self { attention, q, .. } = self;
        let Dims { earlier, sequence, kv_heads, heads, .. } = attention.dims;
        let turned_q = attention.turned(attention.heads(q.clone(), heads), earlier, attention.scale, false);
        let turned_k = attention.turned(attention.heads(k, kv_heads), 0, 1.0, false);
        let [q, k] = [turned_q, turned_k].map(|turned| turned.cast(q.dtype()));
        let places = Tensor::arange(0..(earlier + sequence) as i64, &q.device());
        Operands { q, k, v: attention.heads(v, kv_heads), places }
    }

    /// Returns the bounded scores of a block without biases, `[rows, heads, queries, keys]`, in at least
    /// single precision.
    fn bounded_scores(&self, operands: &Operands, block: &Block) -> Tensor<4> {
        let attention = &self.attention;
        let q = attention.matrices(attention.at_queries(&operands.q, block));
        let product = q.matmul(at_keys(&operands.k, block).transpose());
        let scores = attention.unstack(at_least_single(product), block);
        match attention.cap {
            Some(cap) => (scores / cap).tanh() * cap,
            None => scores,
        }
    }

    /// Adds the biases to the scores of a block, if they have some, and makes them minus infinity where a
    /// query does not see a key.
    fn bias_and_mask(&self, mut scores: Tensor<4>, operands: &Operands, block: &Block) -> Tensor<4> {
        let attention = &self.attention;
        if let FurtherInput::Biases(relations) = &attention.further {
            let (flags, heads) = (attention.flags(relations, block, &scores), attention.query_heads(block));
            let table = at_least_single(self.further.clone()).narrow(1, heads.start, heads.len());
            let table = table.transpose().unsqueeze::<3>().repeat_dim(0, block.rows.len());
            let shape = scores.dims();
            scores = scores + table.matmul(flags).reshape(shape);
        }
        let hidden = attention.hidden(block, &operands.places);
        scores.mask_fill(hidden, f32::NEG_INFINITY)
    }

    /// Returns the sinks for the queries of a block, `[rows, heads, queries, 1]`, if heads have some.
    fn sinks(&self, block: &Block) -> Option<Tensor<4>> {
        let has_sinks = matches!(self.attention.further, FurtherInput::Sinks);
        has_sinks.then(|| {
            let heads = self.attention.query_heads(block);
            let sinks = at_least_single(self.further.clone()).narrow(1, heads.start, heads.len());
            let sinks = sinks.reshape([1, heads.len(), 1, 1]);
            sinks.repeat_dim(0, block.rows.len()).repeat_dim(2, block.queries.len())
        })
    }

    /// Returns the result, and the normaliser of each row of scores, `[batch, heads, sequence, 1]`.
    fn forward(&self, k: Tensor<2>, v: Tensor<2>) -> (Tensor<2>, Tensor<4>) {
        let (attention, operands) = (&self.attention, self.operands(k, v));
        let (mut outputs, mut normalisers) = (Vec::new(), Vec::new());
        for block in attention.blocks() {
            let scores = self.bias_and_mask(self.bounded_scores(&operands, &block), &operands, &block);
            let sinks = self.sinks(&block);
            let mut largest = scores.clone().max_dim(3);
            if let Some(sinks) = &sinks {
                largest = largest.max_pair(sinks.clone());
            }
            let weights = (scores - largest.clone()).exp();
            let mut sum = weights.clone().sum_dim(3);
            if let Some(sinks) = sinks {
                sum = sum + (sinks - largest.clone()).exp();
            }
            normalisers.push(largest + sum.clone().log());
            let weights = attention.matrices((weights / sum).cast(self.q.dtype()));
            outputs.push(attention.unstack(weights.matmul(at_keys(&operands.v, &block)), &block));
        }
        (BlockAttention::rows(attention.join(outputs)), attention.join(normalisers))
    }
}

#[derive(Debug)]
struct AttentionRule {
    saved: Saved,
    normalisers: Tensor<4>,
}

impl Rule<4> for AttentionRule {
    fn backward(&self, gradient: Tensor<2>, wanted: [bool; 4]) -> [Option<Tensor<2>>; 4] {
        let Self { saved, normalisers } = self;
        let Saved { attention, q, k, v, further } = saved;
        let Dims { batch, earlier, heads, kv_heads, head_dim, value_dim, sequence } = attention.dims;
        let [for_q, for_k, for_v, for_further] = wanted;
        let for_scores = for_q || for_k || for_further;
        let [joined_k, joined_v] = [k, v].map(|slices| {
            let whole = concatenate(slices, 1);
            let [_, length, width] = whole.dims();
            whole.reshape([batch * length, width])
        });
        let operands = saved.operands(joined_k, joined_v);
        let gradient = attention.heads(gradient, heads);

        let options = (&normalisers.device(), normalisers.dtype());
        let zeros = |width: usize| Tensor::<4>::zeros([batch, kv_heads, earlier + sequence, width], options);
        let mut d_k = for_k.then(|| zeros(head_dim));
        let mut d_v = for_v.then(|| zeros(value_dim));
        let (mut d_q, mut d_sinks) = (Vec::new(), Vec::new());
        let mut d_biases: Option<Tensor<2>> = match &attention.further {
            FurtherInput::Biases(relations) if for_further => {
                Some(Tensor::zeros([heads, relations.count], options))
            }
            _ => None,
        };
        for block in attention.blocks() {
            let scores = saved.bounded_scores(&operands, &block);
            let slope = attention.cap.map(|cap| (scores.clone() / cap).square().neg() + 1.0);
            let normalisers = attention.at_queries(normalisers, &block);
            let weights = (saved.bias_and_mask(scores, &operands, &block) - normalisers.clone()).exp();
            let d_out = attention.matrices(attention.at_queries(&gradient, &block));
            d_v = d_v.map(|sum| {
                let rounded = attention.matrices(weights.clone().cast(q.dtype()));
                add_at_keys(sum, rounded.transpose().matmul(d_out.clone()), &block)
            });
            if !for_scores {
                continue;
            }

            let d_weights = d_out.matmul(at_keys(&operands.v, &block).transpose());
            let d_weights = attention.unstack(at_least_single(d_weights), &block);
            // The means of the same rounded gradients, so that the gradients of a query's scores add up to
            // zero: a component that all keys share then adds nothing to the gradient of the query.
            let means = (weights.clone() * d_weights.clone()).sum_dim(3);
            if let (true, Some(sinks)) = (for_further, saved.sinks(&block)) {
                d_sinks.push(((sinks - normalisers).exp() * means.clone()).neg());
            }
            let mut d_scores = weights * (d_weights - means);
            if let (FurtherInput::Biases(relations), Some(sum)) = (&attention.further, d_biases.take()) {
                let flags = attention.flags(relations, &block, &d_scores);
                let block_heads = attention.query_heads(&block);
                let pairs = block.queries.len() * block.keys.len();
                let shape = [block.rows.len(), block_heads.len(), pairs];
                let products = d_scores.clone().reshape(shape).matmul(flags.transpose());
                let products = products.sum_dim(0).reshape([block_heads.len(), relations.count]);
                d_biases = Some(add(sum, products, [block_heads, 0..relations.count]));
            }
            if let Some(slope) = slope {
                d_scores = d_scores * slope;
            }
            let d_scores = attention.matrices(d_scores.cast(q.dtype()));
            if for_q {
                let product = d_scores.clone().matmul(at_keys(&operands.k, &block));
                d_q.push(attention.unstack(at_least_single(product), &block));
            }
            d_k = d_k.map(|sum| {
                let queries = attention.matrices(attention.at_queries(&operands.q, &block));
                add_at_keys(sum, d_scores.transpose().matmul(queries), &block)
            });
        }

        let d_q = for_q.then(|| attention.turned(attention.join(d_q), earlier, attention.scale, true));
        let d_k = d_k.map(|d| attention.turned(d, 0, 1.0, true));
        let d_further = match &attention.further {
            FurtherInput::Sinks if for_further => {
                Some(attention.join(d_sinks).sum_dim(2).sum_dim(0).reshape([1, heads]))
            }
            _ => d_biases.map(Tensor::transpose),
        };
        let [d_q, d_k, d_v] = [d_q, d_k, d_v].map(|d| d.map(|d| BlockAttention::rows(d).cast(q.dtype())));
        [d_q, d_k, d_v, d_further.map(|d| d.cast(further.dtype()))]
    }
}

/// Returns `0..count` in ranges of `size` indices; the last range may have fewer.
fn cut(count: usize, size: usize) -> impl Iterator<Item = Range<usize>> {
    (0..count).step_by(size).map(move |start| start..(start + size).min(count))
}

/// Returns parts as one tensor.
fn concatenate<const D: usize>(parts: &[Tensor<D>], dim: usize) -> Tensor<D> {
    if let [whole] = parts { whole.clone() } else { Tensor::cat(parts.to_vec(), dim) }
}

/// Returns the elements of `[rows, heads, positions, width]` in these ranges.
fn part(x: &Tensor<4>, ranges: [&Range<usize>; 3]) -> Tensor<4> {
    ranges.into_iter().enumerate().fold(x.clone(), |x, (dim, range)| x.narrow(dim, range.start, range.len()))
}

/// Returns the keys of a block, of `[batch, kv_heads, keys, width]`, as a matrix for each row and key head.
fn at_keys(x: &Tensor<4>, block: &Block) -> Tensor<3> {
    let Block { rows, kv_heads, keys, .. } = block;
    let [_, _, _, width] = x.dims();
    part(x, [rows, kv_heads, keys]).reshape([rows.len() * kv_heads.len(), keys.len(), width])
}

/// Adds the gradients of a block's keys, a matrix for each row and key head, to the sums
/// `[batch, kv_heads, keys, width]`.
fn add_at_keys(sum: Tensor<4>, gradient: Tensor<3>, block: &Block) -> Tensor<4> {
    let Block { rows, kv_heads, keys, .. } = block;
    let [_, length, width] = gradient.dims();
    let gradient = gradient.reshape([rows.len(), kv_heads.len(), length, width]);
    add(sum, gradient, [rows.clone(), kv_heads.clone(), keys.clone(), 0..width])
}

/// Adds a gradient to a part of `sum`, which has at least single precision.
fn add<const D: usize>(sum: Tensor<D>, gradient: Tensor<D>, ranges: [Range<usize>; D]) -> Tensor<D> {
    let changed = sum.clone().slice(ranges.clone()) + at_least_single(gradient);
    sum.slice_assign(ranges, changed)
}

#[cfg(test)]
mod tests;
