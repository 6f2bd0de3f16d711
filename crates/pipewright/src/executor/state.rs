//! A rank's training state between two steps: read for a checkpoint, or restored from one.

use std::sync::Arc;

use super::local_stage::LocalStage;
use super::machine::Executor;
use crate::checkpoint::{Checkpoint, HeldParameter, RankState, StageState};
use crate::failure::Cause;

impl Executor {
    /// The parameters and optimizer state of all stages, sharing storage. A shared parameter is in the state of its lowest
    /// stage alone, once the shared parameters are known. Unless parameters are sharded, replicas hold the same, and only
    /// the first one returns its stages.
    pub(crate) fn state(&self) -> RankState {
        let of_stage = |stage: &LocalStage| {
            let StageState { parameters, optimizer, part } = stage.runner.state();
            let counts = |parameter: &HeldParameter| self.counts(stage.index, parameter.place);
            StageState { parameters: parameters.into_iter().filter(counts).collect(), optimizer, part }
        };
        let has_own = self.endpoint.coord().replica == 0 || self.endpoint.part().is_some();
        let stages = self.stages.iter().filter(|_| has_own).map(of_stage).collect();
        RankState { rank: self.world_rank, stages, memory: self.memory.clone() }
    }

    /// Restores the state of all stages. After an error some stages are restored and others are not.
    pub(crate) fn restore(&mut self, checkpoint: &Checkpoint) -> Result<(), Cause> {
        // Accumulated gradients belong to the parameters before.
        self.reset();
        for stage in &mut self.stages {
            let restored = stage.runner.restore(checkpoint);
            restored.map_err(|error| Cause::Restore { stage: stage.index, error: Arc::new(error) })?;
            // Reading may take longer than the deadline; this shows that the rank is at work.
            self.board.moved(self.world_rank, 0);
        }
        Ok(())
    }
}
