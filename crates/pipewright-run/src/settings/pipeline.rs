//! The `[pipeline]` section: the number of ranks, the schedule, and the partition of the model. `schedule.rs`
//! checks that the schedule exists in these sizes.

use std::fmt;
use std::path::{Path, PathBuf};

use pipewright::device::RankThreads;
use pipewright::ids::WorldRank;
use pipewright_document::{Entry, Value};
use pipewright_schedule::generate::find;
use pipewright_schedule::partition::{Layout, Method};
use pipewright_schedule::recompute::{GivenChoice, LayerPart, LayerParts, StageRecompute};
use pipewright_schedule::{ModelDesc, Recompute, StageIndex};
use pipewright_system::schedule_file::{has_ending, is_file};
use serde::{Serialize, Serializer};

use crate::settings::document::Document;
use crate::settings::generator::{self, GeneratorSettings};
use crate::settings::keys::LARGEST_COUNT;
use crate::settings::offload::{self, OffloadChoice, OffloadPlace};
use crate::settings::paths::Surroundings;
use crate::settings::section::Section;

/// The word in place of a schedule that lets `train` choose the schedule, the cut and the replicas.
pub(super) const AUTO: &str = "auto";

/// How the model is distributed over ranks, and how a step runs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PipelineSettings {
    /// The number of workers in the pipeline.
    pub ranks: u32,
    /// The number of stages on each rank.
    pub stages_per_rank: u32,
    /// The choice of the schedule, which orders the computations of each rank.
    pub schedule: ScheduleChoice,
    /// The number of microbatches per step, over all replicas.
    pub microbatches: u32,
    /// The number of rows in a microbatch.
    pub microbatch_size: u32,
    /// How layers are distributed over stages.
    pub partition: PartitionChoice,
    /// The first layer of each stage except stage 0, for an explicit partition; its first block, for one of
    /// blocks.
    pub boundaries: Option<Vec<u32>>,
    /// The cut by hand that the boundaries come from. It is not written to the effective configuration, which
    /// has the boundaries.
    #[serde(skip)]
    pub layout: Option<Layout>,
    /// The number of layers into which the output head is cut along the vocabulary.
    pub head_parts: u32,
    /// The number of layers into which the embedding is cut along the vocabulary.
    pub embedding_parts: u32,
    /// The transport of tensors between ranks.
    pub transport: TransportChoice,
    /// The numbers of threads that the ranks compute with.
    pub threads_per_rank: RankThreads,
    /// The rank of a plan's profile that each rank of the run is; empty unless it is written.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub profile_ranks: Vec<u32>,
    /// The stages that compute their forward again in their backward, as a whole or in part.
    pub recompute: Recompute,
    /// The inputs of recomputed forwards that leave memory.
    pub offload: OffloadChoice,
    /// The folder of the files to which they go; `None` for the folder of the run.
    pub offload_folder: Option<PathBuf>,
    /// The settings that only some schedules have.
    #[serde(flatten)]
    pub generator: GeneratorSettings,
}

/// A schedule by name, or from a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ScheduleChoice {
    /// A name that the schedule engine knows.
    Named(String),
    /// The absolute path of a CSV file. Ranks, stages and placement follow from it.
    Csv(PathBuf),
}

/// How layers are distributed over stages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PartitionChoice {
    /// The same number of layers for each stage.
    Even,
    /// A greedy distribution by weight.
    Weighted,
    /// The distribution whose heaviest stage is as light as possible.
    Optimal,
    /// The distribution that `boundaries` gives.
    Explicit,
    /// The distribution that the bars of the model's pattern give.
    Pattern,
    /// A greedy distribution by the number of parameters, as the reference's default.
    Parameters,
    /// The same number of blocks for each stage, or cuts at the blocks that `boundaries` gives. The embedding is
    /// on the first stage, and the head on the last one.
    Blocks,
}

/// The transport of tensors between ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum TransportChoice {
    /// Threads of one process.
    Local,
    /// One process per rank, over MPI.
    Mpi,
}

impl PartitionChoice {
    /// All choices.
    const ALL: [Self; 7] = [
        Self::Even,
        Self::Weighted,
        Self::Optimal,
        Self::Explicit,
        Self::Pattern,
        Self::Parameters,
        Self::Blocks,
    ];

    /// Returns the word in a configuration.
    pub fn name(self) -> &'static str {
        match self {
            Self::Even => "even",
            Self::Weighted => "weighted",
            Self::Optimal => "optimal",
            Self::Explicit => "explicit",
            Self::Pattern => "pattern",
            Self::Parameters => "parameters",
            Self::Blocks => "blocks",
        }
    }
}

impl Serialize for PartitionChoice {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

impl PipelineSettings {
    /// Returns whether a plan chooses the schedule.
    pub fn is_planned(&self) -> bool {
        matches!(&self.schedule, ScheduleChoice::Named(name) if name == AUTO)
    }

    /// Returns how `layers` are distributed over stages, if it does not follow from the model's pattern.
    pub fn method(&self, layers: &ModelDesc) -> Method {
        let boundaries = || self.boundaries.iter().flatten().map(|&first| first as usize).collect();
        match self.partition {
            PartitionChoice::Even => Method::Even,
            PartitionChoice::Weighted | PartitionChoice::Parameters => Method::Weighted,
            PartitionChoice::Optimal | PartitionChoice::Pattern => Method::Optimal,
            PartitionChoice::Explicit => Method::Explicit { boundaries: boundaries() },
            PartitionChoice::Blocks => Method::Blocks { blocks: layers.blocks(), boundaries: boundaries() },
        }
    }

    /// Returns the weights of the layers that are distributed over stages.
    pub fn weights(&self, layers: &ModelDesc) -> Vec<u64> {
        match self.partition {
            PartitionChoice::Parameters => layers.layers.iter().map(|layer| layer.parameters).collect(),
            _ => layers.weights(),
        }
    }

    /// Returns the rank of a plan's profile that a rank of the world is.
    pub fn profile_rank(&self, rank: WorldRank) -> usize {
        self.profile_ranks.get(rank.index()).map_or(rank.index(), |&machine| machine as usize)
    }

    /// Returns the number of rows in a step's batch.
    pub fn rows(&self) -> usize {
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

/// Reads the section.
pub(super) fn read(document: &mut Document, surroundings: &Surroundings) -> PipelineSettings {
    let partitions = PartitionChoice::ALL.map(|choice| (choice.name(), choice));
    let mut section = Section::new(document, surroundings, "pipeline");
    let mut pipeline = PipelineSettings {
        ranks: section.count("ranks"),
        stages_per_rank: section.count("stages_per_rank"),
        schedule: read_schedule(&mut section),
        microbatches: section.count("microbatches"),
        microbatch_size: section.count("microbatch_size"),
        partition: section.word("partition", &partitions),
        boundaries: section.counts("boundaries", LARGEST_COUNT),
        layout: None,
        head_parts: section.count("head_parts"),
        embedding_parts: section.count("embedding_parts"),
        transport: read_transport(&mut section),
        threads_per_rank: threads(section.one_or_several("threads_per_rank")),
        profile_ranks: read_profile_ranks(&mut section),
        recompute: read_recompute(&mut section),
        offload: offload::read(&mut section),
        offload_folder: section.path("offload_folder"),
        generator: generator::read(&mut section),
    };
    read_layout(&mut section, &mut pipeline);
    if section.is_sound() {
        check_boundaries(&mut section, &pipeline);
        if pipeline.offload_folder.is_some() && pipeline.offload.place() != Some(OffloadPlace::File) {
            let other = "files (`offload = \"file\"`)";
            section.report_without("offload_folder", other, "write that too, or remove the key");
        }
    }
    pipeline
}

fn threads(of_ranks: Vec<u32>) -> RankThreads {
    of_ranks.into_iter().map(|threads| threads as usize).collect::<Vec<_>>().into()
}

fn read_profile_ranks(section: &mut Section<'_>) -> Vec<u32> {
    let expected = "a list of different ranks, such as [0, 2]";
    let ranks = section.read("profile_ranks", expected, |value| {
        let number = |value: &Value| u32::try_from(value.as_whole()?).ok();
        let ranks: Vec<u32> = value.as_list()?.iter().map(number).collect::<Option<_>>()?;
        let is_new = |(at, rank): (usize, &u32)| !ranks[..at].contains(rank);
        ranks.iter().enumerate().all(is_new).then_some(ranks)
    });
    ranks.unwrap_or_default()
}

fn read_schedule(section: &mut Section<'_>) -> ScheduleChoice {
    let text = section.text_or_default("schedule");
    // No schedule's name has a slash.
    if has_ending(Path::new(&text)) || text.contains('/') {
        return section.path("schedule").map_or(ScheduleChoice::Named(text), ScheduleChoice::Csv);
    }
    if let Some(file) = section.path("schedule").filter(|file| text != AUTO && is_file(&text, file)) {
        return ScheduleChoice::Csv(file);
    }
    // An alias becomes the generator's own name. An unknown name is kept, and reported when the size is
    // checked. `auto` is not a schedule of the engine.
    ScheduleChoice::Named(
        find(&text).map_or_else(|_unknown| text.to_lowercase(), |known| known.name.to_owned()),
    )
}

fn read_recompute(section: &mut Section<'_>) -> Recompute {
    let words = [
        ("none", Recompute::None),
        ("stage", Recompute::Stage),
        ("block", Recompute::Block),
        ("parts", Recompute::Parts),
    ];
    let expected = "a word, or a list of whole numbers, such as [0, 2], and of tables, such as \
                    { stage = 1, layers = 3 }, { stage = 1, layers = 3, keep = 2 } or \
                    { stage = 1, parts = [\"norms\", \"feed-forward\"] }, one for a stage";
    let read = section.word_or("recompute", &words, expected, |value| {
        let entries: Vec<_> = value.as_list()?.iter().map(recomputed_stage).collect::<Option<_>>()?;
        Recompute::of_entries(entries)
    });
    read.unwrap_or(Recompute::None)
}

/// Reads an entry of the list: the number of a stage, or a table with the part of it that is recomputed.
fn recomputed_stage(item: &Value) -> Option<(StageIndex, StageRecompute)> {
    let number = |value: &Value| u32::try_from(value.as_whole()?).ok();
    let stage = |value: &Value| StageIndex::try_from(number(value)?).ok();
    let Some(table) = item.as_table() else { return Some((stage(item)?, StageRecompute::WHOLE)) };
    let mut given = GivenChoice::default();
    for (key, Entry { value, .. }) in &table.entries {
        match key.as_str() {
            "stage" => {}
            "layers" if value.as_text() == Some("all") => given.layers = Some(None),
            "layers" => given.layers = Some(Some(number(value)?)),
            "keep" => given.keep = Some(number(value)?),
            "parts" => given.parts = Some(recomputed_parts(value.as_list()?)?),
            _ => return None,
        }
    }
    Some((stage(table.get("stage")?)?, given.choice()?))
}

/// Reads the names of parts of layers.
fn recomputed_parts(names: &[Value]) -> Option<LayerParts> {
    names.iter().map(|name| LayerPart::of_name(name.as_text()?)).collect()
}

fn read_transport(section: &mut Section<'_>) -> TransportChoice {
    let text = section.text_or_default("transport");
    match text.as_str() {
        "local" => {}
        "mpi" if cfg!(feature = "mpi") => return TransportChoice::Mpi,
        "mpi" => {
            let sentence = "`transport` is \"mpi\", which is not compiled into this binary";
            let help = "build with `cargo build --release --features mpi`, or write `transport = \"local\"`";
            section.report("transport", sentence, help);
        }
        "nccl" | "rccl" | "gloo" | "ucx" => {
            let sentence =
                format!("`transport` is \"{text}\", which this version of Pipewright does not support");
            let help = "write `transport = \"local\"` (threads of one process), or \"mpi\" (a process for each rank)";
            section.report("transport", sentence, help);
        }
        _ => section.unknown_word("transport", &text, ["local", "mpi"]),
    }
    TransportChoice::Local
}

/// Reads the cut by hand, which determines the partition and its boundaries.
fn read_layout(section: &mut Section<'_>, pipeline: &mut PipelineSettings) {
    let Some(text) = section.text("layout") else { return };
    if let Some(&other) = ["partition", "boundaries"].iter().find(|key| section.is_written(key)) {
        section.report_twice("layout", other, "the cut");
        return;
    }
    match Layout::with_parts(&text, pipeline.embedding_parts, pipeline.head_parts) {
        Ok(layout) => {
            pipeline.partition = PartitionChoice::Explicit;
            pipeline.boundaries = Some(layout.boundaries.iter().map(|&layer| layer as u32).collect());
            pipeline.layout = Some(layout);
        }
        Err(error) => section.report_error("layout", error),
    }
}

/// Refuses boundaries that the partition does not take, and an explicit partition without boundaries.
fn check_boundaries(section: &mut Section<'_>, pipeline: &PipelineSettings) {
    match (&pipeline.boundaries, pipeline.partition) {
        (None, PartitionChoice::Explicit) => {
            let sentence = "`partition` is \"explicit\", and there are no `boundaries`";
            let help = "name each later stage's first layer, such as `boundaries = [4]`";
            section.report("partition", sentence, help);
        }
        (Some(_), PartitionChoice::Explicit | PartitionChoice::Blocks) | (None, _) => {}
        (Some(_), _) => {
            let sentence = "`boundaries` are given, and `partition` is not \"explicit\" or \"blocks\"";
            let help = "write `partition = \"explicit\"` to count layers or \"blocks\" to count blocks, or remove \
                        `boundaries`";
            section.report("boundaries", sentence, help);
        }
    }
}
