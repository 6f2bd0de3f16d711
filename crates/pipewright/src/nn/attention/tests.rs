//! Tests of causal attention: against its composition, and slices against whole sequences.

use super::super::attention_composition::composed;
use super::super::attention_form::RotaryPositions;
use super::super::check::{check as compare, numbers};
use super::*;

/// Returns the attention of whole sequences, composed of Burn's operations.
fn composition(attention: &CausalAttention, [q, k, v]: [Tensor<2>; 3]) -> Tensor<2> {
    let dims = attention.dims(&q, &k, &v);
    let (attention, sinks) = attention.blocks(dims);
    let unused = || Tensor::zeros([1, dims.heads], &Device::flex());
    composed(&attention, [q, k, v, sinks.unwrap_or_else(unused)])
}

fn check(attention: &CausalAttention, batch: usize, heads: usize, kv_heads: usize) {
    check_values(attention, batch, [heads, kv_heads], attention.form.head_dim);
}

/// Checks an attention with values of this width.
fn check_values(attention: &CausalAttention, batch: usize, [heads, kv_heads]: [usize; 2], value_dim: usize) {
    let rows = batch * attention.sequence;
    let (wide, narrow) = (heads * attention.form.head_dim, kv_heads * attention.form.head_dim);
    let of_value = kv_heads * value_dim;
    let shaped = |[q, k, v]: [Tensor<1>; 3]| {
        (q.reshape([rows, wide]), k.reshape([rows, narrow]), v.reshape([rows, of_value]))
    };
    compare(
        [numbers([rows * wide], 2.0), numbers([rows * narrow], 2.0), numbers([rows * of_value], 1.0)],
        |inputs| {
            let (q, k, v) = shaped(inputs);
            attention.forward(q, k, v)
        },
        |inputs| {
            let (q, k, v) = shaped(inputs);
            composition(attention, [q, k, v])
        },
    );
}

fn rotary(sequence: usize, head_dim: usize) -> CausalAttention {
    CausalAttention::rotary(sequence, head_dim, 100.0, &Device::flex())
}

#[test]
fn equals_its_composition() {
    check(&rotary(5, 4), 1, 1, 1);
    check(&rotary(1, 2), 2, 2, 2);
    check(&rotary(7, 6), 2, 6, 2);
    // More than one block of rows; the last block is shorter.
    check(&rotary(150, 8), 1, 2, 1);
    check(&CausalAttention::new(9, 4, &Device::flex()), 2, 2, 1);
}

#[test]
fn values_of_another_width_equal_their_composition() {
    check_values(&rotary(7, 6), 2, [4, 2], 3);
    check_values(&rotary(7, 4), 1, [2, 1], 9);
    check_values(&special(150, 70), 2, [2, 2], 5);
}

/// Returns an attention with a window, bounded scores, and positions of the first elements of a head only.
fn special(sequence: usize, window: usize) -> CausalAttention {
    let positions = RotaryPositions { frequencies: [1.0, 0.1].into(), factor: 1.25 };
    let usual = AttentionForm::without_positions(6);
    let form = AttentionForm { positions, scale: 0.7, window: Some(window), cap: Some(2.0), ..usual };
    CausalAttention::of(sequence, form, &Device::flex())
}

#[test]
fn other_forms_equal_their_composition() {
    check(&special(7, 3), 2, 4, 2);
    check(&special(7, 1), 1, 2, 2);
    check(&special(7, 9), 1, 2, 2);
    // The first keys of the last blocks are not computed.
    check(&special(150, 70), 2, 2, 1);
    let documents: Arc<[u32]> = [0, 0, 1, 1, 1, 2, 2, 0, 0, 0, 0, 0, 1, 1].into();
    let positions: Arc<[u32]> = [0, 1, 0, 1, 2, 0, 1, 0, 1, 2, 3, 4, 0, 1].into();
    check(&special(7, 3).with_scope(&TokenScope { sequence: 7, documents, positions }), 2, 4, 2);
}

/// Checks an attention with a sink for each of `heads` heads, and that slices make up the whole.
fn check_sinks(attention: &CausalAttention, batch: usize, [heads, kv_heads]: [usize; 2], slices: usize) {
    let (sequence, head_dim) = (attention.sequence, attention.form.head_dim);
    let rows = batch * sequence;
    let (wide, narrow) = (heads * head_dim, kv_heads * head_dim);
    let inputs = || {
        let narrow = rows * narrow;
        [numbers([rows * wide], 2.0), numbers([narrow], 2.0), numbers([narrow], 1.0), numbers([heads], 2.0)]
    };
    let shaped = |[q, k, v, sinks]: [Tensor<1>; 4]| {
        let x = (q.reshape([rows, wide]), k.reshape([rows, narrow]), v.reshape([rows, narrow]));
        (attention.with_sinks(Some(sinks)), x)
    };
    let composed = |inputs| {
        let (attention, (q, k, v)) = shaped(inputs);
        composition(&attention, [q, k, v])
    };
    compare(
        inputs(),
        |inputs| {
            let (attention, (q, k, v)) = shaped(inputs);
            attention.forward(q, k, v)
        },
        composed,
    );
    if slices == 0 {
        return;
    }
    let length = sequence / slices;
    let sliced = |inputs| {
        let (attention, (q, k, v)) = shaped(inputs);
        let parts = |x: Tensor<2>| {
            let width = x.dims()[1];
            let x = x.reshape([batch, sequence, width]);
            (0..slices).map(|part| x.clone().narrow(1, part * length, length)).collect::<Vec<_>>()
        };
        let (q, k, v) = (parts(q), parts(k), parts(v));
        let outputs = q
            .into_iter()
            .enumerate()
            .map(|(index, q)| attention.forward_slice(q, k[..=index].to_vec(), v[..=index].to_vec()));
        Tensor::cat(outputs.collect(), 1).reshape([rows, wide])
    };
    compare(inputs(), sliced, composed);
}

#[test]
fn sinks_equal_their_composition() {
    check_sinks(&rotary(6, 4), 2, [4, 2], 3);
    check_sinks(&special(7, 3), 1, [2, 2], 0);
    // More than one block of rows.
    check_sinks(&special(150, 70), 2, [2, 1], 2);
}

#[test]
fn documents_equal_their_composition() {
    let documents: Arc<[u32]> = [0, 0, 1, 1, 1, 2, 2, 0, 0, 0, 0, 0, 1, 1].into();
    let scope = TokenScope { documents, ..TokenScope::whole(2, 7) };
    check(&rotary(7, 4).with_scope(&scope), 2, 4, 2);
    let positions: Arc<[u32]> = [0, 1, 0, 1, 2, 0, 1, 0, 1, 2, 3, 4, 0, 1].into();
    check(&rotary(7, 4).with_scope(&TokenScope { positions, ..scope }), 2, 4, 2);
}

#[test]
#[should_panic(expected = "takes sequences of 4 and heads of 2, got")]
fn shapes_are_checked() {
    rotary(4, 2).forward(numbers([6, 4], 1.0), numbers([6, 4], 1.0), numbers([6, 4], 1.0));
}

#[test]
#[should_panic(expected = "a window has at least 1 token")]
fn a_window_without_a_token_is_refused() {
    special(4, 0);
}

/// Checks that the slices of sequences, each with the keys of all slices up to it, make up the whole
/// attention.
fn check_slices(attention: &CausalAttention, batch: usize, heads: usize, kv_heads: usize, lengths: &[usize]) {
    check_value_slices(attention, batch, [heads, kv_heads, attention.form.head_dim], lengths);
}

/// Like [`check_slices`], with values of this width.
fn check_value_slices(
    attention: &CausalAttention,
    batch: usize,
    [heads, kv_heads, value_dim]: [usize; 3],
    lengths: &[usize],
) {
    let sequence: usize = lengths.iter().sum();
    let (wide, narrow) = (heads * attention.form.head_dim, kv_heads * attention.form.head_dim);
    let of_value = kv_heads * value_dim;
    let shaped = |x: Tensor<1>, width: usize| x.reshape([batch, sequence, width]);
    let whole =
        CausalAttention { sequence, cos: attention.cos.clone().narrow(0, 0, sequence), ..attention.clone() };
    let whole = CausalAttention { sin: attention.sin.clone().narrow(0, 0, sequence), ..whole };
    let rows = batch * sequence;
    compare(
        [numbers([rows * wide], 2.0), numbers([rows * narrow], 2.0), numbers([rows * of_value], 1.0)],
        |[q, k, v]| {
            let (q, k, v) = (shaped(q, wide), shaped(k, narrow), shaped(v, of_value));
            let (mut start, mut slices) = (0, [Vec::new(), Vec::new()]);
            let outputs = lengths.iter().map(|&length| {
                let part = |x: &Tensor<3>| x.clone().narrow(1, start, length);
                slices[0].push(part(&k));
                slices[1].push(part(&v));
                let [keys, values] = slices.clone();
                let output = attention.forward_slice(part(&q), keys, values);
                start += length;
                output
            });
            Tensor::cat(outputs.collect(), 1).reshape([rows, heads * value_dim])
        },
        |[q, k, v]| {
            let flat = |x: Tensor<1>, width: usize| x.reshape([rows, width]);
            whole.forward(flat(q, wide), flat(k, narrow), flat(v, of_value))
        },
    );
}

#[test]
fn slices_make_up_the_whole() {
    check_slices(&rotary(8, 4), 1, 2, 1, &[4, 4]);
    check_slices(&rotary(9, 4), 3, 4, 2, &[3, 3, 3]);
    check_slices(&rotary(6, 2), 2, 1, 1, &[1, 2, 3]);
    // More than one block of queries, and tables for longer sequences.
    check_slices(&rotary(200, 8), 2, 2, 1, &[75, 75]);
    // A window that begins in the first slice, in the second slice, and between tokens of a block.
    check_slices(&special(9, 4), 2, 2, 1, &[3, 3, 3]);
    check_slices(&special(9, 2), 1, 4, 2, &[3, 3, 3]);
    check_slices(&special(200, 70), 2, 2, 1, &[75, 75]);
    check_value_slices(&rotary(9, 4), 2, [4, 2, 3], &[3, 3, 3]);
}

#[test]
#[should_panic(expected = "are not slices of sequences of 4 with heads of 2")]
fn slices_longer_than_the_tables_are_refused() {
    let x = || numbers([1, 3, 2], 1.0);
    rotary(4, 2).forward_slice(x(), vec![x(), x()], vec![x(), x()]);
}
