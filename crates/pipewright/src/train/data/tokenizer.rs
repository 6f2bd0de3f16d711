//! Reads text files through a `tokenizer.json` in Hugging Face's format; needs the feature `tokenizers`.
//!
//! A file's text is one document. It is tokenized as a whole, because cutting it would change the tokens at
//! the cut, and with the special tokens that the tokenizer puts around a text, such as the one that begins
//! it. While a file is read, its tokens take many times the memory of its text.

use std::path::{Path, PathBuf};

use crate::train::data::error::DataError;
use crate::train::data::ids::Ids;
use crate::train::data::memory_budget::MemoryBudget;
use crate::train::data::text;

/// The largest `tokenizer.json` that is read. For a large vocabulary it has some 30 MB.
#[cfg(feature = "tokenizers")]
const LARGEST_TOKENIZER: u64 = 1 << 29;

/// Bytes of memory that each byte of a file's text takes while the file is tokenized: a token has about four
/// bytes of text, and the library keeps about a hundred bytes for it.
const MEMORY_OF_A_BYTE: u64 = 32;

/// A tokenizer that was read from a file. There is none without the feature `tokenizers`.
#[cfg(feature = "tokenizers")]
#[derive(Debug)]
pub(super) struct Encoder {
    path: PathBuf,
    tokenizer: Box<tokenizers::Tokenizer>,
}

/// A tokenizer that was read from a file. There is none without the feature `tokenizers`.
#[cfg(not(feature = "tokenizers"))]
#[derive(Debug)]
pub(super) enum Encoder {}

/// Returns the token ids of all files, one file after another, with `bos` before each.
pub(super) fn read(
    files: &[PathBuf],
    tokenizer: &Path,
    bos: Option<u32>,
    vocab_size: usize,
    budget: &mut MemoryBudget,
) -> Result<Ids, DataError> {
    let encoder = Encoder::load(tokenizer)?;
    let mut ids = Ids::new(vocab_size);
    let mut bytes = Vec::new();
    for path in files {
        bytes.clear();
        text::append(path, &mut bytes, budget)?;
        budget.require(path, MEMORY_OF_A_BYTE.saturating_mul(bytes.len() as u64))?;
        let before = ids.len();
        let document = encoder.encode(text::utf8(path, &bytes)?, path, vocab_size, true)?;
        ids.push_document(beginning(bos, &document), document);
        budget.take(path, ((ids.len() - before) * ids.width()) as u64)?;
    }
    Ok(ids)
}

/// Returns the token ids of a text in memory, with `bos` before it; errors call it `name`.
pub(super) fn of_text(
    text: &str,
    name: &Path,
    tokenizer: &Path,
    bos: Option<u32>,
    vocab_size: usize,
) -> Result<Ids, DataError> {
    let mut ids = Ids::new(vocab_size);
    let document = Encoder::load(tokenizer)?.encode(text, name, vocab_size, true)?;
    ids.push_document(beginning(bos, &document), document);
    Ok(ids)
}

/// Returns the id to put before a document, which the tokenizer may have put there already.
fn beginning(bos: Option<u32>, document: &[u32]) -> Option<u32> {
    bos.filter(|bos| document.first() != Some(bos))
}

#[cfg(feature = "tokenizers")]
impl Encoder {
    /// Reads a `tokenizer.json`.
    pub(super) fn load(path: &Path) -> Result<Self, DataError> {
        let content = pipewright_system::bounded_file::read_regular(path, LARGEST_TOKENIZER)
            .map_err(|source| DataError::Read { path: path.to_owned(), source })?;
        if crate::train::data::content::is_lfs_pointer(&content) {
            return Err(DataError::LfsPointer { path: path.to_owned() });
        }
        let unusable = |source| DataError::Tokenizer { path: path.to_owned(), source };
        let mut tokenizer =
            tokenizers::Tokenizer::from_bytes(pipewright_system::bounded_file::without_mark(&content))
                .map_err(unusable)?;
        // The file may say how its author cut and filled texts. Both would lose or invent tokens here.
        tokenizer.with_padding(None).with_truncation(None).map_err(unusable)?;
        Ok(Self { path: path.to_owned(), tokenizer: Box::new(tokenizer) })
    }

    /// Returns the token ids of a text; errors call it `name`. With `special`, the tokenizer adds its special
    /// tokens.
    pub(super) fn encode(
        &self,
        text: &str,
        name: &Path,
        vocab_size: usize,
        special: bool,
    ) -> Result<Vec<u32>, DataError> {
        use crate::train::data::error::TokenPlace;

        let failed = |source| DataError::Tokenize { path: name.to_owned(), source };
        let encoding = self.tokenizer.encode_fast(text, special).map_err(failed)?;
        let ids = encoding.get_ids();
        match (0..).zip(ids).find(|(_, id)| **id as usize >= vocab_size) {
            None => Ok(ids.to_vec()),
            Some((token, &id)) => {
                let (path, place, id) = (name.to_owned(), TokenPlace::Token(token), u64::from(id));
                Err(DataError::BeyondVocabulary { path, place, id, vocab_size })
            }
        }
    }

    /// Returns the text of token ids, without special tokens.
    pub(super) fn decode(&self, ids: &[u32]) -> Result<String, DataError> {
        let decoded = self.tokenizer.decode(ids, true);
        decoded.map_err(|source| DataError::Detokenize { path: self.path.clone(), source })
    }
}

#[cfg(not(feature = "tokenizers"))]
impl Encoder {
    /// Reports that this build cannot read tokenizers.
    pub(super) fn load(path: &Path) -> Result<Self, DataError> {
        Err(DataError::TokenizersNotCompiledIn { path: path.to_owned() })
    }

    pub(super) fn encode(
        &self,
        _text: &str,
        _name: &Path,
        _vocab_size: usize,
        _special: bool,
    ) -> Result<Vec<u32>, DataError> {
        match *self {}
    }

    pub(super) fn decode(&self, _ids: &[u32]) -> Result<String, DataError> {
        match *self {}
    }
}
