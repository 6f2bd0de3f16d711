//! The training loop: data, learning rate, and the [`Trainer`] that feeds a pipeline with them.

pub mod data;
mod learning_rate;
mod trainer;

pub use learning_rate::*;
pub use trainer::*;
