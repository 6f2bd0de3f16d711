//! Turns data files into one file of token ids, which training reads as it is needed.

use std::path::Path;

use crate::collector::Collector;
use crate::config::{DataConfig, Tokenizer};
use crate::encoding::tokenizer::{BYTES, BYTES_FINGERPRINT, Encoder};
use crate::error::DataError;
use crate::files::find::find;
use crate::formats::format::DataSource;
use crate::gathered::{Drain, Form};
use crate::memory_budget::MemoryBudget;
use crate::storage::examples::ExampleBuffer;
use crate::storage::ids::IdBuffer;
use crate::tokenized::writer::{Settings, TokenWriter};

/// How much is tokenized.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenizeProgress {
    /// The number of bytes of the files that are read.
    pub read: u64,
    /// The number of bytes of all files.
    pub bytes: u64,
    /// The number of token ids that are written.
    pub tokens: u64,
}

/// The content of a file of token ids.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tokenized {
    /// The kinds of files that were read.
    pub sources: Vec<DataSource>,
    /// The number of token ids.
    pub tokens: u64,
    /// The number of chats and completions; `None` for a stream of ids.
    pub examples: Option<u64>,
    /// The number of targets that count in the loss.
    pub targets: u64,
    /// The number of tokens of the tokenizer.
    pub vocab_size: u64,
    /// The number of bytes of an id.
    pub width: usize,
}

/// Writes what is read, and says how much it is.
struct Output<'a> {
    writer: TokenWriter,
    bytes: u64,
    progress: &'a mut (dyn FnMut(TokenizeProgress) + Sync),
}

impl Drain for Output<'_> {
    fn drain(
        &mut self,
        ids: &mut IdBuffer,
        examples: &mut ExampleBuffer,
        read: u64,
    ) -> Result<(), DataError> {
        self.writer.write(ids, examples)?;
        (self.progress)(TokenizeProgress { read, bytes: self.bytes, tokens: self.writer.tokens() });
        Ok(())
    }
}

impl DataConfig {
    /// Writes the token ids of all files to the file `output`, whose name should end in `.pwtok`. A run whose
    /// `path` is this file has the same rows as one that reads the files, and reads the ids when it needs
    /// them. Files are tokenized on all cores. `seq_len`, `shuffle`, `seed` and `long_records` are without
    /// effect: they belong to the run.
    ///
    /// The file is written under another name, and gets its own when it is complete.
    ///
    /// # Errors
    /// As [`DataConfig::open`], and when a line is an array of token ids or the file cannot be written.
    pub fn tokenize(
        &self,
        output: &Path,
        progress: &mut (dyn FnMut(TokenizeProgress) + Sync),
    ) -> Result<Tokenized, DataError> {
        // The tokenizer is read once, so its fingerprint is right even if its file changes during the work.
        let encoder = match &self.tokenizer {
            Tokenizer::Bytes => None,
            Tokenizer::File(path) => Some(Encoder::load(path)?),
        };
        let vocab_size = encoder.as_ref().map_or(BYTES, Encoder::vocabulary);
        let tokenizer = encoder.as_ref().map_or(BYTES_FINGERPRINT, Encoder::fingerprint).to_owned();
        let bos = self.bos(vocab_size)?;
        let files = find(&self.path)?;
        let size = |path: &std::path::PathBuf| std::fs::metadata(path).map_or(0, |metadata| metadata.len());
        let bytes = files.iter().map(size).sum();
        let writer = TokenWriter::create(output, vocab_size)?;
        let mut output = Output { writer, bytes, progress };
        let mut budget = MemoryBudget::of_machine();
        let mut collector =
            Collector::new(self, bos, vocab_size, &mut budget, Some(&mut output)).with_encoder(encoder);
        for file in &files {
            collector.read(file)?;
        }
        let (form, template, sources) = collector.finish_drained()?;
        if output.writer.tokens() == 0 {
            return Err(DataError::Empty { path: files.into_iter().next().unwrap_or_default() });
        }
        let header = output.writer.finish(Settings {
            vocab_size,
            tokenizer,
            template,
            train_on: self.train_on,
            bos_id: bos,
            has_examples: form == Form::Examples,
        })?;
        Ok(Tokenized {
            sources,
            tokens: header.tokens,
            examples: header.examples,
            targets: header.targets,
            vocab_size: header.vocab_size,
            width: header.width().bytes(),
        })
    }
}
