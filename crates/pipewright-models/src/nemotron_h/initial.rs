//! Initial parameters. Those of Mamba-2 mixers are drawn as in the Mamba reference, so that states of many lengths of
//! memory are there from the start; the others as in every family.

use super::config::NemotronHConfig;
use crate::error::ConfigError;
use crate::init::{SeededInit, Uniform};
use crate::parameter::{ParameterSource, ParameterSpec};

/// The initial parameters of a model.
pub(super) struct InitialParameters<'a> {
    pub(super) config: &'a NemotronHConfig,
    pub(super) others: SeededInit,
}

impl InitialParameters<'_> {
    fn uniform(&self, spec: &ParameterSpec, bound: f64) -> Vec<f32> {
        let mut uniform = Uniform::new(self.others.seed, &spec.path);
        let len = spec.shape.iter().product();
        (0..len).map(|_| ((2.0 * uniform.next() - 1.0) * bound) as f32).collect()
    }

    /// The inverse of the softplus of steps whose logarithms are uniform.
    fn step_biases(&self, spec: &ParameterSpec) -> Vec<f32> {
        let (low, high) = self.config.time_step_range;
        let mut uniform = Uniform::new(self.others.seed, &spec.path);
        let bias = |_| {
            let step = (low.ln() + uniform.next() * (high / low).ln()).exp().max(self.config.time_step_floor);
            (step + (-(-step).exp_m1()).ln()) as f32
        };
        (0..spec.shape[0]).map(bias).collect()
    }
}

impl ParameterSource for InitialParameters<'_> {
    type Error = ConfigError;

    fn parameter(&mut self, spec: &ParameterSpec) -> Result<Vec<f32>, ConfigError> {
        let names: Vec<&str> = spec.path.rsplit('.').take(2).collect();
        Ok(match names.as_slice() {
            ["A_log", ..] => (1..=spec.shape[0]).map(|head| (head as f64).ln() as f32).collect(),
            ["dt_bias", ..] => self.step_biases(spec),
            ["e_score_correction_bias", ..] => vec![0.0; spec.shape[0]],
            [_, "conv1d"] => self.uniform(spec, 1.0 / (self.config.conv_kernel as f64).sqrt()),
            ["weight", "out_proj"] => {
                let blocks = self.config.blocks.len() as f64;
                let divisor = if self.config.rescale_prenorm_residual { blocks.sqrt() } else { 1.0 };
                self.uniform(spec, 1.0 / (self.config.mamba().width() as f64).sqrt() / divisor)
            }
            _ => self.others.parameter(spec)?,
        })
    }
}
