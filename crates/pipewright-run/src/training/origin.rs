//! The folder `model` of a run. It contains the files that an exported model needs from the directory of the
//! original model.
//!
//! The files are copied when the run starts, because that directory may have changed or be deleted before the
//! export.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use pipewright::bounded_file::write_regular;
use pipewright::checkpoint::Checkpoint;
use pipewright_gguf::files;
use pipewright_models::hf;
use serde_json::{Map, Value, json};

use crate::error::RunError;
use crate::run_data::tokenizer_of;
use crate::run_folder::MODEL;
use crate::settings::Settings;
use crate::settings::data::BYTES;
use crate::settings::model::{EXPORTED, FreshModel, ModelSettings};

/// The files with the special tokens and the chat template of a tokenizer, which are next to it.
const BESIDE_TOKENIZER: [&str; 3] =
    ["tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"];

/// Copies the model's original configuration and the tokenizer into the folder of a run that starts.
///
/// The tokenizer is the one that encoded the data, or else the one in the model's directory.
pub(crate) fn keep(settings: &Settings) -> Result<(), RunError> {
    let folder = settings.run.out.join(MODEL);
    match &settings.model {
        ModelSettings::From { from, .. } => hf::keep_origin(from, &folder),
        ModelSettings::Fresh(model) => hf::keep_keys(&fresh_keys(settings, model), &folder),
    }
    .map_err(RunError::input)?;
    if settings.data.tokenizer == BYTES {
        return Ok(());
    }
    let tokenizer = Path::new(&settings.data.tokenizer);
    copy(tokenizer, &folder, hf::TOKENIZER)?;
    // The files of the model's directory belong to its own tokenizer.
    for name in BESIDE_TOKENIZER {
        let file = tokenizer.with_file_name(name);
        if files::exists(&file) {
            copy(&file, &folder, name)?;
        } else {
            remove(&folder.join(name))?;
        }
    }
    match settings.model.added_tokens() {
        [] => Ok(()),
        tokens => hf::extend_tokenizer(&folder, tokens, true).map_err(RunError::input),
    }
}

/// Returns the tokens that end a text of a run. `generate` finds the same tokens in its folder.
pub(crate) fn end_tokens(settings: &Settings) -> Result<Vec<u32>, RunError> {
    let keys = match &settings.model {
        ModelSettings::From { from, .. } => {
            let tokenizer = tokenizer_of(settings);
            // With bytes, the folder of the run has the tokenizer of the model.
            let other = Some(&tokenizer).filter(|tokenizer| tokenizer.file().is_some());
            return hf::end_tokens(from, other).map_err(RunError::input);
        }
        ModelSettings::Fresh(model) => fresh_keys(settings, model),
    };
    let named = keys.get("eos_token_id");
    let ids = named
        .and_then(Value::as_array)
        .map_or_else(|| named.into_iter().collect(), |ids| ids.iter().collect::<Vec<_>>());
    Ok(ids.into_iter().filter_map(Value::as_u64).filter_map(|id| u32::try_from(id).ok()).collect())
}

/// Copies a file of the tokenizer into the folder.
fn copy(file: &Path, folder: &Path, name: &str) -> Result<(), RunError> {
    let target = folder.join(name);
    let copied = files::read(file, u64::MAX).and_then(|content| {
        fs::create_dir_all(folder)?;
        write_regular(&target, &content)
    });
    copied.map_err(|error| {
        let (file, target) = (file.display(), target.display());
        RunError::input(format!("{target}: {file}, a file of the tokenizer, cannot be copied here: {error}"))
    })
}

/// Removes a file, if it exists.
fn remove(file: &Path) -> Result<(), RunError> {
    match fs::remove_file(file) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(RunError::input(format!("{}: the file cannot be removed: {error}", file.display())))
        }
        _ => Ok(()),
    }
}

/// The number of positions that transformers assumes for a Llama. Rotary positions have no limit of their
/// own.
const USUAL_LENGTH: u32 = 2048;

/// Returns the keys that the export of a model without an original directory adds: the number of positions,
/// and the tokens that begin and end a text.
fn fresh_keys(settings: &Settings, model: &FreshModel) -> Map<String, Value> {
    let data = &settings.data;
    let ends = hf::text_ends(&tokenizer_of(settings));
    let bos = data.bos_id.map(u64::from).or(ends.bos);
    let longest = data.seq_len.max(USUAL_LENGTH);
    let mut keys = Map::from_iter([("max_position_embeddings".to_owned(), json!(longest))]);
    let known = [("bos_token_id", bos), ("eos_token_id", ends.eos)];
    keys.extend(known.into_iter().filter_map(|(key, id)| Some((key.to_owned(), json!(id?)))));
    let written =
        EXPORTED.into_iter().filter_map(|key| Some((key.to_owned(), json!(model.others.get(key)?))));
    keys.extend(written);
    keys
}

/// Returns the folder of the run that a checkpoint belongs to, if the run has one.
pub fn of_checkpoint(checkpoint: &Checkpoint) -> Option<PathBuf> {
    let run = checkpoint.path().parent().and_then(Path::parent)?;
    Some(run.join(MODEL)).filter(|folder| folder.is_dir())
}
