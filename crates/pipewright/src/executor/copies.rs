//! Adds the gradients of shards that several ranks of a tensor group hold. Each rank computes a part, and all
//! copies get the same update.
//!
//! The ranks exchange all of them in one message at the end of a step, when the sums over replicas are
//! complete.

use pipewright_schedule::StageIndex;

use super::connection::Connection;
use super::context::RankContext;
use super::stages::LocalStages;
use crate::collective::sum;
use crate::failure::Cause;
use crate::tensor::{CopyGradient, OptionalTensors, TensorRank, TensorShard};

/// A parameter with a gradient that this rank computes in part.
struct PartialCopy {
    stage: StageIndex,
    /// Its index among the stage's parameters.
    parameter: usize,
    shard: TensorShard,
}

/// Adds the gradients of copies whose ranks compute parts of them.
pub(super) fn add_copies(
    context: &RankContext,
    connection: &Connection,
    stages: &mut LocalStages,
) -> Result<(), Cause> {
    let rank = context.tensor_rank();
    let copies = partial_copies(stages, rank);
    if copies.is_empty() {
        return Ok(());
    }
    let own = |copy: &PartialCopy| stages.get(copy.stage).runner().sums().get(copy.parameter);
    let own: OptionalTensors = copies.iter().map(own).collect();
    let gathered = connection.tensor_group.all_gather(own)?;
    for (entry, PartialCopy { stage, parameter, shard }) in copies.into_iter().enumerate() {
        let first = (rank.index - shard.copy) as usize;
        let holders = gathered.iter().skip(first).take(shard.copies as usize);
        let gradients = holders.map(|gradients| vec![gradients.get(entry).cloned().flatten()]);
        let total = sum(gradients).pop().flatten();
        stages.get_mut(stage).runner_mut().sums_mut().set(parameter, total);
    }
    Ok(())
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
