//! Custom operations on Burn's autodiff tape.

mod branch;
mod catch;
mod gradient_root;
mod on_tape;
mod record;

pub(crate) use branch::branch;
pub(crate) use catch::{Caught, catch};
pub(crate) use gradient_root::{GradientSlot, gradient_root};
pub(crate) use on_tape::{inner_of, on_tape_of};
pub(crate) use record::{Rule, record, record_four, record_one};
