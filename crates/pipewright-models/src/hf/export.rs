//! From a checkpoint to a directory, layer by layer: no more than one layer is held at a time.

use std::path::Path;
use std::sync::Arc;

use burn::tensor::{DType, Device};
use pipewright::checkpoint::Checkpoint;

use super::{DEFAULT_SHARD_BYTES, HfError, Writer};
use crate::family::ModelFamily;
use crate::parameter::{ParameterSource, ParameterSpec, parameter_specs};

/// Writes the model of a checkpoint into `dir`, which must not exist or be empty.
///
/// # Errors
/// When the checkpoint is not of `config`'s model, or as [`Writer`]'s functions.
pub fn export<F: ModelFamily>(checkpoint: &Checkpoint, config: &F, dir: &Path) -> Result<(), HfError> {
    let device = Device::flex();
    // The sequence length plays a part in costs alone.
    let layers = config.describe(1).layers.len();
    let layer = |index| config.build_stage(index..index + 1, &mut Stored(checkpoint), &device);
    let mut specs = Vec::new();
    for index in 0..layers {
        specs.extend(parameter_specs(&layer(index)?));
    }
    let mut writer = Writer::create(dir, config, specs, DEFAULT_SHARD_BYTES)?;
    for index in 0..layers {
        writer.write_stage(&layer(index)?)?;
    }
    writer.finish()
}

/// A checkpoint's parameters as a stage asks for them: paths and layouts are the same in both.
struct Stored<'a>(&'a Checkpoint);

impl ParameterSource for Stored<'_> {
    type Error = HfError;

    fn parameter(&mut self, spec: &ParameterSpec) -> Result<Vec<f32>, HfError> {
        let data = self.0.parameter(&Arc::from(spec.path.as_str()), &spec.shape, DType::F32)?;
        Ok(data.iter().collect())
    }
}
