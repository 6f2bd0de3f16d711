//! Arithmetic of the CPU back end on slices of `f32`, in one pass over memory where Burn composes several.
//!
//! This module does not depend on tensors, tapes or stages; [`nn`](crate::nn) puts these functions on the tape. Vector
//! instructions are chosen at run time. No result depends on which were chosen: sums run over a fixed number of lanes,
//! and no multiplication is contracted with an addition. (Matrix products are the exception: their kernels use what the
//! machine has, as Burn's do.)

pub(crate) mod adamw;
pub(crate) mod attention;
pub(crate) mod cached_attention;
pub(crate) mod convolution;
pub(crate) mod cross_entropy;
mod exp;
pub(crate) mod gated_norm;
pub(crate) mod grouped;
pub(crate) mod product;
pub(crate) mod relu_squared;
pub(crate) mod rms_norm;
pub(crate) mod router_losses;
pub(crate) mod routing;
pub(crate) mod scan;
mod simd;
pub(crate) mod squares;
pub(crate) mod swiglu;
