//! Runs the backward of a stage in as many segments as its forward had, from the last to the first.

use std::time::{Duration, Instant};

use pipewright_schedule::StageBackward;

use super::TrainingStage;
use crate::batch::add_side;
use crate::stage::body::StageBody;
use crate::stage::error::StageError;
use crate::stage::microbatch::{BackwardState, ForwardedSegment, Saved};
use crate::stage::tape::{FinishedTape, Tape};
use crate::tensor::OptionalTensors;

impl<M: StageBody> TrainingStage<M> {
    /// Runs the backward of the next segments, at most `count`. Running statistics then have the values from
    /// before.
    pub(super) fn backward_segments(
        &mut self,
        backward: &mut BackwardState,
        count: usize,
    ) -> Result<(), StageError> {
        let recomputes = backward.recomputes(count);
        let buffers = if recomputes { self.module.buffers() } else { OptionalTensors::new() };
        for _ in 0..count {
            if !self.backward_segment(backward)? {
                break;
            }
        }
        self.module.restore_buffers(buffers);
        Ok(())
    }

    /// Runs the backward of the next segment. Returns false if none is left.
    fn backward_segment(&mut self, backward: &mut BackwardState) -> Result<bool, StageError> {
        let Some((ForwardedSegment { segment, saved }, pass)) = backward.take_segment() else {
            return Ok(false);
        };
        let mut recomputed = Duration::ZERO;
        let tape = match (saved, pass) {
            (Saved::Tape(tape), _) => *tape,
            (Saved::Inputs(inputs, first), Some(pass)) => {
                let start = Instant::now();
                let tape = self.record_again(segment, inputs, pass, &first)?;
                recomputed = start.elapsed();
                tape
            }
            (Saved::Inputs(..), None) => {
                unreachable!("a microbatch that is computed again keeps its context")
            }
        };
        if let Some(deferred) = tape.deferred.as_ref().filter(|_| backward.is_whole) {
            deferred.run_at_once();
        }
        let gradients = backward.take_gradients();
        let gradients = self.backward_of(backward, tape, gradients)?;
        backward.add(gradients, recomputed);
        if backward.next_block().is_none() {
            self.in_flight.end_backward(backward.microbatch);
        }
        Ok(true)
    }

    /// Runs the backward of a tape, and adds the gradients of parameters and of side inputs to their sums.
    /// Returns the gradients of the inputs.
    fn backward_of(
        &mut self,
        backward: &mut BackwardState,
        tape: Tape,
        gradients: OptionalTensors,
    ) -> Result<OptionalTensors, StageError> {
        if self.module.shards().is_some() {
            // The layers look up their weights, which must be the same as in the forward.
            self.module.computing();
        }
        let (module, sums) = (&self.module, &mut self.sums);
        let is_sharded = module.shards().is_some();
        let finished = tape.backward(gradients, |gradients| {
            if !is_sharded {
                sums.add(module.last_computing(), gradients);
            }
            sums.outcome()
        })?;
        let FinishedTape { inputs, sides, parameters } = finished;
        sides.into_iter().for_each(|(side, gradient)| add_side(&mut backward.sides, side, gradient));
        let Some((deferred, catches)) = parameters else { return Ok(inputs) };
        if is_sharded {
            self.sums.add_caught(catches);
            self.sums.outcome()?;
        }
        // Without `W`, nothing takes them out.
        if self.settings.backward == StageBackward::Whole {
            self.in_flight.defer(backward.microbatch, deferred);
        }
        Ok(inputs)
    }
}
