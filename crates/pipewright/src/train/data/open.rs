//! How the settings of a data source become [`TokenRows`].

use std::path::PathBuf;

use crate::train::data::config::{DataConfig, Tokenizer};
use crate::train::data::error::DataError;
use crate::train::data::files;
use crate::train::data::ids::Ids;
use crate::train::data::memory_budget::MemoryBudget;
use crate::train::data::rows::{Stride, TokenRows};
use crate::train::data::{jsonl, text, tokenizer};

impl DataConfig {
    /// Reads all files. `vocab_size` is the number of token ids that the model knows, `batch_rows` the number
    /// of rows that a step takes.
    ///
    /// Text of all files is one stream, cut into rows that share one token with the next row: the last target
    /// of a row is the first input of the next. An incomplete row at the end is left out. The ids are held in
    /// memory, in one byte each for a vocabulary of up to 256 ids, two up to 65,536, else four. They may take
    /// half of the memory that is available. While documents are divided or a tokenizer is used, the bytes of
    /// the file that is read count too.
    ///
    /// # Errors
    /// When a pattern matches no file, a file cannot be read, is not a regular file, is not text in UTF-8 or
    /// not an array of ids, a row has another length, an id is not below `vocab_size`, there is no token at
    /// all, there is too much data for the memory, there are fewer rows than a batch takes, or the id that
    /// begins documents is not below `vocab_size`.
    pub fn open(&self, vocab_size: usize, batch_rows: usize) -> Result<TokenRows, DataError> {
        self.open_within(MemoryBudget::of_machine(), vocab_size, batch_rows)
    }

    pub(super) fn open_within(
        &self,
        mut budget: MemoryBudget,
        vocab_size: usize,
        batch_rows: usize,
    ) -> Result<TokenRows, DataError> {
        let budget = &mut budget;
        let bos = self.bos(vocab_size)?;
        let found = files::find(&self.path)?;
        let jsonl = found.iter().find(|path| path.extension().is_some_and(|ending| ending == "jsonl"));
        let (ids, stride) = match (jsonl, found.as_slice()) {
            (Some(_), [only]) => (jsonl::read(only, self.seq_len, vocab_size, budget)?, Stride::Disjoint),
            (Some(path), _) => {
                return Err(DataError::JsonlAmongOthers { path: path.clone(), files: found.len() });
            }
            (None, files) => {
                let ids = match &self.tokenizer {
                    Tokenizer::Bytes => text::read(files, bos, vocab_size, budget)?,
                    Tokenizer::File(tokenizer) => tokenizer::read(files, tokenizer, bos, vocab_size, budget)?,
                };
                (ids, Stride::Overlapping)
            }
        };
        let first = found.into_iter().next().unwrap_or_default();
        self.rows(ids, stride, batch_rows, first)
    }

    /// Opens a text in memory instead of files, like [`DataConfig::open`]. `path` is ignored.
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
        let ids = match &self.tokenizer {
            Tokenizer::Bytes => text::of_text(text, &name, bos, vocab_size)?,
            Tokenizer::File(tokenizer) => tokenizer::of_text(text, &name, tokenizer, bos, vocab_size)?,
        };
        self.rows(ids, Stride::Overlapping, batch_rows, name)
    }

    /// Returns the id that begins documents, if there is one.
    fn bos(&self, vocab_size: usize) -> Result<Option<u32>, DataError> {
        match self.documents.map(|documents| documents.bos_id) {
            Some(bos) if bos as usize >= vocab_size => {
                Err(DataError::BeginningBeyondVocabulary { bos, vocab_size })
            }
            bos => Ok(bos),
        }
    }

    fn rows(
        &self,
        ids: Ids,
        stride: Stride,
        batch_rows: usize,
        first: PathBuf,
    ) -> Result<TokenRows, DataError> {
        if ids.len() == 0 {
            return Err(DataError::Empty { path: first });
        }
        let rows = TokenRows::new(ids, stride, self)?;
        rows.require_batch(batch_rows)?;
        Ok(rows)
    }
}
