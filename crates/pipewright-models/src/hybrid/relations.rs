//! The table of the relations between tokens, which attentions add to their scores.

use burn::module::{Module, Param};
use burn::tensor::Tensor;
use pipewright::tensor::Placement;
use pipewright_shapes::hybrid::HybridConfig;

use crate::error::ModelError;
use crate::parameter::{Builder, ParameterKind};
use crate::split::require_parts;

/// The path of the table of the relations.
pub(crate) const RELATION_BIAS: &str = "model.relation_bias";

/// The table of the relations, `[relations, heads]`.
#[derive(Module, Debug)]
pub(crate) struct RelationBias {
    weight: Param<Tensor<2>>,
}

/// An attention's copy of the table of the relations, `[relations, heads]`. Each attention has its own, so
/// that the sum of their gradients does not depend on the cut. A model directory does not hold them.
#[derive(Module, Debug)]
pub(crate) struct RelationCopy {
    weight: Param<Tensor<2>>,
}

impl RelationBias {
    /// Builds the table, which is split by the heads.
    pub(crate) fn build(config: &HybridConfig, builder: &mut Builder<'_>) -> Result<Self, ModelError> {
        let (heads, ranks) = (config.num_attention_heads, builder.tensor_ranks());
        require_parts(RELATION_BIAS, "weight", ("num_attention_heads", heads), ranks)?;
        let (shape, placement) = ([config.num_relations, heads], Placement::split(1, ranks));
        let weight = builder.placed(RELATION_BIAS, "weight", shape, ParameterKind::Scale, placement)?;
        Ok(Self { weight })
    }

    /// Returns the table.
    pub(crate) fn table(&self) -> Tensor<2> {
        self.weight.val()
    }
}

impl RelationCopy {
    /// Builds a copy of the table.
    pub(crate) fn build(config: &HybridConfig, builder: &mut Builder<'_>) -> Result<Self, ModelError> {
        let RelationBias { weight } = RelationBias::build(config, builder)?;
        builder.mark_copy(&weight);
        Ok(Self { weight })
    }

    /// Returns the table.
    pub(crate) fn table(&self) -> Tensor<2> {
        self.weight.val()
    }
}
