//! Initial parameters. The parameters of Mamba-2 mixers are drawn as in the Mamba reference, the relation
//! bias is zero, and the factor inside the dynamic tanh after the embeddings is one half. The others are
//! drawn as in every family.

use pipewright_shapes::hybrid::HybridConfig;

use crate::error::ModelError;
use crate::init::SeededInit;
use crate::mamba::MambaInit;
use crate::parameter::{ParameterSource, ParameterSpec};

/// The initial parameters of a model.
pub(crate) struct InitialParameters {
    mixers: MambaInit,
    others: SeededInit,
}

impl InitialParameters {
    pub(crate) fn new(config: &HybridConfig, seed: u64) -> Self {
        let mixers = MambaInit { seed, steps: (0.001, 0.1), floor: 0.0, taps: config.conv_kernel };
        Self { mixers, others: SeededInit { seed, deviation: config.initializer_range } }
    }
}

impl ParameterSource for InitialParameters {
    fn parameter(&mut self, spec: &ParameterSpec) -> Result<Vec<f32>, ModelError> {
        if let Some(values) = self.mixers.parameter(spec) {
            return Ok(values);
        }
        let len = spec.shape.iter().product();
        match spec.path.as_str() {
            "model.embed_norm.alpha" => Ok(vec![0.5; len]),
            "model.relation_bias.weight" => Ok(vec![0.0; len]),
            _ => self.others.parameter(spec),
        }
    }
}
