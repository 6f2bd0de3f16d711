//! The description of a model as a list of layers with sizes and costs, for partition, simulation and the estimate of
//! memory.

use pipewright_schedule::{LayerDesc, ModelDesc};

use super::config::{BlockKind, Experts, NemotronHConfig};
use crate::cost::{BIAS_PASSES, ELEMENT, FLOAT, GATE_PASSES, LOSS_PASSES, NORM_PASSES, TOKEN_ID};
use crate::mamba::{mamba_activations, mamba_parameters, mixing_weight};

/// Element-wise passes of a rectifier, forward and backward.
const RECTIFIER_PASSES: u64 = GATE_PASSES / 2;

/// A block's numbers: parameters, operations of a token, and numbers that a token keeps.
struct Cost {
    parameters: u64,
    weight: u64,
    kept: u64,
}

impl NemotronHConfig {
    pub(super) fn describe_layers(&self, sequence: usize) -> ModelDesc {
        let hidden = self.hidden_size as u64;
        let tokens = sequence as u64;
        let table = self.vocab_size as u64 * hidden;
        let embedding = LayerDesc {
            path: "backbone.embeddings".to_owned(),
            kind: "embedding".to_owned(),
            parameters: table,
            // The forward copies a row, and the backward adds to a row.
            weight: 4 * ELEMENT * hidden,
            activation_bytes: tokens * TOKEN_ID,
            output_bytes: tokens * FLOAT * self.hidden_size as u64,
            keys_values_bytes: 0,
        };
        let block = |(index, &kind): (usize, &BlockKind)| {
            let cost = self.mixer_cost(kind, tokens);
            LayerDesc {
                path: format!("backbone.layers.{index}"),
                kind: kind.label().to_owned(),
                parameters: cost.parameters + hidden,
                weight: cost.weight + ELEMENT * NORM_PASSES * hidden,
                activation_bytes: tokens * FLOAT * (cost.kept + 2 * hidden + 1),
                output_bytes: tokens * FLOAT * self.hidden_size as u64,
                keys_values_bytes: 0,
            }
        };
        let vocabulary = self.vocab_size as u64;
        let head = LayerDesc {
            path: "lm_head".to_owned(),
            kind: "head".to_owned(),
            parameters: hidden + if self.tie_word_embeddings { 0 } else { table },
            weight: 6 * table + ELEMENT * (NORM_PASSES * hidden + LOSS_PASSES * vocabulary),
            activation_bytes: tokens * FLOAT * (2 * hidden + 1 + vocabulary + 1),
            output_bytes: tokens * FLOAT * self.vocab_size as u64,
            keys_values_bytes: 0,
        };
        let blocks = self.blocks.iter().enumerate().map(block);
        ModelDesc { layers: std::iter::once(embedding).chain(blocks).chain([head]).collect() }
    }

    fn mixer_cost(&self, kind: BlockKind, sequence: u64) -> Cost {
        match kind {
            BlockKind::Mamba => self.mamba_cost(),
            BlockKind::Attention => self.attention_cost(sequence),
            BlockKind::Mlp => self.mlp_cost(),
            BlockKind::Experts => {
                self.experts.as_ref().map_or(Cost { parameters: 0, weight: 0, kept: 0 }, |experts| {
                    experts.cost(self.hidden_size as u64)
                })
            }
        }
    }

    fn mamba_cost(&self) -> Cost {
        let sizes = self.mamba();
        let (matrices, others) = mamba_parameters(&sizes, self.hidden_size, self.use_conv_bias);
        let biases = if self.use_bias { (sizes.projected() + self.hidden_size) as u64 } else { 0 };
        Cost {
            parameters: matrices + others + biases,
            weight: 6 * matrices + mixing_weight(&sizes) + ELEMENT * BIAS_PASSES * biases,
            kept: mamba_activations(&sizes),
        }
    }

    /// Each pair of a query channel and one of the `sequence / 2` keys that a token sees on average takes part in three
    /// multiply-adds, once for the scores and once for the values.
    fn attention_cost(&self, sequence: u64) -> Cost {
        let (heads, head_dim) = (self.num_attention_heads as u64, self.head_dim as u64);
        let (queries, keys) = (heads * head_dim, self.num_key_value_heads as u64 * head_dim);
        let matrices = 2 * self.hidden_size as u64 * (queries + keys);
        Cost {
            parameters: matrices,
            weight: 6 * matrices + 6 * sequence * queries,
            kept: 2 * queries + 2 * keys + heads,
        }
    }

    fn mlp_cost(&self) -> Cost {
        let (hidden, inner) = (self.hidden_size as u64, self.intermediate_size as u64);
        let matrices = 2 * hidden * inner;
        let biases = if self.mlp_bias { hidden + inner } else { 0 };
        Cost {
            parameters: matrices + biases,
            weight: 6 * matrices + ELEMENT * (RECTIFIER_PASSES * inner + BIAS_PASSES * biases),
            kept: 2 * inner,
        }
    }
}

impl Experts {
    /// Returns the cost of a block of experts. A token pays for the experts that are chosen for it, for the shared one,
    /// for the router and for the projections around the experts; it is copied for each choice.
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
            // The correction of the scores is one number for each expert.
            parameters: all + experts,
            weight: 6 * active + ELEMENT * elements,
            kept: 2 * (chosen * inner + shared + latent) + 2 * experts + 3 * chosen,
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
