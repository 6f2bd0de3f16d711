//! The sizes and constants of a model, and their validation. Their form in a file is in [`super::json`].

use serde::{Deserialize, Serialize};

use crate::error::ShapeError;
use crate::family::NEMOTRON_H;
use crate::key_range::{above_zero, divisible, not_below_zero, require, rows, sizes, width};

/// The kind of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum BlockKind {
    /// A Mamba-2 mixer.
    #[serde(rename = "linear_attention")]
    Mamba,
    /// Causal attention without positions.
    #[serde(rename = "full_attention")]
    Attention,
    /// A feed-forward layer.
    #[serde(rename = "mlp")]
    Mlp,
    /// A mixture of feed-forward layers.
    #[serde(rename = "moe")]
    Experts,
}

impl BlockKind {
    /// Returns the name in tables of stages.
    pub fn label(self) -> &'static str {
        match self {
            Self::Mamba => "mamba",
            Self::Attention => "attention",
            Self::Mlp => "mlp",
            Self::Experts => "experts",
        }
    }
}

/// The configuration of a Nemotron-H model; fields have the names of `config.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(remote = "Self", default = "NemotronHConfig::usual")]
pub struct NemotronHConfig {
    /// Token ids run from 0 to `vocab_size - 1`.
    pub vocab_size: usize,
    /// Width of the hidden states.
    pub hidden_size: usize,
    /// The blocks in order.
    #[serde(rename = "layers_block_type", skip_deserializing)]
    pub blocks: Vec<BlockKind>,
    /// Added to the mean square in every norm.
    pub layer_norm_epsilon: f64,
    /// Whether the head uses the embedding's table instead of its own matrix.
    pub tie_word_embeddings: bool,
    /// Standard deviation of initial matrices and embeddings.
    pub initializer_range: f64,
    /// Query heads.
    pub num_attention_heads: usize,
    /// Key and value heads; each serves `num_attention_heads / num_key_value_heads` query heads.
    pub num_key_value_heads: usize,
    /// Width of a head of the attention.
    pub head_dim: usize,
    /// Inner width of the feed-forward layers.
    pub intermediate_size: usize,
    /// Whether the feed-forward layers have biases.
    pub mlp_bias: bool,
    /// Heads of a Mamba-2 mixer.
    pub mamba_num_heads: usize,
    /// Width of a head of a Mamba-2 mixer.
    pub mamba_head_dim: usize,
    /// Groups of heads of a Mamba-2 mixer.
    pub n_groups: usize,
    /// Width of the state of a Mamba-2 mixer.
    pub ssm_state_size: usize,
    /// Tokens that the convolution sees.
    pub conv_kernel: usize,
    /// Whether the convolution has a bias.
    pub use_conv_bias: bool,
    /// Whether the projections of a Mamba-2 mixer have biases.
    pub use_bias: bool,
    /// The limits of the steps in the published code of these models. They have no effect: as in
    /// transformers, the lowest step is the lower end of [`NemotronHConfig::time_step_range`]. They are kept
    /// only so that written files contain them.
    #[serde(skip)]
    pub time_step_limit: (f64, f64),
    /// The range from which initial steps are drawn. Its lower end is also the lowest step of the scan.
    #[serde(skip)]
    pub time_step_range: (f64, f64),
    /// The lowest initial step.
    pub time_step_floor: f64,
    /// Whether the initial output projections of Mamba-2 mixers are divided by the root of the number of
    /// blocks.
    pub rescale_prenorm_residual: bool,
    /// The experts; `None` if no block has them.
    #[serde(flatten, skip_deserializing)]
    pub experts: Option<Experts>,
}

/// The sizes and constants of the experts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Experts {
    /// The number of routed experts.
    pub n_routed_experts: usize,
    /// Routed experts of a token.
    #[serde(default = "chosen")]
    pub num_experts_per_tok: usize,
    /// Groups of neighbouring experts.
    #[serde(default = "one")]
    pub n_group: usize,
    /// Groups from which a token's experts are chosen.
    #[serde(default = "one")]
    pub topk_group: usize,
    /// Whether the weights of a token's experts are divided by their sum.
    #[serde(default = "yes")]
    pub norm_topk_prob: bool,
    /// A factor of the weights.
    #[serde(default = "factor")]
    pub routed_scaling_factor: f64,
    /// Inner width of a routed expert.
    pub moe_intermediate_size: usize,
    /// Inner width of the shared expert.
    pub moe_shared_expert_intermediate_size: usize,
    /// Width of the inputs and outputs of the routed experts, if it is not `hidden_size`: a projection before
    /// them and one after their sum.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub moe_latent_size: Option<usize>,
}

fn chosen() -> usize {
    NEMOTRON_H.usual("num_experts_per_tok")
}
fn one() -> usize {
    1
}
fn yes() -> bool {
    true
}
fn factor() -> f64 {
    1.0
}

impl NemotronHConfig {
    /// Returns transformers' values of the keys that files leave out, for a model without blocks.
    pub fn usual() -> Self {
        let size = |key| NEMOTRON_H.usual(key);
        Self {
            vocab_size: 0,
            hidden_size: 0,
            blocks: Vec::new(),
            layer_norm_epsilon: 1e-5,
            tie_word_embeddings: false,
            initializer_range: 0.02,
            num_attention_heads: size("num_attention_heads"),
            num_key_value_heads: size("num_key_value_heads"),
            head_dim: size("head_dim"),
            intermediate_size: size("intermediate_size"),
            mlp_bias: false,
            mamba_num_heads: size("mamba_num_heads"),
            mamba_head_dim: size("mamba_head_dim"),
            n_groups: size("n_groups"),
            ssm_state_size: size("ssm_state_size"),
            conv_kernel: size("conv_kernel"),
            use_conv_bias: true,
            use_bias: false,
            time_step_limit: (0.0, f64::INFINITY),
            time_step_range: (0.001, 0.1),
            time_step_floor: 1e-4,
            rescale_prenorm_residual: true,
            experts: None,
        }
    }

    fn has(&self, kind: BlockKind) -> bool {
        self.blocks.contains(&kind)
    }

    /// Checks that the sizes make a model. Sizes of a kind of block that the model does not have are not
    /// checked.
    ///
    /// # Errors
    /// When a key is out of range or does not fit another; the error names the first.
    pub fn validate(&self) -> Result<(), ShapeError> {
        require(!self.blocks.is_empty(), "layers_block_type", "[]", "a list of at least one block")?;
        rows(&[("vocab_size", self.vocab_size)])?;
        sizes(&[("hidden_size", self.hidden_size)])?;
        above_zero(&[("layer_norm_epsilon", self.layer_norm_epsilon)])?;
        not_below_zero(&[("initializer_range", self.initializer_range)])?;
        if self.has(BlockKind::Attention) {
            self.validate_attention()?;
        }
        if self.has(BlockKind::Mlp) {
            sizes(&[("intermediate_size", self.intermediate_size)])?;
        }
        if self.has(BlockKind::Mamba) {
            self.validate_mamba()?;
        }
        match &self.experts {
            Some(experts) => experts.validate(),
            None if self.has(BlockKind::Experts) => {
                require(false, "n_routed_experts", 0, "at least 1, because the model has blocks of experts")
            }
            None => Ok(()),
        }
    }

    fn validate_attention(&self) -> Result<(), ShapeError> {
        let (heads, kv_heads) = (self.num_attention_heads, self.num_key_value_heads);
        sizes(&[
            ("num_attention_heads", heads),
            ("num_key_value_heads", kv_heads),
            ("head_dim", self.head_dim),
        ])?;
        width(("head_dim", self.head_dim), ("num_attention_heads", heads))?;
        divisible(("num_attention_heads", heads), ("num_key_value_heads", kv_heads))
    }

    fn validate_mamba(&self) -> Result<(), ShapeError> {
        sizes(&[
            ("mamba_num_heads", self.mamba_num_heads),
            ("mamba_head_dim", self.mamba_head_dim),
            ("n_groups", self.n_groups),
            ("ssm_state_size", self.ssm_state_size),
            ("conv_kernel", self.conv_kernel),
        ])?;
        width(("mamba_head_dim", self.mamba_head_dim), ("mamba_num_heads", self.mamba_num_heads))?;
        width(("ssm_state_size", self.ssm_state_size), ("n_groups", self.n_groups))?;
        divisible(("mamba_num_heads", self.mamba_num_heads), ("n_groups", self.n_groups))?;
        let (low, high) = self.time_step_limit;
        let holds = low.is_finite() && low >= 0.0 && low <= high;
        require(
            holds,
            "time_step_limit",
            format!("[{low}, {high}]"),
            "two numbers in ascending order, not below 0",
        )?;
        let (least, most) = self.time_step_range;
        above_zero(&[("time_step_min", least), ("time_step_floor", self.time_step_floor)])?;
        require(most.is_finite() && most >= least, "time_step_max", most, "at least `time_step_min`")
    }
}

impl Experts {
    /// Returns the width of the inputs and outputs of the routed experts in a model whose hidden states have
    /// the width `hidden`.
    pub fn width(&self, hidden: usize) -> usize {
        self.moe_latent_size.unwrap_or(hidden)
    }

    fn validate(&self) -> Result<(), ShapeError> {
        sizes(&[
            ("n_routed_experts", self.n_routed_experts),
            ("num_experts_per_tok", self.num_experts_per_tok),
            ("n_group", self.n_group),
            ("topk_group", self.topk_group),
            ("moe_intermediate_size", self.moe_intermediate_size),
            ("moe_shared_expert_intermediate_size", self.moe_shared_expert_intermediate_size),
            // Without projections the experts have the width of the hidden states.
            ("moe_latent_size", self.moe_latent_size.unwrap_or(1)),
        ])?;
        width(
            ("n_routed_experts", self.n_routed_experts),
            ("moe_intermediate_size", self.moe_intermediate_size),
        )?;
        divisible(("n_routed_experts", self.n_routed_experts), ("n_group", self.n_group))?;
        let group = self.n_routed_experts / self.n_group;
        require(
            self.n_group == 1 || group >= 2,
            "n_group",
            self.n_group,
            "at most half of `n_routed_experts`",
        )?;
        require(self.topk_group <= self.n_group, "topk_group", self.topk_group, "at most `n_group`")?;
        let chosen = self.num_experts_per_tok;
        let eligible = "at most the experts of the `topk_group` groups that are chosen from";
        require(chosen <= self.topk_group * group, "num_experts_per_tok", chosen, eligible)?;
        let factor = self.routed_scaling_factor;
        require(factor.is_finite(), "routed_scaling_factor", factor, "a finite number")
    }
}
