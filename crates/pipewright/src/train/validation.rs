//! Validation data, and the loss of a model on it.

use crate::checkpoint::Cursor;
use crate::pipeline::{Pipeline, PipelineError};
use crate::train::data::{DataError, TokenRows};
use crate::train::token_batch::split;

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
        let mut sum = 0.0;
        for _ in 0..self.batches {
            let batch = split(self.rows.next_batch(self.batch_rows), pipeline.eval_microbatches())?;
            sum += pipeline.eval_losses(batch)?.loss();
        }
        Ok(sum / self.batches as f64)
    }
}
