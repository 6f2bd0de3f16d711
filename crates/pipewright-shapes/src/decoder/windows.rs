//! The layers with windows, by the keys of the Qwen families and SmolLM 3.

use serde::{Deserialize, Serialize};

use crate::error::ShapeError;
use crate::key_range::require;

/// The kind of a layer's attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LayerType {
    /// Tokens see a window of earlier tokens.
    SlidingAttention,
    /// Tokens see all earlier tokens.
    FullAttention,
}

/// Returns whether layer `index`, counted from 0, has a window: by the list of kinds, and without a list if
/// `is_usual`.
pub fn has_window(types: Option<&[LayerType]>, index: usize, is_usual: bool) -> bool {
    types.map_or(is_usual, |types| types.get(index) == Some(&LayerType::SlidingAttention))
}

/// Requires that a window has a token.
///
/// # Errors
/// When it has none.
pub fn require_window(window: Option<usize>) -> Result<(), ShapeError> {
    window.map_or(Ok(()), |window| require(window > 0, "sliding_window", window, "at least 1"))
}

/// Requires that a list of kinds has an entry for each layer.
pub fn require_listed(types: Option<&[LayerType]>, layers: usize) -> Result<(), ShapeError> {
    let listed = types.map_or(layers, <[LayerType]>::len);
    require(listed == layers, "layer_types", listed, "a list with an entry for each layer")
}

/// The windows of a model. As in transformers, none of them has an effect unless `use_sliding_window` is
/// true.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerWindows {
    /// Whether layers have the window.
    #[serde(default)]
    pub use_sliding_window: bool,
    /// How many tokens back a token sees in layers with a window, itself included; `None` for all. It is
    /// always written, because readers assume a window if it is absent.
    pub sliding_window: Option<usize>,
    /// Without a list, the layers from this one on have the window, counted from 0; 28 if it is absent. In
    /// Qwen2-MoE, these are the layers that do not have it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_window_layers: Option<usize>,
    /// The kind of each layer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub layer_types: Option<Vec<LayerType>>,
}

/// The value that Hugging Face assumes for `max_window_layers`.
const MAX_WINDOW_LAYERS: usize = 28;

impl LayerWindows {
    /// Returns `max_window_layers`, or the value that Hugging Face assumes for it.
    pub fn max_window_layers(&self) -> usize {
        self.max_window_layers.unwrap_or(MAX_WINDOW_LAYERS)
    }

    /// Returns the window of layer `index`, counted from 0. Without a list of kinds, it has the window if
    /// `is_usual`, which the family decides.
    pub fn window(&self, index: usize, is_usual: bool) -> Option<usize> {
        let has_window = has_window(self.layer_types.as_deref(), index, is_usual);
        self.sliding_window.filter(|_| self.use_sliding_window && has_window)
    }

    /// Returns the windows of the layers of Qwen2 and Qwen3: without a list of kinds, the layers from
    /// `max_window_layers` on have the window.
    pub fn of_layers(&self, count: usize) -> impl Iterator<Item = Option<usize>> {
        (0..count).map(|index| self.window(index, index >= self.max_window_layers()))
    }

    /// Checks the windows of a model with this number of layers.
    ///
    /// # Errors
    /// When the window has no token, when layers use a window that is not given, when the list does not have
    /// an entry for each layer, or when it names layers with a window that the model does not have.
    pub fn check(&self, layers: usize) -> Result<(), ShapeError> {
        let window = self.sliding_window.filter(|_| self.use_sliding_window);
        require_window(window)?;
        require(
            window.is_some() || !self.use_sliding_window,
            "sliding_window",
            "null",
            "a number of tokens, because `use_sliding_window` is true",
        )?;
        let types = self.layer_types.as_deref();
        require_listed(types, layers)?;
        let has_windows = types.is_some_and(|types| types.contains(&LayerType::SlidingAttention));
        require(
            window.is_some() || !has_windows,
            "layer_types",
            "sliding_attention",
            "full_attention, because `use_sliding_window` is not true or `sliding_window` is null",
        )
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn check(keys: Value, expected: [Option<usize>; 3]) {
        let windows: LayerWindows = serde_json::from_value(keys.clone()).expect("it is valid");
        windows.check(3).expect("it is valid");
        let found: Vec<_> = windows.of_layers(3).collect();
        assert_eq!(found, expected, "{keys}");
    }

    // The layers are those of `Qwen2Config` and `Qwen3Config` of transformers 5.23.

    #[test]
    fn layers_have_windows_as_in_transformers() {
        let used = |mut keys: Value| {
            keys["use_sliding_window"] = true.into();
            keys["sliding_window"] = 5.into();
            keys
        };
        let types = json!(["sliding_attention", "full_attention", "sliding_attention"]);
        check(json!({}), [None; 3]);
        check(json!({"sliding_window": 5, "max_window_layers": 0}), [None; 3]);
        check(used(json!({})), [None; 3]);
        check(used(json!({"max_window_layers": 1})), [None, Some(5), Some(5)]);
        check(used(json!({"max_window_layers": 3})), [None; 3]);
        check(used(json!({"layer_types": types, "max_window_layers": 0})), [Some(5), None, Some(5)]);
    }

    #[test]
    fn windows_without_a_meaning_are_refused() {
        let refused = |keys: Value, part: &str| {
            let windows: LayerWindows = serde_json::from_value(keys).expect("it has the right types");
            let error = windows.check(2).expect_err(part).to_string();
            assert!(error.contains(part), "{error}");
        };
        refused(json!({"use_sliding_window": true, "sliding_window": 0}), "`sliding_window = 0`");
        refused(json!({"layer_types": ["full_attention"]}), "a list with an entry for each layer");
        let types = json!(["full_attention", "sliding_attention"]);
        refused(json!({"sliding_window": 5, "layer_types": types}), "`layer_types = sliding_attention`");
        refused(json!({"use_sliding_window": true, "layer_types": types}), "`sliding_window = null`");
    }
}
