//! Token ids and examples, in memory or in an open file.

pub(crate) mod bytes;
pub(crate) mod ids;
pub(crate) mod examples;
