//! The Granite 4 family: Granite with Mamba-2 in most layers, and without positions. Keys have the names and the meaning
//! of Hugging Face's `GraniteMoeHybridForCausalLM`.
//!
//! Each layer has a feed-forward layer `shared_mlp`, and experts next to it if the model has some. The balance loss of the
//! router is defined as in [`qwen3_moe`](crate::qwen3_moe).

use pipewright::nn::MambaSizes;
use pipewright_shapes::ShapeError;
use pipewright_shapes::family::{self, Family};
use pipewright_shapes::key_range::{divisible, require, sizes};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::decoder::{BlockForm, DecoderConfig, ExpertKeys, LayerForm, MixtureConfig, SharedForm};
use crate::decoder_family::DecoderFamily;
use crate::experts::ExpertForm;
use crate::granite::GraniteConfig;
use crate::mamba::{MambaBiases, MambaForm};
use crate::path_names::PathNames;

/// The names of parts of paths in files.
const NAMES: PathNames = PathNames::new(&[("mlp", "block_sparse_moe"), ("gate", "router.layer")]);

/// A Granite 4 model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(from = "RawGraniteHybrid")]
pub struct GraniteHybridConfig {
    /// Sizes, constants and factors. `intermediate_size` is the inner width of an expert; without experts, it is
    /// `shared_intermediate_size`.
    #[serde(flatten)]
    pub granite: GraniteConfig,
    /// The inner width of the feed-forward layers that every token goes through.
    pub shared_intermediate_size: usize,
    /// The number of experts of each layer; 0 for none.
    pub num_local_experts: usize,
    /// The experts that are chosen for each token.
    pub num_experts_per_tok: usize,
    /// The weight of the router's balance loss.
    pub router_aux_loss_coef: f64,
    /// Whether the balance loss is part of the training loss.
    pub output_router_logits: bool,
    /// The experts, if there are some.
    #[serde(skip)]
    mixture: Option<MixtureConfig>,
    /// The positions of queries and keys.
    pub position_embedding_type: Option<HybridPositions>,
    /// The kind of each layer.
    pub layer_types: Vec<HybridMixer>,
    /// The heads of Mamba-2.
    pub mamba_n_heads: usize,
    /// The width of a head.
    pub mamba_d_head: usize,
    /// The groups of heads that share their inputs and outputs of the state.
    pub mamba_n_groups: usize,
    /// The width of the state for each element of a head.
    pub mamba_d_state: usize,
    /// The tokens that the convolution sees.
    pub mamba_d_conv: usize,
    /// The width of all heads, divided by the width of the hidden states.
    pub mamba_expand: usize,
    /// Whether the convolution has a bias.
    pub mamba_conv_bias: bool,
    /// The smallest and the largest step, which are 0 and infinity.
    #[serde(skip_serializing_if = "Value::is_null")]
    pub time_step_limit: Value,
}

/// The positions of queries and keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum HybridPositions {
    /// Rotary positions.
    Rope,
    /// No positions.
    Nope,
}

/// The kind of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HybridMixer {
    /// Tokens see all earlier tokens.
    #[serde(alias = "attention")]
    FullAttention,
    /// Mamba-2.
    #[serde(alias = "mamba")]
    LinearAttention,
}

/// The keys as files hold them.
#[derive(Deserialize)]
struct RawGraniteHybrid {
    #[serde(flatten)]
    granite: GraniteConfig,
    #[serde(default = "usual::<1024>")]
    shared_intermediate_size: usize,
    #[serde(default = "usual::<8>")]
    num_local_experts: usize,
    #[serde(default = "usual::<2>")]
    num_experts_per_tok: usize,
    #[serde(default = "coefficient")]
    router_aux_loss_coef: f64,
    #[serde(default)]
    output_router_logits: bool,
    position_embedding_type: Option<HybridPositions>,
    layer_types: Option<Vec<HybridMixer>>,
    #[serde(default = "usual::<128>")]
    mamba_n_heads: usize,
    /// A number or `auto`.
    mamba_d_head: Option<Value>,
    #[serde(default = "usual::<1>")]
    mamba_n_groups: usize,
    #[serde(default = "usual::<256>")]
    mamba_d_state: usize,
    #[serde(default = "usual::<4>")]
    mamba_d_conv: usize,
    #[serde(default = "usual::<2>")]
    mamba_expand: usize,
    #[serde(default = "yes")]
    mamba_conv_bias: bool,
    #[serde(default)]
    time_step_limit: Value,
}

fn usual<const NUMBER: usize>() -> usize {
    NUMBER
}

fn yes() -> bool {
    true
}

fn coefficient() -> f64 {
    0.001
}

impl From<RawGraniteHybrid> for GraniteHybridConfig {
    fn from(raw: RawGraniteHybrid) -> Self {
        let mut granite = raw.granite;
        let has_experts = raw.num_local_experts > 0;
        if !has_experts {
            granite.decoder.intermediate_size = raw.shared_intermediate_size;
        }
        let mixture = has_experts.then(|| {
            let inner = granite.decoder.intermediate_size;
            MixtureConfig {
                num_experts: raw.num_local_experts,
                num_experts_per_tok: raw.num_experts_per_tok,
                router_aux_loss_coef: raw.router_aux_loss_coef,
                output_router_logits: raw.output_router_logits,
                ..MixtureConfig::of_width(inner).with_equal_layers(inner)
            }
        });
        let width = raw.mamba_expand.saturating_mul(granite.decoder.hidden_size);
        let given = raw.mamba_d_head.as_ref().and_then(Value::as_u64);
        let layers = granite.decoder.num_hidden_layers;
        Self {
            granite,
            shared_intermediate_size: raw.shared_intermediate_size,
            num_local_experts: raw.num_local_experts,
            num_experts_per_tok: raw.num_experts_per_tok,
            router_aux_loss_coef: raw.router_aux_loss_coef,
            output_router_logits: raw.output_router_logits,
            mixture,
            position_embedding_type: raw.position_embedding_type,
            layer_types: raw.layer_types.unwrap_or_else(|| vec![HybridMixer::LinearAttention; layers]),
            mamba_n_heads: raw.mamba_n_heads,
            mamba_d_head: given.map_or(width / raw.mamba_n_heads.max(1), |given| given as usize),
            mamba_n_groups: raw.mamba_n_groups,
            mamba_d_state: raw.mamba_d_state,
            mamba_d_conv: raw.mamba_d_conv,
            mamba_expand: raw.mamba_expand,
            mamba_conv_bias: raw.mamba_conv_bias,
            time_step_limit: raw.time_step_limit,
        }
    }
}

/// A model of these sizes with attention in every fourth layer, without experts and without further factors.
impl From<DecoderConfig> for GraniteHybridConfig {
    fn from(decoder: DecoderConfig) -> Self {
        let kind = |index: usize| match index % 4 {
            3 => HybridMixer::FullAttention,
            _ => HybridMixer::LinearAttention,
        };
        let (heads, hidden, inner) =
            (decoder.num_attention_heads, decoder.hidden_size, decoder.intermediate_size);
        Self {
            layer_types: (0..decoder.num_hidden_layers).map(kind).collect(),
            granite: decoder.into(),
            shared_intermediate_size: inner,
            num_local_experts: 0,
            num_experts_per_tok: 2,
            router_aux_loss_coef: coefficient(),
            output_router_logits: false,
            mixture: None,
            position_embedding_type: None,
            mamba_n_heads: heads,
            mamba_d_head: 2 * hidden / heads.max(1),
            mamba_n_groups: 1,
            mamba_d_state: 128,
            mamba_d_conv: 4,
            mamba_expand: 2,
            mamba_conv_bias: true,
            time_step_limit: Value::Null,
        }
    }
}

impl DecoderFamily for GraniteHybridConfig {
    const ROW: Family = family::GRANITE_HYBRID;

    fn decoder(&self) -> &DecoderConfig {
        &self.granite.decoder
    }

    fn form(&self) -> BlockForm<'_> {
        let layer = |kind: &HybridMixer| LayerForm {
            is_linear: *kind == HybridMixer::LinearAttention,
            has_positions: self.position_embedding_type == Some(HybridPositions::Rope),
            ..LayerForm::default()
        };
        let sizes = MambaSizes {
            heads: self.mamba_n_heads,
            head_dim: self.mamba_d_head,
            groups: self.mamba_n_groups,
            state: self.mamba_d_state,
            taps: self.mamba_d_conv,
            limits: (0.0, f64::INFINITY),
            epsilon: self.decoder().rms_norm_eps,
        };
        let biases = MambaBiases { projections: false, convolution: self.mamba_conv_bias };
        BlockForm {
            layers: self.layer_types.iter().map(layer).collect(),
            mamba: Some(MambaForm { sizes, biases }),
            joins_feed_forward: true,
            mixture: self.mixture.as_ref(),
            expert_keys: ExpertKeys { count: "num_local_experts", inner: "intermediate_size" },
            experts: ExpertForm {
                stacks: Some(["input_linear.weight", "output_linear.weight"]),
                ..ExpertForm::default()
            },
            shared_expert: Some(SharedForm { inner: self.shared_intermediate_size, has_gate: false }),
            names: NAMES,
            ..self.granite.form()
        }
    }

    fn check_own(&self) -> Result<(), ShapeError> {
        self.granite.check_own()?;
        let steps = &self.time_step_limit;
        let is_open = steps[0] == 0.0 && steps[1]["__float__"] == "Infinity";
        if !steps.is_null() && !is_open {
            return Err(ShapeError::not_supported("time_step_limit", &steps.to_string(), "[0, Infinity]"));
        }
        let listed = self.layer_types.len();
        let is_whole = listed == self.decoder().num_hidden_layers;
        require(is_whole, "layer_types", listed, "a list with an entry for each layer")?;
        let [heads, groups] =
            [("mamba_n_heads", self.mamba_n_heads), ("mamba_n_groups", self.mamba_n_groups)];
        sizes(&[
            ("shared_intermediate_size", self.shared_intermediate_size),
            heads,
            groups,
            ("mamba_d_head", self.mamba_d_head),
            ("mamba_d_state", self.mamba_d_state),
            ("mamba_d_conv", self.mamba_d_conv),
            ("mamba_expand", self.mamba_expand),
        ])?;
        divisible(heads, groups)?;
        let width = self.mamba_expand * self.decoder().hidden_size;
        let fits = self.mamba_d_head.checked_mul(self.mamba_n_heads) == Some(width);
        let range = "such that all heads have the width `mamba_expand * hidden_size`";
        require(fits, "mamba_d_head", self.mamba_d_head, range)
    }
}
