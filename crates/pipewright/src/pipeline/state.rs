//! The state of a running pipeline between two steps: its parameters, and the state that a checkpoint has.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::accumulation::Accumulation;
use super::error::PipelineError;
use super::ranks::End;
use super::running::Pipeline;
use super::summary::Unmatched;
use crate::checkpoint::{Checkpoint, RankState};
use crate::driver::Command;
use crate::executor::NamedParameter;
use crate::ids::StepNumber;
use crate::stage::RestoredPaths;

impl Pipeline {
    /// Returns the parameters of all stages of this process. If they are sharded over several processes, each
    /// process has only parts of them, so all processes must call it.
    ///
    /// # Errors
    /// When a rank fails or no longer answers. Accumulated gradients are dropped then.
    pub fn parameters(&mut self) -> Result<Vec<NamedParameter>, PipelineError> {
        self.require_none_begun()?;
        let is_sharded = self.setup.config.is_sharded();
        let attempt = if is_sharded { self.ranks.begin_exchange() } else { self.ranks.attempt() };
        let replies = self.ranks.command(|reply| Command::Parameters { attempt, reply })?;
        let by_rank = self.ranks.await_ranks(&replies, |parameters| parameters);
        let by_rank = by_rank.map_err(|error| self.fail(self.ranks.step(), error, false))?;
        Ok(by_rank.into_iter().flatten().collect())
    }

    /// Returns the state of all ranks of this process that belong to the first replica or, if parameters are
    /// sharded, to the first group of replicas that hold all parameters together. The state shares storage
    /// with the running model, so nothing is copied here. The next update copies the storage that it writes
    /// to, unless the state is dropped by then.
    ///
    /// # Errors
    /// When gradients wait for an update, a rank fails, or a rank no longer answers.
    pub fn state(&mut self) -> Result<Vec<RankState>, PipelineError> {
        self.require_none_begun()?;
        if self.accumulation.is_pending() {
            return Err(PipelineError::GradientsPending);
        }
        let replies = self.ranks.command(|reply| Command::State { reply })?;
        let mut ranks = self.ranks.await_ranks(&replies, |state| state.map(|state| *state))?;
        ranks.retain(|rank| !rank.stages.is_empty());
        ranks.iter_mut().for_each(|rank| rank.loss_scale = self.accumulation.loss_scale);
        Ok(ranks)
    }

    /// Restores parameters, optimizer state and the loss scale from a checkpoint, which any cut and schedule
    /// may have written. Parameters that were frozen ([`Pipeline::freeze`]) are frozen again. The next step
    /// is the one after the checkpoint's.
    ///
    /// # Errors
    /// When the checkpoint lacks a parameter or has one of another shape, when the optimizer does not accept
    /// its state, or when a rank no longer answers. The pipeline then takes no further step.
    pub fn restore(&mut self, checkpoint: &Arc<Checkpoint>) -> Result<(), PipelineError> {
        self.restore_paths(checkpoint, false).map(drop)
    }

    /// Like [`Pipeline::restore`], for a model that has other parameters than the one that wrote the
    /// checkpoint, such as adapters or another head. Parameters of the same path are restored. Others of the
    /// model keep their values and begin without the optimizer's state. Returns the paths that are in one of
    /// the two only, as PyTorch's `load_state_dict` with `strict=False` does.
    ///
    /// # Errors
    /// As [`Pipeline::restore`], except that the checkpoint may lack parameters.
    pub fn restore_matching(&mut self, checkpoint: &Arc<Checkpoint>) -> Result<Unmatched, PipelineError> {
        let by_rank = self.restore_paths(checkpoint, true)?;
        let restored: BTreeSet<&str> =
            by_rank.iter().flat_map(|paths| &paths.restored).map(|path| &**path).collect();
        let missing: BTreeSet<Arc<str>> = by_rank.iter().flat_map(|paths| &paths.missing).cloned().collect();
        let has_all_ranks = self.setup.is_whole_world(self.ranks.ids().count());
        let paths = checkpoint.parameters().map(|stored| stored.path);
        let unused =
            has_all_ranks.then(|| paths.filter(|path| !restored.contains(path)).map(Into::into).collect());
        Ok(Unmatched { missing: missing.into_iter().collect(), unused })
    }

    /// Restores a checkpoint, and returns the paths of the parameters of each rank of this process.
    fn restore_paths(
        &mut self,
        checkpoint: &Arc<Checkpoint>,
        may_miss: bool,
    ) -> Result<Vec<RestoredPaths>, PipelineError> {
        self.require_none_begun()?;
        let replies = self.ranks.command(|reply| Command::Restore {
            checkpoint: checkpoint.clone(),
            may_miss,
            reply,
        })?;
        let restored = self.ranks.await_ranks(&replies, |restored| restored);
        if restored.is_err() {
            self.ranks.end(End::HalfRestored);
        }
        let restored = restored?;
        self.ranks.return_to(StepNumber::new(checkpoint.step()));
        // A loss scale from before a restore belongs to other parameters.
        self.verifier.forget();
        self.last_end = None;
        self.accumulation = Accumulation::new(&self.setup.config, checkpoint.loss_scale);
        Ok(restored)
    }
}
