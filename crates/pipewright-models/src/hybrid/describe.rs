//! The description of a model as a list of layers with sizes and costs, for partition, simulation and the estimate of
//! memory. Parameters that several stages share are counted with the embeddings only.

use pipewright_schedule::{LayerDesc, ModelDesc};

use super::config::{EmbedNorm, HybridConfig};
use super::pattern::BlockKind;
use crate::cost::{ELEMENT, FLOAT, GATE_PASSES, LOSS_PASSES, NORM_PASSES, TOKEN_ID};
use crate::mamba::{mamba_activations, mamba_parameters, mixing_weight};

/// A part's numbers: parameters, operations of a token, and numbers that a token keeps.
#[derive(Clone, Copy, Default)]
struct Cost {
    parameters: u64,
    weight: u64,
    kept: u64,
}

impl HybridConfig {
    pub(super) fn describe_layers(&self, sequence: usize) -> ModelDesc {
        let tokens = sequence as u64;
        let embedding = LayerDesc {
            path: "model.embed_tokens".to_owned(),
            kind: "embedding".to_owned(),
            parameters: self.embedding_parameters(),
            // For each table the forward copies a row, and the backward adds to a row.
            weight: ELEMENT * self.hidden_size as u64 * (4 * self.tables() + NORM_PASSES),
            activation_bytes: tokens * (TOKEN_ID * self.tables() + 2 * FLOAT * self.hidden_size as u64),
            output_bytes: tokens * FLOAT * self.hidden_size as u64,
            keys_values_bytes: 0,
        };
        let block = |index: usize| {
            let cost = self.block_cost(index, tokens);
            LayerDesc {
                path: format!("model.layers.{index}"),
                kind: self.blocks()[index].label().to_owned(),
                parameters: cost.parameters,
                weight: cost.weight,
                activation_bytes: tokens * FLOAT * cost.kept,
                output_bytes: tokens * FLOAT * self.hidden_size as u64,
                keys_values_bytes: 0,
            }
        };
        let head = self.head_cost(tokens);
        let head = LayerDesc {
            path: "lm_head".to_owned(),
            kind: "head".to_owned(),
            parameters: head.parameters,
            weight: head.weight,
            activation_bytes: tokens * FLOAT * head.kept,
            output_bytes: tokens * FLOAT * self.vocab_size as u64,
            keys_values_bytes: 0,
        };
        let blocks = (0..self.blocks().len()).map(block);
        ModelDesc { layers: std::iter::once(embedding).chain(blocks).chain([head]).collect() }
    }

    /// Returns the number of tables that a token's embedding is the sum of.
    fn tables(&self) -> u64 {
        let platform = usize::from(self.platform_vocab_size > 0);
        (1 + self.ngram_orders.len() + self.structure_vocab_sizes.len() + platform) as u64
    }

    fn embedding_parameters(&self) -> u64 {
        let structures: usize = self.structure_vocab_sizes.values().sum();
        let ngrams = self.ngram_orders.len() * self.ngram_buckets;
        let rows = self.vocab_size + ngrams + structures + self.platform_vocab_size;
        let norm = match self.embed_norm {
            EmbedNorm::None => 0,
            EmbedNorm::Rms => self.hidden_size,
            EmbedNorm::Dyt => 2 * self.hidden_size + 1,
        };
        (rows * self.hidden_size + norm + self.num_relations * self.num_attention_heads) as u64
    }

    /// Returns the cost of a block. A block that only some tokens pass costs that share of a whole block, and its
    /// router.
    fn block_cost(&self, index: usize, tokens: u64) -> Cost {
        let whole = self.mixer_cost(self.blocks()[index], self.attention(index).window, tokens);
        if !self.mod_layers.contains(&index) {
            return whole;
        }
        let hidden = self.hidden_size as u64;
        let share = |cost: u64| (cost as f64 * self.mod_capacity_factor) as u64;
        Cost {
            parameters: whole.parameters + hidden,
            weight: share(whole.weight) + 6 * hidden + 8 * ELEMENT * hidden,
            kept: share(whole.kept) + 2 * hidden,
        }
    }

    /// Returns the cost of a mixer with its norm.
    fn mixer_cost(&self, kind: BlockKind, window: Option<usize>, tokens: u64) -> Cost {
        let hidden = self.hidden_size as u64;
        let mixer = match kind {
            BlockKind::Attention => self.attention_cost(window, tokens),
            BlockKind::Mamba => self.mamba_cost(),
            BlockKind::Dense => gated(hidden, self.intermediate_size as u64),
            BlockKind::Experts => self.experts_cost(),
        };
        Cost {
            parameters: mixer.parameters + hidden,
            weight: mixer.weight + ELEMENT * NORM_PASSES * hidden,
            kept: mixer.kept + 2 * hidden + 1,
        }
    }

    /// Returns the cost of an attention. Each pair of a query channel and a key that a token sees takes part in three
    /// multiply-adds, once for the scores and once for the values. A token sees half of the row on average, or its
    /// window.
    fn attention_cost(&self, window: Option<usize>, tokens: u64) -> Cost {
        let (heads, head_dim) = (self.num_attention_heads as u64, self.head_dim() as u64);
        let (queries, keys) = (heads * head_dim, self.kv_heads() as u64 * head_dim);
        let matrices = 2 * self.hidden_size as u64 * (queries + keys);
        let seen = window.map_or(tokens, |window| (2 * window as u64).min(tokens));
        Cost {
            parameters: matrices,
            weight: 6 * matrices + 6 * seen * queries,
            kept: 2 * queries + 2 * keys + heads,
        }
    }

    fn mamba_cost(&self) -> Cost {
        let sizes = self.mamba();
        let (matrices, others) = mamba_parameters(&sizes, self.hidden_size, true);
        Cost {
            parameters: matrices + others,
            weight: 6 * matrices + mixing_weight(&sizes),
            kept: mamba_activations(&sizes),
        }
    }

    /// Returns the cost of a block of experts. A token pays for the experts that are chosen for it, for the shared one
    /// and for the router.
    fn experts_cost(&self) -> Cost {
        let hidden = self.hidden_size as u64;
        let (experts, chosen) = (self.num_experts as u64, self.num_experts_per_tok as u64);
        let expert = gated(hidden, self.moe_intermediate_size as u64);
        let shared = match self.shared_expert_intermediate_size {
            0 => Cost::default(),
            inner => gated(hidden, inner as u64),
        };
        Cost {
            parameters: experts * (expert.parameters + hidden) + shared.parameters,
            weight: chosen * (expert.weight + 6 * ELEMENT * hidden)
                + shared.weight
                + experts * (6 * hidden + LOSS_PASSES * ELEMENT),
            kept: chosen * (expert.kept + 3) + shared.kept + 4 * experts,
        }
    }

    /// Returns the cost of the final norm and the head. A second head adds its projection, its block and the head once
    /// more.
    fn head_cost(&self, tokens: u64) -> Cost {
        let (hidden, vocabulary) = (self.hidden_size as u64, self.vocab_size as u64);
        let table = vocabulary * hidden;
        let logits = Cost {
            parameters: hidden + if self.tie_word_embeddings { 0 } else { table },
            weight: 6 * table + ELEMENT * (NORM_PASSES * hidden + LOSS_PASSES * vocabulary),
            kept: 2 * hidden + vocabulary + 2,
        };
        let Some(kind) = self.second_block() else { return logits };
        let block = self.mixer_cost(kind, None, tokens);
        let projection = 2 * hidden * hidden;
        Cost {
            parameters: logits.parameters + block.parameters + projection + 3 * hidden,
            weight: 2 * logits.weight + block.weight + 6 * projection + 2 * ELEMENT * NORM_PASSES * hidden,
            kept: 2 * logits.kept + block.kept + 6 * hidden,
        }
    }
}

/// Returns the cost of a feed-forward layer with a gate.
fn gated(hidden: u64, inner: u64) -> Cost {
    let matrices = 3 * hidden * inner;
    Cost { parameters: matrices, weight: 6 * matrices + ELEMENT * GATE_PASSES * inner, kept: 3 * inner }
}

impl BlockKind {
    /// Returns the name in tables of stages.
    fn label(self) -> &'static str {
        match self {
            Self::Attention => "attention",
            Self::Mamba => "mamba",
            Self::Experts => "experts",
            Self::Dense => "dense",
        }
    }
}
