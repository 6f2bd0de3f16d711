//! The models of files of published runs: their sizes as TOML, and the checks of them.

use serde::Deserialize;

use crate::run_error::RunError;
use pipewright_shapes::model::{Attention, Block, Dense, Experts, FeedForward, Mixer, Model};
use pipewright_shapes::training::Training;
use pipewright_shapes::vectors::Vectors;

/// The most blocks of a model.
const MAX_BLOCKS: u32 = 10_000;
/// The largest width or number of a part of a model.
const MAX_SIZE: u64 = 1 << 24;

/// A model of a file of published runs.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ModelTable {
    /// The name, which runs refer to.
    pub(crate) name: String,
    layers: u32,
    hidden: u64,
    inner: u64,
    heads: u64,
    key_value_heads: Option<u64>,
    head_size: Option<u64>,
    window: Option<u64>,
    vocabulary: u64,
    activation: Activation,
    gated: bool,
    tied: bool,
    experts: Option<u64>,
    experts_per_token: Option<u64>,
    expert_inner: Option<u64>,
    shared_inner: Option<u64>,
    /// Blocks at the start that are dense although the others have experts.
    #[serde(default)]
    dense_layers: u32,
}

#[derive(Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Activation {
    Gelu,
    Silu,
    Relu2,
}

impl ModelTable {
    fn check_sizes(&self) -> Result<(), RunError> {
        let sizes = [
            ("layers", Some(u64::from(self.layers)), 1, u64::from(MAX_BLOCKS)),
            ("hidden", Some(self.hidden), 1, MAX_SIZE),
            ("inner", Some(self.inner), 1, MAX_SIZE),
            ("heads", Some(self.heads), 1, 1 << 16),
            ("key_value_heads", self.key_value_heads, 1, 1 << 16),
            ("head_size", self.head_size, 1, MAX_SIZE),
            ("window", self.window, 1, MAX_SIZE),
            ("vocabulary", Some(self.vocabulary), 1, 1 << 28),
            // A model with 0 experts is dense.
            ("experts", self.experts, 0, MAX_SIZE),
            ("experts_per_token", self.experts_per_token, 1, MAX_SIZE),
            ("expert_inner", self.expert_inner, 1, MAX_SIZE),
            ("shared_inner", self.shared_inner, 0, MAX_SIZE),
        ];
        for (key, value, least, most) in sizes {
            if let Some(value) = value.filter(|value| !(least..=most).contains(value)) {
                return Err(RunError::ModelSize { key, value, least, most });
            }
        }
        if self.head_size.is_none() && self.heads > self.hidden {
            return Err(RunError::Heads { heads: self.heads, hidden: self.hidden });
        }
        self.check_relations()
    }

    /// Checks the sizes that limit each other.
    fn check_relations(&self) -> Result<(), RunError> {
        let contradiction = |key, value, expected| Err(RunError::Contradiction { key, value, expected });
        let Self { heads, layers, .. } = *self;
        if let Some(shared) = self.key_value_heads.filter(|&shared| !heads.is_multiple_of(shared)) {
            let expected = format!("a number that divides the {heads} heads of queries");
            return contradiction("key_value_heads", shared, expected);
        }
        if self.dense_layers > layers {
            let expected = format!("at most the {layers} `layers`");
            return contradiction("dense_layers", u64::from(self.dense_layers), expected);
        }
        let Some(experts) = self.experts.filter(|&count| count > 0) else { return Ok(()) };
        match self.experts_per_token {
            None => Err(RunError::ExpertsPerToken { experts }),
            Some(used) if used > experts => {
                contradiction("experts_per_token", used, format!("at most the {experts} `experts`"))
            }
            Some(_) => Ok(()),
        }
    }

    /// Makes the model.
    pub(crate) fn model(&self) -> Result<Model, RunError> {
        self.check_sizes()?;
        let dense = FeedForward::Dense(Dense { inner: self.inner, gated: self.gated });
        let routed = self.experts.filter(|&count| count > 0).map(|count| {
            FeedForward::Experts(Experts {
                count,
                per_token: self.experts_per_token.unwrap_or(1),
                expert: Dense { inner: self.expert_inner.unwrap_or(self.inner), gated: self.gated },
                shared_inner: self.shared_inner.unwrap_or(0),
            })
        });
        let mixer = Mixer::Attention(Attention {
            heads: self.heads,
            key_value_heads: self.key_value_heads.unwrap_or(self.heads),
            head_size: self.head_size.unwrap_or(self.hidden / self.heads),
            window: self.window,
        });
        let feed_forward =
            |layer: u32| if layer < self.dense_layers { dense } else { routed.unwrap_or(dense) };
        let gpt = self.activation == Activation::Gelu;
        let block = |layer| Block { mixer, feed_forward: feed_forward(layer), training: Training::Whole };
        let blocks = (0..self.layers).map(block);
        Ok(Model {
            name: self.name.clone(),
            hidden: self.hidden,
            vocabulary: self.vocabulary,
            tied: self.tied,
            blocks: blocks.collect(),
            predictors: 0,
            predictor: Vec::new(),
            counts_predictors: false,
            further_embedding: 0,
            vectors: if gpt { Vectors::GPT } else { Vectors::LLAMA },
            gpt,
        })
    }
}
