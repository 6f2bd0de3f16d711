//! Runs a segment of a stage's module, the whole or a block, and records its backward.

use burn::tensor::Tensor;

use super::body::StageBody;
use super::error::StageError;
use super::forward::Replacement;
use super::module::StageContext;
use super::runner::Forwarded;
use super::shards::Catches;
use super::tape::{Tape, check_scalar, scaled, split_auxiliary};
use super::tape_ends::{all_off_tape, as_leaf, off_tape};
use super::training::TrainingStage;
use crate::autodiff::inner_of;
use crate::nn::{Deferred, at_least_single};
use crate::tensor::{Values, pack, unpack};

/// The data that all forwards of a microbatch share: the first one, and the second one if it is recomputed.
pub(super) struct Pass {
    pub(super) context: StageContext,
    pub(super) target: Option<Values>,
    pub(super) loss_weight: f64,
    pub(super) auxiliary_weight: f64,
}

/// A part of a stage's module.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Segment {
    Whole,
    Block { index: usize, of: usize },
}

impl Segment {
    /// Returns the block; 0 for the whole module.
    pub(super) fn index(self) -> usize {
        match self {
            Self::Whole => 0,
            Self::Block { index, .. } => index,
        }
    }

    /// Returns the block after this segment.
    pub(super) fn next(self) -> Option<usize> {
        match self {
            Self::Whole => None,
            Self::Block { index, of } => (index + 1 < of).then_some(index + 1),
        }
    }

    pub(super) fn is_last(self) -> bool {
        self.next().is_none()
    }

    /// Runs the segment of `module`, or `replacement` in its place.
    pub(super) fn run<M: StageBody>(
        self,
        module: &M,
        inputs: Values,
        context: &StageContext,
        replacement: Option<Replacement<'_>>,
    ) -> Result<Values, StageError> {
        match (replacement, self) {
            (Some(replacement), _) => {
                let run = || replacement(module.exposed(), inputs, context);
                let name = format!("stage {}, block {}, replaced", context.stage(), self.index());
                context.run_layer(&name, run)?
            }
            (None, Self::Whole) => Ok(pack(module.run(inputs, context)?)),
            (None, Self::Block { index, .. }) => module.run_block(index, inputs, context),
        }
    }
}

impl<M: StageBody> TrainingStage<M> {
    pub(super) fn loss_of(
        &self,
        output: Values,
        target: Option<Values>,
        context: &StageContext,
    ) -> Result<Option<Tensor<1>>, StageError> {
        let Some(loss) = &self.loss else { return Ok(None) };
        let target = target.ok_or(StageError::NoTarget)?;
        let output = unpack(output).map_err(StageError::Input)?;
        let loss = context.run_layer("the loss", || loss(output, target, context))??;
        check_scalar(&loss, || "the loss".to_owned())?;
        Ok(Some(at_least_single(loss)))
    }

    /// Runs a segment of the stage's module and records its backward.
    pub(super) fn record(
        &self,
        segment: Segment,
        inputs: Values,
        pass: &Pass,
        keep_outputs: bool,
        replacement: Option<Replacement<'_>>,
    ) -> Result<(Forwarded, Tape), StageError> {
        let deferred = Deferred::new(self.parameters.clone());
        let Some(shards) = &self.shards else {
            let run = || self.run_segment(self.computing(), segment, inputs, pass, keep_outputs, replacement);
            let (forwarded, tape) = deferred.collect(run)?;
            return Ok((forwarded, tape.with(deferred, Catches::new())));
        };
        let (module, catches, deferred) = shards.forward(self.computing().clone(), deferred);
        let run = || self.run_segment(&module, segment, inputs, pass, keep_outputs, replacement);
        let (forwarded, tape) = deferred.collect(run)?;
        Ok((forwarded, tape.with(deferred, catches)))
    }

    /// Runs a segment of `module`; after the last one, the loss. The tape is empty if nothing in `module` and no input
    /// requires a gradient.
    pub(super) fn run_segment(
        &self,
        module: &M,
        segment: Segment,
        inputs: Values,
        pass: &Pass,
        keep_outputs: bool,
        replacement: Option<Replacement<'_>>,
    ) -> Result<(Forwarded, Tape), StageError> {
        let Pass { context, target, loss_weight, auxiliary_weight } = pass;
        let rounded = inputs.into_iter().map(|input| self.precision.rounded(input));
        let (inputs, leaves) = rounded.map(|input| as_leaf(input, &self.device)).unzip();
        let output = segment.run(module, inputs, context, replacement)?;
        if let Some(what) = context.take_not_finite() {
            return Err(StageError::NotFinite { what });
        }
        if self.loss.is_some() && segment.is_last() {
            let output: Values = output.into_iter().map(|output| self.precision.widened(output)).collect();
            let outputs = if keep_outputs { all_off_tape(&output) } else { Values::new() };
            let loss =
                self.loss_of(output, target.clone(), context)?.expect("a stage with a loss computes it");
            let (auxiliary, weighted) = split_auxiliary(context.take_auxiliary(), *auxiliary_weight)?;
            let report = inner_of(loss.clone());
            let tape = Tape::new(leaves, Some(scaled(loss, *loss_weight)), Vec::new(), weighted);
            let tape = tape.with_carry(context.take_carry());
            let loads = context.take_loads();
            return Ok((Forwarded { outputs, loss: Some(report), auxiliary, loads }, tape));
        }
        let (auxiliary, weighted) = split_auxiliary(context.take_auxiliary(), *auxiliary_weight)?;
        let rounded = output.into_iter().map(|output| self.precision.rounded(output));
        let (outputs, roots) = rounded.map(off_tape).unzip();
        let tape = Tape::new(leaves, None, roots, weighted).with_carry(context.take_carry());
        Ok((Forwarded { outputs, loss: None, auxiliary, loads: context.take_loads() }, tape))
    }
}
