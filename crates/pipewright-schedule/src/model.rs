//! A model as the engine sees it: a list of named layers with their sizes and relative costs.
//!
//! Model families describe themselves with these types. The engine cuts the description into stages
//! ([`mod@crate::partition`]) and does not know what a layer computes.

use std::ops::Range;

use serde::{Deserialize, Serialize};

/// The kind of the layer with the whole embedding of the tokens.
pub const EMBEDDING: &str = "embedding";
/// The kind of a layer that is one of the parts into which the head is cut along the vocabulary. Such layers
/// are the last ones of a model.
pub const HEAD_PART: &str = "head part";
/// The kind of a layer that is one of the parts into which the embedding is cut along the vocabulary. Such
/// layers are the first ones of a model.
pub const EMBEDDING_PART: &str = "embedding part";

/// The kind of the layer with the whole head.
pub const HEAD: &str = "head";
/// The kind of a layer that predicts a token after the next one. Such layers come directly before the head.
pub const PREDICTION: &str = "prediction";

/// Returns whether layers of this kind are the embedding or a part of it. Profiles may have the names of other
/// systems.
pub(crate) fn is_embedding(kind: &str) -> bool {
    let kind = kind.to_lowercase();
    kind.starts_with("embed") || kind == "tok_embeddings"
}

/// Returns whether layers of this kind are the head or a part of it. Profiles may have the names of other
/// systems.
pub(crate) fn is_head(kind: &str) -> bool {
    [HEAD, HEAD_PART, "lm_head", "output", "loss"].contains(&kind.to_lowercase().as_str())
}

/// The description of a model: its layers in order.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct ModelDesc {
    /// The layers in the order in which data passes through them.
    pub layers: Vec<LayerDesc>,
}

/// The description of a layer, the smallest unit that a partition moves between stages.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct LayerDesc {
    /// The layer's global module path, such as `layers.3`: the prefix of its parameters in a checkpoint.
    pub path: String,
    /// The kind of layer, as the model family calls it, such as `decoder`.
    pub kind: String,
    /// The number of scalar parameters, without copies of parameters that another layer has.
    pub parameters: u64,
    /// The number of scalar parameters that the layer has a copy of, such as the table of the embedding in a
    /// tied head. A copy takes memory and is updated like the layer's own parameters.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub copied: u64,
    /// The layer's cost relative to the other layers, in any unit; `weighted` and `optimal` partitions
    /// balance it.
    pub weight: u64,
    /// The bytes that the layer's forward keeps for its backward, for a microbatch of one row.
    pub activation_bytes: u64,
    /// The bytes that a device other than the processor keeps instead of `activation_bytes`, if these differ:
    /// it may compute the layer with other operations. Partitions and simulations do not read it: who makes
    /// the description of a run for them puts the bytes of the run's devices into `activation_bytes`
    /// (`training_memory::layers_in` of `pipewright-models` does).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device_activation_bytes: Option<u64>,
    /// The bytes of the layer's output, for a microbatch of one row.
    pub output_bytes: u64,
    /// The bytes of the keys and values that an attention of the layer keeps for later slices, for a
    /// microbatch of one row: a part of `activation_bytes`. 0 for other layers.
    #[serde(default)]
    pub keys_values_bytes: u64,
    /// The bytes of the results of normalisations that a backward may compute again, for a microbatch of one
    /// row: a part of `activation_bytes`.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub norms_bytes: u64,
    /// The same for the activation of the feed-forward layer.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub feed_forward_bytes: u64,
    /// The floating-point operations of the layer's matrix products, forward and backward, for a microbatch
    /// of one row; 0 if they are not known.
    #[serde(default)]
    pub products: u64,
    /// The part of `products` in which activations are multiplied with each other, and not with weights: the
    /// scores and values of an attention, or a scan.
    #[serde(default)]
    pub mixing: u64,
    /// The number of scalar parameters that training changes, if these are not `parameters`: the parameters
    /// of adapters, which are not part of `parameters`, or 0 for a frozen layer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trained: Option<u64>,
}

impl ModelDesc {
    /// Returns the weights of the layers in order, as [`crate::partition::partition`] takes them.
    pub fn weights(&self) -> Vec<u64> {
        self.layers.iter().map(|layer| layer.weight).collect()
    }

    /// Returns the layers that are blocks: all but the embedding before them, and the further predictions and
    /// the head behind them. A final norm is a part of the head.
    pub fn blocks(&self) -> Range<usize> {
        let is_last = |layer: &&LayerDesc| is_head(&layer.kind) || layer.kind == PREDICTION;
        let before = self.layers.iter().take_while(|layer| is_embedding(&layer.kind)).count();
        let behind = self.layers[before..].iter().rev().take_while(is_last).count();
        before..self.layers.len() - behind
    }

    /// Returns the longest ranges of consecutive layers that do not differ in anything but their path.
    pub fn runs(&self) -> Vec<Range<usize>> {
        let mut runs: Vec<Range<usize>> = Vec::new();
        for (index, layer) in self.layers.iter().enumerate() {
            match runs.last_mut() {
                Some(run) if self.layers[run.start].is_like(layer) => run.end = index + 1,
                _ => runs.push(index..index + 1),
            }
        }
        runs
    }
}

/// Returns whether a number is left out of a file.
#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
pub(crate) fn is_zero(number: &u64) -> bool {
    *number == 0
}

impl LayerDesc {
    /// Returns whether training changes parameters of the layer.
    pub fn is_trained(&self) -> bool {
        self.trained != Some(0)
    }

    /// Returns the number of scalar parameters that training changes, including copies.
    pub fn trained_parameters(&self) -> u64 {
        self.trained.unwrap_or_else(|| self.parameters.saturating_add(self.copied))
    }

    /// Returns the number of all scalar parameters, including copies and the parameters of adapters.
    pub fn all_parameters(&self) -> u64 {
        self.parameters.saturating_add(self.copied).saturating_add(self.trained.unwrap_or(0))
    }

    /// Returns whether two layers differ in nothing but their path.
    pub fn is_like(&self, other: &Self) -> bool {
        Self { path: self.path.clone(), ..other.clone() } == *self
    }

    /// Returns the bytes of the activations that the layer before this one also keeps, if both are in one
    /// stage, for a microbatch of one row: for two parts of a head, the output of the first, which both need.
    pub fn shared_bytes(&self, before: &Self) -> u64 {
        let are_parts = [self, before].iter().all(|layer| layer.kind == HEAD_PART);
        if are_parts { before.output_bytes.min(self.activation_bytes) } else { 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_of_equal_layers() {
        let layer = |kind: &str, path: &str| LayerDesc {
            path: path.into(),
            kind: kind.into(),
            parameters: 1,
            weight: 2,
            activation_bytes: 3,
            device_activation_bytes: None,
            output_bytes: 4,
            keys_values_bytes: 0,
            norms_bytes: 0,
            feed_forward_bytes: 0,
            products: 0,
            mixing: 0,
            copied: 0,
            trained: None,
        };
        let layers = vec![layer("a", "0"), layer("b", "1"), layer("b", "2"), layer("a", "3")];
        assert_eq!(ModelDesc { layers }.runs(), [0..1, 1..3, 3..4]);
    }
}
