//! Reads data files one after another into token ids.
//!
//! The ids of texts and of binary files are one stream, which is cut into rows at any place. An array of ids
//! in a line is a row. Chats and completions are rows whose targets do not all count. A data source has one
//! of these forms.

use std::path::{Path, PathBuf};

use minijinja::Value;

use crate::config::DataConfig;
use crate::container::data_file::DataFile;
use crate::encoding::document_text::DocumentText;
use crate::encoding::example_text::{self, ExampleText, NoText};
use crate::encoding::record_content;
use crate::error::{DataError, FormatError, TokenPlace};
use crate::examples::Examples;
use crate::formats::format::{self, DataSource, Format, Layout};
use crate::formats::lines::{Line, Lines};
use crate::formats::{parquet_rows, text, token_files};
use crate::ids::Ids;
use crate::memory_budget::MemoryBudget;
use crate::record_error::{RecordError, RecordPlace, RecordProblem};
use crate::settings::record::RecordKind;
use crate::settings::train_on::{LongRecordCount, LongRecords};
use crate::stride::Stride;
use crate::vocabulary;

/// The content of the files of a data source.
pub(crate) struct Collected {
    pub(crate) content: CollectedContent,
    pub(crate) sources: Vec<DataSource>,
    pub(crate) long_records: LongRecordCount,
}

/// The token ids of a data source.
pub(crate) enum CollectedContent {
    Ids(Ids, Stride),
    Examples(Examples),
}

/// How the rows of a file are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
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

/// The state of reading.
pub(crate) struct Collector<'a> {
    config: &'a DataConfig,
    budget: &'a mut MemoryBudget,
    texts: DocumentText<'a>,
    example_texts: ExampleText<'a>,
    vocab_size: usize,
    ids: Ids,
    examples: Examples,
    /// The form of the data so far, with the file that decided it.
    form: Option<(Form, PathBuf)>,
    sources: Vec<DataSource>,
    long_records: LongRecordCount,
}

impl<'a> Collector<'a> {
    /// `bos` is the id that begins each text.
    pub(crate) fn new(
        config: &'a DataConfig,
        bos: Option<u32>,
        vocab_size: usize,
        budget: &'a mut MemoryBudget,
    ) -> Self {
        Self {
            config,
            budget,
            texts: DocumentText::new(&config.tokenizer, bos, vocab_size),
            example_texts: ExampleText::new(config),
            vocab_size,
            ids: Ids::new(vocab_size),
            examples: Examples::default(),
            form: None,
            sources: Vec::new(),
            long_records: LongRecordCount {
                treatment: config.long_records,
                long: 0,
                records: 0,
                seq_len: config.seq_len,
            },
        }
    }

    /// Returns everything that was read.
    pub(crate) fn finish(self) -> Collected {
        let content = match self.form.map_or(Form::Stream, |(form, _)| form) {
            Form::Stream => CollectedContent::Ids(self.ids, Stride::Overlapping),
            Form::Rows => CollectedContent::Ids(self.ids, Stride::Disjoint),
            Form::Examples => CollectedContent::Examples(self.examples),
        };
        Collected { content, sources: self.sources, long_records: self.long_records }
    }

    /// Reads a file.
    pub(crate) fn read(&mut self, path: &Path) -> Result<(), DataError> {
        let mut file = DataFile::open(path)?;
        let format = match format::layout_of(&mut file)? {
            Layout::Text => self.read_text(&mut file)?,
            Layout::Lines => self.read_lines(&mut file)?,
            Layout::Parquet => self.read_parquet(&mut file)?,
            Layout::Binary => {
                self.begin(Form::Stream, path)?;
                token_files::read(&mut file, &mut self.ids, self.vocab_size, self.budget)?
            }
        };
        let packing = file.packing();
        match self.sources.iter_mut().find(|source| (source.format, source.packing) == (format, packing)) {
            Some(source) => source.files += 1,
            None => self.sources.push(DataSource { format, packing, files: 1 }),
        }
        Ok(())
    }

    /// Reads a text in memory, which errors call `name`.
    pub(crate) fn read_memory(&mut self, text: &str, name: &Path) -> Result<(), DataError> {
        self.begin(Form::Stream, name)?;
        self.texts.push(text, &mut self.ids, self.budget, name, None)
    }

    /// Checks that the rows of a file are made like the rows of earlier files, and can be packed if they are
    /// to be.
    fn begin(&mut self, form: Form, path: &Path) -> Result<(), DataError> {
        if form != Form::Examples && self.config.packs_examples && self.config.documents.is_none() {
            return Err(DataError::PackedWithoutBeginning { path: path.to_owned() });
        }
        let (expected, first) = self.form.get_or_insert_with(|| (form, path.to_owned()));
        if *expected == form {
            return Ok(());
        }
        let (path, first) = (path.to_owned(), first.clone());
        Err(FormatError::MixedForms { path, found: form.in_words(), first, expected: expected.in_words() }
            .into())
    }

    fn read_text(&mut self, file: &mut DataFile) -> Result<Format, DataError> {
        let path = file.path().to_owned();
        self.begin(Form::Stream, &path)?;
        if let Some(bytes) = self.texts.bytes_are_ids(&mut self.ids) {
            let start = bytes.len();
            file.append(bytes, self.budget)?;
            self.budget.take(&path, (bytes.len() - start) as u64)?;
            let text = text::utf8(&path, &bytes[start..])?;
            format::refuse_json(file, text)?;
            self.texts.check_bytes(text, &path, None)?;
            return Ok(Format::Text);
        }
        let mut bytes = Vec::new();
        file.append(&mut bytes, self.budget)?;
        let text = text::utf8(&path, &bytes)?;
        format::refuse_json(file, text)?;
        self.texts.push(text, &mut self.ids, self.budget, &path, None)?;
        Ok(Format::Text)
    }

    fn read_lines(&mut self, file: &mut DataFile) -> Result<Format, DataError> {
        let mut format = None;
        let mut lines = Lines::new(file, self.config.seq_len, self.budget.left());
        let path = lines.path().to_owned();
        while let Some((number, line)) = lines.next()? {
            let place = RecordPlace::Line(number);
            let found = match line {
                Line::Ids(row) => {
                    if format.is_some_and(|format| format != Format::IdLines) {
                        return Err(refused(&path, place, RecordProblem::RecordsAndIds));
                    }
                    self.push_row(&path, number, &row)?;
                    Format::IdLines
                }
                Line::Record(record) => Format::Lines(match format {
                    None => self.push_record(&path, place, &record, None)?,
                    Some(Format::Lines(kind)) => self.push_record(&path, place, &record, Some(kind))?,
                    Some(_) => return Err(refused(&path, place, RecordProblem::RecordsAndIds)),
                }),
            };
            format = Some(found);
        }
        format.ok_or(DataError::Empty { path })
    }

    fn read_parquet(&mut self, file: &mut DataFile) -> Result<Format, DataError> {
        let path = file.path().to_owned();
        let (rows, held) = parquet_rows::rows(file, &self.config.keys.names(), self.budget)?;
        let mut kind = None;
        for (number, row) in (1..).zip(rows) {
            kind = Some(self.push_record(&path, RecordPlace::Row(number), &row?, kind)?);
        }
        self.budget.give_back(held);
        kind.map(Format::Parquet).ok_or_else(|| DataError::Empty { path: path.clone() })
    }

    /// Appends the content of a record, which must be of the kind of the records before it. Returns its kind.
    fn push_record(
        &mut self,
        path: &Path,
        place: RecordPlace,
        record: &Value,
        expected: Option<RecordKind>,
    ) -> Result<RecordKind, DataError> {
        let refuse = |problem| refused(path, place, problem);
        let keys = &self.config.keys;
        let kind = record_content::kind_of(record, keys).map_err(refuse)?;
        if let Some(expected) = expected.filter(|expected| *expected != kind) {
            return Err(refuse(RecordProblem::OtherKind { expected, found: kind }));
        }
        if kind == RecordKind::Text {
            self.begin(Form::Stream, path)?;
            let text = record_content::text_of(record, &keys.text).map_err(refuse)?;
            self.texts.push(&text, &mut self.ids, self.budget, path, Some(place))?;
        } else {
            self.begin(Form::Examples, path)?;
            self.push_example(path, place, record, kind)?;
        }
        Ok(kind)
    }

    /// Appends a chat or a completion.
    fn push_example(
        &mut self,
        path: &Path,
        place: RecordPlace,
        record: &Value,
        kind: RecordKind,
    ) -> Result<(), DataError> {
        let refuse = |problem| refused(path, place, problem);
        let (text, is_document) =
            self.example_texts.of_record(record, kind).map_err(|error| match error {
                NoText::Template(error) => error.into(),
                NoText::Record(problem) => refuse(problem),
            })?;
        let (mut ids, mut counts) = self.texts.encode_marked(&text, is_document, self.budget, path, place)?;
        let (found, seq_len) = (ids.len(), self.config.seq_len);
        self.long_records.records += 1;
        let is_long = found > seq_len + 1;
        if is_long {
            self.long_records.long += 1;
            match self.config.long_records {
                LongRecords::Refuse => return Err(refuse(RecordProblem::Long { found, seq_len })),
                LongRecords::Skip => return Ok(()),
                LongRecords::Cut => {
                    ids.truncate(seq_len + 1);
                    counts.truncate(seq_len + 1);
                }
            }
        }
        // No token predicts the first one.
        if !counts.iter().skip(1).any(|counts| *counts) {
            return Err(refuse(if is_long {
                RecordProblem::NothingLeft { seq_len }
            } else {
                example_text::no_target(self.example_texts.train_on(kind))
            }));
        }
        self.budget.take(path, (ids.len() * Examples::BYTES_PER_ID) as u64)?;
        self.examples.push(&ids, &counts);
        Ok(())
    }

    /// Appends a row of ids.
    fn push_row(&mut self, path: &Path, line: u64, row: &[u64]) -> Result<(), DataError> {
        self.begin(Form::Rows, path)?;
        let (seq_len, vocab_size) = (self.config.seq_len, self.vocab_size);
        if row.len() != seq_len + 1 {
            return Err(
                FormatError::RowLength { path: path.to_owned(), line, found: row.len(), seq_len }.into()
            );
        }
        vocabulary::check(row.iter().copied(), vocab_size, path, |_| TokenPlace::Line(line))?;
        self.budget.take(path, (row.len() * self.ids.width()) as u64)?;
        // Every id is below vocab_size, which fits.
        row.iter().for_each(|id| self.ids.push(*id as u32));
        Ok(())
    }
}

fn refused(path: &Path, place: RecordPlace, problem: RecordProblem) -> DataError {
    RecordError { path: path.to_owned(), place, problem }.into()
}
