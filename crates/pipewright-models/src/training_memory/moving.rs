//! The bytes that ranks hold while layers move to other ranks between two steps (`executor/moves.rs` of `pipewright`).
//!
//! A rank keeps its stages until it has made the changed ones again. It also holds a copy of the changed stages' state,
//! the state that arrives, and the stages that it makes. All ranks are counted as if they did so at the same time. No
//! gradients and activations exist then.

use std::collections::HashSet;

use pipewright_schedule::held_bytes::HeldBytes;
use pipewright_schedule::{Rank, StageIndex};

use crate::parameter::{FirstCopies, ParameterSpec};
use crate::training_memory::held::{TrainingMemory, TrainingRun};

impl TrainingMemory {
    /// Estimates what the ranks of a replica hold while layers move. `before` and `after` are the parameters of the
    /// stages. Without `after`, each rank makes all its stages again, and they need as much as before.
    ///
    /// The bytes of a move are in [`HeldBytes::buffers`].
    pub fn while_moving(
        run: &TrainingRun<'_>,
        before: &[Vec<ParameterSpec>],
        after: Option<&[Vec<ParameterSpec>]>,
    ) -> Self {
        let of_rank = |rank: Rank| {
            let held = run.rank_state(rank, before);
            let buffers = run.bytes_of_move(rank, before, after);
            HeldBytes { gradients: 0, undo: 0, buffers, ..held }
        };
        let ranks = run.program.placement().all_ranks().map(of_rank).collect();
        let [shared, shared_again] = run.shared_bytes(before);
        Self::new(ranks, Vec::new()).with_shared(shared, shared_again)
    }
}

impl TrainingRun<'_> {
    /// Returns the bytes that a rank holds besides its stages.
    fn bytes_of_move(
        &self,
        rank: Rank,
        before: &[Vec<ParameterSpec>],
        after: Option<&[Vec<ParameterSpec>]>,
    ) -> u64 {
        let own = self.program.placement().stages_of(rank);
        let mut known = HashSet::new();
        let mut parameters = own.iter().flat_map(|stage| &before[stage.index()]);
        // A rank with copies of a parameter makes all its stages again.
        let has_copies = parameters.any(|spec| !known.insert((&spec.path, spec.first)));
        let is_made = |stage: &&StageIndex| {
            has_copies || after.is_none_or(|after| after[stage.index()] != before[stage.index()])
        };
        let made: Vec<&StageIndex> = own.iter().filter(is_made).collect();
        let after = after.unwrap_or(before);
        let parameters = |stages: &[Vec<ParameterSpec>]| {
            let all: Vec<_> = made.iter().flat_map(|stage| stages[stage.index()].clone()).collect();
            FirstCopies::default().of(&all)
        };
        let (old, new) = (parameters(before), parameters(after));
        // The parameters in the first list that the other one lacks.
        let missing = |specs: &[ParameterSpec], others: &[ParameterSpec]| {
            let others: HashSet<_> = others.iter().map(|spec| (&spec.path, spec.first)).collect();
            let missing = specs.iter().filter(|spec| !others.contains(&(&spec.path, spec.first)));
            self.trained_state(&missing.cloned().collect::<Vec<_>>())
        };
        let (arriving, leaving) = (missing(&new, &old), missing(&old, &new));
        let stages = made.iter().map(|stage| self.made_stage(&after[stage.index()]));
        let stages = stages.fold(0, u64::saturating_add);
        // State that is sent exists as tensors and as bytes, and so does state that has arrived, until its message is read.
        let messages = leaving.max(arriving).saturating_mul(2);
        self.trained_state(&old).saturating_add(messages.max(arriving.saturating_add(stages)))
    }

    /// Returns the bytes of a stage when it has been made. Its parameters are made whole, also if replicas share them.
    fn made_stage(&self, specs: &[ParameterSpec]) -> u64 {
        let held = self.stage_state(self.state_of(specs, &mut FirstCopies::default()));
        let whole = if self.sharding.shards > 1 { self.state.of(specs, |_| true).parameters } else { 0 };
        held.parameters.saturating_add(held.optimizer).saturating_add(whole)
    }
}
