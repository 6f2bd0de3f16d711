//! The errors of cutting layers into stages.

use thiserror::Error;

/// The errors of cutting layers into stages.
#[derive(Clone, PartialEq, Eq, Error)]
pub enum PartitionError {
    /// The number of stages is 0.
    #[error("a partition needs at least one stage")]
    NoStages,
    /// A stage would be empty.
    #[error("{layers} layers cannot fill {stages} stages; use at most {layers} stages")]
    MoreStagesThanLayers {
        /// The number of layers.
        layers: usize,
        /// The requested number of stages.
        stages: u32,
    },
    /// Too few or too many boundaries.
    #[error("{boundaries} boundaries do not make {stages} stages; give {} boundaries", .stages - 1)]
    BoundaryCount {
        /// How many boundaries were given.
        boundaries: usize,
        /// The requested number of stages; at least 1.
        stages: u32,
    },
    /// A boundary does not come after the previous one.
    #[error(
        "boundary {boundary} does not come after {previous}; every stage needs a layer, so boundaries ascend from 1"
    )]
    NotAscending {
        /// The boundary.
        boundary: usize,
        /// The boundary before it, or 0 for the first.
        previous: usize,
    },
    /// A boundary is above the last layer.
    #[error("boundary {boundary} is above the last of {layers} layers; use one below {layers}")]
    BoundaryOutOfRange {
        /// The boundary.
        boundary: usize,
        /// The number of layers.
        layers: usize,
    },
}

crate::message_as_debug!(PartitionError);
