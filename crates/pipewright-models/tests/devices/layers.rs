//! Every layer, and the optimizer, on the device and on the processor: results and gradients agree.

use burn::module::Param;
use burn::optim::Optimizer;
use burn::tensor::{Device, DeviceKind, Int, Tensor, TensorData, Tolerance};
use pipewright::nn::{
    AttentionForm, CausalAttention, Dropout, Embedding, Linear, RmsNorm, TiedHead, cross_entropy, rms_norm,
    swiglu,
};
use pipewright::optimizer::AdamW;
use pipewright::random::{RandomStream, StreamKey};

use crate::{DEVICE, devices};

/// Returns numbers between `-scale` and `scale`; they differ for each `seed`.
fn numbers(shape: [usize; 2], seed: usize, scale: f32) -> TensorData {
    let count = shape[0] * shape[1];
    let value = |index: usize| ((index * 7919 + seed * 31) % 2003) as f32 / 1001.5 - 1.0;
    TensorData::new((0..count).map(|index| value(index) * scale).collect::<Vec<f32>>(), shape)
}

fn ids<const N: usize>(ids: [i64; N], device: &Device) -> Tensor<1, Int> {
    Tensor::from_data(TensorData::new(ids.to_vec(), [N]), device)
}

fn close(found: &TensorData, expected: &TensorData) {
    found.assert_approx_eq::<f32>(expected, Tolerance::rel_abs(1e-4, 2e-5));
}

/// Checks that `layer` returns the same and has the same gradients on the device and on the processor.
fn check<const N: usize>(
    shapes: [([usize; 2], f32); N],
    layer: impl Fn([Tensor<2>; N], &Device) -> Tensor<2>,
) {
    if devices(&[DEVICE]).is_none() {
        return;
    }
    let mut seed = 0;
    let inputs = shapes.map(|(shape, scale)| {
        seed += 1;
        numbers(shape, seed, scale)
    });
    let run = |device: &Device| {
        let device = device.clone().autodiff();
        let leaves = inputs.clone().map(|input| Tensor::from_data(input, &device).require_grad());
        let result = layer(leaves.clone(), &device);
        let upstream = Tensor::from_data(numbers(result.dims(), 99, 1.0), &device);
        let gradients = (result.clone() * upstream).sum().backward();
        let gradients = leaves.map(|leaf| leaf.grad(&gradients).map(Tensor::into_data));
        (result.into_data(), gradients)
    };
    let (found, found_gradients) = run(&Device::wgpu(DeviceKind::Cpu));
    let (expected, expected_gradients) = run(&Device::flex());
    close(&found, &expected);
    for (found, expected) in found_gradients.iter().zip(&expected_gradients) {
        close(found.as_ref().expect("a gradient"), expected.as_ref().expect("a gradient"));
    }
}

#[test]
fn linear() {
    check([([5, 7], 1.0), ([7, 3], 2.0), ([1, 3], 1.0)], |[x, weight, bias], _| {
        // Parameters of a layer are leaves of their own, so the sum of both uses is checked.
        let bias = bias.reshape([3]);
        let layer = Linear { weight: Param::from_tensor(weight.clone().inner()), bias: None };
        layer.forward(x.clone()) + x.matmul(weight) + bias.unsqueeze()
    });
}

#[test]
fn tied_head() {
    check([([5, 3], 1.0), ([9, 3], 2.0)], |[x, table], _| {
        let layer = TiedHead { weight: Param::from_tensor(table.clone().inner()) };
        layer.forward(x.clone()) + x.matmul(table.transpose())
    });
}

#[test]
fn embedding() {
    check([([6, 4], 1.0)], |[table], device| {
        let layer = Embedding { weight: Param::from_tensor(table.clone().inner()) };
        let rows = layer.forward(ids([3, 0, 3, 5], device).reshape([2, 2])).reshape([4, 4]);
        rows + table.select(0, ids([3, 0, 3, 5], device))
    });
}

#[test]
fn normalisation_and_gate() {
    check([([7, 40], 3.0), ([1, 40], 1.0)], |[x, weight], _| rms_norm(x, weight.reshape([40]), 1e-5));
    check([([7, 16], 3.0)], |[x], device| {
        let weight = Param::from_tensor(Tensor::ones([16], device));
        RmsNorm { weight, epsilon: 1e-5 }.forward(x)
    });
    check([([5, 9], 6.0), ([5, 9], 2.0)], |[gate, up], _| swiglu(gate, up));
}

#[test]
fn attention() {
    check([([12, 12], 2.0), ([12, 6], 2.0), ([12, 6], 1.0)], |[q, k, v], device| {
        CausalAttention::rotary(6, 6, 100.0, device).forward(q, k, v)
    });
    check([([9, 8], 2.0), ([9, 8], 2.0), ([9, 8], 1.0)], |[q, k, v], device| {
        CausalAttention::new(9, 4, device).forward(q, k, v)
    });
}

#[test]
fn attention_with_a_window_bounded_scores_and_sinks() {
    let form = || AttentionForm {
        window: Some(3),
        cap: Some(2.0),
        scale: 0.7,
        ..AttentionForm::without_positions(6)
    };
    check([([14, 12], 2.0), ([14, 6], 2.0), ([14, 6], 1.0)], |[q, k, v], device| {
        CausalAttention::of(7, form(), device).forward(q, k, v)
    });
    check([([14, 12], 2.0), ([14, 6], 2.0), ([14, 6], 1.0), ([1, 2], 2.0)], |[q, k, v, sinks], device| {
        CausalAttention::of(7, form(), device).with_sinks(Some(sinks.reshape([2]))).forward(q, k, v)
    });
}

/// The scores do not fit one block.
#[test]
fn attention_in_several_blocks() {
    // Of one row each.
    check([([128, 1200], 2.0), ([128, 1200], 2.0), ([128, 1200], 1.0)], |[q, k, v], device| {
        CausalAttention::rotary(64, 2, 100.0, device).forward(q, k, v)
    });
    // Of some queries of one row.
    check([([128, 600], 2.0), ([128, 600], 2.0), ([128, 600], 1.0)], |[q, k, v], device| {
        CausalAttention::rotary(128, 2, 100.0, device).forward(q, k, v)
    });
}

#[test]
fn loss() {
    for scale in [0.3, 5.0, 300.0] {
        check([([6, 20], scale)], |[logits], device| {
            cross_entropy(logits, ids([0, 19, 2, 1, 1, 3], device)).unsqueeze()
        });
    }
}

#[test]
fn dropout_draws_the_same_mask() {
    check([([20, 20], 1.0)], |[x], _| {
        Dropout::new(0.3).forward(x, RandomStream::new(StreamKey::default(), "dropout"))
    });
}

#[test]
fn optimizer() {
    if devices(&[DEVICE]).is_none() {
        return;
    }
    let run = |device: &Device| {
        let optimizer = AdamW { weight_decay: 0.1, ..AdamW::default() };
        let mut parameter = Tensor::<2>::from_data(numbers([5, 7], 0, 1.0), device);
        let mut state = None;
        for step in 1..4 {
            let gradient = Tensor::from_data(numbers([5, 7], step, 0.1), device);
            (parameter, state) = optimizer.step(1e-2, parameter, gradient, state);
        }
        parameter.into_data()
    };
    close(&run(&Device::wgpu(DeviceKind::Cpu)), &run(&Device::flex()));
}
