//! The parameters of a model without their values.

use pipewright::tensor::TensorShard;

use crate::error::ModelError;
use crate::lora::LoraConfig;
use crate::parameter::{HeldValues, ParameterKind, ParameterSource, ParameterSpec};
use crate::quantisation::QuantisedSizes;

/// A source that records the parameters that are asked for. Its parameters have shapes but no storage, so a
/// model of any size can be outlined.
#[derive(Debug, Default)]
pub(crate) struct Outline {
    /// The parameters so far, in the order of the requests. A table that two layers of one stage hold is
    /// listed twice.
    pub(crate) specs: Vec<ParameterSpec>,
    /// The adapters of the model.
    pub(crate) lora: Option<LoraConfig>,
    /// The sizes of quantised matrices.
    quantised: QuantisedSizes,
    /// The paths of the matrices and tables that stages can hold quantised.
    pub(crate) matrices: Vec<String>,
}

impl Outline {
    /// Returns the outline of a model with these adapters, of whose matrices some are quantised.
    pub(crate) fn with(lora: Option<&LoraConfig>, quantised: &QuantisedSizes) -> Self {
        Self { lora: lora.cloned(), quantised: quantised.clone(), ..Self::default() }
    }
}

impl ParameterSource for Outline {
    fn lora(&self) -> Option<&LoraConfig> {
        self.lora.as_ref()
    }

    fn parameter(&mut self, spec: &ParameterSpec) -> Result<Vec<f32>, ModelError> {
        self.specs.push(spec.clone());
        Ok(vec![0.0; spec.shape.iter().product()])
    }

    fn held(&mut self, spec: &ParameterSpec, shard: TensorShard) -> Result<HeldValues, ModelError> {
        let first = spec.shape.get(shard.dimension).map_or(0, |&size| shard.range(size).start);
        self.specs.push(ParameterSpec { shape: shard.shape(&spec.shape), first, ..spec.clone() });
        Ok(HeldValues::Outline)
    }

    fn held_matrix(&mut self, spec: &ParameterSpec, shard: TensorShard) -> Result<HeldValues, ModelError> {
        let values = self.held(spec, shard)?;
        if let Some(outlined) = self.specs.last_mut() {
            self.matrices.push(outlined.path.clone());
            let is_saved = self.lora.as_ref().is_some_and(|lora| lora.saves(&spec.path));
            let is_cut_by_inputs = spec.kind == ParameterKind::Matrix && shard.dimension == 0;
            let quantised =
                self.quantised.bytes_of((&spec.path, &spec.shape), &outlined.shape, is_cut_by_inputs);
            outlined.quantised_bytes = quantised.filter(|_| !is_saved);
            let is_of_rows = !is_cut_by_inputs || shard.is_whole();
            outlined.read_bytes =
                self.quantised.read_bytes(&spec.path, quantised, is_of_rows).filter(|_| !is_saved);
        }
        Ok(values)
    }
}
