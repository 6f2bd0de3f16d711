//! The errors of a model: of its configuration, and of its parameters, its stages and its files.

use std::error::Error;
use std::fmt::Display;
use std::io;
use std::path::Path;

use pipewright::checkpoint::CheckpointError;

use pipewright_shapes::ShapeError;

/// Why a model, a stage of it or its files cannot be made, read or written.
#[derive(thiserror::Error)]
pub enum ModelError {
    /// The configuration does not describe a model.
    #[error(transparent)]
    Shape(#[from] ShapeError),
    /// A checkpoint cannot be read, or belongs to another model.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// A fault of a stage or a file, which only people act on.
    #[error("{message}")]
    Fault {
        /// The place, the fault and the advice.
        message: String,
        /// The cause, if there is one.
        source: Option<Box<dyn Error + Send + Sync>>,
    },
}

pipewright_schedule::message_as_debug!(ModelError);

impl ModelError {
    /// Returns the error of a fault without a cause.
    pub(crate) fn new(message: impl Into<String>) -> Self {
        Self::Fault { message: message.into(), source: None }
    }

    /// Returns the error of a fault of a file or folder.
    pub(crate) fn at(path: &Path, fault: impl Display) -> Self {
        Self::new(format!("{}: {fault}", path.display()))
    }

    /// Returns the fault with its cause.
    pub(crate) fn because(self, cause: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        match self {
            Self::Fault { message, .. } => Self::Fault { message, source: Some(cause.into()) },
            other => other,
        }
    }

    /// Returns a function for `map_err` that adds the action and the path to the system's reason.
    pub(crate) fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::at(path, format!("cannot {action} it")).because(source)
    }
}

/// The error for a model that several ranks compute together. Each of them has shards of the parameters or
/// some of the experts, so none can predict a token by itself.
#[derive(Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "the model is split over {ranks} ranks, and one of them cannot predict a token: save a checkpoint, and read the \
     whole model from it with `ModelConfig::whole`"
)]
pub struct SplitModel {
    /// The number of ranks.
    pub ranks: u32,
}

pipewright_schedule::message_as_debug!(SplitModel);
