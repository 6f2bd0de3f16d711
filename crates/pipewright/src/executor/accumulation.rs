//! The batches whose gradients wait for an update.

/// The batches of earlier steps whose gradients are in the sums.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Accumulation {
    /// Their microbatches on this replica.
    pub(super) microbatches: u32,
    /// The sum of their divisors.
    divisor: f64,
}

impl Accumulation {
    pub(super) fn is_empty(self) -> bool {
        self.microbatches == 0
    }

    /// Adds a batch whose gradients wait.
    pub(super) fn add(&mut self, microbatches: u32, divisor: f64) {
        self.microbatches += microbatches;
        self.divisor += divisor;
    }

    /// Returns the divisor of the gradient sums with a last batch of this divisor.
    pub(super) fn divisor_with(self, last: f64) -> f64 {
        self.divisor + last
    }
}
