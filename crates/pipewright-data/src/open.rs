//! How the settings of a data source become [`TokenRows`].

use std::collections::BTreeMap;
use std::path::PathBuf;

use crate::collected::Collected;
use crate::collector::Collector;
use crate::config::DataConfig;
use crate::error::DataError;
use crate::files::find::find;
use crate::gathered::empty;
use crate::memory_budget::MemoryBudget;
use crate::rows::TokenRows;
use crate::settings::train_on::{LongRecordCount, LongRecords};
use crate::source_rows::SourceRows;
use crate::tokenized::opened;

impl DataConfig {
    /// Reads all files. `vocab_size` is the number of token ids that the model knows, `batch_rows` the number
    /// of rows that a step takes.
    ///
    /// Text of all files is one stream, cut into rows that share one token with the next row: the last target
    /// of a row is the first input of the next. An incomplete row at the end is left out. The ids are held in
    /// memory, in one byte each for a vocabulary of up to 256 ids, two up to 65,536, else four. They may take
    /// half of the memory that is available. While documents are divided or a tokenizer is used, the bytes of
    /// the file that is read count too. The ids of a `*.pwtok` stay in the file.
    ///
    /// The sources of `mix` are read one after another within the same memory.
    ///
    /// # Errors
    /// When a pattern matches no file, a file cannot be read, is not a regular file, is damaged, is none of
    /// the formats of [`DataConfig::path`], rows of ids are mixed with other data in a source, a row has
    /// another length, an id is not below `vocab_size`, there is no token at all, there is too much data for
    /// the memory, there are fewer rows than a batch takes, or the id that begins documents is not below
    /// `vocab_size`; when both `path` and `mix` are given, a file is in two sources, or a source has no row.
    pub fn open(&self, vocab_size: usize, batch_rows: usize) -> Result<TokenRows, DataError> {
        self.open_within(MemoryBudget::of_machine(), vocab_size, batch_rows)
    }

    pub(crate) fn open_within(
        &self,
        mut budget: MemoryBudget,
        vocab_size: usize,
        batch_rows: usize,
    ) -> Result<TokenRows, DataError> {
        let rows = if self.mix.is_empty() {
            TokenRows::new(self.read_source(find(&self.path)?, 0, &mut budget, vocab_size)?, self)
        } else {
            self.open_mix(&mut budget, vocab_size)?
        };
        rows.require_batch(batch_rows)?;
        Ok(rows)
    }

    /// Reads the sources of a mixture.
    fn open_mix(&self, budget: &mut MemoryBudget, vocab_size: usize) -> Result<TokenRows, DataError> {
        if !self.path.is_empty() {
            let problem = "the data has both `path` and `mix`: remove `path`, or make it a source of `mix` with a weight";
            return Err(DataError::new(problem));
        }
        let (mut sources, mut owners) = (Vec::new(), BTreeMap::new());
        for (number, source) in (0..).zip(&self.mix) {
            let files = find(&source.path)?;
            for file in &files {
                // A file may have several names.
                let place = file.canonicalize().unwrap_or_else(|_| file.clone());
                let (owner, first) = *owners.entry(place).or_insert((number, source));
                if owner != number {
                    let problem = format!(
                        "the file is in two sources of `mix`, {} and {}, so its records would be repeated too early; leave it \
                         out of one of them, with a pattern that begins with `!`",
                        first.name(),
                        source.name()
                    );
                    return Err(DataError::of(file, problem));
                }
            }
            sources.push(self.read_source(files, number, budget, vocab_size)?);
        }
        TokenRows::mixed(sources, self)
    }

    /// Reads the files of the source with this number.
    fn read_source(
        &self,
        files: Vec<PathBuf>,
        number: u64,
        budget: &mut MemoryBudget,
        vocab_size: usize,
    ) -> Result<SourceRows, DataError> {
        let bos = self.bos(vocab_size)?;
        if let Some(tokenized) = files.iter().find(|file| opened::is_tokenized(file)) {
            if let Some(training) = self.needs_records() {
                let problem =
                    format!("{training} reads records; name the .jsonl, .json or .parquet files of the data");
                return Err(DataError::of(tokenized, problem));
            }
            if files.len() > 1 {
                let problem = "a file of `pipewright tokenize` is the only file of its data; tokenize all files into one";
                return Err(DataError::of(tokenized, problem));
            }
            let collected = opened::open(tokenized, self, vocab_size)?;
            return self.rows(collected, number, tokenized.clone());
        }
        let mut collector = Collector::new(self, bos, vocab_size, budget, None);
        for file in &files {
            collector.read(file)?;
        }
        let first = files.into_iter().next().unwrap_or_default();
        self.rows(collector.finish()?, number, first)
    }

    /// Opens a text in memory instead of files, like [`DataConfig::open`]. `path` and `mix` are ignored.
    ///
    /// # Errors
    /// As [`DataConfig::open`].
    pub fn open_text(
        &self,
        text: &str,
        vocab_size: usize,
        batch_rows: usize,
    ) -> Result<TokenRows, DataError> {
        let name = PathBuf::from("the text in memory");
        let bos = self.bos(vocab_size)?;
        let mut budget = MemoryBudget::of_machine();
        let mut collector = Collector::new(self, bos, vocab_size, &mut budget, None);
        collector.read_memory(text, &name)?;
        let rows = TokenRows::new(self.rows(collector.finish()?, 0, name)?, self);
        rows.require_batch(batch_rows)?;
        Ok(rows)
    }

    /// Returns the id that begins documents, if there is one.
    pub(crate) fn bos(&self, vocab_size: usize) -> Result<Option<u32>, DataError> {
        match self.documents.map(|documents| documents.bos_id) {
            Some(bos) if bos as usize >= vocab_size => Err(DataError::new(format!(
                "documents begin with the token id {bos}, which lies beyond the vocabulary of {vocab_size}; raise vocab_size, \
                 or choose another id"
            ))),
            bos => Ok(bos),
        }
    }

    fn rows(&self, collected: Collected, number: u64, first: PathBuf) -> Result<SourceRows, DataError> {
        let LongRecordCount { treatment, long, records, .. } = collected.long_records;
        if treatment == LongRecords::Skip && records > 0 && long == records {
            let (longest, row) = (self.longest(), collected.long_records.row());
            let problem = format!(
                "all {records} records have more tokens than the {longest} of {row}, and are skipped; raise \
                 seq_len, or write `long_records = \"cut\"` in [data]"
            );
            return Err(DataError::of(&first, problem));
        }
        let rows = SourceRows::new(collected, self, number)?;
        if rows.tokens() == 0 {
            return Err(empty(&first));
        }
        Ok(rows)
    }
}
