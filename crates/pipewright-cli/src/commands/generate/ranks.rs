//! The ranks that generate: their number, the layers of each, and their devices.

use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use burn::tensor::Device;
use clap::Args;
use pipewright::device::{DeviceChoice, Devices};
use pipewright::ids::WorldRank;
use pipewright_models::generation_ranks::{GenerationRanks, RankStage, RanksError};
use pipewright_schedule::partition::{Method, partition};
use serde_json::{Value, json};

use crate::failure::{Exit, Failure};
use crate::training::process_group::is_one_of_several;
use crate::training::trained_model::{RunRanks, TrainedModel};

/// The time that several ranks may take without progress.
const USUAL_DEADLINE: Duration = Duration::from_secs(600);

/// The arguments about ranks.
#[derive(Debug, Args)]
pub(crate) struct RankArguments {
    /// The number of ranks that the layers of the model are distributed over; `run`: the ranks and devices of
    /// one replica of the run
    #[arg(long, value_name = "N|run", default_value = "1")]
    ranks: RankChoice,
    /// The device of each rank, in turn; without it the processor, or the devices of the run
    #[arg(long, value_name = "DEVICE", value_delimiter = ',')]
    devices: Vec<DeviceChoice>,
    /// How long to wait for ranks that make no progress, in seconds; without it, 600 for several ranks, and
    /// any time for one
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..))]
    deadline: Option<u64>,
}

/// How many ranks there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RankChoice {
    Count(u32),
    Run,
}

impl FromStr for RankChoice {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match (text, text.parse()) {
            ("run", _) => Ok(Self::Run),
            (_, Ok(0)) | (_, Err(_)) => Err("give a number, 1 or above, or `run`"),
            (_, Ok(count)) => Ok(Self::Count(count)),
        }
    }
}

/// The ranks before they have their stages.
pub(super) struct RankPlan {
    stages: Vec<RankStage>,
    choices: Vec<DeviceChoice>,
    deadline: Duration,
}

/// The ranks with their stages.
pub(super) struct Ranks {
    pub(super) threads: GenerationRanks,
    stages: Vec<RankStage>,
    choices: Vec<DeviceChoice>,
}

impl RankArguments {
    /// Distributes the layers of a model over ranks.
    pub(super) fn plan(&self, found: &TrainedModel) -> Result<RankPlan, Failure> {
        if is_one_of_several() {
            return Err(Failure::input(
                "several processes were started, and each would generate the same text: start `pipewright generate` once, \
                 without mpirun; `--ranks N` distributes the model over the devices of this machine",
            ));
        }
        let (count, of_run) = match self.ranks {
            RankChoice::Count(count) => (count, None),
            RankChoice::Run => {
                let run = found.run.as_ref().ok_or_else(|| {
                    Failure::input(
                        "`--ranks run` is for the folder of a run and its checkpoints: give a number",
                    )
                })?;
                (run.ranks, Some(run))
            }
        };
        let choices = self.devices_of(of_run)?;
        let devices = Devices::open(&choices).map_err(Failure::input)?;
        let layers = found.model.for_generation().describe(found.trained_length.unwrap_or(1));
        let partition = partition(&layers.weights(), count, &Method::Optimal);
        let partition = partition.map_err(|error| Failure::input(format!("--ranks: {error}")))?;
        let device = |rank| devices.of(WorldRank::new(rank)).cloned().unwrap_or_else(Device::flex);
        let stages = (0..).zip(partition.ranges());
        let stages = stages.map(|(rank, layers)| RankStage { layers, device: device(rank) }).collect();
        Ok(RankPlan { stages, choices, deadline: self.deadline(count) })
    }

    /// Returns the time that some ranks may take without progress. Nobody waits for a single one, and reading
    /// its parameters or a long prompt may take any time.
    fn deadline(&self, ranks: u32) -> Duration {
        let usual = if ranks == 1 { Duration::MAX } else { USUAL_DEADLINE };
        self.deadline.map_or(usual, Duration::from_secs)
    }

    /// Returns the devices of the ranks in turn, at least one.
    fn devices_of(&self, of_run: Option<&RunRanks>) -> Result<Vec<DeviceChoice>, Failure> {
        let names = of_run.map_or(&[][..], |run| &run.devices).iter();
        let of_run = names.map(|name| name.parse()).collect::<Result<Vec<_>, _>>().map_err(Failure::input)?;
        let given = [&self.devices, &of_run].into_iter().find(|devices| !devices.is_empty());
        Ok(given.cloned().unwrap_or_else(|| vec![DeviceChoice::FLEX]))
    }
}

impl RankPlan {
    /// Starts the ranks, each with the parameters of its own layers.
    pub(super) fn start(self, found: &Arc<TrainedModel>) -> Result<Ranks, Failure> {
        let model = Arc::clone(found);
        let make = move |stage: &RankStage| {
            model.model.generation_stage(stage.layers.clone(), model.origin.source(), &stage.device)
        };
        let threads = GenerationRanks::start(self.stages.clone(), self.deadline, make);
        Ok(Ranks { threads: threads.map_err(failure)?, stages: self.stages, choices: self.choices })
    }
}

impl Ranks {
    pub(super) fn count(&self) -> usize {
        self.stages.len()
    }

    /// Returns the layers, the device and the parameters of each rank.
    pub(super) fn to_json(&self) -> Value {
        let stages = self.stages.iter().zip(self.choices.iter().cycle()).zip(self.threads.parameters());
        let ranks = stages.map(|((stage, device), parameters)| {
            json!({
                "layers": [stage.layers.start, stage.layers.end - 1],
                "device": device.to_string(),
                "parameters": parameters,
            })
        });
        ranks.collect()
    }
}

/// Returns the command's failure for an error of the ranks.
pub(super) fn failure(error: RanksError) -> Failure {
    match error {
        RanksError::Request { source, .. } => Failure::input(source),
        RanksError::Stage { .. } => Failure::input(error),
        _ => Failure::new(Exit::RankFailed, error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_single_rank_has_no_deadline_unless_one_is_given() {
        let check = |given: Option<u64>, ranks, expected| {
            let arguments =
                RankArguments { ranks: RankChoice::Count(ranks), devices: Vec::new(), deadline: given };
            assert_eq!(arguments.deadline(ranks), expected);
        };
        check(None, 1, Duration::MAX);
        check(None, 2, USUAL_DEADLINE);
        check(Some(7), 1, Duration::from_secs(7));
    }
}
