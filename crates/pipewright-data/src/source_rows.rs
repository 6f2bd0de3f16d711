//! The rows of one source: how they are cut from its token ids or examples, and their order.

use std::ops::Range;
use std::sync::{Arc, OnceLock};

use serde::{Deserialize, Serialize};

use crate::bad_records::BadRecords;
use crate::batch::Filling;
use crate::chat::special_tokens::MissingEnd;
use crate::collected::{Collected, CollectedContent, Frequencies, Known, Stride, Totals};
use crate::config::DataConfig;
use crate::documents::{Documents, MadeSides};
use crate::error::DataError;
use crate::example_rows::{ExampleRows, RowFill};
use crate::formats::format::DataSource;
use crate::order::permutation;
use crate::settings::train_on::{LongRecordCount, LongRecords};
use crate::storage::examples::RowPart;
use crate::storage::ids::Ids;

/// All rows of a source. A clone shares the token ids.
#[derive(Clone, Debug)]
pub(crate) struct SourceRows {
    content: RowSource,
    seq_len: usize,
    rows: u32,
    /// The seed of the order; `None` without shuffling.
    pub(crate) shuffle: Option<u64>,
    /// The number of the source, which gives it orders of its own.
    number: u64,
    /// The number of an epoch and its order, which is computed when a row of that epoch is first taken.
    order: Option<(u64, Vec<u32>)>,
    documents: Option<Documents>,
    /// The files by kind.
    pub(crate) files: Vec<DataSource>,
    pub(crate) long_records: LongRecordCount,
    pub(crate) bad_records: Option<BadRecords>,
    pub(crate) missing_end: Option<MissingEnd>,
    known: Known,
}

/// Everything about the rows of a source but the token ids.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct SourceOutline {
    pub(crate) rows: u32,
    pub(crate) tokens: usize,
    pub(crate) shuffle: Option<u64>,
    pub(crate) number: u64,
    pub(crate) ignores_targets: bool,
    pub(crate) sequences: usize,
    pub(crate) sides: MadeSides,
    pub(crate) documents: Option<Documents>,
    pub(crate) hash: [u8; blake3::OUT_LEN],
    pub(crate) targets: usize,
    /// The bits of the entropy of the targets, because a text may change the last one.
    pub(crate) entropy: u64,
}

/// The token ids of rows.
#[derive(Clone, Debug)]
enum RowSource {
    /// A range of a list of ids that is cut into rows.
    Ids { ids: Arc<Ids>, range: Range<usize>, stride: Stride },
    /// Chats and completions.
    Examples(ExampleRows),
    /// Another process has the ids. Its figures of them are known.
    Remote { tokens: usize, ignores_targets: bool, sequences: usize, sides: MadeSides },
}

impl SourceRows {
    /// Returns the rows of the source with this number, counted from 0.
    pub(crate) fn new(collected: Collected, config: &DataConfig, number: u64) -> Result<Self, DataError> {
        let Collected { content, sources, long_records, bad_records, missing_end, known } = collected;
        let seq_len = config.seq_len;
        let (content, rows) = match content {
            CollectedContent::Ids(ids, stride) => {
                let rows = stride.rows(ids.len(), seq_len)?;
                (RowSource::Ids { range: 0..ids.len(), ids: Arc::new(ids), stride }, rows)
            }
            CollectedContent::Examples(examples) => {
                let rows = ExampleRows::new(examples, seq_len, (config.packs_examples, config.preference));
                // Examples are numbered with as many bits.
                let count = rows.len() as u32;
                (RowSource::Examples(rows), count)
            }
        };
        Ok(Self {
            content,
            seq_len,
            rows,
            shuffle: config.shuffle.then_some(config.seed),
            number,
            order: None,
            documents: config.documents,
            files: sources,
            long_records,
            bad_records,
            missing_end,
            known,
        })
    }

    /// Returns everything but the ids. May read all ids.
    pub(crate) fn outline(&self) -> Result<SourceOutline, DataError> {
        let Totals { targets, frequency_entropy } = self.totals()?;
        Ok(SourceOutline {
            rows: self.rows,
            tokens: self.tokens(),
            shuffle: self.shuffle,
            number: self.number,
            ignores_targets: self.ignores_targets(),
            sequences: self.sequences(),
            sides: self.sides(),
            documents: self.documents,
            hash: *self.hash()?.as_bytes(),
            targets,
            entropy: frequency_entropy.to_bits(),
        })
    }

    /// Returns rows that another process has.
    pub(crate) fn remote(outline: SourceOutline, seq_len: usize) -> Self {
        let SourceOutline {
            rows, tokens, shuffle, number, ignores_targets, sequences, sides, documents, ..
        } = outline;
        let totals = Totals { targets: outline.targets, frequency_entropy: f64::from_bits(outline.entropy) };
        let known = Known {
            hash: OnceLock::from(blake3::Hash::from_bytes(outline.hash)),
            totals: OnceLock::from(totals),
        };
        Self {
            content: RowSource::Remote { tokens, ignores_targets, sequences, sides },
            seq_len,
            rows,
            shuffle,
            number,
            order: None,
            documents,
            files: Vec::new(),
            long_records: LongRecordCount {
                treatment: LongRecords::default(),
                long: 0,
                records: 0,
                seq_len,
                is_half: false,
            },
            bad_records: None,
            missing_end: None,
            known,
        }
    }

    /// Splits the last `share` of the rows off, which are not shuffled. No id is in both parts.
    ///
    /// # Errors
    /// When a part has more rows than an epoch can number.
    pub(crate) fn hold_out(mut self, share: f64) -> Result<(Self, Self), DataError> {
        let (content, rows) = match &mut self.content {
            RowSource::Ids { range, stride, ids } => {
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
                (RowSource::Ids { ids: ids.clone(), range: held, stride: *stride }, rows)
            }
            RowSource::Examples(examples) => {
                let first = kept(examples.len(), share);
                let rows = self.rows - first as u32;
                self.rows = first as u32;
                (RowSource::Examples(examples.split_off(first)), rows)
            }
            RowSource::Remote { .. } => return Err(remote()),
        };
        (self.order, self.known.totals) = (None, OnceLock::new());
        let held = Self { content, rows, shuffle: None, ..self.clone() };
        Ok((self, held))
    }

    /// Returns whether rows are cut from a stream, in which they can begin anywhere.
    pub(crate) fn is_stream(&self) -> bool {
        matches!(self.content, RowSource::Ids { stride: Stride::Overlapping, .. })
    }

    /// Returns whether some targets do not count in the loss.
    pub(crate) fn ignores_targets(&self) -> bool {
        match self.content {
            RowSource::Examples(_) => true,
            RowSource::Ids { .. } => false,
            RowSource::Remote { ignores_targets, .. } => ignores_targets,
        }
    }

    /// Returns how much of the rows is filled; `None` if no token only fills them, or another process has the rows.
    pub(crate) fn row_fill(&self) -> Option<RowFill> {
        match &self.content {
            RowSource::Examples(examples) => Some(examples.row_fill()),
            RowSource::Ids { .. } | RowSource::Remote { .. } => None,
        }
    }

    /// Returns the number of sequences of preference training, with the ones of rows that are split off.
    pub(crate) fn sequences(&self) -> usize {
        match &self.content {
            RowSource::Examples(examples) => examples.sequences(),
            RowSource::Remote { sequences, .. } => *sequences,
            RowSource::Ids { .. } => 0,
        }
    }

    /// Counts the sequences of preference training from this number on.
    pub(crate) fn number_sequences_from(&mut self, first: u32) {
        if let RowSource::Examples(examples) = &mut self.content {
            examples.number_from(first);
        }
    }

    /// Returns the side inputs that are made from the token ids.
    pub(crate) fn sides(&self) -> MadeSides {
        match &self.content {
            RowSource::Examples(examples) => examples.sides(),
            RowSource::Remote { sides, .. } => *sides,
            RowSource::Ids { .. } => self.documents.as_ref().map(Documents::sides).unwrap_or_default(),
        }
    }

    /// Returns the number of rows per epoch.
    pub(crate) fn rows(&self) -> u32 {
        self.rows
    }

    /// Returns the number of token ids, including ids that do not fill a row.
    pub(crate) fn tokens(&self) -> usize {
        match &self.content {
            RowSource::Ids { range, .. } => range.len(),
            RowSource::Examples(examples) => examples.tokens(),
            RowSource::Remote { tokens, .. } => *tokens,
        }
    }

    /// Returns the row that follows the first `given` rows: the first row of the next epoch follows the last
    /// row of an epoch. There is at least one row.
    pub(crate) fn row_after(&mut self, given: u64) -> usize {
        let (epoch, index) = (given / u64::from(self.rows), given % u64::from(self.rows));
        // The index is below the number of rows, which fits.
        let index = index as usize;
        let Some(seed) = self.shuffle else { return index };
        if self.order.as_ref().is_none_or(|(drawn, _)| *drawn != epoch) {
            self.order = Some((epoch, permutation((seed, self.number), epoch, self.rows)));
        }
        self.order.as_ref().map_or(index, |(_, order)| order[index] as usize)
    }

    /// Appends a row to a batch. `ids` is memory for its ids.
    ///
    /// # Errors
    /// When the ids cannot be read.
    pub(crate) fn fill(
        &self,
        row: usize,
        filling: &mut Filling,
        ids: &mut Vec<i32>,
    ) -> Result<(), DataError> {
        match &self.content {
            RowSource::Examples(examples) => filling.push_examples(examples.parts(row)),
            RowSource::Remote { .. } => Err(remote()),
            RowSource::Ids { .. } => {
                ids.clear();
                self.copy_ids(row, ids)?;
                filling.push_ids(ids, self.documents.as_ref());
                Ok(())
            }
        }
    }

    /// Reads a row as its documents.
    pub(crate) fn parts(&self, row: usize) -> Result<Vec<RowPart>, DataError> {
        match &self.content {
            RowSource::Examples(examples) => examples.parts(row).map(|part| Ok(part?.0)).collect(),
            RowSource::Remote { .. } => Err(remote()),
            RowSource::Ids { .. } => {
                let mut row_ids = Vec::with_capacity(self.seq_len + 1);
                self.copy_ids(row, &mut row_ids)?;
                let ids = row_ids.into_iter().map(i32::cast_unsigned).collect();
                Ok(vec![RowPart { ids, counts: vec![true; self.seq_len + 1] }])
            }
        }
    }

    /// Appends the ids of a row that is cut from a list of ids.
    fn copy_ids(&self, row: usize, into: &mut Vec<i32>) -> Result<(), DataError> {
        let RowSource::Ids { ids, range, stride } = &self.content else { return Ok(()) };
        ids.copy(range.start + row * stride.length(self.seq_len), self.seq_len + 1, into)
    }

    /// Returns the hash of the rows. May read all ids.
    pub(crate) fn hash(&self) -> Result<blake3::Hash, DataError> {
        match &self.content {
            RowSource::Ids { .. } | RowSource::Remote { .. } => self.content_hash(),
            RowSource::Examples(examples) => Ok(examples.hash(self.content_hash()?)),
        }
    }

    /// Returns the hash of the ids of these rows, or of the examples of all rows. Reads them for the first
    /// call only.
    fn content_hash(&self) -> Result<blake3::Hash, DataError> {
        if let Some(hash) = self.known.hash.get() {
            return Ok(*hash);
        }
        match &self.content {
            RowSource::Ids { ids, range, .. } => Ok(self.read_ids(ids, range)?.0),
            RowSource::Examples(examples) => {
                let hash = examples.content_hash()?;
                Ok(*self.known.hash.get_or_init(|| hash))
            }
            RowSource::Remote { .. } => Err(remote()),
        }
    }

    /// Returns the figures of the targets. Reads them for the first call only.
    pub(crate) fn totals(&self) -> Result<Totals, DataError> {
        if let Some(totals) = self.known.totals.get() {
            return Ok(*totals);
        }
        match &self.content {
            RowSource::Ids { ids, range, .. } => Ok(self.read_ids(ids, range)?.1),
            RowSource::Examples(examples) => {
                let mut frequencies = Frequencies::default();
                examples.each_target(|id| frequencies.count(id))?;
                Ok(*self.known.totals.get_or_init(|| frequencies.totals()))
            }
            RowSource::Remote { .. } => Err(remote()),
        }
    }

    /// Reads all ids once for both figures.
    fn read_ids(&self, ids: &Ids, range: &Range<usize>) -> Result<(blake3::Hash, Totals), DataError> {
        let mut frequencies = Frequencies::default();
        let hash = ids.hash(range, |id| frequencies.count(id))?;
        let totals = self.known.totals.get_or_init(|| frequencies.totals());
        Ok((*self.known.hash.get_or_init(|| hash), *totals))
    }
}

/// Returns the error of a question that only the process with the ids can answer.
fn remote() -> DataError {
    DataError::new("the ids of these rows are in another process; ask the first process of the run")
}

/// Returns how many of `units` units are left if a share of them is held out.
fn kept(units: usize, share: f64) -> usize {
    units - ((units as f64 * share).round() as usize).min(units)
}
