//! Tests of the passes in blocks against the plain composition, for blocks of several sizes.

use burn::tensor::{DType, Device, Tolerance};

use super::super::attention_composition::{composed, hidden};
use super::super::check::{check as compare, numbers};
use super::*;

/// Returns an attention with rotary positions of the first `pairs` pairs of a head, and blocks of one query
/// of all rows and heads.
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
        sizes: BlockSizes { queries: 1, ..whole(dims) },
    }
}

/// Returns one block for all queries.
fn whole(dims: Dims) -> BlockSizes {
    BlockSizes { rows: dims.batch, kv_heads: dims.kv_heads, queries: dims.sequence }
}

const DIMS: Dims =
    Dims { batch: 2, sequence: 9, earlier: 0, heads: 4, kv_heads: 2, head_dim: 6, value_dim: 5 };

/// Returns starts of this window.
fn starts(dims: Dims, window: usize) -> Option<Arc<[u32]>> {
    let queries = dims.earlier..dims.earlier + dims.sequence;
    let starts = (0..dims.batch).flat_map(|_| queries.clone());
    Some(starts.map(|query| (query + 1).saturating_sub(window) as u32).collect())
}

/// Checks the passes with blocks of several sizes, also of some rows and heads only.
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
    let whole = whole(dims);
    let sizes = [
        BlockSizes { queries: 1, ..whole },
        BlockSizes { queries: 4, ..whole },
        whole,
        BlockSizes { rows: 1, ..whole },
        BlockSizes { kv_heads: 1, queries: 4, ..whole },
        BlockSizes { rows: 1, kv_heads: 1, queries: 4 },
    ];
    for sizes in sizes {
        let attention = BlockAttention { sizes, ..attention.clone() };
        let in_blocks = |inputs| {
            let [q, k, v, further] = shaped(inputs);
            let unused = unused(&further);
            let is_used = !matches!(attention.further, FurtherInput::Unused);
            let (attention, further) = (attention.clone(), is_used.then_some(further));
            let out = match earlier {
                0 => attention.forward([q, k, v], further),
                // As slices keep them.
                _ => {
                    let slices = [&k, &v].map(|x| {
                        let whole = x.clone().reshape([batch, keys, x.dims()[1]]);
                        vec![whole.clone().narrow(1, 0, earlier), whole.narrow(1, earlier, sequence)]
                    });
                    attention.forward_slices([q, k, v], further, slices)
                }
            };
            out + unused
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
        let starts = starts(dims, window);
        for (starts, rows, queries) in [(starts.clone(), 2, 1), (starts, 1, 3), (None, 2, 3)] {
            let sizes = BlockSizes { rows, queries, ..whole(dims) };
            let attention = BlockAttention { starts, sizes, ..attention(dims, 1) };
            let device = Device::flex();
            let all = hidden(&attention, &device);
            let places = Tensor::arange(0..(dims.earlier + dims.sequence) as i64, &device);
            let count = |x: Tensor<4, Bool>| x.int().sum().into_scalar::<i64>() as usize;
            for block in attention.blocks() {
                let Block { rows, queries, keys, .. } = block.clone();
                let in_rows = all.clone().narrow(0, rows.start, rows.len());
                let every_key = in_rows.narrow(2, queries.start, queries.len());
                let expected = every_key.clone().narrow(3, keys.start, keys.len());
                let found = attention.hidden(&block, &places);
                assert_eq!(found.dims()[0], 1, "all rows have the same window");
                found.expand(expected.dims()).into_data().assert_eq(&expected.clone().into_data(), true);
                let columns = dims.earlier + dims.sequence - keys.len();
                let outside = rows.len() * queries.len() * columns;
                assert_eq!(count(every_key) - count(expected), outside, "keys outside a block are hidden");
            }
        }
    }
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

/// Returns numbers that bfloat16 has.
fn rounded(shape: [usize; 2], scale: f32) -> Tensor<2> {
    numbers(shape, scale).cast(DType::BF16).cast(DType::F32)
}

/// Returns the result and the gradients of queries, keys and values of this type, in single precision.
fn pass(attention: &BlockAttention, inputs: &[Tensor<2>; 3], dtype: DType) -> [Tensor<2>; 4] {
    let leaves = inputs.clone().map(|x| x.cast(dtype).autodiff().require_grad());
    let out = attention.clone().forward(leaves.clone(), None);
    assert_eq!(out.dtype(), dtype);
    let upstream = rounded(out.dims(), 1.0).autodiff();
    let gradients = (out.clone().cast(DType::F32) * upstream).sum().backward();
    let [q, k, v] = leaves.map(|leaf| leaf.grad(&gradients).expect("a leaf"));
    assert!([&q, &k, &v].iter().all(|gradient| gradient.dtype() == dtype));
    [out.inner(), q, k, v].map(|x| x.cast(DType::F32))
}

/// Returns the errors of the bfloat16 passes, relative to the single-precision passes.
fn errors(attention: &BlockAttention, inputs: &[Tensor<2>; 3]) -> [f32; 4] {
    let [half, single] = [DType::BF16, DType::F32].map(|dtype| pass(attention, inputs, dtype));
    let norm = |x: Tensor<2>| x.square().sum().into_scalar::<f32>().sqrt();
    let mut pairs = half.into_iter().zip(single);
    [(); 4].map(|()| {
        let (half, single) = pairs.next().expect("four pairs");
        norm(half - single.clone()) / norm(single)
    })
}

/// The result and the gradients have the type of the inputs, and the values of single precision up to the
/// roundings.
#[test]
fn half_precision_has_the_values_of_single_precision() {
    let attention = BlockAttention { sizes: BlockSizes { queries: 4, ..whole(DIMS) }, ..attention(DIMS, 3) };
    let rows = DIMS.batch * DIMS.sequence;
    let inputs = [24, 12, 10].map(|width| rounded([rows, width], 1.0));
    let errors = errors(&attention, &inputs);
    assert!(errors.iter().all(|&error| error < 0.01), "{errors:?}");
}

/// A common part of all keys changes no weights. The gradients of a query's scores add up to zero, or the
/// gradient of the query would have a multiple of that part.
#[test]
fn keys_with_a_common_component_lose_no_precision() {
    let dims = Dims { batch: 1, sequence: 64, heads: 2, kv_heads: 1, head_dim: 16, value_dim: 16, ..DIMS };
    let usual = attention(dims, 1);
    // Without positions, so that turns leave the common component as it is.
    let tables = [Tensor::ones_like(&usual.tables[0]), Tensor::zeros_like(&usual.tables[1])];
    let attention = BlockAttention { tables, sizes: BlockSizes { queries: 16, ..whole(dims) }, ..usual };
    let k = (rounded([64, 16], 1.0) + 8.0).cast(DType::BF16).cast(DType::F32);
    let [_, d_q, ..] = errors(&attention, &[rounded([64, 32], 0.3), k, rounded([64, 16], 1.0)]);
    assert!(d_q < 0.02, "{d_q}");
}

#[test]
fn unwanted_gradients_are_left_out() {
    let attention = attention(DIMS, 3);
    let rows = DIMS.batch * DIMS.sequence;
    let inputs = [24, 12, 10].map(|width| numbers([rows, width], 1.0));
    let expected = pass(&attention, &inputs, DType::F32);
    for wanted in 0..3 {
        let mut index = 0;
        let inputs = inputs.clone().map(|x| {
            index += 1;
            if index - 1 == wanted { x.autodiff().require_grad() } else { x.autodiff() }
        });
        let out = attention.clone().forward(inputs.clone(), None);
        let upstream = rounded(out.dims(), 1.0).autodiff();
        let gradients = (out * upstream).sum().backward();
        for (index, input) in inputs.iter().enumerate() {
            let found = input.grad(&gradients).map(Tensor::into_data);
            assert_eq!(found.is_some(), index == wanted);
            if let Some(found) = found {
                let expected = expected[1 + index].clone().into_data();
                found.assert_approx_eq::<f32>(&expected, Tolerance::rel_abs(1e-6, 1e-6));
            }
        }
    }
}
