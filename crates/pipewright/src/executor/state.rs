//! A rank's training state between two steps: taken out for a checkpoint, put back from one.

use std::sync::Arc;

use super::machine::Executor;
use crate::checkpoint::{Checkpoint, HeldParameter, RankState, StageState};
use crate::failure::Cause;

impl Executor {
    /// The parameters and optimizer state of all stages, sharing storage. Of a parameter with several owners, as far as
    /// they are known, the lowest stage's copy alone; nothing from a replica but the first, unless each has a part.
    pub(crate) fn state(&self) -> RankState {
        let of_stage = |local: &super::local_stage::LocalStage| {
            let StageState { parameters, optimizer, part } = local.runner.state();
            let counts = |parameter: &HeldParameter| self.counts(local.stage, parameter.place);
            StageState { parameters: parameters.into_iter().filter(counts).collect(), optimizer, part }
        };
        // Replicas that hold the same have one state between them, the first one's.
        let has_own = self.endpoint.coord().replica == 0 || self.endpoint.part().is_some();
        let stages = self.stages.iter().filter(|_| has_own).map(of_stage).collect();
        RankState { rank: self.world_rank, stages, memory: self.memory.clone() }
    }

    /// Takes over the state of all stages; with an error, some of it.
    pub(crate) fn restore(&mut self, checkpoint: &Checkpoint) -> Result<(), Cause> {
        // Gradients that wait for an update are of other parameters.
        self.reset();
        for local in &mut self.stages {
            let restored = local.runner.restore(checkpoint);
            restored.map_err(|error| Cause::Restore { stage: local.stage, error: Arc::new(error) })?;
            // Reading may take long; whoever waits sees that it goes on.
            self.board.moved(self.world_rank, 0);
        }
        Ok(())
    }
}
