//! Moves tensors on and off the tape.
//!
//! Burn has a kind of tape for each strategy of gradient checkpointing. An operation panics if its inputs are
//! on tapes of two kinds. Burn's own operations put a constant that is off the tape on the tape of the other
//! inputs; the operations of this crate do so with [`on_tape_of`].

use burn::tensor::Tensor;

/// Returns a tensor off the tape that it may be on.
pub(crate) fn inner_of<const D: usize>(tensor: Tensor<D>) -> Tensor<D> {
    if tensor.is_autodiff() { tensor.inner() } else { tensor }
}

/// Returns a tensor as an untracked leaf of the kind of tape that `other` is on. A tensor does not change if
/// it is on a tape, or if `other` is not.
pub(crate) fn on_tape_of<const D: usize, const E: usize>(tensor: Tensor<D>, other: &Tensor<E>) -> Tensor<D> {
    match other.gradient_checkpointing_strategy() {
        Some(strategy) if !tensor.is_autodiff() => {
            tensor.autodiff().with_gradient_checkpointing_strategy(strategy)
        }
        _ => tensor,
    }
}
