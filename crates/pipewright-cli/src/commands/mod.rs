//! One file a command: its arguments, and the calls into the libraries that it makes.

pub(crate) mod check;
mod checkpoint_path;
mod drawing;
mod engine;
pub(crate) mod export;
pub(crate) mod init;
pub(crate) mod inspect;
mod launch;
pub(crate) mod lower;
pub(crate) mod partition;
mod memory;
mod prepare;
mod process_group;
pub(crate) mod resume;
pub(crate) mod run_arguments;
mod run_identity;
pub(crate) mod schedule;
mod schedule_file;
mod schedule_size;
pub(crate) mod simulate;
mod simulation_text;
pub(crate) mod train;
mod training_loop;
pub(crate) mod validate;
pub(crate) mod vpp;
