//! Checks that the bytes of a file are text.

use std::path::Path;

use crate::content;
use crate::error::{DataError, FileError};

/// Returns the text in a file's bytes. A file that is not text is refused with what it is.
pub(crate) fn utf8<'a>(path: &Path, bytes: &'a [u8]) -> Result<&'a str, DataError> {
    if let Some(binary) = content::binary(bytes) {
        return Err(FileError::NotText { path: path.to_owned(), binary }.into());
    }
    if content::is_lfs_pointer(bytes) {
        return Err(FileError::LfsPointer { path: path.to_owned() }.into());
    }
    std::str::from_utf8(bytes).map_err(|error| {
        DataError::from(FileError::NotUtf8 { path: path.to_owned(), offset: error.valid_up_to() as u64 })
    })
}
