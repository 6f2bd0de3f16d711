//! A running pipeline: ranks with their stages, and the steps they are asked to take.
//!
//! [`Pipeline::launch`] starts a thread for each rank of this process and makes its stages there. From then on the
//! pipeline hands each rank its part of a step, waits for all answers, and puts them together in a report.

mod config;
mod error;
mod ranks;
mod running;

pub use config::PipelineConfig;
pub use error::PipelineError;
pub use running::{NamedParameter, Pipeline};
