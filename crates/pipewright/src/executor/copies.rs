//! Adds the gradients of shards that several ranks of a tensor group hold. Each rank computes a part, and all
//! copies get the same update.
//!
//! The ranks exchange all of them in one message at the end of a step, when the sums over replicas are
//! complete. The exchange does not block, because a rank may compute the next batch meanwhile.

use pipewright_schedule::StageIndex;

use super::connection::Connection;
use super::context::RankContext;
use super::stages::LocalStages;
use crate::collective::{Exchange, sum};
use crate::tensor::{CopyGradient, OptionalTensors, TensorRank, TensorShard};

/// A parameter with a gradient that this rank computes in part.
struct PartialCopy {
    stage: StageIndex,
    /// Its index among the stage's parameters.
    parameter: usize,
    shard: TensorShard,
}

/// Sends the gradients of copies whose ranks compute parts of them, and returns the exchange with the others'. It is
/// complete if there are none.
pub(super) fn exchange_copies(
    context: &RankContext,
    connection: &Connection,
    stages: &LocalStages,
) -> Exchange<OptionalTensors> {
    let copies = partial_copies(stages, context.tensor_rank());
    if copies.is_empty() {
        return Exchange::complete(OptionalTensors::new());
    }
    let own = |copy: &PartialCopy| stages.get(copy.stage).runner().sums().get(copy.parameter);
    connection.tensor_group.begin_all_gather(copies.iter().map(own).collect())
}

/// Adds the gradients of copies, which have arrived.
pub(super) fn add_copies(
    context: &RankContext,
    stages: &mut LocalStages,
    gathered: Exchange<OptionalTensors>,
) {
    let rank = context.tensor_rank();
    let (copies, gathered) = (partial_copies(stages, rank), gathered.into_contents().collect::<Vec<_>>());
    for (entry, PartialCopy { stage, parameter, shard }) in copies.into_iter().enumerate() {
        let first = (rank.index - shard.copy) as usize;
        let holders = gathered.iter().skip(first).take(shard.copies as usize);
        let gradients = holders.map(|gradients| vec![gradients.get(entry).cloned().flatten()]);
        let total = sum(gradients).pop().flatten();
        stages.get_mut(stage).runner_mut().sums_mut().set(parameter, total);
    }
}

/// Returns the parameters with gradients that this rank computes in part. All ranks of the group have the
/// same list.
fn partial_copies(stages: &LocalStages, rank: TensorRank) -> Vec<PartialCopy> {
    let mut copies = Vec::new();
    for stage in stages.iter().filter(|_| rank.of > 1) {
        for parameter in 0..stage.runner().table().paths.len() {
            let shard = stage.shard_of(parameter, rank);
            if stage.runner().table().placement(parameter).gradient == CopyGradient::Partial
                && shard.copies > 1
            {
                copies.push(PartialCopy { stage: stage.index, parameter, shard });
            }
        }
    }
    copies
}
