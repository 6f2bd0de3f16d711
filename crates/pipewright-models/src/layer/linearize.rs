//! Functions whose value and derivative were computed outside the tape.

use burn::tensor::Tensor;

/// `f(x)` with derivative `f'(x)`, given both at `x`: the tape sees `f(x̄) + f'(x̄) (x - x̄)`, where `x̄` is `x` as a
/// constant.
///
/// Burn's tape recomputes an exponential or a sigmoid in the backward pass, which costs more than the three cheap passes
/// here. `x - x̄` is exactly zero, so the value is `value` to the bit. Elements of `x` must be finite.
pub(crate) fn linearized<const D: usize>(x: Tensor<D>, value: Tensor<D>, slope: Tensor<D>) -> Tensor<D> {
    if !x.is_autodiff() {
        return value;
    }
    let point = x.clone().inner();
    (x - point) * slope + value
}
