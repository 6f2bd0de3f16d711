//! The form of an attention, for sequences of any length.

use std::sync::Arc;

/// The positions of an attention's heads, their scores, and the tokens that each token sees.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionForm {
    /// Elements of a head, an even number.
    pub head_dim: usize,
    /// The rotary positions. An attention without positions has the frequency 0 for every pair.
    pub positions: RotaryPositions,
    /// The factor of the scores, often `1 / sqrt(head_dim)`.
    pub scale: f64,
    /// How many tokens back a token sees, itself included; `None` for all.
    pub window: Option<usize>,
    /// The bound of the scores: `cap tanh(score / cap)` takes the place of a score. `None` for no bound.
    pub cap: Option<f64>,
}

/// Rotary positions (Su et al., 2021) in Hugging Face's layout. At position `p`, element `j` of a head is
/// rotated together with element `j + frequencies.len()`, by the angle `p frequencies[j]`, and both are
/// multiplied by the factor. The elements after these pairs stay as they are.
#[derive(Clone, Debug, PartialEq)]
pub struct RotaryPositions {
    /// The frequency of each pair.
    pub frequencies: Arc<[f32]>,
    /// The factor of the rotated elements.
    pub factor: f32,
}

impl AttentionForm {
    /// Returns the usual form: the frequencies `1 / theta^(2 j / head_dim)`, scores divided by
    /// `sqrt(head_dim)`, and every token sees itself and all tokens before it.
    ///
    /// # Panics
    /// When `head_dim` is odd.
    pub fn rotary(head_dim: usize, theta: f64) -> Self {
        let frequencies = rotary_frequencies(head_dim, theta).into();
        Self { positions: RotaryPositions { frequencies, factor: 1.0 }, ..Self::without_positions(head_dim) }
    }

    /// Returns the usual form without positions.
    pub fn without_positions(head_dim: usize) -> Self {
        let frequencies = vec![0.0; head_dim / 2].into();
        Self {
            head_dim,
            positions: RotaryPositions { frequencies, factor: 1.0 },
            scale: 1.0 / (head_dim as f64).sqrt(),
            window: None,
            cap: None,
        }
    }

    /// Returns the first token of its sequence that the token at `index` sees.
    pub(super) fn first_seen(&self, index: usize) -> usize {
        self.window.map_or(0, |window| (index + 1).saturating_sub(window))
    }
}

/// Returns the frequencies `1 / theta^(2 j / width)` of `width / 2` pairs of elements, in single precision.
///
/// # Panics
/// When `width` is odd.
pub fn rotary_frequencies(width: usize, theta: f64) -> Vec<f32> {
    assert!(width.is_multiple_of(2), "{width} elements: the rotated elements are pairs");
    let frequency = |j: usize| 1.0 / libm::powf(theta as f32, (2 * j) as f32 / width as f32);
    (0..width / 2).map(frequency).collect()
}
