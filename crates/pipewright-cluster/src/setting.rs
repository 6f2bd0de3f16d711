//! The model, the layout and the machine of a prediction.

use crate::layout::Layout;
use crate::machine::Machine;
use pipewright_shapes::model::Model;

/// A model on a machine in a layout.
#[derive(Debug, Clone, Copy)]
pub struct Setting<'a> {
    /// The model.
    pub model: &'a Model,
    /// The layout.
    pub layout: &'a Layout,
    /// The machine.
    pub machine: &'a Machine,
}

impl Setting<'_> {
    /// Returns the bytes of the hidden states of a microbatch.
    pub fn hidden_bytes(&self) -> f64 {
        2.0 * self.layout.tokens() * self.model.hidden as f64
    }
}
