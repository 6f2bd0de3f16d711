//! What the command line and the Python package ask of the operating system: files up to a size, and the free
//! memory.
//!
//! The crate does not depend on Burn, so that packages without a runtime build quickly.

pub mod bounded_file;
pub mod machine_memory;
pub mod schedule_memory;
