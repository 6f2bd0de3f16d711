//! Adapters on a model: their settings, the source of their first values, and the source of all parameters of
//! a model with adapters.

use std::path::PathBuf;

use burn::tensor::{DType, Device, Tensor, TensorData};
use pipewright::checkpoint::Checkpoint;
use pipewright::memory::StreamedMatrix;
use pipewright::nn::sum_dim;
use pipewright::tensor::TensorShard;
use pipewright_kernel::quantised::QuantisedMatrix;

use crate::error::ModelError;
use crate::hf::{AdapterWeights, Stored};
use crate::init::adapter_values;
use crate::lora::{LoraConfig, is_of_adapter};
use crate::parameter::{HeldValues, ParameterSource, ParameterSpec};
use crate::split::Place;
use crate::stage::stays_in_single_precision;

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
pub(crate) struct AdaptedSource<'a> {
    base: Box<dyn ParameterSource + 'a>,
    lora: &'a LoraConfig,
    values: Values<'a>,
    place: &'a Place,
}

#[expect(clippy::large_enum_variant, reason = "a stage has one")]
enum Values<'a> {
    Seed(u64),
    Weights(AdapterWeights),
    Stored(Stored<'a>),
}

impl<'a> AdaptedSource<'a> {
    /// Adds the adapters to the parameters in `base`, which are rounded to the precision in which their stage
    /// computes ([`stays_in_single_precision`]). Ranks of one process share the base.
    pub(crate) fn new(
        base: Box<dyn ParameterSource + 'a>,
        adapter: &'a Adapter,
        place: &'a Place,
    ) -> Result<Self, ModelError> {
        let values = match &adapter.start {
            AdapterStart::Seed(seed) => Values::Seed(*seed),
            AdapterStart::Directory(dir) => Values::Weights(AdapterWeights::open(dir)?),
        };
        Ok(Self { base, lora: &adapter.lora, values, place })
    }

    /// Adds the adapters of a checkpoint to the parameters in `base`.
    pub(crate) fn of_checkpoint(
        base: Box<dyn ParameterSource + 'a>,
        lora: &'a LoraConfig,
        checkpoint: &'a Checkpoint,
        place: &'a Place,
    ) -> Self {
        Self { base, lora, values: Values::Stored(Stored(checkpoint)), place }
    }
}

impl ParameterSource for AdaptedSource<'_> {
    fn lora(&self) -> Option<&LoraConfig> {
        Some(self.lora)
    }

    fn parameter(&mut self, spec: &ParameterSpec) -> Result<Vec<f32>, ModelError> {
        match &mut self.values {
            _ if !self.lora.trains(&spec.path) => self.base.parameter(spec),
            Values::Seed(seed) if is_of_adapter(&spec.path) => Ok(adapter_values(*seed, spec)),
            // A module that is trained whole starts as it is.
            Values::Seed(_) => self.base.parameter(spec),
            // Adapters of a model that continued texts have no head of labels.
            Values::Weights(weights) if !is_of_adapter(&spec.path) && !weights.has(spec) => {
                self.base.parameter(spec)
            }
            Values::Weights(weights) => weights.parameter(spec),
            Values::Stored(stored) => stored.parameter(spec),
        }
    }

    fn shard_of(&mut self, spec: &ParameterSpec, shard: TensorShard) -> Result<Vec<f32>, ModelError> {
        if self.lora.trains(&spec.path) {
            return Ok(shard.cut(self.parameter(spec)?, &spec.shape));
        }
        self.base.shard_of(spec, shard)
    }

    fn held(&mut self, spec: &ParameterSpec, shard: TensorShard) -> Result<HeldValues, ModelError> {
        let data = self.data(spec, shard)?;
        if self.lora.trains(&spec.path) {
            return Ok(HeldValues::Trained(data));
        }
        let half = self.place.precision.half().filter(|_| !stays_in_single_precision(&spec.path));
        Ok(HeldValues::Frozen(data, half))
    }

    fn quantised(
        &mut self,
        spec: &ParameterSpec,
        shard: TensorShard,
    ) -> Result<Option<QuantisedMatrix>, ModelError> {
        if self.lora.saves(&spec.path) { Ok(None) } else { self.base.quantised(spec, shard) }
    }

    fn streamed(
        &mut self,
        spec: &ParameterSpec,
        shard: TensorShard,
    ) -> Result<Option<StreamedMatrix>, ModelError> {
        if self.lora.saves(&spec.path) { Ok(None) } else { self.base.streamed(spec, shard) }
    }

    /// New adapters start with the norms of the columns of the base as it computes, so that they change
    /// nothing.
    fn magnitudes(
        &mut self,
        spec: &ParameterSpec,
        matrix: &ParameterSpec,
        shard: TensorShard,
    ) -> Result<HeldValues, ModelError> {
        let values = match &mut self.values {
            Values::Weights(weights) => weights.parameter(spec)?,
            Values::Stored(stored) => stored.parameter(spec)?,
            Values::Seed(_) => {
                let base = TensorData::new(self.base.parameter(matrix)?, matrix.shape.clone());
                let base = Tensor::<2>::from_data(base, &Device::flex());
                let rounded = match self.place.precision.half() {
                    Some(half) => base.cast(half).cast(DType::F32),
                    None => base,
                };
                sum_dim(rounded.square(), 0).sqrt().into_data().iter::<f32>().collect()
            }
        };
        let shape = shard.shape(&spec.shape);
        Ok(HeldValues::Trained(TensorData::new(shard.cut(values, &spec.shape), shape)))
    }
}

#[cfg(test)]
mod tests {
    use pipewright::stage::StageModule;
    use pipewright::tensor::Precision;
    use serde_json::json;

    use super::*;
    use crate::decoder::DecoderConfig;
    use crate::family::ModelFamily;
    use crate::hf;
    use crate::qwen3_moe::Qwen3MoeConfig;
    use crate::stage::{StageLayer, visit_parameters};

    /// Checks that each parameter of a model with experts has the element type in which its stage computes.
    fn check(precision: Precision, expected: DType) {
        let mut json = ModelFamily::to_json(&Qwen3MoeConfig::from(DecoderConfig::new(32, 4)));
        json["mlp_only_layers"] = json!([0]);
        let config = Qwen3MoeConfig::from_json(json).expect("it is a model");
        let lora = LoraConfig { rank: 2, dora: true, ..LoraConfig::default() };
        let adapter = Adapter { lora, start: AdapterStart::Seed(1) };
        let place = Place { precision, ..Device::flex().autodiff().into() };
        let source = AdaptedSource::new(ModelFamily::initial(&config, 3), &adapter, &place);
        let mut source = source.expect("no file");
        let stage = config.build_stage(0..config.layers(), &mut source, &place).expect("a stage");
        let mut types = Vec::new();
        visit_parameters(&stage, |spec, _, data| types.push((spec.path, data().dtype())));
        assert!(types.iter().any(|(path, _)| path.ends_with(".mlp.gate.weight")), "{types:?}");
        for (path, found) in types {
            let expected = if stage.stays_in_single_precision(&path) { DType::F32 } else { expected };
            assert_eq!(found, expected, "{path}");
        }
    }

    /// A mixer has no parameters if its matrices are quantised and it has no adapters.
    #[test]
    fn mixers_of_a_quantised_base_keep_their_paths() {
        let dir = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/llama-nf4"));
        let config = crate::ModelConfig::read(&dir).expect("a model");
        let lora = LoraConfig {
            rank: 2,
            targets: crate::LoraTargets::Named(vec!["q_proj".to_owned().into()]),
            ..LoraConfig::default()
        };
        let adapter = Adapter { lora, start: AdapterStart::Seed(1) };
        let place = Place::from(Device::flex());
        let base = hf::open_weights(&dir, &*config).expect("weights").keeping_quantised();
        let mut source = AdaptedSource::new(Box::new(base), &adapter, &place).expect("no file");
        let stage = config.build_stage(1..2, &mut source, &place).expect("a stage");
        let StageLayer::Block(block) = &stage.layers[0] else { panic!("layer 1 is a block") };
        let paths: Vec<&str> = block.branches.iter().map(|branch| &*branch.path).collect();
        assert_eq!(paths, ["model.layers.0.self_attn", "model.layers.0.mlp"]);
    }

    #[test]
    fn the_base_is_made_in_the_precision_in_which_it_computes() {
        check(Precision::F32, DType::F32);
        check(Precision::Bf16, DType::BF16);
        check(Precision::F16, DType::F16);
    }
}
