//! The check that token ids are below the size of the model's vocabulary.

use std::path::Path;

use crate::error::{DataError, DataPlace};

/// Checks that all ids are below `vocab_size`. `place` returns the place of the id with this index in the file
/// `path`.
///
/// # Errors
/// With the first id that is not.
pub(crate) fn check(
    ids: impl IntoIterator<Item = u64>,
    vocab_size: usize,
    path: &Path,
    place: impl FnOnce(u64) -> DataPlace,
) -> Result<(), DataError> {
    let beyond = (0..).zip(ids).find(|(_, id)| *id >= vocab_size as u64);
    beyond.map_or(Ok(()), |(index, id)| Err(beyond_vocabulary(id, vocab_size).at(path, place(index))))
}

/// Returns the error of a token that the model does not know.
pub(crate) fn beyond_vocabulary(id: u64, vocab_size: usize) -> DataError {
    DataError::new(format!(
        "token id {id} lies beyond the vocabulary of {vocab_size}; raise vocab_size, or correct the data"
    ))
}
