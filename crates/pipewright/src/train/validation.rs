//! Validation data, and the loss of a model on it.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::batch::SplitRule;
use crate::checkpoint::Cursor;
use crate::nn::PREDICTED_TARGETS;
use crate::pipeline::{EvalSummary, Pipeline, PipelineError};
use crate::train::preference::preference_values;
use crate::train::token_batch::{records_of, split};
use pipewright_data::{DataError, IGNORED_TARGET, RowPlace, TokenBatch, TokenRows};

/// Rows that a model is not trained on. Every evaluation takes the same ones.
#[derive(Debug)]
pub struct Validation {
    rows: TokenRows,
    batch_rows: usize,
    batches: usize,
}

impl Validation {
    /// Makes validation data whose evaluations take the first `batches` batches of `batch_rows` rows; `None`
    /// means all whole batches. Rows after the last whole batch are not used.
    ///
    /// # Errors
    /// When there are fewer batches.
    pub fn new(rows: TokenRows, batch_rows: usize, batches: Option<usize>) -> Result<Self, DataError> {
        let found = rows.rows().checked_div(batch_rows).unwrap_or(0);
        if found == 0 {
            let (found, seq_len) = (rows.rows(), rows.seq_len());
            return Err(DataError::new(format!(
                "the validation data has {found} rows of seq_len {seq_len}, and a batch takes {batch_rows}; give more validation \
                 data or a larger share, a shorter seq_len, or fewer or smaller microbatches"
            )));
        }
        match batches {
            Some(asked) if asked > found => Err(DataError::new(format!(
                "an evaluation takes {asked} batches of {batch_rows} rows, and the validation data has {found}; ask for at most \
                 {found} batches, or give more validation data"
            ))),
            batches => Ok(Self { rows, batch_rows, batches: batches.unwrap_or(found) }),
        }
    }

    /// Returns the rows.
    pub fn rows(&self) -> &TokenRows {
        &self.rows
    }

    /// Returns the number of batches that an evaluation takes.
    pub fn batches(&self) -> usize {
        self.batches
    }

    /// Returns the losses of a model. The sums have the same order for every cut of the model.
    /// `reference` has the log-probabilities of the sequences of preference training.
    pub(super) fn losses(
        &mut self,
        pipeline: &mut Pipeline,
        reference: Option<&[f32]>,
    ) -> Result<ValidationLosses, PipelineError> {
        self.rows.seek(Cursor::default()).expect("every data has a first row");
        let ignores = self.rows.ignores_targets();
        let mixture = self.rows.mixture();
        let microbatches = pipeline.eval_microbatches();
        // Shares of the batch do not count here: the sources need microbatches of equal size.
        let rule = SplitRule::equal(microbatches);
        let mut sources = SourceSums::new(mixture.len(), self.batch_rows, microbatches);
        let places = sources.as_ref().map(|sources| {
            let places = self.rows.next_places(self.batches * self.batch_rows);
            by_source(&places, sources.microbatch_rows)
        });
        let (mut sum, mut weights) = (0.0, 0.0);
        let (mut predicted, mut targets) = (0, 0);
        let mut values: BTreeMap<Arc<str>, f64> = BTreeMap::new();
        for index in 0..self.batches {
            let own = places.as_ref().map(|places| &places[index * self.batch_rows..][..self.batch_rows]);
            let rows = match own {
                Some(places) => self.rows.batch(places)?,
                None => self.rows.next_batch(self.batch_rows)?,
            };
            // Batches without ignored targets have as many targets each.
            let records: Option<f32> = records_of(&rows).map(|records| records.iter().sum());
            let weight = records.map_or_else(|| if ignores { counted(&rows) } else { 1.0 }, f64::from);
            let batch = split(rows, (&rule, pipeline.slices()), ignores, reference)?;
            let summary = pipeline.eval_losses(batch)?;
            if summary.interrupted && index + 1 < self.batches {
                return Err(PipelineError::Interrupted);
            }
            sum += weight * summary.loss();
            weights += weight;
            if let Some([hits, all]) = summary.counts.get(PREDICTED_TARGETS).map(Vec::as_slice) {
                (predicted, targets) = (predicted + hits, targets + all);
            }
            for (name, value) in summary.auxiliary.iter().filter(|_| records.is_some()) {
                *values.entry(name.clone()).or_default() += weight * value;
            }
            if let Some((sources, places)) = sources.as_mut().zip(own) {
                sources.add(places, weight, &summary);
            }
        }
        let of_sources: Vec<Option<f64>> = sources.map(SourceSums::losses).unwrap_or_default();
        let sources = mixture.into_iter().zip(of_sources);
        let sources = sources.map(|(source, loss)| SourceLoss { name: source.name, loss });
        values.values_mut().for_each(|value| *value /= weights);
        let (preference, sources) = (preference_values(&values), sources.collect());
        let accuracy = (targets > 0).then(|| predicted as f64 / targets as f64);
        Ok(ValidationLosses { loss: sum / weights, accuracy, sources, preference })
    }
}

/// The mean cross entropy per token of validation data, in nats.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ValidationLosses {
    /// The loss of all rows.
    pub loss: f64,
    /// The share of the targets that the model predicts ([`predicted_targets`](crate::nn::predicted_targets));
    /// `None` if its last stage does not count them, or no target counts.
    pub accuracy: Option<f64>,
    /// Of each source of a mixture; empty without a mixture, and if the rows of a batch cannot be divided
    /// into microbatches of equal size.
    pub sources: Vec<SourceLoss>,
    /// The values of preference training, as in [`Metrics::preference`](crate::train::Metrics::preference).
    pub preference: BTreeMap<String, f64>,
}

/// The validation loss of a source of a mixture.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SourceLoss {
    /// The patterns of its files.
    pub name: String,
    /// The mean cross entropy per token in nats, over the microbatches that have rows of the source alone;
    /// `None` if there are none, or none of their targets counts.
    pub loss: Option<f64>,
}

/// Returns the places in another order, in which as many microbatches as possible have rows of one source
/// alone. The rows that do not fill such a microbatch come last. Rows of a source keep their order.
fn by_source(places: &[RowPlace], microbatch_rows: usize) -> Vec<RowPlace> {
    let count = places.iter().map(RowPlace::source).max().map_or(0, |last| last + 1);
    let (mut whole, mut rest): (Vec<RowPlace>, _) =
        (Vec::with_capacity(places.len()), Vec::<RowPlace>::new());
    for source in 0..count {
        let own: Vec<RowPlace> = places.iter().filter(|place| place.source() == source).copied().collect();
        let filled = own.len() / microbatch_rows * microbatch_rows;
        whole.extend(&own[..filled]);
        rest.extend(&own[filled..]);
    }
    whole.extend(rest);
    whole
}

/// The sums of the losses of each source, over the microbatches that have rows of it alone.
struct SourceSums {
    microbatch_rows: usize,
    /// The sum of the losses of each source, and of their weights.
    sums: Vec<(f64, f64)>,
}

impl SourceSums {
    /// Returns empty sums; `None` if there are no sources, or microbatches have different numbers of rows.
    fn new(sources: usize, batch_rows: usize, microbatches: u32) -> Option<Self> {
        let microbatch_rows = batch_rows.checked_div(microbatches as usize).filter(|rows| *rows > 0)?;
        let is_even = microbatch_rows * microbatches as usize == batch_rows;
        (sources > 0 && is_even).then(|| Self { microbatch_rows, sums: vec![(0.0, 0.0); sources] })
    }

    /// Adds the losses of a batch, which counts with `weight`.
    fn add(&mut self, places: &[RowPlace], weight: f64, summary: &EvalSummary) {
        let microbatches =
            places.chunks(self.microbatch_rows).zip(&summary.losses).zip(&summary.loss_weights);
        for ((places, loss), share) in microbatches {
            let source = places[0].source();
            // A microbatch whose targets do not count has no loss.
            if places.iter().all(|place| place.source() == source) && *share > 0.0 {
                let (sum, weights) = &mut self.sums[source];
                *sum += weight * share * loss;
                *weights += weight * share;
            }
        }
    }

    fn losses(self) -> Vec<Option<f64>> {
        self.sums.into_iter().map(|(sum, weights)| (weights > 0.0).then(|| sum / weights)).collect()
    }
}

/// Returns the number of targets of a batch that count in the loss.
fn counted(batch: &TokenBatch) -> f64 {
    batch.targets.iter().filter(|target| **target != IGNORED_TARGET).count() as f64
}

#[cfg(test)]
mod tests {
    use super::*;
    use pipewright_data::DataConfig;

    #[test]
    fn microbatches_of_one_source_come_first() {
        let places = [0, 1, 0, 0, 1, 0, 1, 0].into_iter().enumerate();
        let places: Vec<RowPlace> = places.map(|(row, source)| RowPlace::new(source, row)).collect();
        let check = |microbatch_rows, expected: [usize; 8]| {
            let expected: Vec<RowPlace> = expected.into_iter().map(|row| places[row]).collect();
            assert_eq!(by_source(&places, microbatch_rows), expected);
        };
        check(1, [0, 2, 3, 5, 7, 1, 4, 6]);
        check(2, [0, 2, 3, 5, 1, 4, 7, 6]);
        check(4, [0, 2, 3, 5, 7, 1, 4, 6]);
        check(8, [0, 2, 3, 5, 7, 1, 4, 6]);
    }

    #[test]
    fn validation_data_has_whole_batches() {
        let config = DataConfig { seq_len: 4, ..DataConfig::default() };
        let rows = || config.open_text("abcdefghijklmnopqrstuvwxyz", 256, 2).expect("good data");
        let batches = |batch_rows, batches| {
            let made = Validation::new(rows(), batch_rows, batches);
            made.map(|validation| validation.batches()).map_err(|error| error.to_string())
        };
        assert_eq!(batches(2, None), Ok(3));
        assert_eq!(batches(4, None), Ok(1));
        assert_eq!(batches(2, Some(2)), Ok(2));
        let few = "the validation data has 6 rows of seq_len 4, and a batch takes 7; give more validation data or a larger \
                   share, a shorter seq_len, or fewer or smaller microbatches";
        assert_eq!(batches(7, None), Err(few.to_owned()));
        let many = "an evaluation takes 4 batches of 2 rows, and the validation data has 3; ask for at most 3 batches, or \
                    give more validation data";
        assert_eq!(batches(2, Some(4)), Err(many.to_owned()));
    }
}
