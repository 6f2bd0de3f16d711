//! The edges of a stage: its inputs are joined and checked, and its outputs are checked and passed on.

use pipewright_schedule::{Microbatch, StageIndex};

use super::actions::MADE_BEFORE;
use super::boundary::Crossing;
use super::machine::Executor;
use crate::failure::Cause;
use crate::message::Direction;
use crate::stage::{BatchPart, without_tape};
use crate::tensor::{Flow, OnMismatch, OptionalTensors, TensorMismatch, Value, Values};

impl Executor {
    /// Takes the inputs of a stage for a microbatch, adds those of its skip connections, and checks them. They are in
    /// place: the start of the step has put the model's inputs there, the stage before on this rank its outputs, and
    /// `fetch_inputs` those of another rank.
    pub(super) fn take_inputs(&mut self, stage: StageIndex, microbatch: Microbatch) -> Result<Values, Cause> {
        let inputs = self.local_stage(stage).inputs[microbatch.index()].take().expect(MADE_BEFORE);
        let Some(previous) = self.placement().previous(stage) else {
            let wanted = self.step.input.wanted_gradients.clone();
            let device = self.local_stage(stage).runner.device();
            let input = |(place, input): (usize, Value)| match wanted.get(place) {
                Some(true) => without_tape(input).to_device(device).requiring_grad(),
                _ => input.to_device(device).constant(),
            };
            let inputs = inputs.into_iter().enumerate().map(input).collect();
            return Ok(self.local_stage(stage).runner.admitted(BatchPart::Input, inputs)?);
        };
        let mut inputs = inputs.into_iter().map(Some).collect();
        self.append_skips(Direction::Forward, stage, microbatch, &mut inputs);
        let inputs: Values = inputs.into_iter().flatten().collect();
        let looked = self.local_stage(stage).boundaries.check_inputs(microbatch, &inputs);
        let crossing = Crossing { from: previous, to: stage, microbatch };
        self.judge(looked, stage, Flow::Inputs, crossing).map(|()| inputs)
    }

    /// Passes on the outputs of a stage. Skip connections are sent at once. The other outputs go to the next stage if
    /// it is on this rank, otherwise to the action that sends them or to the report.
    pub(super) fn give_outputs(
        &mut self,
        stage: StageIndex,
        microbatch: Microbatch,
        outputs: Values,
    ) -> Result<(), Cause> {
        let place = microbatch.index();
        if self.step.input.kept_stages.contains(&stage) {
            // They share storage with those that are passed on.
            self.local_stage(stage).kept[place] = Some(outputs.clone());
        }
        let Some(next) = self.placement().next(stage) else {
            let is_wanted = self.step.input.keep_outputs;
            self.local_stage(stage).outputs[place] = is_wanted.then_some(outputs);
            return Ok(());
        };
        let mut outputs = outputs.into_iter().map(Some).collect();
        self.send_skips(Direction::Forward, stage, microbatch, &mut outputs);
        let outputs: Values = outputs.into_iter().flatten().collect();
        let looked = self.local_stage(stage).boundaries.check_outputs(&outputs);
        self.judge(looked, stage, Flow::Outputs, Crossing { from: stage, to: next, microbatch })?;
        match self.elsewhere(next) {
            Some(_) => self.local_stage(stage).outputs[place] = Some(outputs),
            None => self.local_stage(next).inputs[place] = Some(outputs),
        }
        Ok(())
    }

    /// Checks the gradients of a stage's inputs before they go back to the previous stage.
    pub(super) fn check_gradients(
        &mut self,
        stage: StageIndex,
        microbatch: Microbatch,
        gradients: &OptionalTensors,
    ) -> Result<(), Cause> {
        let Some(previous) = self.placement().previous(stage) else { return Ok(()) };
        let looked = self.local_stage(stage).boundaries.check_input_gradients(microbatch, gradients);
        self.judge(looked, stage, Flow::InputGradients, Crossing { from: stage, to: previous, microbatch })
    }

    /// Returns the error for a boundary whose two stages differ in their tensors, or logs it if it is a warning. `stage`
    /// has checked them.
    fn judge(
        &mut self,
        looked: Result<(), TensorMismatch>,
        stage: StageIndex,
        flow: Flow,
        crossing: Crossing,
    ) -> Result<(), Cause> {
        let Err(found) = looked else { return Ok(()) };
        let error = self.metadata_error(crossing, found);
        match self.on_mismatch {
            OnMismatch::Fail => Err(Box::new(error).into()),
            OnMismatch::Warn => {
                if self.local_stage(stage).boundaries.warns(flow) {
                    tracing::warn!("{error}");
                }
                Ok(())
            }
        }
    }
}
