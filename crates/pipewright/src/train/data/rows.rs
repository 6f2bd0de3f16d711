//! Rows of token ids, returned in batches, epoch after epoch.

use std::sync::Arc;

use serde::Serialize;

use crate::checkpoint::Cursor;
use crate::train::data::config::DataConfig;
use crate::train::data::documents::Documents;
use crate::train::data::error::DataError;
use crate::train::data::ids::Ids;
use crate::train::data::order::permutation;
use crate::train::data::side::{SideError, SideRows, SideTensor};

/// All rows of a data source, and the place of the next row. A clone shares the token ids and side inputs.
#[derive(Clone, Debug)]
pub struct TokenRows {
    ids: Arc<Ids>,
    seq_len: usize,
    stride: Stride,
    rows: u32,
    /// The seed of the order; `None` without shuffling.
    shuffle: Option<u64>,
    cursor: Cursor,
    /// The number of an epoch and its order, which is computed when a row of that epoch is first taken.
    order: Option<(u64, Vec<u32>)>,
    /// The side inputs of all rows.
    side: Option<Arc<SideRows>>,
    documents: Option<Documents>,
}

/// The identity of a data source. Two sources with the same identity return the same rows in the same order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DataIdentity {
    /// The number of token ids.
    pub tokens: usize,
    /// The number of rows per epoch.
    pub rows: usize,
    /// Tokens per row.
    pub seq_len: usize,
    /// The seed of the order; `None` without shuffling.
    pub shuffle_seed: Option<u64>,
    /// The BLAKE3 hash of the token ids, in hexadecimal.
    pub hash: String,
    /// Where documents begin, and whether a token sees other documents in its row; left out without
    /// documents.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub documents: Option<Documents>,
}

/// Rows for one step: the inputs of the model and their targets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenBatch {
    /// Token ids of shape `[rows, seq_len]`, row by row.
    pub inputs: Vec<i32>,
    /// The successor of each input, of the same shape.
    pub targets: Vec<i32>,
    /// The number of rows.
    pub rows: usize,
    /// Tokens per row.
    pub seq_len: usize,
    /// The side inputs of the rows.
    pub side: Vec<SideTensor>,
}

/// How rows are cut from the stream of ids.
#[derive(Clone, Copy, Debug)]
pub(super) enum Stride {
    /// No two rows share an id.
    Disjoint,
    /// The last id of a row is the first id of the next row.
    Overlapping,
}

impl Stride {
    /// Returns the number of ids from the start of one row to the start of the next.
    fn length(self, seq_len: usize) -> usize {
        match self {
            Self::Disjoint => seq_len + 1,
            Self::Overlapping => seq_len,
        }
    }

    /// Returns the number of whole rows in `ids` ids.
    fn rows(self, ids: usize, seq_len: usize) -> Result<u32, DataError> {
        let rows = match self {
            Self::Disjoint => ids / (seq_len + 1),
            Self::Overlapping => ids.saturating_sub(1) / seq_len.max(1),
        };
        u32::try_from(rows).map_err(|_| DataError::ManyRows { found: rows })
    }
}

impl TokenRows {
    pub(super) fn new(ids: Ids, stride: Stride, config: &DataConfig) -> Result<Self, DataError> {
        let seq_len = config.seq_len;
        Ok(Self {
            rows: stride.rows(ids.len(), seq_len)?,
            ids: Arc::new(ids),
            seq_len,
            stride,
            shuffle: config.shuffle.then_some(config.seed),
            cursor: Cursor::default(),
            order: None,
            side: None,
            documents: config.documents,
        })
    }

    /// Splits the last `share` of the data off, a number between 0 and 1, and returns both parts. No id is in
    /// both. The second part is not shuffled. Either may have too few rows for a batch, which the caller
    /// checks.
    ///
    /// # Errors
    /// When a part has more rows than an epoch can number, or when the rows of a text have side inputs, which
    /// would not belong to the rows of the second part.
    pub fn hold_out(mut self, share: f64) -> Result<(Self, Self), DataError> {
        if self.side.is_some() && matches!(self.stride, Stride::Overlapping) {
            return Err(DataError::SideOfText);
        }
        // Rows of a text may begin anywhere, so any number of ids can be held out; other rows are held out as
        // a whole.
        let unit = match self.stride {
            Stride::Disjoint => self.stride.length(self.seq_len),
            Stride::Overlapping => 1,
        };
        let units = self.ids.len() / unit;
        let held = ((units as f64 * share).round() as usize).min(units);
        let ids = Arc::make_mut(&mut self.ids).split_off((units - held) * unit);
        self.rows = self.stride.rows(self.ids.len(), self.seq_len)?;
        let rows = self.stride.rows(ids.len(), self.seq_len)?;
        let side = self.side.as_mut().map(|side| Arc::new(Arc::make_mut(side).split_off(units - held)));
        (self.cursor, self.order) = (Cursor::default(), None);
        let Self { seq_len, stride, cursor, documents, .. } = self;
        let ids = Arc::new(ids);
        let held = Self { ids, seq_len, stride, rows, shuffle: None, cursor, order: None, side, documents };
        Ok((self, held))
    }

    /// Returns an error if there are fewer rows than a batch of `batch_rows` takes.
    ///
    /// # Errors
    /// When there are fewer rows.
    pub fn require_batch(&self, batch_rows: usize) -> Result<(), DataError> {
        if self.rows() >= batch_rows {
            return Ok(());
        }
        Err(DataError::FewRows { found: self.rows(), needed: batch_rows, seq_len: self.seq_len })
    }

    /// Adds the side inputs of the rows; each batch has the side inputs of its rows.
    ///
    /// # Errors
    /// When a side input has fewer rows.
    pub fn with_side(mut self, side: SideRows) -> Result<Self, SideError> {
        side.check(self.rows())?;
        self.side = Some(Arc::new(side));
        Ok(self)
    }

    /// Returns the next `rows` rows; the first row of the next epoch follows the last row of an epoch.
    ///
    /// Returns an empty batch if there are no rows, which [`DataConfig::open`] accepts only for empty
    /// batches.
    pub fn next_batch(&mut self, rows: usize) -> TokenBatch {
        let rows = if self.rows == 0 { 0 } else { rows };
        let mut inputs = Vec::with_capacity(rows * self.seq_len);
        let mut targets = Vec::with_capacity(rows * self.seq_len);
        let numbers: Vec<usize> = (0..rows).map(|_| self.next_row()).collect();
        for number in &numbers {
            let start = number * self.stride.length(self.seq_len);
            self.ids.copy(start, self.seq_len, &mut inputs);
            self.ids.copy(start + 1, self.seq_len, &mut targets);
        }
        let mut side = self.side.as_ref().map(|side| side.of_rows(&numbers)).unwrap_or_default();
        side.extend(self.documents.iter().flat_map(|documents| documents.side_inputs(&inputs, self.seq_len)));
        TokenBatch { inputs, targets, rows, seq_len: self.seq_len, side }
    }

    /// Returns the number of rows per epoch.
    pub fn rows(&self) -> usize {
        self.rows as usize
    }

    /// Returns the number of tokens of a row that the model receives.
    pub fn seq_len(&self) -> usize {
        self.seq_len
    }

    /// Returns the number of token ids, including ids that do not fill a row.
    pub fn tokens(&self) -> usize {
        self.ids.len()
    }

    /// Returns the properties that must not change when a run resumes at a cursor. Reads all ids.
    pub fn identity(&self) -> DataIdentity {
        DataIdentity {
            tokens: self.tokens(),
            rows: self.rows(),
            seq_len: self.seq_len,
            shuffle_seed: self.shuffle,
            hash: self.ids.hash(),
            documents: self.documents,
        }
    }

    /// Returns the entropy of the tokens' frequencies, in nats. This is the loss of a prediction that uses
    /// only the frequency of each token. Reads all ids.
    pub fn frequency_entropy(&self) -> f64 {
        let all = self.tokens() as f64;
        let part = |count: u64| {
            let share = count as f64 / all;
            -share * share.ln()
        };
        self.ids.counts().into_iter().map(part).sum()
    }

    /// Returns the number of tokens that were fed to the model since the beginning of the first epoch.
    pub fn tokens_seen(&self) -> u64 {
        let Cursor { epoch, index } = self.cursor;
        let rows = epoch.saturating_mul(self.rows.into()).saturating_add(index);
        rows.saturating_mul(self.seq_len as u64)
    }

    /// Returns the number of complete passes over the data, with the fraction of the current epoch.
    pub fn epochs_seen(&self) -> f64 {
        let Cursor { epoch, index } = self.cursor;
        epoch as f64 + index as f64 / f64::from(self.rows.max(1))
    }

    /// Returns the position of the next row.
    pub fn cursor(&self) -> Cursor {
        self.cursor
    }

    /// Continues at another position.
    ///
    /// # Errors
    /// When an epoch has fewer rows.
    pub fn seek(&mut self, cursor: Cursor) -> Result<(), DataError> {
        if cursor.index > u64::from(self.rows) {
            return Err(DataError::Cursor { index: cursor.index, rows: self.rows() });
        }
        self.cursor = cursor;
        Ok(())
    }

    fn next_row(&mut self) -> usize {
        if self.cursor.index >= u64::from(self.rows) {
            self.cursor = Cursor { epoch: self.cursor.epoch.wrapping_add(1), index: 0 };
        }
        let Cursor { epoch, index } = self.cursor;
        self.cursor.index += 1;
        // The index is below the number of rows, which fits.
        let index = index as usize;
        let Some(seed) = self.shuffle else { return index };
        if self.order.as_ref().is_none_or(|(drawn, _)| *drawn != epoch) {
            self.order = Some((epoch, permutation(seed, epoch, self.rows)));
        }
        self.order.as_ref().map_or(index, |(_, order)| order[index] as usize)
    }
}
