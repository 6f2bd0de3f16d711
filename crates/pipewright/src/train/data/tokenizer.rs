//! Reads text files through a `tokenizer.json` in Hugging Face's format; needs the feature `tokenizers`.
//!
//! A file's text is tokenized as a whole, without special tokens, so memory for one file's tokens with their offsets is
//! needed while it is read.

use std::path::{Path, PathBuf};

use crate::train::data::error::DataError;
use crate::train::data::ids::Ids;

/// The token ids of all files, one after another.
#[cfg(feature = "tokenizers")]
pub(super) fn read(files: &[PathBuf], tokenizer: &Path, vocab_size: usize) -> Result<Ids, DataError> {
    use crate::train::data::error::TokenPlace;
    use crate::train::data::text;

    let encoder = tokenizers::Tokenizer::from_file(tokenizer)
        .map_err(|error| DataError::Tokenizer { path: tokenizer.to_owned(), reason: error.to_string() })?;
    let mut ids = Ids::new(vocab_size);
    let mut bytes = Vec::new();
    for path in files {
        bytes.clear();
        text::append(path, &mut bytes)?;
        let failed =
            |error: tokenizers::Error| DataError::Tokenize { path: path.clone(), reason: error.to_string() };
        let encoding = encoder.encode_fast(text::utf8(path, &bytes)?, false).map_err(failed)?;
        for (token, id) in (0..).zip(encoding.get_ids().iter().copied()) {
            if id as usize >= vocab_size {
                let (path, place, id) = (path.clone(), TokenPlace::Token(token), u64::from(id));
                return Err(DataError::BeyondVocabulary { path, place, id, vocab_size });
            }
            ids.push(id);
        }
    }
    Ok(ids)
}

/// Says that this build cannot read tokenizers.
#[cfg(not(feature = "tokenizers"))]
pub(super) fn read(_files: &[PathBuf], tokenizer: &Path, _vocab_size: usize) -> Result<Ids, DataError> {
    Err(DataError::TokenizersNotCompiledIn { path: tokenizer.to_owned() })
}
