//! The errors of cutting layers into stages.

use thiserror::Error;

use crate::words::counted;

/// The errors of cutting layers into stages.
#[derive(Clone, PartialEq, Eq, Error)]
pub enum PartitionError {
    /// The number of stages is 0.
    #[error("a partition needs at least one stage")]
    NoStages,
    /// A stage would be empty.
    #[error("{} cannot fill {}; {}", counted(*.layers, "layer"), counted(*.stages, "stage"), fewer_stages(*.layers))]
    MoreStagesThanLayers {
        /// The number of layers.
        layers: usize,
        /// The requested number of stages.
        stages: u32,
    },
    /// Too few or too many boundaries.
    #[error(
        "{} cannot make {}; {}", counted(*.boundaries, "boundary"), counted(*.stages, "stage"), boundaries_of(*.stages)
    )]
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
    #[error("boundary {boundary} is above the last of {}; use one below {layers}", counted(*.layers, "layer"))]
    BoundaryOutOfRange {
        /// The boundary.
        boundary: usize,
        /// The number of layers.
        layers: usize,
    },
}

crate::error_text::message_as_debug!(PartitionError);

/// Returns what to do if there are more stages than layers.
fn fewer_stages(layers: usize) -> String {
    if layers == 0 { "add layers".to_owned() } else { format!("use at most {}", counted(layers, "stage")) }
}

/// Returns what to do if the number of boundaries differs from the number of stages; at least 1.
fn boundaries_of(stages: u32) -> String {
    if stages <= 1 {
        "leave them out".to_owned()
    } else {
        format!("give {}", counted(stages - 1, "boundary"))
    }
}
