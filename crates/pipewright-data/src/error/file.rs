//! The errors of finding, opening and unpacking data files.

use std::path::PathBuf;

use thiserror::Error;

use crate::content::Binary;
use crate::packing::Packing;

/// Why a data file cannot be found or read.
#[derive(Error)]
pub enum FileError {
    /// No pattern is given, or all of them exclude.
    #[error("no data path is given; name text files, such as \"notes/**/*.txt\"")]
    NoPath,
    /// A pattern cannot be understood.
    #[error("{pattern}: not a pattern of paths: {reason}; check that brackets and braces are closed")]
    Pattern {
        /// The pattern.
        pattern: String,
        /// The reason.
        reason: String,
    },
    /// A pattern matches nothing.
    #[error(
        "{pattern}: no file matches; hidden files and files that a .gitignore lists are skipped, and relative \
         patterns start at {}", start.display()
    )]
    NoMatch {
        /// The pattern.
        pattern: String,
        /// The folder that was searched.
        start: PathBuf,
    },
    /// A file does not exist.
    #[error("{}: there is no such data file; check the path", path.display())]
    Missing {
        /// The file.
        path: PathBuf,
    },
    /// A file is named and excluded.
    #[error("{}: this file is named, and a pattern with `!` excludes it; remove one of the two", path.display())]
    Excluded {
        /// The file.
        path: PathBuf,
    },
    /// A folder is given where files are expected.
    #[error("{}: this is a folder; name the files in it, such as \"{}/**/*.txt\"", path.display(), path.display())]
    Folder {
        /// The folder.
        path: PathBuf,
    },
    /// A device or pipe is given: a run reads its data again when it resumes.
    #[error("{}: this is a device or a pipe; copy its content to a regular file and name that", path.display())]
    NotRegular {
        /// The file.
        path: PathBuf,
    },
    /// A file or folder cannot be read.
    #[error("{}: cannot be read", path.display())]
    Read {
        /// The file or folder.
        path: PathBuf,
        /// The operating system's reason.
        source: std::io::Error,
    },
    /// A file is not text.
    #[error(
        "{}: byte {offset} is not valid UTF-8; convert the file, or leave it out with a pattern such as \"!**/{}\"",
        path.display(), path.file_name().unwrap_or_default().display()
    )]
    NotUtf8 {
        /// The file.
        path: PathBuf,
        /// How many bytes of the file are valid.
        offset: u64,
    },
    /// A file has a format that is not text.
    #[error("{}: {binary}", path.display())]
    NotText {
        /// The file.
        path: PathBuf,
        /// Its kind.
        binary: Binary,
    },
    /// A file is the pointer to another one, which Git LFS has not downloaded.
    #[error(
        "{}: this is a Git LFS pointer, not the file itself: run `git lfs pull` in its folder, or download the file", path.display()
    )]
    LfsPointer {
        /// The file.
        path: PathBuf,
    },
    /// A file is not compressed as its name says.
    #[error("{}: the name says that the file is {packing}, and its content is not; rename it", path.display())]
    NotPacked {
        /// The file.
        path: PathBuf,
        /// The packing of the name.
        packing: Packing,
    },
    /// A compressed file is damaged or ends early.
    #[error(
        "{}: the {packing} file is damaged or ends early, so nothing of it is used; copy or download it again", path.display()
    )]
    Damaged {
        /// The file.
        path: PathBuf,
        /// How it is compressed.
        packing: Packing,
        /// The decoder's reason.
        source: std::io::Error,
    },
}

pipewright_schedule::message_as_debug!(FileError);
