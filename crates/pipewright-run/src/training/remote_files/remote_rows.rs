//! Rows of data that the first process reads.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use pipewright::train::Validation;
use pipewright::train::data::{
    DataError, RowPlace, RowReader, RowsOutline, SideTensor, TokenBatch, TokenRows,
};
use serde::{Deserialize, Serialize};

use crate::error::RunError;
use crate::run_data::{data_config, validation_of};
use crate::settings::Settings;
use crate::training::remote_files::client::{Client, NoAnswer};
use crate::training::remote_files::message::{Answer, Request, RowSet, SideShape};

/// The outlines of the rows of a run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Outlines {
    pub(crate) training: RowsOutline,
    pub(crate) validation: Option<RowsOutline>,
}

/// The data of a run that the first process has.
#[derive(Clone)]
pub(crate) struct RemoteData {
    pub(crate) outlines: Outlines,
    pub(crate) client: Arc<Client>,
}

impl RemoteData {
    /// Returns the training data and the validation data.
    ///
    /// # Errors
    /// Fails if there is too little validation data.
    pub(crate) fn open(&self, settings: &Settings) -> Result<(TokenRows, Option<Validation>), RunError> {
        let config = data_config(settings);
        let reader = |set| reader_of(&self.client, set);
        let Outlines { training, validation } = self.outlines.clone();
        let training = TokenRows::remote(training, &config, reader(RowSet::Training));
        let validation = validation.map(|outline| {
            validation_of(TokenRows::remote(outline, &config, reader(RowSet::Validation)), settings)
        });
        Ok((training, validation.transpose()?))
    }
}

/// Returns the reader of rows of the first process.
pub(crate) fn reader_of(client: &Arc<Client>, set: RowSet) -> Arc<dyn RowReader> {
    Arc::new(Reader { client: client.clone(), set, ahead: Mutex::default() })
}

/// Gets rows from the first process, and the next ones before they are needed.
struct Reader {
    client: Arc<Client>,
    set: RowSet,
    /// The rows that were requested early, with the number of the question.
    ahead: Mutex<Option<(Vec<RowPlace>, u64)>>,
}

impl fmt::Debug for Reader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reader").field("set", &self.set).finish_non_exhaustive()
    }
}

impl Reader {
    fn request(&self, places: &[RowPlace]) -> u64 {
        let places = places.iter().map(|place| (place.source(), place.row())).collect();
        self.client.send(Request::Rows { set: self.set, places }, &[])
    }
}

impl RowReader for Reader {
    fn batch(&self, places: &[RowPlace], next: &[RowPlace]) -> Result<TokenBatch, DataError> {
        let mut ahead = self.ahead.lock().unwrap_or_else(PoisonError::into_inner);
        let number = match ahead.take() {
            Some((early, number)) if early == places => number,
            Some((_, other)) => {
                // The answer must not stay in memory.
                self.client.wait(other).map_err(unread)?;
                self.request(places)
            }
            None => self.request(places),
        };
        if !next.is_empty() {
            *ahead = Some((next.to_vec(), self.request(next)));
        }
        let (answer, bytes) = self.client.wait(number).map_err(unread)?;
        batch_of(answer, &bytes)
            .ok_or_else(|| DataError::new("the first process has sent something else than rows"))
    }
}

/// Returns the failure of rows that do not come.
fn unread(error: NoAnswer) -> DataError {
    DataError::new(error.to_string())
}

/// Returns the rows of an answer.
fn batch_of(answer: Answer, bytes: &[u8]) -> Option<TokenBatch> {
    let Answer::Rows { rows, seq_len, side } = answer else { return None };
    let mut numbers = bytes.as_chunks::<4>().0.iter().map(|number| i32::from_le_bytes(*number));
    let mut take = |count: usize| -> Option<Vec<i32>> {
        let taken: Vec<i32> = numbers.by_ref().take(count).collect();
        (taken.len() == count).then_some(taken)
    };
    let count = rows.checked_mul(seq_len)?;
    let (inputs, targets) = (take(count)?, take(count)?);
    let side = side.into_iter().map(|SideShape { name, shape }| {
        Some(SideTensor { values: take(shape.iter().product())?, name, shape })
    });
    Some(TokenBatch { inputs, targets, rows, seq_len, side: side.collect::<Option<_>>()? })
}
