//! Why a batch cannot be split or joined.

use crate::tensor::ValueKind;

/// Why a batch cannot be split, or outputs cannot be joined.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SplitError {
    /// There is nothing to split.
    #[error("the batch holds no tensor")]
    Empty,
    /// Tensors of one batch disagree about its rows.
    #[error(
        "tensor {tensor} has {rows} rows, tensor 0 has {expected}: all tensors of a batch have the same rows"
    )]
    RowsDiffer {
        /// Its place in the batch.
        tensor: usize,
        /// Its rows.
        rows: usize,
        /// Rows of tensor 0.
        expected: usize,
    },
    /// The rows do not make equal microbatches.
    #[error(
        "{rows} rows do not divide into {microbatches} microbatches: give a multiple of {microbatches} rows, or \
         another number of microbatches"
    )]
    NotDivisible {
        /// Rows of the batch.
        rows: usize,
        /// Microbatches asked for.
        microbatches: u32,
    },
    /// Runs of equal size, the last one short, would be fewer than the microbatches.
    #[error(
        "{rows} rows make runs of {size}, and with them fewer than {microbatches} microbatches: give more rows or fewer \
         microbatches"
    )]
    TooFewRows {
        /// Rows of the batch.
        rows: usize,
        /// Microbatches asked for.
        microbatches: u32,
        /// Rows of a microbatch.
        size: usize,
    },
    /// Another number of specs than of tensors.
    #[error("{specs} spec(s) for {tensors} tensor(s): give one for each, in the nesting of the tensors")]
    Specs {
        /// Specs given.
        specs: usize,
        /// Tensors there are.
        tensors: usize,
    },
    /// A spec names a dimension that its tensor has not.
    #[error("tensor {tensor} of shape {shape:?} has no dimension {dimension} to split or join along")]
    NoDimension {
        /// The tensor's place.
        tensor: usize,
        /// The dimension.
        dimension: usize,
        /// The tensor's shape.
        shape: Vec<usize>,
    },
    /// A mean of tensors that are not floats.
    #[error(
        "output {tensor} is {kind}: only floats have a mean; keep the list of microbatches, or join them"
    )]
    NoMean {
        /// Place of the output.
        tensor: usize,
        /// Its kind.
        kind: ValueKind,
    },
    /// Microbatches with different numbers of tensors.
    #[error("microbatch {microbatch} holds {found} tensors, microbatch 0 holds {expected}")]
    TensorsDiffer {
        /// Its place.
        microbatch: usize,
        /// Its tensors.
        found: usize,
        /// Tensors of microbatch 0.
        expected: usize,
    },
    /// Tensors that join must agree in rank, in element type and in all but the dimension along which they join.
    #[error(
        "output {tensor} of microbatch {microbatch} is {found:?}, that of microbatch 0 is {expected:?}: they differ in \
         more than the dimension along which they join"
    )]
    Unjoinable {
        /// Place of the output.
        tensor: usize,
        /// Place of the microbatch.
        microbatch: usize,
        /// Its shape.
        found: Vec<usize>,
        /// Shape in microbatch 0.
        expected: Vec<usize>,
    },
}
