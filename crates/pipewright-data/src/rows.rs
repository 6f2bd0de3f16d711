//! Rows of token ids, returned in batches, epoch after epoch.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::bad_records::BadRecords;
use crate::batch::Filling;
use crate::batch::TokenBatch;
use crate::chat::special_tokens::MissingEnd;
use crate::config::DataConfig;
use crate::documents::{Documents, MadeSides};
use crate::error::DataError;
use crate::example_rows::RowFill;
use crate::formats::format::DataSource;
use crate::interleave::Interleave;
use crate::row_place::{RowPlace, RowReader};
use crate::settings::mix::{MixSource, MixWeight};
use crate::settings::train_on::LongRecordCount;
use crate::side::SideRows;
use crate::source_rows::SourceRows;
use crate::storage::examples::RowPart;

/// All rows of a data source or of a mixture of sources, and the place of the next row. A clone shares the
/// token ids and side inputs.
///
/// Each source of a mixture gives its share of the rows: after any number of rows, its part differs from its
/// share by less than one row. The order depends on the weights, the seed and the number of rows only.
#[derive(Clone, Debug)]
pub struct TokenRows {
    /// At least one source.
    pub(crate) sources: Vec<SourceRows>,
    pub(crate) draws: Interleave,
    /// The settings of the sources of a mixture; empty without one.
    pub(crate) mix: Arc<[MixSource]>,
    pub(crate) seq_len: usize,
    /// The side inputs of all rows.
    pub(crate) side: Option<Arc<SideRows>>,
    pub(crate) documents: Option<Documents>,
    /// The files by kind.
    pub(crate) files: Arc<[DataSource]>,
    /// Gets the rows if another process has them.
    pub(crate) reader: Option<Arc<dyn RowReader>>,
}

/// A source of a mixture.
#[derive(Clone, Debug, PartialEq)]
pub struct MixedRows {
    /// The patterns of its files.
    pub name: String,
    /// Its weight.
    pub weight: MixWeight,
    /// Its part in all rows, a number between 0 and 1.
    pub share: f64,
    /// The number of its rows.
    pub rows: usize,
    /// The number of its token ids, including ids that do not fill a row.
    pub tokens: usize,
}

/// The position in the training data: the next row. Resuming needs only the cursor, the data and the seed.
/// The position in a mixture is the number of rows that all sources have given, in `index`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cursor {
    /// The number of complete passes over the data.
    pub epoch: u64,
    /// The position in the epoch's order, counted from 0; the number of rows at an epoch's very end.
    pub index: u64,
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
    /// The BLAKE3 hash of the token ids, in hexadecimal; of a mixture, of the hashes of its sources.
    pub hash: String,
    /// Where documents begin, and whether a token sees other documents in its row; left out without
    /// documents.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub documents: Option<Documents>,
    /// The sources of a mixture; left out without one.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub mix: Vec<SourceIdentity>,
}

/// The identity of a source of a mixture.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct SourceIdentity {
    /// The weight of the source.
    pub weight: MixWeight,
    /// The number of its token ids.
    pub tokens: usize,
    /// The number of its rows.
    pub rows: usize,
    /// The BLAKE3 hash of its token ids, in hexadecimal.
    pub hash: String,
}

impl TokenRows {
    /// Returns the rows of one source.
    pub(crate) fn new(source: SourceRows, config: &DataConfig) -> Self {
        Self::of_sources(vec![source], Interleave::by_share([1]), &[], config)
    }

    /// Returns the rows of the sources of `config.mix`.
    pub(crate) fn mixed(sources: Vec<SourceRows>, config: &DataConfig) -> Result<Self, DataError> {
        let weights: Vec<MixWeight> = config.mix.iter().map(|source| source.weight).collect();
        let rows = Self::of_sources(sources, Interleave::by_weight(&weights), &config.mix, config);
        rows.require_rows()?;
        Ok(rows)
    }

    fn of_sources(
        mut sources: Vec<SourceRows>,
        draws: Interleave,
        mix: &[MixSource],
        config: &DataConfig,
    ) -> Self {
        let mut first = 1;
        for source in &mut sources {
            source.number_sequences_from(first);
            first += source.sequences() as u32;
        }
        let files = DataSource::merged(sources.iter().flat_map(|source| source.files.iter().copied()));
        Self {
            sources,
            draws,
            mix: mix.into(),
            seq_len: config.seq_len,
            side: None,
            documents: config.documents,
            files: files.into(),
            reader: None,
        }
    }

    /// Returns an error if a source of a mixture has no row.
    fn require_rows(&self) -> Result<(), DataError> {
        let mut sources = self.mix.iter().zip(&self.sources);
        sources.find(|(_, rows)| rows.rows() == 0).map_or(Ok(()), |(source, rows)| {
            let (tokens, seq_len) = (rows.tokens(), self.seq_len);
            let problem = format!(
                "this source of `mix` has {tokens} tokens and no row of seq_len {seq_len} to train on; give it more data or a \
                 shorter seq_len, or leave it out"
            );
            Err(DataError::of(source.name().as_ref(), problem))
        })
    }

    /// Splits the last `share` of the data off, a number between 0 and 1, and returns both parts; of a
    /// mixture, the last `share` of each source. No id is in both. The second part is not shuffled, and has
    /// each row of each source once in an epoch. Either may have too few rows for a batch, which the caller
    /// checks.
    ///
    /// # Errors
    /// When a part has more rows than an epoch can number, when the first part of a source of a mixture has
    /// no row, or when the rows of a text have side inputs, which would not belong to the rows of the second
    /// part.
    pub fn hold_out(mut self, share: f64) -> Result<(Self, Self), DataError> {
        if self.side.is_some() && self.sources.iter().any(SourceRows::is_stream) {
            return Err(DataError::new(
                "a share of a text with side inputs cannot be held out, because its rows would be cut at other places; give \
                 files of validation data, or the data as a .jsonl file of token ids",
            ));
        }
        let mut held = self.clone();
        let parts = self.sources.into_iter().map(|source| source.hold_out(share));
        (self.sources, held.sources) = parts.collect::<Result<Vec<_>, _>>()?.into_iter().unzip();
        self.require_rows()?;
        self.draws.seek(0);
        held.draws = Interleave::by_share(held.sources.iter().map(|source| source.rows().into()));
        if let Some(side) = &mut self.side {
            held.side = Some(Arc::new(Arc::make_mut(side).split_off(self.sources[0].rows() as usize)));
        }
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
        Err(DataError::new(format!(
            "the data has {} rows of seq_len {}, and a step's batch takes {batch_rows}; give more data, a shorter seq_len, or \
             fewer or smaller microbatches",
            self.rows(),
            self.seq_len
        )))
    }

    /// Adds the side inputs of the rows; each batch has the side inputs of its rows.
    ///
    /// # Errors
    /// When a side input has fewer rows, the rows are a mixture, or records are left out.
    pub fn with_side(mut self, side: SideRows) -> Result<Self, DataError> {
        if !self.mix.is_empty() {
            return Err(side.of_mixture());
        }
        if let Some(bad) = self.bad_records() {
            return Err(side.of_bad_records(&bad));
        }
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
    /// damaged, or when another process has the rows and does not send them. The cursor then stays at the first of
    /// these rows.
    pub fn next_batch(&mut self, rows: usize) -> Result<TokenBatch, DataError> {
        let first = self.draws.clone();
        let places = self.next_places(rows);
        let batch = match self.reader.clone() {
            Some(reader) => {
                let end = self.draws.clone();
                let next = self.next_places(rows);
                self.draws = end;
                reader.batch(&places, &next)
            }
            None => self.batch(&places),
        };
        batch.inspect_err(|_| self.draws = first)
    }

    /// Returns the places of the next `rows` rows without reading them, as [`TokenRows::next_batch`] takes
    /// them.
    pub fn next_places(&mut self, rows: usize) -> Vec<RowPlace> {
        let rows = if self.rows() == 0 { 0 } else { rows };
        (0..rows).map(|_| self.next_row()).collect()
    }

    /// Returns whether the data has all of these rows.
    pub fn has_places(&self, places: &[RowPlace]) -> bool {
        let has = |place: &RowPlace| {
            self.sources.get(place.source).is_some_and(|source| place.row < source.rows() as usize)
        };
        places.iter().all(has)
    }

    /// Reads rows.
    ///
    /// # Errors
    /// As [`TokenRows::next_batch`].
    ///
    /// # Panics
    /// When a place is one of other rows.
    pub fn batch(&self, places: &[RowPlace]) -> Result<TokenBatch, DataError> {
        if let Some(reader) = &self.reader {
            return reader.batch(places, &[]);
        }
        let sides = self.sources.iter().map(SourceRows::sides).fold(MadeSides::default(), MadeSides::or);
        let (mut filling, mut ids) = (Filling::new(places.len(), self.seq_len, sides), Vec::new());
        for place in places {
            self.sources[place.source].fill(place.row, &mut filling, &mut ids)?;
        }
        let rows = || places.iter().map(|place| place.row).collect::<Vec<_>>();
        Ok(filling.finish(self.side.as_ref().map(|side| side.of_rows(&rows())).unwrap_or_default()))
    }

    /// Returns the next row as its documents, to be shown: one of a list of ids, and the chats or completions of
    /// other rows.
    ///
    /// # Errors
    /// As [`TokenRows::next_batch`].
    pub fn next_row_parts(&mut self) -> Result<Vec<RowPart>, DataError> {
        if self.rows() == 0 {
            return Ok(Vec::new());
        }
        let first = self.draws.clone();
        let RowPlace { source, row } = self.next_row();
        self.sources[source].parts(row).inspect_err(|_| self.draws = first)
    }

    fn next_row(&mut self) -> RowPlace {
        let (source, given) = self.draws.draw();
        RowPlace { source, row: self.sources[source].row_after(given) }
    }

    /// Returns the number of sequences of preference training, with the ones of rows that are held out; 0 for other
    /// training. The side input [`SEQUENCES`](crate::SEQUENCES) has their numbers.
    pub fn sequences(&self) -> usize {
        self.sources.iter().map(SourceRows::sequences).sum()
    }

    /// Returns the places of all rows, in the order of the sources.
    pub fn all_places(&self) -> Vec<RowPlace> {
        let of = |(source, rows): (usize, &SourceRows)| {
            (0..rows.rows() as usize).map(move |row| RowPlace { source, row })
        };
        self.sources.iter().enumerate().flat_map(of).collect()
    }

    /// Returns whether some targets do not count in the loss. They are [`IGNORED_TARGET`](crate::IGNORED_TARGET).
    pub fn ignores_targets(&self) -> bool {
        self.sources.iter().any(SourceRows::ignores_targets)
    }

    /// Returns the number of targets that count in the loss, if some do not. May read all ids.
    ///
    /// # Errors
    /// As [`TokenRows::next_batch`].
    pub fn counted_targets(&self) -> Result<Option<usize>, DataError> {
        let targets = |source: &SourceRows| Ok(source.totals()?.targets);
        self.ignores_targets().then(|| self.sources.iter().map(targets).sum()).transpose()
    }

    /// Returns how much of the rows is filled; `None` if no token only fills them, or another process has the rows.
    pub fn row_fill(&self) -> Option<RowFill> {
        self.sources.iter().filter_map(SourceRows::row_fill).reduce(RowFill::plus)
    }

    /// Returns the kinds of files that the rows are from; none for a text in memory.
    pub fn sources(&self) -> &[DataSource] {
        &self.files
    }

    /// Returns the sources of a mixture; none without one.
    pub fn mixture(&self) -> Vec<MixedRows> {
        let sources = self.mix.iter().zip(&self.sources).zip(self.draws.parts());
        let mixed = |((source, rows), share): ((&MixSource, &SourceRows), f64)| MixedRows {
            name: source.name(),
            weight: source.weight,
            share,
            rows: rows.rows() as usize,
            tokens: rows.tokens(),
        };
        sources.map(mixed).collect()
    }

    /// Returns the index of the source of the next row in [`TokenRows::mixture`].
    pub fn next_source(&self) -> Option<usize> {
        (!self.mix.is_empty()).then(|| self.draws.next_source())
    }

    /// Returns the number of rows that each source of a mixture has given since the beginning; none without a
    /// mixture.
    pub fn given_rows(&self) -> Vec<u64> {
        if self.mix.is_empty() { Vec::new() } else { self.draws.given().collect() }
    }

    /// Returns how many chats and completions do not fit into a row, if there are any. They are cut or left
    /// out.
    pub fn long_records(&self) -> Option<LongRecordCount> {
        let counts = self.sources.iter().map(|source| source.long_records);
        let sum = counts.reduce(|sum, count| LongRecordCount {
            long: sum.long + count.long,
            records: sum.records + count.records,
            ..sum
        });
        sum.filter(|count| count.long > 0)
    }

    /// Returns the records of all sources that are left out because they cannot be used, if there are any.
    pub fn bad_records(&self) -> Option<BadRecords> {
        let bad = self.sources.iter().filter_map(|source| source.bad_records.clone());
        bad.reduce(|sum, bad| BadRecords { count: sum.count + bad.count, ..sum })
    }

    /// Returns why no token ends the completions, if there are completions and nothing ends them. Files of
    /// `pipewright tokenize` do not say it.
    pub fn missing_end(&self) -> Option<&MissingEnd> {
        self.sources.iter().find_map(|source| source.missing_end.as_ref())
    }

    /// Returns the number of rows per epoch; of a mixture, the sum over its sources.
    pub fn rows(&self) -> usize {
        self.sources.iter().map(|source| source.rows() as usize).sum()
    }

    /// Returns the number of tokens of a row that the model receives.
    pub fn seq_len(&self) -> usize {
        self.seq_len
    }

    /// Returns the number of token ids, including ids that do not fill a row.
    pub fn tokens(&self) -> usize {
        self.sources.iter().map(SourceRows::tokens).sum()
    }

    /// Returns the properties that must not change when a run resumes at a cursor. May read all ids.
    ///
    /// # Errors
    /// As [`TokenRows::next_batch`].
    pub fn identity(&self) -> Result<DataIdentity, DataError> {
        let hashes = self.sources.iter().map(SourceRows::hash).collect::<Result<Vec<_>, _>>()?;
        let hash = match hashes.as_slice() {
            [only] => *only,
            hashes => {
                blake3::hash(&hashes.iter().flat_map(blake3::Hash::as_bytes).copied().collect::<Vec<_>>())
            }
        };
        let sources = self.mix.iter().zip(&self.sources).zip(&hashes);
        let identity = |((source, rows), hash): ((&MixSource, &SourceRows), &blake3::Hash)| SourceIdentity {
            weight: source.weight,
            tokens: rows.tokens(),
            rows: rows.rows() as usize,
            hash: hash.to_hex().to_string(),
        };
        Ok(DataIdentity {
            tokens: self.tokens(),
            rows: self.rows(),
            seq_len: self.seq_len,
            shuffle_seed: self.sources.first().and_then(|source| source.shuffle),
            hash: hash.to_hex().to_string(),
            documents: self.documents,
            mix: sources.map(identity).collect(),
        })
    }

    /// Returns the entropy of the targets' frequencies, in nats. This is the loss of a prediction that uses
    /// only the frequency of each token. Targets that do not count in the loss are left out. Of a mixture, it
    /// is the mean over the sources by their shares: the prediction knows the source. May read all ids.
    ///
    /// # Errors
    /// As [`TokenRows::next_batch`].
    pub fn frequency_entropy(&self) -> Result<f64, DataError> {
        let sources = self.sources.iter().zip(self.draws.parts());
        sources.map(|(source, part)| Ok(part * source.totals()?.frequency_entropy)).sum()
    }

    /// Returns the number of rows that were taken since the beginning of the first epoch.
    fn rows_seen(&self) -> u64 {
        self.draws.given().sum()
    }

    /// Returns the number of tokens that were fed to the model since the beginning of the first epoch.
    pub fn tokens_seen(&self) -> u64 {
        self.rows_seen().saturating_mul(self.seq_len as u64)
    }

    /// Returns the number of complete passes over the data, with the fraction of the current epoch. Of a
    /// mixture, it is the mean number of passes over a row.
    pub fn epochs_seen(&self) -> f64 {
        let (seen, rows) = (self.rows_seen(), self.rows().max(1) as u64);
        (seen / rows) as f64 + (seen % rows) as f64 / rows as f64
    }

    /// Returns the position of the next row.
    pub fn cursor(&self) -> Cursor {
        let seen = self.rows_seen();
        let [only] = self.sources.as_slice() else { return Cursor { epoch: 0, index: seen } };
        let rows = u64::from(only.rows().max(1));
        // The end of an epoch is not the beginning of the next one.
        let epoch = seen.saturating_sub(1) / rows;
        Cursor { epoch, index: seen - epoch * rows }
    }

    /// Continues at another position.
    ///
    /// # Errors
    /// When an epoch has fewer rows, or the data never comes to this position.
    pub fn seek(&mut self, Cursor { epoch, index }: Cursor) -> Result<(), DataError> {
        let seen = match self.sources.as_slice() {
            [only] if index <= u64::from(only.rows()) => {
                epoch.checked_mul(only.rows().into()).and_then(|rows| rows.checked_add(index))
            }
            [_] => None,
            _ => Some(index).filter(|_| epoch == 0),
        };
        let seen = seen.ok_or_else(|| {
            DataError::new(format!(
                "row {index} of an epoch is asked for, and the data has {}; resume with the data of the first run",
                self.rows()
            ))
        })?;
        self.draws.seek(seen);
        Ok(())
    }
}
