//! The edges of a stage: its inputs are joined and checked, and its outputs are checked and passed on. In a tensor
//! group, tensors are converted between the placements of the stage that makes them and of the stage that takes
//! them (`conversion.rs`).

use pipewright_schedule::StageIndex;

use super::boundary::{BoundaryMessage, metadata_error};
use super::context::RankContext;
use super::conversion::{Converter, sum};
use super::machine::Executor;
use super::skip::append_skips;
use super::stages::{At, LocalStage};
use crate::failure::Cause;
use crate::message::Direction;
use crate::stage::{BatchPart, StageError, without_tape};
use crate::tensor::{Flow, OnMismatch, OptionalTensors, Spread, TensorMismatch, Value, Values};

impl Executor {
    /// Takes the inputs of a stage for a microbatch, adds the inputs from its skip connections, and checks them.
    /// They are in place: the start of the step has put the model's inputs there, the previous stage on this rank
    /// its outputs, and `fetch_inputs` the outputs of another rank.
    pub(super) fn take_inputs(&mut self, at @ At { stage, microbatch }: At) -> Result<Values, Cause> {
        let Self { context, stages, step, .. } = self;
        let local_stage = stages.get_mut(stage);
        let inputs = local_stage.batch.inputs.take(microbatch);
        let Some(previous) = context.placement.previous(stage) else {
            let device = local_stage.runner().device();
            let model_input = |(index, value): (usize, Value)| match step.input().wanted_gradients.get(index)
            {
                Some(true) => without_tape(value).to_device(device).requiring_grad(),
                _ => value.to_device(device).constant(),
            };
            let inputs = inputs.into_iter().enumerate().map(model_input).collect();
            let inputs = local_stage.runner().admitted(BatchPart::Input, inputs)?;
            let inputs = self.taken(Direction::Forward, stage, inputs.into_iter().map(Some).collect())?;
            return Ok(inputs.into_iter().flatten().collect());
        };
        let mut inputs = inputs.into_iter().map(Some).collect();
        append_skips(stages, Direction::Forward, at, &mut inputs);
        let inputs: Values = inputs.into_iter().flatten().collect();
        let checked = stages.get_mut(stage).boundaries.check_inputs(microbatch, &inputs);
        let message = BoundaryMessage { from: previous, to: stage, microbatch };
        report_mismatch(checked, context, stages.get_mut(stage), Flow::Inputs, message).map(|()| inputs)
    }

    /// Passes on the outputs of a stage. Skip connections are sent at once. The other outputs go to the next
    /// stage if it is on this rank, otherwise to the action that sends them or to the report.
    pub(super) fn pass_outputs(
        &mut self,
        at @ At { stage, microbatch }: At,
        outputs: Values,
    ) -> Result<(), Cause> {
        let next = self.context.placement.next(stage);
        let input = self.step.input();
        let is_reported = next.is_none() && input.keep_outputs;
        let is_kept = input.kept_stages.contains(&stage);
        if is_reported || is_kept {
            let whole = self.whole_outputs(stage, outputs.clone())?;
            let local_stage = self.stages.get_mut(stage);
            if is_kept {
                // They share storage with the outputs that are passed on.
                local_stage.batch.kept.put(microbatch, whole.clone());
            }
            if is_reported {
                local_stage.batch.outputs.put(microbatch, whole);
            }
        }
        let Some(next) = next else { return Ok(()) };
        let outputs = outputs.into_iter().map(Some).collect();
        let mut outputs = self.sent(Direction::Forward, stage, outputs)?;
        self.send_skips(Direction::Forward, at, &mut outputs);
        let outputs: Values = outputs.into_iter().flatten().collect();
        let Self { context, stages, .. } = self;
        let checked = stages.get_mut(stage).boundaries.check_outputs(&outputs);
        let message = BoundaryMessage { from: stage, to: next, microbatch };
        report_mismatch(checked, context, stages.get_mut(stage), Flow::Outputs, message)?;
        if context.is_local(next) {
            let inputs = self.taken(Direction::Forward, next, outputs.into_iter().map(Some).collect())?;
            self.stages.get_mut(next).batch.inputs.put(microbatch, inputs.into_iter().flatten().collect());
        } else {
            stages.get_mut(stage).batch.outputs.put(microbatch, outputs);
        }
        Ok(())
    }

    /// Returns the outputs of a stage as they are sent, or in the backward the gradients of its inputs.
    fn sent(
        &self,
        direction: Direction,
        stage: StageIndex,
        tensors: OptionalTensors,
    ) -> Result<OptionalTensors, Cause> {
        let runner = self.stages.get(stage).runner();
        let what = |index| match direction {
            Direction::Forward => format!("output {index} of stage {stage}"),
            Direction::Backward => format!("the gradient of input {index} of stage {stage}"),
        };
        self.converter(&what).sent(tensors, |index| match direction {
            Direction::Forward => runner.output_placement(index).tensor,
            Direction::Backward => runner.input_placement(index).gradient,
        })
    }

    /// Returns tensors that were sent as the inputs of a stage, or in the backward as the gradients of its outputs.
    pub(super) fn taken(
        &self,
        direction: Direction,
        stage: StageIndex,
        tensors: OptionalTensors,
    ) -> Result<OptionalTensors, Cause> {
        let runner = self.stages.get(stage).runner();
        let what = |index| match direction {
            Direction::Forward => format!("input {index} of stage {stage}"),
            Direction::Backward => format!("the gradient of output {index} of stage {stage}"),
        };
        self.converter(&what).taken(tensors, |index| match direction {
            Direction::Forward => runner.input_placement(index).tensor,
            Direction::Backward => runner.output_placement(index).gradient,
        })
    }

    fn converter<'a>(&'a self, what: &'a dyn Fn(usize) -> String) -> Converter<'a> {
        Converter { rank: self.context.tensor_rank(), group: &self.connection.tensor_group, what }
    }

    /// Returns the whole outputs of a stage, which the ranks of its tensor group may have in parts. The first rank of
    /// the group joins them and reports them.
    fn whole_outputs(&self, stage: StageIndex, outputs: Values) -> Result<Values, Cause> {
        let Self { context, connection, stages, .. } = self;
        if context.tensor_rank().of == 1 {
            return Ok(outputs);
        }
        let runner = stages.get(stage).runner();
        let spreads: Vec<Spread> =
            (0..outputs.len()).map(|output| runner.output_placement(output).tensor).collect();
        let mut parts = OptionalTensors::new();
        for (output, (value, spread)) in outputs.iter().zip(&spreads).enumerate() {
            let shape = value.shape().to_vec();
            match *spread {
                Spread::Whole => continue,
                Spread::Split { dimension } if dimension >= shape.len() => {
                    let mistake = format!(
                        "output {output} has the shape {shape:?}, and its module says that tensor ranks split it along \
                         dimension {dimension} (`StageModule::output_placement`)"
                    );
                    return Err(StageError::Mistake(mistake).into());
                }
                Spread::Split { .. } | Spread::Partial => parts.push(Some(value.clone())),
            }
        }
        if parts.is_empty() {
            return Ok(outputs);
        }
        let by_rank = connection.tensor_group.gather_on_first(parts)?;
        if context.tensor_rank().index > 0 {
            // The first rank reports the outputs.
            return Ok(outputs);
        }
        let mut by_rank: Vec<_> = by_rank.into_iter().map(|parts| parts.into_iter().flatten()).collect();
        let mut of_ranks = || by_rank.iter_mut().filter_map(Iterator::next).collect();
        let whole = |(own, spread): (Value, Spread)| match spread {
            Spread::Whole => own,
            Spread::Split { dimension } => Value::joined(of_ranks(), dimension),
            Spread::Partial => sum(of_ranks()),
        };
        Ok(outputs.into_iter().zip(spreads).map(whole).collect())
    }

    /// Passes on the gradients of a stage's inputs: to the previous stage if it is on this rank, otherwise to the
    /// action that sends them, or to the report if the step returns them. The gradients of skip connections are
    /// sent at once.
    pub(super) fn pass_gradients(
        &mut self,
        at @ At { stage, microbatch }: At,
        gradients: OptionalTensors,
    ) -> Result<(), Cause> {
        let mut gradients = self.sent(Direction::Backward, stage, gradients)?;
        let Self { context, stages, .. } = self;
        let previous = context.placement.previous(stage);
        if let Some(previous) = previous {
            let checked = stages.get_mut(stage).boundaries.check_input_gradients(microbatch, &gradients);
            let message = BoundaryMessage { from: stage, to: previous, microbatch };
            report_mismatch(checked, context, stages.get_mut(stage), Flow::InputGradients, message)?;
        }
        self.send_skips(Direction::Backward, at, &mut gradients);
        let Self { context, stages, step, .. } = self;
        let input = step.input();
        let trained = input.program.as_program().trained();
        match previous {
            // A stage that runs forward only needs no gradient.
            Some(previous) if !trained.runs_backward(previous) => {}
            Some(previous) if context.is_local(previous) => {
                let gradients = self.taken(Direction::Backward, previous, gradients)?;
                self.stages.get_mut(previous).batch.output_gradients.put(microbatch, gradients);
            }
            Some(_) => stages.get_mut(stage).batch.input_gradients.put(microbatch, gradients),
            // The model's input data needs no gradient unless the step returns it.
            None if !input.wanted_gradients.contains(&true) => {}
            None => {
                let whole = self
                    .converter(&|input| format!("the gradient of input {input}"))
                    .taken(gradients, |_| Spread::Whole)?;
                self.stages.get_mut(stage).batch.input_gradients.put(microbatch, whole);
            }
        }
        Ok(())
    }
}

/// Returns the error for a boundary whose two stages differ in their tensors, or logs it if it is a warning.
/// `stage` has checked them.
fn report_mismatch(
    checked: Result<(), TensorMismatch>,
    context: &RankContext,
    stage: &mut LocalStage,
    flow: Flow,
    message: BoundaryMessage,
) -> Result<(), Cause> {
    let Err(mismatch) = checked else { return Ok(()) };
    let error = metadata_error(context, message, mismatch);
    match context.config.on_mismatch {
        OnMismatch::Fail => Err(Box::new(error).into()),
        OnMismatch::Warn => {
            if stage.boundaries.warns(flow) {
                tracing::warn!("{error}");
            }
            Ok(())
        }
    }
}
