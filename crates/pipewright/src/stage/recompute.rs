//! Recomputation: a forward keeps its inputs only, and its backward computes the forward again.
//!
//! The first forward runs a copy of the module whose parameters require no gradient, so nothing is recorded. The copy
//! shares its storage and its running statistics with the module. The backward runs the module itself on the same
//! inputs, in the same context, so random streams draw the same numbers, and then runs the backward of that tape. It
//! reports no loss a second time, and running statistics return to the values before it.
//!
//! A forward as a whole may run again before the gradients have arrived, while the rank would be idle.
//!
//! A stage is recomputed as its forward ran: as a whole, or block by block ([`StageBody::blocks`]). By block, it keeps the
//! inputs of each block, and a backward records one block at a time, from the last to the first.
//!
//! # Which outputs need a gradient
//!
//! The next stage needs to know which outputs need a gradient, and a forward that records nothing does not show it. So
//! the first forward for each combination of inputs with and without a gradient does record, and its tape is discarded.
//! Later forwards mark the same outputs. If a recomputed forward gives a gradient to another output, that is an error
//! ([`StageError::RecomputedOutput`]).
//!
//! # Results that must be the same
//!
//! A gradient is right only if the second forward computes what the first has computed. On the processor, the losses and
//! some elements of the outputs of both are compared, and an error ends the step if they differ
//! ([`StageError::RecomputedResult`]).
//!
//! # Burn's gradient checkpointing
//!
//! Burn's own strategy (`Device::gradient_checkpointing`) recomputes single operations that are cheap, and keeps the
//! results of the others. It still keeps a tape for each microbatch. The two can be combined: then the tape that a
//! backward records is one with gradient checkpointing.

use std::collections::HashMap;

use burn::module::{ModuleMapper, Param};
use burn::tensor::Tensor;
use pipewright_schedule::Microbatch;

use super::backward::{InFlight, Kept, Part};
use super::body::StageBody;
use super::error::StageError;
use super::fingerprint::Fingerprint;
use super::forward::{ForwardState, copied};
use super::module_parameters::{parameters_of, with_values};
use super::runner::Forwarded;
use super::segment::{Pass, Segment};
use super::tape::Tape;
use super::training::TrainingStage;
use crate::autodiff::{inner_of, on_tape_of};
use crate::tensor::{OptionalTensors, Value, Values};

/// Which outputs of a segment need a gradient, for each combination of inputs that do.
pub(super) type Promises = HashMap<(Segment, Vec<bool>), Vec<bool>>;

impl<M: StageBody> TrainingStage<M> {
    /// Runs a segment and keeps its inputs.
    pub(super) fn save(
        &mut self,
        segment: Segment,
        inputs: Values,
        forward: &mut ForwardState,
        keep_outputs: bool,
    ) -> Result<Forwarded, StageError> {
        let saved = inputs.clone();
        let key = (segment, requires_grad(&inputs));
        let Some(promised) = self.promises.get(&key) else {
            let (found, tape) = self.record(segment, inputs, &forward.pass, keep_outputs, None)?;
            tape.discard();
            self.promises.insert(key, requires_grad(&found.outputs));
            forward.parts.push(Part { segment, kept: Kept::Inputs(saved, Fingerprint::of(&found)) });
            return Ok(found);
        };
        let module: &M = copied(&mut forward.copy, || self.computing().clone().map(&mut WithoutGradients));
        let inputs = inputs.into_iter().map(Value::constant).collect();
        let (found, _) = self.run_segment(module, segment, inputs, &forward.pass, keep_outputs, None)?;
        forward.parts.push(Part { segment, kept: Kept::Inputs(saved, Fingerprint::of(&found)) });
        // Outputs beside a loss go to the caller.
        let outputs = match found.loss {
            Some(_) => found.outputs,
            None => as_promised(found.outputs, promised),
        };
        Ok(Forwarded { outputs, ..found })
    }

    /// Computes the forward of a microbatch again, as a whole, and keeps its tape. Running statistics then have the values
    /// from before. Returns false if the forward has its tape, or ran block by block.
    pub(super) fn record_early(&mut self, microbatch: Microbatch) -> Result<bool, StageError> {
        let is_saved = |in_flight: &InFlight| {
            in_flight
                .parts
                .iter()
                .all(|part| part.segment == Segment::Whole && matches!(part.kept, Kept::Inputs(..)))
        };
        if !self.in_flight.get(&microbatch).is_some_and(is_saved) {
            return Ok(false);
        }
        let buffers = self.buffers();
        let mut in_flight = self.in_flight.remove(&microbatch);
        if let Some(InFlight { parts, pass: Some(pass) }) = &mut in_flight {
            for part in parts {
                if let Kept::Inputs(inputs, first) = &mut part.kept {
                    let tape = self.record_again(part.segment, std::mem::take(inputs), pass, first)?;
                    part.kept = Kept::Recorded(Box::new(tape));
                }
            }
        }
        self.in_flight.extend(in_flight.map(|in_flight| (microbatch, in_flight)));
        self.restore_buffers(buffers);
        Ok(true)
    }

    /// Computes a segment again and records its backward. The results must be those of the `first` time.
    pub(super) fn record_again(
        &self,
        segment: Segment,
        inputs: Values,
        pass: &Pass,
        first: &Fingerprint,
    ) -> Result<Tape, StageError> {
        let key = (segment, requires_grad(&inputs));
        let (found, tape) = self.record(segment, inputs, pass, false, None)?;
        let promised = self.promises.get(&key).into_iter().flatten();
        let mut broken = found.outputs.iter().zip(promised);
        match broken.position(|(value, promised)| value.requires_grad() && !promised) {
            Some(index) => Err(StageError::RecomputedOutput { index }),
            None if Fingerprint::of(&found) != *first => {
                // A layer may have begun to draw after its first forward.
                self.draws.forget();
                Err(StageError::RecomputedResult)
            }
            None => Ok(tape),
        }
    }

    /// Returns the values of the parameters that are not trained, such as running statistics; `None` at the places of
    /// others, and an empty list if all are trained.
    pub(super) fn buffers(&self) -> OptionalTensors {
        // A module of half precision has no running statistics.
        if self.precision.half().is_some() || !self.has_buffers {
            return OptionalTensors::new();
        }
        let found = parameters_of(self.settled());
        found.into_iter().map(|found| (!found.is_trained).then_some(found.value)).collect()
    }

    /// Undoes the changes of a second forward, or of a failed step, to the running statistics.
    pub(super) fn restore_buffers(&mut self, buffers: OptionalTensors) {
        if !buffers.is_empty() {
            self.settled();
            let module = self.take_module();
            self.module = Some(with_values(module, buffers));
        }
    }
}

fn requires_grad(values: &[Value]) -> Vec<bool> {
    values.iter().map(Value::requires_grad).collect()
}

/// Marks the outputs that need a gradient.
fn as_promised(outputs: Values, promised: &[bool]) -> Values {
    let marked = |(output, &requires_grad): (Value, &bool)| match requires_grad {
        true => output.requiring_grad(),
        false => output.constant(),
    };
    outputs.into_iter().zip(promised).map(marked).collect()
}

/// Takes the parameters of a module off the tape, and leaves them on the device of training.
struct WithoutGradients;

impl ModuleMapper for WithoutGradients {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let (id, tensor, mapper) = param.consume();
        Param::from_mapped_value(id, untracked(tensor), mapper)
    }
}

fn untracked<const D: usize>(tensor: Tensor<D>) -> Tensor<D> {
    on_tape_of(inner_of(tensor.clone()), &tensor)
}
