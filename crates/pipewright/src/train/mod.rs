//! The training loop: data, learning rate, validation, and the [`Trainer`] that feeds a pipeline with them.

pub mod data;
mod learning_rate;
mod rate_schedule;
mod best_loss;
mod token_batch;
mod validation;
mod accumulation;
mod trainer;

pub use best_loss::*;
pub use learning_rate::*;
pub use rate_schedule::*;
pub use trainer::*;
pub use validation::*;
