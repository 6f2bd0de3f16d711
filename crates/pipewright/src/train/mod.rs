//! The training loop: data, learning rate, validation, the [`Trainer`] that feeds a pipeline with them, and
//! the [`RunLog`] that writes the results.

mod learning_rate;
mod rate_schedule;
mod best_loss;
mod token_batch;
mod preference;
mod validation;
mod accumulation;
mod expert_balance;
mod sample;
mod metrics;
mod trainer;
mod tensorboard;
mod run_log;
mod step_prediction;
mod checkpoint_pace;

pub use accumulation::steps_of_batches;
pub use best_loss::*;
pub use checkpoint_pace::*;
pub use expert_balance::*;
pub use learning_rate::*;
pub use metrics::*;
pub use pipewright_data as data;
pub use preference::{
    LABEL_ACCURACY, PREFERENCE, REFERENCE, REFERENCE_PASS, ReferenceLogProbs, SHARE_CHOSEN,
};
pub use rate_schedule::*;
pub use run_log::*;
pub use sample::Sample;
pub use step_prediction::*;
pub use tensorboard::*;
pub use trainer::*;
pub use validation::*;
