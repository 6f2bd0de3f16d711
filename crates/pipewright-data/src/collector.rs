//! Reads data files one after another into token ids.
//!
//! The ids of texts and of binary files are one stream, which is cut into rows at any place. An array of ids
//! in a line is a row. Chats and completions are rows whose targets do not all count. A data source has one
//! of these forms.
//!
//! Texts and records wait in a queue until they are enough to be encoded on all cores. Everything that depends
//! on the order, also which error is reported, is decided in the order of the files.

use std::path::Path;

use minijinja::Value;
use rayon::prelude::*;

use crate::bad_records::LeftOut;
use crate::chat::identity::TemplateIdentity;
use crate::chat::spans::MarkedText;
use crate::chat::special_tokens::MissingEnd;
use crate::collected::{Collected, Known};
use crate::config::DataConfig;
use crate::container::data_file::DataFile;
use crate::container::data_file::ReadBytes;
use crate::content;
use crate::encoding::document_text::DocumentText;
use crate::encoding::example_text::ExampleText;
use crate::encoding::record_content;
use crate::encoding::tokenizer::Encoder;
use crate::error::{DataError, DataErrorKind, DataPlace};
use crate::formats::format::{self, DataSource, Format, ReaderKind};
use crate::formats::lines::Lines;
use crate::formats::list::ListRecords;
use crate::formats::{parquet_rows, token_files};
use crate::gathered::{Drain, Form, Gathered, empty};
use crate::memory_budget::MemoryBudget;
use crate::queue::{Parsed, SourceFile, Unparsed};
use crate::settings::record::RecordKind;
use crate::settings::train_on::TrainOn;
use crate::storage::examples::RowPart;

/// The bytes of text that each thread encodes at a time.
const BATCH_PER_THREAD: u64 = 1 << 19;

/// The state of reading.
pub(crate) struct Collector<'a> {
    config: &'a DataConfig,
    texts: DocumentText<'a>,
    example_texts: ExampleText<'a>,
    vocab_size: usize,
    files: Vec<SourceFile>,
    /// Content that waits to be encoded, with the number of its file; and the bytes of all of it.
    queue: Vec<(usize, Unparsed)>,
    queued_bytes: u64,
    gathered: Gathered<'a>,
    /// The bytes that were read from files. Parquet files that are read in parts are not counted.
    read: ReadBytes,
}

/// The properties of data that was passed on.
pub(crate) struct Drained {
    pub(crate) form: Form,
    /// The template of the chats, if there are any.
    pub(crate) template: Option<TemplateIdentity>,
    /// The tokens that count in the loss, if they are the same for all examples.
    pub(crate) train_on: Option<TrainOn>,
    /// Set if no token ends the completions.
    pub(crate) missing_end: Option<MissingEnd>,
    /// The kinds of the files.
    pub(crate) sources: Vec<DataSource>,
    pub(crate) left_out: LeftOut,
}

/// Ids that are ready to be appended.
enum Encoded {
    Document(Vec<u32>),
    Row(DataPlace, Vec<u64>),
    /// The sequences of a record, and the margin of a pair.
    Example(DataPlace, RecordKind, f32, Vec<RowPart>),
}

impl<'a> Collector<'a> {
    /// `bos` is the id that begins each text. With `drain`, everything is passed on instead of being kept in
    /// memory, for rows of any length.
    pub(crate) fn new(
        config: &'a DataConfig,
        bos: Option<u32>,
        vocab_size: usize,
        budget: &'a mut MemoryBudget,
        drain: Option<&'a mut dyn Drain>,
    ) -> Self {
        Self {
            config,
            texts: DocumentText::new(&config.tokenizer, bos, vocab_size),
            example_texts: ExampleText::new(config),
            vocab_size,
            files: Vec::new(),
            queue: Vec::new(),
            queued_bytes: 0,
            gathered: Gathered::new(config, vocab_size, budget, drain),
            read: ReadBytes::default(),
        }
    }

    /// Encodes with a tokenizer whose file is read already.
    pub(crate) fn with_encoder(self, encoder: Option<Encoder>) -> Self {
        Self { texts: self.texts.with_encoder(encoder), ..self }
    }

    /// Returns everything that was read, and stayed in memory.
    pub(crate) fn finish(mut self) -> Result<Collected, DataError> {
        self.flush()?;
        let (sources, missing_end) = (self.sources(), self.missing_end());
        let (content, long_records, bad_records) = self.gathered.finish()?;
        Ok(Collected { content, sources, long_records, bad_records, missing_end, known: Known::default() })
    }

    /// Passes on what is left.
    pub(crate) fn finish_drained(mut self) -> Result<Drained, DataError> {
        self.flush()?;
        Ok(Drained {
            form: self.gathered.form(),
            template: self.example_texts.template_identity().cloned(),
            train_on: self.gathered.train_on(),
            missing_end: self.missing_end(),
            sources: self.sources(),
            left_out: self.gathered.left_out,
        })
    }

    /// Returns why completions end with no token. Bytes have no such token.
    fn missing_end(&self) -> Option<MissingEnd> {
        let tokenizer = self.config.tokenizer.file()?;
        let end = self.example_texts.end().filter(|end| !self.texts.ends_texts(end))?;
        Some(MissingEnd::new(tokenizer, end))
    }

    /// Returns the kinds of the files.
    fn sources(&self) -> Vec<DataSource> {
        let read = |SourceFile { packing, format, .. }: &SourceFile| {
            format.map(|format| DataSource { format, packing: *packing, files: 1 })
        };
        DataSource::merged(self.files.iter().filter_map(read))
    }

    /// Reads a file.
    pub(crate) fn read(&mut self, path: &Path) -> Result<(), DataError> {
        let read = self.read_file(path);
        if read.is_err() {
            // An error in what waits comes first.
            self.flush()?;
        }
        read
    }

    fn read_file(&mut self, path: &Path) -> Result<(), DataError> {
        let mut file = DataFile::open_counted(path, &self.read)?;
        let reader = format::reader_of(&mut file)?;
        self.files.push(SourceFile { path: path.to_owned(), packing: file.packing(), format: None });
        match reader {
            ReaderKind::Text => self.read_text(&mut file),
            ReaderKind::Lines => self.read_lines(&mut file),
            ReaderKind::List => self.read_list(&mut file),
            ReaderKind::Parquet => self.read_parquet(&mut file),
            ReaderKind::Binary => {
                self.flush()?;
                self.gathered.begin(Form::Stream, path)?;
                let format = token_files::read(
                    &mut file,
                    &mut self.gathered.ids,
                    self.vocab_size,
                    self.gathered.budget,
                )?;
                self.set_format(format);
                self.gathered.drain(self.read.get())
            }
        }
    }

    /// Reads a text in memory, which errors call `name`.
    pub(crate) fn read_memory(&mut self, text: &str, name: &Path) -> Result<(), DataError> {
        self.gathered.begin(Form::Stream, name)?;
        self.texts.prepare()?;
        self.gathered
            .budget
            .require(name, self.texts.memory_of(text.len() as u64, self.gathered.ids.width().bytes()))?;
        let ids = self.texts.encode(text, name, None)?;
        self.gathered.push_document(ids, name)
    }

    fn set_format(&mut self, format: Format) {
        if let Some(file) = self.files.last_mut() {
            file.format = Some(format);
        }
    }

    fn read_text(&mut self, file: &mut DataFile) -> Result<(), DataError> {
        let path = file.path().to_owned();
        if self.texts.bytes_are_ids(&mut self.gathered.ids).is_some() {
            self.flush()?;
            self.gathered.begin(Form::Stream, &path)?;
            let bytes = self.gathered.ids.bytes();
            let start = bytes.len();
            file.append(bytes, self.gathered.budget)?;
            self.gathered.budget.take(&path, (bytes.len() - start) as u64)?;
            let text = content::utf8(&path, &bytes[start..])?;
            format::refuse_json(file, text)?;
            self.texts.check_bytes(text, &path)?;
            self.set_format(Format::Text);
            return self.gathered.drain(self.read.get());
        }
        let mut bytes = Vec::new();
        file.append(&mut bytes, self.gathered.budget)?;
        let text = content::utf8(&path, &bytes)?;
        format::refuse_json(file, text)?;
        self.push(Unparsed::Text(text.to_owned()))
    }

    fn read_lines(&mut self, file: &mut DataFile) -> Result<(), DataError> {
        let mut lines = Lines::new(file, self.config.seq_len, self.gathered.budget.left());
        let mut is_empty = true;
        while let Some((place, line)) = lines.next()? {
            self.push(Unparsed::Json(place, line))?;
            is_empty = false;
        }
        if is_empty { Err(empty(lines.path())) } else { Ok(()) }
    }

    fn read_list(&mut self, file: &mut DataFile) -> Result<(), DataError> {
        let mut records = ListRecords::new(file, self.gathered.budget.left());
        while let Some((place, record)) = records.next()? {
            self.push(Unparsed::Json(place, record))?;
        }
        Ok(())
    }

    fn read_parquet(&mut self, file: &mut DataFile) -> Result<(), DataError> {
        let (rows, held) = parquet_rows::rows(file, &self.config.keys.names(), self.gathered.budget)?;
        let mut is_empty = true;
        for (number, row) in (1..).zip(rows) {
            self.push(Unparsed::Row(number, row?))?;
            is_empty = false;
        }
        self.flush()?;
        self.gathered.budget.give_back(held);
        if is_empty { Err(empty(file.path())) } else { Ok(()) }
    }

    /// Puts content of the last file into the queue, which is encoded when it is long enough.
    fn push(&mut self, content: Unparsed) -> Result<(), DataError> {
        let bytes = content.bytes();
        let one = self.texts.memory_of(1, self.gathered.ids.width().bytes()).max(1);
        let limit =
            (BATCH_PER_THREAD * rayon::current_num_threads() as u64).min(self.gathered.budget.left() / one);
        if self.queued_bytes + bytes > limit {
            self.flush()?;
        }
        self.queue.push((self.files.len() - 1, content));
        self.queued_bytes += bytes;
        Ok(())
    }

    /// Encodes everything that waits, and appends it. The first error in the order of the files counts. Records that cannot
    /// be used are left out, up to a number.
    fn flush(&mut self) -> Result<(), DataError> {
        let (queue, bytes) = (std::mem::take(&mut self.queue), std::mem::take(&mut self.queued_bytes));
        let Some((first, _)) = queue.first() else { return Ok(()) };
        let memory = self.texts.memory_of(bytes, self.gathered.ids.width().bytes());
        self.gathered.budget.require(&self.files[*first].path, memory)?;
        let (files, config) = (&self.files, self.config);
        let parsed: Vec<(usize, Result<Parsed, DataError>)> = queue
            .into_par_iter()
            .map(|(file, content)| (file, content.parse(&files[file].path, config)))
            .collect();
        let (mut accepted, mut failed) = (Vec::with_capacity(parsed.len()), None);
        for (file, parsed) in parsed {
            match parsed.and_then(|parsed| self.accept(file, parsed)) {
                Err(error) if error.kind != DataErrorKind::BadRecord => {
                    failed = Some(error);
                    break;
                }
                accepted_or_bad => accepted.push((file, accepted_or_bad)),
            }
        }
        let encoded: Vec<(usize, Result<Encoded, DataError>)> = accepted
            .into_par_iter()
            .map(|(file, parsed)| {
                (file, parsed.and_then(|parsed| self.encode(&self.files[file].path, parsed)))
            })
            .collect();
        for (file, encoded) in encoded {
            let path = self.files[file].path.clone();
            let appended = encoded.and_then(|encoded| self.append(&path, encoded));
            appended.or_else(|error| self.gathered.left_out.leave_out(error))?;
        }
        failed.map_or(Ok(()), Err)?;
        self.gathered.drain(self.read.get())
    }

    /// Checks that content fits to the content before it, and prepares its encoding.
    fn accept(&mut self, file: usize, parsed: Parsed) -> Result<Parsed, DataError> {
        let (format, path) = (parsed.format(), self.files[file].path.clone());
        let before = self.files[file].format.filter(|before| *before != format);
        let both = "the file has both records and arrays of token ids; split the file";
        match (before, &parsed) {
            (None, _) | (_, Parsed::Text(_)) => {}
            (
                Some(Format::Lines(expected) | Format::List(expected) | Format::Parquet(expected)),
                Parsed::Record(place, _, found),
            ) => {
                let problem = format!(
                    "the record contains {found}, and the records before it in the file contain {expected}; split the file"
                );
                return Err(DataError::new(problem).at(&path, *place));
            }
            (_, Parsed::Record(place, ..) | Parsed::Ids(place, _)) => {
                return Err(DataError::new(both).at(&path, *place));
            }
        }
        self.files[file].format = Some(format);
        match &parsed {
            Parsed::Text(_) => self.gathered.begin(Form::Stream, &path)?,
            Parsed::Ids(..) => return self.gathered.begin(Form::Rows, &path).map(|()| parsed),
            Parsed::Record(_, _, RecordKind::Text) => self.gathered.begin(Form::Stream, &path)?,
            Parsed::Record(_, record, kind) => {
                self.gathered.begin(Form::Examples, &path)?;
                self.example_texts.prepare(record, *kind)?;
            }
        }
        self.texts.prepare()?;
        Ok(parsed)
    }

    fn encode(&self, path: &Path, parsed: Parsed) -> Result<Encoded, DataError> {
        match parsed {
            Parsed::Ids(place, ids) => Ok(Encoded::Row(place, ids)),
            Parsed::Text(text) => self.texts.encode(&text, path, None).map(Encoded::Document),
            Parsed::Record(place, record, kind) => {
                let refuse = |error: DataError| error.of_record(path, place);
                if kind == RecordKind::Text {
                    let text = record_content::text_of(&record, &self.config.keys.text).map_err(refuse)?;
                    return self.texts.encode(&text, path, Some(place)).map(Encoded::Document);
                }
                let texts = self.example_texts.texts_of(&record, kind).map_err(refuse)?;
                let encode = |(text, is_document): &(MarkedText, bool)| {
                    self.texts.encode_marked(text, *is_document, path, place)
                };
                let mut parts = texts.iter().map(encode).collect::<Result<Vec<_>, _>>()?;
                if self.config.preference.is_some() {
                    mark_completions(&mut parts);
                }
                if kind == RecordKind::Labelled {
                    let label = record_content::label_of(&record, &self.config.keys).map_err(refuse)?;
                    parts.iter_mut().for_each(|part| part.set_label(label));
                }
                let scored = self.config.scores_sequences().then(|| self.score(&record, kind, &mut parts));
                let margin = scored.transpose().map_err(refuse)?.unwrap_or(0.0);
                Ok(Encoded::Example(place, kind, margin, parts))
            }
        }
    }

    /// Appends an id to the sequences of a record that is scored: its label, or 0. Returns the margin of a pair.
    fn score(&self, record: &Value, kind: RecordKind, parts: &mut [RowPart]) -> Result<f32, DataError> {
        if parts.iter().any(|part| part.ids.is_empty()) {
            return Err(DataError::new(
                "the record has a text without a token; correct or remove the record",
            ));
        }
        if kind != RecordKind::Classified {
            parts.iter_mut().for_each(|part| part.push(0, false));
            return record_content::margin_of(record, &self.config.keys);
        }
        let label = record_content::class_of(record, self.config)?;
        for part in parts {
            part.counts.fill(false);
            part.push(label, true);
        }
        Ok(0.0)
    }

    fn append(&mut self, path: &Path, encoded: Encoded) -> Result<(), DataError> {
        match encoded {
            Encoded::Document(ids) => self.gathered.push_document(ids, path),
            Encoded::Row(place, ids) => self.gathered.push_row(path, place, &ids),
            Encoded::Example(place, kind, margin, parts) => {
                let train_on = self.example_texts.train_on(kind);
                self.gathered.push_record(path, place, train_on, margin, parts)
            }
        }
    }
}

/// Lets all tokens count from the first completion on, which begins where one of the sequences says so.
fn mark_completions(parts: &mut [RowPart]) {
    let first = |part: &RowPart| part.counts.iter().position(|counts| *counts);
    let Some(first) = parts.iter().filter_map(first).min() else { return };
    parts.iter_mut().for_each(|part| part.counts.iter_mut().skip(first).for_each(|counts| *counts = true));
}
