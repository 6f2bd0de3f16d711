//! The errors of reading and writing a model directory.

use std::io;
use std::path::{Path, PathBuf};

use safetensors::Dtype;

use super::other_form::OtherForm;
use super::weight_type::WeightType;
use crate::error::ConfigError;

/// Why a model directory cannot be read or written.
#[derive(thiserror::Error)]
pub enum HfError {
    /// The system refused.
    #[error("{}: cannot {action} it", path.display())]
    Io {
        /// The action that failed, as an infinitive.
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// A file is not JSON, or has other content than its name promises.
    #[error("{}: cannot be parsed", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// The place and the reason.
        source: serde_json::Error,
    },
    /// No family accepts the configuration.
    #[error("{}{}: the model cannot be run", path.display(), after_colon(*line))]
    Config {
        /// The file.
        path: PathBuf,
        /// The line of the key that causes the error, counted from 1, if there is one.
        line: Option<usize>,
        /// The error, which names the key.
        source: ConfigError,
    },
    /// The model does not have the stage.
    #[error(transparent)]
    Stage(#[from] ConfigError),
    /// The folder has no weights.
    #[error(
        "{}: the folder has neither model.safetensors nor model.safetensors.index.json; name a folder with weights",
        dir.display()
    )]
    NoWeights {
        /// The folder.
        dir: PathBuf,
    },
    /// The path has a model in a form that is not read, or no model.
    #[error("{}: {form}", path.display())]
    OtherForm {
        /// The file or folder.
        path: PathBuf,
        /// The form of the model.
        form: OtherForm,
    },
    /// A cache folder of the hub does not say which of its snapshots is meant.
    #[error("{}: the cache folder has {found} snapshots, and no reference to one of them; name one of these folders", dir.display())]
    Snapshots {
        /// The folder with the snapshots.
        dir: PathBuf,
        /// The number of snapshots.
        found: usize,
    },
    /// A small text file is the pointer to a file that Git LFS has not downloaded.
    #[error(
        "{}: this is a Git LFS pointer, not the file itself: run `git lfs pull` in its folder, or download the file", path.display()
    )]
    LfsPointer {
        /// The file.
        path: PathBuf,
    },
    /// Some of a model's files do not exist, and there is no index.
    #[error("{}: {} of the model's files are missing: {}; copy or download them again", dir.display(), missing.len(), first_of(missing))]
    MissingShards {
        /// The folder.
        dir: PathBuf,
        /// The names of the files.
        missing: Vec<String>,
    },
    /// The files have more layers than the configuration.
    #[error(
        "{}: the files have {found} layers, and the configuration asks for {expected}: a model without its last layers is \
         another model; correct the number of layers, or write a model of that size with transformers", path.display()
    )]
    FurtherLayers {
        /// The file or index.
        path: PathBuf,
        /// The number of layers of the configuration.
        expected: usize,
        /// The number of layers in the files.
        found: usize,
    },
    /// The head in the files differs from the embeddings, although the configuration ties them.
    #[error(
        "{}: tensor `lm_head.weight` differs from `{embedding}`, and `tie_word_embeddings` is true: set it to false in config.json, \
         which transformers assumes for such files too, or remove the tensor", path.display()
    )]
    UntiedHead {
        /// The file.
        path: PathBuf,
        /// The tensor with the embeddings.
        embedding: String,
    },
    /// A tensor has a value that is not a finite number.
    #[error("{}: tensor `{tensor}` has the value {value}, which is not finite: copy or download the weights again", path.display())]
    NotFinite {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// The value.
        value: f32,
    },
    /// A value is too large for the element type of the written file.
    #[error("tensor `{tensor}` has values that are too large for {}: choose float32 or bfloat16", kind.name())]
    TooLarge {
        /// The tensor.
        tensor: String,
        /// The element type.
        kind: WeightType,
    },
    /// A file of weights that the index names does not exist.
    #[error("{} is missing, and the index in its folder names it: copy or download it again", path.display())]
    MissingFile {
        /// The file.
        path: PathBuf,
    },
    /// A file name in the index leads out of the folder.
    #[error("{}: tensor `{tensor}` is said to be in `{file}`, which is not a plain file name", path.display())]
    IndexFile {
        /// The index.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// The name.
        file: String,
    },
    /// The file's length differs from the length in its header, usually because a download or copy was cut
    /// off.
    #[error("{}: the file has {found} bytes, and its header asks for {expected}; copy or download it again", path.display())]
    Length {
        /// The file.
        path: PathBuf,
        /// The number of bytes according to the header.
        expected: u64,
        /// The number of bytes of the file.
        found: u64,
    },
    /// The beginning of the file is not a header.
    #[error("{}: the file does not begin with a safetensors header", path.display())]
    Header {
        /// The file.
        path: PathBuf,
        /// The reason.
        source: serde_json::Error,
    },
    /// A tensor that the model needs is missing.
    #[error("{}: tensor `{tensor}` is missing", path.display())]
    MissingTensor {
        /// The file that should have it, or the index.
        path: PathBuf,
        /// The tensor.
        tensor: String,
    },
    /// The experts are stored in a form that is not known.
    #[error(
        "{}: tensor `{tensor}` is missing, and `{found}` belongs to all experts, in a form that is not read: load the model with \
         transformers, and write it with `model.save_pretrained(DIR, save_original_format=False)`", path.display()
    )]
    UnknownExperts {
        /// The file that should have the matrix, or the index.
        path: PathBuf,
        /// The tensor with a matrix of one expert.
        tensor: String,
        /// A tensor of all experts.
        found: String,
    },
    /// A matrix is quantised, which the configuration does not say.
    #[error(
        "{}: tensor `{tensor}` is quantised, because there is `{found}` too, and training needs whole weights: use the model from \
         which the quantised one was made; if transformers has undone the quantisation, write the model again with \
         `save_original_format=False`", path.display()
    )]
    QuantisedTensor {
        /// The file that should have the matrix, or the index.
        path: PathBuf,
        /// The tensor with the matrix.
        tensor: String,
        /// A tensor that quantised matrices have.
        found: String,
    },
    /// A tensor has another shape than the configuration implies.
    #[error(
        "{}: tensor `{tensor}` has shape {found:?}, and the configuration asks for {expected:?}{}",
        path.display(), advice_on_order(expected, found)
    )]
    Shape {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// The shape according to the configuration, in the file's layout.
        expected: Vec<usize>,
        /// The shape in the file.
        found: Vec<usize>,
    },
    /// An element type cannot be converted to `f32`.
    #[error("{}: tensor `{tensor}` has element type {found:?}; convert it to F32, BF16 or F16", path.display())]
    ElementType {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// The type in the file.
        found: Dtype,
    },
    /// A folder does not have an adapter of PEFT.
    #[error(
        "{}: there is no PEFT adapter here: name a folder with adapter_config.json and adapter_model.safetensors, which \
         `save_pretrained` of PEFT and `pipewright export` write", dir.display()
    )]
    NoAdapter {
        /// The folder, or the file without tensors.
        dir: PathBuf,
    },
    /// An adapter asks for something that adapters here do not compute.
    #[error("{}: `{key}` is {value}: {advice}", path.display())]
    AdapterKey {
        /// The file.
        path: PathBuf,
        /// The key.
        key: String,
        /// Its value.
        value: String,
        /// The advice.
        advice: &'static str,
    },
    /// A tensor of an adapter belongs to no layer of the model.
    #[error(
        "{}: tensor `{tensor}` is not a matrix of an adapter on one of the {layers} linear layers of this model, such as \
         `{example}`: name the adapter of this model", path.display()
    )]
    AdapterTensor {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// The number of the model's layers that can have an adapter.
        layers: usize,
        /// The path of one of them.
        example: String,
    },
    /// An adapter changes experts that a router chooses.
    #[error(
        "{}: tensor `{tensor}` is an adapter of experts that a router chooses, which is not supported: train the adapter without \
         them, or merge it into its model with PEFT", path.display()
    )]
    AdapterOfExpert {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
    },
    /// A tensor of an adapter does not fit its layer.
    #[error(
        "{}: tensor `{tensor}` has shape {found:?}, and its layer, with the rank in adapter_config.json, needs {expected:?}: \
         name the adapter of this model", path.display()
    )]
    AdapterShape {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// The shape that fits.
        expected: Vec<usize>,
        /// The shape in the file.
        found: Vec<usize>,
    },
    /// The target folder has content, which is never overwritten.
    #[error("{}: the folder is not empty; choose one that does not exist", dir.display())]
    NotEmpty {
        /// The folder.
        dir: PathBuf,
    },
    /// The checkpoint cannot be read, or belongs to another model.
    #[error(transparent)]
    Checkpoint(#[from] pipewright::checkpoint::CheckpointError),
    /// A stage to write has only a shard of a tensor, because several ranks compute the stage together.
    #[error(
        "the stage has one of {shards} shards of tensor `{tensor}`: save a checkpoint and write the model with `export`, \
         which puts the shards together"
    )]
    Shard {
        /// The tensor.
        tensor: String,
        /// The number of shards.
        shards: u32,
    },
    /// A tensor was announced twice.
    #[error("tensor `{tensor}` belongs to two stages: each layer must be written once")]
    Duplicate {
        /// The tensor.
        tensor: String,
    },
    /// A tensor was not announced, or is written a second time.
    #[error("tensor `{tensor}` was not announced, or is written already")]
    Unexpected {
        /// The tensor.
        tensor: String,
    },
    /// The number of values differs from the announced shape.
    #[error("tensor `{tensor}` was announced with {expected} elements, {found} were given")]
    Elements {
        /// The tensor.
        tensor: String,
        /// The number of elements of the announced shape.
        expected: usize,
        /// The number of elements given.
        found: usize,
    },
    /// A tensor was announced but never written.
    #[error("tensor `{tensor}` was announced and not written")]
    Unwritten {
        /// The tensor.
        tensor: String,
    },
}

pipewright_schedule::message_as_debug!(HfError);

/// Returns the first three of some names, and says if there are more.
fn first_of(names: &[String]) -> String {
    let first = names.iter().take(3).cloned().collect::<Vec<_>>().join(", ");
    if names.len() > 3 { format!("{first}, ...") } else { first }
}

/// Returns advice on a tensor of all experts whose dimensions have another order.
fn advice_on_order(expected: &[usize], found: &[usize]) -> &'static str {
    let sorted = |shape: &[usize]| {
        let mut shape = shape.to_vec();
        shape.sort_unstable();
        shape
    };
    if expected.len() != 3 || sorted(expected) != sorted(found) {
        return "";
    }
    ", in this order: load the model with transformers, and write it with `model.save_pretrained(DIR, save_original_format=False)`"
}

/// Prints a line number after a path.
fn after_colon(line: Option<usize>) -> String {
    line.map(|line| format!(":{line}")).unwrap_or_default()
}

impl HfError {
    /// Returns a function for `map_err` that adds the action and the path to the system's reason.
    pub(super) fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { action, path: path.to_owned(), source }
    }
}
