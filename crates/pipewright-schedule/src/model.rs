//! A model as the engine sees it: a list of named layers with their sizes and relative costs.
//!
//! Not for weights or arithmetic: model families describe themselves with these types, and the engine cuts
//! the description ([`mod@crate::partition`]) without knowing what a layer computes.

use serde::{Deserialize, Serialize};

/// A model, described as the sequence of its layers.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct ModelDesc {
    /// The layers in the order in which the data meets them.
    pub layers: Vec<LayerDesc>,
}

/// One layer: the smallest unit that a partition moves between stages.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerDesc {
    /// The layer's global module path, such as `layers.3`: the prefix of its parameters in a checkpoint.
    pub path: String,
    /// What sort of layer it is, in the model family's words, such as `decoder`.
    pub kind: String,
    /// How many scalar parameters the layer holds.
    pub parameters: u64,
    /// The layer's cost relative to the other layers, in any unit; `weighted` and `optimal` partitions
    /// balance it.
    pub weight: u64,
    /// The bytes that the layer's forward keeps for its backward, for a microbatch of one row.
    pub activation_bytes: u64,
}

impl ModelDesc {
    /// The layers' weights, in layer order: what [`crate::partition::partition`] takes.
    pub fn weights(&self) -> Vec<u64> {
        self.layers.iter().map(|layer| layer.weight).collect()
    }
}
