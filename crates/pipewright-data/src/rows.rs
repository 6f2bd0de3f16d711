//! Rows of token ids, returned in batches, epoch after epoch.

use std::sync::Arc;

use serde::Serialize;

use crate::collector::{Collected, CollectedContent};
use crate::config::DataConfig;
use crate::cursor::Cursor;
use crate::documents::Documents;
use crate::error::DataError;
use crate::examples::{ExampleRows, Filled, RowPart};
use crate::formats::format::DataSource;
use crate::ids::{Ids, counts};
use crate::order::permutation;
use crate::settings::train_on::LongRecordCount;
use crate::side::{SideError, SideRows, SideTensor};
use crate::stride::Stride;

/// All rows of a data source, and the place of the next row. A clone shares the token ids and side inputs.
#[derive(Clone, Debug)]
pub struct TokenRows {
    content: Content,
    seq_len: usize,
    rows: u32,
    /// The seed of the order; `None` without shuffling.
    shuffle: Option<u64>,
    cursor: Cursor,
    /// The number of an epoch and its order, which is computed when a row of that epoch is first taken.
    order: Option<(u64, Vec<u32>)>,
    /// The side inputs of all rows.
    side: Option<Arc<SideRows>>,
    documents: Option<Documents>,
    /// The files by kind.
    sources: Arc<[DataSource]>,
    long_records: Option<LongRecordCount>,
}

/// The token ids of rows.
#[derive(Clone, Debug)]
enum Content {
    /// A list of ids that is cut into rows.
    Ids { ids: Arc<Ids>, stride: Stride },
    /// Chats and completions.
    Examples(ExampleRows),
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
    /// The successor of each input, of the same shape; of chats and completions [`IGNORED_TARGET`](crate::IGNORED_TARGET)
    /// where it does not count in the loss.
    pub targets: Vec<i32>,
    /// The number of rows.
    pub rows: usize,
    /// Tokens per row.
    pub seq_len: usize,
    /// The side inputs of the rows.
    pub side: Vec<SideTensor>,
}

impl TokenRows {
    pub(crate) fn new(collected: Collected, config: &DataConfig) -> Result<Self, DataError> {
        let Collected { content, sources, long_records } = collected;
        let seq_len = config.seq_len;
        let (content, rows) = match content {
            CollectedContent::Ids(ids, stride) => {
                let rows = stride.rows(ids.len(), seq_len)?;
                (Content::Ids { ids: Arc::new(ids), stride }, rows)
            }
            CollectedContent::Examples(examples) => {
                let rows = ExampleRows::new(examples, seq_len, config.packs_examples);
                let count = u32::try_from(rows.len());
                let count = count.map_err(|_| DataError::ManyRows { found: rows.len() })?;
                (Content::Examples(rows), count)
            }
        };
        Ok(Self {
            content,
            seq_len,
            rows,
            shuffle: config.shuffle.then_some(config.seed),
            cursor: Cursor::default(),
            order: None,
            side: None,
            documents: config.documents,
            sources: sources.into(),
            long_records: Some(long_records).filter(|count| count.long > 0),
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
        let (content, rows, first) = match &mut self.content {
            Content::Ids { ids, stride } => {
                if self.side.is_some() && matches!(stride, Stride::Overlapping) {
                    return Err(DataError::SideOfText);
                }
                // Rows of a text may begin anywhere, so any number of ids can be held out; other rows are
                // held out as a whole.
                let unit = match stride {
                    Stride::Disjoint => stride.length(self.seq_len),
                    Stride::Overlapping => 1,
                };
                let first = kept(ids.len() / unit, share);
                let held = Arc::make_mut(ids).split_off(first * unit);
                self.rows = stride.rows(ids.len(), self.seq_len)?;
                let rows = stride.rows(held.len(), self.seq_len)?;
                (Content::Ids { ids: Arc::new(held), stride: *stride }, rows, first)
            }
            Content::Examples(examples) => {
                let first = kept(examples.len(), share);
                let rows = self.rows - first as u32;
                self.rows = first as u32;
                (Content::Examples(examples.split_off(first)), rows, first)
            }
        };
        let side = self.side.as_mut().map(|side| Arc::new(Arc::make_mut(side).split_off(first)));
        (self.cursor, self.order) = (Cursor::default(), None);
        let held = Self { content, rows, shuffle: None, side, ..self.clone() };
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
        let numbers: Vec<usize> = (0..rows).map(|_| self.next_row()).collect();
        let seq_len = self.seq_len;
        let Filled { inputs, targets, side: own } = match &self.content {
            Content::Examples(examples) => examples.filled(&numbers, seq_len),
            Content::Ids { ids, stride } => {
                let mut inputs = Vec::with_capacity(rows * seq_len);
                let mut targets = Vec::with_capacity(rows * seq_len);
                for number in &numbers {
                    let start = number * stride.length(seq_len);
                    ids.copy(start, seq_len, &mut inputs);
                    ids.copy(start + 1, seq_len, &mut targets);
                }
                let documents = self.documents.iter();
                let side = documents.flat_map(|documents| documents.side_inputs(&inputs, seq_len)).collect();
                Filled { inputs, targets, side }
            }
        };
        let mut side = self.side.as_ref().map(|side| side.of_rows(&numbers)).unwrap_or_default();
        side.extend(own);
        TokenBatch { inputs, targets, rows, seq_len, side }
    }

    /// Returns the next row as its documents, to be shown: one of a list of ids, and the chats or completions of
    /// other rows.
    pub fn next_row_parts(&mut self) -> Vec<RowPart> {
        if self.rows == 0 {
            return Vec::new();
        }
        let (row, seq_len) = (self.next_row(), self.seq_len);
        match &self.content {
            Content::Examples(examples) => examples.parts(row),
            Content::Ids { ids, stride } => {
                let mut row_ids = Vec::with_capacity(seq_len + 1);
                ids.copy(row * stride.length(seq_len), seq_len + 1, &mut row_ids);
                let ids = row_ids.into_iter().map(i32::cast_unsigned).collect();
                vec![RowPart { ids, counts: vec![true; seq_len + 1] }]
            }
        }
    }

    /// Returns whether some targets do not count in the loss. They are [`IGNORED_TARGET`](crate::IGNORED_TARGET).
    pub fn ignores_targets(&self) -> bool {
        matches!(self.content, Content::Examples(_))
    }

    /// Returns the number of targets that count in the loss, if some do not.
    pub fn counted_targets(&self) -> Option<usize> {
        match &self.content {
            Content::Ids { .. } => None,
            Content::Examples(examples) => Some(examples.tokens().1),
        }
    }

    /// Returns the kinds of files that the rows are from; none for a text in memory.
    pub fn sources(&self) -> &[DataSource] {
        &self.sources
    }

    /// Returns how many chats and completions do not fit into a row, if there are any. They are cut or left
    /// out.
    pub fn long_records(&self) -> Option<LongRecordCount> {
        self.long_records
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
        match &self.content {
            Content::Ids { ids, .. } => ids.len(),
            Content::Examples(examples) => examples.tokens().0,
        }
    }

    /// Returns the properties that must not change when a run resumes at a cursor. Reads all ids.
    pub fn identity(&self) -> DataIdentity {
        DataIdentity {
            tokens: self.tokens(),
            rows: self.rows(),
            seq_len: self.seq_len,
            shuffle_seed: self.shuffle,
            hash: match &self.content {
                Content::Ids { ids, .. } => ids.hash(),
                Content::Examples(examples) => examples.hash(),
            },
            documents: self.documents,
        }
    }

    /// Returns the entropy of the targets' frequencies, in nats. This is the loss of a prediction that uses
    /// only the frequency of each token. Targets that do not count in the loss are left out. Reads all ids.
    pub fn frequency_entropy(&self) -> f64 {
        let counts = match &self.content {
            Content::Ids { ids, .. } => ids.counts(),
            Content::Examples(examples) => counts(examples.targets()),
        };
        let all = counts.iter().sum::<u64>() as f64;
        let part = |count: u64| {
            let share = count as f64 / all;
            -share * share.ln()
        };
        counts.into_iter().map(part).sum()
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

/// Returns how many of `units` units are left if a share of them is held out.
fn kept(units: usize, share: f64) -> usize {
    units - ((units as f64 * share).round() as usize).min(units)
}
