//! The places where side inputs that require a gradient come onto the tape of a layer.
//!
//! A layer looks a side input up in its context, where each look-up makes a leaf of its own. The part of the tape
//! that the layer records takes the leaves, and its backward adds their gradients. A forward that records nothing
//! gets the tensors off the tape: in an evaluation, and if it is computed again.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn::tensor::Device;

use super::tape_ends::{as_input, without_tape};
use crate::autodiff::Caught;
use crate::batch::{SideSums, add_side};
use crate::tensor::Value;

/// The leaves of the layer that runs; `None` if nothing is recorded. Clones share them.
#[derive(Clone, Debug, Default)]
pub(super) struct SideLeaves(Arc<Mutex<Option<Vec<SideLeaf>>>>);

/// A tensor of a side input on the tape.
#[derive(Debug)]
pub(super) struct SideLeaf {
    /// The name of the side input, and the index of the tensor in it.
    side: (Arc<str>, usize),
    gradient: Caught,
}

impl SideLeaves {
    /// Runs a forward that is recorded.
    pub(super) fn recording<R>(&self, run: impl FnOnce() -> R) -> R {
        *self.locked() = Some(Vec::new());
        let result = run();
        *self.locked() = None;
        result
    }

    /// Returns a tensor of a side input for a layer on this device.
    pub(super) fn enter(&self, name: &str, tensor: usize, value: Value, device: &Device) -> Value {
        if !value.is_tracked() {
            return value.to_device(device);
        }
        let value = without_tape(value).to_device(device);
        let mut leaves = self.locked();
        let Some(leaves) = leaves.as_mut() else { return value };
        let (value, gradient) = as_input(without_tape(value), device);
        leaves.extend(gradient.map(|gradient| SideLeaf { side: (name.into(), tensor), gradient }));
        value
    }

    /// Takes out the leaves of the layer that has run.
    pub(super) fn take(&self) -> Vec<SideLeaf> {
        self.locked().as_mut().map(std::mem::take).unwrap_or_default()
    }

    fn locked(&self) -> MutexGuard<'_, Option<Vec<SideLeaf>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Adds the gradients that a backward has left at the leaves.
pub(super) fn add_gradients(leaves: Vec<SideLeaf>, sums: &mut SideSums) {
    for SideLeaf { side, gradient } in leaves {
        if let Some(gradient) = gradient.take() {
            add_side(sums, side, gradient);
        }
    }
}
