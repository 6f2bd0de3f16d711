//! The files that patterns name.

pub(crate) mod pattern;
pub(crate) mod find;
