//! Reads the configuration and the stages of a model directory.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use burn::tensor::DType;
use pipewright::bounded_file::SMALL_TEXT;
use pipewright::checkpoint::Checkpoint;
use pipewright::nn::TensorParallel;
use pipewright_gguf::files;
use serde_json::Value;

use super::contents::unused;
use super::directory::{is_gguf, resolve};
use super::json_file::{named_floats, parse, read_bytes};
use super::layout::CONFIG;
use super::other_form::{OtherForm, other_form};
use super::weights::Weights;
use crate::error::ModelError;
use crate::family::ModelFamily;
use crate::parameter::{ParameterSource, ParameterSpec};
use crate::split::Place;
use crate::stage::ModelStage;
use pipewright_shapes::ShapeError;

/// Returns the path of the `config.json` in a directory, or of a model that is only such a file.
fn config_path(dir: &Path) -> Result<PathBuf, ModelError> {
    let form = |form| ModelError::at(dir, form);
    if dir.is_file() && !is_gguf(dir) {
        return match other_form(dir) {
            Some(found) => Err(form(found)),
            None => Ok(dir.to_owned()),
        };
    }
    let path = resolve(dir)?.join(CONFIG);
    let missing =
        (!files::exists(&path)).then(|| other_form(dir).or(dir.is_dir().then_some(OtherForm::NoConfig)));
    missing.flatten().map_or(Ok(path), |found| Err(form(found)))
}

/// Reads `dir/config.json` with `parse_model`; an error names the file and, if possible, the line.
///
/// # Errors
/// When the file cannot be read or is not JSON, or when `parse_model` fails.
pub(crate) fn read_config<T>(
    dir: &Path,
    parse_model: impl FnOnce(Value) -> Result<T, ShapeError>,
) -> Result<T, ModelError> {
    let path = config_path(dir)?;
    let text = read_bytes(&path, SMALL_TEXT)?;
    let json = parse(&path, &named_floats(&text))?;
    parse_model(json).map_err(|source| {
        let line = source.keys().first().and_then(|key| line_of(&text, key));
        let line = line.map(|line| format!(":{line}")).unwrap_or_default();
        ModelError::new(format!("{}{line}: the model cannot be run", path.display())).because(source)
    })
}

/// Returns the line of the first mention of a key, counted from 1. A nested key is given as `outer.inner`. If
/// the file spells the inner key in another way, the outer key counts.
fn line_of(json: &[u8], key: &str) -> Option<usize> {
    let text = std::str::from_utf8(json).ok()?;
    let offset = key.rsplit('.').find_map(|part| text.find(&format!("\"{part}\"")))?;
    Some(text[..offset].matches('\n').count() + 1)
}

/// Builds the stage of `config`'s model that holds `layers`, with the weights in `dir`.
///
/// Only the tensors of these layers are read, and converted to `f32` from `F32`, `BF16` or `F16`. Tensors
/// that the model does not know are not read.
///
/// # Errors
/// When a file is missing, cut short or corrupt, when a tensor is missing or has another shape or an unknown
/// element type, when a value is not finite, when the files have more layers than the model or another head
/// than its tied one, when `layers` is not a range of the model's layers, or when a layer cannot be split
/// over the ranks of `place`.
pub fn load_stage(
    dir: &Path,
    config: &dyn ModelFamily,
    layers: Range<usize>,
    place: impl Into<Place>,
) -> Result<ModelStage, ModelError> {
    config.build_stage(layers, &mut open_weights(dir, config)?, &place.into())
}

/// Returns the weights of a directory, whose files are opened when they are first needed. They must not
/// contradict the configuration ([`super::check_weights`] says how).
pub(crate) fn open_weights(dir: &Path, config: &dyn ModelFamily) -> Result<Weights, ModelError> {
    let mut weights = Weights::open(dir)?;
    let parameters = config.outline(0..config.layers(), &TensorParallel::default())?;
    unused(&mut weights, &parameters)?;
    Ok(weights)
}

/// Builds the stage of `config`'s model that holds `layers`, with the parameters of a checkpoint.
///
/// # Errors
/// When the checkpoint does not belong to the model, or when `layers` is not a range of the model's layers.
pub fn restore_stage(
    checkpoint: &Checkpoint,
    config: &dyn ModelFamily,
    layers: Range<usize>,
    place: impl Into<Place>,
) -> Result<ModelStage, ModelError> {
    config.build_stage(layers, &mut Stored(checkpoint), &place.into())
}

/// The parameters of a checkpoint as a source for a stage: paths and layouts are the same in both.
pub(crate) struct Stored<'a>(pub(crate) &'a Checkpoint);

impl ParameterSource for Stored<'_> {
    fn parameter(&mut self, spec: &ParameterSpec) -> Result<Vec<f32>, ModelError> {
        let data = self.0.parameter(&Arc::from(spec.path.as_str()), &spec.shape, DType::F32)?;
        Ok(data.iter().collect())
    }
}
