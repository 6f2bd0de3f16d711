//! Turns data files into one file of token ids, which training reads as it is needed.

use std::ops::ControlFlow;
use std::path::Path;

use crate::bad_records::BadRecords;
use crate::chat::special_tokens::MissingEnd;
use crate::collector::{Collector, Drained};
use crate::config::DataConfig;
use crate::encoding::tokenizer::{BYTES, BYTES_FINGERPRINT, Encoder};
use crate::error::{DataError, DataErrorKind};
use crate::files::find::find;
use crate::formats::format::DataSource;
use crate::gathered::{Drain, Form, empty};
use crate::memory_budget::MemoryBudget;
use crate::storage::examples::ExampleBuffer;
use crate::storage::ids::IdBuffer;
use crate::tokenized::header::Header;
use crate::tokenized::writer::TokenWriter;

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
    /// One more than the largest id that the tokenizer or the beginning of a document has.
    pub vocab_size: u64,
    /// The number of bytes of an id.
    pub width: usize,
    /// Set if no token ends the completions.
    pub missing_end: Option<MissingEnd>,
    /// The records that are left out because they cannot be used, if there are any.
    pub bad_records: Option<BadRecords>,
}

/// Writes what is read, and says how much it is.
struct Output<'a> {
    writer: TokenWriter,
    bytes: u64,
    progress: &'a mut (dyn FnMut(TokenizeProgress) -> ControlFlow<()> + Sync),
}

impl Drain for Output<'_> {
    fn drain(
        &mut self,
        ids: &mut IdBuffer,
        examples: &mut ExampleBuffer,
        read: u64,
    ) -> Result<(), DataError> {
        self.writer.write(ids, examples)?;
        let progress = TokenizeProgress { read, bytes: self.bytes, tokens: self.writer.tokens() };
        match (self.progress)(progress) {
            ControlFlow::Continue(()) => Ok(()),
            ControlFlow::Break(()) => {
                let stopped = DataError::of(self.writer.path(), "not written, because the work was stopped");
                Err(stopped.of_kind(DataErrorKind::Stopped))
            }
        }
    }
}

impl DataConfig {
    /// Writes the token ids of all files to the file `output`, whose name should end in `.pwtok`. A run whose
    /// `path` is this file has the same rows as one that reads the files, and reads the ids when it needs
    /// them. Files are tokenized on all cores. `seq_len`, `shuffle`, `seed` and `long_records` are without
    /// effect: they belong to the run.
    ///
    /// The file is written under another name, and gets its own when it is complete. `progress` is called
    /// between batches, and stops the work if it returns `Break`. After a stop or an error, no file is left.
    ///
    /// # Errors
    /// As [`DataConfig::open`], when a line is an array of token ids, when the file cannot be written, and
    /// when the work was stopped.
    pub fn tokenize(
        &self,
        output: &Path,
        progress: &mut (dyn FnMut(TokenizeProgress) -> ControlFlow<()> + Sync),
    ) -> Result<Tokenized, DataError> {
        // The tokenizer is read once, so its fingerprint is right even if its file changes during the work.
        let encoder = Encoder::of(&self.tokenizer)?;
        let bos = self.documents.map(|documents| documents.bos_id);
        let vocab_size = encoder.as_ref().map_or(BYTES, Encoder::vocabulary);
        let vocab_size = vocab_size.max(bos.map_or(0, |bos| bos as usize + 1));
        let tokenizer = encoder.as_ref().map_or(BYTES_FINGERPRINT, Encoder::fingerprint).to_owned();
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
        let Drained { form, template, train_on, missing_end, sources, left_out } =
            collector.finish_drained()?;
        let bad_records = left_out.finish(output.writer.tokens() > 0)?;
        if output.writer.tokens() == 0 {
            return Err(empty(&files.into_iter().next().unwrap_or_default()));
        }
        let header = output.writer.finish(Header {
            vocab_size: vocab_size as u64,
            tokenizer,
            template,
            train_on,
            bos_id: bos,
            examples: (form == Form::Examples).then_some(0),
            ..Header::default()
        })?;
        Ok(Tokenized {
            sources,
            tokens: header.tokens,
            examples: header.examples,
            targets: header.targets,
            vocab_size: header.vocab_size,
            width: header.width().bytes(),
            missing_end,
            bad_records,
        })
    }
}
