//! Training runs as a library: [`run::Run`] trains a model with the settings of a configuration, writes a folder
//! with metrics, checkpoints and timelines, and continues from that folder.
//!
//! The command `pipewright` reads arguments and shows results; the runs are in this crate. Nothing here prints: a run
//! reports to an [`observer::Observer`], and fails with an [`error::RunError`].

#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

pub mod settings;

pub mod fault;

pub mod error;

pub mod interrupt;

pub mod recovery;

pub mod run_folder;

pub mod run_record;

pub mod fingerprints;

pub mod run_report;

pub mod observer;

pub mod run_watch;

pub mod run_data;

pub mod run_model;

pub mod training;

pub mod resume;

pub mod audit;

mod file_exchange;

mod run_attempt;

pub mod run;

pub mod launch;

pub use error::{ErrorKind, FailedRun, RunError};
pub use observer::Observer;
pub use run::Run;
pub use run_model::RunModel;
