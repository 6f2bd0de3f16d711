//! The forward pass.

use half::bf16;

use super::super::element::Element;
use super::super::product::Matrix;
use super::super::rotary::turn;
use super::super::soft_cap::bound;
use super::inputs::{Dims, Inputs, Rows};
use super::softmax::{score, softmax};

// Functions for each element type, not generic ones, so that their loops are compiled with this crate's
// optimisation.

/// Returns the result, and `log sum exp` of each row of scores, `[batch, heads, sequence]`.
pub fn forward(inputs: Inputs<'_>) -> (Vec<f32>, Vec<f32>) {
    forward_in(inputs)
}

/// Like [`forward`], with products of bfloat16.
pub fn forward_bf16(inputs: Inputs<'_, bf16>) -> (Vec<bf16>, Vec<f32>) {
    forward_in(inputs)
}

fn forward_in<T: Element>(inputs: Inputs<'_, T>) -> (Vec<T>, Vec<f32>) {
    let Inputs { dims, q, k, v, turn_q, turn_k, cap, bias, sinks, .. } = inputs;
    let Dims { sequence, head_dim, value_dim, .. } = dims;
    let (wide, narrow) = (dims.query_width(), dims.key_width());
    let (out_width, value_width) = (dims.out_width(), dims.value_width());
    let mut out = vec![T::rounded(0.0); dims.batch * sequence * out_width];
    let mut normalisers = vec![0f32; dims.batch * dims.heads * sequence];
    let mut scores = vec![0f32; dims.most_scores()];
    let mut rounded = Vec::new();
    let [mut queries, mut keys] = [sequence, dims.keys()].map(|rows| vec![T::rounded(0.0); rows * head_dim]);
    for (batch, key_head) in dims.key_heads() {
        let key_start = dims.key_start(batch, key_head);
        let (turn_q, turn_k) = (turn_q.of(sequence, batch), turn_k.of(dims.keys(), batch));
        turn(turn_k, &k[key_start..], narrow, &mut keys, head_dim);
        let values = &v[dims.value_start(batch, key_head)..];
        for head in dims.query_heads(key_head) {
            let start = dims.out_start(batch, head);
            turn(turn_q, &q[dims.query_start(batch, head)..], wide, &mut queries, head_dim);
            let normalisers = &mut normalisers[(batch * dims.heads + head) * sequence..][..sequence];
            for block in dims.chunks() {
                let rows = Rows::new(&inputs, batch, block.clone());
                let scores = &mut scores[..rows.count * rows.span()];
                score(scores, &queries, &keys, head_dim, rows);
                if let Some(cap) = cap {
                    bound(scores, cap);
                }
                if let Some(bias) = bias {
                    bias.add(dims, batch, head, rows, scores);
                }
                let out = &mut out[start + block.start * out_width..];
                softmax(scores, rows, sinks.map(|sinks| sinks[head]), &mut normalisers[block]);
                let weights = Matrix::new(T::all_rounded(scores, &mut rounded), rows.count, rows.span());
                let values =
                    Matrix::strided(&values[rows.low * value_width..], rows.span(), value_dim, value_width);
                T::rounded_product_into(out, out_width, weights, values);
            }
        }
    }
    (out, normalisers)
}
