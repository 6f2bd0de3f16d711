//! Running statistics, averaged over replicas at the end of a step.
//!
//! A forward may change parameters that are not trained, such as the running mean and variance of a batch
//! normalisation. Each replica has other microbatches and so other values. After the program, the replicas of
//! a stage send each other the values that their forwards have changed ([`Tag::Statistics`]). Each of them
//! takes the mean, added in the same order, so all have the same bits: evaluations, checkpoints and modules
//! do not depend on the replica.
//!
//! # Which values have changed
//!
//! Only the values show it, so they are compared with those before the step. Burn visits a running statistic
//! like a frozen parameter, and its id does not change when its value does. On the processor, a value that
//! still has its storage is equal without being read. A value that a forward has replaced by the same bits
//! counts as unchanged: for three replicas, the mean of equal values may have other bits.
//!
//! Experts that replicas hold together do not count: other replicas do not have them.

use pipewright_schedule::StageIndex;

use super::connection::Connection;
use super::context::RankContext;
use super::stages::LocalStages;
use crate::collective::{Exchange, sum};
use crate::failure::Cause;
use crate::message::{AwaitedMessage, Tag};
use crate::tensor::OptionalTensors;

/// The statistics of a stage that its replicas exchange.
pub(super) struct StatisticsMean {
    stage: StageIndex,
    values: Exchange<OptionalTensors>,
}

/// Sends the statistics that this replica's forwards have changed. Returns nothing if no stage has any.
pub(super) fn exchange_statistics(
    context: &RankContext,
    connection: &mut Connection,
    stages: &mut LocalStages,
) -> Vec<StatisticsMean> {
    let group = &context.data_group;
    let changed = stages.iter_mut().filter_map(|stage| {
        let own = stage.runner_mut().changed_statistics()?;
        let tag = Tag::Statistics { stage: stage.index };
        for (_, to) in group.others() {
            connection.send_copies(to, tag, own.clone());
        }
        Some(StatisticsMean { stage: stage.index, values: Exchange::among(group, tag, own) })
    });
    changed.collect()
}

/// Takes the statistics that have arrived, or returns a missing message.
pub(super) fn receive_statistics(
    connection: &mut Connection,
    stages: &LocalStages,
    means: &mut [StatisticsMean],
) -> Result<Option<AwaitedMessage>, Cause> {
    let mut missing = None;
    for StatisticsMean { stage, values } in means {
        missing = missing.or(connection.receive_tensors(values, &stages.get(*stage).inner_device())?);
    }
    Ok(missing)
}

/// Gives the stages the means. They are added in the order of the shares of the batch, which replicas change
/// in a repetition of a step.
pub(super) fn set_statistics(
    context: &RankContext,
    stages: &mut LocalStages,
    repetition: u32,
    means: Vec<StatisticsMean>,
) {
    for StatisticsMean { stage, values } in means {
        let values: Vec<OptionalTensors> =
            context.by_share(&context.data_group, values.into_contents(), repetition);
        let count = |index| values.iter().filter(|list| list.get(index).is_some_and(Option::is_some)).count();
        let counts: Vec<usize> = (0..values.first().map_or(0, Vec::len)).map(count).collect();
        let mean = sum(values).into_iter().zip(counts);
        let mean = mean.map(|(sum, count)| Some(sum?.scaled(1.0 / count as f64))).collect();
        stages.get_mut(stage).runner_mut().set_statistics(mean);
    }
}
