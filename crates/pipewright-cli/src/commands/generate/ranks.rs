//! The ranks that generate: their number, the layers of each, their devices, and whether they are threads or
//! processes.

use std::str::FromStr;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::Duration;

use burn::tensor::Device;
use clap::Args;
use pipewright::device::{DeviceChoice, Devices};
use pipewright::ids::WorldRank;
use pipewright::nn::TensorParallel;
use pipewright::rank_link::RankLink;
use pipewright::tensor::TensorRank;
use pipewright::transport::Fields;
use pipewright_models::generation_ranks::{GenerationRanks, RankStage, RanksConfig, RanksError};
use pipewright_models::{CutModel, Place};
use pipewright_planning::failure::{Exit, Failure, sentence};
use pipewright_run::FailedRun;
use pipewright_run::training::process_group::{ProcessGroup, is_one_of_several, lost};
use pipewright_run::training::trained_model::{RunRanks, TrainedModel};
use pipewright_schedule::partition::{Method, Partition, partition};
use pipewright_schedule::words::counted;
use serde_json::{Value, json};

/// The time that several ranks may take without progress.
const USUAL_DEADLINE: Duration = Duration::from_secs(600);

/// The arguments about ranks.
#[derive(Debug, Args)]
pub(crate) struct RankArguments {
    /// The number of pipeline ranks that the layers of the model are distributed over; `run`: the ranks and
    /// devices of one replica of the run. Without it 1, or with several processes their number divided by
    /// that of the tensor ranks
    #[arg(long, value_name = "N|run")]
    ranks: Option<RankChoice>,
    /// The number of ranks that compute each stage together; without it 1, or that of the run with
    /// `--ranks run`
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    tensor_parallel: Option<u32>,
    /// The device of each rank, in turn; without it the processor, or the devices of the run
    #[arg(long, value_name = "DEVICE", value_delimiter = ',')]
    devices: Vec<DeviceChoice>,
    /// How long to wait for ranks that make no progress, in seconds; without it, 600 for several ranks, and
    /// any time for one
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..))]
    deadline: Option<u64>,
    /// Leave the matrices of the model in their files, and read each whenever it is used: for a model that is larger
    /// than memory. Each token reads the whole model
    #[arg(long)]
    stream: bool,
}

/// How many pipeline ranks there are.
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

/// The number of ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Counts {
    pipeline: u32,
    tensor: u32,
    whole_experts: bool,
}

/// The ranks before they have their stages.
pub(super) struct RankPlan {
    config: RanksConfig,
    choices: Vec<DeviceChoice>,
    streams: bool,
}

/// The ranks with their stages.
pub(super) struct Ranks {
    pub(super) group: GenerationRanks,
    config: RanksConfig,
    choices: Vec<DeviceChoice>,
}

impl RankArguments {
    /// Distributes the layers of a model over ranks: threads of this process, or all processes.
    pub(super) fn plan(&self, found: &TrainedModel, processes: &ProcessGroup) -> Result<RankPlan, Failure> {
        if is_one_of_several() && !processes.is_several() {
            let (reason, advice) = if cfg!(feature = "mpi") {
                (
                    "their launcher is not that of the MPI library of this build",
                    "start them with the mpirun of that library",
                )
            } else {
                ("this build cannot connect them", "build with `--features mpi`")
            };
            return Err(Failure::input(format!(
                "several processes were started, and {reason}, so each would generate the same text: {advice}, or start \
                 `pipewright generate` once, without mpirun; `--ranks N` distributes the model over the devices of this \
                 machine"
            )));
        }
        let of_run = match self.ranks {
            Some(RankChoice::Run) => Some(found.run.as_ref().ok_or_else(|| {
                Failure::input("`--ranks run` is for the folder of a run and its checkpoints: give a number")
            })?),
            _ => None,
        };
        let counts = self.counts(of_run, processes.count())?;
        let model = CutModel::from(found.model.for_generation());
        let layers = model.describe(found.trained_length.unwrap_or(1));
        let partition = partition(&layers.weights(), counts.pipeline, &Method::Optimal);
        let partition = partition.map_err(|error| Failure::input(format!("--ranks: {error}")))?;
        counts.require_split(&model, &partition)?;
        let choices = self.devices_of(of_run)?;
        let devices = if processes.is_several() {
            // The devices of other processes may be on other machines, and are not used here.
            Devices::open(&[choices[processes.rank().index() % choices.len()]])
        } else {
            Devices::open(&choices)
        };
        let devices = devices.map_err(Failure::input)?;
        let device = |rank| devices.of(WorldRank::new(rank)).cloned().unwrap_or_else(Device::flex);
        let of_stages = partition.ranges().flat_map(|layers| vec![layers; counts.tensor as usize]);
        let stages = (0..).zip(of_stages);
        let config = RanksConfig {
            stages: stages.map(|(rank, layers)| RankStage { layers, device: device(rank) }).collect(),
            tensor_ranks: counts.tensor,
            whole_experts: counts.whole_experts,
            deadline: self.deadline(counts.pipeline * counts.tensor),
        };
        Ok(RankPlan { config, choices, streams: self.stream })
    }

    /// Returns the numbers of ranks, with one process for each of them if there are several `processes`.
    fn counts(&self, of_run: Option<&RunRanks>, processes: u32) -> Result<Counts, Failure> {
        let tensor = self.tensor_parallel.or(of_run.map(|run| run.tensor)).unwrap_or(1).max(1);
        let whole_experts = of_run.is_some_and(|run| run.whole_experts);
        let pipeline = match (self.ranks, of_run) {
            (Some(RankChoice::Count(count)), _) => count,
            (_, Some(run)) => run.ranks,
            (_, None) => (processes / tensor).max(1),
        };
        let ranks = pipeline.checked_mul(tensor).ok_or_else(|| {
            let most = u32::MAX;
            Failure::input(format!(
                "{pipeline} x {tensor} ranks are more than the {most} that can exist: choose smaller numbers for \
                 `--ranks` and `--tensor-parallel`"
            ))
        })?;
        if processes > 1 && ranks != processes {
            return Err(Failure::input(format!(
                "{} were started for {pipeline} x {tensor} ranks: start one process for each rank, or change `--ranks` and \
                 `--tensor-parallel`",
                counted(processes as usize, "process")
            )));
        }
        Ok(Counts { pipeline, tensor, whole_experts })
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

impl Counts {
    /// Refuses a number of tensor ranks that cannot split the layers, before there is anything for each rank.
    fn require_split(self, model: &CutModel, partition: &Partition) -> Result<(), Failure> {
        let first = TensorParallel::unconnected(TensorRank { index: 0, of: self.tensor });
        let first = first.with_whole_experts(self.whole_experts);
        partition.ranges().enumerate().try_for_each(|(stage, layers)| {
            let outline = model.outline(layers, &first).map(drop);
            outline.map_err(|error| Failure::input(format!("stage {stage}: {}", sentence(&error))))
        })
    }
}

impl RankPlan {
    /// Returns what all processes must have in common, by name.
    pub(super) fn fields(&self, found: &TrainedModel) -> Fields {
        let layers =
            self.config.stages.iter().map(|stage| format!("{}-{}", stage.layers.start, stage.layers.end));
        let fields = [
            ("version", env!("CARGO_PKG_VERSION").to_owned()),
            ("the model", found.model.to_json().to_string()),
            ("the layers of the ranks", layers.collect::<Vec<_>>().join(" ")),
            ("--tensor-parallel", self.config.tensor_ranks.to_string()),
            ("whole experts", self.config.whole_experts.to_string()),
            ("--deadline", self.config.deadline.as_secs().to_string()),
            ("--stream", self.streams.to_string()),
        ];
        let fields = fields.map(|(name, value)| (name.to_owned(), value));
        found.origin.identity().into_iter().chain(fields).collect()
    }

    /// Returns how long the ranks wait for each other.
    pub(super) fn deadline(&self) -> Duration {
        self.config.deadline
    }

    /// Starts the ranks, each with the parameters of its own layers. In a process that does not choose the
    /// tokens, it computes until the end, and returns `None`.
    pub(super) fn start(
        self,
        found: &Arc<TrainedModel>,
        processes: &mut ProcessGroup,
    ) -> Result<Option<Ranks>, Failure> {
        let Self { config, choices, streams } = self;
        let model = Arc::clone(found);
        let make = move |layers, place: &Place| {
            let place = Place { streams, ..place.clone() };
            model.model.generation_stage(layers, model.origin.source(), &place)
        };
        let started = if processes.is_several() {
            let world = processes.take_world()?;
            GenerationRanks::start_in(world, &config, make)
        } else {
            GenerationRanks::start(&config, make).map(Some)
        };
        Ok(started.map_err(failure)?.map(|group| Ranks { group, config, choices }))
    }
}

impl Ranks {
    /// Returns the next value of `input`, and `None` at its end. A rank that fails ends the wait.
    pub(super) fn next_of<T>(&mut self, input: &Receiver<T>) -> Result<Option<T>, Failure> {
        loop {
            let next = input.recv_timeout(RankLink::LOOK);
            self.group.check().map_err(failure)?;
            match next {
                Ok(value) => return Ok(Some(value)),
                Err(RecvTimeoutError::Disconnected) => return Ok(None),
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }

    pub(super) fn count(&self) -> usize {
        self.config.stages.len()
    }

    /// Returns the layers, the device and the parameters of each rank.
    pub(super) fn to_json(&self) -> Value {
        let stages = self.config.stages.iter().zip(self.choices.iter().cycle()).zip(self.group.parameters());
        let tensor = self.config.tensor_ranks as usize;
        let ranks = stages.enumerate().map(|(rank, ((stage, device), parameters))| {
            let mut json = json!({
                "layers": [stage.layers.start, stage.layers.end - 1],
                "device": device.to_string(),
                "parameters": parameters,
            });
            if tensor > 1 {
                json["tensor_rank"] = (rank % tensor).into();
            }
            json
        });
        ranks.collect()
    }
}

/// Returns the command's failure for an error of the ranks.
pub(super) fn failure(error: RanksError) -> Failure {
    match error {
        RanksError::Request { source, .. } => Failure::input(source),
        RanksError::Lost(step) => {
            let lost = lost(&step);
            Failure::new(Exit::RankFailed, step.cause).loss_of(lost)
        }
        error if error.is_of_model() => Failure::input(error),
        error => Failure::new(Exit::RankFailed, error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arguments(ranks: Option<RankChoice>, tensor_parallel: Option<u32>) -> RankArguments {
        RankArguments { ranks, tensor_parallel, devices: Vec::new(), deadline: None, stream: false }
    }

    #[test]
    fn a_single_rank_has_no_deadline_unless_one_is_given() {
        let check = |given: Option<u64>, ranks, expected| {
            let arguments = RankArguments { deadline: given, ..arguments(None, None) };
            assert_eq!(arguments.deadline(ranks), expected);
        };
        check(None, 1, Duration::MAX);
        check(None, 2, USUAL_DEADLINE);
        check(Some(7), 1, Duration::from_secs(7));
    }

    #[test]
    fn there_is_one_process_for_each_rank() {
        let run = RunRanks { ranks: 2, tensor: 2, whole_experts: true, devices: Vec::new() };
        let check = |ranks, tensor, processes, expected: Option<[u32; 2]>| {
            let of_run = (ranks == Some(RankChoice::Run)).then_some(&run);
            let counts = arguments(ranks, tensor).counts(of_run, processes).ok();
            assert_eq!(
                counts.map(|counts| [counts.pipeline, counts.tensor]),
                expected,
                "{ranks:?} {tensor:?}"
            );
            assert!(counts.is_none_or(|counts| counts.whole_experts == of_run.is_some()));
        };
        check(None, None, 1, Some([1, 1]));
        check(None, Some(2), 1, Some([1, 2]));
        check(None, None, 4, Some([4, 1]));
        check(None, Some(2), 4, Some([2, 2]));
        check(None, Some(3), 4, None);
        check(Some(RankChoice::Count(3)), None, 1, Some([3, 1]));
        check(Some(RankChoice::Count(3)), None, 2, None);
        check(Some(RankChoice::Count(u32::MAX)), Some(2), 1, None);
        check(Some(RankChoice::Run), None, 1, Some([2, 2]));
        check(Some(RankChoice::Run), Some(1), 2, Some([2, 1]));
        check(Some(RankChoice::Run), None, 3, None);
        let refused = |ranks, processes| {
            let refused = arguments(Some(RankChoice::Count(ranks)), Some(2)).counts(None, processes);
            refused.expect_err("it is refused").text()
        };
        assert!(refused(u32::MAX, 1).starts_with("4294967295 x 2 ranks are more than "));
        assert!(refused(3, 2).starts_with("2 processes were started for 3 x 2 ranks: "));
    }
}
