//! The configuration of a model, and its validation.

use std::collections::BTreeMap;

use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value};

use super::pattern::{BlockKind, Pattern};

/// The configuration of a hybrid model. Keys of a part that the model does not have may be left out.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(remote = "Self", default = "HybridConfig::usual")]
pub struct HybridConfig {
    /// Token ids run from 0 to `vocab_size - 1`.
    pub vocab_size: usize,
    /// Width of the hidden states.
    pub hidden_size: usize,
    /// The blocks, with bars where stages may be cut.
    pub pattern: Pattern,
    /// Added to the mean square in every norm.
    pub rms_norm_eps: f64,
    /// Whether the head uses the embedding's table instead of its own matrix.
    pub tie_word_embeddings: bool,
    /// Standard deviation of initial matrices and embeddings.
    pub initializer_range: f64,
    /// The id with which documents begin.
    pub bos_token_id: Option<usize>,
    /// Whether token embeddings are multiplied by the root of `hidden_size`.
    pub embed_scale: bool,
    /// The norm after the embeddings.
    pub embed_norm: EmbedNorm,
    /// The lengths of the hashed n-grams.
    pub ngram_orders: Vec<usize>,
    /// Rows of the table of each length.
    pub ngram_buckets: usize,
    /// Rows of the table of each structure input.
    pub structure_vocab_sizes: BTreeMap<String, usize>,
    /// Rows of the platform table.
    pub platform_vocab_size: usize,
    /// Relations between tokens that have a bias.
    pub num_relations: usize,
    /// Query heads.
    pub num_attention_heads: usize,
    /// Key and value heads; as many as query heads when absent.
    pub num_key_value_heads: Option<usize>,
    /// Width of a head; `hidden_size / num_attention_heads` when absent.
    pub head_dim: Option<usize>,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// The window of each block; 0 or nothing is full attention. Empty: all are full.
    pub window_sizes: Vec<Option<usize>>,
    /// Attention blocks without rotary positions.
    pub nope_layers: Vec<usize>,
    /// Heads of a Mamba-2 mixer.
    pub mamba_num_heads: usize,
    /// Width of a head of a Mamba-2 mixer.
    pub mamba_head_dim: usize,
    /// Width of the state of a Mamba-2 mixer.
    pub ssm_state_size: usize,
    /// Groups of heads of a Mamba-2 mixer.
    pub n_groups: usize,
    /// Tokens that the convolution sees.
    pub conv_kernel: usize,
    /// Inner width of the dense feed-forward layers.
    pub intermediate_size: usize,
    /// Experts of a block.
    pub num_experts: usize,
    /// Experts of a token.
    pub num_experts_per_tok: usize,
    /// Inner width of an expert.
    pub moe_intermediate_size: usize,
    /// Inner width of the expert that every token passes; 0: none.
    pub shared_expert_intermediate_size: usize,
    /// Whether the weights of a token's experts are divided by their sum.
    pub norm_topk_prob: bool,
    /// The weight of the balance loss.
    pub moe_aux_loss_weight: f64,
    /// The weight of the loss of the routers' logits.
    pub moe_router_z_loss_weight: f64,
    /// Blocks that only some tokens pass.
    pub mod_layers: Vec<usize>,
    /// The share of a row's tokens that pass such a block.
    pub mod_capacity_factor: f64,
    /// The weight of the loss of those blocks' routers.
    pub mod_aux_loss_weight: f64,
    /// The weight of the mean loss of the predictions of further tokens; 0: no such predictions.
    pub mtp_loss_weight: f64,
    /// The letter of the block of each of these predictions.
    pub mtp_block: String,
    /// The number of these predictions: each is of one token further ahead.
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

impl<'de> Deserialize<'de> for HybridConfig {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut keys = Map::deserialize(deserializer)?;
        keys.retain(|_, value| !value.is_null());
        let needed = ["vocab_size", "hidden_size", "pattern"];
        if let Some(key) = needed.into_iter().find(|key| !keys.contains_key(*key)) {
            return Err(D::Error::missing_field(key));
        }
        let config = Self::deserialize(Value::Object(keys)).map_err(D::Error::custom)?;
        config.validate().map_err(D::Error::custom)?;
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
            rms_norm_eps: 1e-6,
            tie_word_embeddings: false,
            initializer_range: 0.02,
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
            rope_theta: 10_000.0,
            window_sizes: Vec::new(),
            nope_layers: Vec::new(),
            mamba_num_heads: 0,
            mamba_head_dim: 0,
            ssm_state_size: 0,
            n_groups: 1,
            conv_kernel: 4,
            intermediate_size: 0,
            num_experts: 0,
            num_experts_per_tok: 0,
            moe_intermediate_size: 0,
            shared_expert_intermediate_size: 0,
            norm_topk_prob: true,
            moe_aux_loss_weight: 0.01,
            moe_router_z_loss_weight: 0.001,
            mod_layers: Vec::new(),
            mod_capacity_factor: 0.5,
            mod_aux_loss_weight: 0.01,
            mtp_loss_weight: 0.0,
            mtp_block: "A".to_owned(),
            mtp_depth: 1,
        }
    }

    /// Returns the values of keys that files leave out.
    fn usual() -> Self {
        Self::new(0, 0, Pattern::default())
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

    /// Returns the rows of the tables that are added to the table of tokens: n-grams, structure and platforms.
    pub fn further_rows(&self) -> usize {
        let structures: usize = self.structure_vocab_sizes.values().sum();
        self.ngram_orders.len() * self.ngram_buckets + structures + self.platform_vocab_size
    }

    /// Returns the parameters of the first stage in addition to the table of tokens.
    pub fn further_embedding(&self) -> usize {
        let norm = match self.embed_norm {
            EmbedNorm::None => 0,
            EmbedNorm::Rms => self.hidden_size,
            EmbedNorm::Dyt => 2 * self.hidden_size + 1,
        };
        self.further_rows() * self.hidden_size + norm + self.num_relations * self.num_attention_heads
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
