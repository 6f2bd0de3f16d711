//! Why a batch cannot be split or joined.

use pipewright_schedule::words::counted;

use crate::tensor::ValueKind;

/// Why a batch cannot be split, or outputs cannot be joined.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
pub enum SplitError {
    /// There is nothing to split.
    #[error("the batch holds no tensor")]
    Empty,
    /// The tensors of a batch have different numbers of rows.
    #[error(
        "tensor {tensor} has {}, tensor 0 has {expected}: all tensors of a batch have the same rows",
        counted(*.rows, "row")
    )]
    RowsDiffer {
        /// Its index in the batch.
        tensor: usize,
        /// Its rows.
        rows: usize,
        /// Rows of tensor 0.
        expected: usize,
    },
    /// The rows do not divide into equal microbatches.
    #[error(
        "{} do not divide into {}: give a multiple of {microbatches} rows, or another number of microbatches",
        counted(*.rows, "row"), counted(*.microbatches, "microbatch")
    )]
    NotDivisible {
        /// Rows of the batch.
        rows: usize,
        /// The requested number of microbatches.
        microbatches: u32,
    },
    /// The rows do not suffice for the last microbatches.
    #[error(
        "{} make runs of {size}, and with them fewer than {}: give more rows or fewer microbatches",
        counted(*.rows, "row"), counted(*.microbatches, "microbatch")
    )]
    TooFewRows {
        /// Rows of the batch.
        rows: usize,
        /// The requested number of microbatches.
        microbatches: u32,
        /// Rows of a microbatch.
        size: usize,
    },
    /// There are more or fewer specs than tensors.
    #[error("{} for {}: give one for each, in the nesting of the tensors", counted(*.specs, "spec"), counted(*.tensors, "tensor"))]
    Specs {
        /// Specs given.
        specs: usize,
        /// Tensors in the batch.
        tensors: usize,
    },
    /// A spec names a dimension that its tensor does not have.
    #[error("tensor {tensor} of shape {shape:?} has no dimension {dimension} to split or join along")]
    NoDimension {
        /// The tensor's index.
        tensor: usize,
        /// The dimension.
        dimension: usize,
        /// The tensor's shape.
        shape: Vec<usize>,
    },
    /// The mean of tensors that are not floats.
    #[error(
        "output {tensor} is {kind}: only floats have a mean; keep the list of microbatches, or join them"
    )]
    NoMean {
        /// Index of the output.
        tensor: usize,
        /// Its kind.
        kind: ValueKind,
    },
    /// The microbatches have different numbers of tensors.
    #[error("microbatch {microbatch} holds {found} tensors, microbatch 0 holds {expected}")]
    TensorsDiffer {
        /// Its index.
        microbatch: usize,
        /// Its tensors.
        found: usize,
        /// Tensors of microbatch 0.
        expected: usize,
    },
    /// Tensors cannot be concatenated: their element types or other dimensions differ.
    #[error(
        "output {tensor} of microbatch {microbatch} is {found:?}, and of microbatch 0 it is {expected:?}: they differ in \
         more than the dimension along which they join"
    )]
    Unjoinable {
        /// Index of the output.
        tensor: usize,
        /// Index of the microbatch.
        microbatch: usize,
        /// Its shape.
        found: Vec<usize>,
        /// Shape in microbatch 0.
        expected: Vec<usize>,
    },
    /// A side input has another number of rows than the inputs.
    #[error(
        "side input `{name}`: tensor {tensor} of shape {shape:?} has {rows} rows in dimension {dimension}, and the inputs \
         have {expected}: give a row for each of theirs, or `Batch::with_replicated`"
    )]
    SideRows {
        /// Its name.
        name: String,
        /// The tensor's index.
        tensor: usize,
        /// The tensor's shape.
        shape: Vec<usize>,
        /// The dimension along which it is split.
        dimension: usize,
        /// Its rows.
        rows: usize,
        /// The rows of the inputs.
        expected: usize,
    },
    /// A side input that is already split has another number of parts than there are microbatches.
    #[error(
        "side input `{name}` has {}, and the batch has {}: give one for each",
        counted(*.found, "part"), counted(*.expected, "microbatch")
    )]
    SideParts {
        /// Its name.
        name: String,
        /// The parts.
        found: usize,
        /// The microbatches.
        expected: usize,
    },
    /// There is another number of weights than microbatches.
    #[error("{}, and the batch has {}: give one for each", counted(*.found, "weight"), counted(*.expected, "microbatch"))]
    Weights {
        /// The weights.
        found: usize,
        /// The microbatches.
        expected: usize,
    },
    /// The weight of a microbatch is negative or not finite.
    #[error("the weight of microbatch {microbatch} is {weight}: give a finite number, 0 or above")]
    Weight {
        /// The microbatch.
        microbatch: usize,
        /// Its weight, as text.
        weight: String,
    },
    /// No microbatch has a weight above 0.
    #[error("no token of the batch counts, so its loss has no mean: leave the batch out")]
    NoWeight,
    /// A tensor cannot be cut into slices of its sequence.
    #[error(
        "the schedule cuts sequences into {slices} slices, and tensor {tensor} has the shape {shape:?}: dimension 1 is the \
         sequence, whose length must be a multiple of {slices}"
    )]
    SliceLength {
        /// The tensor's index.
        tensor: usize,
        /// The tensor's shape.
        shape: Vec<usize>,
        /// The number of slices.
        slices: u32,
    },
    /// A batch whose sequences are cut has a side input.
    #[error(
        "the schedule cuts sequences into slices, and the tensors of side input `{name}` are not cut: leave it out, or use a \
         schedule of whole microbatches, such as `1f1b`"
    )]
    SliceSide {
        /// Its name.
        name: String,
    },
    /// A batch whose sequences are cut has weights that say nothing of slices.
    #[error(
        "the schedule cuts sequences into slices, and the weights of the microbatches do not say how much each slice counts: \
         use `Batch::ignoring`, or a schedule of whole microbatches, such as `1f1b`"
    )]
    SliceWeights,
    /// The targets have no tensor of token ids.
    #[error("the targets of microbatch {microbatch} have no integer tensor whose elements could be counted")]
    NoIds {
        /// The microbatch.
        microbatch: usize,
    },
}

pipewright_schedule::message_as_debug!(SplitError);
