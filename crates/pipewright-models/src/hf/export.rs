//! Writes a checkpoint as a model directory, layer by layer: only one layer is in memory at a time.

use std::path::Path;
use std::sync::Arc;

use burn::tensor::{DType, Device};
use pipewright::checkpoint::Checkpoint;

use super::{DEFAULT_SHARD_BYTES, HfError, Writer};
use crate::family::ModelFamily;
use crate::parameter::{ParameterSource, ParameterSpec, parameter_specs};

/// Writes the model of a checkpoint into `dir`, which must be empty or not exist. `origin` is a folder that
/// [`super::keep_origin`] filled; its tokenizer, its generation settings and the further keys of its `config.json` are
/// written too.
///
/// # Errors
/// When the checkpoint does not belong to `config`'s model, or as [`Writer`]'s functions.
pub fn export<F: ModelFamily>(
    checkpoint: &Checkpoint,
    config: &F,
    origin: Option<&Path>,
    dir: &Path,
) -> Result<(), HfError> {
    let device = Device::flex();
    // Only costs depend on the sequence length.
    let layers = config.describe(1).layers.len();
    let layer = |index| config.build_stage(index..index + 1, &mut Stored(checkpoint), &device);
    let mut specs = Vec::new();
    for index in 0..layers {
        specs.extend(parameter_specs(&layer(index)?));
    }
    let mut writer = Writer::create(dir, config, specs, DEFAULT_SHARD_BYTES)?;
    if let Some(origin) = origin {
        writer.add_origin(config, origin)?;
    }
    for index in 0..layers {
        writer.write_stage(&layer(index)?)?;
    }
    writer.finish()
}

/// The parameters of a checkpoint as a source for a stage: paths and layouts are the same in both.
pub(super) struct Stored<'a>(pub(super) &'a Checkpoint);

impl ParameterSource for Stored<'_> {
    type Error = HfError;

    fn parameter(&mut self, spec: &ParameterSpec) -> Result<Vec<f32>, HfError> {
        let data = self.0.parameter(&Arc::from(spec.path.as_str()), &spec.shape, DType::F32)?;
        Ok(data.iter().collect())
    }
}
