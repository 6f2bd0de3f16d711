//! The record of the updates that a rank makes before it has the gradient norm. `update.rs` makes them.

use std::time::Duration;

/// The updates of a rank's stages before it has the gradient norm.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct EarlyUpdates {
    /// The number of stages, in local order, that have been updated, or whose optimizer has failed.
    pub(super) stages: usize,
    /// The time that they took.
    pub(super) time: Duration,
    /// Whether one was undone because of the norm.
    pub(super) undone: bool,
}
