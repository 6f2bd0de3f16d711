//! Files that are read up to a size, folders that only their user can enter, the memory that is free, and whether a
//! schedule fits into it, for the other crates.
//!
//! The crate does not depend on Burn, so that packages without a runtime build quickly.

pub mod bounded_file;
mod folder_error;
#[cfg(unix)]
mod folder_owners;
#[cfg(not(unix))]
mod other_folders;
pub mod machine_memory;
pub mod private_folder;
pub mod schedule_memory;
