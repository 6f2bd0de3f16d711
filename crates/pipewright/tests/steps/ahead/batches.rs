//! The batches of tests of steps that begin early, and their results.

use pipewright::batch::Batch;
use pipewright::pipeline::{Pipeline, PipelineConfig, StepSummary};

use crate::support::{batch, split};

pub(crate) const MICROBATCHES: u32 = 4;
pub(crate) const RATE: f64 = 1e-2;

/// Returns the batch with this number.
pub(crate) fn numbered(number: u64, config: &PipelineConfig) -> Batch {
    let microbatches = MICROBATCHES * config.data_parallel;
    let part = |seed| split(batch(seed, microbatches), microbatches);
    Batch::new(part(number), part(100 + number))
}

/// The results of a batch, to the bit.
pub(crate) type StepResult = (u64, Vec<f64>, f64, Option<f64>, bool);

pub(crate) fn result_of(summary: &StepSummary) -> StepResult {
    let StepSummary { step, losses, gradient_norm, loss_scale, skipped, .. } = summary;
    (step.get(), losses.clone(), *gradient_norm, *loss_scale, *skipped)
}

/// The parameters after the last step, by path.
pub(crate) fn parameters(pipeline: &mut Pipeline) -> Vec<(String, Vec<f32>)> {
    let all = pipeline.parameters().expect("every rank answers").into_iter();
    let mut all: Vec<_> = all.map(|one| (one.path.to_string(), one.data.iter().collect())).collect();
    all.sort_by(|a: &(String, Vec<f32>), b| a.0.cmp(&b.0));
    all
}

/// Begins a batch. Every `every`th updates.
pub(crate) fn begin(pipeline: &mut Pipeline, number: u64, every: u64, config: &PipelineConfig) {
    let batch = numbered(number, config);
    let begun = if (number + 1).is_multiple_of(every) {
        pipeline.begin(batch, RATE)
    } else {
        pipeline.begin_accumulating(batch)
    };
    begun.expect("it begins");
}
