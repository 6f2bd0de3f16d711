//! The `[pipeline]` section: how many ranks, which schedule, how the model is cut.

use std::fmt;
use std::path::{Path, PathBuf};

use pipewright_schedule::generate::find;
use pipewright_schedule::partition::{Method, partition};
use pipewright_schedule::{Action, GenerateError, ModelDesc, Schedule, ScheduleSpec, generate};
use serde::{Serialize, Serializer};

use crate::config::document::Document;
use crate::config::paths::Surroundings;
use crate::config::problem::ProblemKind;
use crate::config::section::Section;

/// The schedule where none is named.
const DEFAULT_SCHEDULE: &str = "1f1b";

/// How the model is laid out over ranks, and how a step runs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct PipelineSettings {
    /// Workers in the pipeline.
    pub(crate) ranks: u32,
    /// Stages on each rank.
    pub(crate) stages_per_rank: u32,
    /// What each rank computes, in order.
    pub(crate) schedule: ScheduleChoice,
    /// Microbatches a step, over all replicas.
    pub(crate) microbatches: u32,
    /// Rows in a microbatch.
    pub(crate) microbatch_size: u32,
    /// How layers are shared out over stages.
    pub(crate) partition: PartitionChoice,
    /// Each later stage's first layer, for an explicit partition.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) boundaries: Option<Vec<u32>>,
    /// What carries tensors between ranks.
    pub(crate) transport: TransportChoice,
    /// Threads that each rank computes with.
    pub(crate) threads_per_rank: u32,
}

/// A schedule by name, or from a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ScheduleChoice {
    /// A name that the schedule engine knows.
    Named(String),
    /// The absolute path of a CSV file. Ranks, stages and placement follow from it.
    Csv(PathBuf),
}

/// How layers are shared out over stages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum PartitionChoice {
    /// The same number of layers.
    Even,
    /// Greedily by weight.
    Weighted,
    /// The smallest possible largest stage.
    Optimal,
    /// As `boundaries` say.
    Explicit,
}

/// What carries tensors between ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum TransportChoice {
    /// Threads of one process.
    Local,
    /// A process a rank, over MPI.
    Mpi,
}

impl PipelineSettings {
    /// How layers are cut into stages.
    pub(crate) fn method(&self) -> Method {
        match self.partition {
            PartitionChoice::Even => Method::Even,
            PartitionChoice::Weighted => Method::Weighted,
            PartitionChoice::Optimal => Method::Optimal,
            PartitionChoice::Explicit => {
                let boundaries = self.boundaries.iter().flatten();
                Method::Explicit { boundaries: boundaries.map(|layer| *layer as usize).collect() }
            }
        }
    }

    /// Rows in a step's batch.
    pub(crate) fn rows(&self) -> usize {
        (self.microbatches as usize).saturating_mul(self.microbatch_size as usize)
    }
}

impl fmt::Display for ScheduleChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Named(name) => f.write_str(name),
            Self::Csv(path) => path.display().fmt(f),
        }
    }
}

impl Serialize for ScheduleChoice {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// Reads the section; `layers` are the model's, when the configuration itself tells, and `replicas` share the
/// microbatches.
pub(super) fn read(
    document: &mut Document,
    surroundings: &Surroundings,
    layers: Option<&ModelDesc>,
    replicas: u32,
) -> PipelineSettings {
    const PARTITIONS: [(&str, PartitionChoice); 4] = [
        ("even", PartitionChoice::Even),
        ("weighted", PartitionChoice::Weighted),
        ("optimal", PartitionChoice::Optimal),
        ("explicit", PartitionChoice::Explicit),
    ];
    let mut section = Section::new(document, surroundings, "pipeline");
    let mut pipeline = PipelineSettings {
        ranks: section.count("ranks", 2),
        stages_per_rank: section.count("stages_per_rank", 1),
        schedule: read_schedule(&mut section),
        microbatches: section.count("microbatches", 8),
        microbatch_size: section.count("microbatch_size", 1),
        partition: section.choice("partition", PartitionChoice::Optimal, &PARTITIONS),
        boundaries: section.counts("boundaries"),
        transport: read_transport(&mut section),
        threads_per_rank: section.count_to("threads_per_rank", 1, 1024),
    };
    if section.is_sound() {
        check_boundaries(&mut section, &pipeline);
    }
    if section.is_sound() {
        check_schedule(&mut section, &mut pipeline, layers, replicas);
    }
    pipeline
}

fn read_schedule(section: &mut Section<'_>) -> ScheduleChoice {
    let Some(text) = section.text("schedule") else { return ScheduleChoice::Named(DEFAULT_SCHEDULE.into()) };
    if Path::new(&text).extension().is_some_and(|ending| ending.eq_ignore_ascii_case("csv")) {
        return section.path("schedule").map_or(ScheduleChoice::Named(text), ScheduleChoice::Csv);
    }
    ScheduleChoice::Named(
        find(&text).map_or_else(|_unknown| text.to_lowercase(), |known| known.name.to_owned()),
    )
}

fn read_transport(section: &mut Section<'_>) -> TransportChoice {
    let Some(text) = section.text("transport") else { return TransportChoice::Local };
    match text.as_str() {
        "local" => {}
        "mpi" if cfg!(feature = "mpi") => return TransportChoice::Mpi,
        "mpi" | "nccl" => {
            let kind = ProblemKind::NotCompiledIn { key: "transport", value: text, instead: "\"local\"" };
            section.refuse("transport", kind);
        }
        _ => section.refuse_word("transport", &text, ["local", "mpi", "nccl"].into_iter()),
    }
    TransportChoice::Local
}

/// Makes the named schedule and the partition, to learn whether they exist. A schedule from a file brings its own
/// sizes, and both are checked when it is read.
fn check_schedule(
    section: &mut Section<'_>,
    pipeline: &mut PipelineSettings,
    layers: Option<&ModelDesc>,
    replicas: u32,
) {
    let ScheduleChoice::Named(name) = &pipeline.schedule else { return };
    if !pipeline.microbatches.is_multiple_of(replicas) {
        let kind = ProblemKind::UnevenShare { microbatches: pipeline.microbatches, replicas };
        return section.refuse("microbatches", kind);
    }
    let stages_per_rank = section.is_written("stages_per_rank").then_some(pipeline.stages_per_rank);
    let spec = ScheduleSpec {
        ranks: pipeline.ranks,
        stages_per_rank,
        microbatches: pipeline.microbatches / replicas,
        ..ScheduleSpec::default()
    };
    let schedule = match generate(name, &spec) {
        Ok(schedule) => schedule,
        Err(error) => return section.refuse_at_first_of(culprits(&error), error.into()),
    };
    if !trains(&schedule) {
        let (key, value) = ("schedule", name.clone());
        return section.refuse(key, ProblemKind::NoTraining { key, value });
    }
    let stages = schedule.placement().stages();
    pipeline.stages_per_rank = stages / pipeline.ranks;
    if let Some(layers) = layers
        && let Err(error) = partition(&layers.weights(), stages, &pipeline.method())
    {
        section.refuse_at_first_of(&["boundaries", "ranks", "stages_per_rank"], error.into());
    }
}

/// The keys that an error of a generator is about, the likeliest first.
fn culprits(error: &GenerateError) -> &'static [&'static str] {
    match error {
        GenerateError::UnknownSchedule { .. } => &["schedule"],
        GenerateError::StagesPerRank { .. } | GenerateError::OddStagesPerRank { .. } => &["stages_per_rank"],
        _ => &["microbatches", "ranks", "schedule"],
    }
}

/// Whether a schedule runs any stage backward.
fn trains(schedule: &Schedule) -> bool {
    let mut cells = schedule.placement().all_ranks().flat_map(|rank| schedule.row(rank)).flatten();
    cells.any(|action| !matches!(action, Action::Forward { .. }))
}

fn check_boundaries(section: &mut Section<'_>, pipeline: &PipelineSettings) {
    match (&pipeline.boundaries, pipeline.partition) {
        (None, PartitionChoice::Explicit) => section.refuse("partition", ProblemKind::NoBoundaries),
        (Some(_), PartitionChoice::Even | PartitionChoice::Weighted | PartitionChoice::Optimal) => {
            section.refuse("boundaries", ProblemKind::UnusedBoundaries);
        }
        (Some(_), PartitionChoice::Explicit) | (None, _) => {}
    }
}
