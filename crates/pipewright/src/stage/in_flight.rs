//! The microbatches whose forward has run on a stage and whose backward has not: what the stage keeps of
//! each.

use std::collections::HashMap;

use burn::tensor::Device;
use pipewright_schedule::{Microbatch, Slices};

use super::carry::SequenceCarry;
use super::microbatch::InFlight;
use super::module::StageContext;
use crate::nn::Deferred;

/// The microbatches in flight on a stage. If microbatches are cut into slices, each slice has a number.
pub(super) struct InFlightTable {
    slices: Slices,
    /// The tensors that the slices of each microbatch pass to each other.
    carries: HashMap<Microbatch, SequenceCarry>,
    forwarded: HashMap<Microbatch, InFlight>,
    /// Weight gradients of microbatches whose input gradients are done, of each segment from the last to the
    /// first.
    deferred: HashMap<Microbatch, Vec<Deferred>>,
}

impl InFlightTable {
    pub(super) fn new(slices: Slices) -> Self {
        Self { slices, carries: HashMap::new(), forwarded: HashMap::new(), deferred: HashMap::new() }
    }

    /// Gives the forward of a slice access to what the other slices of its microbatch have kept. `tape` is
    /// the device with the kind of its tape, if it records one.
    pub(super) fn join_carry(&mut self, context: &mut StageContext, tape: Option<&Device>) {
        if !self.slices.is_one() {
            context.join(self.carries.entry(context.microbatch()).or_default(), tape.cloned());
        }
    }

    /// Keeps what the backward of `number` needs. `in_flight` is `None` if none follows.
    pub(super) fn end_forward(&mut self, number: Microbatch, in_flight: Option<InFlight>) {
        if self.slices.after(number).is_none() {
            // No later slice takes the values.
            let microbatch = self.slices.place(number).0;
            match self.carries.get(&microbatch) {
                Some(carry) if in_flight.is_some() => carry.drop_values(),
                _ => drop(self.carries.remove(&microbatch)),
            }
        }
        self.forwarded.extend(in_flight.map(|in_flight| (number, in_flight)));
    }

    /// Takes out what the forward of `number` has kept.
    pub(super) fn take(&mut self, number: Microbatch) -> Option<InFlight> {
        self.forwarded.remove(&number)
    }

    /// Takes out what the forward of `number` has kept, if `is_wanted` is true of it.
    pub(super) fn take_if(
        &mut self,
        number: Microbatch,
        is_wanted: impl FnOnce(&InFlight) -> bool,
    ) -> Option<InFlight> {
        if self.forwarded.get(&number).is_some_and(is_wanted) { self.take(number) } else { None }
    }

    /// Returns what the forward of `number` has kept.
    pub(super) fn get_mut(&mut self, number: Microbatch) -> Option<&mut InFlight> {
        self.forwarded.get_mut(&number)
    }

    /// Puts back what [`InFlightTable::take`] or [`InFlightTable::take_if`] has returned.
    pub(super) fn put(&mut self, number: Microbatch, in_flight: InFlight) {
        self.forwarded.insert(number, in_flight);
    }

    /// Keeps weight gradients that `W` computes.
    pub(super) fn defer(&mut self, number: Microbatch, deferred: Option<Deferred>) {
        self.deferred.entry(number).or_default().extend(deferred);
    }

    /// Takes out the weight gradients that wait for `W`.
    pub(super) fn take_deferred(&mut self, number: Microbatch) -> Vec<Deferred> {
        self.deferred.remove(&number).unwrap_or_default()
    }

    /// Ends the backward of `number`.
    pub(super) fn end_backward(&mut self, number: Microbatch) {
        if self.slices.before(number).is_none() {
            // No earlier slice is left that would take gradients.
            self.carries.remove(&self.slices.place(number).0);
        }
    }

    pub(super) fn clear(&mut self) {
        self.forwarded.clear();
        self.deferred.clear();
        self.carries.clear();
    }
}
