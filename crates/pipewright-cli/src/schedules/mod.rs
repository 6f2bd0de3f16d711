//! Schedules for the commands: the layers of a partition, and other numbers of microbatches.

pub(crate) mod layer_weights;
pub(crate) mod other_sizes;
