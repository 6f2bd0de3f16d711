//! The bytes that a rank or a stage holds, by what they are for.
//!
//! Estimates of runs count whole bytes. Predictions for clusters use real numbers, because replicas and tensor
//! ranks divide what they hold together.

use crate::bytes::bytes_text;

/// A number of bytes: a count, or a real number of a prediction.
pub trait ByteCount: Copy + Default + PartialOrd {
    /// Returns the sum. A count that is too large stays at its largest value.
    #[must_use]
    fn plus(self, other: Self) -> Self;

    /// Returns the difference, at least 0.
    #[must_use]
    fn minus(self, other: Self) -> Self;

    /// Returns the whole bytes.
    fn whole(self) -> u64;
}

impl ByteCount for u64 {
    fn plus(self, other: Self) -> Self {
        self.saturating_add(other)
    }

    fn minus(self, other: Self) -> Self {
        self.saturating_sub(other)
    }

    fn whole(self) -> u64 {
        self
    }
}

impl ByteCount for f64 {
    fn plus(self, other: Self) -> Self {
        self + other
    }

    fn minus(self, other: Self) -> Self {
        (self - other).max(0.0)
    }

    fn whole(self) -> u64 {
        self as u64
    }
}

/// The most bytes that a rank or a stage holds.
///
/// ```
/// use pipewright_schedule::held_bytes::HeldBytes;
/// let held = HeldBytes { parameters: 4_u64 << 30, activations: 1 << 20, ..HeldBytes::default() };
/// assert_eq!(held.text(), "parameters 4.0 GiB, activations 1.0 MiB");
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HeldBytes<B = u64> {
    /// The parameters, with their copies in other precisions.
    pub parameters: B,
    /// The gradients of the parameters.
    pub gradients: B,
    /// The state of the optimizer.
    pub optimizer: B,
    /// The tensors that forwards keep for backwards, at their peak.
    pub activations: B,
    /// What is held only in the update, when all activations are gone: the trained parameters and the optimizer's state from
    /// before an update that may be undone, or the copies of the optimizer's state from which a fingerprint is made, unless
    /// batches overlap.
    pub undo: B,
    /// Logits, their gradient, the activations that a backward computes again and the gradients between its operations; 0 if they
    /// are not counted.
    pub temporary: B,
    /// Tensors that collectives and messages are sending or receiving, and the room for reads from files; 0 if they are not
    /// counted.
    pub buffers: B,
    /// The bytes by which the sum of the parts exceeds what is ever held at once, because the parts have their peaks at
    /// different times; 0 if that is not known.
    pub apart: B,
}

impl<B: ByteCount> HeldBytes<B> {
    /// Returns the bytes of parameters, gradients and the optimizer.
    pub fn state(&self) -> B {
        self.parameters.plus(self.gradients).plus(self.optimizer)
    }

    /// Returns the most bytes that are held at once: all parts, with the larger one of the activations and the bytes that can
    /// undo an update.
    pub fn total(&self) -> B {
        let held = if self.undo > self.activations { self.undo } else { self.activations };
        self.state().plus(held).plus(self.temporary).plus(self.buffers).minus(self.apart)
    }

    /// Returns the names of the parts with their bytes, in a fixed order. The bytes that can undo an update are
    /// in the place of activations, and not included.
    pub fn named(&self) -> [(&'static str, B); 6] {
        [
            ("parameters", self.parameters),
            ("gradients", self.gradients),
            ("optimizer", self.optimizer),
            ("activations", self.activations),
            ("temporary", self.temporary),
            ("buffers", self.buffers),
        ]
    }

    /// Names the parts that are not empty, with their bytes.
    pub fn text(&self) -> String {
        let parts = self.named().map(|(name, bytes)| (name, bytes.whole())).into_iter();
        let parts = parts.filter(|(_, bytes)| *bytes > 0);
        parts.map(|(name, bytes)| format!("{name} {}", bytes_text(bytes))).collect::<Vec<_>>().join(", ")
    }
}
