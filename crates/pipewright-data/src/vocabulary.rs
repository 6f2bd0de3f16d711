//! The check that token ids are below the size of the model's vocabulary.

use std::path::Path;

use crate::error::{DataError, TokenPlace};

/// Checks that all ids are below `vocab_size`. `place` returns the place of the id with this index in the file
/// `path`.
///
/// # Errors
/// With the first id that is not.
pub(crate) fn check(
    ids: impl IntoIterator<Item = u64>,
    vocab_size: usize,
    path: &Path,
    place: impl FnOnce(u64) -> TokenPlace,
) -> Result<(), DataError> {
    let beyond = (0..).zip(ids).find(|(_, id)| *id >= vocab_size as u64);
    beyond.map_or(Ok(()), |(index, id)| {
        let (path, place) = (path.to_owned(), place(index));
        Err(DataError::BeyondVocabulary { path, place, id, vocab_size })
    })
}
