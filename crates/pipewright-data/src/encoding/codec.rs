//! Turns a text into token ids and back, for example for generation.

use std::path::Path;

use crate::config::Tokenizer;
use crate::encoding::tokenizer::{Encoder, encode};
use crate::error::DataError;

/// A tokenizer that is ready for use.
///
/// ```
/// use pipewright_data::{TokenCodec, Tokenizer};
///
/// let codec = TokenCodec::open(&Tokenizer::Bytes)?;
/// let ids = codec.encode("to be", 256, false)?;
/// assert_eq!(ids, [116, 111, 32, 98, 101]);
/// assert_eq!(codec.decode(&ids)?, "to be");
/// # Ok::<(), pipewright_data::DataError>(())
/// ```
#[derive(Debug)]
pub struct TokenCodec {
    /// The tokenizer of a file; `None` if bytes are tokens.
    encoder: Option<Encoder>,
}

impl TokenCodec {
    /// Opens a tokenizer.
    ///
    /// # Errors
    /// When its file cannot be read or is not a tokenizer, or when this build cannot read such files.
    pub fn open(tokenizer: &Tokenizer) -> Result<Self, DataError> {
        Ok(Self { encoder: Encoder::of(tokenizer)? })
    }

    /// Returns the token ids of a text. With `special`, a tokenizer from a file adds its special tokens, such
    /// as the one that begins a text.
    ///
    /// # Errors
    /// When an id is not below `vocab_size`.
    pub fn encode(&self, text: &str, vocab_size: usize, special: bool) -> Result<Vec<u32>, DataError> {
        let name = Path::new("the text");
        encode(self.encoder.as_ref(), text, special, vocab_size, (name, None))
    }

    /// Returns the text of token ids with special tokens, as [`TokenCodec::decode`] does without them.
    ///
    /// # Errors
    /// When the tokenizer fails.
    pub fn decode_all(&self, ids: &[u32]) -> Result<String, DataError> {
        match &self.encoder {
            Some(encoder) => encoder.decode(ids, true),
            None => self.decode(ids),
        }
    }

    /// Returns the texts of consecutive runs of token ids, with special tokens. A tokenizer may leave out the
    /// space at the beginning of a text, so the text of a run is the text that it adds to the runs before it.
    ///
    /// # Errors
    /// When the tokenizer fails.
    pub fn decode_runs<'i>(
        &self,
        runs: impl IntoIterator<Item = &'i [u32]>,
    ) -> Result<Vec<String>, DataError> {
        let (mut ids, mut before, mut texts) = (Vec::new(), String::new(), Vec::new());
        for run in runs {
            ids.extend(run);
            let whole = self.decode_all(&ids)?;
            texts.push(match whole.strip_prefix(&before) {
                Some(added) => added.to_owned(),
                // The run before ends inside a character.
                None => self.decode_all(run)?,
            });
            before = whole;
        }
        Ok(texts)
    }

    /// Returns the text of token ids. Bytes that are not UTF-8 and ids above 255 become replacement
    /// characters.
    ///
    /// # Errors
    /// When the tokenizer fails.
    pub fn decode(&self, ids: &[u32]) -> Result<String, DataError> {
        match &self.encoder {
            Some(encoder) => encoder.decode(ids, false),
            None => {
                // No text contains the byte 0xFF, so it becomes a replacement character.
                let bytes: Vec<u8> = ids.iter().map(|&id| u8::try_from(id).unwrap_or(0xFF)).collect();
                Ok(String::from_utf8_lossy(&bytes).into_owned())
            }
        }
    }
}
