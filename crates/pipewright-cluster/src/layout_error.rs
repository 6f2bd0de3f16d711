//! The errors of a layout.

use pipewright_schedule::words::counted;
use thiserror::Error;

/// The errors of a layout.
#[derive(Clone, PartialEq, Eq, Error)]
pub enum LayoutError {
    /// A size is 0.
    #[error("`{name}` is 0; use at least 1")]
    Zero {
        /// The size.
        name: &'static str,
    },
    /// The GPUs are not a multiple of the mesh.
    #[error(
        "{} cannot be divided into groups of {of}, the product of tp = {tensor}, pp = {pipeline} and cp = {context}; use {}, or another mesh",
        counted(*.gpus, "GPU"), counted(near_multiple(*.gpus, *.of), "GPU")
    )]
    Mesh {
        /// The GPUs.
        gpus: u32,
        /// The GPUs of a replica.
        of: u32,
        /// The ranks of a tensor group.
        tensor: u32,
        /// The ranks of a pipeline.
        pipeline: u32,
        /// The ranks of a sequence.
        context: u32,
    },
    /// The rows of a step are not a multiple of the rows that all replicas compute at once.
    #[error(
        "{} of a step cannot be divided into groups of {of}, the rows of a microbatch on {}; use {}",
        counted(*.batch, "row"), counted(*.data, "replica"), counted(near_multiple(*.batch, *.of), "row")
    )]
    Batch {
        /// The rows of a step.
        batch: u32,
        /// The rows of all replicas.
        of: u32,
        /// The replicas.
        data: u32,
    },
    /// There are fewer blocks than stages, with the embedding and the head as a block each.
    #[error(
        "{} of pp x vp cannot share {}, the embedding and the head; use fewer stages",
        counted(*.stages, "stage"), counted(*.blocks as u64, "block")
    )]
    Stages {
        /// The blocks of the model.
        blocks: usize,
        /// The stages.
        stages: u32,
    },
    /// The given numbers of blocks do not fit the model or the stages.
    #[error(
        "the cut has {} with {}, but pp x vp is {stages}, and the model has {}; give one number for each stage, with this sum",
        counted(*.cut_stages as u64, "stage"), counted(*.cut_blocks, "block"), counted(*.blocks as u64, "block")
    )]
    Cut {
        /// The stages of the cut.
        cut_stages: usize,
        /// Their blocks.
        cut_blocks: u64,
        /// The stages of the pipeline.
        stages: u32,
        /// The blocks of the model.
        blocks: usize,
    },
    /// The ranks that divide each expert are neither 1 nor a tensor group.
    #[error(
        "each expert is divided among {}; use 1, or the size of a tensor group, which is {tensor}",
        counted(*.expert_tensor, "rank")
    )]
    ExpertTensor {
        /// The ranks that divide each expert.
        expert_tensor: u32,
        /// The ranks of a tensor group.
        tensor: u32,
    },
    /// A tensor group divides layers whose adapters have dropout.
    #[error(
        "adapters with dropout need layers that one rank computes, and tp = {tensor} ranks divide each; use tp = 1"
    )]
    Dropout {
        /// The ranks of a tensor group.
        tensor: u32,
    },
    /// A part of the model does not divide among ranks.
    #[error(
        "{} cannot be divided among {ranks} {group} ranks; use a number of ranks that divides {count}",
        counted(*.count, what)
    )]
    Division {
        /// One of the parts.
        what: &'static str,
        /// Their number.
        count: u64,
        /// The ranks.
        ranks: u32,
        /// The kind of group.
        group: &'static str,
    },
}

pipewright_schedule::message_as_debug!(LayoutError);

/// Returns the smallest multiple that is not below `value`, or the one before it if this one is too large.
fn near_multiple(value: u32, of: u32) -> u32 {
    let before = || value - value.checked_rem(of).unwrap_or(0);
    value.checked_next_multiple_of(of).unwrap_or_else(before)
}
