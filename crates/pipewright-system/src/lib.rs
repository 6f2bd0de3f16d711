//! Files that are read up to a size, folders that only their user can enter, the memory that is free, and whether a
//! schedule fits into it, for the other crates.
//!
//! The crate does not depend on Burn, so that packages without a runtime build quickly.

pub mod bounded_file;
pub mod machine_memory;
pub mod private_folder;
pub mod schedule_memory;
