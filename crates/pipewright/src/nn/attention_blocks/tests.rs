//! Tests of the passes in blocks against the plain composition, for blocks of several sizes.

use burn::tensor::DType;

use super::super::attention_composition::{composed, hidden};
use super::super::check::{check as compare, numbers};
use super::*;

/// Returns an attention with rotary positions of the first `pairs` pairs of a head, and blocks of one query.
fn attention(dims: Dims, pairs: usize) -> BlockAttention {
    let positions = dims.earlier + dims.sequence;
    let table = |function: fn(f32) -> f32| {
        let angles = (0..positions).flat_map(|position| (0..pairs).map(move |pair| (position, pair)));
        let values: Vec<f32> =
            angles.map(|(position, pair)| function(position as f32 / 3f32.powi(pair as i32))).collect();
        Tensor::from_data(TensorData::new(values, [1, 1, positions, pairs]), &Device::flex())
    };
    BlockAttention {
        dims,
        tables: [table(f32::cos), table(f32::sin)],
        scale: 0.7,
        cap: None,
        starts: None,
        further: FurtherInput::Unused,
        block: 1,
    }
}

const DIMS: Dims =
    Dims { batch: 2, sequence: 9, earlier: 0, heads: 4, kv_heads: 2, head_dim: 6, value_dim: 5 };

/// Returns starts of this window.
fn starts(dims: Dims, window: usize) -> Option<Arc<[u32]>> {
    let of_row = dims.earlier..dims.earlier + dims.sequence;
    let starts = (0..dims.batch).flat_map(|_| of_row.clone());
    Some(starts.map(|query| (query + 1).saturating_sub(window) as u32).collect())
}

/// Checks the passes with blocks of 1, of 4 and of all queries.
fn check(attention: &BlockAttention) {
    let dims = attention.dims;
    let Dims { batch, sequence, earlier, heads, kv_heads, head_dim, value_dim } = dims;
    let further = match &attention.further {
        FurtherInput::Biases(relations) => [relations.count, heads],
        _ => [1, heads],
    };
    let keys = earlier + sequence;
    let shapes = [
        [batch * sequence, heads * head_dim],
        [batch * keys, kv_heads * head_dim],
        [batch * keys, kv_heads * value_dim],
        further,
    ];
    let inputs = shapes.map(|[rows, width]| numbers([rows * width], 1.5));
    let shaped = |inputs: [Tensor<1>; 4]| {
        let mut shapes = shapes.into_iter();
        inputs.map(|input| input.reshape(shapes.next().expect("a shape for each input")))
    };
    // An unused input has the gradient zero.
    let unused = |further: &Tensor<2>| further.clone().sum().reshape([1, 1]) * 0.0;
    for block in [1, 4, sequence] {
        let attention = BlockAttention { block, ..attention.clone() };
        let in_blocks = |inputs| {
            let inputs = shaped(inputs);
            let unused = unused(&inputs[3]);
            let slices = [&inputs[1], &inputs[2]].map(|x| {
                let [_, width] = x.dims();
                let whole = x.clone().reshape([batch, keys, width]);
                // As slices keep them.
                match earlier {
                    0 => vec![whole],
                    _ => vec![whole.clone().narrow(1, 0, earlier), whole.narrow(1, earlier, sequence)],
                }
            });
            attention.clone().forward(inputs, slices) + unused
        };
        compare(inputs.clone(), in_blocks, |inputs| {
            let inputs = shaped(inputs);
            let unused = unused(&inputs[3]);
            composed(&attention, inputs) + unused
        });
    }
}

#[test]
fn every_form_equals_its_composition() {
    let plain = attention(DIMS, 3);
    check(&plain);
    check(&BlockAttention { cap: Some(1.5), ..attention(DIMS, 2) });
    check(&BlockAttention { starts: starts(DIMS, 3), ..plain.clone() });
    check(&BlockAttention { further: FurtherInput::Sinks, ..plain.clone() });
    let documents = [0, 0, 2, 2, 2, 5, 5, 5, 8, 0, 0, 0, 0, 0, 0, 6, 6, 6].into();
    check(&BlockAttention { starts: Some(documents), further: FurtherInput::Sinks, ..plain });
    let small = Dims { batch: 1, heads: 1, kv_heads: 1, sequence: 1, head_dim: 2, value_dim: 1, ..DIMS };
    check(&attention(small, 1));
}

#[test]
fn slices_equal_their_composition() {
    let dims = Dims { earlier: 5, sequence: 6, ..DIMS };
    check(&attention(dims, 3));
    check(&BlockAttention { starts: starts(dims, 4), cap: Some(2.0), ..attention(dims, 1) });
}

#[test]
fn biases_equal_their_composition() {
    let dims = Dims { value_dim: 6, ..DIMS };
    let flags = dims.batch * 3 * dims.sequence * dims.sequence;
    let mask = (0..flags).map(|index| u8::from(index * 7919 % 13 < 4)).collect();
    let further = FurtherInput::Biases(Relations { count: 3, mask });
    check(&BlockAttention { further: further.clone(), ..attention(dims, 3) });
    check(&BlockAttention { further, starts: starts(dims, 5), ..attention(dims, 3) });
}

#[test]
fn each_query_sees_the_same_keys_in_blocks() {
    let dims = Dims { earlier: 3, sequence: 7, ..DIMS };
    for window in [1, 3, 6, 9, 20] {
        for (starts, block) in [(starts(dims, window), 1), (starts(dims, window), 3), (None, 3)] {
            let attention = BlockAttention { starts, block, ..attention(dims, 1) };
            let device = Device::flex();
            let all = hidden(&attention, &device);
            let count = |x: Tensor<4, Bool>| x.int().sum().into_scalar::<i64>() as usize;
            for block in attention.blocks() {
                let Block { queries, keys } = block.clone();
                let own = all.clone().narrow(2, queries.start, queries.len());
                let expected = own.clone().narrow(3, keys.start, keys.len());
                let found = attention.hidden(&block, &device).expand(expected.dims());
                found.into_data().assert_eq(&expected.clone().into_data(), true);
                let columns = dims.earlier + dims.sequence - keys.len();
                let outside = dims.batch * queries.len() * columns;
                assert_eq!(count(own) - count(expected), outside, "keys outside a block are hidden");
            }
        }
    }
}

#[test]
fn blocks_have_few_scores_and_enough_queries() {
    let of = |sequence, heads| queries_of_block(Dims { batch: 1, sequence, heads, ..DIMS });
    assert_eq!(of(1024, 16), 256);
    assert_eq!(of(8192, 32), QUERIES);
    assert!(of(8, 1) > 8);
}

#[test]
fn pairs_turn_by_the_position_times_their_frequency() {
    let dims = Dims { batch: 1, sequence: 3, heads: 1, kv_heads: 1, head_dim: 4, ..DIMS };
    let x = Tensor::<4>::from_data([[[[1.0, 2.0, 3.0, 4.0]; 3]]], &Device::flex());
    let turned: Vec<f32> = attention(dims, 2).turned(x, 0, 0.5, false).into_data().iter().collect();
    let angle = |j: i32| 2.0 / 3f32.powi(j);
    let expected = [
        angle(0).cos() - 3.0 * angle(0).sin(),
        2.0 * angle(1).cos() - 4.0 * angle(1).sin(),
        3.0 * angle(0).cos() + angle(0).sin(),
        4.0 * angle(1).cos() + 2.0 * angle(1).sin(),
    ];
    let near = turned[8..].iter().zip(expected).all(|(a, b)| (a - 0.5 * b).abs() < 1e-6);
    assert!(near, "{turned:?} {expected:?}");
}

/// The tape of a bfloat16 attention has what its single-precision one has, in half the bytes: the result and
/// the gradients have the type of the inputs.
#[test]
fn half_precision_stays_half() {
    let attention = BlockAttention { block: 4, ..attention(DIMS, 3) };
    let leaf = |rows, width| numbers([rows, width], 1.0).cast(DType::BF16).autodiff().require_grad();
    let rows = DIMS.batch * DIMS.sequence;
    let (q, k, v) = (leaf(rows, 24), leaf(rows, 12), leaf(rows, 10));
    let slices = [&k, &v].map(|x| vec![x.clone().reshape([2, 9, x.dims()[1]])]);
    let unused = Tensor::zeros([1, 4], &Device::flex());
    let out = attention.forward([q.clone(), k.clone(), v.clone(), unused], slices);
    assert_eq!(out.dtype(), DType::BF16);
    let gradients = out.sum().backward();
    assert!([q, k, v].iter().all(|x| x.grad(&gradients).is_some_and(|d| d.dtype() == DType::BF16)));
}
