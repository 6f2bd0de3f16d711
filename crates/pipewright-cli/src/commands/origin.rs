//! The folder `model` of a run. It contains the files that an exported model needs from the directory of the original
//! model.
//!
//! The files are copied when the run starts, because that directory may have changed or be deleted before the export.

use std::fs;
use std::path::{Path, PathBuf};

use pipewright::bounded_file::{refuse_special, require_regular};
use pipewright::checkpoint::Checkpoint;
use pipewright_models::hf;

use crate::config::Settings;
use crate::config::data::BYTES;
use crate::config::model::ModelSettings;
use crate::failure::Failure;

/// The name of the folder.
const MODEL: &str = "model";

/// Copies the model's original configuration and the tokenizer into the folder of a run that starts.
///
/// The tokenizer is the one that encoded the data, or else the one in the model's directory.
pub(super) fn keep(settings: &Settings) -> Result<(), Failure> {
    let folder = settings.run.out.join(MODEL);
    if let ModelSettings::From { from } = &settings.model {
        hf::keep_origin(from, &folder).map_err(Failure::input)?;
    }
    if settings.data.tokenizer == BYTES {
        return Ok(());
    }
    let target = folder.join(hf::TOKENIZER);
    let tokenizer = Path::new(&settings.data.tokenizer);
    let copied = require_regular(tokenizer).and_then(|_| {
        refuse_special(&target)?;
        fs::create_dir_all(&folder)?;
        fs::copy(tokenizer, &target)
    });
    copied.map(drop).map_err(|error| {
        Failure::input(format!("{}: the tokenizer cannot be copied here: {error}", target.display()))
    })
}

/// Returns the folder of the run that a checkpoint belongs to, if the run has one.
pub(super) fn of_checkpoint(checkpoint: &Checkpoint) -> Option<PathBuf> {
    let run = checkpoint.path().parent().and_then(Path::parent)?;
    Some(run.join(MODEL)).filter(|folder| folder.is_dir())
}
