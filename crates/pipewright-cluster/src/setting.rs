//! The model, the layout and the machine of a prediction.

use crate::layout::{Layout, Precision};
use crate::machine::Machine;
use crate::stack_constants::StackConstants;
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
    /// Returns the constants of the stack.
    pub fn stack(&self) -> &StackConstants {
        self.machine.stacks.of(self.layout.implementation.stack)
    }

    /// Returns the operations per second that large products of the stack sustain.
    pub fn product_rate(&self, precision: Precision) -> f64 {
        let stack = self.stack();
        let factor = if precision.is_narrow() { stack.narrow_product } else { stack.product };
        self.machine.product_rate(precision) * factor
    }

    /// Returns the operations per second of long fused attention with heads of this width. Narrow heads fill the
    /// units for products less (FlashAttention 3, arXiv 2407.08608, figure 5: 64 wide heads reach 0.7 of the rate
    /// of 128 wide ones).
    pub fn attention_rate(&self, head_size: u64) -> f64 {
        let narrow = (head_size as f64 / 128.0).min(1.0).sqrt();
        let peak = self.machine.peak(self.layout.precision.outside_products());
        peak * self.machine.constants.attention * self.stack().attention * narrow
    }

    /// Returns the bytes of the hidden states of a microbatch.
    pub fn hidden_bytes(&self) -> f64 {
        self.layout.precision.element_bytes() * self.layout.tokens() * self.model.hidden as f64
    }
}
