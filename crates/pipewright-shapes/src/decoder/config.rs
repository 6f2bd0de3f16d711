//! The sizes and constants of a model, and their validation. Their form in a file is in [`super::json`].

use pipewright_schedule::words::counted;
use serde::{Deserialize, Serialize};

use super::rope::{LongRopeScaling, RopeScaling};
use crate::error::ShapeError;
use crate::key_range::{above_zero, divisible, not_below_zero, require, rows, sizes, width};

/// The sizes and constants that families of this form share; they have the names of Hugging Face's
/// `config.json`.
///
/// Deserialising accepts files of old and new versions of Hugging Face's library, fills in its defaults,
/// validates, and refuses settings that change the results and are not implemented.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(remote = "Self")]
pub struct DecoderConfig {
    /// Token ids run from 0 to `vocab_size - 1`.
    pub vocab_size: usize,
    /// Width of the hidden states.
    pub hidden_size: usize,
    /// Inner width of the feed-forward layers.
    pub intermediate_size: usize,
    /// Decoder blocks.
    pub num_hidden_layers: usize,
    /// Query heads.
    pub num_attention_heads: usize,
    /// Key and value heads; each serves `num_attention_heads / num_key_value_heads` query heads.
    pub num_key_value_heads: usize,
    /// Width of a head, `hidden_size / num_attention_heads` when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub head_dim: Option<usize>,
    /// The number that is added to the mean square before the root is taken.
    #[serde(default = "rms_norm_eps")]
    pub rms_norm_eps: f64,
    /// Base of the rotary frequencies.
    #[serde(default = "rope_theta")]
    pub rope_theta: f64,
    /// The scaling of the rotary frequencies, if there is one.
    #[serde(skip)]
    pub rope_scaling: Option<RopeScaling>,
    /// The share of a head's elements that are rotated, from the first one on.
    #[serde(default = "whole", skip_serializing_if = "is_whole")]
    pub partial_rotary_factor: f64,
    /// Standard deviation of initial matrices and embeddings.
    #[serde(default = "initializer_range")]
    pub initializer_range: f64,
    /// The longest sequence that the model is meant for. It does not affect the results, except through
    /// [`RopeScaling::Dynamic`] and [`RopeScaling::LongRope`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_position_embeddings: Option<usize>,
    /// Whether the head uses the embedding's table instead of its own matrix.
    #[serde(default)]
    pub tie_word_embeddings: bool,
    /// The names of the labels, if the head has an output for each label in place of each token id; otherwise none.
    #[serde(skip)]
    pub labels: Vec<String>,
}

/// Returns the value that Hugging Face assumes for `rope_theta`.
fn rope_theta() -> f64 {
    10_000.0
}

/// Returns the share of a head that is rotated if a file does not say it.
fn whole() -> f64 {
    1.0
}

fn is_whole(share: &f64) -> bool {
    *share == whole()
}

/// Returns the value that Hugging Face assumes for `rms_norm_eps`.
fn rms_norm_eps() -> f64 {
    1e-6
}

/// Returns the value that Hugging Face assumes for `initializer_range`.
fn initializer_range() -> f64 {
    0.02
}

impl DecoderConfig {
    /// Makes the configuration of a small model (hidden 64, intermediate 176, 2 blocks) with as many key
    /// heads as query heads and Hugging Face's default constants. Use it as the base of a struct update
    /// (`..`).
    pub fn new(vocab_size: usize, num_attention_heads: usize) -> Self {
        Self {
            vocab_size,
            hidden_size: 64,
            intermediate_size: 176,
            num_hidden_layers: 2,
            num_attention_heads,
            num_key_value_heads: num_attention_heads,
            head_dim: None,
            rms_norm_eps: rms_norm_eps(),
            rope_theta: rope_theta(),
            rope_scaling: None,
            partial_rotary_factor: 1.0,
            initializer_range: initializer_range(),
            max_position_embeddings: None,
            tie_word_embeddings: false,
            labels: Vec::new(),
        }
    }

    /// Returns the width of a head.
    pub fn head_dim(&self) -> usize {
        self.head_dim.unwrap_or(self.hidden_size / self.num_attention_heads.max(1))
    }

    /// Returns how many elements of a head are rotated.
    pub fn rotary_width(&self) -> usize {
        (self.head_dim() as f64 * self.partial_rotary_factor) as usize
    }

    /// Checks that the sizes make a model.
    ///
    /// # Errors
    /// When a key is out of range or does not fit another; the error names the first.
    pub fn validate(&self) -> Result<(), ShapeError> {
        rows(&[("vocab_size", self.vocab_size)])?;
        sizes(&[
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("num_hidden_layers", self.num_hidden_layers),
            ("num_attention_heads", self.num_attention_heads),
            ("num_key_value_heads", self.num_key_value_heads),
        ])?;
        if let Some(longest) = self.max_position_embeddings {
            require(longest > 0, "max_position_embeddings", longest, "at least 1")?;
        }
        if self.head_dim.is_none() {
            divisible(("hidden_size", self.hidden_size), ("num_attention_heads", self.num_attention_heads))?;
        }
        divisible(
            ("num_attention_heads", self.num_attention_heads),
            ("num_key_value_heads", self.num_key_value_heads),
        )?;
        let head_dim = self.head_dim();
        let pairs = head_dim > 0 && head_dim.is_multiple_of(2);
        require(pairs, "head_dim", head_dim, "even, because the rotary embedding rotates pairs")?;
        width(("head_dim", head_dim), ("num_attention_heads", self.num_attention_heads))?;
        self.validate_positions()?;
        above_zero(&[("rms_norm_eps", self.rms_norm_eps), ("rope_theta", self.rope_theta)])?;
        not_below_zero(&[("initializer_range", self.initializer_range)])
    }

    fn validate_positions(&self) -> Result<(), ShapeError> {
        let (share, width) = (self.partial_rotary_factor, self.rotary_width());
        let is_share = share > 0.0 && share <= 1.0 && width > 0 && width.is_multiple_of(2);
        require(
            is_share,
            "partial_rotary_factor",
            share,
            "a share of `head_dim` that is an even number of elements",
        )?;
        match &self.rope_scaling {
            Some(RopeScaling::Dynamic { .. }) => {
                let (key, value) =
                    if share == 1.0 { ("head_dim", width as f64) } else { ("partial_rotary_factor", share) };
                let range = "larger: a head must have more than 2 rotated elements, because the positions are dynamic";
                require(width > 2, key, value, range)?;
                self.require_longest()
            }
            Some(RopeScaling::Yarn(_)) => {
                let theta = self.rope_theta;
                require(
                    theta != 1.0,
                    "rope_theta",
                    theta,
                    "another number than 1, because the positions are yarn",
                )
            }
            Some(RopeScaling::LongRope(long)) => self.validate_longrope(long, width / 2),
            _ => Ok(()),
        }
    }

    /// Requires the length of the model, on which some positions depend.
    fn require_longest(&self) -> Result<(), ShapeError> {
        let longest = self.max_position_embeddings;
        longest.map(drop).ok_or_else(|| ShapeError::missing("max_position_embeddings", "a number"))
    }

    fn validate_longrope(&self, long: &LongRopeScaling, pairs: usize) -> Result<(), ShapeError> {
        let lists = [
            ("rope_scaling.short_factor", &long.short_factor),
            ("rope_scaling.long_factor", &long.long_factor),
        ];
        for (key, divisors) in lists {
            let found = divisors.len();
            if found != pairs {
                let found = counted(found, "number");
                let message = format!(
                    "`{key}` has {found}: it must have {pairs}, one for each pair of rotated elements"
                );
                return Err(ShapeError::new(&[key], message));
            }
        }
        if long.attention_factor.is_some() {
            return Ok(());
        }
        // The factor of rotated elements has the logarithm of the original length as a divisor.
        let original = long.original_max_position_embeddings;
        require(original > 1, "original_max_position_embeddings", original, "above 1")?;
        if long.factor.is_some() { Ok(()) } else { self.require_longest() }
    }
}
