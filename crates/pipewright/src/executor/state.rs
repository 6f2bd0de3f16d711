//! A rank's training state between two steps: reading it for a checkpoint, and restoring it from one.

use std::sync::Arc;

use super::local_stage::LocalStage;
use super::machine::Executor;
use crate::checkpoint::{Checkpoint, HeldParameter, NotFinite, RankState, StageState};
use crate::failure::Cause;
use crate::stage::RestoredPaths;

impl Executor {
    /// Returns the parameters and optimizer state of all stages, which share storage with the model. If the shared
    /// parameters are known, only the lowest stage of a shared parameter returns it. The replicas of a shard group hold the
    /// state together, and only the replicas of the first group return their stages.
    pub(crate) fn state(&self) -> RankState {
        let of_stage = |stage: &LocalStage| {
            let StageState { parameters, optimizer, row_shard } =
                stage.runner.state(self.endpoint.tensor_rank());
            let counts = |parameter: &HeldParameter| self.counts(stage.index, parameter.place);
            StageState { parameters: parameters.into_iter().filter(counts).collect(), optimizer, row_shard }
        };
        let counts = self.endpoint.is_in_first_group();
        let stages = self.stages.iter().filter(|_| counts).map(of_stage).collect();
        RankState { rank: self.world_rank, stages, loss_scale: None, memory: self.memory.clone() }
    }

    /// Returns a trained parameter of this rank that has elements that are not finite, and their number.
    pub(super) fn ruined_parameter(&self) -> Option<(Arc<str>, NotFinite)> {
        let states = self.stages.iter().map(|stage| stage.runner.state(self.endpoint.tensor_rank()));
        let trained = states.flat_map(|state| state.parameters).filter(|parameter| parameter.is_trained);
        let mut looked_at = trained.map(|HeldParameter { path, value, .. }| {
            let data = value.into_data();
            let mut found = NotFinite::default();
            found.scan(data.dtype(), data.as_bytes());
            (path, found)
        });
        looked_at.find(|(_, found)| !found.is_empty())
    }

    /// Restores the state of all stages. If `may_miss`, parameters that the checkpoint does not have keep their values.
    /// After an error some stages are restored and others are not.
    pub(crate) fn restore(
        &mut self,
        checkpoint: &Checkpoint,
        may_miss: bool,
    ) -> Result<RestoredPaths, Cause> {
        // Accumulated gradients belong to the old parameters. Running statistics that the checkpoint does not have stay.
        self.stages.iter_mut().for_each(|stage| stage.runner.keep_buffers(false));
        self.reset();
        let mut all = RestoredPaths::default();
        for stage in &mut self.stages {
            let paths = stage.runner.restore(checkpoint, self.endpoint.tensor_rank(), may_miss);
            let paths =
                paths.map_err(|error| Cause::Restore { stage: stage.index, error: Arc::new(error) })?;
            all.restored.extend(paths.restored);
            all.missing.extend(paths.missing);
            // Reading may take longer than the deadline. This call reports progress.
            self.board.moved(self.world_rank, 0);
        }
        Ok(all)
    }
}
