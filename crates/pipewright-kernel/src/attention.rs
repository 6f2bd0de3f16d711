//! Causal attention with grouped queries and rotary positions, head by head, in memory that stays in cache.
//!
//! ```text
//! q, k      rotated by their positions (Su et al., 2021: element j pairs with element j + head_dim / 2), q scaled
//! S = q kᵀ  in blocks of rows, each against the keys up to the block's end
//! P = softmax(S)    out = P v
//! ```
//!
//! A query may see only some of the earlier keys: a run that ends at the query. The start of the run does not
//! decrease from one query to the next (documents, windows). Scores of keys before the run of a block's first
//! query are not computed.
//!
//! The queries may belong to the last part of each sequence, whose keys and values are given from its
//! beginning on.
//!
//! Scores are not kept: the backward pass computes them again from `q`, `k` and each row's normaliser (Dao et
//! al., 2022). With `D = sum(g out)` by row: `dP = g vᵀ`, `dS = P (dP - D)`, `dv = Pᵀ g`, `dq = dS k`,
//! `dk = dSᵀ q`.

use half::bf16;
use multiversion::multiversion;

use super::element::Element;
use super::exp::exp;
use super::product::Matrix;
pub use super::rotary::Rotary;
use super::rotary::{turn, turn_back};
use super::simd::{max, sum};

/// Rows of queries in a block. Smaller blocks waste less work above the diagonal; larger ones make longer
/// products.
const CHUNK: usize = 64;

/// Sizes of an attention. `q` and the result are `[batch * sequence, heads * head_dim]`, `k` and `v`
/// `[batch * (earlier + sequence), kv_heads * head_dim]`; each key head serves `heads / kv_heads`
/// neighbouring query heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dims {
    /// Sequences.
    pub batch: usize,
    /// Queries of a sequence.
    pub sequence: usize,
    /// Keys of a sequence before the key of its first query.
    pub earlier: usize,
    /// Query heads.
    pub heads: usize,
    /// Key heads, which divide the query heads.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
}

impl Dims {
    fn query_width(self) -> usize {
        self.heads * self.head_dim
    }

    fn key_width(self) -> usize {
        self.kv_heads * self.head_dim
    }

    fn keys(self) -> usize {
        self.earlier + self.sequence
    }

    fn group(self) -> usize {
        self.heads / self.kv_heads
    }

    /// Returns every pair of a sequence of the batch and a key head.
    fn key_heads(self) -> impl Iterator<Item = (usize, usize)> {
        (0..self.batch).flat_map(move |batch| (0..self.kv_heads).map(move |head| (batch, head)))
    }

    /// Returns the offset of a query head.
    fn query_start(self, batch: usize, head: usize) -> usize {
        batch * self.sequence * self.query_width() + head * self.head_dim
    }

    /// Returns the offset of a key head.
    fn key_start(self, batch: usize, head: usize) -> usize {
        batch * self.keys() * self.key_width() + head * self.head_dim
    }

    /// Returns the row ranges of the blocks.
    fn chunks(self) -> impl Iterator<Item = (usize, usize)> {
        (0..self.sequence).step_by(CHUNK).map(move |start| (start, (start + CHUNK).min(self.sequence)))
    }
}

/// The inputs of an attention. The operands of products have the type `T`: rotated queries and keys, weights
/// and the gradients of scores are rounded to it.
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a, T = f32> {
    /// Sizes.
    pub dims: Dims,
    /// Queries, before their rotation.
    pub q: &'a [T],
    /// Keys, before their rotation.
    pub k: &'a [T],
    /// Values.
    pub v: &'a [T],
    /// For the queries; includes the scale of the scores.
    pub turn_q: Rotary<'a>,
    /// For the keys.
    pub turn_k: Rotary<'a>,
    /// The first key that each row sees, counted from the beginning of its sequence; `None` if each sees all.
    pub starts: Option<&'a [u32]>,
    /// A summand of the scores.
    pub bias: Option<Bias<'a>>,
}

/// The sum over relations of `mask[batch][relation][query][key] table[relation][head]`.
#[derive(Clone, Copy, Debug)]
pub struct Bias<'a> {
    /// How many relations there are.
    pub relations: usize,
    /// `[batch, relations, sequence, sequence]`, of 0 and 1.
    pub mask: &'a [u8],
    /// `[relations, heads]`.
    pub table: &'a [f32],
}

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
    fn add(self, dims: Dims, batch: usize, head: usize, rows: Rows<'_>, scores: &mut [f32]) {
        let Rows { first, low, end, .. } = rows;
        for (row, scores) in scores.chunks_exact_mut(end - low).enumerate() {
            for (relation, mask) in self.masks(dims, batch, first + row, low, end).enumerate() {
                let bias = self.table[relation * dims.heads + head];
                scores.iter_mut().zip(mask).for_each(|(score, &holds)| *score += bias * f32::from(holds));
            }
        }
    }

    /// Adds the gradient of a head's entries of the table, from the gradient of a block's scores.
    fn add_gradient(
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

/// A block of queries, with the keys `low..end` that its scores are of.
#[derive(Clone, Copy)]
struct Rows<'a> {
    first: usize,
    count: usize,
    /// The keys of the sequence before the key of its first query.
    earlier: usize,
    low: usize,
    end: usize,
    /// The first key of each query of the block.
    starts: Option<&'a [u32]>,
}

impl<'a> Rows<'a> {
    fn new<T>(inputs: &Inputs<'a, T>, batch: usize, (first, end): (usize, usize)) -> Self {
        let starts = inputs.starts.map(|starts| &starts[batch * inputs.dims.sequence..][first..end]);
        let low = starts.map_or(0, |starts| starts[0] as usize);
        let earlier = inputs.dims.earlier;
        Self { first, count: end - first, earlier, low, end: earlier + end, starts }
    }

    fn span(self) -> usize {
        self.end - self.low
    }

    /// Splits a row into three parts: the keys that the query sees, and the keys before and after them.
    #[inline(always)]
    fn split(self, row: usize, scores: &mut [f32]) -> [&mut [f32]; 3] {
        let start = self.starts.map_or(0, |starts| starts[row] as usize - self.low);
        let (before, rest) = scores.split_at_mut(start);
        let (seen, after) = rest.split_at_mut(self.earlier + self.first + row + 1 - self.low - start);
        [before, seen, after]
    }
}

// Functions for each element type, not generic ones, so that their loops are compiled with this crate's
// optimisation.

/// Returns the result, and `log sum exp` of each row of scores, `[batch, heads, sequence]`.
pub fn forward(inputs: Inputs<'_>) -> (Vec<f32>, Vec<f32>) {
    forward_in(inputs)
}

/// Like [`forward`], with products of bfloat16.
pub fn forward_bf16(inputs: Inputs<'_, bf16>) -> (Vec<f32>, Vec<f32>) {
    forward_in(inputs)
}

fn forward_in<T: Element>(inputs: Inputs<'_, T>) -> (Vec<f32>, Vec<f32>) {
    let Inputs { dims, q, k, v, turn_q, turn_k, bias, .. } = inputs;
    let Dims { sequence, head_dim, .. } = dims;
    let (wide, narrow) = (dims.query_width(), dims.key_width());
    let mut out = vec![0f32; dims.batch * sequence * wide];
    let mut normalisers = vec![0f32; dims.batch * dims.heads * sequence];
    let mut scores = vec![0f32; CHUNK.min(sequence) * dims.keys()];
    let mut rounded = Vec::new();
    let [mut queries, mut keys] = [sequence, dims.keys()].map(|rows| vec![T::rounded(0.0); rows * head_dim]);
    for (batch, key_head) in dims.key_heads() {
        let key_start = dims.key_start(batch, key_head);
        let (turn_q, turn_k) =
            (turn_q.of(sequence, head_dim, batch), turn_k.of(dims.keys(), head_dim, batch));
        turn(turn_k, &k[key_start..], narrow, &mut keys, head_dim);
        let values = &v[key_start..];
        for head in key_head * dims.group()..(key_head + 1) * dims.group() {
            let start = dims.query_start(batch, head);
            turn(turn_q, &q[start..], wide, &mut queries, head_dim);
            let normalisers = &mut normalisers[(batch * dims.heads + head) * sequence..][..sequence];
            for (first, end) in dims.chunks() {
                let rows = Rows::new(&inputs, batch, (first, end));
                let scores = &mut scores[..(end - first) * rows.span()];
                score(scores, &queries, &keys, head_dim, rows);
                if let Some(bias) = bias {
                    bias.add(dims, batch, head, rows, scores);
                }
                softmax(scores, rows, &mut normalisers[first..end]);
                let out = &mut out[start + first * wide..];
                let weights = Matrix::new(T::all_rounded(scores, &mut rounded), end - first, rows.span());
                let values = Matrix::strided(&values[rows.low * narrow..], rows.span(), head_dim, narrow);
                T::product_into(out, wide, weights, values);
            }
        }
    }
    (out, normalisers)
}

/// The gradients of an attention's inputs.
pub struct Gradients {
    /// The gradient of the queries, of their shape.
    pub q: Vec<f32>,
    /// The gradient of the keys, of their shape.
    pub k: Vec<f32>,
    /// The gradient of the values, of their shape.
    pub v: Vec<f32>,
    /// The gradient of the table of the bias; empty without one.
    pub table: Vec<f32>,
}

/// Returns the gradients of the inputs.
pub fn backward(inputs: Inputs<'_>, out: &[f32], normalisers: &[f32], gradient: &[f32]) -> Gradients {
    backward_in(inputs, out, normalisers, gradient)
}

/// Like [`backward`], with products of bfloat16.
pub fn backward_bf16(
    inputs: Inputs<'_, bf16>,
    out: &[bf16],
    normalisers: &[f32],
    gradient: &[bf16],
) -> Gradients {
    backward_in(inputs, out, normalisers, gradient)
}

fn backward_in<T: Element>(
    inputs: Inputs<'_, T>,
    out: &[T],
    normalisers: &[f32],
    gradient: &[T],
) -> Gradients {
    let Inputs { dims, q, k, v, turn_q, turn_k, bias, .. } = inputs;
    let Dims { sequence, head_dim, .. } = dims;
    let (wide, narrow) = (dims.query_width(), dims.key_width());
    let (mut d_q, mut d_k, mut d_v) = (vec![0f32; q.len()], vec![0f32; k.len()], vec![0f32; v.len()]);
    let mut d_table = vec![0f32; bias.map_or(0, |bias| bias.table.len())];
    let sizes = [sequence, dims.keys()].map(|rows| rows * head_dim);
    let [mut queries, mut keys] = sizes.map(|size| vec![T::rounded(0.0); size]);
    let [mut d_queries, mut d_keys] = sizes.map(|size| vec![0f32; size]);
    let mut rounded = Vec::new();
    let chunk = || vec![0f32; CHUNK.min(sequence) * dims.keys()];
    let (mut weights, mut d_scores) = (chunk(), chunk());
    for (batch, key_head) in dims.key_heads() {
        let key_start = dims.key_start(batch, key_head);
        let (turn_q, turn_k) =
            (turn_q.of(sequence, head_dim, batch), turn_k.of(dims.keys(), head_dim, batch));
        turn(turn_k, &k[key_start..], narrow, &mut keys, head_dim);
        d_keys.fill(0.0);
        for head in key_head * dims.group()..(key_head + 1) * dims.group() {
            let start = dims.query_start(batch, head);
            turn(turn_q, &q[start..], wide, &mut queries, head_dim);
            let normalisers = &normalisers[(batch * dims.heads + head) * sequence..][..sequence];
            for (first, end) in dims.chunks() {
                let (count, rows) = (end - first, Rows::new(&inputs, batch, (first, end)));
                let (low, span) = (rows.low, rows.span());
                let (weights, d_scores) = (&mut weights[..count * span], &mut d_scores[..count * span]);
                let here = start + first * wide..;
                let g = Matrix::strided(&gradient[here.clone()], count, head_dim, wide);
                let values = &v[key_start + low * narrow..];
                score(weights, &queries, &keys, head_dim, rows);
                if let Some(bias) = bias {
                    bias.add(dims, batch, head, rows, weights);
                }
                let values = Matrix::strided(values, span, head_dim, narrow);
                T::product_into(d_scores, span, g, values.transposed());
                let (out, gradient) = (&out[here.clone()], &gradient[here]);
                let normalisers = &normalisers[first..end];
                softmax_backward(weights, d_scores, (rows, normalisers), (out, gradient), wide, head_dim);
                if let Some(bias) = bias {
                    bias.add_gradient(dims, batch, head, rows, d_scores, &mut d_table);
                }

                let weights = Matrix::new(T::all_rounded(weights, &mut rounded), count, span);
                T::add_product(&mut d_v[key_start + low * narrow..], narrow, weights.transposed(), g);
                let d_scores = Matrix::new(T::all_rounded(d_scores, &mut rounded), count, span);
                let keys = Matrix::new(&keys[low * head_dim..], span, head_dim);
                T::product_into(&mut d_queries[first * head_dim..], head_dim, d_scores, keys);
                let queries = Matrix::new(&queries[first * head_dim..], count, head_dim);
                T::add_product(&mut d_keys[low * head_dim..], head_dim, d_scores.transposed(), queries);
            }
            turn_back(turn_q, &d_queries, head_dim, &mut d_q[start..], wide);
        }
        turn_back(turn_k, &d_keys, head_dim, &mut d_k[key_start..], narrow);
    }
    Gradients { q: d_q, k: d_k, v: d_v, table: d_table }
}

/// Computes the scores of a block of queries.
fn score<T: Element>(scores: &mut [f32], queries: &[T], keys: &[T], head_dim: usize, rows: Rows<'_>) {
    let Rows { first, count, low, .. } = rows;
    let queries = Matrix::new(&queries[first * head_dim..], count, head_dim);
    let keys = Matrix::new(&keys[low * head_dim..], rows.span(), head_dim);
    T::product_into(scores, rows.span(), queries, keys.transposed());
}

/// Turns scores into weights; the weight of a key that a query does not see is 0.
#[multiversion(targets = "simd")]
fn softmax(scores: &mut [f32], rows: Rows<'_>, normalisers: &mut [f32]) {
    for (row, (scores, normaliser)) in scores.chunks_exact_mut(rows.span()).zip(normalisers).enumerate() {
        let [before, seen, after] = rows.split(row, scores);
        let largest = max(seen);
        for score in seen.iter_mut() {
            *score = exp(*score - largest);
        }
        let total = sum(seen.len(), |i| seen[i]);
        let share = 1.0 / total;
        for score in seen.iter_mut() {
            *score *= share;
        }
        before.fill(0.0);
        after.fill(0.0);
        *normaliser = largest + total.ln();
    }
}

/// Turns scores into weights `P` again, and `dP` into `dS`, both in place.
#[multiversion(targets = "simd")]
fn softmax_backward<T: Element>(
    scores: &mut [f32],
    d_weights: &mut [f32],
    (rows, normalisers): (Rows<'_>, &[f32]),
    (out, gradient): (&[T], &[T]),
    stride: usize,
    head_dim: usize,
) {
    let span = rows.span();
    let both = scores.chunks_exact_mut(span).zip(d_weights.chunks_exact_mut(span));
    for (row, ((scores, d_weights), normaliser)) in both.zip(normalisers).enumerate() {
        let (out, gradient) = (&out[row * stride..][..head_dim], &gradient[row * stride..][..head_dim]);
        let along = sum(head_dim, |i| out[i].single() * gradient[i].single());
        let [before, seen, after] = rows.split(row, scores);
        let [d_before, d_seen, d_after] = rows.split(row, d_weights);
        for (score, d) in seen.iter_mut().zip(d_seen) {
            *score = exp(*score - normaliser);
            *d = *score * (*d - along);
        }
        for hidden in [before, after, d_before, d_after] {
            hidden.fill(0.0);
        }
    }
}
