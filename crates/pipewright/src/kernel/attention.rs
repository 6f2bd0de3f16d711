//! Causal attention with grouped queries and rotary positions, head by head, in memory that stays in cache.
//!
//! ```text
//! q, k      rotated by their positions (Su et al., 2021: element j pairs with element j + head_dim / 2), q scaled
//! S = q kᵀ  in blocks of rows, each against the keys up to the block's end
//! P = softmax(S)    out = P v
//! ```
//!
//! Scores are not kept: the backward pass computes them again from `q`, `k` and each row's normaliser (Dao et al.,
//! 2022). With `D = sum(g out)` by row: `dP = g vᵀ`, `dS = P (dP - D)`, `dv = Pᵀ g`, `dq = dS k`, `dk = dSᵀ q`.

use multiversion::multiversion;

use super::exp::exp;
use super::product::{Matrix, add_product, product_into};
use super::simd::{max, sum};

/// Rows of queries in a block. Smaller blocks waste less work above the diagonal; larger ones make longer products.
const CHUNK: usize = 64;

/// Sizes of an attention. `q` and the result are `[batch * sequence, heads * head_dim]`, `k` and `v` `[batch * sequence,
/// kv_heads * head_dim]`; each key head serves `heads / kv_heads` neighbouring query heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Dims {
    pub batch: usize,
    pub sequence: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
}

impl Dims {
    fn query_width(self) -> usize {
        self.heads * self.head_dim
    }

    fn key_width(self) -> usize {
        self.kv_heads * self.head_dim
    }

    fn group(self) -> usize {
        self.heads / self.kv_heads
    }

    /// Returns every (batch, key head) with the index of its first element.
    fn key_heads(self) -> impl Iterator<Item = (usize, usize)> {
        (0..self.batch).flat_map(move |batch| (0..self.kv_heads).map(move |head| (batch, head)))
    }

    /// Returns the offset of a head in a tensor whose rows are `width` wide.
    fn start(self, batch: usize, head: usize, width: usize) -> usize {
        batch * self.sequence * width + head * self.head_dim
    }

    /// Returns the row ranges of the blocks.
    fn chunks(self) -> impl Iterator<Item = (usize, usize)> {
        (0..self.sequence).step_by(CHUNK).map(move |start| (start, (start + CHUNK).min(self.sequence)))
    }
}

/// Cosines and sines, `head_dim / 2` for each position, times a scale.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rotary<'a> {
    pub cos: &'a [f32],
    pub sin: &'a [f32],
    pub scale: f32,
}

/// Rotates a head, whose rows are `stride` apart in `from`, into rows of `width`.
#[multiversion(targets = "simd")]
fn turn(by: Rotary<'_>, from: &[f32], stride: usize, to: &mut [f32], width: usize) {
    let half = width / 2;
    for (place, to) in to.chunks_exact_mut(width).enumerate() {
        let (first, second) = from[place * stride..][..width].split_at(half);
        let (to_first, to_second) = to.split_at_mut(half);
        let (cos, sin) = (&by.cos[place * half..][..half], &by.sin[place * half..][..half]);
        turn_pairs((first, second), (to_first, to_second), cos, sin, by.scale, 1.0);
    }
}

/// The transpose of the rotation, from rows of `width` to rows that are `stride` apart.
#[multiversion(targets = "simd")]
fn turn_back(by: Rotary<'_>, from: &[f32], width: usize, to: &mut [f32], stride: usize) {
    let half = width / 2;
    for (place, from) in from.chunks_exact(width).enumerate() {
        let (first, second) = from.split_at(half);
        let (to_first, to_second) = to[place * stride..][..width].split_at_mut(half);
        let (cos, sin) = (&by.cos[place * half..][..half], &by.sin[place * half..][..half]);
        turn_pairs((first, second), (to_first, to_second), cos, sin, by.scale, -1.0);
    }
}

/// Rotates pairs by the angles of `cos` and `sin`; `sign` is 1 forward and -1 backward.
#[inline(always)]
fn turn_pairs(
    (first, second): (&[f32], &[f32]),
    (to_first, to_second): (&mut [f32], &mut [f32]),
    cos: &[f32],
    sin: &[f32],
    scale: f32,
    sign: f32,
) {
    let to = to_first.iter_mut().zip(to_second);
    for (((a, b), (to_a, to_b)), (cos, sin)) in first.iter().zip(second).zip(to).zip(cos.iter().zip(sin)) {
        let (a, b, sin) = (a * scale, b * scale, sin * sign);
        *to_a = a * cos - b * sin;
        *to_b = b * cos + a * sin;
    }
}

/// The inputs of an attention.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Inputs<'a> {
    pub dims: Dims,
    pub q: &'a [f32],
    pub k: &'a [f32],
    pub v: &'a [f32],
    /// For the queries; includes the scale of the scores.
    pub turn_q: Rotary<'a>,
    pub turn_k: Rotary<'a>,
}

/// The result, and `log sum exp` of each row of scores, `[batch, heads, sequence]`.
pub(crate) fn forward(inputs: Inputs<'_>) -> (Vec<f32>, Vec<f32>) {
    let Inputs { dims, q, k, v, turn_q, turn_k } = inputs;
    let Dims { sequence, head_dim, .. } = dims;
    let (wide, narrow) = (dims.query_width(), dims.key_width());
    let mut out = vec![0f32; dims.batch * sequence * wide];
    let mut normalisers = vec![0f32; dims.batch * dims.heads * sequence];
    let mut scores = vec![0f32; CHUNK.min(sequence) * sequence];
    let (mut queries, mut keys) = (vec![0f32; sequence * head_dim], vec![0f32; sequence * head_dim]);
    for (batch, key_head) in dims.key_heads() {
        let key_start = dims.start(batch, key_head, narrow);
        turn(turn_k, &k[key_start..], narrow, &mut keys, head_dim);
        let values = &v[key_start..];
        for head in key_head * dims.group()..(key_head + 1) * dims.group() {
            let start = dims.start(batch, head, wide);
            turn(turn_q, &q[start..], wide, &mut queries, head_dim);
            let normalisers = &mut normalisers[(batch * dims.heads + head) * sequence..][..sequence];
            for (first, end) in dims.chunks() {
                let scores = &mut scores[..(end - first) * end];
                score(scores, &queries, &keys, head_dim, first, end);
                softmax(scores, first, end, &mut normalisers[first..end]);
                let out = &mut out[start + first * wide..];
                let weights = Matrix::new(scores, end - first, end);
                product_into(out, wide, weights, Matrix::strided(values, end, head_dim, narrow));
            }
        }
    }
    (out, normalisers)
}

/// Gradients of `q`, `k` and `v`.
pub(crate) fn backward(
    inputs: Inputs<'_>,
    out: &[f32],
    normalisers: &[f32],
    gradient: &[f32],
) -> (Vec<f32>, Vec<f32>, Vec<f32>) {
    let Inputs { dims, q, k, v, turn_q, turn_k } = inputs;
    let Dims { sequence, head_dim, .. } = dims;
    let (wide, narrow) = (dims.query_width(), dims.key_width());
    let (mut d_q, mut d_k, mut d_v) = (vec![0f32; q.len()], vec![0f32; k.len()], vec![0f32; v.len()]);
    let head = || vec![0f32; sequence * head_dim];
    let (mut queries, mut keys, mut d_queries, mut d_keys) = (head(), head(), head(), head());
    let chunk = || vec![0f32; CHUNK.min(sequence) * sequence];
    let (mut weights, mut d_scores) = (chunk(), chunk());
    for (batch, key_head) in dims.key_heads() {
        let key_start = dims.start(batch, key_head, narrow);
        turn(turn_k, &k[key_start..], narrow, &mut keys, head_dim);
        d_keys.fill(0.0);
        for head in key_head * dims.group()..(key_head + 1) * dims.group() {
            let start = dims.start(batch, head, wide);
            turn(turn_q, &q[start..], wide, &mut queries, head_dim);
            let normalisers = &normalisers[(batch * dims.heads + head) * sequence..][..sequence];
            for (first, end) in dims.chunks() {
                let rows = end - first;
                let (weights, d_scores) = (&mut weights[..rows * end], &mut d_scores[..rows * end]);
                let here = start + first * wide..;
                let g = Matrix::strided(&gradient[here.clone()], rows, head_dim, wide);
                score(weights, &queries, &keys, head_dim, first, end);
                product_into(
                    d_scores,
                    end,
                    g,
                    Matrix::strided(&v[key_start..], end, head_dim, narrow).transposed(),
                );
                let rows_of = Rows { first, end, normalisers: &normalisers[first..end] };
                let (out, gradient) = (&out[here.clone()], &gradient[here]);
                softmax_backward(weights, d_scores, rows_of, (out, gradient), wide, head_dim);

                let weights = Matrix::new(weights, rows, end);
                add_product(&mut d_v[key_start..], narrow, weights.transposed(), g);
                let d_scores = Matrix::new(d_scores, rows, end);
                let keys = Matrix::new(&keys, end, head_dim);
                product_into(&mut d_queries[first * head_dim..], head_dim, d_scores, keys);
                let queries = Matrix::new(&queries[first * head_dim..], rows, head_dim);
                add_product(&mut d_keys, head_dim, d_scores.transposed(), queries);
            }
            turn_back(turn_q, &d_queries, head_dim, &mut d_q[start..], wide);
        }
        turn_back(turn_k, &d_keys, head_dim, &mut d_k[key_start..], narrow);
    }
    (d_q, d_k, d_v)
}

/// Computes the scores of query rows `first..end` against keys `0..end`.
fn score(scores: &mut [f32], queries: &[f32], keys: &[f32], head_dim: usize, first: usize, end: usize) {
    let queries = Matrix::new(&queries[first * head_dim..], end - first, head_dim);
    product_into(scores, end, queries, Matrix::new(keys, end, head_dim).transposed());
}

/// Turns scores into weights: row `i` of the block attends to keys up to `first + i`; the other weights are 0.
#[multiversion(targets = "simd")]
fn softmax(scores: &mut [f32], first: usize, end: usize, normalisers: &mut [f32]) {
    for (row, (scores, normaliser)) in scores.chunks_exact_mut(end).zip(normalisers).enumerate() {
        let (seen, hidden) = scores.split_at_mut(first + row + 1);
        let largest = max(seen);
        for score in seen.iter_mut() {
            *score = exp(*score - largest);
        }
        let total = sum(seen.len(), |i| seen[i]);
        let share = 1.0 / total;
        for score in seen.iter_mut() {
            *score *= share;
        }
        hidden.fill(0.0);
        *normaliser = largest + total.ln();
    }
}

/// Returns the rows of a block.
#[derive(Clone, Copy)]
struct Rows<'a> {
    first: usize,
    end: usize,
    normalisers: &'a [f32],
}

/// Turns scores into weights `P` again, and `dP` into `dS`, both in place.
#[multiversion(targets = "simd")]
fn softmax_backward(
    scores: &mut [f32],
    d_weights: &mut [f32],
    rows: Rows<'_>,
    (out, gradient): (&[f32], &[f32]),
    stride: usize,
    head_dim: usize,
) {
    let Rows { first, end, normalisers } = rows;
    let both = scores.chunks_exact_mut(end).zip(d_weights.chunks_exact_mut(end));
    for (row, ((scores, d_weights), normaliser)) in both.zip(normalisers).enumerate() {
        let (out, gradient) = (&out[row * stride..][..head_dim], &gradient[row * stride..][..head_dim]);
        let along = sum(head_dim, |i| out[i] * gradient[i]);
        let (seen, hidden) = scores.split_at_mut(first + row + 1);
        let (d_seen, d_hidden) = d_weights.split_at_mut(first + row + 1);
        for (score, d) in seen.iter_mut().zip(d_seen) {
            *score = exp(*score - normaliser);
            *d = *score * (*d - along);
        }
        hidden.fill(0.0);
        d_hidden.fill(0.0);
    }
}
