//! A forward of a stage in training: as a whole, or block by block.
//!
//! By block, each block has a tape of its own, and the values between two blocks are off the tape. So the caller may
//! read and replace them, and the backward runs block by block too ([`super::backward`]). Losses and gradients have the
//! bits of the whole forward, except in half precision, where the values between blocks are rounded, and of slices, where
//! gradients are added in another order.

use std::any::Any;

use burn::tensor::Tensor;

use super::backward::{Kept, Part};
use super::body::StageBody;
use super::error::StageError;
use super::module::{Auxiliary, ExpertLoad, StageContext};
use super::runner::{ForwardTask, Forwarded};
use super::segment::{Pass, Segment};
use super::tape::split_auxiliary;
use super::tape_ends::all_off_tape;
use super::training::TrainingStage;
use crate::tensor::Values;

/// A function that runs instead of a block of the module.
pub(crate) type Replacement<'a> =
    &'a mut dyn FnMut(&dyn Any, Values, &StageContext) -> Result<Values, StageError>;

/// A forward that has begun.
pub(crate) struct ForwardState {
    pub(super) pass: Pass,
    /// `None` in an evaluation.
    pub(super) task: Option<ForwardTask>,
    /// The inputs of the next block, off the tape; after the last block, the outputs of the stage.
    values: Values,
    /// The next block; `None` after the last one.
    next: Option<usize>,
    /// The number of outputs that the last block returned.
    returned: usize,
    loss: Option<Tensor<1>>,
    auxiliary: Vec<Auxiliary>,
    loads: Vec<ExpertLoad>,
    /// What the backward needs of each segment that has run.
    pub(super) parts: Vec<Part>,
    /// The copy of the module that runs instead of it: without gradients, or for an evaluation.
    pub(super) copy: Option<Box<dyn Any>>,
}

impl ForwardState {
    /// Begins a forward; `task` is `None` in an evaluation.
    pub(crate) fn new(
        context: StageContext,
        inputs: Values,
        target: Option<Values>,
        task: Option<ForwardTask>,
    ) -> Self {
        let weights = task.map_or((1.0, 1.0), |task| (task.loss_weight, task.auxiliary_weight));
        let (loss_weight, auxiliary_weight) = weights;
        Self {
            pass: Pass { context, target, loss_weight, auxiliary_weight },
            task,
            values: inputs,
            next: Some(0),
            returned: 0,
            loss: None,
            auxiliary: Vec::new(),
            loads: Vec::new(),
            parts: Vec::new(),
            copy: None,
        }
    }

    pub(crate) fn context(&self) -> &StageContext {
        &self.pass.context
    }

    pub(crate) fn target(&self) -> Option<&Values> {
        self.pass.target.as_ref()
    }

    pub(crate) fn values(&self) -> &Values {
        &self.values
    }

    /// Replaces the values. The backward does not know how the new values follow from the old ones.
    pub(crate) fn set_values(&mut self, values: &Values) {
        self.values = all_off_tape(values);
    }

    pub(crate) fn next_block(&self) -> Option<usize> {
        self.next
    }

    pub(crate) fn loss(&self) -> Option<&Tensor<1>> {
        self.loss.as_ref()
    }

    /// Returns the results of a forward that has run to its end.
    pub(super) fn into_forwarded(self) -> Result<(Forwarded, Vec<Part>, Pass), StageError> {
        let (found, expected) = (self.values.len(), self.returned);
        if found != expected {
            return Err(StageError::OutputCount { found, expected });
        }
        let forwarded =
            Forwarded { outputs: self.values, loss: self.loss, auxiliary: self.auxiliary, loads: self.loads };
        Ok((forwarded, self.parts, self.pass))
    }
}

impl<M: StageBody> TrainingStage<M> {
    /// Runs what is left of a forward: as a whole if it has not begun, unless it is recomputed block by block.
    pub(super) fn run_rest(&mut self, forward: &mut ForwardState) -> Result<(), StageError> {
        let is_recomputed = forward.task.is_some_and(|task| task.recompute);
        if forward.next == Some(0) && !(is_recomputed && self.by_block) {
            return self.run_one(forward, Segment::Whole, None);
        }
        while forward.next.is_some() {
            self.run_next(forward, None)?;
        }
        Ok(())
    }

    /// Runs the next block, or `replacement` in its place.
    pub(super) fn run_next(
        &mut self,
        forward: &mut ForwardState,
        replacement: Option<Replacement<'_>>,
    ) -> Result<(), StageError> {
        let Some(index) = forward.next else { return Ok(()) };
        let segment = match self.module().blocks() {
            0 | 1 => Segment::Whole,
            of => Segment::Block { index, of },
        };
        self.run_one(forward, segment, replacement)
    }

    fn run_one(
        &mut self,
        forward: &mut ForwardState,
        segment: Segment,
        replacement: Option<Replacement<'_>>,
    ) -> Result<(), StageError> {
        let inputs = std::mem::take(&mut forward.values);
        forward.pass.context.draw_through(&self.draws);
        self.join_carry(forward);
        let found = match forward.task {
            None => self.infer(segment, inputs, forward, replacement)?,
            // A function of the caller's cannot be called again.
            Some(task) if task.recompute && replacement.is_none() => {
                self.save(segment, inputs, forward, task.keep_outputs)?
            }
            Some(task) => {
                let (found, tape) =
                    self.record(segment, inputs, &forward.pass, task.keep_outputs, replacement)?;
                forward.parts.push(Part { segment, kept: Kept::Recorded(Box::new(tape)) });
                found
            }
        };
        forward.next = segment.next();
        forward.returned = found.outputs.len();
        forward.auxiliary.extend(found.auxiliary);
        forward.loads.extend(found.loads);
        (forward.values, forward.loss) = (found.outputs, found.loss);
        Ok(())
    }

    /// Gives the forward of a slice access to what the other slices of its microbatch have kept.
    fn join_carry(&mut self, forward: &mut ForwardState) {
        let context = &mut forward.pass.context;
        if !context.slice().1.is_one() {
            let tape = forward.task.map(|_| self.device.clone());
            context.join(self.carries.entry(context.microbatch()).or_default(), tape);
        }
    }

    /// Runs a segment without a tape.
    fn infer(
        &self,
        segment: Segment,
        inputs: Values,
        forward: &mut ForwardState,
        replacement: Option<Replacement<'_>>,
    ) -> Result<Forwarded, StageError> {
        let module: &M = copied(&mut forward.copy, || self.computing().valid());
        let Pass { context, target, .. } = &forward.pass;
        let inputs = inputs.into_iter().map(|input| self.precision.rounded(input)).collect();
        let outputs = segment.run(module, inputs, context, replacement)?.into_iter();
        let ends_in_loss = self.has_loss() && segment.is_last();
        let outputs: Values = match ends_in_loss {
            true => outputs.map(|output| self.precision.widened(output)).collect(),
            false => outputs.map(|output| self.precision.rounded(output)).collect(),
        };
        let loss = match target {
            Some(target) if ends_in_loss => {
                match self.loss_of(outputs.clone(), Some(target.clone()), context) {
                    // Targets `()` are those of an evaluation without a loss, or of a loss that takes no targets.
                    Err(StageError::Target(_)) if target.is_empty() => None,
                    loss => loss?,
                }
            }
            _ => None,
        };
        let (auxiliary, _) = split_auxiliary(context.take_auxiliary(), 1.0)?;
        Ok(Forwarded { outputs, loss, auxiliary, loads: context.take_loads() })
    }
}

/// Returns the copy of a module, which `make` makes at its first use in a forward.
pub(super) fn copied<M: 'static>(copy: &mut Option<Box<dyn Any>>, make: impl FnOnce() -> M) -> &M {
    let copy = copy.get_or_insert_with(|| Box::new(make()));
    copy.downcast_ref().expect("a forward runs copies of one module")
}
