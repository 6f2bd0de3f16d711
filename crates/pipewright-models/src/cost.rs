//! The costs of an element in passes over memory, which are not matrix products.

/// The cost of reading and writing an element in an element-wise pass, in floating point operations of a matrix
/// product. A CPU core computes a few hundred operations of a product in the time in which memory moves ten floats.
pub(crate) const ELEMENT: u64 = 32;

/// Bytes of a number, and of a token id that the embedding keeps for its backward.
pub(crate) const FLOAT: u64 = 4;
pub(crate) const TOKEN_ID: u64 = 8;

/// Element-wise passes of a bias, of a normalisation, of the loss, and of a gated activation, forward and backward.
pub(crate) const BIAS_PASSES: u64 = 4;
pub(crate) const NORM_PASSES: u64 = 16;
pub(crate) const LOSS_PASSES: u64 = 12;
pub(crate) const GATE_PASSES: u64 = 12;
