//! Weight gradients that wait: what a backward pass leaves for `W`.
//!
//! A stage runs its forward inside [`Deferred::collect`]. Layers that can put off their weight gradients find the
//! collector there, keep it in their operation, and lay a [`WeightTask`] down in it when the backward pass comes by,
//! instead of computing the gradient. So a stage's `I` yields input gradients alone, and its `W` works the tasks off.
//!
//! The collector is found through the thread, because a module's forward has no other argument to carry it in; it is
//! set for the length of one forward, and an inner one hides the outer.

use std::cell::RefCell;
use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError};

use burn::module::ParamId;
use burn::tensor::Tensor;

use super::operation::CpuTensor;

thread_local! {
    static CURRENT: RefCell<Option<Deferred>> = const { RefCell::new(None) };
}

/// A weight gradient that is still to be computed.
#[derive(Clone, Debug)]
pub(crate) enum WeightTask {
    /// `xᵀ gradient`, for `x [rows, inputs]` and `gradient [rows, outputs]`.
    Product { weight: ParamId, x: CpuTensor, gradient: CpuTensor },
    /// Row `i` of the gradient goes to row `ids[i]` of the table.
    Rows { weight: ParamId, ids: Arc<[usize]>, gradient: CpuTensor },
}

/// The tasks of one stage and microbatch, in the order in which the backward pass met them.
#[derive(Clone, Debug)]
pub(crate) struct Deferred {
    tasks: Arc<Mutex<Vec<WeightTask>>>,
    /// The stage's own parameters: the gradient of any other weight is the tape's business.
    parameters: Arc<HashSet<ParamId>>,
}

impl Deferred {
    /// A collector for the weights of a stage that has `parameters`.
    pub(crate) fn new(parameters: Arc<HashSet<ParamId>>) -> Self {
        Self { tasks: Arc::default(), parameters }
    }

    /// Runs `forward` so that its layers put off their weight gradients into `self`.
    pub(crate) fn collect<R>(&self, forward: impl FnOnce() -> R) -> R {
        let _outer = Restore(CURRENT.replace(Some(self.clone())));
        forward()
    }

    /// The collector of the forward that runs on this thread, if the gradient of `weight` may be left in it. A weight
    /// that is computed from parameters (an adapter's, say) needs its gradient on the tape.
    pub(super) fn current<const D: usize>(weight: &Tensor<D>, id: ParamId) -> Option<Self> {
        let current = CURRENT.with_borrow(Clone::clone)?;
        (weight.is_require_grad() && current.parameters.contains(&id)).then_some(current)
    }

    pub(super) fn push(&self, task: WeightTask) {
        self.tasks.lock().unwrap_or_else(PoisonError::into_inner).push(task);
    }

    /// Takes the tasks out.
    pub(crate) fn take(&self) -> Vec<WeightTask> {
        std::mem::take(&mut self.tasks.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Puts the outer collector back, also when a forward panics.
struct Restore(Option<Deferred>);

impl Drop for Restore {
    fn drop(&mut self) {
        CURRENT.set(self.0.take());
    }
}
