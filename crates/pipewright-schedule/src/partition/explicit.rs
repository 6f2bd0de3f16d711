//! The `explicit` method: the user gives the first layer of each stage.

use crate::partition::error::PartitionError;
use crate::partition::stages::Partition;

/// Cuts before each boundary. A boundary is the first layer of a stage other than the first.
pub(super) fn cut(layers: usize, stages: u32, boundaries: &[usize]) -> Result<Partition, PartitionError> {
    if boundaries.len() + 1 != stages as usize {
        return Err(PartitionError::BoundaryCount { boundaries: boundaries.len(), stages });
    }
    let mut starts = vec![0];
    for &boundary in boundaries {
        let previous = starts[starts.len() - 1];
        if boundary <= previous {
            return Err(PartitionError::NotAscending { boundary, previous });
        }
        if boundary >= layers {
            return Err(PartitionError::BoundaryOutOfRange { boundary, layers });
        }
        starts.push(boundary);
    }
    Ok(Partition::from_starts(starts, layers))
}
