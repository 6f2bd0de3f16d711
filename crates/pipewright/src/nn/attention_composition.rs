//! The plain composition of an attention, to compare its passes with: all scores at once, and the gradients of
//! Burn's tape.

use burn::tensor::{Bool, Device, Tensor, TensorData, activation};
use pipewright_kernel::attention::Dims;

use super::attention_blocks::{BlockAttention, FurtherInput};
use super::composed::at_least_single;

/// Returns the result for queries, keys, values and the further input, on their tape.
pub(super) fn composed(attention: &BlockAttention, [q, k, v, further]: [Tensor<2>; 4]) -> Tensor<2> {
    let Dims { batch, sequence, earlier, heads, kv_heads, value_dim, .. } = attention.dims;
    let keys = earlier + sequence;
    let split = |x: Tensor<2>, rows: usize, heads: usize| {
        let width = x.dims()[1] / heads;
        x.reshape([batch, rows, heads, width]).swap_dims(1, 2)
    };
    let share = |x: Tensor<4>| {
        let [_, _, _, width] = x.dims();
        let repeated = x.unsqueeze_dim::<5>(2).repeat_dim(2, heads / kv_heads);
        repeated.reshape([batch, heads, keys, width])
    };
    let q = turn(attention, split(q, sequence, heads), earlier);
    let k = share(turn(attention, split(k, keys, kv_heads), 0));
    let v = share(split(v, keys, kv_heads));
    let (precision, device) = (q.dtype(), q.device());
    let mut scores = at_least_single(q.matmul(k.transpose())) * attention.scale;
    if let Some(cap) = attention.cap {
        scores = (scores / cap).tanh() * cap;
    }
    if let FurtherInput::Biases(relations) = &attention.further {
        let mask: Vec<f32> = relations.mask.iter().map(|&holds| f32::from(holds)).collect();
        let mask = TensorData::new(mask, [batch, relations.count, sequence * sequence]);
        let mask = Tensor::<3>::from_data(mask, &scores.device()).cast(scores.dtype());
        let biases = at_least_single(further.clone()).transpose().unsqueeze::<3>();
        let biases = biases.repeat_dim(0, batch).matmul(mask);
        scores = scores + biases.reshape([batch, heads, sequence, sequence]);
    }
    let scores = scores.mask_fill(hidden(attention, &device), f32::NEG_INFINITY);
    let weights = match &attention.further {
        FurtherInput::Sinks => {
            let sinks = at_least_single(further).reshape([1, heads, 1, 1]);
            let sinks = sinks.repeat_dim(0, batch).repeat_dim(2, sequence);
            activation::softmax(Tensor::cat(vec![scores, sinks], 3), 3).narrow(3, 0, keys)
        }
        _ => activation::softmax(scores, 3),
    };
    let out = weights.cast(precision).matmul(v).swap_dims(1, 2);
    out.reshape([batch * sequence, heads * value_dim])
}

/// Rotates heads whose first position is `first`.
fn turn(attention: &BlockAttention, x: Tensor<4>, first: usize) -> Tensor<4> {
    let (precision, [_, _, positions, width]) = (x.dtype(), x.dims());
    let x = at_least_single(x);
    let pairs = attention.tables[0].dims()[3];
    let (a, b) = (x.clone().narrow(3, 0, pairs), x.clone().narrow(3, pairs, pairs));
    let [cos, sin] = attention.tables.each_ref().map(|table| table.clone().narrow(2, first, positions));
    let mut parts = vec![a.clone() * cos.clone() - b.clone() * sin.clone(), b * cos + a * sin];
    if width > 2 * pairs {
        parts.push(x.narrow(3, 2 * pairs, width - 2 * pairs));
    }
    Tensor::cat(parts, 3).cast(precision)
}

/// Returns which keys each query does not see, `[batch, 1, sequence, earlier + sequence]`: the same ones for
/// every head.
pub(super) fn hidden(attention: &BlockAttention, device: &Device) -> Tensor<4, Bool> {
    let Dims { batch, sequence, earlier, .. } = attention.dims;
    let keys = earlier + sequence;
    let mut hidden = Vec::with_capacity(batch * sequence * keys);
    for token in 0..batch * sequence {
        let start = attention.starts.as_ref().map_or(0, |starts| starts[token] as usize);
        hidden.extend((0..keys).map(|key| key < start || key > earlier + token % sequence));
    }
    Tensor::from_data(TensorData::new(hidden, [batch, 1, sequence, keys]), device)
}
