//! Reads the keys of one section by type. Every getter returns a value and records a problem if the written
//! value is wrong.
//!
//! After a problem the getter returns the default, so that one command reports all problems. Checks that
//! compare several keys are skipped if there is a problem, because they would compare defaults that the user
//! did not write.

mod bound;
mod numbers;
mod reader;
mod words;

pub(super) use bound::Bound;
pub(super) use reader::{LARGEST_COUNT, Section, as_number, shown};
