//! The Gemma 2 family: norms before and after both parts of a block, bounded scores and logits, scaled
//! embeddings, and windows in some layers. Keys have the names and the meaning of Hugging Face's
//! `Gemma2ForCausalLM`.

use serde::{Deserialize, Serialize};

use crate::attention::AttentionBias;
use crate::config_key::{Harmless, KeyTable, Refused};
use crate::decoder::{
    Activation, BlockForm, COMPUTED_KEYS, DecoderConfig, Factors, LayerForm, LayerType, NormPlaces,
    has_window, require_listed, require_window,
};
use crate::decoder_family::DecoderFamily;
use crate::error::ConfigError;
use crate::family::AbsentKey;
use crate::key_check::{above_zero, sizes};

/// A Gemma 2 model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Gemma2Config {
    /// Sizes and constants.
    #[serde(flatten)]
    pub decoder: DecoderConfig,
    /// The scores are divided by the root of this number.
    pub query_pre_attn_scalar: usize,
    /// How many tokens back a token sees in layers with a window, itself included; `None` for all.
    pub sliding_window: Option<usize>,
    /// The kind of each layer: `sliding_attention` has the window. Without a list, every second layer sees
    /// all tokens, and the first layer has the window.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub layer_types: Option<Vec<LayerType>>,
    /// The bound of the scores; `None` for no bound.
    pub attn_logit_softcapping: Option<f64>,
    /// The bound of the logits; `None` for no bound.
    pub final_logit_softcapping: Option<f64>,
    /// Whether the four linear layers of the attention have a bias. Published models have no such bias.
    #[serde(default)]
    pub attention_bias: bool,
}

/// The keys with which Gemma 2 and 3 compute, in addition to those of every decoder.
pub(crate) const GEMMA_KEYS: &[&str] =
    &["query_pre_attn_scalar", "sliding_window", "layer_types", "final_logit_softcapping", "attention_bias"];

/// The keys that Gemma 2 and 3 refuse.
pub(crate) const GEMMA_REFUSED: &[Refused] = &[
    Refused { key: "hidden_activation", harmless: Harmless::Word("gelu_pytorch_tanh") },
    Refused { key: "attention_dropout", harmless: Harmless::Number(0.0) },
    Refused { key: "use_bidirectional_attention", harmless: Harmless::False },
];

/// Returns the form that blocks of Gemma 2 and 3 have in common.
pub(crate) fn gemma_form(decoder: &DecoderConfig, query_pre_attn_scalar: usize) -> BlockForm<'static> {
    BlockForm {
        factors: Factors {
            embedding: (decoder.hidden_size as f64).sqrt(),
            scores: Some(1.0 / (query_pre_attn_scalar as f64).sqrt()),
            ..Factors::default()
        },
        norms: NormPlaces::Both,
        norms_add_one: true,
        activation: Activation::GeluTanh,
        ..BlockForm::default()
    }
}

impl From<DecoderConfig> for Gemma2Config {
    fn from(decoder: DecoderConfig) -> Self {
        Self {
            query_pre_attn_scalar: decoder.head_dim(),
            decoder,
            sliding_window: Some(4096),
            layer_types: None,
            attn_logit_softcapping: Some(50.0),
            final_logit_softcapping: Some(30.0),
            attention_bias: false,
        }
    }
}

impl DecoderFamily for Gemma2Config {
    const NAME: &'static str = "gemma2";
    const CLASS: &'static str = "Gemma2ForCausalLM";
    const ACTIVATION: (&'static str, &'static str) = ("hidden_activation", "gelu_pytorch_tanh");
    const KEY_TABLE: &'static KeyTable = &KeyTable {
        computes: &[COMPUTED_KEYS, GEMMA_KEYS, &["attn_logit_softcapping"]],
        ignored: &[&["hidden_act"]],
        refused: &[
            GEMMA_REFUSED,
            &[Refused { key: "sliding_window_size", harmless: Harmless::SameAs("sliding_window") }],
        ],
    };
    const ABSENT_KEYS: &'static [(&'static str, AbsentKey)] = &[
        ("num_key_value_heads", AbsentKey::Count(4)),
        ("head_dim", AbsentKey::Count(256)),
        ("query_pre_attn_scalar", AbsentKey::Count(256)),
        ("sliding_window", AbsentKey::Count(4096)),
        ("attn_logit_softcapping", AbsentKey::Number(50.0)),
        ("final_logit_softcapping", AbsentKey::Number(30.0)),
        ("tie_word_embeddings", AbsentKey::Flag(true)),
    ];

    fn decoder(&self) -> &DecoderConfig {
        &self.decoder
    }

    fn form(&self) -> BlockForm<'_> {
        let types = self.layer_types.as_deref();
        let layer = |index: usize| LayerForm {
            window: self.sliding_window.filter(|_| has_window(types, index, index.is_multiple_of(2))),
            ..LayerForm::default()
        };
        BlockForm {
            bias: AttentionBias::all(self.attention_bias),
            layers: (0..self.decoder.num_hidden_layers).map(layer).collect(),
            score_cap: self.attn_logit_softcapping,
            logit_cap: self.final_logit_softcapping,
            ..gemma_form(&self.decoder, self.query_pre_attn_scalar)
        }
    }

    fn check_own(&self) -> Result<(), ConfigError> {
        require_window(self.sliding_window)?;
        sizes(&[("query_pre_attn_scalar", self.query_pre_attn_scalar)])?;
        let caps = [
            ("attn_logit_softcapping", self.attn_logit_softcapping),
            ("final_logit_softcapping", self.final_logit_softcapping),
        ];
        caps.into_iter().filter_map(|(key, cap)| Some((key, cap?))).try_for_each(|cap| above_zero(&[cap]))?;
        require_listed(self.layer_types.as_deref(), self.decoder.num_hidden_layers)
    }
}
