//! Pipeline-parallel training on Burn.
mod autodiff;
pub mod boundary;
pub mod driver;
mod executor;
pub mod failure;
pub mod memory;
pub mod microbatch;
pub mod pipeline;
mod progress;
pub mod report;
pub mod stage;
pub mod transport;
pub mod value;
