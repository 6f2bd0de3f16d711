//! The names of sizes in messages: the keys of files, or the options of the command line.

use std::fmt::Display;

use pipewright_schedule::plan::System;

/// A size with its names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Size {
    /// The key in files.
    key: &'static str,
    /// The option of the command line.
    option: &'static str,
    /// The names in other systems: an option, a key, or words if it follows from others.
    names: BySystem<&'static str>,
}

/// A value for each system: Megatron, torchtitan and DeepSpeed.
pub(crate) type BySystem<T> = [T; 3];

/// Returns the value for a system.
pub(crate) fn of_system<T: Copy>([megatron, torchtitan, deepspeed]: BySystem<T>, system: System) -> T {
    match system {
        System::Megatron => megatron,
        System::Torchtitan => torchtitan,
        System::Deepspeed => deepspeed,
    }
}

/// Returns a size that no other system has.
const fn own(key: &'static str, option: &'static str) -> Size {
    Size { key, option, names: [option; 3] }
}

const fn size(key: &'static str, option: &'static str, names: BySystem<&'static str>) -> Size {
    Size { key, option, names }
}

pub(crate) const NODES: Size = own("nodes", "--nodes");
pub(crate) const GPUS: Size = own("gpus", "--ranks");
pub(crate) const BATCH: Size = size(
    "gbs",
    "--global-batch",
    ["--global-batch-size", "--training.global_batch_size", "train_batch_size"],
);
pub(crate) const SEQUENCE: Size =
    size("seq", "--seq-len", ["--seq-length", "--training.seq_len", "--seq-len"]);
pub(crate) const TENSOR: Size = size(
    "tp",
    "--tensor-parallel",
    ["--tensor-model-parallel-size", "--parallelism.tensor_parallel_degree", "tensor parallel"],
);
pub(crate) const PIPELINE: Size = size(
    "pp",
    "--pipeline-parallel",
    ["--pipeline-model-parallel-size", "--parallelism.pipeline_parallel_degree", "pipeline.stages"],
);
pub(crate) const DATA: Size = own("dp", "--data-parallel");
pub(crate) const CONTEXT: Size = size(
    "cp",
    "--context-parallel",
    ["--context-parallel-size", "--parallelism.context_parallel_degree", "context parallel"],
);
pub(crate) const EXPERT: Size = size(
    "ep",
    "--expert-parallel",
    ["--expert-model-parallel-size", "--parallelism.expert_parallel_degree", "expert parallel"],
);
pub(crate) const EXPERT_TENSOR: Size = size(
    "etp",
    "--expert-tensor-parallel",
    ["--expert-tensor-parallel-size", "ranks of each expert", "ranks of each expert"],
);
pub(crate) const CHUNKS: Size = size(
    "vp",
    "--stages-per-rank",
    ["--num-virtual-stages-per-pipeline-rank", "stages per rank", "stages per rank"],
);
pub(crate) const MICROBATCH: Size = size(
    "mbs",
    "--microbatch-size",
    ["--micro-batch-size", "rows of a microbatch", "train_micro_batch_size_per_gpu"],
);
pub(crate) const SHARDS: Size = own("shards", "--shards");
pub(crate) const SCHEDULE: Size = own("schedule", "--schedule");
/// Files give the rows of a pass, and only files have passes and documents.
pub(crate) const PASS: Size = own("pass_rows", "pass_rows");
pub(crate) const DOCUMENT: Size = own("document_tokens", "document_tokens");
pub(crate) const MEMORY: Size = own("memory", "--memory");

/// The sizes whose product is the number of GPUs.
pub(crate) const MESH: [Size; 4] = [TENSOR, PIPELINE, DATA, CONTEXT];

/// How messages name the sizes of a layout.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Names {
    /// By the keys of files of published runs, such as `tp = 8`.
    #[default]
    Keys,
    /// By the options of `pipewright plan --cluster`, such as `--tensor-parallel 8`.
    Options {
        /// Whether the GPUs are given as nodes.
        in_nodes: bool,
        /// The tokens of a step, if they are given instead of its rows.
        batch_tokens: Option<u64>,
    },
    /// By the options of another system, such as `--tensor-model-parallel-size 8`.
    Of(System),
}

impl Names {
    /// Returns the name of a size.
    pub(crate) fn name(self, size: Size) -> &'static str {
        match self {
            Self::Keys => size.key,
            Self::Options { .. } => size.option,
            Self::Of(system) => of_system(size.names, system),
        }
    }

    /// Returns a size with its value, as it is written.
    pub(crate) fn with_value(self, size: Size, value: impl Display) -> String {
        match self {
            Self::Keys => format!("{} = {value}", size.key),
            Self::Options { .. } | Self::Of(_) => format!("{} {value}", self.name(size)),
        }
    }
}

/// The sizes that are given, for messages.
#[derive(Debug, Clone)]
pub(crate) struct GivenSizes {
    pub(crate) names: Names,
    pub(crate) sizes: Vec<(Size, u32)>,
    pub(crate) gpus_per_node: u32,
    /// Whether the GPUs are of several kinds.
    pub(crate) is_mixed: bool,
}

impl GivenSizes {
    /// Returns the given sizes that are in `which`, with their values.
    pub(crate) fn list(&self, which: &[Size]) -> String {
        let given = self.sizes.iter().filter(|(size, _)| which.contains(size));
        given.map(|&(size, value)| self.names.with_value(size, value)).collect::<Vec<_>>().join(", ")
    }

    /// Returns all given sizes after " with", and what else the advice is to change.
    pub(crate) fn with_all(&self) -> (String, &'static str) {
        if self.sizes.is_empty() {
            return (String::new(), "");
        }
        let all: Vec<Size> = self.sizes.iter().map(|(size, _)| *size).collect();
        (format!(" with {}", self.list(&all)), ", or a given part of the plan")
    }

    /// Returns the size by which the GPUs are given, with its GPUs; `None` if they are of several kinds.
    pub(crate) fn unit(&self) -> Option<(Size, u32)> {
        match self.names {
            _ if self.is_mixed => None,
            Names::Options { in_nodes: true, .. } => Some((NODES, self.gpus_per_node.max(1))),
            Names::Options { .. } | Names::Keys | Names::Of(_) => Some((GPUS, 1)),
        }
    }
}
