//! Recomputation: a forward keeps its inputs only, and its backward computes the forward again.
//!
//! The first forward runs a copy of the module whose parameters require no gradient, so nothing is recorded.
//! The copy shares its storage and its running statistics with the module. The backward runs the module
//! itself on the same inputs, in the same context, so random streams draw the same numbers, and then runs the
//! backward of that tape. It reports no loss a second time, and running statistics return to the values
//! before it.
//!
//! A forward as a whole, or its first blocks, may run again before the gradients have arrived, while the rank would be idle.
//!
//! A stage is recomputed as its forward ran: as a whole, or block by block (`StageBody::blocks`). By block,
//! it keeps the inputs of each block, and a backward records one block at a time, from the last to the first.
//! If only its first layers are recomputed, these blocks run together, and the others record their backward
//! in the first forward.
//!
//! # Which outputs need a gradient
//!
//! The next stage needs to know which outputs need a gradient, and a forward that records nothing does not
//! show it. So the first forward for each combination of inputs with and without a gradient does record, and
//! its tape is discarded. Later forwards mark the same outputs. If a recomputed forward gives a gradient to
//! another output, that is an error ([`StageError::Mistake`]).
//!
//! # Results that must be the same
//!
//! A gradient is right only if the second forward computes what the first has computed. On the processor, the
//! losses and some elements of the outputs of both are compared, and an error ends the step if they differ
//! ([`StageError::RecomputedResult`]).
//!
//! # Burn's gradient checkpointing
//!
//! Burn's own strategy (`Device::gradient_checkpointing`) recomputes single operations that are cheap, and
//! keeps the results of the others. It still keeps a tape for each microbatch. The two can be combined: then
//! the tape that a backward records is one with gradient checkpointing.

use std::collections::HashMap;

use burn::module::{ModuleMapper, Param};
use burn::tensor::Tensor;

use super::TrainingStage;
use crate::autodiff::{inner_of, on_tape_of};
use crate::stage::body::StageBody;
use crate::stage::error::StageError;
use crate::stage::forwarded::{Fingerprint, Forwarded};
use crate::stage::microbatch::{ForwardState, Pass, Saved};
use crate::stage::segment::Segment;
use crate::stage::tape::Tape;
use crate::tensor::{Value, Values};

/// Which outputs of a segment need a gradient, for each combination of inputs that do ([`pattern_key`]).
pub(super) type GradientPattern = HashMap<(Segment, Vec<bool>), Vec<bool>>;

impl<M: StageBody> TrainingStage<M> {
    /// Returns whether a segment of a forward that is recomputed is computed again.
    pub(super) fn recomputes(&self, segment: Segment) -> bool {
        self.settings.recomputed_layers.is_none_or(|layers| segment.index() < layers)
    }

    /// Runs a segment and keeps its inputs, from which its backward computes it again.
    pub(super) fn forward_to_recompute(
        &mut self,
        segment: Segment,
        inputs: Values,
        forward: &mut ForwardState,
        keep_outputs: bool,
    ) -> Result<Forwarded, StageError> {
        let saved = inputs.clone();
        let key = pattern_key(segment, &inputs, &forward.pass);
        let Some(marks) = self.pattern.get(&key) else {
            let (forwarded, tape) = self.record(segment, inputs, &forward.pass, keep_outputs, None)?;
            tape.discard();
            self.pattern.insert(key, requires_grad(&forwarded.outputs));
            forward.save(segment, Saved::Inputs(saved, Fingerprint::of(&forwarded)));
            return Ok(forwarded);
        };
        let (module, pass) = forward.copy_of(|| self.module.computing().clone().map(&mut WithoutGradients));
        let inputs = inputs.into_iter().map(Value::constant).collect();
        let (forwarded, _) = self.forward_on_tape(module, segment, inputs, pass, keep_outputs, None)?;
        forward.save(segment, Saved::Inputs(saved, Fingerprint::of(&forwarded)));
        // Outputs next to a loss go to the caller.
        let outputs = match forwarded.loss {
            Some(_) => forwarded.outputs,
            None => marked(forwarded.outputs, marks),
        };
        Ok(Forwarded { outputs, ..forwarded })
    }

    /// Computes a segment again and records its backward. The results must be the same as the `first` time.
    pub(super) fn record_again(
        &self,
        segment: Segment,
        inputs: Values,
        pass: &Pass,
        first: &Fingerprint,
    ) -> Result<Tape, StageError> {
        let key = pattern_key(segment, &inputs, pass);
        let (forwarded, tape) = self.record(segment, inputs, pass, false, None)?;
        let marks = self.pattern.get(&key).into_iter().flatten();
        let mut outputs = forwarded.outputs.iter().zip(marks);
        match outputs.position(|(value, mark)| value.requires_grad() && !mark) {
            Some(index) => Err(StageError::Mistake(format!(
                "output {index} of a forward needs a gradient when the forward is computed again, and needed none the first \
                 time: `forward` must depend only on the module, its input and its context; random numbers come from \
                 `StageContext::random`"
            ))),
            None if Fingerprint::of(&forwarded) != *first => {
                // A layer may have begun to draw after its first forward.
                self.draws.forget();
                Err(StageError::RecomputedResult)
            }
            None => Ok(tape),
        }
    }
}

/// Returns what decides which outputs of a segment need a gradient: its inputs that do, and whether a side input
/// does.
fn pattern_key(segment: Segment, inputs: &[Value], pass: &Pass) -> (Segment, Vec<bool>) {
    let mut marks = requires_grad(inputs);
    marks.push(pass.context.has_tracked_sides());
    (segment, marks)
}

fn requires_grad(values: &[Value]) -> Vec<bool> {
    values.iter().map(Value::requires_grad).collect()
}

/// Marks the outputs that need a gradient.
fn marked(outputs: Values, marks: &[bool]) -> Values {
    let mark = |(output, &requires_grad): (Value, &bool)| {
        if requires_grad { output.requiring_grad() } else { output.constant() }
    };
    outputs.into_iter().zip(marks).map(mark).collect()
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
