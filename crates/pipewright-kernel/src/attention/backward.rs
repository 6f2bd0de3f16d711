//! The backward pass.

use std::ops::Range;

use half::bf16;

use super::super::element::Element;
use super::super::product::Matrix;
use super::super::rotary::{turn, turn_back};
use super::super::soft_cap::{bound, bound_backward};
use super::inputs::{Dims, Inputs, Rows};
use super::softmax::{score, softmax_backward};

/// The gradients of an attention's inputs.
pub struct Gradients<T = f32> {
    /// The gradient of the queries, of their shape.
    pub q: Vec<T>,
    /// The gradient of the keys, of their shape.
    pub k: Vec<T>,
    /// The gradient of the values, of their shape.
    pub v: Vec<T>,
    /// The gradient of the table of the bias; empty without one.
    pub table: Vec<f32>,
    /// The gradient of the sinks, `[heads]`; empty without sinks.
    pub sinks: Vec<f32>,
}

// Functions for each element type, not generic ones, so that their loops are compiled with this crate's
// optimisation.

/// Returns the gradients of the inputs, from what [`forward`](super::forward) returned and the gradient of
/// its result.
pub fn backward(inputs: Inputs<'_>, out: &[f32], normalisers: &[f32], gradient: &[f32]) -> Gradients {
    backward_in(Results { inputs, out, normalisers, gradient })
}

/// Like [`backward`], with products of bfloat16. Each gradient is rounded once.
pub fn backward_bf16(
    inputs: Inputs<'_, bf16>,
    out: &[bf16],
    normalisers: &[f32],
    gradient: &[bf16],
) -> Gradients<bf16> {
    backward_in(Results { inputs, out, normalisers, gradient })
}

/// The inputs and results of the forward pass, and the gradient of the result.
#[derive(Clone, Copy)]
struct Results<'a, T> {
    inputs: Inputs<'a, T>,
    out: &'a [T],
    normalisers: &'a [f32],
    gradient: &'a [T],
}

fn backward_in<T: Element>(results: Results<'_, T>) -> Gradients<T> {
    let Inputs { dims, q, k, v, turn_q, turn_k, bias, sinks, .. } = results.inputs;
    let Dims { sequence, head_dim, value_dim, .. } = dims;
    let (wide, narrow) = (dims.query_width(), dims.key_width());
    let [mut d_q, mut d_k, mut d_v] = [q, k, v].map(|input| vec![T::rounded(0.0); input.len()]);
    let mut d_table = vec![0f32; bias.map_or(0, |bias| bias.table.len())];
    let mut d_sinks = vec![0f32; sinks.map_or(0, <[f32]>::len)];
    let mut heads = Heads::new(dims);
    for (batch, key_head) in dims.key_heads() {
        let key_start = dims.key_start(batch, key_head);
        let (turn_q, turn_k) = (turn_q.of(sequence, batch), turn_k.of(dims.keys(), batch));
        turn(turn_k, &k[key_start..], narrow, &mut heads.keys, head_dim);
        heads.d_keys.fill(0.0);
        heads.d_values.fill(0.0);
        for head in dims.query_heads(key_head) {
            let start = dims.query_start(batch, head);
            turn(turn_q, &q[start..], wide, &mut heads.queries, head_dim);
            for block in dims.chunks() {
                let d_sink = heads.add_block(results, (batch, key_head, head), block, &mut d_table);
                d_sinks.get_mut(head).into_iter().for_each(|sum| *sum += d_sink);
            }
            turn_back(turn_q, &heads.d_queries, head_dim, &mut d_q[start..], wide);
        }
        turn_back(turn_k, &heads.d_keys, head_dim, &mut d_k[key_start..], narrow);
        let value_start = dims.value_start(batch, key_head);
        for (row, d) in heads.d_values.chunks_exact(value_dim).enumerate() {
            let to = &mut d_v[value_start + row * dims.value_width()..][..value_dim];
            T::round_all(d, to);
        }
    }
    Gradients { q: d_q, k: d_k, v: d_v, table: d_table, sinks: d_sinks }
}

/// A query head and the key head that serves it, `[positions, head_dim]`, with their gradients, and the
/// gradient of the values, `[positions, value_dim]`.
struct Heads<T> {
    /// Rotated.
    queries: Vec<T>,
    /// Rotated.
    keys: Vec<T>,
    /// The gradient of the rotated queries.
    d_queries: Vec<f32>,
    /// The gradient of the rotated keys, summed over the query heads.
    d_keys: Vec<f32>,
    /// The gradient of the values, summed over the query heads.
    d_values: Vec<f32>,
    /// Memory for a block.
    weights: Vec<f32>,
    d_scores: Vec<f32>,
    /// The scores of a block after their bound.
    bounded: Vec<f32>,
    rounded: Vec<T>,
}

impl<T: Element> Heads<T> {
    fn new(dims: Dims) -> Self {
        let [of_queries, of_keys] = [dims.sequence, dims.keys()].map(|rows| rows * dims.head_dim);
        Self {
            queries: vec![T::rounded(0.0); of_queries],
            keys: vec![T::rounded(0.0); of_keys],
            d_queries: vec![0.0; of_queries],
            d_keys: vec![0.0; of_keys],
            d_values: vec![0.0; dims.keys() * dims.value_dim],
            weights: vec![0.0; dims.most_scores()],
            d_scores: vec![0.0; dims.most_scores()],
            bounded: Vec::new(),
            rounded: Vec::new(),
        }
    }

    /// Computes the gradients of a block's queries, and adds its part of the gradients of keys and values.
    /// Returns its part of the gradient of the head's sink.
    fn add_block(
        &mut self,
        results: Results<'_, T>,
        (batch, key_head, head): (usize, usize, usize),
        block: Range<usize>,
        d_table: &mut [f32],
    ) -> f32 {
        let Results { inputs, out, normalisers, gradient } = results;
        let Inputs { dims, v, cap, bias, sinks, .. } = inputs;
        let Dims { head_dim, value_dim, .. } = dims;
        let (out_width, value_width) = (dims.out_width(), dims.value_width());
        let rows = Rows::new(&inputs, batch, block.clone());
        let Rows { count, low, .. } = rows;
        let span = rows.span();
        let [weights, d_scores] =
            [&mut self.weights, &mut self.d_scores].map(|memory| &mut memory[..count * span]);
        score(weights, &self.queries, &self.keys, head_dim, rows);
        if let Some(cap) = cap {
            bound(weights, cap);
            self.bounded.clear();
            self.bounded.extend_from_slice(weights);
        }
        if let Some(bias) = bias {
            bias.add(dims, batch, head, rows, weights);
        }
        let start = dims.out_start(batch, head) + block.start * out_width;
        let (out, gradient) = (&out[start..], &gradient[start..]);
        let g = Matrix::strided(gradient, count, value_dim, out_width);
        let value_start = dims.value_start(batch, key_head) + low * value_width;
        let values = Matrix::strided(&v[value_start..], span, value_dim, value_width);
        T::product_into(d_scores, span, g, values.transposed());
        let normalisers = &normalisers[(batch * dims.heads + head) * dims.sequence..][block.clone()];
        let rows_of_head = (rows, sinks.map(|sinks| sinks[head]), normalisers);
        let d_sink = softmax_backward(weights, d_scores, rows_of_head, (out, gradient), out_width, value_dim);
        if let Some(bias) = bias {
            bias.add_gradient(dims, batch, head, rows, d_scores, d_table);
        }
        if let Some(cap) = cap {
            bound_backward(d_scores, &self.bounded, cap);
        }

        let weights = Matrix::new(T::all_rounded(weights, &mut self.rounded), count, span);
        T::add_product(&mut self.d_values[low * value_dim..], value_dim, weights.transposed(), g);
        let d_scores = Matrix::new(T::all_rounded(d_scores, &mut self.rounded), count, span);
        let keys = Matrix::new(&self.keys[low * head_dim..], span, head_dim);
        T::product_into(&mut self.d_queries[block.start * head_dim..], head_dim, d_scores, keys);
        let queries = Matrix::new(&self.queries[block.start * head_dim..], count, head_dim);
        T::add_product(&mut self.d_keys[low * head_dim..], head_dim, d_scores.transposed(), queries);
        d_sink
    }
}
