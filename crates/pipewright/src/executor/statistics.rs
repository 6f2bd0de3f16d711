//! Running statistics, averaged over replicas at the end of a step.
//!
//! A forward may change parameters that are not trained, such as the running mean and variance of a batch normalisation.
//! Each replica has other microbatches and so other values. After the program, the replicas of a stage send each other the
//! values that their forwards have changed ([`Tag::Statistics`]). Each of them takes the mean, added in the same order, so
//! all have the same bits: evaluations, checkpoints and modules do not depend on the replica.

use pipewright_schedule::StageIndex;

use super::local_stage::LocalStage;
use super::machine::Executor;
use super::step::Phase;
use crate::collective::{Exchange, sum};
use crate::failure::Cause;
use crate::message::{AwaitedMessage, Tag};
use crate::tensor::OptionalTensors;

/// The statistics of a stage that its replicas exchange.
pub(super) struct StatisticsMean {
    stage: StageIndex,
    values: Exchange<OptionalTensors>,
}

impl Executor {
    /// Sends the statistics that this replica's forwards have changed, or ends the program if no stage has any.
    pub(super) fn exchange_statistics(&mut self) -> Result<Phase, Cause> {
        let is_alone = self.endpoint.replica_count() == 1;
        if is_alone || self.program().is_forward_only() {
            return self.end_training();
        }
        let group = self.endpoint.data_group().clone();
        let of_stage = |stage: &mut LocalStage| Some((stage.index, stage.runner.changed_statistics()?));
        let changed: Vec<_> = self.stages.iter_mut().filter_map(of_stage).collect();
        if changed.is_empty() {
            return self.end_training();
        }
        let send = |(stage, own): (StageIndex, OptionalTensors)| {
            let tag = Tag::Statistics { stage };
            for (_, to) in group.others() {
                self.send_copies(to, tag, own.clone());
            }
            StatisticsMean { stage, values: Exchange::among(&group, tag, own) }
        };
        Ok(Phase::Statistics(changed.into_iter().map(send).collect()))
    }

    /// Takes the statistics that have arrived, or returns a missing message.
    pub(super) fn receive_statistics(
        &mut self,
        means: &mut [StatisticsMean],
    ) -> Result<Option<AwaitedMessage>, Cause> {
        let mut missing = None;
        for StatisticsMean { stage, values } in means {
            let device = self.local_stage(*stage).runner.device().clone().inner();
            missing = missing.or(self.receive_tensors(values, &device)?);
        }
        Ok(missing)
    }

    /// Gives the stages the means, and ends the program.
    pub(super) fn set_statistics(&mut self, means: Vec<StatisticsMean>) -> Result<Phase, Cause> {
        for StatisticsMean { stage, values } in means {
            let values: Vec<OptionalTensors> = values.into_contents().collect();
            let count =
                |place| values.iter().filter(|list| list.get(place).is_some_and(Option::is_some)).count();
            let counts: Vec<usize> = (0..values.first().map_or(0, Vec::len)).map(count).collect();
            let mean = sum(values).into_iter().zip(counts);
            let mean = mean.map(|(sum, count)| Some(sum?.scaled(1.0 / count as f64))).collect();
            self.local_stage(stage).runner.set_statistics(mean);
        }
        self.end_training()
    }
}
