//! Turns texts into token ids through a `tokenizer.json` in Hugging Face's format; needs the feature
//! `tokenizers`.
//!
//! The text of a document is tokenized as a whole, because cutting it would change the tokens at
//! the cut, and with the special tokens that the tokenizer puts around a text, such as the one that begins
//! it. Meanwhile its tokens take many times the memory of its text.

use std::path::Path;
#[cfg(feature = "tokenizers")]
use std::path::PathBuf;

use crate::config::Tokenizer;
use crate::encoding::llama_tokenizer::{self, Rewritten};
use crate::encoding::tokenizer_file::{TokenizerFile, read, refuse_other_forms};
use crate::error::{DataError, DataPlace};
use crate::vocabulary;

/// Bytes of memory that each byte of a text takes while it is tokenized: a token has about four
/// bytes of text, and the library keeps about a hundred bytes for it.
pub(crate) const MEMORY_OF_A_BYTE: u64 = 32;

/// Token ids with their places in the text.
pub(crate) struct PlacedTokens {
    pub(crate) ids: Vec<u32>,
    /// The bytes of the text that each token encodes, as start and end; the end is excluded.
    pub(crate) places: Vec<(usize, usize)>,
}

/// The tokenizer's reason why a text has no ids.
pub(crate) type EncodeError = Box<dyn std::error::Error + Send + Sync>;

/// Returns the error of a text that a tokenizer refuses.
pub(crate) fn not_encoded(path: &Path, record: Option<DataPlace>, source: EncodeError) -> DataError {
    let error = DataError::of(path, "the tokenizer cannot turn the text into tokens").caused_by(source);
    match record {
        Some(place) => error.at(path, place),
        None => error,
    }
}

/// Returns the ids of a text. All are below `vocab_size`. Without an encoder, bytes are ids. `special` is as in
/// [`Encoder::encode`]. Errors name the file and the record.
pub(crate) fn encode(
    encoder: Option<&Encoder>,
    text: &str,
    special: bool,
    vocab_size: usize,
    (path, record): (&Path, Option<DataPlace>),
) -> Result<Vec<u32>, DataError> {
    let (ids, in_file): (Vec<u32>, fn(u64) -> DataPlace) = match encoder {
        None => (text.bytes().map(u32::from).collect(), DataPlace::Byte),
        Some(encoder) => {
            let ids = encoder.encode(text, special);
            (ids.map_err(|source| not_encoded(path, record, source))?, DataPlace::Token)
        }
    };
    let place = |index| record.unwrap_or_else(|| in_file(index));
    vocabulary::check(ids.iter().map(|id| u64::from(*id)), vocab_size, path, place)?;
    Ok(ids)
}

/// The number of tokens if bytes are tokens.
pub(crate) const BYTES: usize = 256;
/// The fingerprint if bytes are tokens.
pub(crate) const BYTES_FINGERPRINT: &str = "bytes";

/// Returns a text that tells tokenizers apart: the beginning of the hash of the file.
pub(crate) fn fingerprint(tokenizer: &Tokenizer) -> Result<String, DataError> {
    match tokenizer {
        Tokenizer::Bytes => Ok(BYTES_FINGERPRINT.to_owned()),
        Tokenizer::File(path) | Tokenizer::Extended(path, _) => {
            let content = content_of(path, added(tokenizer))?;
            Ok(fingerprint_of(&content, llama_tokenizer::as_its_class_reads(path, &content)?.as_ref()))
        }
    }
}

/// Returns the special tokens that the settings add to the file of a tokenizer.
fn added(tokenizer: &Tokenizer) -> &[String] {
    match tokenizer {
        Tokenizer::Extended(_, tokens) => tokens,
        Tokenizer::Bytes | Tokenizer::File(_) => &[],
    }
}

/// Returns the content of a `tokenizer.json`, with further special tokens.
fn content_of(path: &Path, tokens: &[String]) -> Result<Vec<u8>, DataError> {
    let content = read(path)?;
    if tokens.is_empty() {
        return Ok(content);
    }
    let mut file = TokenizerFile::of(path, &content)?;
    file.add(tokens, true)?;
    Ok(file.to_text().into_bytes())
}

/// `rewritten` is the file as its class reads it, if that differs.
fn fingerprint_of(content: &[u8], rewritten: Option<&Rewritten>) -> String {
    let scheme = rewritten.map_or("", |rewritten| rewritten.scheme);
    let hash = blake3::Hasher::new().update(content).update(scheme.as_bytes()).finalize();
    hash.to_hex()[..16].to_owned()
}

/// A tokenizer that was read from a file. There is none without the feature `tokenizers`.
#[cfg(feature = "tokenizers")]
#[derive(Debug)]
pub(crate) struct Encoder {
    path: PathBuf,
    tokenizer: Box<tokenizers::Tokenizer>,
    fingerprint: String,
}

/// A tokenizer that was read from a file. There is none without the feature `tokenizers`.
#[cfg(not(feature = "tokenizers"))]
#[derive(Debug)]
pub(crate) enum Encoder {}

impl Encoder {
    /// Reads the tokenizer that the settings name; `None` if bytes are tokens.
    pub(crate) fn of(tokenizer: &Tokenizer) -> Result<Option<Self>, DataError> {
        match tokenizer {
            Tokenizer::Bytes => Ok(None),
            Tokenizer::File(path) | Tokenizer::Extended(path, _) => {
                Self::load(path, added(tokenizer)).map(Some)
            }
        }
    }
}

#[cfg(feature = "tokenizers")]
impl Encoder {
    /// Reads a `tokenizer.json`, and adds special tokens.
    fn load(path: &Path, tokens: &[String]) -> Result<Self, DataError> {
        let content = content_of(path, tokens)?;
        refuse_other_forms(path)?;
        crate::content::refuse_lfs_pointer(path, &content)?;
        let rewritten = llama_tokenizer::as_its_class_reads(path, &content)?;
        let fingerprint = fingerprint_of(&content, rewritten.as_ref());
        let content = rewritten.map_or(content, |rewritten| rewritten.content);
        let unusable = |source: EncodeError| {
            let problem = "not a tokenizer.json of Hugging Face (the other choice is \"bytes\")";
            DataError::of(path, problem).caused_by(source)
        };
        let mut tokenizer =
            tokenizers::Tokenizer::from_bytes(pipewright_system::bounded_file::without_mark(&content))
                .map_err(unusable)?;
        // The file may say how its author cut and filled texts. Both would lose or invent tokens here.
        tokenizer.with_padding(None).with_truncation(None).map_err(unusable)?;
        Ok(Self { path: path.to_owned(), tokenizer: Box::new(tokenizer), fingerprint })
    }

    /// Returns the token ids of a text. With `special`, the tokenizer adds its special tokens.
    pub(crate) fn encode(&self, text: &str, special: bool) -> Result<Vec<u32>, EncodeError> {
        Ok(self.tokenizer.encode_fast(text, special)?.get_ids().to_vec())
    }

    /// Returns the token ids of a text, and the bytes of the text that each of them stands for; none for a
    /// token that the tokenizer has added.
    pub(crate) fn encode_with_places(&self, text: &str, special: bool) -> Result<PlacedTokens, EncodeError> {
        let encoding = self.tokenizer.encode(text, special)?;
        Ok(PlacedTokens { ids: encoding.get_ids().to_vec(), places: encoding.get_offsets().to_vec() })
    }

    /// Returns one more than the largest id, also of the special tokens. Some tokenizers do not use all ids
    /// below it.
    pub(crate) fn vocabulary(&self) -> usize {
        self.tokenizer.get_vocab(true).into_values().max().map_or(0, |id| id as usize + 1)
    }

    /// Returns the [`fingerprint`] of the bytes that were read.
    pub(crate) fn fingerprint(&self) -> &str {
        &self.fingerprint
    }

    /// Returns the text of token ids, perhaps with special tokens.
    pub(crate) fn decode(&self, ids: &[u32], has_special: bool) -> Result<String, DataError> {
        let decoded = self.tokenizer.decode(ids, !has_special);
        decoded.map_err(|source| {
            DataError::of(&self.path, "the tokenizer cannot turn the tokens into text").caused_by(source)
        })
    }
}

#[cfg(not(feature = "tokenizers"))]
impl Encoder {
    /// Reports that this build cannot read tokenizers.
    fn load(path: &Path, _tokens: &[String]) -> Result<Self, DataError> {
        refuse_other_forms(path)?;
        let feature = crate::feature::Feature::Tokenizers;
        Err(DataError::of(path, format!("{feature} are not compiled in; {}", feature.advice())))
    }

    pub(crate) fn vocabulary(&self) -> usize {
        match *self {}
    }

    pub(crate) fn fingerprint(&self) -> &str {
        match *self {}
    }

    pub(crate) fn encode(&self, _text: &str, _special: bool) -> Result<Vec<u32>, EncodeError> {
        match *self {}
    }

    pub(crate) fn encode_with_places(
        &self,
        _text: &str,
        _special: bool,
    ) -> Result<PlacedTokens, EncodeError> {
        match *self {}
    }

    pub(crate) fn decode(&self, _ids: &[u32], _has_special: bool) -> Result<String, DataError> {
        match *self {}
    }
}
