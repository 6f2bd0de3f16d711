//! The Nemotron-H family as a list of blocks.

use pipewright_schedule::LayerDesc;
use pipewright_shapes::ShapeError;
use pipewright_shapes::family::{self, Family};

use crate::attention::{Attention, AttentionBias, AttentionSizes};
use crate::block::{Attends, Block, Branch, Mixer};
use crate::cost::ModelSizes;
use crate::decoder::{BlockAttentions, BlockForm, DecoderConfig, LayerForm};
use crate::error::ModelError;
use crate::family::Composition;
use crate::head_form::HeadForm;
use crate::init::SeededInit;
use crate::mamba::{MambaBiases, MambaForm, MambaInit, MambaMixer, uniform};
use crate::nemotron_h::{
    BlockKind, LatentExperts, NemotronHConfig, RectifiedLayer, describe_layers, mamba_sizes,
};
use crate::norm::NormForm;
use crate::parameter::{Builder, ParameterSource, ParameterSpec};
use crate::stage::StageLayer;

impl Composition for NemotronHConfig {
    const FAMILY: Family = family::NEMOTRON_H;

    /// Returns a model of Mamba-2 mixers and feed-forward layers in turn, with attention in every eighth
    /// block.
    fn of_sizes(sizes: DecoderConfig) -> Self {
        let kind = |index: usize| match index % 8 {
            6 => BlockKind::Attention,
            kind if kind % 2 == 0 => BlockKind::Mamba,
            _ => BlockKind::Mlp,
        };
        let heads = sizes.num_attention_heads;
        Self {
            vocab_size: sizes.vocab_size,
            hidden_size: sizes.hidden_size,
            blocks: (0..sizes.num_hidden_layers).map(kind).collect(),
            layer_norm_epsilon: sizes.rms_norm_eps,
            tie_word_embeddings: sizes.tie_word_embeddings,
            initializer_range: sizes.initializer_range,
            num_attention_heads: heads,
            num_key_value_heads: sizes.num_key_value_heads,
            head_dim: sizes.head_dim(),
            intermediate_size: sizes.intermediate_size,
            mamba_num_heads: heads,
            mamba_head_dim: 2 * sizes.hidden_size / heads.max(1),
            n_groups: 1,
            ..Self::usual()
        }
    }

    fn check_all(&self) -> Result<(), ShapeError> {
        self.validate()
    }

    fn describe(&self, sizes: &ModelSizes) -> Vec<LayerDesc> {
        describe_layers(self, sizes)
    }

    fn inner_layers(&self) -> usize {
        self.blocks.len()
    }

    fn head(&self) -> HeadForm {
        HeadForm::new(
            ["backbone.norm_f", "backbone.embeddings"],
            NormForm::usual(self.layer_norm_epsilon),
            [self.vocab_size, self.hidden_size],
            self.tie_word_embeddings,
        )
    }

    fn initial(&self, seed: u64) -> Box<dyn ParameterSource + '_> {
        Box::new(InitialParameters::new(self, seed))
    }

    /// Attention has no positions, and heads of an even width.
    fn attentions(&self) -> BlockAttentions {
        // In a model without attention, the width of the heads is not checked.
        let has_attention = self.blocks.contains(&BlockKind::Attention);
        let head_dim = if has_attention { self.head_dim.next_multiple_of(2) } else { 2 };
        let blocks = self.blocks.len();
        let config = DecoderConfig {
            head_dim: Some(head_dim),
            num_hidden_layers: blocks,
            ..DecoderConfig::new(self.vocab_size, self.num_attention_heads)
        };
        let layer = LayerForm { has_positions: false, ..LayerForm::default() };
        BlockAttentions::new(&config, &BlockForm { layers: vec![layer; blocks], ..BlockForm::default() })
    }

    fn build_inner(&self, index: usize, builder: &mut Builder<'_>) -> Result<StageLayer, ModelError> {
        let (path, hidden) = (format!("backbone.layers.{index}"), self.hidden_size);
        let form = NormForm::usual(self.layer_norm_epsilon);
        let norm = builder.form_norm(&format!("{path}.norm"), hidden, form)?;
        let path = format!("{path}.mixer");
        let mixer = match self.blocks[index] {
            // Every rank computes the whole mixer.
            BlockKind::Mamba => {
                let biases = MambaBiases { projections: self.use_bias, convolution: self.use_conv_bias };
                let form = MambaForm { sizes: mamba_sizes(self), biases };
                Mixer::Mamba(MambaMixer::build(form, hidden, &path, builder)?)
            }
            BlockKind::Attention => {
                let (sizes, bias) = (AttentionSizes::from(self), AttentionBias::default());
                Mixer::Attention(Attention::build(sizes, bias, None, false, &path, builder)?)
            }
            BlockKind::Mlp => Mixer::Rectified(RectifiedLayer::build(self, &path, builder)?),
            BlockKind::Experts => Mixer::LatentExperts(LatentExperts::build(self, &path, builder)?),
        };
        let attends = Attends::Causal { block: index, head_dim: self.head_dim };
        Ok(StageLayer::Block(Block { branches: vec![Branch::new(Some(norm), mixer, attends)] }))
    }
}

/// The initial parameters of a model. The parameters of Mamba-2 mixers are drawn as in the Mamba reference,
/// and the others as in every family.
struct InitialParameters<'a> {
    config: &'a NemotronHConfig,
    mixers: MambaInit,
    others: SeededInit,
}

impl<'a> InitialParameters<'a> {
    fn new(config: &'a NemotronHConfig, seed: u64) -> Self {
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
