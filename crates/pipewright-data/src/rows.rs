//! Rows of token ids, returned in batches, epoch after epoch.

use std::ops::Range;
use std::sync::{Arc, OnceLock};

use crate::batch::TokenBatch;
use crate::collected::{Collected, CollectedContent, Frequencies, Known, Totals};
use crate::config::DataConfig;
use crate::cursor::Cursor;
use crate::documents::Documents;
use crate::error::DataError;
use crate::example_rows::{ExampleRows, Filled};
use crate::formats::format::DataSource;
use crate::identity::DataIdentity;
use crate::order::permutation;
use crate::settings::train_on::LongRecordCount;
use crate::side::{SideError, SideRows};
use crate::storage::examples::RowPart;
use crate::storage::ids::Ids;
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
    known: Known,
}

/// The token ids of rows.
#[derive(Clone, Debug)]
enum Content {
    /// A range of a list of ids that is cut into rows.
    Ids { ids: Arc<Ids>, range: Range<usize>, stride: Stride },
    /// Chats and completions.
    Examples(ExampleRows),
}

impl TokenRows {
    pub(crate) fn new(collected: Collected, config: &DataConfig) -> Result<Self, DataError> {
        let Collected { content, sources, long_records, known } = collected;
        let seq_len = config.seq_len;
        let (content, rows) = match content {
            CollectedContent::Ids(ids, stride) => {
                let rows = stride.rows(ids.len(), seq_len)?;
                (Content::Ids { range: 0..ids.len(), ids: Arc::new(ids), stride }, rows)
            }
            CollectedContent::Examples(examples) => {
                let rows = ExampleRows::new(examples, seq_len, config.packs_examples);
                // Examples are numbered with as many bits.
                let count = rows.len() as u32;
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
            known,
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
            Content::Ids { range, stride, ids } => {
                if self.side.is_some() && matches!(stride, Stride::Overlapping) {
                    return Err(DataError::SideOfText);
                }
                // Rows of a text may begin anywhere, so any number of ids can be held out; other rows are
                // held out as a whole.
                let unit = match stride {
                    Stride::Disjoint => stride.length(self.seq_len),
                    Stride::Overlapping => 1,
                };
                let first = kept(range.len() / unit, share);
                let held = range.start + first * unit..range.end;
                range.end = held.start;
                self.rows = stride.rows(range.len(), self.seq_len)?;
                let rows = stride.rows(held.len(), self.seq_len)?;
                self.known.hash = OnceLock::new();
                (Content::Ids { ids: ids.clone(), range: held, stride: *stride }, rows, first)
            }
            Content::Examples(examples) => {
                let first = kept(examples.len(), share);
                let rows = self.rows - first as u32;
                self.rows = first as u32;
                (Content::Examples(examples.split_off(first)), rows, first)
            }
        };
        let side = self.side.as_mut().map(|side| Arc::new(Arc::make_mut(side).split_off(first)));
        (self.cursor, self.order, self.known.totals) = (Cursor::default(), None, OnceLock::new());
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
    ///
    /// # Errors
    /// When the data is in a file that is read as it is needed, and the file cannot be read or an id in it is
    /// damaged. The cursor then stays at the first of these rows.
    pub fn next_batch(&mut self, rows: usize) -> Result<TokenBatch, DataError> {
        let rows = if self.rows == 0 { 0 } else { rows };
        let first = self.cursor;
        let numbers: Vec<usize> = (0..rows).map(|_| self.next_row()).collect();
        self.batch(&numbers).inspect_err(|_| self.cursor = first)
    }

    /// Reads the rows with these numbers.
    fn batch(&self, numbers: &[usize]) -> Result<TokenBatch, DataError> {
        let rows = numbers.len();
        let seq_len = self.seq_len;
        let Filled { inputs, targets, side: own } = match &self.content {
            Content::Examples(examples) => examples.filled(numbers, seq_len)?,
            Content::Ids { ids, range, stride } => {
                let mut inputs = Vec::with_capacity(rows * seq_len);
                let mut targets = Vec::with_capacity(rows * seq_len);
                let mut row = Vec::new();
                for number in numbers {
                    let start = range.start + number * stride.length(seq_len);
                    row.clear();
                    ids.copy(start, seq_len + 1, &mut row)?;
                    inputs.extend(&row[..seq_len]);
                    targets.extend(&row[1..]);
                }
                let documents = self.documents.iter();
                let side = documents.flat_map(|documents| documents.side_inputs(&inputs, seq_len)).collect();
                Filled { inputs, targets, side }
            }
        };
        let mut side = self.side.as_ref().map(|side| side.of_rows(numbers)).unwrap_or_default();
        side.extend(own);
        Ok(TokenBatch { inputs, targets, rows, seq_len, side })
    }

    /// Returns the next row as its documents, to be shown: one of a list of ids, and the chats or completions of
    /// other rows.
    ///
    /// # Errors
    /// As [`TokenRows::next_batch`].
    pub fn next_row_parts(&mut self) -> Result<Vec<RowPart>, DataError> {
        if self.rows == 0 {
            return Ok(Vec::new());
        }
        let first = self.cursor;
        let row = self.next_row();
        self.row_parts(row).inspect_err(|_| self.cursor = first)
    }

    /// Reads a row as its documents.
    fn row_parts(&self, row: usize) -> Result<Vec<RowPart>, DataError> {
        let seq_len = self.seq_len;
        match &self.content {
            Content::Examples(examples) => examples.parts(row),
            Content::Ids { ids, range, stride } => {
                let mut row_ids = Vec::with_capacity(seq_len + 1);
                ids.copy(range.start + row * stride.length(seq_len), seq_len + 1, &mut row_ids)?;
                let ids = row_ids.into_iter().map(i32::cast_unsigned).collect();
                Ok(vec![RowPart { ids, counts: vec![true; seq_len + 1] }])
            }
        }
    }

    /// Returns whether some targets do not count in the loss. They are [`IGNORED_TARGET`](crate::IGNORED_TARGET).
    pub fn ignores_targets(&self) -> bool {
        matches!(self.content, Content::Examples(_))
    }

    /// Returns the number of targets that count in the loss, if some do not. May read all ids.
    ///
    /// # Errors
    /// As [`TokenRows::next_batch`].
    pub fn counted_targets(&self) -> Result<Option<usize>, DataError> {
        self.ignores_targets().then(|| Ok(self.totals()?.targets)).transpose()
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
            Content::Ids { range, .. } => range.len(),
            Content::Examples(examples) => examples.tokens(),
        }
    }

    /// Returns the properties that must not change when a run resumes at a cursor. May read all ids.
    ///
    /// # Errors
    /// As [`TokenRows::next_batch`].
    pub fn identity(&self) -> Result<DataIdentity, DataError> {
        let hash = match &self.content {
            Content::Ids { .. } => self.content_hash()?,
            Content::Examples(examples) => examples.hash(self.content_hash()?),
        };
        Ok(DataIdentity {
            tokens: self.tokens(),
            rows: self.rows(),
            seq_len: self.seq_len,
            shuffle_seed: self.shuffle,
            hash: hash.to_hex().to_string(),
            documents: self.documents,
        })
    }

    /// Returns the entropy of the targets' frequencies, in nats. This is the loss of a prediction that uses
    /// only the frequency of each token. Targets that do not count in the loss are left out. May read all ids.
    ///
    /// # Errors
    /// As [`TokenRows::next_batch`].
    pub fn frequency_entropy(&self) -> Result<f64, DataError> {
        Ok(self.totals()?.frequency_entropy)
    }

    /// Returns the hash of the ids of these rows, or of the examples of all rows. Reads them for the first call
    /// only.
    fn content_hash(&self) -> Result<blake3::Hash, DataError> {
        if let Some(hash) = self.known.hash.get() {
            return Ok(*hash);
        }
        match &self.content {
            Content::Ids { ids, range, .. } => Ok(self.read_ids(ids, range)?.0),
            Content::Examples(examples) => {
                let hash = examples.content_hash()?;
                Ok(*self.known.hash.get_or_init(|| hash))
            }
        }
    }

    /// Returns the figures of the targets. Reads them for the first call only.
    fn totals(&self) -> Result<Totals, DataError> {
        if let Some(totals) = self.known.totals.get() {
            return Ok(*totals);
        }
        match &self.content {
            Content::Ids { ids, range, .. } => Ok(self.read_ids(ids, range)?.1),
            Content::Examples(examples) => {
                let mut frequencies = Frequencies::default();
                examples.each_target(|id| frequencies.count(id))?;
                Ok(*self.known.totals.get_or_init(|| frequencies.totals()))
            }
        }
    }

    /// Reads all ids once for both figures.
    fn read_ids(&self, ids: &Ids, range: &Range<usize>) -> Result<(blake3::Hash, Totals), DataError> {
        let mut frequencies = Frequencies::default();
        let hash = ids.hash(range, |id| frequencies.count(id))?;
        let totals = self.known.totals.get_or_init(|| frequencies.totals());
        Ok((*self.known.hash.get_or_init(|| hash), *totals))
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
