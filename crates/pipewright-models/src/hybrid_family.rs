//! The hybrid family as a list of blocks and further predictions.

use pipewright::nn::ScopedAttention;
use pipewright::train::data::{DataError, SideRows};
use pipewright_schedule::LayerDesc;
use pipewright_shapes::ShapeError;
use pipewright_shapes::family::{self, Family};

use crate::attention::{Attention, AttentionBias, AttentionSizes};
use crate::block::{Attends, Block, Branch, Mixer};
use crate::cost::ModelSizes;
use crate::decoder::DecoderConfig;
use crate::embedding_layer::EmbeddingLayer;
use crate::error::ModelError;
use crate::family::Composition;
use crate::head_form::{HeadForm, prediction_path};
use crate::hybrid::{
    BlockKind, Depths, ExpertMixer, FurtherEmbeddings, HybridConfig, Pattern, RelationBias, RelationCopy,
    check_side, describe_layers, further, mamba_sizes, scoped_attention,
};
use crate::init::SeededInit;
use crate::mamba::{MambaBiases, MambaForm, MambaInit, MambaMixer};
use crate::norm::NormForm;
use crate::parameter::{Builder, ParameterSource, ParameterSpec};
use crate::prediction::Prediction;
use crate::split::require_parts;
use crate::stage::StageLayer;

/// The path of the embedding.
const EMBEDDING: &str = "model.embed_tokens";

impl Composition for HybridConfig {
    const FAMILY: Family = family::HYBRID;

    /// Returns a model of attention and feed-forward layers in turn: `num_hidden_layers` of each.
    fn of_sizes(sizes: DecoderConfig) -> Self {
        let pattern = "AD".repeat(sizes.num_hidden_layers.max(1));
        Self {
            num_attention_heads: sizes.num_attention_heads,
            num_key_value_heads: Some(sizes.num_key_value_heads),
            head_dim: sizes.head_dim,
            intermediate_size: sizes.intermediate_size,
            rms_norm_eps: sizes.rms_norm_eps,
            rope_theta: sizes.rope_theta,
            initializer_range: sizes.initializer_range,
            tie_word_embeddings: sizes.tie_word_embeddings,
            ..Self::new(
                sizes.vocab_size,
                sizes.hidden_size,
                Pattern::new(&pattern).expect("its letters are known"),
            )
        }
    }

    fn check_all(&self) -> Result<(), ShapeError> {
        self.validate()
    }

    fn describe(&self, sizes: &ModelSizes) -> Vec<LayerDesc> {
        describe_layers(self, sizes)
    }

    fn inner_layers(&self) -> usize {
        self.blocks().len() + self.prediction_depth()
    }

    fn head(&self) -> HeadForm {
        let sizes = [self.vocab_size, self.hidden_size];
        let form = NormForm::usual(self.rms_norm_eps);
        let head = HeadForm::new(["model.norm", EMBEDDING], form, sizes, self.tie_word_embeddings);
        HeadForm { further: further(self), ..head }
    }

    fn initial(&self, seed: u64) -> Box<dyn ParameterSource + '_> {
        Box::new(InitialParameters::new(self, seed))
    }

    fn check_side(&self, side: &SideRows, sequence: usize) -> Result<(), DataError> {
        check_side(self, side, sequence)
    }

    fn cuts(&self) -> Option<Vec<usize>> {
        // The embeddings are the layer before the first block.
        Some(self.pattern.cuts().iter().map(|blocks| blocks + 1).collect())
    }

    /// Leaves out the predictions of further tokens, which need the next token to predict the one after it.
    fn for_generation(&self) -> Self {
        Self { mtp_loss_weight: 0.0, ..self.clone() }
    }

    fn hybrid(&self) -> Option<HybridConfig> {
        Some(self.clone())
    }

    /// Every rank has the other tables.
    fn add_embeddings(
        &self,
        layer: &mut EmbeddingLayer,
        builder: &mut Builder<'_>,
    ) -> Result<(), ModelError> {
        if self.embed_scale {
            layer.factor = (self.hidden_size as f64).sqrt();
        }
        layer.further = Some(FurtherEmbeddings::build(self, builder)?);
        if self.num_relations > 0 {
            layer.relation_bias = Some(RelationBias::build(self, builder)?);
        }
        Ok(())
    }

    fn build_inner(&self, index: usize, builder: &mut Builder<'_>) -> Result<StageLayer, ModelError> {
        // The further predictions follow the blocks.
        if let (Some(index), Some(kind)) = (index.checked_sub(self.blocks().len()), self.prediction_block()) {
            let (depth, rope_theta) = (index + 1, Some(self.rope_theta));
            let attention = ScopedAttention { head_dim: self.head_dim(), rope_theta, window: None };
            let path = format!("{}.block", prediction_path(depth));
            let block = Block { branches: vec![branch(self, kind, attention, &path, builder)?] };
            let prediction = Prediction::build(self, block, depth, EMBEDDING, builder)?;
            return Ok(StageLayer::Prediction(prediction));
        }
        let (path, kind) = (format!("model.layers.{index}"), self.blocks()[index]);
        let mut branch = branch(self, kind, scoped_attention(self, index), &path, builder)?;
        if kind == BlockKind::Attention && self.num_relations > 0 {
            branch.relation = Some(RelationCopy::build(self, builder)?);
        }
        if self.mod_layers.contains(&index) {
            branch.depths = Some(Depths {
                router: builder.linear(&format!("{path}.mod_router"), self.hidden_size, 1)?,
                path,
                capacity: self.mod_capacity_factor,
                weight: self.mod_aux_loss_weight,
                share: 1.0 / self.mod_layers.len().max(1) as f64,
            });
        }
        Ok(StageLayer::Block(Block { branches: vec![branch] }))
    }
}

/// Builds the branch of a block that all tokens pass.
fn branch(
    config: &HybridConfig,
    kind: BlockKind,
    attention: ScopedAttention,
    path: &str,
    builder: &mut Builder<'_>,
) -> Result<Branch, ModelError> {
    let hidden = config.hidden_size;
    let norm = builder.form_norm(&format!("{path}.norm"), hidden, NormForm::usual(config.rms_norm_eps))?;
    let path = format!("{path}.mixer");
    let mixer = match kind {
        // Every rank computes the whole mixer.
        BlockKind::Mamba => {
            let biases = MambaBiases { projections: false, convolution: true };
            let form = MambaForm { sizes: mamba_sizes(config), biases };
            Mixer::Mamba(MambaMixer::build(form, hidden, &path, builder)?)
        }
        BlockKind::Attention => {
            let (sizes, bias) = (AttentionSizes::from(config), AttentionBias::default());
            Mixer::Attention(Attention::build(sizes, bias, None, false, &path, builder)?)
        }
        BlockKind::Dense => {
            let inner = config.intermediate_size;
            let size = ("intermediate_size", inner);
            require_parts(&path, "gate_proj.weight", size, builder.tensor_ranks())?;
            Mixer::Gated(builder.split_expert(&path, [hidden, inner], true)?)
        }
        BlockKind::Experts => Mixer::Experts(ExpertMixer::build(config, &path, builder)?),
    };
    Ok(Branch::new(Some(norm), mixer, Attends::Scoped(attention)))
}

/// The initial parameters of a model. The parameters of Mamba-2 mixers are drawn as in the Mamba reference,
/// the relation bias is zero, and the factor inside the dynamic tanh after the embeddings is one half. The
/// others are drawn as in every family.
struct InitialParameters {
    mixers: MambaInit,
    others: SeededInit,
}

impl InitialParameters {
    fn new(config: &HybridConfig, seed: u64) -> Self {
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
