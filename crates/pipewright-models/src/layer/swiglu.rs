//! The gated activation of the feed-forward layer (Shazeer, 2020).

use burn::tensor::Tensor;

use super::linearized;

/// `silu(gate) * up`, with `silu(x) = x / (1 + exp(-x))`.
///
/// One exponential pass in all: value and derivative of `silu` share the sigmoid `s`, for `silu' = s + x s (1 - s)`. An
/// overflowing exponential gives `s = 0`, which is the limit.
pub(crate) fn swiglu(gate: Tensor<2>, up: Tensor<2>) -> Tensor<2> {
    let point = gate.clone().inner();
    let sigmoid = (point.clone().neg().exp() + 1.0).recip();
    let value = point * sigmoid.clone();
    let slope = (value.clone().neg() + 1.0) * sigmoid + value.clone();
    linearized(gate, value, slope) * up
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Device, TensorData, activation};

    use super::super::check::check;
    use super::*;

    #[test]
    fn equals_its_definition() {
        let halves = |x: Tensor<2>| (x.clone().narrow(1, 0, 9), x.narrow(1, 9, 9));
        let layer = |x| {
            let (gate, up) = halves(x);
            swiglu(gate, up)
        };
        let definition = |x| {
            let (gate, up) = halves(x);
            activation::silu(gate) * up
        };
        check([5, 18], 6.0, layer, definition);
    }

    #[test]
    fn extreme_gates_stay_finite() {
        let device = Device::flex().autodiff();
        let gate = Tensor::from_data(TensorData::new(vec![-1e4f32, -100.0, 100.0, 1e4], [1, 4]), &device)
            .require_grad();
        let result = swiglu(gate.clone(), Tensor::ones([1, 4], &device));
        let gradient = gate.grad(&result.clone().sum().backward()).expect("it is a leaf");
        let list = |tensor: Tensor<2>| tensor.into_data().iter::<f32>().collect::<Vec<_>>();
        assert_eq!(list(result), [0.0, 0.0, 100.0, 1e4]);
        assert_eq!(list(gradient), [0.0, 0.0, 1.0, 1.0]);
    }
}
