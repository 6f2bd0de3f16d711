//! Checks that the bytes of a file are text.

use std::path::Path;

use crate::content;
use crate::error::DataError;

/// Returns the text in a file's bytes. A file that is not text is refused with what it is.
pub(crate) fn utf8<'a>(path: &Path, bytes: &'a [u8]) -> Result<&'a str, DataError> {
    if let Some(binary) = content::binary(bytes) {
        return Err(DataError::NotText { path: path.to_owned(), binary });
    }
    if content::is_lfs_pointer(bytes) {
        return Err(DataError::LfsPointer { path: path.to_owned() });
    }
    std::str::from_utf8(bytes)
        .map_err(|error| DataError::NotUtf8 { path: path.to_owned(), offset: error.valid_up_to() as u64 })
}
