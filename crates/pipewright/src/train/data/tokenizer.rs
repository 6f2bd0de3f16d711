//! Reads text files through a `tokenizer.json` in Hugging Face's format; needs the feature `tokenizers`.
//!
//! A file's text is tokenized as a whole, without special tokens, because cutting it would change the tokens at the
//! cut. While a file is read, its tokens take many times the memory of its text.

use std::path::{Path, PathBuf};

use crate::train::data::error::DataError;
use crate::train::data::ids::Ids;
use crate::train::data::memory_budget::MemoryBudget;

/// The largest `tokenizer.json` that is read; those of large vocabularies have some 30 MB.
#[cfg(feature = "tokenizers")]
const LARGEST_TOKENIZER: u64 = 1 << 29;

/// Bytes of memory that each byte of a file's text takes while the file is tokenized: a token has about four bytes of
/// text, and the library keeps about a hundred bytes for it.
#[cfg(feature = "tokenizers")]
const MEMORY_OF_A_BYTE: u64 = 32;

/// Returns the token ids of all files, one file after another.
#[cfg(feature = "tokenizers")]
pub(super) fn read(
    files: &[PathBuf],
    tokenizer: &Path,
    vocab_size: usize,
    budget: &mut MemoryBudget,
) -> Result<Ids, DataError> {
    use crate::train::data::text;

    let encoder = load(tokenizer)?;
    let mut ids = Ids::new(vocab_size);
    let mut bytes = Vec::new();
    for path in files {
        bytes.clear();
        text::append(path, &mut bytes, budget)?;
        budget.require(path, MEMORY_OF_A_BYTE.saturating_mul(bytes.len() as u64))?;
        let before = ids.len();
        append(&encoder, text::utf8(path, &bytes)?, path, vocab_size, &mut ids)?;
        budget.take(path, ((ids.len() - before) * ids.width()) as u64)?;
    }
    Ok(ids)
}

/// Returns the token ids of a text in memory; errors call it `name`.
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

/// Appends the token ids of one file's text.
#[cfg(feature = "tokenizers")]
fn append(
    encoder: &tokenizers::Tokenizer,
    text: &str,
    path: &Path,
    vocab_size: usize,
    ids: &mut Ids,
) -> Result<(), DataError> {
    use crate::train::data::error::TokenPlace;

    let failed = |source| DataError::Tokenize { path: path.to_owned(), source };
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

#[cfg(feature = "tokenizers")]
fn load(path: &Path) -> Result<tokenizers::Tokenizer, DataError> {
    let content = crate::bounded_file::read_regular(path, LARGEST_TOKENIZER)
        .map_err(|source| DataError::Read { path: path.to_owned(), source })?;
    tokenizers::Tokenizer::from_bytes(content)
        .map_err(|source| DataError::Tokenizer { path: path.to_owned(), source })
}

/// Reports that this build cannot read tokenizers.
#[cfg(not(feature = "tokenizers"))]
pub(super) fn read(
    _files: &[PathBuf],
    tokenizer: &Path,
    _vocab_size: usize,
    _budget: &mut MemoryBudget,
) -> Result<Ids, DataError> {
    Err(DataError::TokenizersNotCompiledIn { path: tokenizer.to_owned() })
}

/// Reports that this build cannot read tokenizers.
#[cfg(not(feature = "tokenizers"))]
pub(super) fn of_text(
    _text: &str,
    _name: &Path,
    tokenizer: &Path,
    _vocab_size: usize,
) -> Result<Ids, DataError> {
    Err(DataError::TokenizersNotCompiledIn { path: tokenizer.to_owned() })
}
