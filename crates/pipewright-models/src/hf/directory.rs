//! The folder that has the files of a model.

use std::path::{Path, PathBuf};

use pipewright_gguf::container::{ENDING, locate};
use pipewright_system::model_folder::{SnapshotError, snapshot};

use super::layout::CONFIG;
use super::other_form::{ADAPTER, is_of_trainer, names, onnx_names};
use crate::error::ModelError;

/// The endings of files that may have weights.
const WEIGHT_ENDINGS: [&str; 9] =
    ["safetensors", "bin", "pt", "pth", "gguf", "h5", "msgpack", "ckpt", "onnx"];

/// Returns the folder with the files of a model: `path` itself or, in the cache folder of a model
/// (`models--...`), the snapshot that was downloaded last. A `config.json` with weights next to it means its
/// folder. A GGUF file, or a folder with only one, is that file.
///
/// # Errors
/// When a cache folder has no snapshot, or several and no reference to one of them.
pub fn resolve(path: &Path) -> Result<PathBuf, ModelError> {
    if let Some(folder) = folder_of(path) {
        return Ok(folder);
    }
    let folder = snapshot(path).map_err(|error| match error {
        SnapshotError::Read { folder, source } => ModelError::io("read", &folder)(source),
        unclear @ SnapshotError::Unclear { .. } => ModelError::new(unclear.to_string()),
    })?;
    Ok(locate(&folder).unwrap_or(folder))
}

/// Returns the folder of a `config.json` that has weights next to it.
fn folder_of(path: &Path) -> Option<PathBuf> {
    if path.file_name()? != CONFIG || !path.is_file() {
        return None;
    }
    let folder = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    (!is_config_alone(folder)).then(|| folder.to_owned())
}

/// Returns whether a path is a GGUF file, which has the place of a folder.
pub(super) fn is_gguf(path: &Path) -> bool {
    path.is_file() && path.extension().is_some_and(|ending| ending == ENDING)
}

/// Returns whether a path describes a model and has no weights in any form: it is a folder with a
/// `config.json`, or such a file without weights next to it.
pub fn is_config_alone(path: &Path) -> bool {
    if path.is_file() {
        return path.extension().is_some_and(|ending| ending == "json") && folder_of(path).is_none();
    }
    let names = names(path);
    let has_weights = |name: &String| {
        let is_weights = |ending| WEIGHT_ENDINGS.iter().any(|known| ending == *known);
        name.ends_with(".index.json")
            || (!is_of_trainer(name) && Path::new(name).extension().is_some_and(is_weights))
    };
    path.join(CONFIG).is_file()
        && !path.join(ADAPTER).exists()
        && !names.iter().chain(&onnx_names(path)).any(has_weights)
}
