//! The errors of reading and writing a model directory.

use std::io;
use std::path::{Path, PathBuf};

use safetensors::Dtype;

use crate::error::ConfigError;

/// Why a model directory cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum HfError {
    /// The system refused.
    #[error("{}: cannot {action} it", path.display())]
    Io {
        /// What was tried, as an infinitive.
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// A file that is not JSON, or whose content is not what its name says.
    #[error("{}: cannot be parsed", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// Where and why.
        source: serde_json::Error,
    },
    /// A configuration that no family accepts.
    #[error("{}{}: the model cannot be run", path.display(), after_colon(*line))]
    Config {
        /// The file.
        path: PathBuf,
        /// The line of the key at fault, counted from 1, if one key is at fault.
        line: Option<usize>,
        /// Which key.
        source: ConfigError,
    },
    /// A stage that the model does not have.
    #[error(transparent)]
    Stage(#[from] ConfigError),
    /// No weights in the folder.
    #[error(
        "{}: the folder has neither model.safetensors nor model.safetensors.index.json; name a folder with weights",
        dir.display()
    )]
    NoWeights {
        /// The folder.
        dir: PathBuf,
    },
    /// A file of weights that the index names is not there.
    #[error("{} is missing, and the index beside it names it: copy or download it again", path.display())]
    MissingFile {
        /// The file.
        path: PathBuf,
    },
    /// A file name in the index that leads out of the folder.
    #[error("{}: tensor `{tensor}` is said to be in `{file}`, which is not a plain file name", path.display())]
    IndexFile {
        /// The index.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// The name.
        file: String,
    },
    /// The file's length is not what its header says: a download or copy that was cut off, usually.
    #[error("{}: the file has {found} bytes, and its header asks for {expected}; copy or download it again", path.display())]
    Length {
        /// The file.
        path: PathBuf,
        /// Bytes by the header.
        expected: u64,
        /// Bytes there are.
        found: u64,
    },
    /// The file's beginning is not a header.
    #[error("{}: the file does not begin with a safetensors header", path.display())]
    Header {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: serde_json::Error,
    },
    /// The model needs a tensor that is not there.
    #[error("{}: tensor `{tensor}` is missing", path.display())]
    MissingTensor {
        /// The file that should have it, or the index.
        path: PathBuf,
        /// The tensor.
        tensor: String,
    },
    /// A tensor of another shape than the configuration implies.
    #[error(
        "{}: tensor `{tensor}` has shape {found:?}, and the configuration asks for {expected:?}",
        path.display()
    )]
    Shape {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Shape by the configuration, in the file's layout.
        expected: Vec<usize>,
        /// Shape in the file.
        found: Vec<usize>,
    },
    /// An element type that cannot become `f32`.
    #[error("{}: tensor `{tensor}` has element type {found:?}; convert it to F32, BF16 or F16", path.display())]
    ElementType {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Type in the file.
        found: Dtype,
    },
    /// The folder to write has content already, which is never overwritten.
    #[error("{}: the folder is not empty; choose one that does not exist", dir.display())]
    NotEmpty {
        /// The folder.
        dir: PathBuf,
    },
    /// The checkpoint that a model is taken from cannot be read, or is of another model.
    #[error(transparent)]
    Checkpoint(#[from] pipewright::checkpoint::CheckpointError),
    /// A tensor that was announced twice.
    #[error("tensor `{tensor}` belongs to two stages: each layer must be written once")]
    Duplicate {
        /// The tensor.
        tensor: String,
    },
    /// A tensor that was not announced, or is written a second time.
    #[error("tensor `{tensor}` was not announced, or is written already")]
    Unexpected {
        /// The tensor.
        tensor: String,
    },
    /// Values that do not fill the announced shape.
    #[error("tensor `{tensor}` was announced with {expected} elements, {found} were given")]
    Elements {
        /// The tensor.
        tensor: String,
        /// Elements of the announced shape.
        expected: usize,
        /// Elements given.
        found: usize,
    },
    /// A tensor that was announced and never written.
    #[error("tensor `{tensor}` was announced and not written")]
    Unwritten {
        /// The tensor.
        tensor: String,
    },
}

/// A line number behind a path.
fn after_colon(line: Option<usize>) -> String {
    line.map(|line| format!(":{line}")).unwrap_or_default()
}

impl HfError {
    /// For `map_err`: the system's reason with what was tried on which path.
    pub(super) fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { action, path: path.to_owned(), source }
    }
}
