//! Weight gradients that wait: what a backward pass leaves for `W`.
//!
//! A stage runs its forward inside [`Deferred::collect`]. Layers that can put off their weight gradients find the
//! collector there, keep it in their operation, and lay a [`WeightTask`] down in it when the backward pass comes by,
//! instead of computing the gradient. So a stage's `I` yields input gradients alone, and its `W` works the tasks off.
//!
//! The collector is found through the thread, because a module's forward has no other argument to carry it in; it is
//! set for the length of one forward, and an inner one hides the outer.

use std::cell::RefCell;
use std::sync::{Arc, Mutex, PoisonError};

use burn::module::ParamId;

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
#[derive(Clone, Debug, Default)]
pub(crate) struct Deferred(Arc<Mutex<Vec<WeightTask>>>);

impl Deferred {
    /// Runs `forward` so that its layers put off their weight gradients into `self`.
    pub(crate) fn collect<R>(&self, forward: impl FnOnce() -> R) -> R {
        let _outer = Restore(CURRENT.replace(Some(self.clone())));
        forward()
    }

    /// The collector of the forward that runs on this thread.
    pub(super) fn current() -> Option<Self> {
        CURRENT.with_borrow(Clone::clone)
    }

    pub(super) fn push(&self, task: WeightTask) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(task);
    }

    /// Takes the tasks out.
    pub(crate) fn take(&self) -> Vec<WeightTask> {
        std::mem::take(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Puts the outer collector back, also when a forward panics.
struct Restore(Option<Deferred>);

impl Drop for Restore {
    fn drop(&mut self) {
        CURRENT.set(self.0.take());
    }
}
