//! Root-mean-square normalisation (Zhang and Sennrich, 2019).

use std::sync::Arc;

use burn::module::{Module, Param};
use burn::tensor::{DType, Tensor};
use pipewright_kernel::rms_norm::{
    backward, backward_bf16, forward, forward_bf16, input_gradient, input_gradient_bf16, weight_gradient,
    weight_gradient_bf16,
};
use pipewright_schedule::recompute::LayerPart;

use super::composed::at_least_single;
use super::deferred::{DeferredWeight, recorded_on};
use super::operation::{
    CpuTensor, Operation, cpu_tensor, elements, from_cpu, in_bf16, on_cpu, takes_features, tensor_of,
    with_dtype,
};
use super::remade::note;
use crate::autodiff::{Rule, inner_of, record};
use crate::tensor::Value;

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
    /// Returns the normalised rows. Shapes: `[rows, width]` in and out. The gradient of the weight is deferred
    /// in a split backward, until which the layer keeps its input and the gradient of its result.
    ///
    /// # Panics
    /// When the weight is not as wide as the rows.
    pub fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let weight = self.weight.val();
        let deferred = DeferredWeight::of(&weight, self.weight.id);
        normalise(x, weight, self.epsilon, deferred)
    }
}

/// Returns `x / sqrt(mean(x²) + epsilon) * weight`, the mean over a row. The gradient of the weight is not
/// deferred: the weight may be computed from parameters.
///
/// Shapes: `x [rows, width]`, `weight [width]`, result `[rows, width]`.
///
/// # Panics
/// When the weight is not as wide as the rows.
pub fn rms_norm(x: Tensor<2>, weight: Tensor<1>, epsilon: f64) -> Tensor<2> {
    normalise(x, weight, epsilon, None)
}

fn normalise(x: Tensor<2>, weight: Tensor<1>, epsilon: f64, deferred: Option<DeferredWeight>) -> Tensor<2> {
    takes_features("RmsNorm", weight.dims()[0], &x.dims());
    let inputs = [x.clone().into_dispatch(), weight.clone().into_dispatch()];
    let Some(([x, weight], tape)) = on_cpu(inputs) else { return on_device(x, weight, epsilon, deferred) };
    let epsilon = epsilon as f32;
    let (y, scales) = normalised(&x, &weight, epsilon);
    let y = tape.rounded(y);
    let (precision, kept) = (y.dtype(), [x.clone(), weight.clone()]);
    let tape = recorded_on(tape, 1, deferred.as_ref().map(|weight| &weight.deferred));
    let y = tape.record_tensor(y, |_| RmsNormBackward { x, weight, scales, deferred });
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
fn on_device(x: Tensor<2>, weight: Tensor<1>, epsilon: f64, deferred: Option<DeferredWeight>) -> Tensor<2> {
    let row: Tensor<2> = weight.clone().unsqueeze();
    let (kept_x, kept_weight) = (inner_of(x.clone()), inner_of(row.clone()));
    let roots = (at_least_single(kept_x.clone()).square().mean_dim(1) + epsilon).sqrt();
    let kept = [kept_x.clone(), kept_weight.clone(), roots.clone()];
    let recorded = match &deferred {
        // The parameter itself: an operation on it would wait for a gradient.
        Some(deferred) => deferred.deferred.recorded(Tensor::from_dispatch(weight.into_dispatch())),
        None => row,
    };
    let rule = RmsNormRule { x: kept_x, weight: kept_weight, roots, deferred };
    let y = record([x, recorded], normalised_on_device(&kept), Arc::new(rule));
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
    deferred: Option<DeferredWeight>,
}

impl Rule for RmsNormRule {
    fn backward(&self, gradient: Tensor<2>, [for_x, for_weight]: [bool; 2]) -> [Option<Tensor<2>>; 2] {
        let Self { x, weight, roots, deferred } = self;
        let gradient = at_least_single(gradient);
        let normalised = at_least_single(x.clone()) / roots.clone();
        let of_weight = |normalised: Tensor<2>, gradient: Tensor<2>, dtype: DType| {
            (gradient * normalised).sum_dim(0).cast(dtype)
        };
        let (dtype, waits) = (weight.dtype(), deferred.as_ref().is_some_and(DeferredWeight::waits));
        let d_weight = (for_weight && !waits).then(|| of_weight(normalised.clone(), gradient.clone(), dtype));
        if let Some(deferred) = deferred.as_ref().filter(|_| for_weight) {
            let (x, roots, gradient, done) = (x.clone(), roots.clone(), gradient.clone(), d_weight.clone());
            let later = move || of_weight(at_least_single(x) / roots, gradient, dtype);
            deferred.leave("RmsNorm", move || Value::of(done.unwrap_or_else(later).flatten::<1>(0, 1)));
        }
        let d_x = for_x.then(|| {
            let d_normalised = gradient * at_least_single(weight.clone());
            let mean = (d_normalised.clone() * normalised.clone()).mean_dim(1);
            (d_normalised - normalised * mean) / roots.clone()
        });
        [d_x.map(|d| d.cast(x.dtype())), d_weight.filter(|_| deferred.is_none())]
    }
}

#[derive(Clone, Debug)]
struct RmsNormBackward {
    x: CpuTensor,
    weight: CpuTensor,
    scales: Vec<f32>,
    deferred: Option<DeferredWeight>,
}

impl Operation<2> for RmsNormBackward {
    fn backward(mut self, gradient: CpuTensor, [for_x, for_weight]: [bool; 2]) -> [Option<CpuTensor>; 2] {
        // A task that had its collector would keep itself alive.
        let deferred = self.deferred.take();
        let waits = deferred.as_ref().is_some_and(DeferredWeight::waits);
        let (d_x, d_weight) = match [for_x, for_weight && !waits] {
            [true, true] => {
                let (d_x, d_weight) = self.gradients(&gradient);
                (Some(d_x), Some(d_weight))
            }
            [true, false] => (Some(self.input_gradient(&gradient)), None),
            [false, true] => (None, Some(self.weight_gradient(&gradient))),
            [false, false] => (None, None),
        };
        let Some(deferred) = deferred else { return [d_x, d_weight] };
        if for_weight {
            deferred.leave("RmsNorm", move || {
                let d_weight = d_weight.unwrap_or_else(|| self.weight_gradient(&gradient));
                Value::of(from_cpu::<1>(with_dtype(d_weight, self.weight.dtype())))
            });
        }
        [d_x, None]
    }
}

impl RmsNormBackward {
    /// Returns the gradients of `x` and of the weight.
    fn gradients(&self, gradient: &CpuTensor) -> (CpuTensor, CpuTensor) {
        let Self { x, weight, scales, .. } = self;
        let shape = x.layout().shape().clone();
        let (d_x, d_weight) = match in_bf16([x, weight, gradient]) {
            Some([x, weight, gradient]) => {
                let (d_x, d_weight) = backward_bf16(x, weight, scales, gradient);
                (tensor_of(d_x, shape), d_weight)
            }
            None => {
                let (d_x, d_weight) = backward(&elements(x), &elements(weight), scales, &elements(gradient));
                (cpu_tensor(d_x, shape), d_weight)
            }
        };
        let width = d_weight.len();
        (d_x, cpu_tensor(d_weight, [width]))
    }

    /// Returns the gradient of `x` alone.
    fn input_gradient(&self, gradient: &CpuTensor) -> CpuTensor {
        let Self { x, weight, scales, .. } = self;
        let shape = x.layout().shape().clone();
        match in_bf16([x, weight, gradient]) {
            Some([x, weight, gradient]) => tensor_of(input_gradient_bf16(x, weight, scales, gradient), shape),
            None => {
                let [x, weight, gradient] = [x, weight, gradient].map(elements);
                cpu_tensor(input_gradient(&x, &weight, scales, &gradient), shape)
            }
        }
    }

    /// Returns the gradient of the weight alone.
    fn weight_gradient(&self, gradient: &CpuTensor) -> CpuTensor {
        let Self { x, weight, scales, .. } = self;
        let width = weight.layout().num_elements();
        let sum = match in_bf16([x, gradient]) {
            Some([x, gradient]) => weight_gradient_bf16(x, scales, gradient, width),
            None => weight_gradient(&elements(x), scales, &elements(gradient), width),
        };
        cpu_tensor(sum, [width])
    }
}

#[cfg(test)]
mod tests {
    use super::super::check::{check, check_deferral, leaf, numbers};
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

    #[test]
    fn factors_wait() {
        // Double precision takes the path of devices.
        for dtype in [DType::F32, DType::BF16, DType::F16, DType::F64] {
            for width in [5, 64] {
                let weight = Param::from_tensor(numbers::<1>([width], 1.0).cast(dtype).autodiff());
                let norm = RmsNorm { weight, epsilon: 1e-5 };
                let constant = numbers::<2>([7, width], 3.0).cast(dtype).autodiff();
                for x in [constant.clone().require_grad(), constant] {
                    check_deferral(&[leaf(&norm.weight)], &x, || norm.forward(x.clone()));
                }
            }
        }
    }
}
