//! The evaluations of a run: when they are due, the best loss so far, and whether the run should end.
//!
//! A checkpoint's description has the best loss, so a resumed run compares with it if its evaluations are the
//! same. It also says if the evaluation after its step was left out because of a signal. The resumed run then makes
//! up for it before it takes a step.

use pipewright::checkpoint::Checkpoint;
use pipewright::pipeline::PipelineError;
use pipewright::train::{BestLoss, Metrics, Sample, Trainer, ValidationLosses};
use serde_json::{Map, Value, json};

use crate::settings::run::RunSettings;
use crate::training::prepare::Prepared;
use crate::training::samples::SamplePrompts;

/// The key of the description that holds the state of the evaluations.
const VALIDATION: &str = "validation";

/// The key of the description of a checkpoint whose evaluation was left out.
const LEFT_OUT: &str = "evaluation_left_out";

/// The evaluations of a run.
#[derive(Clone, Debug, Default)]
pub(crate) struct Evaluations {
    every: u64,
    patience: u64,
    best: BestLoss,
    /// The data of the losses. Losses of other data cannot be compared.
    data: Value,
    /// Whether the losses are means over tokens.
    is_of_tokens: bool,
    /// The prompts that the model continues.
    prompts: Option<SamplePrompts>,
    /// The step after which the evaluation is due and was left out.
    left_out: Option<u64>,
}

/// The result of the evaluation that is due after a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Evaluated {
    /// No evaluation was due, or its loss is not the lowest so far.
    NotBest,
    /// The loss is the lowest so far.
    Best,
    /// It was left out, or ended early, because the run was asked to end. The metrics have no results of it.
    LeftOut,
}

impl Evaluations {
    /// Returns the evaluations of a run that starts, or resumes from a checkpoint.
    pub(crate) fn new(prepared: &Prepared, checkpoint: Option<&Checkpoint>) -> Self {
        let RunSettings { eval_every: every, patience, .. } = prepared.settings.run;
        let Some(validation) = prepared.validation.as_ref().filter(|_| every > 0) else {
            return Self::default();
        };
        let batch_rows = prepared.settings.pipeline.rows();
        let data = json!([prepared.validation_identity(), validation.batches(), batch_rows]);
        let stored = checkpoint.and_then(|checkpoint| checkpoint.manifest().description.get(VALIDATION));
        let stored = stored.filter(|stored| stored["data"] == data);
        let (best, prompts) = (stored.map(best_of).unwrap_or_default(), prepared.samples.clone());
        let is_of_tokens = prepared.is_loss_of_tokens();
        let evaluations = Self { every, patience, best, data, is_of_tokens, prompts, left_out: None };
        let left_out = checkpoint.filter(|checkpoint| {
            let description = &checkpoint.manifest().description;
            description.contains_key(LEFT_OUT) && evaluations.are_due(checkpoint.step())
        });
        Self { left_out: left_out.map(Checkpoint::step), ..evaluations }
    }

    /// Returns the step after which the evaluation is due and was left out.
    pub(crate) fn left_out(&self) -> Option<u64> {
        self.left_out
    }

    /// Returns whether an evaluation is due after a step.
    pub(crate) fn are_due(&self, step: u64) -> bool {
        // Steps are counted from 1, so no step is a multiple of 0.
        step.is_multiple_of(self.every)
    }

    /// Evaluates after a step if it is due, and puts the loss and the samples into the metrics. If the run is
    /// asked to end, the evaluation is left out.
    pub(crate) fn after_step(
        &mut self,
        trainer: &mut Trainer,
        metrics: &mut Metrics,
        is_interrupted: bool,
    ) -> Result<Evaluated, PipelineError> {
        if !self.are_due(metrics.step) {
            return Ok(Evaluated::NotBest);
        }
        let outcome = if is_interrupted { Err(PipelineError::Interrupted) } else { self.outcome(trainer) };
        let (losses, samples) = match outcome {
            Err(PipelineError::Interrupted) => {
                self.left_out = Some(metrics.step);
                return Ok(Evaluated::LeftOut);
            }
            outcome => outcome?,
        };
        self.left_out = None;
        if let Some(losses) = losses {
            (metrics.validation_loss, metrics.validation_sources) = (Some(losses.loss), losses.sources);
            metrics.validation_perplexity = self.is_of_tokens.then(|| libm::exp(losses.loss));
            metrics.validation_accuracy = losses.accuracy;
            metrics.validation_preference = losses.preference;
        }
        metrics.samples = samples;
        let is_best = metrics.validation_loss.is_some_and(|loss| self.best.observe(metrics.step, loss));
        Ok(if is_best { Evaluated::Best } else { Evaluated::NotBest })
    }

    /// Returns the losses and the samples of an evaluation.
    fn outcome(
        &self,
        trainer: &mut Trainer,
    ) -> Result<(Option<ValidationLosses>, Vec<Sample>), PipelineError> {
        let losses = trainer.evaluate_sources()?;
        let samples = self.prompts.as_ref().map(|prompts| prompts.sample(trainer)).transpose()?;
        Ok((losses, samples.unwrap_or_default()))
    }

    /// Returns the step with the lowest loss, and that loss.
    pub(crate) fn lowest(&self) -> Option<(u64, f64)> {
        self.best.lowest
    }

    /// Returns whether the run should end, because the loss no longer falls.
    pub(crate) fn are_exhausted(&self) -> bool {
        self.best.is_exhausted(self.patience)
    }

    /// Writes the state into the description of the next checkpoint.
    pub(crate) fn describe(&self, description: &mut Map<String, Value>) {
        if self.every == 0 {
            return;
        }
        let BestLoss { lowest, evaluations_since } = self.best;
        // A number in JSON may come back with another last bit; a text does not.
        let lowest = lowest.map(|(step, loss)| json!({"step": step, "loss": format!("{loss:?}")}));
        let state = json!({"lowest": lowest, "evaluations_since": evaluations_since, "data": self.data});
        description.insert(VALIDATION.to_owned(), state);
        match self.left_out {
            Some(_) => description.insert(LEFT_OUT.to_owned(), true.into()),
            None => description.remove(LEFT_OUT),
        };
    }
}

/// Returns the step with the lowest validation loss before a checkpoint, if it is known.
pub(crate) fn lowest_step(description: &Map<String, Value>) -> Option<u64> {
    let stored = description.get(VALIDATION)?;
    best_of(stored).lowest.map(|(step, _)| step)
}

/// Reads the state in a description. A missing state counts as a run without evaluations.
fn best_of(stored: &Value) -> BestLoss {
    let lowest = &stored["lowest"];
    let loss = lowest["loss"].as_str().and_then(|loss| loss.parse().ok());
    BestLoss {
        lowest: lowest["step"].as_u64().zip(loss),
        evaluations_since: stored["evaluations_since"].as_u64().unwrap_or(0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_state_survives_a_description() {
        for lowest in [None, Some((40, 0.1 + 0.2)), Some((7, f64::NEG_INFINITY))] {
            let best = BestLoss { lowest, evaluations_since: 3 };
            let mut description = Map::new();
            Evaluations { every: 1, best, ..Evaluations::default() }.describe(&mut description);
            assert_eq!(best_of(&description[VALIDATION]), best);
        }
    }
}
