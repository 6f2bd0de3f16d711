//! Tensors that the slices of a microbatch pass to each other on one stage ([`pipewright_schedule::slices`]).
//!
//! The forward of a slice keeps tensors, such as the keys and values of an attention, off the tape. The
//! forward of a later slice gets them as leaves of its own tape, and its backward adds the gradients of these
//! leaves to the sums here. Backwards run in descending order of the slices. So when the backward of a slice
//! begins, the sums of its tensors are complete, and it starts from them as it does from the gradients of its
//! outputs.
//!
//! No tensor leaves its rank. The values are dropped after the forward of the last slice, where only tapes
//! still hold them, and the rest after the backward of the first.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn::tensor::{Device, Gradients, Tensor};
use pipewright_schedule::Slices;
use pipewright_schedule::ids::Slice;

use super::error::StageError;
use super::tape_ends::{OutputRoot, all_off_tape, as_leaf, fill_roots, off_tape};
use crate::tensor::{Value, Values};

/// A tensor that a slice has kept: its name, and its index among the tensors of this name.
type Key = (Arc<str>, usize);

/// The tensors that the slices of one microbatch have kept on a stage.
#[derive(Clone, Debug, Default)]
pub(super) struct SequenceCarry(Arc<Mutex<Carried>>);

#[derive(Debug, Default)]
struct Carried {
    values: HashMap<Arc<str>, Vec<(Slice, Value)>>,
    /// The sums of the gradients that the backwards of later slices have computed.
    gradients: HashMap<Key, Value>,
}

/// The part of one slice, through which its forward reads and writes.
#[derive(Clone, Debug)]
pub(super) struct SliceCarry {
    all: SequenceCarry,
    slice: Slice,
    slices: Slices,
    /// The device with the tape of the forward; `None` if nothing is recorded.
    tape: Option<Device>,
    ends: Arc<Mutex<Ends>>,
}

/// The places where the tape of a slice meets the tapes of other slices.
#[derive(Debug, Default)]
struct Ends {
    /// The tensors of earlier slices.
    leaves: Vec<(Key, Tensor<1>)>,
    /// The tensors for later slices.
    roots: Vec<(Key, OutputRoot)>,
}

/// The same, after the forward.
pub(super) struct CarryEnds {
    all: SequenceCarry,
    ends: Ends,
}

impl SequenceCarry {
    /// Returns the part of a slice. Its tape is of the kind of `tape`, if it has one.
    pub(super) fn part(&self, slice: Slice, slices: Slices, tape: Option<Device>) -> SliceCarry {
        SliceCarry { all: self.clone(), slice, slices, tape, ends: Arc::default() }
    }

    /// Drops the values, when no forward needs them any more.
    pub(super) fn drop_values(&self) {
        locked(&self.0).values.clear();
    }
}

impl SliceCarry {
    /// Returns the tensors that earlier slices have kept under a name, in their order.
    pub(super) fn earlier(&self, name: &str) -> Values {
        let kept = locked(&self.all.0);
        let Some((name, values)) = kept.values.get_key_value(name) else { return Values::new() };
        let mut ends = locked(&self.ends);
        let earlier = values.iter().enumerate().filter(|(_, (slice, _))| *slice < self.slice);
        let on_tape = earlier.map(|(index, (_, value))| {
            let Some(device) = &self.tape else { return value.clone() };
            let (value, leaf) = as_leaf(value.clone(), device);
            ends.leaves.extend(leaf.map(|leaf| ((name.clone(), index), leaf)));
            value
        });
        on_tape.collect()
    }

    /// Keeps a tensor for later slices. Nothing is kept of the last slice.
    pub(super) fn keep(&self, name: &str, value: Value) {
        if self.slice.get() + 1 == self.slices.get() {
            return;
        }
        let mut kept = locked(&self.all.0);
        let name: Arc<str> = name.into();
        let values = kept.values.entry(name.clone()).or_default();
        let (key, slice) = ((name, values.len()), self.slice);
        match self.tape {
            None => values.extend(all_off_tape(&[value]).into_iter().map(|value| (slice, value))),
            Some(_) => {
                let (value, root) = off_tape(value);
                values.push((slice, value));
                locked(&self.ends).roots.push((key, root));
            }
        }
    }

    /// Takes out the places where the tape that was just recorded meets the tapes of other slices.
    pub(super) fn take_ends(&self) -> CarryEnds {
        CarryEnds { all: self.all.clone(), ends: std::mem::take(&mut *locked(&self.ends)) }
    }
}

impl CarryEnds {
    /// Stores the sums of the gradients that later slices have computed at the tensors of this one. Returns
    /// the scalar from which the backward starts; `None` if there are none.
    pub(super) fn start_backward(&mut self) -> Result<Option<Tensor<1>>, StageError> {
        let mut kept = locked(&self.all.0);
        let roots = std::mem::take(&mut self.ends.roots).into_iter();
        let (roots, gradients) = roots.map(|(key, root)| (root, kept.gradients.remove(&key))).unzip();
        fill_roots(roots, gradients)
    }

    /// Adds the gradients of the tensors of earlier slices to their sums.
    pub(super) fn add_gradients(self, gradients: &mut Gradients) {
        let mut kept = locked(&self.all.0);
        for (key, leaf) in self.ends.leaves {
            let Some(gradient) = leaf.grad_remove(gradients) else { continue };
            let sum = match kept.gradients.remove(&key) {
                // The number of dimensions does not matter here; 1 is arbitrary.
                Some(sum) => Value::of(Tensor::<1>::from_dispatch(sum.into_dispatch()) + gradient),
                // It may be a part of the gradients of all keys, which would stay with it.
                None => Value::of(gradient).copied(),
            };
            kept.gradients.insert(key, sum);
        }
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
