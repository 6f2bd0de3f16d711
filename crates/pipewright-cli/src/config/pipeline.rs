//! The `[pipeline]` section: how many ranks, which schedule, how the model is cut.

use std::fmt;
use std::path::{Path, PathBuf};

use pipewright::bounded_file::read_text;
use pipewright_schedule::csv::parse_program;
use pipewright_schedule::partition::{Method, partition};
use pipewright_schedule::{Action, GenerateError, ModelDesc, Schedule, ScheduleSpec, generate};
use serde::{Serialize, Serializer};

use crate::config::document::Document;
use crate::config::paths::Surroundings;
use crate::config::place::Place;
use crate::config::problem::ProblemKind;
use crate::config::section::Section;

/// The schedule where none is named.
const DEFAULT_SCHEDULE: &str = "1f1b";

/// The largest file of a schedule, in bytes: room for the largest program that can run.
pub(crate) const LARGEST_SCHEDULE: u64 = 1 << 30;

/// How the model is distributed over ranks, and how a step runs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct PipelineSettings {
    /// Workers in the pipeline.
    pub(crate) ranks: u32,
    /// Stages on each rank.
    pub(crate) stages_per_rank: u32,
    /// What each rank computes, in order.
    pub(crate) schedule: ScheduleChoice,
    /// Microbatches per step, over all replicas.
    pub(crate) microbatches: u32,
    /// Rows in a microbatch.
    pub(crate) microbatch_size: u32,
    /// How layers are distributed over stages.
    pub(crate) partition: PartitionChoice,
    /// The first layer of each stage but the first, for an explicit partition.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) boundaries: Option<Vec<u32>>,
    /// What transports tensors between ranks.
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

/// How layers are distributed over stages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum PartitionChoice {
    /// The same number of layers.
    Even,
    /// Greedily by weight.
    Weighted,
    /// So that the heaviest stage is as light as possible.
    Optimal,
    /// As `boundaries` say.
    Explicit,
}

/// What transports tensors between ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum TransportChoice {
    /// Threads of one process.
    Local,
    /// One process per rank, over MPI.
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
        check_file_sizes(&mut section, &pipeline, replicas);
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
    ScheduleChoice::Named(text.to_lowercase())
}

fn read_transport(section: &mut Section<'_>) -> TransportChoice {
    let Some(text) = section.text("transport") else { return TransportChoice::Local };
    match text.as_str() {
        "local" => {}
        "mpi" if cfg!(feature = "mpi") => return TransportChoice::Mpi,
        "mpi" => {
            let kind = ProblemKind::NotCompiledIn { key: "transport", value: text, instead: "\"local\"" };
            section.report("transport", kind);
        }
        "nccl" | "rccl" | "gloo" | "ucx" => {
            let supported =
                "`transport = \"local\"` (threads of one process), or \"mpi\" (a process for each rank)";
            section
                .report("transport", ProblemKind::NotSupported { key: "transport", value: text, supported });
        }
        _ => section.report_unknown_word("transport", &text, ["local", "mpi"].into_iter()),
    }
    TransportChoice::Local
}

/// Refuses sizes that differ from those of the schedule's file.
///
/// A schedule from `--set` takes the place of the file's schedule together with its sizes. A schedule that cannot be read
/// is reported when the run is prepared.
fn check_file_sizes(section: &mut Section<'_>, pipeline: &PipelineSettings, replicas: u32) {
    let ScheduleChoice::Csv(file) = &pipeline.schedule else { return };
    let replaces_sizes = matches!(section.place("schedule"), Place::Set { .. });
    let binds = |section: &Section<'_>, key: &str| match section.place(key) {
        Place::File { .. } => !replaces_sizes,
        Place::Set { .. } => true,
        Place::Default => false,
    };
    let sizes = [
        ("ranks", pipeline.ranks),
        ("stages_per_rank", pipeline.stages_per_rank),
        ("microbatches", pipeline.microbatches),
    ];
    if !sizes.iter().any(|(key, _)| binds(section, key)) {
        return;
    }
    let Some(program) = read_text(file, LARGEST_SCHEDULE).ok().and_then(|text| parse_program(&text).ok())
    else {
        return;
    };
    let placement = program.placement();
    let stages_per_rank = placement.all_ranks().map(|rank| placement.stages_of(rank).len() as u64).max();
    let found = [
        u64::from(program.ranks()),
        stages_per_rank.unwrap_or(1),
        u64::from(program.microbatches()) * u64::from(replicas),
    ];
    for ((key, value), found) in sizes.into_iter().zip(found) {
        if binds(section, key) && u64::from(value) != found {
            section.report(key, ProblemKind::NotOfFile { key, value, file: file.clone(), found });
        }
    }
}

/// Generates the named schedule and the partition, to check that they exist. A schedule from a file has its own sizes,
/// and is checked when it is read.
fn check_schedule(
    section: &mut Section<'_>,
    pipeline: &mut PipelineSettings,
    layers: Option<&ModelDesc>,
    replicas: u32,
) {
    let ScheduleChoice::Named(name) = &pipeline.schedule else { return };
    if !pipeline.microbatches.is_multiple_of(replicas) {
        let kind = ProblemKind::UnevenShare { microbatches: pipeline.microbatches, replicas };
        return section.report("microbatches", kind);
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
        Err(error) => return section.report_at_first_of(culprits(&error), error.into()),
    };
    if !trains(&schedule) {
        let (key, value) = ("schedule", name.clone());
        return section.report(key, ProblemKind::NoTraining { key, value });
    }
    let stages = schedule.placement().stages();
    pipeline.stages_per_rank = stages / pipeline.ranks;
    if let Some(layers) = layers
        && let Err(error) = partition(&layers.weights(), stages, &pipeline.method())
    {
        section.report_at_first_of(&["boundaries", "ranks", "stages_per_rank"], error.into());
    }
}

/// The keys that an error of a generator is about, the most likely first.
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
        (None, PartitionChoice::Explicit) => section.report("partition", ProblemKind::NoBoundaries),
        (Some(_), PartitionChoice::Even | PartitionChoice::Weighted | PartitionChoice::Optimal) => {
            section.report("boundaries", ProblemKind::UnusedBoundaries);
        }
        (Some(_), PartitionChoice::Explicit) | (None, _) => {}
    }
}
