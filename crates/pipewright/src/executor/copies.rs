//! Adds the gradients of shards that several ranks of a tensor group hold. Each rank computes a part, and all copies get the
//! same update.
//!
//! The ranks exchange all of them in one message at the end of a step, when the sums over replicas are complete.

use super::machine::Executor;
use crate::collective::sum;
use crate::failure::Cause;
use crate::tensor::{CopyGradient, OptionalTensors, TensorShard};

impl Executor {
    /// Returns the shard of a stage's parameter that this rank holds. `stage` is the stage's place on this rank.
    pub(super) fn shard_of(&self, stage: usize, place: usize) -> TensorShard {
        self.stages[stage].runner.placement(place).shard_of(self.endpoint.tensor_rank())
    }

    /// Adds the gradients of copies whose ranks compute parts of them.
    pub(super) fn add_copies(&mut self) -> Result<(), Cause> {
        let places = self.partial_copies();
        if places.is_empty() {
            return Ok(());
        }
        let own =
            |&(stage, place, _): &(usize, usize, TensorShard)| self.stages[stage].runner.gradient(place);
        let own: OptionalTensors = places.iter().map(own).collect();
        let of_ranks = self.endpoint.tensor_group().all_gather(own)?;
        let index = self.endpoint.tensor_rank().index;
        for (entry, (stage, place, shard)) in places.into_iter().enumerate() {
            let first = (index - shard.copy) as usize;
            let copies = of_ranks.iter().skip(first).take(shard.copies as usize);
            let gradients = copies.map(|of_rank| vec![of_rank.get(entry).cloned().flatten()]);
            let total = sum(gradients).pop().flatten();
            self.stages[stage].runner.set_gradient(place, total);
        }
        Ok(())
    }

    /// Returns the parameters of which this rank computes a part of the gradient, with the places of their stages and
    /// their own. All ranks of the group have the same list.
    fn partial_copies(&self) -> Vec<(usize, usize, TensorShard)> {
        if self.endpoint.tensor_rank().of == 1 {
            return Vec::new();
        }
        let of_stage = |(stage, local): (usize, &super::local_stage::LocalStage)| {
            let partial = move |&place: &usize| {
                let is_partial = local.runner.placement(place).gradient == CopyGradient::Partial;
                is_partial && self.shard_of(stage, place).copies > 1
            };
            let places: Vec<usize> = (0..local.runner.paths().len()).filter(partial).collect();
            places.into_iter().map(move |place| (stage, place, self.shard_of(stage, place)))
        };
        self.stages.iter().enumerate().flat_map(of_stage).collect()
    }
}
