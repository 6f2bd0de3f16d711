//! The ids and examples of the files so far, in memory or on their way into a file.

use std::path::{Path, PathBuf};

use crate::collected::CollectedContent;
use crate::config::DataConfig;
use crate::encoding::example_text;
use crate::error::{DataError, FormatError, TokenPlace};
use crate::memory_budget::MemoryBudget;
use crate::record_error::RecordProblem;
use crate::settings::train_on::{LongRecordCount, LongRecords, TrainOn};
use crate::storage::examples::{ExampleBuffer, Examples, RowPart};
use crate::storage::ids::{IdBuffer, Ids};
use crate::stride::Stride;
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
    /// The form of the data so far, with the file that decided it.
    form: Option<(Form, PathBuf)>,
    long_records: LongRecordCount,
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
            examples: ExampleBuffer::new(vocab_size),
            form: None,
            long_records: LongRecordCount {
                treatment: config.long_records,
                long: 0,
                records: 0,
                seq_len: config.seq_len,
            },
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

    /// Returns what stayed in memory.
    pub(crate) fn finish(self) -> Result<(CollectedContent, LongRecordCount), DataError> {
        let content = match self.form() {
            Form::Stream => CollectedContent::Ids(Ids::from(self.ids), Stride::Overlapping),
            Form::Rows => CollectedContent::Ids(Ids::from(self.ids), Stride::Disjoint),
            Form::Examples => {
                let examples = Examples::from(self.examples);
                u32::try_from(examples.len()).map_err(|_| DataError::ManyRows { found: examples.len() })?;
                CollectedContent::Examples(examples)
            }
        };
        Ok((content, self.long_records))
    }

    /// Checks that the rows of a file are made like the rows of earlier files, and can be packed if they are
    /// to be.
    pub(crate) fn begin(&mut self, form: Form, path: &Path) -> Result<(), DataError> {
        if form != Form::Examples && self.config.packs_examples && self.config.documents.is_none() {
            return Err(DataError::PackedWithoutBeginning { path: path.to_owned() });
        }
        if form == Form::Rows && self.drain.is_some() {
            return Err(FormatError::RowsOfIds { path: path.to_owned() }.into());
        }
        let (expected, first) = self.form.get_or_insert_with(|| (form, path.to_owned()));
        if *expected == form {
            return Ok(());
        }
        let (path, first) = (path.to_owned(), first.clone());
        let (found, expected) = (form.in_words(), expected.in_words());
        Err(FormatError::MixedForms { path, found, first, expected }.into())
    }

    /// Appends a document.
    pub(crate) fn push_document(&mut self, ids: Vec<u32>, path: &Path) -> Result<(), DataError> {
        self.budget.take(path, (ids.len() * self.ids.width().bytes()) as u64)?;
        ids.into_iter().for_each(|id| self.ids.push(id));
        Ok(())
    }

    /// Appends a chat or a completion; the inner error is a problem of the record.
    pub(crate) fn push_example(
        &mut self,
        path: &Path,
        train_on: TrainOn,
        mut part: RowPart,
    ) -> Result<Result<(), RecordProblem>, DataError> {
        let (found, seq_len) = (part.ids.len(), self.config.seq_len);
        self.long_records.records += 1;
        if !self.train_on.contains(&train_on) {
            self.train_on.push(train_on);
        }
        let is_long = self.drain.is_none() && found > seq_len + 1;
        if is_long {
            self.long_records.long += 1;
            match self.config.long_records {
                LongRecords::Refuse => return Ok(Err(RecordProblem::Long { found, seq_len })),
                LongRecords::Skip => return Ok(Ok(())),
                LongRecords::Cut => part.truncate(seq_len + 1),
            }
        }
        if part.targets().next().is_none() {
            return Ok(Err(if is_long {
                RecordProblem::NothingLeft { seq_len }
            } else {
                example_text::no_target(train_on)
            }));
        }
        let bytes = self.examples.push(&part);
        self.budget.take(path, bytes)?;
        Ok(Ok(()))
    }

    /// Appends a row of ids.
    pub(crate) fn push_row(&mut self, path: &Path, line: u64, row: &[u64]) -> Result<(), DataError> {
        let seq_len = self.config.seq_len;
        if row.len() != seq_len + 1 {
            let (path, found) = (path.to_owned(), row.len());
            return Err(FormatError::RowLength { path, line, found, seq_len }.into());
        }
        vocabulary::check(row.iter().copied(), self.vocab_size, path, |_| TokenPlace::Line(line))?;
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
