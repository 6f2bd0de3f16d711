//! Custom operations on Burn's autodiff tape.

mod gradient_root;

pub(crate) use gradient_root::{GradientSlot, gradient_root};
