//! The parts of a time.

use std::ops::{Add, Mul};

/// Seconds by what they are spent on. Communication counts only as far as it is exposed.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Parts {
    /// Products with matrices of parameters.
    pub products: f64,
    /// Scores, softmax and weighted values, or the scan of a state space.
    pub attention: f64,
    /// Norms, activations, residual sums, casts and the loss.
    pub elementwise: f64,
    /// Waiting of the GPU for kernels that the host launches.
    pub launches: f64,
    /// Collectives of tensor groups.
    pub tensor: f64,
    /// Exchange of tokens between the ranks of experts.
    pub experts: f64,
    /// Exchange of keys and values between the ranks of a sequence.
    pub context: f64,
    /// Waiting for activations on their way to the memory of the host and back.
    pub offload: f64,
    /// Gathers of sharded parameters, and reductions of gradients, that computation does not hide.
    pub data: f64,
}

impl Parts {
    /// Returns the sum of all parts.
    pub fn total(&self) -> f64 {
        self.computation() + self.tensor + self.experts + self.context + self.offload + self.data
    }

    /// Returns the sum of the parts that are not communication.
    pub fn computation(&self) -> f64 {
        self.products + self.attention + self.elementwise + self.launches
    }
}

impl Add for Parts {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            products: self.products + other.products,
            attention: self.attention + other.attention,
            elementwise: self.elementwise + other.elementwise,
            launches: self.launches + other.launches,
            tensor: self.tensor + other.tensor,
            experts: self.experts + other.experts,
            context: self.context + other.context,
            offload: self.offload + other.offload,
            data: self.data + other.data,
        }
    }
}

impl Mul<f64> for Parts {
    type Output = Self;

    fn mul(self, factor: f64) -> Self {
        Self {
            products: self.products * factor,
            attention: self.attention * factor,
            elementwise: self.elementwise * factor,
            launches: self.launches * factor,
            tensor: self.tensor * factor,
            experts: self.experts * factor,
            context: self.context * factor,
            offload: self.offload * factor,
            data: self.data * factor,
        }
    }
}
