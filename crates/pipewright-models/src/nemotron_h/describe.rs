//! The description of a model as a list of layers with sizes and costs.

use pipewright_schedule::ModelDesc;

use super::config::{BlockKind, Experts, NemotronHConfig};
use crate::cost::{self, BIAS_PASSES, Cost, GATE_PASSES, ModelSizes};
use crate::mamba;

/// Element-wise passes of a rectifier, forward and backward.
const RECTIFIER_PASSES: u64 = GATE_PASSES / 2;

impl NemotronHConfig {
    pub(super) fn describe_layers(&self, sequence: usize) -> ModelDesc {
        let (hidden, tokens) = (self.hidden_size as u64, sequence as u64);
        let vocabulary = self.vocab_size as u64;
        let sizes = ModelSizes { hidden, vocabulary, is_tied: self.tie_word_embeddings, tokens };
        let block = |(index, &kind): (usize, &BlockKind)| {
            // Experts keep rows of the normalised states.
            let is_kept = kind == BlockKind::Experts;
            let norm = if is_kept { cost::norm(hidden) } else { cost::norm_of_products(hidden) };
            let cost = self.mixer_cost(kind, tokens) + norm;
            sizes.block(format!("backbone.layers.{index}"), kind.label(), cost)
        };
        let mut layers = vec![sizes.embedding("backbone.embeddings")];
        layers.extend(self.blocks.iter().enumerate().map(block));
        layers.push(sizes.head(sizes.head_cost()));
        ModelDesc { layers }
    }

    fn mixer_cost(&self, kind: BlockKind, tokens: u64) -> Cost {
        let hidden = self.hidden_size as u64;
        match kind {
            BlockKind::Mamba => self.mamba_cost(),
            BlockKind::Attention => cost::attention(self.attention(), tokens),
            BlockKind::Mlp => self.mlp_cost(),
            BlockKind::Experts => {
                self.experts.as_ref().map_or(Cost::default(), |experts| experts.cost(hidden))
            }
        }
    }

    fn mamba_cost(&self) -> Cost {
        let sizes = self.mamba();
        let biases = if self.use_bias { (sizes.projected() + self.hidden_size) as u64 } else { 0 };
        let further = Cost { parameters: biases, elements: BIAS_PASSES * biases, ..Cost::default() };
        mamba::cost(&sizes, self.hidden_size, self.use_conv_bias) + further
    }

    fn mlp_cost(&self) -> Cost {
        let (hidden, inner) = (self.hidden_size as u64, self.intermediate_size as u64);
        let matrices = 2 * hidden * inner;
        let biases = if self.mlp_bias { hidden + inner } else { 0 };
        Cost {
            parameters: matrices + biases,
            products: 6 * matrices,
            mixing: 0,
            elements: RECTIFIER_PASSES * inner + BIAS_PASSES * biases,
            kept: 2 * inner,
            feed_forward: inner,
            ..Cost::default()
        }
    }
}

impl Experts {
    /// Returns the cost of a block of experts. A token pays for the experts that are chosen for it, for the
    /// shared one, for the router and for the projections around the experts; it is copied for each choice.
    fn cost(&self, hidden: u64) -> Cost {
        let (experts, chosen) = (self.n_routed_experts as u64, self.num_experts_per_tok as u64);
        let (inner, shared) =
            (self.moe_intermediate_size as u64, self.moe_shared_expert_intermediate_size as u64);
        let width = self.moe_latent_size.map_or(hidden, |latent| latent as u64);
        let latent = self.moe_latent_size.map_or(0, |latent| latent as u64);
        let always = 2 * hidden * (shared + latent) + hidden * experts;
        let (active, all) = (2 * width * chosen * inner + always, 2 * width * experts * inner + always);
        let elements = RECTIFIER_PASSES * (chosen * inner + shared) + 6 * chosen * width + 8 * experts;
        Cost {
            parameters: all,
            products: 6 * active,
            mixing: 0,
            elements,
            kept: 2 * (chosen * inner + shared + latent) + 2 * experts + 3 * chosen,
            // Only the shared expert's activation is computed again.
            feed_forward: shared,
            kept_on_devices: cost::mixture_on_devices(chosen, width),
            ..Cost::default()
        }
    }
}

impl BlockKind {
    /// Returns the name in tables of stages.
    fn label(self) -> &'static str {
        match self {
            Self::Mamba => "mamba",
            Self::Attention => "attention",
            Self::Mlp => "mlp",
            Self::Experts => "experts",
        }
    }
}
