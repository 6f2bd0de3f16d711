//! Root-mean-square normalisation (Zhang and Sennrich, 2019).

use std::sync::Arc;

use burn::module::{Module, Param};
use burn::tensor::Tensor;
use pipewright_kernel::rms_norm::{backward, backward_bf16, forward, forward_bf16};
use pipewright_schedule::recompute::LayerPart;

use super::composed::at_least_single;
use super::operation::{
    CpuTensor, Operation, cpu_tensor, elements, from_cpu, in_bf16, on_cpu, takes_features, tensor_of,
    with_dtype,
};
use super::remade::note;
use crate::autodiff::{Rule, inner_of, record};

/// [`rms_norm`] with its weight, named as checkpoints name it.
#[derive(Module, Debug)]
pub struct RmsNorm {
    /// Factors, shape `[width]`.
    pub weight: Param<Tensor<1>>,
    /// Added to the mean square.
    #[module(skip)]
    pub epsilon: f64,
}

impl RmsNorm {
    /// Returns the normalised rows. Shapes: `[rows, width]` in and out.
    ///
    /// # Panics
    /// When the weight is not as wide as the rows.
    pub fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        rms_norm(x, self.weight.val(), self.epsilon)
    }
}

/// Returns `x / sqrt(mean(x²) + epsilon) * weight`, the mean over a row.
///
/// Shapes: `x [rows, width]`, `weight [width]`, result `[rows, width]`.
///
/// # Panics
/// When the weight is not as wide as the rows.
pub fn rms_norm(x: Tensor<2>, weight: Tensor<1>, epsilon: f64) -> Tensor<2> {
    takes_features("RmsNorm", weight.dims()[0], &x.dims());
    let inputs = [x.clone().into_dispatch(), weight.clone().into_dispatch()];
    let Some(([x, weight], tape)) = on_cpu(inputs) else { return on_device(x, weight, epsilon) };
    let epsilon = epsilon as f32;
    let (y, scales) = normalised(&x, &weight, epsilon);
    let y = tape.rounded(y);
    let (precision, kept) = (y.dtype(), [x.clone(), weight.clone()]);
    let y = tape.record_tensor(y, |_| RmsNormBackward { x, weight, scales });
    note(LayerPart::Norms, &y, || {
        move || from_cpu(with_dtype(normalised(&kept[0], &kept[1], epsilon).0, precision))
    });
    y
}

/// Returns the normalised rows, in bfloat16 if both tensors are, and otherwise in single precision; with the
/// scale of each row.
fn normalised(x: &CpuTensor, weight: &CpuTensor, epsilon: f32) -> (CpuTensor, Vec<f32>) {
    let shape = x.layout().shape().clone();
    match in_bf16([x, weight]) {
        Some([x, weight]) => {
            let (y, scales) = forward_bf16(x, weight, epsilon);
            (tensor_of(y, shape), scales)
        }
        None => {
            let (y, scales) = forward(&elements(x), &elements(weight), epsilon);
            (cpu_tensor(y, shape), scales)
        }
    }
}

/// The operation for tensors that [`on_cpu`] does not take.
fn on_device(x: Tensor<2>, weight: Tensor<1>, epsilon: f64) -> Tensor<2> {
    let weight: Tensor<2> = weight.unsqueeze();
    let (kept_x, kept_weight) = (inner_of(x.clone()), inner_of(weight.clone()));
    let roots = (at_least_single(kept_x.clone()).square().mean_dim(1) + epsilon).sqrt();
    let kept = [kept_x.clone(), kept_weight.clone(), roots.clone()];
    let rule = RmsNormRule { x: kept_x, weight: kept_weight, roots };
    let y = record([x, weight], normalised_on_device(&kept), Arc::new(rule));
    note(LayerPart::Norms, &y, || move || normalised_on_device(&kept));
    y
}

fn normalised_on_device([x, weight, roots]: &[Tensor<2>; 3]) -> Tensor<2> {
    let wide = at_least_single(x.clone());
    (wide / roots.clone() * at_least_single(weight.clone())).cast(x.dtype())
}

#[derive(Debug)]
struct RmsNormRule {
    x: Tensor<2>,
    /// `[1, width]`
    weight: Tensor<2>,
    /// The root of each row's mean square, `[rows, 1]`.
    roots: Tensor<2>,
}

impl Rule for RmsNormRule {
    fn backward(&self, gradient: Tensor<2>, [for_x, for_weight]: [bool; 2]) -> [Option<Tensor<2>>; 2] {
        let Self { x, weight, roots } = self;
        let gradient = at_least_single(gradient);
        let normalised = at_least_single(x.clone()) / roots.clone();
        let d_weight = for_weight.then(|| (gradient.clone() * normalised.clone()).sum_dim(0));
        let d_x = for_x.then(|| {
            let d_normalised = gradient * at_least_single(weight.clone());
            let mean = (d_normalised.clone() * normalised.clone()).mean_dim(1);
            (d_normalised - normalised * mean) / roots.clone()
        });
        [d_x.map(|d| d.cast(x.dtype())), d_weight.map(|d| d.cast(weight.dtype()))]
    }
}

#[derive(Clone, Debug)]
struct RmsNormBackward {
    x: CpuTensor,
    weight: CpuTensor,
    scales: Vec<f32>,
}

impl Operation<2> for RmsNormBackward {
    fn backward(self, gradient: CpuTensor, _wanted: [bool; 2]) -> [Option<CpuTensor>; 2] {
        let Self { x, weight, scales } = &self;
        let shape = x.layout().shape().clone();
        let (dx, dw) = match in_bf16([x, weight, &gradient]) {
            Some([x, weight, gradient]) => {
                let (dx, dw) = backward_bf16(x, weight, scales, gradient);
                (tensor_of(dx, shape), dw)
            }
            None => {
                let (dx, dw) = backward(&elements(x), &elements(weight), scales, &elements(&gradient));
                (cpu_tensor(dx, shape), dw)
            }
        };
        let width = dw.len();
        [Some(dx), Some(cpu_tensor(dw, [width]))]
    }
}

#[cfg(test)]
mod tests {
    use super::super::check::{check, numbers};
    use super::*;

    fn composed(x: Tensor<2>, weight: Tensor<1>, epsilon: f64) -> Tensor<2> {
        let root = (x.clone().square().mean_dim(1) + epsilon).sqrt();
        x / root * weight.unsqueeze()
    }

    #[test]
    fn equals_its_composition() {
        for width in [3, 16, 40] {
            let weight = numbers([width], 1.0);
            let inputs = [numbers([7, width], 3.0).reshape([7 * width]), weight];
            check(
                inputs,
                |[x, w]| rms_norm(x.reshape([7, width]), w, 1e-5),
                |[x, w]| composed(x.reshape([7, width]), w, 1e-5),
            );
        }
    }
}
