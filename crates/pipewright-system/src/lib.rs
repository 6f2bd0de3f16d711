//! Files that are read up to a size, and the memory that is free, for the command line and the Python package.
//!
//! The crate does not depend on Burn, so that packages without a runtime build quickly.

pub mod bounded_file;
pub mod machine_memory;
pub mod schedule_memory;
