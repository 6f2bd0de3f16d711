//! Reads text files through a `tokenizer.json` in Hugging Face's format; needs the feature `tokenizers`.
//!
//! A file's text is tokenized as a whole, without special tokens, so memory for one file's tokens with their offsets is
//! needed while it is read.

use std::path::{Path, PathBuf};

use crate::data::error::DataError;
use crate::data::ids::Ids;

/// The token ids of all files, one after another.
#[cfg(feature = "tokenizers")]
pub(super) fn read(files: &[PathBuf], tokenizer: &Path, vocab_size: usize) -> Result<Ids, DataError> {
    use crate::data::text;

    let encoder = load(tokenizer)?;
    let mut ids = Ids::new(vocab_size);
    let mut bytes = Vec::new();
    for path in files {
        bytes.clear();
        text::append(path, &mut bytes)?;
        append(&encoder, text::utf8(path, &bytes)?, path, vocab_size, &mut ids)?;
    }
    Ok(ids)
}

/// The token ids of a text in memory; `name` is what errors call it.
#[cfg(feature = "tokenizers")]
pub(super) fn of_text(
    text: &str,
    name: &Path,
    tokenizer: &Path,
    vocab_size: usize,
) -> Result<Ids, DataError> {
    let mut ids = Ids::new(vocab_size);
    append(&load(tokenizer)?, text, name, vocab_size, &mut ids)?;
    Ok(ids)
}

#[cfg(feature = "tokenizers")]
fn load(tokenizer: &Path) -> Result<tokenizers::Tokenizer, DataError> {
    tokenizers::Tokenizer::from_file(tokenizer)
        .map_err(|error| DataError::Tokenizer { path: tokenizer.to_owned(), reason: error.to_string() })
}

/// Appends the token ids of one file's text.
#[cfg(feature = "tokenizers")]
fn append(
    encoder: &tokenizers::Tokenizer,
    text: &str,
    path: &Path,
    vocab_size: usize,
    ids: &mut Ids,
) -> Result<(), DataError> {
    use crate::data::error::TokenPlace;

    let failed =
        |error: tokenizers::Error| DataError::Tokenize { path: path.to_owned(), reason: error.to_string() };
    let encoding = encoder.encode_fast(text, false).map_err(failed)?;
    for (token, id) in (0..).zip(encoding.get_ids().iter().copied()) {
        if id as usize >= vocab_size {
            let (path, place, id) = (path.to_owned(), TokenPlace::Token(token), u64::from(id));
            return Err(DataError::BeyondVocabulary { path, place, id, vocab_size });
        }
        ids.push(id);
    }
    Ok(())
}

/// Says that this build cannot read tokenizers.
#[cfg(not(feature = "tokenizers"))]
pub(super) fn read(_files: &[PathBuf], tokenizer: &Path, _vocab_size: usize) -> Result<Ids, DataError> {
    Err(DataError::TokenizersNotCompiledIn { path: tokenizer.to_owned() })
}

/// Says that this build cannot read tokenizers.
#[cfg(not(feature = "tokenizers"))]
pub(super) fn of_text(
    _text: &str,
    _name: &Path,
    tokenizer: &Path,
    _vocab_size: usize,
) -> Result<Ids, DataError> {
    Err(DataError::TokenizersNotCompiledIn { path: tokenizer.to_owned() })
}
