//! The arithmetic that decoder families share, as compositions of Burn operations.
//!
//! Each file has one function from tensors to tensors, so that a fused kernel can take the place of its body. The
//! compositions are chosen for a CPU, where an element-wise pass over memory costs as much as hundreds of multiplications
//! in a matrix product and an exponential ten times as much as an addition: few passes, each exponential computed once.

mod attention;
#[cfg(test)]
mod check;
mod linearize;
mod norm;
mod rotary;
mod swiglu;

pub(crate) use attention::{CausalMask, causal_attention};
pub(crate) use linearize::linearized;
pub(crate) use norm::RmsNorm;
pub(crate) use rotary::Rotary;
pub(crate) use swiglu::swiglu;
