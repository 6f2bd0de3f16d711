//! Records an operation that has no kernel. Its backward pass computes it again, so the tape keeps the inputs,
//! and none of the numbers between them and the result.

use std::fmt;
use std::sync::Arc;

use burn::tensor::Tensor;

use crate::autodiff::{GradientSlot, Rule, gradient_root, inner_of, record};
use crate::tensor::Value;

/// An operation composed of Burn's operations.
pub(super) type Composition = Arc<dyn Fn([Tensor<2>; 2]) -> Tensor<2> + Send + Sync>;

/// Returns the result of `composition` on the tape of the inputs. The composition must return the same result
/// in both passes.
pub(super) fn recomputed(inputs: [Tensor<2>; 2], composition: Composition) -> Tensor<2> {
    let kept = inputs.clone().map(inner_of);
    let result = composition(kept.clone());
    record(inputs, result, Arc::new(Recomputed { inputs: kept, composition }))
}

struct Recomputed {
    inputs: [Tensor<2>; 2],
    composition: Composition,
}

impl fmt::Debug for Recomputed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Recomputed").field("inputs", &self.inputs).finish_non_exhaustive()
    }
}

impl Rule for Recomputed {
    fn backward(&self, gradient: Tensor<2>, wanted: [bool; 2]) -> [Option<Tensor<2>>; 2] {
        // Burn computes the gradients of the leaves that require them, on a tape that ends with this pass.
        let leaves = [0, 1].map(|index| {
            let leaf = self.inputs[index].clone().autodiff();
            if wanted[index] { leaf.require_grad() } else { leaf }
        });
        let result = (self.composition)(leaves.clone());
        let slot = GradientSlot::default();
        let root = gradient_root(&Value::of(result), slot.clone());
        slot.fill(Value::of(gradient));
        let mut gradients = root.backward();
        [0, 1].map(|index| wanted[index].then(|| leaves[index].grad_remove(&mut gradients)).flatten())
    }
}

#[cfg(test)]
mod tests {
    use super::super::check::numbers;
    use super::*;

    #[test]
    fn only_wanted_gradients_are_computed() {
        for wanted in [[true, true], [true, false], [false, true]] {
            let values = [numbers([2, 3], 1.0), numbers([2, 3], 2.0) + 0.5];
            let inputs = [0, 1].map(|index| {
                let input = values[index].clone().autodiff();
                if wanted[index] { input.require_grad() } else { input }
            });
            let gradients = recomputed(inputs.clone(), Arc::new(|[a, b]| a * b)).sum().backward();
            for (index, input) in inputs.iter().enumerate() {
                let expected = wanted[index].then(|| values[1 - index].to_data());
                assert_eq!(input.grad(&gradients).map(Tensor::into_data), expected, "{index} of {wanted:?}");
            }
        }
    }
}
