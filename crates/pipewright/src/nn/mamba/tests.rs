//! Tests of the Mamba-2 operation against its composition and the recurrence.

use std::sync::Arc;

use burn::module::{Param, ParamId};
use burn::tensor::{Device, Tensor, TensorData, Tolerance};

use super::super::check::{check as compare, numbers};
use super::super::linear::Linear;
use super::composed::composed;
use super::*;

const SIZES: MambaSizes = MambaSizes {
    heads: 4,
    head_dim: 3,
    groups: 2,
    state: 5,
    taps: 4,
    limits: (0.0, f64::INFINITY),
    epsilon: 1e-5,
};

/// Returns the inputs of the operation, in its order, as vectors.
fn inputs(sizes: &MambaSizes, rows: usize) -> [Tensor<1>; 7] {
    let MambaSizes { heads, taps, .. } = *sizes;
    let channels = sizes.convolved();
    [
        numbers([rows * sizes.projected()], 1.5),
        numbers([channels * taps], 0.7),
        numbers([channels], 0.3),
        numbers([heads], 0.5) - 1.0,
        numbers([heads], 1.0),
        numbers([heads], 1.0),
        numbers([sizes.width()], 0.5) + 1.0,
    ]
}

fn parameter<const D: usize>(tensor: Tensor<D>, id: ParamId) -> Param<Tensor<D>> {
    Param::initialized(id, tensor)
}

/// Returns a mixer around the inputs after the first, with projections that are not used.
fn mixer(sizes: &MambaSizes, inputs: &[Tensor<1>; 7], id: ParamId) -> Mamba2 {
    let [_, weight, bias, dt_bias, rates, skip, norm] = inputs.clone();
    let linear = || Linear { weight: Param::from_tensor(Tensor::ones([1, 1], &Device::flex())), bias: None };
    let vector = |tensor| parameter(tensor, ParamId::new());
    Mamba2 {
        in_proj: linear(),
        conv1d: DepthwiseConvolution {
            weight: parameter(weight.reshape([sizes.convolved(), 1, sizes.taps]), id),
            bias: Some(vector(bias)),
        },
        dt_bias: vector(dt_bias),
        A_log: vector(rates),
        D: vector(skip),
        norm: GroupNormWeight { weight: vector(norm) },
        out_proj: linear(),
        sizes: *sizes,
    }
}

fn run(
    sizes: &MambaSizes,
    inputs: [Tensor<1>; 7],
    sequence: usize,
    documents: Option<&Arc<[u32]>>,
) -> Tensor<2> {
    let projected = inputs[0].clone();
    let rows = projected.dims()[0] / sizes.projected();
    let mixer = mixer(sizes, &inputs, ParamId::new());
    mixer.scan().forward(projected.reshape([rows, sizes.projected()]), sequence, documents)
}

fn check(sizes: &MambaSizes, batch: usize, sequence: usize, documents: Option<Vec<u32>>) {
    let documents: Option<Arc<[u32]>> = documents.map(Into::into);
    let rows = batch * sequence;
    compare(
        inputs(sizes, rows),
        |inputs| run(sizes, inputs, sequence, documents.as_ref()),
        |[projected, weight, bias, dt_bias, rates, skip, norm]| {
            let projected = projected.reshape([rows, sizes.projected()]);
            let weight = weight.reshape([sizes.convolved(), 1, sizes.taps]);
            let others = [bias, dt_bias, rates, skip, norm];
            composed(sizes, projected, weight, others, sequence, documents.as_deref())
        },
    );
}

#[test]
fn equals_its_composition() {
    check(&SIZES, 2, 7, None);
    check(&SIZES, 1, 1, None);
    check(&SIZES, 2, 64, None);
    // Several chunks; the last one is shorter.
    check(&SIZES, 2, 150, None);
    check(&MambaSizes { groups: 1, state: 16, head_dim: 8, taps: 2, ..SIZES }, 1, 70, None);
    check(&MambaSizes { groups: 4, taps: 1, ..SIZES }, 1, 66, None);
}

#[test]
fn a_convolution_without_a_bias_has_the_bias_zero() {
    let mut vectors = inputs(&SIZES, 14);
    vectors[2] = vectors[2].zeros_like();
    let expected = run(&SIZES, vectors.clone(), 7, None).into_data();
    let device = Device::flex().autodiff();
    for device in [device.clone(), device.gradient_checkpointing()] {
        let leaves =
            vectors.clone().map(|vector| Tensor::<1>::from_data(vector.into_data(), &device).require_grad());
        let mut mixer = mixer(&SIZES, &leaves, ParamId::new());
        mixer.conv1d.bias = None;
        let projected = leaves[0].clone().reshape([14, SIZES.projected()]);
        let result = mixer.scan().forward(projected, 7, None);
        result.clone().into_data().assert_approx_eq::<f32>(&expected, Tolerance::rel_abs(2e-5, 2e-5));
        let gradients = result.sum().backward();
        assert!(leaves[0].grad(&gradients).is_some());
        assert!(leaves[2].grad(&gradients).is_none());
    }
}

#[test]
fn steps_stay_within_their_limits() {
    check(&MambaSizes { limits: (0.2, 0.5), ..SIZES }, 2, 20, None);
    check(&MambaSizes { limits: (0.3, f64::INFINITY), ..SIZES }, 1, 70, None);
}

#[test]
fn documents_are_apart() {
    let ends = |ends: &[usize], rows: usize| {
        Some((0..rows).map(|row| ends.iter().filter(|&&end| row >= end).count() as u32).collect())
    };
    check(&SIZES, 2, 9, ends(&[2, 3, 9, 14], 18));
    // Documents that end at, before and after the edges of chunks, and one that spans several.
    check(&SIZES, 1, 200, ends(&[64, 100, 127, 129], 200));
    check(&SIZES, 2, 150, ends(&[20, 150, 290], 300));
}

/// Returns the recurrence, token by token, in f64.
fn recurrence(sizes: &MambaSizes, inputs: &[Vec<f64>; 7], sequence: usize, documents: &[u32]) -> Vec<f64> {
    let &MambaSizes { heads, head_dim, groups, state, taps, .. } = sizes;
    let [projected, weight, bias, dt_bias, rates, skip, norm] = inputs;
    let (width, channels) = (sizes.width(), sizes.convolved());
    let silu = |x: f64| x / (1.0 + (-x).exp());
    let mut out = Vec::new();
    let mut states = vec![0.0; heads * head_dim * state];
    for (t, row) in projected.chunks(sizes.projected()).enumerate() {
        let sees = |back: usize| t % sequence >= back && documents[t - back] == documents[t];
        if !sees(1) {
            states.fill(0.0);
        }
        let convolved = |channel: usize| {
            let earlier = |back: usize| projected[(t - back) * sizes.projected() + width + channel];
            let taps = (0..taps).filter(|&back| sees(back));
            let sum: f64 =
                taps.map(|back| earlier(back) * weight[channel * sizes.taps + sizes.taps - 1 - back]).sum();
            silu(bias[channel] + sum)
        };
        let u: Vec<f64> = (0..channels).map(convolved).collect();
        let mut v = vec![0.0; width];
        for head in 0..heads {
            let group = head / (heads / groups);
            let b = &u[width + group * state..][..state];
            let c = &u[width + (groups + group) * state..][..state];
            let step = (row[width + channels + head] + dt_bias[head]).exp().ln_1p();
            let step = step.clamp(sizes.limits.0, sizes.limits.1);
            for channel in head * head_dim..(head + 1) * head_dim {
                let mut y = skip[head] * u[channel];
                for (index, (b, c)) in b.iter().zip(c).enumerate() {
                    let element = &mut states[channel * state + index];
                    *element = *element * (-step * rates[head].exp()).exp() + step * u[channel] * b;
                    y += *element * c;
                }
                v[channel] = y * silu(row[channel]);
            }
        }
        for (run, norm) in v.chunks(width / groups).zip(norm.chunks(width / groups)) {
            let square = run.iter().map(|v| v * v).sum::<f64>() / run.len() as f64;
            out.extend(run.iter().zip(norm).map(|(v, w)| v / (square + sizes.epsilon).sqrt() * w));
        }
    }
    out
}

/// Compares result and derivatives with the recurrence; derivatives are differences in f64 along a direction.
fn check_recurrence(sizes: &MambaSizes, batch: usize, sequence: usize, documents: &[u32]) {
    let tensors = inputs(sizes, batch * sequence);
    let exact = tensors.clone().map(|tensor| tensor.into_data().iter::<f64>().collect::<Vec<f64>>());
    let expected = recurrence(sizes, &exact, sequence, documents);
    let leaves = tensors.map(|tensor| tensor.autodiff().require_grad());
    let result = run(sizes, leaves.clone(), sequence, Some(&documents.into()));
    let upstream = numbers(result.dims(), 1.0);
    let expected_data = TensorData::new(expected.clone(), result.dims()).convert::<f32>();
    let tolerance = Tolerance::<f32>::rel_abs(1e-5, 1e-5);
    result.clone().into_data().assert_approx_eq::<f32>(&expected_data, tolerance);

    let gradients = (result * upstream.clone().autodiff()).sum().backward();
    let upstream: Vec<f64> = upstream.into_data().iter().collect();
    let value = |inputs: &[Vec<f64>; 7]| -> f64 {
        recurrence(sizes, inputs, sequence, documents).iter().zip(&upstream).map(|(y, g)| y * g).sum()
    };
    for (index, leaf) in leaves.iter().enumerate() {
        let gradient: Vec<f64> = leaf.grad(&gradients).expect("it is a leaf").into_data().iter().collect();
        let direction: Vec<f64> =
            (0..gradient.len()).map(|i| ((i * 37 + 11) % 17) as f64 / 8.0 - 1.0).collect();
        let moved = |by: f64| {
            let mut inputs = exact.clone();
            inputs[index].iter_mut().zip(&direction).for_each(|(x, d)| *x += by * d);
            value(&inputs)
        };
        let numeric = (moved(1e-5) - moved(-1e-5)) / 2e-5;
        let found: f64 = gradient.iter().zip(&direction).map(|(g, d)| g * d).sum();
        let scale = gradient.iter().map(|g| g * g).sum::<f64>().sqrt();
        assert!((found - numeric).abs() < 1e-4 * scale.max(1.0), "input {index}: {found} {numeric}");
    }
}

#[test]
fn equals_the_recurrence() {
    check_recurrence(&SIZES, 2, 5, &[0; 10]);
    check_recurrence(&SIZES, 1, 140, &[0; 140]);
    let documents: Vec<u32> = (0..140).map(|t| u32::from(t >= 30) + u32::from(t >= 128)).collect();
    check_recurrence(
        &MambaSizes { heads: 6, groups: 3, taps: 3, limits: (0.1, 2.0), ..SIZES },
        1,
        140,
        &documents,
    );
}

#[test]
fn inside_a_collector_the_weight_gradient_waits() {
    use super::super::deferred::{Deferred, WeightTask};
    let leaves = inputs(&SIZES, 70).map(|tensor| tensor.autodiff().require_grad());
    let projected = || leaves[0].clone().reshape([70, SIZES.projected()]);
    let id = ParamId::new();
    let mut mixer = mixer(&SIZES, &leaves, id);
    // A parameter itself, and not a tensor that is computed from one.
    let weight = mixer.conv1d.weight.val().inner().autodiff().require_grad();
    mixer.conv1d.weight = parameter(weight.clone(), id);
    let expected = weight.grad(&mixer.scan().forward(projected(), 70, None).sum().backward());

    let deferred = Deferred::new(Arc::new([id].into()));
    let result = deferred.collect(|| mixer.scan().forward(projected(), 70, None));
    assert!(deferred.take().is_empty());
    let gradients = result.sum().backward();
    assert!(leaves[0].grad(&gradients).is_some());
    assert!(weight.grad(&gradients).is_none());
    let tasks = deferred.take();
    let [WeightTask::Convolution(task)] = tasks.as_slice() else { panic!("{tasks:?}") };
    assert_eq!(task.weight, id);
    let mut sum = vec![0.0; SIZES.convolved() * SIZES.taps];
    task.add_to(&mut sum);
    assert_eq!(sum, expected.expect("it does not wait").into_data().iter::<f32>().collect::<Vec<_>>());
}

/// A mixer that gets rows in parts returns what it returns for all rows.
#[test]
fn rows_one_by_one_are_mixed_as_all_at_once() {
    for (sizes, has_bias) in [(SIZES, true), (MambaSizes { taps: 1, groups: 1, ..SIZES }, false)] {
        let (rows, hidden) = (80, 3);
        let mut mixer = mixer(&sizes, &inputs(&sizes, 1), ParamId::new());
        mixer.conv1d.bias = mixer.conv1d.bias.filter(|_| has_bias);
        let matrix = |shape: [usize; 2]| {
            let weight = numbers([shape[0] * shape[1]], 0.8).reshape(shape);
            Linear { weight: Param::from_tensor(weight), bias: None }
        };
        (mixer.in_proj, mixer.out_proj) =
            (matrix([hidden, sizes.projected()]), matrix([sizes.width(), hidden]));
        let x = numbers([rows * hidden], 1.0).reshape([rows, hidden]);
        let expected = mixer.forward(x.clone(), rows, None).into_data();
        let mut cache = MambaCache::default();
        let parts =
            [0..70, 70..71, 71..73, 73..80].map(|part| mixer.extend(x.clone().slice(part), &mut cache));
        let found = Tensor::cat(parts.into(), 0).into_data();
        found.assert_approx_eq::<f32>(&expected, Tolerance::rel_abs(1e-5, 1e-5));
    }
}
