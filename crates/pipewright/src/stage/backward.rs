//! A backward of a stage in training: in as many parts as its forward had, from the last to the first.

use std::time::{Duration, Instant};

use pipewright_schedule::Microbatch;

use super::body::StageBody;
use super::error::StageError;
use super::fingerprint::Fingerprint;
use super::runner::InputGradients;
use super::segment::{Pass, Segment};
use super::tape::Tape;
use super::tape_ends::all_off_tape;
use super::training::TrainingStage;
use crate::tensor::{OptionalTensors, Values};

/// A microbatch whose forward has run, and its backward has not.
pub(super) struct InFlight {
    pub(super) parts: Vec<Part>,
    /// Present if a part is to be computed again.
    pub(super) pass: Option<Pass>,
}

/// A segment of a forward.
pub(super) struct Part {
    pub(super) segment: Segment,
    pub(super) kept: Kept,
}

/// What a segment keeps for its backward.
pub(super) enum Kept {
    /// Everything that the backward needs.
    Recorded(Box<Tape>),
    /// The inputs, from which the backward computes the segment again, and what its results must be.
    Inputs(Values, Fingerprint),
}

/// A backward that has begun.
pub(crate) struct BackwardState {
    microbatch: Microbatch,
    in_flight: InFlight,
    /// The gradients of the outputs of the next part; after the last part, those of the inputs of the stage.
    gradients: OptionalTensors,
    /// The number of gradients that the last part returned.
    returned: usize,
    /// The time in which parts were computed again.
    recomputed: Duration,
}

impl BackwardState {
    /// Begins a backward with the gradients of the outputs.
    pub(super) fn new(microbatch: Microbatch, in_flight: InFlight, gradients: OptionalTensors) -> Self {
        Self { microbatch, in_flight, gradients, returned: 0, recomputed: Duration::ZERO }
    }

    pub(crate) fn microbatch(&self) -> Microbatch {
        self.microbatch
    }

    pub(crate) fn gradients(&self) -> &OptionalTensors {
        &self.gradients
    }

    /// Replaces the gradients.
    pub(crate) fn set_gradients(&mut self, gradients: OptionalTensors) {
        let off_tape = |gradient| all_off_tape(&[gradient]).pop();
        self.gradients = gradients.into_iter().map(|gradient| gradient.and_then(off_tape)).collect();
    }

    /// Returns the block whose backward is next; `None` after the first block. A forward that ran as a whole has block 0
    /// alone.
    pub(crate) fn next_block(&self) -> Option<usize> {
        self.in_flight.parts.last().map(|part| part.segment.index())
    }

    /// Returns the results of a backward that has run to its end.
    ///
    /// # Errors
    /// When a function of the caller's has left another number of gradients than the backward returned.
    pub(crate) fn into_input_gradients(self) -> Result<InputGradients, StageError> {
        let (found, expected) = (self.gradients.len(), self.returned);
        match found == expected {
            true => Ok(InputGradients { gradients: self.gradients, recomputed: self.recomputed }),
            false => Err(StageError::GradientsLeft { found, expected }),
        }
    }
}

impl<M: StageBody> TrainingStage<M> {
    /// Runs the backward of at most `count` parts. Running statistics then have the values from before.
    pub(super) fn run_back(&mut self, backward: &mut BackwardState, count: usize) -> Result<(), StageError> {
        let count = count.min(backward.in_flight.parts.len());
        let mut next = backward.in_flight.parts.iter().rev().take(count);
        let buffers = match next.any(|part| matches!(part.kept, Kept::Inputs(..))) {
            true => self.buffers(),
            false => OptionalTensors::new(),
        };
        (0..count).try_for_each(|_| self.run_part(backward))?;
        self.restore_buffers(buffers);
        Ok(())
    }

    /// Runs the backward of the next part.
    fn run_part(&mut self, backward: &mut BackwardState) -> Result<(), StageError> {
        let Some(Part { segment, kept }) = backward.in_flight.parts.pop() else { return Ok(()) };
        let gradients = std::mem::take(&mut backward.gradients);
        let tape = match (kept, &backward.in_flight.pass) {
            (Kept::Recorded(tape), _) => *tape,
            (Kept::Inputs(inputs, first), Some(pass)) => {
                let start = Instant::now();
                let tape = self.record_again(segment, inputs, pass, &first)?;
                backward.recomputed += start.elapsed();
                tape
            }
            (Kept::Inputs(..), None) => unreachable!("a microbatch that is computed again keeps its context"),
        };
        backward.gradients = self.run_backward(backward.microbatch, tape, gradients)?;
        backward.returned = backward.gradients.len();
        if backward.in_flight.parts.is_empty() && self.slices.before(backward.microbatch).is_none() {
            // No earlier slice is left that would take gradients.
            self.carries.remove(&self.slices.place(backward.microbatch).0);
        }
        Ok(())
    }

    /// Runs the backward of a tape and adds the gradients of parameters to the sums. Returns the gradients of the
    /// inputs.
    fn run_backward(
        &mut self,
        microbatch: Microbatch,
        tape: Tape,
        gradients: OptionalTensors,
    ) -> Result<OptionalTensors, StageError> {
        if self.shards.is_some() {
            // The layers look up their weights, which must be those of the forward.
            self.computing();
        }
        let mut finished = tape.backward(gradients)?;
        let inputs = finished.input_gradients();
        finished.pass_to_earlier_slices();
        let Some(mut gradients) = finished.gradients else { return Ok(inputs) };
        let module = self.rounded.get().or(self.module.as_ref());
        let module = module.expect("the module is away only while it is changed");
        match self.shards {
            None => self.sums.add(module, &mut gradients),
            Some(_) => self.sums.add_caught(finished.catches),
        }
        self.deferred.entry(microbatch).or_default().extend(finished.deferred);
        Ok(inputs)
    }
}
