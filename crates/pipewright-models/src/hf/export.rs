//! Writes a checkpoint as a model directory, layer by layer: only one layer is in memory at a time.

use std::path::Path;

use burn::tensor::Device;
use pipewright::checkpoint::Checkpoint;

use super::origin::WeightTypes;
use super::read::Stored;
use super::weight_type::WeightType;
use super::write::{DEFAULT_SHARD_BYTES, Writer};
use crate::error::ModelError;
use crate::family::ModelFamily;
use crate::outline::Outline;
use crate::parameter::ParameterSource;
use crate::split::Place;
use crate::stage::parameter_specs;

/// The choices of an export.
#[derive(Clone, Copy, Debug, Default)]
pub struct ExportOptions<'a> {
    /// A folder that [`super::keep_origin`] filled. Its tokenizer, its generation settings and the further
    /// keys of its `config.json` are written too.
    pub origin: Option<&'a Path>,
    /// The element type of all tensors; by default, each tensor has the type that the original model has, or
    /// single precision.
    pub weight_type: Option<WeightType>,
}

/// Writes the model of a checkpoint into `dir`, which must be empty or not exist. Returns the element type of
/// most tensors.
///
/// # Errors
/// When the checkpoint does not belong to `config`'s model, when a value is too large for its element type,
/// or as [`Writer`]'s functions.
pub fn export(
    checkpoint: &Checkpoint,
    config: &dyn ModelFamily,
    options: &ExportOptions<'_>,
    dir: &Path,
) -> Result<WeightType, ModelError> {
    export_from(&mut Stored(checkpoint), config, options, dir)
}

/// Like [`export`], with the parameters of any source.
pub(crate) fn export_from(
    source: &mut dyn ParameterSource,
    config: &dyn ModelFamily,
    options: &ExportOptions<'_>,
    dir: &Path,
) -> Result<WeightType, ModelError> {
    let types = match (options.weight_type, options.origin) {
        (Some(kind), _) => WeightTypes::all(kind),
        (None, Some(origin)) => WeightTypes::read(origin)?,
        (None, None) => WeightTypes::default(),
    };
    let place = Place::from(Device::flex());
    let layers = config.layers();
    let mut specs = Vec::new();
    for index in 0..layers {
        // The outline reads no values.
        let layer = config.build_stage(index..index + 1, &mut Outline::default(), &place)?;
        specs.extend(parameter_specs(&layer));
    }
    let mut writer = Writer::create_as(dir, config, specs, &types, DEFAULT_SHARD_BYTES)?;
    if let Some(origin) = options.origin {
        writer.add_origin(origin)?;
    }
    for index in 0..layers {
        writer.write_stage(&config.build_stage(index..index + 1, source, &place)?)?;
    }
    writer.finish()?;
    Ok(types.default)
}
