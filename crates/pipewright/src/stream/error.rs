//! The errors of matrices that are read while a program runs.

use std::io;
use std::time::Duration;

use pipewright_schedule::StageIndex;

use crate::memory::ReadError;

/// The frozen matrices of a stage could not be read.
#[derive(thiserror::Error)]
#[error("the base of stage {stage} {kind}")]
pub struct StreamError {
    /// The stage.
    pub stage: StageIndex,
    /// The failure.
    #[source]
    pub kind: StreamErrorKind,
}

pipewright_schedule::message_as_debug!(StreamError);

/// The failure of a read.
#[derive(thiserror::Error)]
pub enum StreamErrorKind {
    /// The source of a matrix has failed.
    #[error("cannot be read at `{matrix}`: {source}")]
    Read {
        /// The path of the matrix in the model.
        matrix: String,
        /// The error of the source.
        source: ReadError,
    },
    /// The thread that reads could not start.
    #[error("cannot be read: the thread that reads it cannot start: {source}")]
    Thread {
        /// The system's error.
        source: io::Error,
    },
    /// The thread that reads has panicked.
    #[error("cannot be read: the thread that reads it panicked: {message}")]
    Panicked {
        /// The message of the panic.
        message: String,
    },
    /// The matrices were not read in time.
    #[error("is not in memory after {:.1} s: the disk is too slow, or the deadline too short", .waited.as_secs_f64())]
    Deadline {
        /// The deadline.
        waited: Duration,
    },
}

pipewright_schedule::message_as_debug!(StreamErrorKind);
