//! The `[mesh]` section: the number of replicas of the pipeline, and the number of ranks that compute each
//! stage together. The replicas train together, each on its share of the batch.

use std::num::NonZeroU32;

use pipewright::mesh::{DataParallelMode, Mesh, least_rows_of_shares, rows_of_shares};
use pipewright::nn::{ExpertParallel, TensorParallel};
use pipewright::tensor::{ExpertRank, TensorRank};
use pipewright_models::training_memory::TensorShare;
use pipewright_schedule::divisor::greatest_common_divisor;
use pipewright_schedule::lower::{ReduceWait, TrainingLowering, UnshardConfig, UnshardLookahead};
use serde::Serialize;
use toml::{Table, Value};

use crate::settings::document::Document;
use crate::settings::keys::LARGEST_COUNT;
use crate::settings::paths::Surroundings;
use crate::settings::section::Section;

/// The key of the replicas.
const REPLICAS: &str = "data_parallel";
/// The key that says what each replica holds.
const MODE: &str = "data_parallel_mode";
/// The key of the replicas' shares of the batch.
pub(super) const BATCH_SHARES: &str = "batch_shares";
/// The key of the replicas that hold the experts together.
pub(super) const EXPERTS: &str = "expert_parallel";
/// The key that says whether tensor ranks hold whole experts.
const WHOLE_EXPERTS: &str = "whole_experts";
/// The key of the stages that are fetched ahead.
pub(super) const LOOKAHEAD: &str = "unshard_lookahead";

/// The replicas of the pipeline, and the ranks that compute each stage together.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(into = "Written")]
pub struct MeshSettings {
    /// The number of replicas of the pipeline.
    pub data_parallel: u32,
    /// The share of each replica in the rows of each step; empty if they are equal.
    pub batch_shares: Vec<u32>,
    /// The number of ranks that compute each stage together, each with its shards of the parameters.
    pub tensor_parallel: u32,
    /// Whether each of these ranks holds whole experts of a mixture, instead of shards of all.
    pub whole_experts: bool,
    /// Whether each of these ranks has a share of the tokens between the layers that the ranks compute together.
    pub sequence_parallel: bool,
    /// The number of replicas that hold the experts of each mixture together; 1 if each holds all.
    pub expert_parallel: u32,
    /// Whether each replica holds all parameters or only its part.
    pub data_parallel_mode: DataParallelMode,
    /// The number of stages of a rank whose parameters are gathered at the same time, if they are sharded.
    pub unshard_window: u32,
    /// The number of a rank's next stages whose parameters are fetched ahead, if they are sharded.
    pub unshard_lookahead: UnshardLookahead,
    /// Whether the stages of a rank keep their gathered parameters between the batches of a step.
    pub keep_gathered: bool,
    /// The place at which a rank waits for the sum of a stage's gradients over the replicas.
    pub reduce_wait: ReduceWait,
}

impl MeshSettings {
    /// Returns the mesh of a pipeline of this many ranks.
    pub fn mesh(&self, pipeline: u32) -> Mesh {
        let Self { data_parallel: data, tensor_parallel: tensor, expert_parallel: experts, .. } = *self;
        Mesh { pipeline, data, shards: self.shards(), experts, tensor, ..Mesh::default() }
    }

    /// Returns the number of ranks of all replicas of a pipeline of this many ranks; the largest number if
    /// there are more.
    pub fn ranks(&self, pipeline: u32) -> u32 {
        self.mesh(pipeline).ranks().unwrap_or(u32::MAX)
    }

    /// Returns the first of the ranks that compute a stage together, which has the most parameters, in the
    /// first replica.
    pub fn first_tensor_rank(&self) -> TensorParallel {
        let rank = TensorRank { index: 0, of: self.tensor_parallel };
        let experts = ExpertParallel::unconnected(ExpertRank { index: 0, of: self.expert_parallel });
        TensorParallel::unconnected(rank)
            .with_whole_experts(self.whole_experts)
            .with_sequence_parallel(self.sequence_parallel)
            .with_expert_parallel(experts)
    }

    /// Returns the ranks that compute each stage together, for the memory of one of them.
    pub fn tensor_share(&self) -> TensorShare {
        TensorShare {
            ranks: self.tensor_parallel,
            shares_tokens: self.sequence_parallel && self.tensor_parallel > 1,
        }
    }

    /// Returns the number of replicas that hold the parameters together; 1 if each holds all.
    pub fn shards(&self) -> u32 {
        self.data_parallel_mode.shards(self.data_parallel)
    }

    /// Returns the number of ranks that store the state of a pipeline of this many ranks. They are in the
    /// replicas that hold all parameters together.
    pub fn writers(&self, pipeline: u32) -> u32 {
        pipeline * self.shards().max(self.expert_parallel) * self.tensor_parallel
    }

    /// Returns the rows of a microbatch of each replica, if `mean` is their mean; `None` if one would not be a whole
    /// number from 1.
    pub fn microbatch_rows(&self, mean: u32) -> Option<Vec<u32>> {
        if self.batch_shares.is_empty() {
            return Some(vec![mean; self.data_parallel as usize]);
        }
        rows_of_shares(u64::from(mean) * u64::from(self.data_parallel), &self.batch_shares)
    }

    /// Returns the rows of a microbatch of the replica that has the most, if `mean` is the mean of all replicas.
    pub fn largest_microbatch(&self, mean: u32) -> u32 {
        self.microbatch_rows(mean).and_then(|rows| rows.into_iter().max()).unwrap_or(mean)
    }

    /// Returns the step of the mean rows of a microbatch: each replica has whole rows if the mean is a multiple of it.
    pub fn microbatch_step(&self) -> u64 {
        let step = least_rows_of_shares(&self.batch_shares);
        step / greatest_common_divisor(step, self.data_parallel.into())
    }

    /// Returns how a schedule is lowered for training on this mesh.
    pub fn lowering(&self) -> TrainingLowering {
        let lowering = TrainingLowering {
            replicas: self.data_parallel,
            unshard_window: self.unshard().map(|config| config.window),
            unshard_lookahead: self.unshard_lookahead.clone(),
            reduce_wait: self.reduce_wait,
            ..TrainingLowering::default()
        };
        lowering.with_exchanges(self.expert_parallel > 1)
    }

    /// Returns how parameters are gathered; `None` if each replica holds all.
    pub fn unshard(&self) -> Option<UnshardConfig> {
        let window = NonZeroU32::new(self.unshard_window).filter(|_| self.is_sharded())?;
        Some(UnshardConfig { window, lookahead: self.unshard_lookahead.clone(), frozen: false })
    }

    /// Returns the largest number of stages of a rank whose parameters are gathered at the same time, if they are
    /// sharded.
    pub fn gathered_stages(&self) -> u32 {
        if self.keep_gathered { u32::MAX } else { self.unshard_window }
    }

    /// Returns whether each replica holds only a part of the parameters.
    pub fn is_sharded(&self) -> bool {
        self.shards() > 1
    }

    /// Returns the mesh with another number of replicas, in groups of the same size if they form such groups.
    /// Otherwise as many replicas hold the experts together as both numbers and [`Mesh::expert_groups`]
    /// allow. The replicas have equal shares of the batch if their number changes.
    pub fn of_replicas(self, replicas: u32) -> Self {
        let data_parallel_mode = match self.data_parallel_mode {
            mode @ DataParallelMode::Hybrid { shards } if mode.shards_that_divide(replicas) != shards => {
                DataParallelMode::Sharded
            }
            mode => mode,
        };
        let common = greatest_common_divisor(replicas.into(), self.expert_parallel.into()) as u32;
        // The largest power of two that divides it; groups of other sizes would add in another order.
        let power = common & common.wrapping_neg();
        let expert_parallel = if common == replicas { common } else { power };
        let batch_shares = if replicas == self.data_parallel { self.batch_shares } else { Vec::new() };
        Self { data_parallel: replicas, batch_shares, data_parallel_mode, expert_parallel, ..self }
    }

    /// Returns the value of `data_parallel` for another number of replicas: in groups of the same size, if
    /// the replicas form such groups.
    pub fn with_replicas(&self, replicas: u32) -> Value {
        match self.clone().of_replicas(replicas).data_parallel_mode {
            DataParallelMode::Hybrid { shards } => Value::from(vec![replicas / shards, shards]),
            _ => Value::from(replicas),
        }
    }
}

/// The section as it is written.
#[derive(Serialize)]
struct Written {
    /// The number of replicas, or the number of groups and the replicas of each that share the parameters.
    data_parallel: Value,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    batch_shares: Vec<u32>,
    tensor_parallel: u32,
    whole_experts: bool,
    sequence_parallel: bool,
    expert_parallel: u32,
    data_parallel_mode: &'static str,
    unshard_window: u32,
    /// A word, a number, or a list of numbers.
    unshard_lookahead: Value,
    keep_gathered: bool,
    reduce_wait: &'static str,
}

impl From<MeshSettings> for Written {
    fn from(settings: MeshSettings) -> Self {
        Self {
            data_parallel: settings.with_replicas(settings.data_parallel),
            batch_shares: settings.batch_shares,
            tensor_parallel: settings.tensor_parallel,
            whole_experts: settings.whole_experts,
            sequence_parallel: settings.sequence_parallel,
            expert_parallel: settings.expert_parallel,
            data_parallel_mode: word(settings.data_parallel_mode),
            unshard_window: settings.unshard_window,
            unshard_lookahead: match &settings.unshard_lookahead {
                UnshardLookahead::PerRank(stages) => {
                    Value::from(stages.iter().map(|stages| stages.get()).collect::<Vec<_>>())
                }
                UnshardLookahead::Stages(stages) => Value::from(stages.get()),
                word => Value::from(word.to_string()),
            },
            keep_gathered: settings.keep_gathered,
            reduce_wait: settings.reduce_wait.name(),
        }
    }
}

/// Returns the word for what each replica holds.
fn word(mode: DataParallelMode) -> &'static str {
    match mode {
        DataParallelMode::Replicated => "replicated",
        DataParallelMode::Sharded | DataParallelMode::Hybrid { .. } => "sharded",
    }
}

/// Reads the section.
pub(super) fn read(document: &mut Document, surroundings: &Surroundings) -> MeshSettings {
    let mut section = Section::new(document, surroundings, "mesh");
    let (data_parallel, data_parallel_mode) = replicas(&mut section);
    let (whole_experts, expert_parallel) = experts(&mut section);
    MeshSettings {
        data_parallel,
        batch_shares: section.counts(BATCH_SHARES, LARGEST_COUNT).unwrap_or_default(),
        tensor_parallel: section.count("tensor_parallel"),
        whole_experts,
        sequence_parallel: section.flag("sequence_parallel"),
        expert_parallel,
        data_parallel_mode,
        unshard_window: section.count("unshard_window"),
        unshard_lookahead: lookahead(&mut section),
        keep_gathered: section.flag("keep_gathered"),
        reduce_wait: section.word("reduce_wait", &ReduceWait::ALL.map(|wait| (wait.name(), wait))),
    }
}

/// Reads whether tensor ranks hold whole experts, and the number of replicas that hold the experts together.
/// In the folders of older runs, the key of the second is a flag that says the first.
fn experts(section: &mut Section<'_>) -> (bool, u32) {
    match section.value(EXPERTS).and_then(pipewright_document::Value::as_flag) {
        Some(former) => (section.given_flag(WHOLE_EXPERTS).unwrap_or(former), 1),
        None => (section.flag(WHOLE_EXPERTS), section.count(EXPERTS)),
    }
}

/// Returns whether tensor ranks hold whole experts, according to the section `mesh` of a run's folder.
pub(crate) fn whole_experts_of_run(mesh: &Table) -> bool {
    let written = mesh.get(WHOLE_EXPERTS).and_then(Value::as_bool);
    written.or_else(|| mesh.get(EXPERTS)?.as_bool()).unwrap_or(false)
}

/// Reads the lookahead: a word, a number, or a list with a number for each rank.
fn lookahead(section: &mut Section<'_>) -> UnshardLookahead {
    const EXPECTED: &str =
        "\"full\", \"auto\", a number of stages from 1, or a list with one for each rank, such as [1, 2]";
    let Some(value) = section.value(LOOKAHEAD) else { return UnshardLookahead::default() };
    let text = match value.to_toml() {
        Value::String(text) => text,
        Value::Array(items) => items.iter().map(ToString::to_string).collect::<Vec<_>>().join("/"),
        other => other.to_string(),
    };
    text.parse().unwrap_or_else(|_| {
        section.wrong_type::<()>(LOOKAHEAD, EXPECTED);
        UnshardLookahead::default()
    })
}

/// Reads the number of replicas and what each of them holds. A list says both.
fn replicas(section: &mut Section<'_>) -> (u32, DataParallelMode) {
    const MODES: [(&str, DataParallelMode); 2] =
        [("replicated", DataParallelMode::Replicated), ("sharded", DataParallelMode::Sharded)];
    let mode = section.word(MODE, &MODES);
    match section.value(REPLICAS) {
        Some(value) if value.as_list().is_some() => {
            groups(section, mode, &value.shown()).unwrap_or((1, mode))
        }
        Some(value) if value.as_whole().is_none() => {
            let none = section.wrong_type(REPLICAS, "a whole number or a list of two, such as [2, 4]");
            none.unwrap_or((1, mode))
        }
        _ => (section.count(REPLICAS), mode),
    }
}

/// Reads the number of groups, and the number of replicas of each that share the parameters. Returns the
/// number of all replicas and what each of them holds, unless there is a problem.
fn groups(
    section: &mut Section<'_>,
    mode: DataParallelMode,
    written: &str,
) -> Option<(u32, DataParallelMode)> {
    let counts = section.counts(REPLICAS, LARGEST_COUNT)?;
    let [groups, shards] = counts[..] else {
        let range =
            "two numbers, such as [2, 4] (2 groups of 4 replicas that share the parameters), or one number";
        return section.out_of_range(REPLICAS, written, range);
    };
    let Some(replicas) = groups.checked_mul(shards).filter(|replicas| *replicas <= LARGEST_COUNT) else {
        let range = format!("two numbers with a product of at most {LARGEST_COUNT}");
        return section.out_of_range(REPLICAS, written, &range);
    };
    let found = match (groups, shards) {
        (_, 1) => DataParallelMode::Replicated,
        (1, _) => DataParallelMode::Sharded,
        _ => DataParallelMode::Hybrid { shards },
    };
    // A mode that is not one of the words has been reported.
    let is_read = section.value(MODE).is_some_and(|written| written.as_text() == Some(word(mode)));
    if is_read && word(mode) != word(found) {
        let (mode, meant) = (word(mode), word(found));
        let sentence =
            format!("`{MODE}` is \"{mode}\", and with `{REPLICAS} = {written}` the parameters are {meant}");
        let help = format!(
            "write `{MODE} = \"{meant}\"` or leave it out, or write `{REPLICAS} = {replicas}` for {mode} parameters"
        );
        section.report(MODE, sentence, help);
        return None;
    }
    Some((replicas, found))
}
