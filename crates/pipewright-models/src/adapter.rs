//! Adapters on a model: their settings, the source of their first values, and the source of all parameters of
//! a model with adapters.

use std::path::PathBuf;

use pipewright::tensor::TensorShard;

use crate::hf::{AdapterWeights, HfError};
use crate::init::adapter_values;
use crate::lora::{LoraConfig, is_of_adapter};
use crate::parameter::{ParameterSource, ParameterSpec};

/// The adapters of a model whose own parameters do not change.
#[derive(Clone, Debug, PartialEq)]
pub struct Adapter {
    /// The settings.
    pub lora: LoraConfig,
    /// The source of the values with which training starts.
    pub start: AdapterStart,
}

/// The source of the values with which the training of adapters starts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AdapterStart {
    /// New adapters, which add zero: the first matrix is random and depends on the seed, and the second one
    /// is zero.
    Seed(u64),
    /// The adapters in a PEFT directory.
    Directory(PathBuf),
}

/// The parameters of a model and of its adapters.
pub(crate) struct AdaptedSource<'a, S> {
    base: S,
    lora: &'a LoraConfig,
    values: Values,
}

enum Values {
    Seed(u64),
    Weights(AdapterWeights),
}

impl<'a, S> AdaptedSource<'a, S> {
    /// Adds the adapters to the parameters in `base`.
    pub(crate) fn new(base: S, adapter: &'a Adapter) -> Result<Self, HfError> {
        let values = match &adapter.start {
            AdapterStart::Seed(seed) => Values::Seed(*seed),
            AdapterStart::Directory(dir) => Values::Weights(AdapterWeights::open(dir)?),
        };
        Ok(Self { base, lora: &adapter.lora, values })
    }
}

impl<S: ParameterSource> ParameterSource for AdaptedSource<'_, S>
where
    HfError: From<S::Error>,
{
    type Error = HfError;

    fn lora(&self) -> Option<&LoraConfig> {
        Some(self.lora)
    }

    fn parameter(&mut self, spec: &ParameterSpec) -> Result<Vec<f32>, HfError> {
        match &mut self.values {
            _ if !is_of_adapter(&spec.path) => Ok(self.base.parameter(spec)?),
            Values::Seed(seed) => Ok(adapter_values(*seed, spec)),
            Values::Weights(weights) => weights.parameter(spec),
        }
    }

    fn shard_of(&mut self, spec: &ParameterSpec, shard: TensorShard) -> Result<Vec<f32>, HfError> {
        if is_of_adapter(&spec.path) {
            return Ok(shard.cut(self.parameter(spec)?, &spec.shape));
        }
        Ok(self.base.shard_of(spec, shard)?)
    }
}
