//! What a stage takes and gives: put together, looked at, and put where it belongs.

use pipewright_schedule::{Microbatch, StageIndex};

use super::machine::Executor;
use crate::failure::Cause;
use crate::message::Direction;
use crate::tensor::{Found, MetadataError, Side, Value, Values};

impl Executor {
    /// All tensors that a stage takes for a microbatch; they are here. None when the neighbour's are not.
    pub(super) fn take_inputs(
        &mut self,
        stage: StageIndex,
        microbatch: Microbatch,
    ) -> Option<Result<Values, Cause>> {
        let inputs = self.local_stage(stage).inputs[microbatch.index()].take()?;
        let Some(previous) = self.program.placement().previous(stage) else {
            // The data needs no gradient.
            return Some(Ok(inputs.into_iter().map(Value::constant).collect()));
        };
        let mut inputs = inputs.into_iter().map(Some).collect();
        self.append_skips(Direction::Forward, stage, microbatch, &mut inputs);
        let inputs: Values = inputs.into_iter().flatten().collect();
        let looked = self.local_stage(stage).boundaries.check_inputs(&inputs);
        Some(looked.map(|()| inputs).map_err(|found| self.mismatch(previous, stage, microbatch, found)))
    }

    /// Hands on what a stage gives: skip connections at once, the rest to the next stage when that is here, else to the
    /// action that sends it, or to the report.
    pub(super) fn give_outputs(
        &mut self,
        stage: StageIndex,
        microbatch: Microbatch,
        outputs: Values,
    ) -> Result<(), Cause> {
        let place = microbatch.index();
        let Some(next) = self.program.placement().next(stage) else {
            let is_wanted = self.program.is_forward_only() || self.step.keep_outputs;
            self.local_stage(stage).outputs[place] = is_wanted.then_some(outputs);
            return Ok(());
        };
        let mut outputs = outputs.into_iter().map(Some).collect();
        self.hand_over(Direction::Forward, stage, microbatch, &mut outputs);
        let outputs: Values = outputs.into_iter().flatten().collect();
        let looked = self.local_stage(stage).boundaries.check_outputs(&outputs);
        looked.map_err(|found| self.mismatch(stage, next, microbatch, found))?;
        match self.elsewhere(next) {
            Some(_) => self.local_stage(stage).outputs[place] = Some(outputs),
            None => self.local_stage(next).inputs[place] = Some(outputs),
        }
        Ok(())
    }

    /// A boundary between two stages whose sides differ.
    fn mismatch(&self, from: StageIndex, to: StageIndex, microbatch: Microbatch, found: Found) -> Cause {
        let rank = |stage| self.endpoint.world_rank_of(self.program.placement().rank_of(stage));
        let side = |stage| Side { stage, rank: rank(stage) };
        let (mismatch, sent, expected) = found;
        let (from, to) = (side(from), side(to));
        Box::new(MetadataError { microbatch, mismatch, from, sent, to, expected }).into()
    }
}
