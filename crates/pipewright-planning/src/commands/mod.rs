//! The commands, one file each: the arguments of a command and its calls into the other modules.

pub(crate) mod clusters;
pub(crate) mod compare;
pub(crate) mod lower;
pub(crate) mod plan;
pub(crate) mod schedule;
pub(crate) mod simulate;
pub(crate) mod validate;
pub(crate) mod vpp;
