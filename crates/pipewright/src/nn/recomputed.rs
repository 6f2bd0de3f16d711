//! Records an operation whose backward pass computes it again, for devices without a kernel for it: the tape
//! keeps the inputs, and none of the numbers between them and the result.

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
    fn backward(&self, gradient: Tensor<2>, _wanted: [bool; 2]) -> [Option<Tensor<2>>; 2] {
        // A tape of its own.
        let leaves = self.inputs.clone().map(|input| input.autodiff().require_grad());
        let result = (self.composition)(leaves.clone());
        let slot = GradientSlot::default();
        let root = gradient_root(&Value::of(result), slot.clone());
        slot.fill(Value::of(gradient));
        let mut gradients = root.backward();
        leaves.map(|leaf| leaf.grad_remove(&mut gradients))
    }
}
