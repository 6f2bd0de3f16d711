//! The Nemotron-H family as a list of blocks.

use pipewright_schedule::ModelDesc;
use pipewright_shapes::ShapeError;
use pipewright_shapes::family::{self, Family};

use crate::attention::{Attention, AttentionBias, AttentionSizes};
use crate::block::{Attends, Block, Branch, Mixer};
use crate::decoder::{BlockAttentions, BlockForm, DecoderConfig, LayerForm};
use crate::error::ModelError;
use crate::family::Composition;
use crate::head_form::HeadForm;
use crate::mamba::{MambaBiases, build_mamba};
use crate::nemotron_h::{
    BlockKind, InitialParameters, LatentExperts, NemotronHConfig, RectifiedLayer, describe_layers,
    mamba_sizes,
};
use crate::norm::NormForm;
use crate::parameter::{Builder, ParameterSource};
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
            mlp_bias: false,
            mamba_num_heads: heads,
            mamba_head_dim: 2 * sizes.hidden_size / heads.max(1),
            n_groups: 1,
            ssm_state_size: 128,
            conv_kernel: 4,
            use_conv_bias: true,
            use_bias: false,
            time_step_limit: (0.0, f64::INFINITY),
            time_step_range: (0.001, 0.1),
            time_step_floor: 1e-4,
            rescale_prenorm_residual: true,
            experts: None,
        }
    }

    fn check_all(&self) -> Result<(), ShapeError> {
        self.validate()
    }

    fn describe(&self, sequence: usize) -> ModelDesc {
        describe_layers(self, sequence)
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
                Mixer::Mamba(build_mamba(mamba_sizes(self), hidden, biases, &path, builder)?)
            }
            BlockKind::Attention => {
                let (sizes, bias) = (AttentionSizes::from(self), AttentionBias::default());
                Mixer::Attention(Attention::build(sizes, bias, None, &path, builder)?)
            }
            BlockKind::Mlp => Mixer::Rectified(RectifiedLayer::build(self, &path, builder)?),
            BlockKind::Experts => Mixer::LatentExperts(LatentExperts::build(self, &path, builder)?),
        };
        let attends = Attends::Causal { block: index, head_dim: self.head_dim };
        Ok(StageLayer::Block(Block { branches: vec![Branch::new(Some(norm), mixer, attends)] }))
    }
}
