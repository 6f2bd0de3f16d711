//! The Qwen3-Next family (Qwen team, 2025): Qwen3-MoE with Gated DeltaNet in most layers, and with gates of the outputs
//! of the others, whose heads have positions in a part. Keys have the names and the meaning of Hugging Face's
//! `Qwen3NextForCausalLM`. The weights of norms are their factors less one.
//!
//! The balance loss of the router is defined as in [`qwen3_moe`](crate::qwen3_moe).

use pipewright::nn::DeltaSizes;
use pipewright_shapes::ShapeError;
use pipewright_shapes::family::{self, Family};
use pipewright_shapes::key_range::{divisible, require, sizes, width};
use serde::{Deserialize, Serialize};

use crate::attention::AttentionBias;
use crate::decoder::{BlockForm, DecoderConfig, LayerForm, MixtureConfig, QueryKeyNorm, SharedForm};
use crate::decoder_family::DecoderFamily;
use crate::delta::DeltaForm;

/// A Qwen3-Next model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Qwen3NextConfig {
    /// Sizes and constants. `intermediate_size` is for layers without experts.
    #[serde(flatten)]
    pub decoder: DecoderConfig,
    /// The linear attention.
    #[serde(flatten)]
    pub linear: LinearAttention,
    /// Inner width of the expert that every token goes through.
    pub shared_expert_intermediate_size: usize,
    /// The experts.
    #[serde(flatten)]
    pub mixture: MixtureConfig,
}

/// The linear attention of Qwen3-Next and Qwen3.5.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LinearAttention {
    /// Heads of queries and keys.
    #[serde(default = "key_heads")]
    pub linear_num_key_heads: usize,
    /// Heads of values; neighbours share the queries and keys of a head.
    #[serde(default = "value_heads")]
    pub linear_num_value_heads: usize,
    /// The width of a head of queries or keys.
    #[serde(default = "head_width")]
    pub linear_key_head_dim: usize,
    /// The width of a head of values.
    #[serde(default = "head_width")]
    pub linear_value_head_dim: usize,
    /// The tokens that the convolution sees.
    #[serde(default = "taps")]
    pub linear_conv_kernel_dim: usize,
    /// The kind of each layer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub layer_types: Option<Vec<MixerType>>,
    /// Without a list, the layers whose number, counted from 1, is a multiple of this have full attention.
    #[serde(default = "interval")]
    pub full_attention_interval: usize,
    /// Whether the four linear layers of full attention have a bias. Published models have no such bias.
    #[serde(default)]
    pub attention_bias: bool,
}

/// The kind of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MixerType {
    /// Tokens see all earlier tokens.
    FullAttention,
    /// A state of each head has what it keeps of the earlier tokens.
    LinearAttention,
}

fn key_heads() -> usize {
    family::QWEN3_NEXT.usual("linear_num_key_heads")
}

fn value_heads() -> usize {
    family::QWEN3_NEXT.usual("linear_num_value_heads")
}

fn head_width() -> usize {
    family::QWEN3_NEXT.usual("linear_key_head_dim")
}

fn taps() -> usize {
    family::QWEN3_NEXT.usual("linear_conv_kernel_dim")
}

fn interval() -> usize {
    4
}

impl LinearAttention {
    /// Makes the linear attention of a model whose attention has these sizes: as many heads of the same width.
    pub(crate) fn of_sizes(decoder: &DecoderConfig) -> Self {
        Self {
            linear_num_key_heads: decoder.num_key_value_heads,
            linear_num_value_heads: decoder.num_attention_heads,
            linear_key_head_dim: decoder.head_dim(),
            linear_value_head_dim: decoder.head_dim(),
            linear_conv_kernel_dim: taps(),
            layer_types: None,
            full_attention_interval: interval(),
            attention_bias: false,
        }
    }

    fn is_linear(&self, index: usize) -> bool {
        match &self.layer_types {
            Some(types) => types.get(index) == Some(&MixerType::LinearAttention),
            None => !(index + 1).is_multiple_of(self.full_attention_interval.max(1)),
        }
    }

    /// Returns the form of a model with `layers` layers, without its experts.
    pub(crate) fn form<'a>(&self, layers: usize, joins_projections: bool) -> BlockForm<'a> {
        let layer = |index| LayerForm { is_linear: self.is_linear(index), ..LayerForm::default() };
        let sizes = DeltaSizes {
            key_heads: self.linear_num_key_heads,
            value_heads: self.linear_num_value_heads,
            key_dim: self.linear_key_head_dim,
            value_dim: self.linear_value_head_dim,
            taps: self.linear_conv_kernel_dim,
        };
        BlockForm {
            bias: AttentionBias::all(self.attention_bias),
            head_norms: QueryKeyNorm::Head,
            norms_add_one: true,
            has_output_gate: true,
            delta: Some(DeltaForm { sizes, joins_projections }),
            layers: (0..layers).map(layer).collect(),
            ..BlockForm::default()
        }
    }

    /// Checks the values for a model with `layers` layers.
    pub(crate) fn check(&self, layers: usize) -> Result<(), ShapeError> {
        let [keys, values] = [
            ("linear_num_key_heads", self.linear_num_key_heads),
            ("linear_num_value_heads", self.linear_num_value_heads),
        ];
        let (key_dim, value_dim) = (self.linear_key_head_dim, self.linear_value_head_dim);
        let dims = [("linear_key_head_dim", key_dim), ("linear_value_head_dim", value_dim)];
        let taps = ("linear_conv_kernel_dim", self.linear_conv_kernel_dim);
        let interval = ("full_attention_interval", self.full_attention_interval);
        sizes(&[keys, values, dims[0], dims[1], taps, interval])?;
        divisible(values, keys)?;
        width(dims[0], keys)?;
        width(dims[1], values)?;
        let listed = self.layer_types.as_ref().map_or(layers, Vec::len);
        require(listed == layers, "layer_types", listed, "a list with an entry for each layer")
    }
}

impl From<DecoderConfig> for Qwen3NextConfig {
    fn from(decoder: DecoderConfig) -> Self {
        let mixture = MixtureConfig::of_width(decoder.intermediate_size);
        let shared_expert_intermediate_size = mixture.moe_intermediate_size;
        Self {
            linear: LinearAttention::of_sizes(&decoder),
            decoder,
            shared_expert_intermediate_size,
            mixture,
        }
    }
}

impl Qwen3NextConfig {
    /// Returns the form of the model. `joins_projections` is a part of [`DeltaForm`].
    pub(crate) fn form_of(&self, joins_projections: bool) -> BlockForm<'_> {
        BlockForm {
            mixture: Some(&self.mixture),
            shared_expert: Some(SharedForm { inner: self.shared_expert_intermediate_size, has_gate: true }),
            ..self.linear.form(self.decoder.num_hidden_layers, joins_projections)
        }
    }
}

impl DecoderFamily for Qwen3NextConfig {
    const ROW: Family = family::QWEN3_NEXT;
    const ROTATES_PARTS: bool = true;

    fn decoder(&self) -> &DecoderConfig {
        &self.decoder
    }

    fn form(&self) -> BlockForm<'_> {
        self.form_of(true)
    }

    fn check_own(&self) -> Result<(), ShapeError> {
        self.linear.check(self.decoder.num_hidden_layers)?;
        sizes(&[("shared_expert_intermediate_size", self.shared_expert_intermediate_size)])
    }
}
