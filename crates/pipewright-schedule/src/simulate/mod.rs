//! Runs programs without tensors: predictions of when each rank does what.
//!
//! [`logical()`] counts every action as one tick, which shows the order of events and proves that a program
//! comes to its end. Its outcome can be looked at as a [`crate::Timeline`], the type that measured runs have
//! too.

pub mod logical;

pub use logical::{LogicalRun, SimulateError, logical};
