//! Which checkpoint is meant by a path: itself, or the newest one of a run or of a folder of checkpoints.

use std::path::Path;

use pipewright::checkpoint::{Checkpoint, CheckpointError, CheckpointFolder};

use crate::failure::Failure;
use crate::run_folder::checkpoints_of;

/// Opens the checkpoint and reads every byte of it.
pub(super) fn open(path: &Path) -> Result<Checkpoint, Failure> {
    let of_run = checkpoints_of(path);
    let opened = if CheckpointFolder::is_checkpoint(path) {
        Checkpoint::open(path)
    } else if of_run.is_dir() {
        CheckpointFolder::newest(&of_run)
    } else {
        CheckpointFolder::newest(path)
    };
    opened.map_err(|error| match error {
        CheckpointError::NoneComplete { .. } => {
            Failure::input(format!("{error}; name a run's folder, or a checkpoint in it"))
        }
        error => Failure::input(error),
    })
}
