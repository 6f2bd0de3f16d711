//! The form of a family's models: the table of the parts in which families differ.

use pipewright_shapes::decoder::{DecoderConfig, MixtureConfig};
use pipewright_shapes::vectors::QueryKeyNorm;

use crate::attention::{AttentionBias, AttentionSizes};
use crate::delta::DeltaForm;
use crate::experts::ExpertForm;
use crate::latent_attention::LatentForm;
use crate::mamba::MambaForm;
use crate::norm::NormForm;
use crate::path_names::PathNames;
use crate::router::GroupChoice;

/// The parts in which families differ. The default is Llama.
#[derive(Clone, Debug, Default)]
pub(crate) struct BlockForm<'a> {
    /// The linear layers of the attention that have a bias.
    pub bias: AttentionBias,
    /// Whether the three linear layers of a dense feed-forward layer have a bias.
    pub mlp_bias: bool,
    /// The normalisations of queries and keys before the rotation.
    pub head_norms: QueryKeyNorm,
    /// The places of a block's normalisations.
    pub norms: NormPlaces,
    /// Whether the weights of normalisations are their factors less one.
    pub norms_add_one: bool,
    /// Whether normalisations subtract the mean and have a bias
    /// ([`NormForm::centres`](crate::norm::NormForm)).
    pub layer_norms: bool,
    /// The function between the matrices of a feed-forward layer.
    pub activation: Activation,
    /// Whether feed-forward layers have no gate.
    pub has_no_gate: bool,
    /// Whether each head has a sink: a further score of every query, whose value is zero.
    pub has_sinks: bool,
    /// The bound of the scores, if there is one: `cap tanh(score / cap)` takes the place of a score.
    pub score_cap: Option<f64>,
    /// The bound of the logits, if there is one.
    pub logit_cap: Option<f64>,
    /// Whether one matrix makes queries, keys and values, and another one the gate and the up projection.
    pub joins_projections: bool,
    /// Whether one matrix makes the gate and the up projection of a layer `shared_mlp`, which is next to the experts if there
    /// are some. Queries, keys and values have matrices of their own.
    pub joins_feed_forward: bool,
    /// Whether files have the matrices of blocks as `[inputs, outputs]`.
    pub inputs_first: bool,
    /// The number of positions that have a trained vector, which is added to the embedding of a token at the
    /// position; `None` if there are no such vectors.
    pub position_table: Option<usize>,
    /// The forms of the first layers, if they have forms of their own.
    pub layers: Vec<LayerForm>,
    /// The factors of parts of the computation.
    pub factors: Factors,
    /// The experts, in a family that has them.
    pub mixture: Option<&'a MixtureConfig>,
    /// The keys of the sizes of experts, for errors.
    pub expert_keys: ExpertKeys,
    /// The form of the experts.
    pub experts: ExpertForm,
    /// How queries grow with the positions of their tokens, in a family in which they do.
    pub query_growth: Option<QueryGrowth>,
    /// How experts are chosen; `None` for the largest probabilities.
    pub router: Option<RouterForm>,
    /// The expert that every token goes through, in a family that has one.
    pub shared_expert: Option<SharedForm>,
    /// The latents of the attention, in a family that has them.
    pub latent: Option<LatentForm>,
    /// Whether the output of each head is multiplied by the sigmoid of a gate, which the projection of the queries makes.
    pub has_output_gate: bool,
    /// The mixer of the layers without attention: Gated DeltaNet.
    pub delta: Option<DeltaForm>,
    /// The mixer of the layers without attention: Mamba-2.
    pub mamba: Option<MambaForm>,
    /// The names of parts of paths in files.
    pub names: PathNames,
}

/// The keys of the sizes of experts in `config.json`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ExpertKeys {
    /// The key of the number of experts.
    pub count: &'static str,
    /// The key of the inner width of an expert.
    pub inner: &'static str,
}

impl Default for ExpertKeys {
    fn default() -> Self {
        Self { count: "num_experts", inner: "moe_intermediate_size" }
    }
}

/// How a router chooses experts by their scores.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RouterForm {
    pub choice: GroupChoice,
    /// Whether the scores are corrected for the choice by numbers that are not trained.
    pub is_corrected: bool,
}

/// The expert that every token goes through.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SharedForm {
    /// Its inner width.
    pub inner: usize,
    /// Whether its output is multiplied by a number of the token, which a linear layer makes.
    pub has_gate: bool,
}

/// The factors of queries, `1 + beta ln(1 + floor(position / length))`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct QueryGrowth {
    pub beta: f64,
    pub length: usize,
}

impl QueryGrowth {
    /// Returns the factor of the queries of a token at this position.
    pub(super) fn factor(self, position: u32) -> f32 {
        1.0 + self.beta as f32 * libm::logf((1 + position as usize / self.length) as f32)
    }
}

/// The places of a block's normalisations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum NormPlaces {
    /// Before the attention and before the feed-forward layer.
    #[default]
    Before,
    /// After each of them, before the result is added to its input.
    After,
    /// Before and after each of them.
    Both,
}

/// The function of the gate of a feed-forward layer, or of its up projection without a gate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Activation {
    /// `x sigmoid(x)`.
    #[default]
    Silu,
    /// The Gaussian error linear unit (Hendrycks and Gimpel, 2016), in the form with tanh.
    GeluTanh,
}

/// The form of a layer's attention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct LayerForm {
    /// How many tokens back a token sees, itself included; `None` for all.
    pub window: Option<usize>,
    /// Whether queries and keys are rotated by their positions.
    pub has_positions: bool,
    /// The base of the rotary frequencies, which are not scaled; `None` for the positions of the model.
    pub theta: Option<f64>,
    /// The divisor of the scores, in addition to the factor of the model's.
    pub score_divisor: f64,
    /// Whether the layer has the mixer of linear attention in place of an attention.
    pub is_linear: bool,
}

impl LayerForm {
    /// Returns twice the number of keys that a token of a sequence of `tokens` sees on average.
    pub(super) fn seen(self, tokens: u64) -> u64 {
        let window = self.window.map_or(tokens, |window| tokens.min(window as u64));
        // The first tokens see fewer keys than the window has.
        2 * window - (window * window).checked_div(tokens).unwrap_or(0)
    }
}

/// Returns the forms of layers that differ in their windows.
pub(crate) fn with_windows(windows: impl Iterator<Item = Option<usize>>) -> Vec<LayerForm> {
    windows.map(|window| LayerForm { window, ..LayerForm::default() }).collect()
}

impl Default for LayerForm {
    fn default() -> Self {
        Self { window: None, has_positions: true, theta: None, score_divisor: 1.0, is_linear: false }
    }
}

/// The factors of parts of the computation, which are 1 in most families.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Factors {
    /// The factor of the embeddings.
    pub embedding: f64,
    /// The factor of the output of an attention or a feed-forward layer, before it is added to its input.
    pub residual: f64,
    /// The factor of the scores; `None` for `1 / sqrt(head_dim)`.
    pub scores: Option<f64>,
    /// The factor of the logits.
    pub logits: f64,
}

impl Default for Factors {
    fn default() -> Self {
        Self { embedding: 1.0, residual: 1.0, scores: None, logits: 1.0 }
    }
}

impl From<&DecoderConfig> for AttentionSizes {
    fn from(config: &DecoderConfig) -> Self {
        Self {
            hidden: config.hidden_size,
            heads: config.num_attention_heads,
            key_heads: config.num_key_value_heads,
            head_dim: config.head_dim(),
        }
    }
}

impl<'a> BlockForm<'a> {
    /// Returns the form of the normalisations.
    pub(crate) fn norm(&self, config: &DecoderConfig) -> NormForm {
        NormForm { epsilon: config.rms_norm_eps, adds_one: self.norms_add_one, centres: self.layer_norms }
    }

    /// Returns the form of layer `index`, counted from 0.
    pub(super) fn layer(&self, index: usize) -> LayerForm {
        self.layers.get(index).copied().unwrap_or_default()
    }

    /// Returns the mixer of linear attention of layer `index`, counted from 0; `None` if it has an attention.
    pub(crate) fn delta_of(&self, index: usize) -> Option<DeltaForm> {
        self.delta.filter(|_| self.layer(index).is_linear)
    }

    /// Returns the mixer of Mamba-2 of layer `index`, counted from 0; `None` if it has another one.
    pub(crate) fn mamba_of(&self, index: usize) -> Option<MambaForm> {
        self.mamba.filter(|_| self.layer(index).is_linear)
    }

    /// Returns the experts of layer `index`, counted from 0; `None` if its feed-forward layer is dense.
    pub(crate) fn mixture_of(&self, index: usize) -> Option<&'a MixtureConfig> {
        self.mixture.filter(|mixture| mixture.is_sparse(index))
    }

    /// Returns the share of each layer's balance loss in the model's, which is the mean over the `layers`
    /// that have experts.
    pub(super) fn balance_share(&self, layers: usize) -> f64 {
        let sparse = (0..layers).filter(|&index| self.mixture_of(index).is_some()).count();
        1.0 / sparse.max(1) as f64
    }
}
