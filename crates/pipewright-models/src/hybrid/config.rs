//! The configuration of a model, and its validation.

use std::collections::BTreeMap;

use pipewright::nn::{MambaSizes, ScopedAttention};
use serde::{Deserialize, Deserializer, Serialize};

use super::pattern::{BlockKind, Pattern};
use super::side_inputs::STRUCTURES;
use crate::error::ConfigError;

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
    /// What follows the embeddings.
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
    /// The weight of the second prediction head's loss; 0: no such head.
    #[serde(default)]
    pub mtp_loss_weight: f64,
    /// The letter of the second head's block.
    #[serde(default = "mtp_block")]
    pub mtp_block: String,
}

/// What follows the embeddings.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EmbedNorm {
    /// Nothing.
    #[default]
    None,
    /// A norm.
    Rms,
    /// `weight tanh(alpha x) + bias` (Zhu et al., 2025).
    Dyt,
}

/// The keys that the family adds to those of all families.
pub(super) const KEYS: [&str; 33] = [
    "pattern",
    "bos_token_id",
    "embed_scale",
    "embed_norm",
    "ngram_orders",
    "ngram_buckets",
    "structure_vocab_sizes",
    "platform_vocab_size",
    "num_relations",
    "initializer_range",
    "window_sizes",
    "nope_layers",
    "mamba_num_heads",
    "mamba_head_dim",
    "ssm_state_size",
    "n_groups",
    "conv_kernel",
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "norm_topk_prob",
    "moe_aux_loss_weight",
    "moe_router_z_loss_weight",
    "mod_layers",
    "mod_capacity_factor",
    "mod_aux_loss_weight",
    "mtp_loss_weight",
    "mtp_block",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "rope_theta",
];

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
    /// Returns a model of these blocks with the usual values of every other key. Sizes of the blocks are 0 and must be
    /// set; use it as the base of a struct update (`..`).
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
        }
    }

    /// Returns the number of layers in the list that is cut into stages.
    pub fn layers(&self) -> usize {
        self.blocks().len() + 2
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

    /// Returns the attention of a block.
    pub(super) fn attention(&self, index: usize) -> ScopedAttention {
        let window = self.window_sizes.get(index).copied().flatten().filter(|window| *window > 0);
        let rope_theta = (!self.nope_layers.contains(&index)).then_some(self.rope_theta);
        ScopedAttention { head_dim: self.head_dim(), rope_theta, window }
    }

    /// Returns the sizes of the Mamba-2 mixers.
    pub fn mamba(&self) -> MambaSizes {
        MambaSizes {
            heads: self.mamba_num_heads,
            head_dim: self.mamba_head_dim,
            groups: self.n_groups,
            state: self.ssm_state_size,
            taps: self.conv_kernel,
            limits: (0.0, f64::INFINITY),
            epsilon: self.rms_norm_eps,
        }
    }

    /// Returns the kind of the second prediction head's block; `None` without such a head.
    pub(super) fn second_block(&self) -> Option<BlockKind> {
        let kind = Pattern::new(&self.mtp_block).ok()?.blocks()[0];
        (self.mtp_loss_weight > 0.0).then_some(kind)
    }

    fn has(&self, kind: BlockKind) -> bool {
        self.blocks().contains(&kind) || self.second_block() == Some(kind)
    }

    /// Checks that the keys make a model.
    ///
    /// # Errors
    /// When a key is out of range or does not fit another; the error names the first.
    pub fn validate(&self) -> Result<(), ConfigError> {
        positive(&[("vocab_size", self.vocab_size), ("hidden_size", self.hidden_size)])?;
        above_zero(&[("rms_norm_eps", self.rms_norm_eps), ("rope_theta", self.rope_theta)])?;
        not_below_zero(&[
            ("initializer_range", self.initializer_range),
            ("moe_aux_loss_weight", self.moe_aux_loss_weight),
            ("moe_router_z_loss_weight", self.moe_router_z_loss_weight),
            ("mod_aux_loss_weight", self.mod_aux_loss_weight),
            ("mtp_loss_weight", self.mtp_loss_weight),
        ])?;
        if let Some(bos) = self.bos_token_id {
            require(bos < self.vocab_size, "bos_token_id", bos, "below `vocab_size`")?;
        }
        self.validate_embedding()?;
        self.validate_lists()?;
        if self.has(BlockKind::Attention) {
            self.validate_attention()?;
        }
        if self.has(BlockKind::Mamba) {
            self.validate_mamba()?;
        }
        if self.has(BlockKind::Dense) {
            positive(&[("intermediate_size", self.intermediate_size)])?;
        }
        if self.has(BlockKind::Experts) {
            positive(&[
                ("num_experts", self.num_experts),
                ("num_experts_per_tok", self.num_experts_per_tok),
                ("moe_intermediate_size", self.moe_intermediate_size),
            ])?;
            let chosen = self.num_experts_per_tok;
            require(chosen <= self.num_experts, "num_experts_per_tok", chosen, "at most `num_experts`")?;
        }
        Ok(())
    }

    fn validate_embedding(&self) -> Result<(), ConfigError> {
        for &order in &self.ngram_orders {
            require(order >= 2, "ngram_orders", order, "at least 2 each")?;
            let times = self.ngram_orders.iter().filter(|other| **other == order).count();
            require(times == 1, "ngram_orders", order, "in the list once")?;
        }
        let buckets = self.ngram_buckets;
        require(self.ngram_orders.is_empty() || buckets > 0, "ngram_buckets", buckets, "at least 1")?;
        for (name, &rows) in &self.structure_vocab_sizes {
            let known = STRUCTURES.contains(&name.as_str());
            let names = "one of structure_ids, dep_levels, ast_depth_ids, sibling_index_ids, node_type_ids";
            require(known, "structure_vocab_sizes", name, names)?;
            require(rows > 0, "structure_vocab_sizes", format!("{name}: {rows}"), "at least 1 each")?;
        }
        Ok(())
    }

    fn validate_lists(&self) -> Result<(), ConfigError> {
        let blocks = self.blocks().len();
        let windows = self.window_sizes.len();
        require(
            windows == 0 || windows == blocks,
            "window_sizes",
            windows,
            "empty, or one number for each block",
        )?;
        for &index in &self.nope_layers {
            let is_attention = self.blocks().get(index) == Some(&BlockKind::Attention);
            require(is_attention, "nope_layers", index, "places of attention blocks")?;
        }
        for &index in &self.mod_layers {
            require(index < blocks, "mod_layers", index, "places of blocks")?;
            let times = self.mod_layers.iter().filter(|other| **other == index).count();
            require(times == 1, "mod_layers", index, "in the list once")?;
        }
        let share = self.mod_capacity_factor;
        require(share > 0.0 && share <= 1.0, "mod_capacity_factor", share, "above 0 and at most 1")?;
        let letter = &self.mtp_block;
        let holds = matches!(letter.as_str(), "A" | "M" | "D" | "-");
        require(holds, "mtp_block", letter, "A, M or D")
    }

    fn validate_attention(&self) -> Result<(), ConfigError> {
        let (heads, kv_heads) = (self.num_attention_heads, self.kv_heads());
        positive(&[("num_attention_heads", heads), ("num_key_value_heads", kv_heads)])?;
        if self.head_dim.is_none() {
            divisible(("hidden_size", self.hidden_size), ("num_attention_heads", heads))?;
        }
        divisible(("num_attention_heads", heads), ("num_key_value_heads", kv_heads))?;
        let head_dim = self.head_dim();
        require(head_dim > 0 && head_dim.is_multiple_of(2), "head_dim", head_dim, "even and at least 2")
    }

    fn validate_mamba(&self) -> Result<(), ConfigError> {
        positive(&[
            ("mamba_num_heads", self.mamba_num_heads),
            ("mamba_head_dim", self.mamba_head_dim),
            ("ssm_state_size", self.ssm_state_size),
            ("n_groups", self.n_groups),
            ("conv_kernel", self.conv_kernel),
        ])?;
        divisible(("mamba_num_heads", self.mamba_num_heads), ("n_groups", self.n_groups))
    }
}

fn positive(sizes: &[(&'static str, usize)]) -> Result<(), ConfigError> {
    sizes.iter().try_for_each(|&(key, value)| require(value > 0, key, value, "at least 1"))
}

fn above_zero(numbers: &[(&'static str, f64)]) -> Result<(), ConfigError> {
    let mut numbers = numbers.iter();
    numbers.try_for_each(|&(key, value)| require(value.is_finite() && value > 0.0, key, value, "positive"))
}

fn not_below_zero(numbers: &[(&'static str, f64)]) -> Result<(), ConfigError> {
    let mut numbers = numbers.iter();
    numbers.try_for_each(|&(key, value)| {
        require(value.is_finite() && value >= 0.0, key, value, "zero or positive")
    })
}

fn require(
    holds: bool,
    key: &'static str,
    value: impl ToString,
    range: &'static str,
) -> Result<(), ConfigError> {
    if holds { Ok(()) } else { Err(ConfigError::OutOfRange { key, value: value.to_string(), range }) }
}

fn divisible(
    (key, value): (&'static str, usize),
    (by, divisor): (&'static str, usize),
) -> Result<(), ConfigError> {
    if value.is_multiple_of(divisor) {
        return Ok(());
    }
    Err(ConfigError::NotDivisible { key, value, by, divisor })
}
