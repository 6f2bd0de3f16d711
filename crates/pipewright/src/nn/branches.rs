//! A tensor with several uses.
//!
//! Burn adds the gradients of the uses one after another. In bfloat16 on the CPU back end, its addition takes
//! several times as long as reading and writing the elements does. So each use gets a branch, a node of its
//! own on the tape. It keeps its gradient for the trunk, the node before the branches:
//!
//! ```text
//! x ── trunk ─┬─ branch 0 ── use       gradient of x = (g0 + g1) + g2
//!             ├─ branch 1 ── use
//!             └─ branch 2 ── use
//! ```
//!
//! The tape runs the backward of the trunk after the backwards of all branches. The backward of the trunk adds
//! the gradients in the order of the branches, and rounds each sum.

use std::sync::{Arc, Mutex, PoisonError};

use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::NoCheckpointing};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::ops::FloatTensorOps;
use burn::backend::{Autodiff, Flex};
use burn::tensor::{DType, Tensor};

use super::addition::sum;
use super::operation::{CpuTensor, row_major};
use super::remade::note_same;

/// The CPU back end with a tape that keeps the inputs of all operations.
type OnTape = Autodiff<Flex, NoCheckpointing>;

/// A tensor with several uses. Their gradients are added faster than Burn adds them, if they are bfloat16 on
/// the CPU back end.
#[derive(Debug)]
pub struct Branches {
    x: Tensor<2>,
    trunk: Option<Trunk>,
}

/// The node before the branches.
#[derive(Debug)]
struct Trunk {
    tensor: Tensor<2>,
    gradients: BranchGradients,
}

/// The gradients of the branches, in their order.
#[derive(Clone, Debug, Default)]
struct BranchGradients(Arc<Mutex<Vec<Option<CpuTensor>>>>);

impl BranchGradients {
    /// Adds a slot for a branch and returns its index.
    fn add_slot(&self) -> usize {
        let mut slots = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        slots.push(None);
        slots.len() - 1
    }

    fn fill(&self, index: usize, gradient: CpuTensor) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)[index] = Some(gradient);
    }

    /// Returns the sum; `None` if no branch has a gradient.
    fn take_sum(&self) -> Option<CpuTensor> {
        let mut slots = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        slots.iter_mut().filter_map(Option::take).reduce(add)
    }
}

fn add(a: CpuTensor, b: CpuTensor) -> CpuTensor {
    if [a.dtype(), b.dtype()] == [DType::BF16; 2] {
        sum([row_major(a), row_major(b)])
    } else {
        Flex::float_add(a, b)
    }
}

impl Branches {
    /// Makes a tensor that has no branches yet.
    pub fn new(x: Tensor<2>) -> Self {
        let trunk = (x.dtype() == DType::BF16 && x.is_tracked()).then(|| Trunk::new(&x)).flatten();
        Self { x, trunk }
    }

    /// Returns the tensor for one use.
    pub fn branch(&self) -> Tensor<2> {
        let Some(Trunk { tensor, gradients }) = &self.trunk else { return self.x.clone() };
        let Some(branch) = recorded(tensor, Branch, || (gradients.clone(), gradients.add_slot())) else {
            return self.x.clone();
        };
        note_same(&self.x, &branch);
        branch
    }

    /// Returns the tensor for the last use.
    pub fn into_branch(self) -> Tensor<2> {
        if self.trunk.is_some() { self.branch() } else { self.x }
    }
}

impl Trunk {
    /// Returns `None` if the tensor is on another tape, or on none.
    fn new(x: &Tensor<2>) -> Option<Self> {
        let gradients = BranchGradients::default();
        let tensor = recorded(x, TrunkBackward, || gradients.clone())?;
        Some(Self { tensor, gradients })
    }
}

/// Returns a node with the storage of `x`; `None` if `x` is not tracked by a tape of this kind.
fn recorded<O: Backward<Flex, 1>>(
    x: &Tensor<2>,
    operation: O,
    state: impl FnOnce() -> O::State,
) -> Option<Tensor<2>> {
    let (primitive, node) = x.clone().try_into_primitive::<OnTape>().ok()?.into_parts();
    match operation.prepare::<NoCheckpointing>([node]).compute_bound().stateful() {
        OpsKind::Tracked(tape) => Some(Tensor::from_primitive::<OnTape>(tape.finish(state(), primitive))),
        OpsKind::UnTracked(_) => None,
    }
}

#[derive(Debug)]
struct TrunkBackward;

impl Backward<Flex, 1> for TrunkBackward {
    type State = BranchGradients;

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
        // The branches register no gradient of the trunk.
        if let ([Some(parent)], Some(sum)) = (ops.parents, ops.state.take_sum()) {
            grads.register::<Flex>(parent.id, sum);
        }
    }
}

#[derive(Debug)]
struct Branch;

impl Backward<Flex, 1> for Branch {
    type State = (BranchGradients, usize);

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
        let gradient = grads.consume::<Flex>(&ops.node);
        let (gradients, index) = ops.state;
        gradients.fill(index, gradient);
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;

    use super::super::check::numbers;
    use super::*;

    fn list(tensor: Tensor<2>) -> Vec<f32> {
        tensor.into_data().iter().collect()
    }

    /// Returns the gradient of a tensor with three branches, if only the branches in `used` are used.
    fn gradient(x: &Tensor<2>, used: [bool; 3], with_branches: bool) -> Vec<f32> {
        let leaf = x.clone().require_grad();
        let product = leaf.clone() * 0.3;
        let branches = Branches::new(product.clone());
        let operand = || if with_branches { branches.branch() } else { product.clone() };
        let operands = [operand(), operand(), operand()];
        let terms = operands.into_iter().zip([1.3, -0.7, 2.9]).zip(used);
        let terms = terms.filter_map(|((x, factor), is_used)| is_used.then(|| x * factor));
        let sum = terms.reduce(|a, b| a + b).expect("a branch is used").sum();
        list(leaf.grad(&sum.backward()).expect("it is a leaf"))
    }

    #[test]
    fn gradients_of_the_branches_in_use_are_added() {
        let device = Device::flex().autodiff();
        for dtype in [DType::BF16, DType::F16, DType::F32] {
            for device in [device.clone(), device.clone().gradient_checkpointing()] {
                let strategy = device.gradient_checkpointing_strategy().expect("a device with a tape");
                let x = numbers([3, 37], 1.0).cast(dtype);
                let x = x.autodiff().with_gradient_checkpointing_strategy(strategy);
                // Sums of two terms do not depend on their order.
                for used in [[true, true, false], [false, true, true], [false, false, true]] {
                    assert_eq!(gradient(&x, used, true), gradient(&x, used, false), "{dtype:?} {used:?}");
                }
                let all = [true, true, true];
                for (found, expected) in gradient(&x, all, true).iter().zip(gradient(&x, all, false)) {
                    assert!((found - expected).abs() <= expected.abs() / 64.0, "{found} {expected}");
                }
            }
        }
    }

    #[test]
    fn gradients_are_added_in_the_order_of_the_branches() {
        // In bfloat16, 1 is lost next to 256, and 2 is not.
        let x = (numbers([1, 1], 0.0) + 1.0).cast(DType::BF16).autodiff().require_grad();
        let gradient = |factors: [f32; 3]| {
            let branches = Branches::new(x.clone());
            let [a, b, c] = factors.map(|factor| branches.branch() * factor);
            list(x.grad(&(c + (b + a)).sum().backward()).expect("it is a leaf"))
        };
        assert_eq!(gradient([1.0, 1.0, 256.0]), [258.0]);
        assert_eq!(gradient([256.0, 1.0, 1.0]), [256.0]);
    }

    #[test]
    fn a_tensor_that_is_not_tracked_has_itself_as_its_branches() {
        let x = numbers([2, 3], 1.0).cast(DType::BF16);
        assert_eq!(list(Branches::new(x.clone()).branch()), list(x.clone()));
        let branch = Branches::new(x.clone().autodiff()).branch();
        assert!(!branch.is_tracked());
        assert_eq!(list(branch.inner()), list(x));
    }
}
