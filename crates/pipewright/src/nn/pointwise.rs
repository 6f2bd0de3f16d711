//! Functions of each element, whose bits on the processor do not depend on the system's C library, as the bits of Burn's
//! operations do.

use burn::tensor::{DType, Tensor, activation};
use pipewright_kernel::pointwise::{Function, replace, slopes, values};

use super::composed::at_least_single;
use super::operation::{CpuTensor, Operation, cpu, cpu_tensor, elements, from_cpu, on_cpu, owned};

/// Returns `e^x` of each element.
pub fn exp<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    apply(Function::Exp, x, Tensor::exp)
}

/// Returns the natural logarithm of each element.
pub fn ln<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    apply(Function::Ln, x, Tensor::log)
}

/// Returns the hyperbolic tangent of each element.
pub fn tanh<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    apply(Function::Tanh, x, Tensor::tanh)
}

/// Returns `1 / (1 + e^-x)` of each element.
pub fn sigmoid<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    apply(Function::Sigmoid, x, activation::sigmoid)
}

/// Returns `1 / sqrt(x)` of each element.
pub fn inverse_root<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    apply(Function::InverseRoot, x, |x| x.sqrt().recip())
}

/// Returns `ln(1 + e^x)` of each element.
pub fn softplus<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    apply(Function::Softplus, x, |x| activation::softplus(x, 1.0))
}

/// Returns the logarithm of the [`sigmoid`] of each element.
pub fn log_sigmoid<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    apply(Function::LogSigmoid, x, activation::log_sigmoid)
}

/// Returns `x sigmoid(x)` of each element.
pub fn silu<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    apply(Function::Silu, x, activation::silu)
}

/// Returns the approximation of GELU by a hyperbolic tangent, `x (1 + tanh(sqrt(2 / π) (x + 0.044715 x³))) / 2`, of
/// each element (Hendrycks and Gimpel, 2016, <https://arxiv.org/abs/1606.08415>).
pub fn gelu_tanh<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    apply(Function::GeluTanh, x, |x| {
        // The composition adds 1 to numbers near -1, which half precision rounds too much.
        let precision = x.dtype();
        activation::gelu_approximate(at_least_single(x)).cast(precision)
    })
}

fn apply<const D: usize>(
    function: Function,
    x: Tensor<D>,
    composed: impl FnOnce(Tensor<D>) -> Tensor<D>,
) -> Tensor<D> {
    let (x, is_replaced) = in_place(function, x);
    if is_replaced {
        return x;
    }
    let shape = x.dims();
    let Some(([argument], tape)) = on_cpu([x.clone().into_dispatch()]) else { return composed(x) };
    let y = values(function, &elements(&argument));
    tape.record(y, shape, |result| {
        let kept = if function.has_slope_of_result() { result.clone() } else { argument };
        Slopes { function, kept }
    })
}

/// Replaces each element by its function, and returns whether that was possible: not if others use the memory of the tensor, or it is
/// on a tape, on another device or in half precision.
fn in_place<const D: usize>(function: Function, x: Tensor<D>) -> (Tensor<D>, bool) {
    if x.dtype() != DType::F32 {
        return (x, false);
    }
    let Some(y) = cpu(x.clone()) else { return (x, false) };
    drop(x);
    let mut y = owned(y);
    let is_unique = y.is_unique();
    if is_unique {
        replace(function, y.storage_mut());
    }
    (from_cpu(y), is_unique)
}

#[derive(Clone, Debug)]
struct Slopes {
    function: Function,
    kept: CpuTensor,
}

impl Operation<1> for Slopes {
    fn backward(self, gradient: CpuTensor, _wanted: [bool; 1]) -> [Option<CpuTensor>; 1] {
        let Self { function, kept } = self;
        let d = slopes(function, &elements(&kept), &elements(&gradient));
        [Some(cpu_tensor(d, kept.layout().shape().clone()))]
    }
}

#[cfg(test)]
mod tests {
    use super::super::check::{check, numbers};
    use super::*;

    type Apply = fn(Tensor<2>) -> Tensor<2>;

    #[test]
    fn functions_equal_burns_with_their_gradients() {
        let functions: [(Apply, Apply); 7] = [
            (exp, Tensor::exp),
            (tanh, Tensor::tanh),
            (sigmoid, activation::sigmoid),
            (softplus, |x| activation::softplus(x, 1.0)),
            (log_sigmoid, activation::log_sigmoid),
            (silu, activation::silu),
            (gelu_tanh, activation::gelu_approximate),
        ];
        let shaped = |[x]: [Tensor<1>; 1]| x.reshape([5, 7]);
        for (own, of_burn) in functions {
            check([numbers([35], 4.0)], |x| own(shaped(x)), |x| of_burn(shaped(x)));
        }
        let positive = || numbers([35], 1.0) + 1.5;
        check([positive()], |x| ln(shaped(x)), |x| shaped(x).log());
        check([positive()], |x| inverse_root(shaped(x)), |x| shaped(x).sqrt().recip());
    }

    #[test]
    fn arguments_that_nobody_else_uses_are_replaced_in_their_memory() {
        let start = |x: &Tensor<1>| cpu(x.clone()).expect("on the processor").bytes().as_ptr();
        let x = numbers([2500], 4.0);
        let (before, at) = (x.to_data(), start(&x));
        let apart = exp(x.clone());
        assert_eq!(x.to_data(), before, "another tensor shares the memory");
        let y = exp(x);
        assert_eq!(start(&y), at);
        assert_ne!(start(&apart), at);
        assert_eq!(y.into_data(), apart.into_data());
    }
}
