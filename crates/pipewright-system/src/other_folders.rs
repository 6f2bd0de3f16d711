//! Folders on systems that keep the files of users apart and have no folder of files in memory, for
//! [`private_folder`](crate::private_folder).

use std::fs;
use std::path::Path;

use crate::folder_error::{PrivateFolderError, Problem};

pub(crate) fn create(path: &Path) -> Result<(), PrivateFolderError> {
    fs::create_dir_all(path).map_err(|error| Problem::System(error).at(path))
}

pub(crate) fn require(path: &Path) -> Result<(), PrivateFolderError> {
    match fs::metadata(path) {
        Ok(found) if found.is_dir() => Ok(()),
        Ok(_) => Err(Problem::NotAFolder.at(path)),
        Err(error) => Err(Problem::System(error).at(path)),
    }
}

pub(crate) fn require_place(folder: &Path) -> Result<(), PrivateFolderError> {
    require(folder)
}

pub(crate) fn create_for_scratch(path: &Path) -> Result<(), PrivateFolderError> {
    create(path)
}
