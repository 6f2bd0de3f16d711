//! Turns a text into token ids and back, for example for generation.

use std::path::Path;

use crate::config::Tokenizer;
use crate::encoding::tokenizer::{Encoder, not_encoded};
use crate::error::{DataError, DataPlace};
use crate::vocabulary;

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
pub struct TokenCodec(Kind);

#[derive(Debug)]
enum Kind {
    Bytes,
    File(Encoder),
}

impl TokenCodec {
    /// Opens a tokenizer.
    ///
    /// # Errors
    /// When its file cannot be read or is not a tokenizer, or when this build cannot read such files.
    pub fn open(tokenizer: &Tokenizer) -> Result<Self, DataError> {
        Ok(Self(match tokenizer {
            Tokenizer::Bytes => Kind::Bytes,
            Tokenizer::File(path) => Kind::File(Encoder::load(path)?),
        }))
    }

    /// Returns the token ids of a text. With `special`, a tokenizer from a file adds its special tokens, such
    /// as the one that begins a text.
    ///
    /// # Errors
    /// When an id is not below `vocab_size`.
    pub fn encode(&self, text: &str, vocab_size: usize, special: bool) -> Result<Vec<u32>, DataError> {
        let name = Path::new("the text");
        match &self.0 {
            Kind::File(encoder) => {
                let ids = encoder.encode(text, special).map_err(|source| not_encoded(name, None, source))?;
                vocabulary::check(ids.iter().map(|id| u64::from(*id)), vocab_size, name, DataPlace::Token)?;
                Ok(ids)
            }
            Kind::Bytes => {
                vocabulary::check(text.bytes().map(u64::from), vocab_size, name, DataPlace::Byte)?;
                Ok(text.bytes().map(u32::from).collect())
            }
        }
    }

    /// Returns the text of token ids with special tokens, as [`TokenCodec::decode`] does without them.
    ///
    /// # Errors
    /// When the tokenizer fails.
    pub fn decode_all(&self, ids: &[u32]) -> Result<String, DataError> {
        match &self.0 {
            Kind::File(encoder) => encoder.decode(ids, true),
            Kind::Bytes => self.decode(ids),
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
        match &self.0 {
            Kind::File(encoder) => encoder.decode(ids, false),
            Kind::Bytes => {
                // No text contains the byte 0xFF, so it becomes a replacement character.
                let bytes: Vec<u8> = ids.iter().map(|&id| u8::try_from(id).unwrap_or(0xFF)).collect();
                Ok(String::from_utf8_lossy(&bytes).into_owned())
            }
        }
    }
}
