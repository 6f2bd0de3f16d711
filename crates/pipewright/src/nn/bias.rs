//! The sum with a bias, whose gradient can be deferred. The gradient is a sum of rows.

use std::sync::Arc;

use burn::module::Param;
use burn::tensor::Tensor;

use super::deferred::{DeferredWeight, recorded_on};
use super::operation::{CpuTensor, Operation, cpu, from_cpu, on_cpu};
use super::row_sums::sum_dim;
use crate::autodiff::{Rule, inner_of, record};
use crate::tensor::Value;

/// Returns `y + bias`. Shapes: `y [rows, outputs]`, `bias [outputs]`, result `[rows, outputs]`. The gradient of
/// the bias is deferred as the weight gradient of [`Linear`](super::Linear) is.
pub fn add_bias(y: Tensor<2>, bias: &Param<Tensor<1>>) -> Tensor<2> {
    add_share(y, bias, 1.0)
}

/// Returns `y + share * bias`.
pub(super) fn add_share(y: Tensor<2>, bias: &Param<Tensor<1>>, share: f64) -> Tensor<2> {
    let (id, bias) = (bias.id, bias.val());
    let row = |bias: Tensor<1>| -> Tensor<2> { scaled(bias, share).unsqueeze() };
    let Some(weight) = DeferredWeight::of(&bias, id) else { return y + row(bias) };
    let inputs = [y.clone().into_dispatch(), bias.clone().into_dispatch()];
    let Some(([y_value, bias_value], tape)) = on_cpu(inputs) else {
        let sum = inner_of(y.clone()) + row(inner_of(bias.clone()));
        // The parameter itself: an operation on it would wait for a gradient.
        let recorded = weight.deferred.recorded(Tensor::from_dispatch(bias.into_dispatch()));
        return record([y, recorded], sum, Arc::new(BiasRule { weight, share }));
    };
    // The sum is written into the storage of `y` if nothing else uses it.
    drop((y, bias));
    let sum = from_cpu::<2>(y_value) + row(from_cpu(bias_value));
    let sum = cpu(sum).expect("a sum stays on its device");
    recorded_on(tape, 1, Some(&weight.deferred)).record_tensor(sum, |_| BiasRule { weight, share })
}

fn scaled(bias: Tensor<1>, share: f64) -> Tensor<1> {
    if share == 1.0 { bias } else { bias * share }
}

#[derive(Clone, Debug)]
struct BiasRule {
    weight: DeferredWeight,
    share: f64,
}

impl BiasRule {
    fn leave(&self, gradient: Tensor<2>) {
        let (outputs, share) = (gradient.dims()[1], self.share);
        let sum = move || scaled(sum_dim(gradient, 0).reshape([outputs]), share);
        self.weight.leave("bias", || Value::of(sum()));
    }
}

impl Operation<2> for BiasRule {
    fn backward(self, gradient: CpuTensor, [_, for_bias]: [bool; 2]) -> [Option<CpuTensor>; 2] {
        if for_bias {
            self.leave(from_cpu(gradient.clone()));
        }
        [Some(gradient), None]
    }
}

impl Rule for BiasRule {
    fn backward(&self, gradient: Tensor<2>, [_, for_bias]: [bool; 2]) -> [Option<Tensor<2>>; 2] {
        if for_bias {
            self.leave(gradient.clone());
        }
        [Some(gradient), None]
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::DType;

    use super::super::check::{check_deferral, leaf, numbers};
    use super::*;

    #[test]
    fn biases_wait() {
        // Double precision takes the path of devices.
        for dtype in [DType::F32, DType::BF16, DType::F16, DType::F64] {
            for share in [1.0, 0.5] {
                let bias = Param::from_tensor(numbers::<1>([5], 2.0).cast(dtype).autodiff());
                let y = numbers::<2>([7, 5], 1.0).cast(dtype).autodiff().require_grad();
                check_deferral(&[leaf(&bias)], &y, || add_share(y.clone() * 2.0, &bias, share));
            }
        }
    }
}
