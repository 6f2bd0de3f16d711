//! A training run as a library: its settings, from a configuration.
//!
//! The command `pipewright` reads arguments and shows results; what it runs is here.

pub mod text;

pub mod schedule_file;

pub mod settings;

pub mod fault;

pub mod error;

pub mod host_name;

pub mod machine_memory;
