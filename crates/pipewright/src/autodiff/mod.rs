//! Custom operations on Burn's autodiff tape.

mod branch;
mod gradient_root;

pub(crate) use branch::branch;
pub(crate) use gradient_root::{GradientSlot, gradient_root};
