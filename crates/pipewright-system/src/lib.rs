//! What the other crates need from the operating system: files that are read up to a size or past the page cache, locks,
//! the files of schedules, configurations and profiles, folders that only their user can enter, the memory that is free,
//! whether a schedule fits into it, and the [`failure::Failure`] with which a process ends.
//!
//! The crate does not depend on Burn, so that packages without a runtime build quickly.

pub mod bounded_file;
pub mod direct_file;
pub mod lock_file;
mod folder_error;
#[cfg(unix)]
mod folder_owners;
#[cfg(not(unix))]
mod other_folders;
pub mod machine_memory;
pub mod private_folder;
pub mod schedule_memory;
pub mod schedule_file;
pub mod config_file;
pub mod model_folder;
pub mod profile_file;
pub mod failure;
