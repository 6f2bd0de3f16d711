//! Runs a segment of a stage's module forward, and records its backward.
//!
//! If a stage runs block by block, each block has a tape of its own, and the values between two blocks are
//! off the tape. So the caller may read and replace them, and the backward runs block by block too
//! (`backward.rs`). Losses and gradients have the bits of the whole forward. The exceptions are modules whose
//! blocks have no tapes of their own in the whole forward ([`StageBody::layers`]): in half precision, the values
//! between blocks are rounded, and with slices, gradients are added in another order.

use burn::tensor::Tensor;

use super::TrainingStage;
use crate::autodiff::inner_of;
use crate::nn::{at_least_single, with_parts};
use crate::stage::body::StageBody;
use crate::stage::error::{StageError, in_part};
use crate::stage::first_value::FirstValue;
use crate::stage::forwarded::Forwarded;
use crate::stage::held_module::Recording;
use crate::stage::microbatch::{ForwardState, Pass, Saved};
use crate::stage::module::{Auxiliary, StageContext};
use crate::stage::segment::{Replacement, Segment};
use crate::stage::tape::{Tape, TapePart, check_scalar, scaled, split_auxiliary};
use crate::stage::tape_ends::{all_off_tape, as_input, off_tape};
use crate::stage::watch::Watch;
use crate::tensor::{Values, unpack};

impl<M: StageBody> TrainingStage<M> {
    /// Runs a segment of a forward, or `replacement` in its place.
    pub(super) fn forward_segment(
        &mut self,
        forward: &mut ForwardState,
        segment: Segment,
        replacement: Option<Replacement<'_>>,
    ) -> Result<(), StageError> {
        let (inputs, task) = (forward.take_values(), forward.task);
        if forward.context().watch().is_some_and(Watch::checks_gradients) {
            self.sums.watch();
        }
        forward.context_mut().draw_through(&self.draws);
        if replacement.is_none() {
            self.probe(segment, &inputs, forward)?;
        }
        self.in_flight.join_carry(forward.context_mut(), task.map(|_| &self.module.device));
        let forwarded = match task {
            None => self.forward_without_tape(segment, inputs, forward, replacement)?,
            // A function of the caller's cannot be called again.
            Some(task) if task.recompute && self.recomputes(segment) && replacement.is_none() => {
                self.forward_to_recompute(segment, inputs, forward, task.keep_outputs)?
            }
            Some(task) => {
                let (forwarded, tape) =
                    self.record(segment, inputs, &forward.pass, task.keep_outputs, replacement)?;
                // The tape of a stage that runs forward only is empty.
                if task.has_backward {
                    forward.save(segment, Saved::Tape(Box::new(tape)));
                }
                forwarded
            }
        };
        forward.add(segment, forwarded);
        Ok(())
    }

    /// Runs a segment in an evaluation.
    fn forward_without_tape(
        &self,
        segment: Segment,
        inputs: Values,
        forward: &mut ForwardState,
        replacement: Option<Replacement<'_>>,
    ) -> Result<Forwarded, StageError> {
        let precision = self.module.precision;
        let (module, Pass { context, target, .. }) = forward.copy_of(|| self.module.computing().valid());
        let inputs = inputs.into_iter().map(|input| precision.rounded(input)).collect();
        let outputs = segment.forward::<M>(module, inputs, context, replacement)?;
        let ends_in_loss = self.has_loss() && segment.is_last();
        let outputs = if ends_in_loss {
            self.for_loss(outputs)
        } else {
            outputs.into_iter().map(|output| precision.rounded(output)).collect()
        };
        let loss = match target {
            Some(target) if ends_in_loss => {
                match self.loss_of(outputs.clone(), Some(target.clone()), context) {
                    // An evaluation without a loss has the targets `()`, and so has a loss that takes no
                    // targets.
                    Err(StageError::Target(_)) if target.is_empty() => None,
                    loss => loss?,
                }
            }
            _ => None,
        };
        let outputs = if ends_in_loss { self.for_user(outputs) } else { outputs };
        let (auxiliary, _) = split_auxiliary(context.take_auxiliary(), 1.0)?;
        Ok(Forwarded { outputs, loss, auxiliary, loads: context.take_loads() })
    }

    /// Runs a segment and records its backward.
    pub(super) fn record(
        &self,
        segment: Segment,
        inputs: Values,
        pass: &Pass,
        keep_outputs: bool,
        replacement: Option<Replacement<'_>>,
    ) -> Result<(Forwarded, Tape), StageError> {
        let Recording { module, catches, deferred } = self.module.recording();
        let forward = || self.forward_on_tape(&module, segment, inputs, pass, keep_outputs, replacement);
        let run = || pass.context.side_leaves().recording(forward);
        let (forwarded, tape) = with_parts(self.settings.recomputed_parts, || deferred.collect(run))?;
        Ok((forwarded, tape.with(deferred, catches)))
    }

    /// Runs a segment of `module` layer by layer, or `replacement` in its place. The tape is empty if nothing in
    /// `module` and no input requires a gradient.
    pub(super) fn forward_on_tape(
        &self,
        module: &M,
        segment: Segment,
        inputs: Values,
        pass: &Pass,
        keep_outputs: bool,
        replacement: Option<Replacement<'_>>,
    ) -> Result<(Forwarded, Tape), StageError> {
        if replacement.is_some() {
            let (forwarded, part) =
                self.layer_on_tape(module, segment, inputs, pass, keep_outputs, replacement)?;
            return Ok((forwarded, Tape::new(vec![part])));
        }
        let (mut parts, mut auxiliary, mut loads) = (Vec::new(), Vec::new(), Vec::new());
        let (mut outputs, mut loss) = (inputs, None);
        for layer in segment.layers(module) {
            let (forwarded, part) = self.layer_on_tape(module, layer, outputs, pass, keep_outputs, None)?;
            (outputs, loss) = (forwarded.outputs, forwarded.loss);
            auxiliary.extend(forwarded.auxiliary);
            loads.extend(forwarded.loads);
            parts.push(part);
        }
        Ok((Forwarded { outputs, loss, auxiliary, loads }, Tape::new(parts)))
    }

    /// Runs a segment of `module` on one tape; after the last one, the loss.
    fn layer_on_tape(
        &self,
        module: &M,
        segment: Segment,
        inputs: Values,
        pass: &Pass,
        keep_outputs: bool,
        replacement: Option<Replacement<'_>>,
    ) -> Result<(Forwarded, TapePart), StageError> {
        let Pass { context, target, loss_weight, auxiliary_weight } = pass;
        let precision = self.module.precision;
        let rounded = inputs.into_iter().map(|input| precision.rounded(input));
        let (inputs, caught): (Values, _) = rounded.map(|input| as_input(input, &self.module.device)).unzip();
        let watch = context.watch().map(|watch| (watch, segment.name(module, context)));
        let before = watch.as_ref().map(|(watch, layer)| watch.inputs(layer, &inputs)).unwrap_or_default();
        let output = segment.forward(module, inputs, context, replacement)?;
        if let Some((watch, layer)) = &watch {
            watch.outputs(layer, &output, before);
            watch.outcome()?;
        }
        if let Some(what) = context.take_not_finite() {
            return Err(StageError::NotFinite { what });
        }
        let (outputs, roots, loss) = if self.has_loss() && segment.is_last() {
            let output = self.for_loss(output);
            let outputs = if keep_outputs { self.for_user(all_off_tape(&output)) } else { Values::new() };
            let loss =
                self.loss_of(output, target.clone(), context)?.expect("a stage with a loss computes it");
            (outputs, Vec::new(), Some(loss))
        } else {
            let rounded = output.into_iter().map(|output| precision.rounded(output));
            let (outputs, roots) = rounded.map(off_tape).unzip();
            (outputs, roots, None)
        };
        let (auxiliary, weighted) = split_auxiliary(context.take_auxiliary(), *auxiliary_weight)?;
        let report = loss.clone().map(inner_of);
        if let Some((watch, _)) = &watch {
            for Auxiliary { name, loss, .. } in &auxiliary {
                watch.loss(loss, || FirstValue::Auxiliary { name: name.to_string() });
            }
            report.iter().for_each(|loss| watch.loss(loss, || FirstValue::Loss));
            watch.outcome()?;
        }
        let part = TapePart {
            inputs: caught,
            loss: loss.map(|loss| scaled(loss, *loss_weight)),
            outputs: roots,
            auxiliary: weighted,
            carry: context.take_carry(),
            sides: context.side_leaves().take(),
            watch: watch.map(|(watch, layer)| (watch.clone(), layer)),
        };
        Ok((Forwarded { outputs, loss: report, auxiliary, loads: context.take_loads() }, part))
    }

    /// Returns outputs as the loss takes them.
    fn for_loss(&self, outputs: Values) -> Values {
        if self.options.loss_takes_half { outputs } else { self.for_user(outputs) }
    }

    /// Returns outputs as steps and evaluations return them: not in half precision.
    fn for_user(&self, outputs: Values) -> Values {
        let precision = self.module.precision;
        outputs.into_iter().map(|output| precision.widened(output)).collect()
    }

    fn loss_of(
        &self,
        output: Values,
        target: Option<Values>,
        context: &StageContext,
    ) -> Result<Option<Tensor<1>>, StageError> {
        let Some(loss) = &self.loss else { return Ok(None) };
        let target = target.ok_or_else(|| {
            StageError::Mistake("the stage ends in a loss, and the step has no targets for it".to_owned())
        })?;
        let output = unpack(output).map_err(StageError::Input)?;
        let run = || in_part(|| "the loss".to_owned(), || loss(output, target, context));
        let loss = context.run_layer("the loss", run)??;
        check_scalar(&loss, || "the loss".to_owned())?;
        Ok(Some(at_least_single(loss)))
    }
}
