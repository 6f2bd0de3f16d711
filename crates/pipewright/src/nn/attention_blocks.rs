//! The passes of an attention on devices for which it has no kernel: composed of Burn's operations, in blocks
//! of queries.
//!
//! The tape keeps the queries, keys and values, the result, and the logarithm of the sum of the exponentials
//! of each row of scores, as on the CPU back end. The backward pass computes the scores again (Dao et al.,
//! 2022, <https://arxiv.org/abs/2205.14135>). The scores of one block exist at a time, in both passes. The
//! blocks depend on the shapes alone, so results have the same bits for every cut of the model.
//!
//! In half precision, products have operands of half precision, and scores have single precision.

use std::ops::Range;
use std::sync::Arc;

use burn::tensor::{Bool, Device, Int, Tensor, TensorData};
use pipewright_kernel::attention::Dims;

use super::composed::{at_least_single, in_type_of};
use super::relations::Relations;
use crate::autodiff::{Rule, inner_of, record_four};

/// The most scores of a block, of all its heads, unless it has [`QUERIES`] queries. A pass holds up to five
/// numbers for each score of a block.
const SCORES: usize = 1 << 22;
/// The fewest queries of a block, if sequences are not shorter: with fewer of them, products take longer.
const QUERIES: usize = 64;

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
    /// Queries of a block.
    pub(super) block: usize,
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

/// The queries of a block, and the keys that any of them sees.
#[derive(Clone, Debug)]
struct Block {
    queries: Range<usize>,
    keys: Range<usize>,
}

/// Returns the queries of a block of this attention.
pub(super) fn queries_of_block(dims: Dims) -> usize {
    let row = dims.batch * dims.heads * (dims.earlier + dims.sequence);
    (SCORES / row.max(1)).max(QUERIES)
}

impl BlockAttention {
    /// Returns the result, `[batch * sequence, heads * value_dim]`, on the tape of the inputs: queries, keys,
    /// values, and the further input. Their rows are those of all sequences. `slices` has keys and values
    /// again, cut along the sequences as the backward pass keeps them, `[batch, length, width]` each.
    pub(super) fn forward(self, inputs: [Tensor<2>; 4], slices: [Vec<Tensor<3>>; 2]) -> Tensor<2> {
        let [q, _, _, further] = inputs.clone().map(inner_of);
        let [k, v] = slices.map(|slices| slices.into_iter().map(inner_of).collect());
        let saved = Saved { attention: self, q, k, v, further };
        let (out, normalisers) = saved.forward();
        let rule = AttentionRule { saved, out: out.clone(), normalisers };
        record_four(inputs, out, Arc::new(rule))
    }

    fn blocks(&self) -> impl Iterator<Item = Block> {
        let Dims { batch, sequence, earlier, .. } = self.dims;
        (0..sequence).step_by(self.block.max(1)).map(move |start| {
            let queries = start..(start + self.block.max(1)).min(sequence);
            let first = self.starts.as_ref().and_then(|starts| {
                let of_row = |row: usize| starts[row * sequence..][queries.clone()].iter().copied();
                (0..batch).flat_map(of_row).min()
            });
            Block { keys: first.unwrap_or(0) as usize..earlier + queries.end, queries }
        })
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

    /// Returns which keys of a block its queries do not see, `[1 or batch, 1, queries, keys]`.
    fn hidden(&self, block: &Block, device: &Device) -> Tensor<4, Bool> {
        let Dims { batch, sequence, earlier, .. } = self.dims;
        let Block { queries, keys } = block;
        let numbers = |numbers: Vec<i64>, shape: [usize; 4]| {
            Tensor::<4, Int>::from_data(TensorData::new(numbers, shape), device)
        };
        let list = |range: Range<usize>| range.map(|index| index as i64).collect();
        let own = [1, 1, queries.len(), keys.len()];
        let keys = numbers(list(keys.clone()), [1, 1, 1, keys.len()]);
        let places = list(earlier + queries.start..earlier + queries.end);
        let places = numbers(places, [1, 1, queries.len(), 1]);
        let later = keys.clone().expand(own).greater(places.expand(own));
        let Some(starts) = &self.starts else { return later };
        let first = (0..batch).flat_map(|row| &starts[row * sequence..][queries.clone()]);
        let first = numbers(first.map(|&start| start.into()).collect(), [batch, 1, queries.len(), 1]);
        let own = [batch, 1, own[2], own[3]];
        keys.expand(own).lower(first.expand(own)).bool_or(later.expand(own))
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

    /// Returns the heads of a block's queries, `[batch, heads, queries, width]`, as the matrices that the
    /// key heads are multiplied with: the queries of all heads that share one.
    fn matrices(&self, x: Tensor<4>) -> Tensor<3> {
        let Dims { batch, heads, kv_heads, .. } = self.dims;
        let [_, _, queries, width] = x.dims();
        x.reshape([batch * kv_heads, heads / kv_heads * queries, width])
    }

    /// The reverse of [`BlockAttention::matrices`].
    fn of_matrices(&self, x: Tensor<3>) -> Tensor<4> {
        let Dims { batch, heads, kv_heads, .. } = self.dims;
        let [_, rows, width] = x.dims();
        x.reshape([batch, heads, rows / (heads / kv_heads), width])
    }

    /// Returns 1 for each relation that holds between a query and a key of a block, and 0 for the others,
    /// `[batch, relations, queries * keys]`.
    fn relations_of(&self, relations: &Relations, block: &Block, like: &Tensor<4>) -> Tensor<3> {
        let Dims { batch, sequence, .. } = self.dims;
        let Block { queries, keys } = block;
        let mut flags = Vec::with_capacity(batch * relations.count * queries.len() * keys.len());
        for matrix in relations.mask.chunks_exact(sequence * sequence) {
            for query in queries.clone() {
                flags.extend(matrix[query * sequence..][keys.clone()].iter().map(|&holds| f32::from(holds)));
            }
        }
        let shape = [batch, relations.count, queries.len() * keys.len()];
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
    further: Tensor<2>,
}

/// The inputs of all products, in the precision of the queries.
struct Operands {
    /// Turned and scaled, `[batch, heads, queries, head_dim]`.
    q: Tensor<4>,
    /// Turned, `[batch * kv_heads, keys, head_dim]`.
    k: Tensor<3>,
    /// `[batch * kv_heads, keys, value_dim]`.
    v: Tensor<3>,
}

impl Saved {
    fn operands(&self) -> Operands {
        let Self { attention, q, k, v, .. } = self;
        let Dims { batch, earlier, kv_heads, heads, .. } = attention.dims;
        let rows = |slices: &[Tensor<3>]| {
            let joined = if let [whole] = slices { whole.clone() } else { Tensor::cat(slices.to_vec(), 1) };
            let [_, length, width] = joined.dims();
            joined.reshape([batch * length, width])
        };
        let matrices = |x: Tensor<4>| {
            let [_, _, length, width] = x.dims();
            x.reshape([batch * kv_heads, length, width])
        };
        let turned_q = attention.turned(attention.heads(q.clone(), heads), earlier, attention.scale, false);
        let turned_k = attention.turned(attention.heads(rows(k), kv_heads), 0, 1.0, false);
        Operands {
            q: in_type_of(turned_q, q),
            k: in_type_of(matrices(turned_k), q),
            v: matrices(attention.heads(rows(v), kv_heads)),
        }
    }

    /// Returns the bounded scores of a block with their biases, `[batch, heads, queries, keys]`, in at least
    /// single precision.
    fn scores(&self, operands: &Operands, block: &Block) -> Tensor<4> {
        let Self { attention, further, .. } = self;
        let q = attention.matrices(part(&operands.q, &block.queries));
        let product = q.matmul(keys_of(&operands.k, &block.keys).transpose());
        let mut scores = attention.of_matrices(at_least_single(product));
        if let Some(cap) = attention.cap {
            scores = (scores / cap).tanh() * cap;
        }
        if let FurtherInput::Biases(relations) = &attention.further {
            let flags = attention.relations_of(relations, block, &scores);
            let biases = at_least_single(further.clone()).transpose().unsqueeze::<3>();
            let biases = biases.repeat_dim(0, attention.dims.batch).matmul(flags);
            scores = scores.clone() + biases.reshape(scores.dims());
        }
        scores
    }

    /// Returns scores of a block, minus infinity where a query does not see a key.
    fn masked(&self, scores: Tensor<4>, block: &Block) -> Tensor<4> {
        let hidden = self.attention.hidden(block, &scores.device());
        scores.mask_fill(hidden, f32::NEG_INFINITY)
    }

    /// Returns the sinks for rows of this number, `[batch, heads, rows, 1]`, if heads have some.
    fn sinks(&self, rows: usize) -> Option<Tensor<4>> {
        let Dims { batch, heads, .. } = self.attention.dims;
        let has_sinks = matches!(self.attention.further, FurtherInput::Sinks);
        let sinks = || at_least_single(self.further.clone()).reshape([1, heads, 1, 1]);
        has_sinks.then(|| sinks().repeat_dim(0, batch).repeat_dim(2, rows))
    }

    /// Returns the result, and the normaliser of each row of scores, `[batch, heads, sequence, 1]`.
    fn forward(&self) -> (Tensor<2>, Tensor<4>) {
        let operands = self.operands();
        let (mut outputs, mut normalisers) = (Vec::new(), Vec::new());
        for block in self.attention.blocks() {
            let scores = self.masked(self.scores(&operands, &block), &block);
            let sinks = self.sinks(block.queries.len());
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
            let weights = self.attention.matrices(in_type_of(weights / sum, &self.q));
            let out = weights.matmul(keys_of(&operands.v, &block.keys));
            outputs.push(self.attention.of_matrices(out));
        }
        (BlockAttention::rows(Tensor::cat(outputs, 2)), Tensor::cat(normalisers, 2))
    }
}

#[derive(Debug)]
struct AttentionRule {
    saved: Saved,
    out: Tensor<2>,
    normalisers: Tensor<4>,
}

impl Rule<4> for AttentionRule {
    fn backward(&self, gradient: Tensor<2>, wanted: [bool; 4]) -> [Option<Tensor<2>>; 4] {
        let Self { saved, out, normalisers } = self;
        let Saved { attention, q, further, .. } = saved;
        let Dims { batch, earlier, heads, kv_heads, head_dim, value_dim, sequence } = attention.dims;
        let operands = saved.operands();
        let products = at_least_single(gradient.clone()) * at_least_single(out.clone());
        // The sum over the keys of a row's weights times their gradients, `[batch, heads, sequence, 1]`.
        let means = attention.heads(products, heads).sum_dim(3);
        let gradient = attention.heads(gradient, heads);

        let zeros = |width: usize| {
            let options = (&normalisers.device(), normalisers.dtype());
            Tensor::<3>::zeros([batch * kv_heads, earlier + sequence, width], options)
        };
        let (mut d_q, mut d_k, mut d_v) = (Vec::new(), zeros(head_dim), zeros(value_dim));
        let mut d_biases: Option<Tensor<2>> = None;
        for block in attention.blocks() {
            let scores = saved.scores(&operands, &block);
            let slope = attention.cap.map(|cap| (scores.clone() / cap).square().neg() + 1.0);
            let of_rows = |x: &Tensor<4>| part(x, &block.queries);
            let weights = (saved.masked(scores, &block) - of_rows(normalisers)).exp();
            let d_out = attention.matrices(of_rows(&gradient));
            let own = attention.matrices(in_type_of(weights.clone(), q));
            d_v = added(d_v, own.transpose().matmul(d_out.clone()), &block.keys);

            let d_weights = d_out.matmul(keys_of(&operands.v, &block.keys).transpose());
            let d_weights = attention.of_matrices(at_least_single(d_weights));
            let mut d_scores = weights * (d_weights - of_rows(&means));
            if let FurtherInput::Biases(relations) = &attention.further {
                let flags = attention.relations_of(relations, &block, &d_scores);
                let pairs = block.queries.len() * block.keys.len();
                let of_rows = d_scores.clone().reshape([batch, heads, pairs]).matmul(flags.transpose());
                let own = of_rows.sum_dim(0).reshape([heads, relations.count]).transpose();
                d_biases = Some(match d_biases {
                    Some(sum) => sum + own,
                    None => own,
                });
            }
            if let Some(slope) = slope {
                d_scores = d_scores * slope;
            }
            let d_scores = attention.matrices(in_type_of(d_scores, q));
            let own = at_least_single(d_scores.clone().matmul(keys_of(&operands.k, &block.keys)));
            d_q.push(attention.of_matrices(own));
            let of_queries = attention.matrices(of_rows(&operands.q));
            d_k = added(d_k, d_scores.transpose().matmul(of_queries), &block.keys);
        }

        let of_keys = |x: Tensor<3>| {
            let [_, keys, width] = x.dims();
            x.reshape([batch, kv_heads, keys, width])
        };
        let d_q = attention.turned(Tensor::cat(d_q, 2), earlier, attention.scale, true);
        let d_k = attention.turned(of_keys(d_k), 0, 1.0, true);
        let d_further = match &attention.further {
            FurtherInput::Unused => None,
            FurtherInput::Biases(_) => d_biases,
            FurtherInput::Sinks => saved.sinks(sequence).map(|sinks| {
                let weights = (sinks - normalisers.clone()).exp();
                (weights * means).neg().sum_dim(2).sum_dim(0).reshape([1, heads])
            }),
        };
        [
            Some(in_type_of(BlockAttention::rows(d_q), q)),
            Some(in_type_of(BlockAttention::rows(d_k), q)),
            Some(in_type_of(BlockAttention::rows(of_keys(d_v)), q)),
            d_further.filter(|_| wanted[3]).map(|d| in_type_of(d, further)),
        ]
    }
}

/// Returns the queries of a block, of heads `[batch, heads, sequence, width]`.
fn part(x: &Tensor<4>, queries: &Range<usize>) -> Tensor<4> {
    x.clone().narrow(2, queries.start, queries.len())
}

/// Returns the keys of a block, of matrices `[matrices, keys, width]`.
fn keys_of(x: &Tensor<3>, keys: &Range<usize>) -> Tensor<3> {
    x.clone().narrow(1, keys.start, keys.len())
}

/// Adds a gradient to the rows `keys` of the matrices `sum`, which have at least single precision.
fn added(sum: Tensor<3>, gradient: Tensor<3>, keys: &Range<usize>) -> Tensor<3> {
    let [matrices, _, width] = sum.dims();
    let own = keys_of(&sum, keys) + at_least_single(gradient);
    sum.slice_assign([0..matrices, keys.clone(), 0..width], own)
}

#[cfg(test)]
mod tests;
