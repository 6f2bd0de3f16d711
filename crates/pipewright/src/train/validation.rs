//! Validation data, and the loss of a model on it.

use crate::checkpoint::Cursor;
use crate::pipeline::{Pipeline, PipelineError};
use crate::train::token_batch::split;
use pipewright_data::{DataError, IGNORED_TARGET, TokenBatch, TokenRows};

/// Rows that a model is not trained on. Every evaluation takes the same ones.
#[derive(Debug)]
pub struct Validation {
    rows: TokenRows,
    batch_rows: usize,
    batches: usize,
}

impl Validation {
    /// Makes validation data whose evaluations take the first `batches` batches of `batch_rows` rows; `None`
    /// stands for all whole batches. Rows after the last whole batch are not used.
    ///
    /// # Errors
    /// When there are fewer batches.
    pub fn new(rows: TokenRows, batch_rows: usize, batches: Option<usize>) -> Result<Self, DataError> {
        let found = rows.rows().checked_div(batch_rows).unwrap_or(0);
        if found == 0 {
            let seq_len = rows.seq_len();
            return Err(DataError::FewValidationRows { found: rows.rows(), needed: batch_rows, seq_len });
        }
        match batches {
            Some(asked) if asked > found => Err(DataError::FewValidationBatches { asked, found, batch_rows }),
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

    /// Returns the mean cross entropy per token in nats. The sums have the same order for every cut of the
    /// model.
    pub(super) fn loss(&mut self, pipeline: &mut Pipeline) -> Result<f64, PipelineError> {
        self.rows.seek(Cursor::default()).expect("every data has a first row");
        let ignores = self.rows.ignores_targets();
        let (mut sum, mut weights) = (0.0, 0.0);
        for _ in 0..self.batches {
            let rows = self.rows.next_batch(self.batch_rows)?;
            // Batches without ignored targets have as many targets each.
            let weight = if ignores { counted(&rows) } else { 1.0 };
            let batch = split(rows, (pipeline.eval_microbatches(), pipeline.slices()), ignores)?;
            sum += weight * pipeline.eval_losses(batch)?.loss();
            weights += weight;
        }
        Ok(sum / weights)
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
