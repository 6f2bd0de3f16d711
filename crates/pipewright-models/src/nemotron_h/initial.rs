//! Initial parameters. The parameters of Mamba-2 mixers are drawn as in the Mamba reference, and the others
//! as in every family.

use pipewright_shapes::nemotron_h::NemotronHConfig;

use super::sizes::mamba_sizes;
use crate::error::ModelError;
use crate::init::SeededInit;
use crate::mamba::{MambaInit, uniform};
use crate::parameter::{ParameterSource, ParameterSpec};

/// The initial parameters of a model.
pub(crate) struct InitialParameters<'a> {
    config: &'a NemotronHConfig,
    mixers: MambaInit,
    others: SeededInit,
}

impl<'a> InitialParameters<'a> {
    pub(crate) fn new(config: &'a NemotronHConfig, seed: u64) -> Self {
        let (steps, floor, taps) = (config.time_step_range, config.time_step_floor, config.conv_kernel);
        let others = SeededInit { seed, deviation: config.initializer_range };
        Self { config, mixers: MambaInit { seed, steps, floor, taps }, others }
    }
}

impl ParameterSource for InitialParameters<'_> {
    fn parameter(&mut self, spec: &ParameterSpec) -> Result<Vec<f32>, ModelError> {
        if let Some(values) = self.mixers.parameter(spec) {
            return Ok(values);
        }
        if spec.path.ends_with(".out_proj.weight") {
            let blocks = self.config.blocks.len() as f64;
            let divisor = if self.config.rescale_prenorm_residual { blocks.sqrt() } else { 1.0 };
            let bound = 1.0 / (mamba_sizes(self.config).width() as f64).sqrt() / divisor;
            return Ok(uniform(self.others.seed, spec, bound));
        }
        self.others.parameter(spec)
    }
}
