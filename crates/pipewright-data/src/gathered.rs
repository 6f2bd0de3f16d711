//! The ids and examples of the files so far, in memory or on their way into a file.

use std::path::{Path, PathBuf};

use crate::bad_records::{BadRecords, LeftOut};
use crate::collected::{CollectedContent, Stride, checked_rows};
use crate::config::DataConfig;
use crate::error::{DataError, DataPlace};
use crate::memory_budget::MemoryBudget;
use crate::settings::preference::PreferenceData;
use crate::settings::train_on::{LongRecordCount, LongRecords, TrainOn};
use crate::storage::examples::{ExampleBuffer, Examples, RowPart};
use crate::storage::ids::{IdBuffer, Ids};
use crate::vocabulary;

/// How the rows of a file are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    Stream,
    Rows,
    Examples,
}

impl Form {
    fn in_words(self) -> &'static str {
        match self {
            Self::Stream => "text or ids that are cut into rows",
            Self::Rows => "lines of token ids, which are rows",
            Self::Examples => "chats or completions, which are rows",
        }
    }
}

/// Takes the ids away that were read, so that they need not stay in memory.
pub(crate) trait Drain: Sync {
    /// Takes all of them. `read` is the number of bytes of the files that were read.
    fn drain(&mut self, ids: &mut IdBuffer, examples: &mut ExampleBuffer, read: u64)
    -> Result<(), DataError>;
}

/// The ids and examples so far.
pub(crate) struct Gathered<'a> {
    config: &'a DataConfig,
    vocab_size: usize,
    pub(crate) budget: &'a mut MemoryBudget,
    pub(crate) ids: IdBuffer,
    examples: ExampleBuffer,
    /// The margin of each pair of examples that is scored.
    margins: Vec<f32>,
    /// The form of the data so far, with the file that decided it.
    form: Option<(Form, PathBuf)>,
    long_records: LongRecordCount,
    pub(crate) left_out: LeftOut,
    /// The tokens that count in the loss of the examples, by kind.
    train_on: Vec<TrainOn>,
    /// Takes the ids away; without it they stay in memory and are for rows of `seq_len` tokens.
    drain: Option<&'a mut dyn Drain>,
}

impl<'a> Gathered<'a> {
    pub(crate) fn new(
        config: &'a DataConfig,
        vocab_size: usize,
        budget: &'a mut MemoryBudget,
        drain: Option<&'a mut dyn Drain>,
    ) -> Self {
        Self {
            config,
            vocab_size,
            budget,
            ids: IdBuffer::new(vocab_size),
            // A label is stored as an id.
            examples: ExampleBuffer::new(vocab_size.max(config.labels.len())),
            margins: Vec::new(),
            form: None,
            long_records: LongRecordCount {
                treatment: config.long_records,
                long: 0,
                records: 0,
                seq_len: config.seq_len,
                is_half: config.preference.is_some(),
            },
            left_out: LeftOut::at_most(config.bad_records),
            train_on: Vec::new(),
            drain,
        }
    }

    /// Returns the form of the data.
    pub(crate) fn form(&self) -> Form {
        self.form.as_ref().map_or(Form::Stream, |(form, _)| *form)
    }

    /// Returns the tokens that count in the loss, if they are the same for all examples.
    pub(crate) fn train_on(&self) -> Option<TrainOn> {
        self.train_on.first().copied().filter(|_| self.train_on.len() == 1)
    }

    /// Returns what stayed in memory, and what was cut or left out.
    ///
    /// # Errors
    /// When there are too many examples, or no record can be used.
    pub(crate) fn finish(
        mut self,
    ) -> Result<(CollectedContent, LongRecordCount, Option<BadRecords>), DataError> {
        let form = self.form();
        let is_used = !self.ids.bytes().is_empty() || self.examples.memory() > 0;
        let bad_records = self.left_out.finish(is_used)?;
        let content = match form {
            Form::Stream => CollectedContent::Ids(Ids::from(self.ids), Stride::Overlapping),
            Form::Rows => CollectedContent::Ids(Ids::from(self.ids), Stride::Disjoint),
            Form::Examples => {
                let mut examples = Examples::from(self.examples);
                if let Some(PreferenceData::Unpaired { block }) = self.config.preference {
                    examples = with_mismatched(&examples, block, self.config.sequence_len() + 1)?;
                }
                if self.margins.iter().any(|margin| *margin != 0.0) {
                    examples.margins = self.margins;
                }
                checked_rows(examples.len())?;
                CollectedContent::Examples(examples)
            }
        };
        Ok((content, self.long_records, bad_records))
    }

    /// Checks that the rows of a file are made like the rows of earlier files, and can be packed if they are
    /// to be.
    pub(crate) fn begin(&mut self, form: Form, path: &Path) -> Result<(), DataError> {
        if form != Form::Examples && self.config.packs_examples && self.config.documents.is_none() {
            return Err(packed_without_beginning(path));
        }
        if form != Form::Examples
            && let Some(training) = self.config.needs_records()
        {
            let problem = format!(
                "{training} takes records with {}, in .jsonl, .json or .parquet files; name such files",
                if self.config.preference.is_some() { "completions" } else { "a label" }
            );
            return Err(DataError::of(path, problem));
        }
        if form == Form::Rows && self.drain.is_some() {
            let problem = "its lines are token ids, which need no tokenizer; name the file in `data.path`";
            return Err(DataError::of(path, problem));
        }
        let (expected, first) = self.form.get_or_insert_with(|| (form, path.to_owned()));
        if *expected == form {
            return Ok(());
        }
        let (found, expected, first) = (form.in_words(), expected.in_words(), first.display());
        let problem = format!("the file has {found}, and {first} has {expected}: train on them in two runs");
        Err(DataError::of(path, problem))
    }

    /// Appends a document.
    pub(crate) fn push_document(&mut self, ids: Vec<u32>, path: &Path) -> Result<(), DataError> {
        self.budget.take(path, (ids.len() * self.ids.width().bytes()) as u64)?;
        ids.into_iter().for_each(|id| self.ids.push(id));
        Ok(())
    }

    /// Appends the sequences of a record: a chat or a completion, or the two completions of a pair.
    pub(crate) fn push_record(
        &mut self,
        path: &Path,
        place: DataPlace,
        train_on: TrainOn,
        margin: f32,
        mut parts: Vec<RowPart>,
    ) -> Result<(), DataError> {
        // The id behind a sequence that is scored stays.
        let (kept, most) = (usize::from(self.config.scores_sequences()), self.config.longest());
        let found = parts.iter().map(|part| part.ids.len() - kept).max().unwrap_or(0);
        let (seq_len, row) = (most.saturating_sub(1), self.long_records.row());
        self.long_records.records += 1;
        if !self.train_on.contains(&train_on) {
            self.train_on.push(train_on);
        }
        let is_long = self.drain.is_none() && found > most;
        if is_long {
            self.long_records.long += 1;
            match self.config.long_records {
                LongRecords::Refuse => return Err(long_record(found, seq_len, &row).at(path, place)),
                LongRecords::Skip => return Ok(()),
                LongRecords::Cut => parts.iter_mut().for_each(|part| part.cut(most, kept)),
            }
        }
        // The score of a pair's sequence counts, which may have one token. Its first token may be one of the completion.
        let is_pair = self.config.preference == Some(PreferenceData::Scored);
        let first = usize::from(!is_pair);
        if parts.iter().any(|part| !part.counts[first.min(part.counts.len())..].contains(&true)) {
            let problem = if is_long { nothing_left(seq_len, &row) } else { no_target(train_on) };
            return Err(problem.of_record(path, place));
        }
        let bytes = parts.iter().map(|part| self.examples.push(part)).sum();
        if is_pair {
            self.margins.push(margin);
        }
        self.budget.take(path, bytes)
    }

    /// Appends a row of ids.
    pub(crate) fn push_row(&mut self, path: &Path, place: DataPlace, row: &[u64]) -> Result<(), DataError> {
        let seq_len = self.config.seq_len;
        if row.len() != seq_len + 1 {
            let problem = format!(
                "the row holds {} ids, and seq_len {seq_len} takes {}; correct the row or seq_len",
                row.len(),
                seq_len + 1
            );
            return Err(DataError::new(problem).at(path, place));
        }
        vocabulary::check(row.iter().copied(), self.vocab_size, path, |_| place)?;
        self.budget.take(path, (row.len() * self.ids.width().bytes()) as u64)?;
        // Every id is below the vocabulary size, which fits.
        row.iter().for_each(|id| self.ids.push(*id as u32));
        Ok(())
    }

    /// Passes everything on, if it does not stay in memory. `read` is the number of bytes that were read from
    /// files.
    pub(crate) fn drain(&mut self, read: u64) -> Result<(), DataError> {
        let Some(drain) = &mut self.drain else { return Ok(()) };
        let held = (self.ids.bytes().len() as u64) + self.examples.memory();
        drain.drain(&mut self.ids, &mut self.examples, read)?;
        self.budget.give_back(held);
        Ok(())
    }
}

/// Returns the examples, each followed by its prompt with the completion of the example before it, or of the last one
/// of its block. Sequences have at most `longest` ids.
fn with_mismatched(examples: &Examples, block: u32, longest: usize) -> Result<Examples, DataError> {
    let mut buffer = examples.empty_like();
    let count = examples.len() as u32;
    for start in (0..count).step_by(block.max(1) as usize) {
        let end = count.min(start.saturating_add(block));
        for example in start..end {
            let own = examples.read(example)?;
            let other = examples.read(if example == start { end - 1 } else { example - 1 })?;
            let mut mismatched = own.clone();
            mismatched.truncate(own.completion());
            mismatched.ids.extend(&other.ids[other.completion()..]);
            mismatched.counts.resize(mismatched.ids.len(), true);
            mismatched.truncate(longest);
            buffer.push(&own);
            buffer.push(&mismatched);
        }
    }
    Ok(buffer.into())
}

/// Returns the error of files that hold no token. `path` is the first of them.
pub(crate) fn empty(path: &Path) -> DataError {
    DataError::of(path, "the data is empty; name files that hold text")
}

/// Returns the error of a text whose documents cannot be told apart. `path` is the first file.
pub(crate) fn packed_without_beginning(path: &Path) -> DataError {
    DataError::of(
        path,
        "the data is text or token ids, whose documents are packed only if it is known where they begin: write `bos_id` in \
         [data], the token id that begins each document",
    )
}

/// Returns the error of a record with more tokens than a row takes.
/// `row` is the part of a row that its sequences may take.
pub(crate) fn long_record(found: usize, seq_len: usize, row: &str) -> DataError {
    DataError::new(format!(
        "the record has {found} tokens, and {row} takes {}; raise seq_len, or write \
         `long_records = \"cut\"` or \"skip\" in [data]",
        seq_len + 1
    ))
}

/// Returns the error of a record whose prompt fills a row, and whose end is left out.
pub(crate) fn nothing_left(seq_len: usize, row: &str) -> DataError {
    DataError::new(format!(
        "after the cut to the {} tokens of {row}, nothing of the record counts in the loss; raise seq_len, \
         or write `long_records = \"skip\"` in [data]",
        seq_len + 1
    ))
}

/// Returns the error of a record without a target that counts.
fn no_target(train_on: TrainOn) -> DataError {
    let counts = match train_on {
        TrainOn::All => "all tokens count",
        TrainOn::Assistant => "the assistant's answers count",
        TrainOn::Completion => "the completion counts",
    };
    DataError::new(format!(
        "no token of the record counts in the loss ({counts}); remove the record, or write `train_on = \"all\"` in [data]"
    ))
}
