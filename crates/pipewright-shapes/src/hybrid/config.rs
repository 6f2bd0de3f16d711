//! The configuration of a model, and its validation.

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer, Serialize};

use super::pattern::{BlockKind, Pattern};

/// The configuration of a hybrid model. Keys of a part that the model does not have may be left out.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(remote = "Self")]
pub struct HybridConfig {
    /// Token ids run from 0 to `vocab_size - 1`.
    pub vocab_size: usize,
    /// Width of the hidden states.
    pub hidden_size: usize,
    /// The blocks, with bars where stages may be cut.
    pub pattern: Pattern,
    /// Added to the mean square in every norm.
    #[serde(default = "rms_norm_eps")]
    pub rms_norm_eps: f64,
    /// Whether the head uses the embedding's table instead of its own matrix.
    #[serde(default)]
    pub tie_word_embeddings: bool,
    /// Standard deviation of initial matrices and embeddings.
    #[serde(default = "initializer_range")]
    pub initializer_range: f64,
    /// The id with which documents begin.
    #[serde(default)]
    pub bos_token_id: Option<usize>,
    /// Whether token embeddings are multiplied by the root of `hidden_size`.
    #[serde(default)]
    pub embed_scale: bool,
    /// The norm after the embeddings.
    #[serde(default)]
    pub embed_norm: EmbedNorm,
    /// The lengths of the hashed n-grams.
    #[serde(default)]
    pub ngram_orders: Vec<usize>,
    /// Rows of the table of each length.
    #[serde(default)]
    pub ngram_buckets: usize,
    /// Rows of the table of each structure input.
    #[serde(default)]
    pub structure_vocab_sizes: BTreeMap<String, usize>,
    /// Rows of the platform table.
    #[serde(default)]
    pub platform_vocab_size: usize,
    /// Relations between tokens that have a bias.
    #[serde(default)]
    pub num_relations: usize,
    /// Query heads.
    #[serde(default)]
    pub num_attention_heads: usize,
    /// Key and value heads; as many as query heads when absent.
    #[serde(default)]
    pub num_key_value_heads: Option<usize>,
    /// Width of a head; `hidden_size / num_attention_heads` when absent.
    #[serde(default)]
    pub head_dim: Option<usize>,
    /// Base of the rotary frequencies.
    #[serde(default = "rope_theta")]
    pub rope_theta: f64,
    /// The window of each block; 0 or nothing is full attention. Empty: all are full.
    #[serde(default)]
    pub window_sizes: Vec<Option<usize>>,
    /// Attention blocks without rotary positions.
    #[serde(default)]
    pub nope_layers: Vec<usize>,
    /// Heads of a Mamba-2 mixer.
    #[serde(default)]
    pub mamba_num_heads: usize,
    /// Width of a head of a Mamba-2 mixer.
    #[serde(default)]
    pub mamba_head_dim: usize,
    /// Width of the state of a Mamba-2 mixer.
    #[serde(default)]
    pub ssm_state_size: usize,
    /// Groups of heads of a Mamba-2 mixer.
    #[serde(default = "n_groups")]
    pub n_groups: usize,
    /// Tokens that the convolution sees.
    #[serde(default = "conv_kernel")]
    pub conv_kernel: usize,
    /// Inner width of the dense feed-forward layers.
    #[serde(default)]
    pub intermediate_size: usize,
    /// Experts of a block.
    #[serde(default)]
    pub num_experts: usize,
    /// Experts of a token.
    #[serde(default)]
    pub num_experts_per_tok: usize,
    /// Inner width of an expert.
    #[serde(default)]
    pub moe_intermediate_size: usize,
    /// Inner width of the expert that every token passes; 0: none.
    #[serde(default)]
    pub shared_expert_intermediate_size: usize,
    /// Whether the weights of a token's experts are divided by their sum.
    #[serde(default = "yes")]
    pub norm_topk_prob: bool,
    /// The weight of the balance loss.
    #[serde(default = "moe_aux_loss_weight")]
    pub moe_aux_loss_weight: f64,
    /// The weight of the loss of the routers' logits.
    #[serde(default = "moe_router_z_loss_weight")]
    pub moe_router_z_loss_weight: f64,
    /// Blocks that only some tokens pass.
    #[serde(default)]
    pub mod_layers: Vec<usize>,
    /// The share of a row's tokens that pass such a block.
    #[serde(default = "mod_capacity_factor")]
    pub mod_capacity_factor: f64,
    /// The weight of the loss of those blocks' routers.
    #[serde(default = "mod_aux_loss_weight")]
    pub mod_aux_loss_weight: f64,
    /// The weight of the mean loss of the predictions of further tokens; 0: no such predictions.
    #[serde(default)]
    pub mtp_loss_weight: f64,
    /// The letter of the block of each of these predictions.
    #[serde(default = "mtp_block")]
    pub mtp_block: String,
    /// The number of these predictions: each is of one token further ahead.
    #[serde(default = "mtp_depth")]
    pub mtp_depth: usize,
}

/// The norm after the embeddings.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EmbedNorm {
    /// No norm.
    #[default]
    None,
    /// A root mean square norm.
    Rms,
    /// `weight tanh(alpha x) + bias` (Zhu et al., 2025).
    Dyt,
}

fn rms_norm_eps() -> f64 {
    1e-6
}
fn initializer_range() -> f64 {
    0.02
}
fn rope_theta() -> f64 {
    10_000.0
}
fn n_groups() -> usize {
    1
}
fn conv_kernel() -> usize {
    4
}
fn yes() -> bool {
    true
}
fn moe_aux_loss_weight() -> f64 {
    0.01
}
fn moe_router_z_loss_weight() -> f64 {
    0.001
}
fn mod_capacity_factor() -> f64 {
    0.5
}
fn mod_aux_loss_weight() -> f64 {
    0.01
}
fn mtp_block() -> String {
    "A".to_owned()
}
fn mtp_depth() -> usize {
    1
}

impl<'de> Deserialize<'de> for HybridConfig {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let config = Self::deserialize(deserializer)?;
        config.validate().map_err(serde::de::Error::custom)?;
        Ok(config)
    }
}

impl Serialize for HybridConfig {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        Self::serialize(self, serializer)
    }
}

impl HybridConfig {
    /// Returns a model of these blocks with the usual values of every other key. Sizes of the blocks are 0
    /// and must be set; use it as the base of a struct update (`..`).
    pub fn new(vocab_size: usize, hidden_size: usize, pattern: Pattern) -> Self {
        Self {
            vocab_size,
            hidden_size,
            pattern,
            rms_norm_eps: rms_norm_eps(),
            tie_word_embeddings: false,
            initializer_range: initializer_range(),
            bos_token_id: None,
            embed_scale: false,
            embed_norm: EmbedNorm::None,
            ngram_orders: Vec::new(),
            ngram_buckets: 0,
            structure_vocab_sizes: BTreeMap::new(),
            platform_vocab_size: 0,
            num_relations: 0,
            num_attention_heads: 0,
            num_key_value_heads: None,
            head_dim: None,
            rope_theta: rope_theta(),
            window_sizes: Vec::new(),
            nope_layers: Vec::new(),
            mamba_num_heads: 0,
            mamba_head_dim: 0,
            ssm_state_size: 0,
            n_groups: n_groups(),
            conv_kernel: conv_kernel(),
            intermediate_size: 0,
            num_experts: 0,
            num_experts_per_tok: 0,
            moe_intermediate_size: 0,
            shared_expert_intermediate_size: 0,
            norm_topk_prob: true,
            moe_aux_loss_weight: moe_aux_loss_weight(),
            moe_router_z_loss_weight: moe_router_z_loss_weight(),
            mod_layers: Vec::new(),
            mod_capacity_factor: mod_capacity_factor(),
            mod_aux_loss_weight: mod_aux_loss_weight(),
            mtp_loss_weight: 0.0,
            mtp_block: mtp_block(),
            mtp_depth: mtp_depth(),
        }
    }

    /// Returns the kinds of the blocks.
    pub fn blocks(&self) -> &[BlockKind] {
        self.pattern.blocks()
    }

    /// Returns the width of a head of the attention.
    pub fn head_dim(&self) -> usize {
        self.head_dim.unwrap_or(self.hidden_size / self.num_attention_heads.max(1))
    }

    /// Returns the number of key and value heads.
    pub fn kv_heads(&self) -> usize {
        self.num_key_value_heads.unwrap_or(self.num_attention_heads)
    }

    /// Returns the number of predictions of further tokens.
    pub fn prediction_depth(&self) -> usize {
        if self.mtp_loss_weight > 0.0 { self.mtp_depth } else { 0 }
    }

    /// Returns the kind of the block of each further prediction; `None` without such predictions.
    pub fn prediction_block(&self) -> Option<BlockKind> {
        let kind = Pattern::new(&self.mtp_block).ok()?.blocks()[0];
        (self.prediction_depth() > 0).then_some(kind)
    }

    /// Whether a block of the model, or of a further prediction, is of a kind.
    pub(super) fn has(&self, kind: BlockKind) -> bool {
        self.blocks().contains(&kind) || self.prediction_block() == Some(kind)
    }
}
