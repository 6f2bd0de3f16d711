//! The reasons why a layout does not fit itself or its model.

use pipewright_schedule::divisor::greatest_common_divisor;
use pipewright_schedule::words::counted;
use thiserror::Error;

use crate::size_names::{BATCH, CHUNKS, EXPERT_TENSOR, GivenSizes, MESH, Names, PIPELINE, Size, TENSOR};

/// The reason why a layout does not fit itself or its model, and the advice.
#[derive(Clone, PartialEq, Eq, Error)]
#[error("{reason}; {advice}")]
pub struct LayoutError {
    /// The reason.
    pub reason: String,
    /// The advice.
    pub advice: String,
}

pipewright_schedule::message_as_debug!(LayoutError);

/// A mistake of a layout. The search finds thousands of them, so the sentence is made when it is needed.
pub(crate) enum Fault {
    Zero(Size),
    /// The GPUs are not a multiple of the mesh.
    Mesh {
        gpus: u32,
        of: u64,
    },
    /// The rows of a step are not a multiple of the rows that all replicas compute at once.
    Batch {
        batch: u32,
        of: u32,
        data: u32,
    },
    /// There are fewer blocks than stages, with the embedding and the head as a block each.
    Stages {
        blocks: usize,
        stages: u32,
    },
    /// The given numbers of blocks do not fit the model or the stages.
    Cut {
        cut_stages: usize,
        cut_blocks: u64,
        stages: u32,
        blocks: usize,
    },
    /// The blocks that predict further tokens are in a stage that does not exist.
    Predictors {
        stage: u32,
        stages: u32,
    },
    /// The ranks that divide each expert are neither 1 nor a tensor group.
    ExpertTensor {
        expert_tensor: u32,
        tensor: u32,
    },
    /// A tensor group divides layers whose adapters have dropout.
    Dropout(u32),
    /// A part of the model does not divide among the ranks of a group. `what` is one of the parts.
    Division {
        what: &'static str,
        count: u64,
        group: Size,
        ranks: u32,
    },
}

impl Fault {
    /// Returns the size that is wrong, if it is one.
    pub(crate) fn size(&self) -> Option<Size> {
        match self {
            Self::Zero(size) | Self::Division { group: size, .. } => Some(*size),
            Self::Mesh { .. } => None,
            Self::Batch { .. } => Some(BATCH),
            Self::Stages { .. } | Self::Cut { .. } | Self::Predictors { .. } => Some(PIPELINE),
            Self::ExpertTensor { .. } => Some(EXPERT_TENSOR),
            Self::Dropout(_) => Some(TENSOR),
        }
    }

    /// Says what is wrong, with the names of the sizes that are given.
    pub(crate) fn error(self, given: &GivenSizes) -> LayoutError {
        let names = given.names;
        let (reason, advice) = match self {
            Self::Zero(size) => (format!("`{}` is 0", names.name(size)), "use at least 1".to_owned()),
            Self::Mesh { gpus, of } => return mesh(gpus, of, given),
            Self::Batch { batch, of, data } => return rows(batch, of, data, names),
            Self::Stages { blocks, stages } => (
                format!(
                    "{} ({}) are more than the {} of the model, its embedding and its head",
                    counted(stages, "stage"),
                    given.list(&[PIPELINE, CHUNKS]),
                    counted(blocks, "block")
                ),
                "use fewer stages".to_owned(),
            ),
            Self::Cut { cut_stages, cut_blocks, stages, blocks } => (
                format!(
                    "the cut has {} with {}, but {} times {} is {stages}, and the model has {}",
                    counted(cut_stages, "stage"),
                    counted(cut_blocks, "block"),
                    names.name(PIPELINE),
                    names.name(CHUNKS),
                    counted(blocks, "block")
                ),
                "give one number for each stage, with this sum".to_owned(),
            ),
            Self::Predictors { stage, stages } => (
                format!(
                    "the blocks that predict further tokens are in stage {stage}, and the pipeline has {}",
                    counted(stages, "stage")
                ),
                format!("use a stage from 0 to {}", stages.saturating_sub(1)),
            ),
            Self::ExpertTensor { expert_tensor, tensor } => (
                format!("each expert is divided among {}", counted(expert_tensor, "rank")),
                format!("use 1, or the size of a tensor group, which is {tensor}"),
            ),
            Self::Dropout(tensor) => (
                format!(
                    "{}: `adapter.dropout` needs layers that one rank computes",
                    names.with_value(TENSOR, tensor)
                ),
                format!("leave {} out, or set `adapter.dropout` to 0", names.name(TENSOR)),
            ),
            Self::Division { what, count, group, ranks } => (
                format!(
                    "{} cannot be divided among the ranks of {}",
                    counted(count, what),
                    names.with_value(group, ranks)
                ),
                format!("use a number that divides {count}"),
            ),
        };
        LayoutError { reason, advice }
    }
}

/// Says that the mesh does not divide the GPUs, with the next number that it divides.
fn mesh(gpus: u32, of: u64, given: &GivenSizes) -> LayoutError {
    let near = given.unit().and_then(|(size, unit)| {
        let unit = u64::from(unit);
        let step = (of / greatest_common_divisor(of, unit).max(1)).checked_mul(unit)?;
        let near = next_multiple(gpus, step)?;
        Some(format!("use {}, or ", given.names.with_value(size, near / unit)))
    });
    LayoutError {
        reason: format!(
            "{} cannot be divided into a mesh of {of} ({})",
            counted(gpus, "GPU"),
            given.list(&MESH)
        ),
        advice: near.unwrap_or_default() + "use another mesh",
    }
}

/// Says that the replicas do not divide the rows, with the next number that they divide.
fn rows(batch: u32, of: u32, data: u32, names: Names) -> LayoutError {
    let near = next_multiple(batch, of.into()).map(|near| match names {
        Names::Options { batch_tokens: Some(tokens), .. } => {
            format!("use --batch-tokens {}, or ", tokens / u64::from(batch) * near)
        }
        _ => format!("use {}, or ", names.with_value(BATCH, near)),
    });
    let (among, other) = match data {
        0 | 1 => (String::new(), "microbatch size"),
        _ => (format!(" on each of {data} replicas"), "mesh"),
    };
    LayoutError {
        reason: format!(
            "{} of a step cannot be divided into microbatches of {}{among}",
            counted(batch, "row"),
            counted(of / data.max(1), "row"),
        ),
        advice: format!("{}use another {other}", near.unwrap_or_default()),
    }
}

/// Returns the smallest multiple of `of` that is not below `value`, if it is a possible size.
fn next_multiple(value: u32, of: u64) -> Option<u64> {
    u64::from(value).checked_next_multiple_of(of).filter(|&near| near <= u64::from(u32::MAX))
}
