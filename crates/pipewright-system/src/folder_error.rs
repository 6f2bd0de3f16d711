//! The error of a folder that other users could have made or can change.

use std::io;
use std::path::{Path, PathBuf};

use pipewright_schedule::message_as_debug;
use thiserror::Error;

/// A folder that cannot be used, because other users could have changed it, or for a reason of the system.
#[derive(Error)]
#[error("{}: {problem}", .path.display())]
pub struct PrivateFolderError {
    path: PathBuf,
    #[source]
    problem: Problem,
}

message_as_debug!(PrivateFolderError);

impl PrivateFolderError {
    /// Returns whether nothing has this path.
    pub fn is_missing(&self) -> bool {
        matches!(&self.problem, Problem::System(error) if error.kind() == io::ErrorKind::NotFound)
    }
}

/// Why a folder cannot be used.
#[derive(Error)]
#[cfg_attr(not(unix), expect(dead_code, reason = "only Unix has owners, modes and links of other users"))]
pub(crate) enum Problem {
    #[error(
        "the folder belongs to the user with the number {owner}, and this process to the one with the number {own}, so the \
         files in it are not used; remove it, or use another folder"
    )]
    OtherOwner { owner: u32, own: u32 },
    #[error("the folder belongs to the user with the number {owner}, and not to you or root")]
    OtherScratch { owner: u32 },
    #[error(
        "other users can enter or change this folder (its mode is {mode:04o}), so the files in it are not used; if they are \
         yours, run `chmod 700` on it, and otherwise remove it"
    )]
    Open { mode: u32 },
    #[error("this is a symbolic link, and a folder is expected; remove the link, or use another folder")]
    Link,
    #[error(
        "the symbolic link belongs to the user with the number {owner}, who can change where it leads; name the folder without it"
    )]
    OtherLink { owner: u32 },
    #[error(
        "the folder belongs to the user with the number {owner}, who can replace what is in it; use a folder that is below no \
         other user's folders"
    )]
    OtherWay { owner: u32 },
    #[error(
        "other users can replace what is in this folder (its mode is {mode:04o}, without the sticky bit); use a folder below \
         folders that only you can write to, or run `chmod go-w` on this one"
    )]
    OpenWay { mode: u32 },
    #[error("this is not a folder; use another path")]
    NotAFolder,
    #[error("too many symbolic links are on the way; name the folder without them")]
    ManyLinks,
    #[error("{0}")]
    System(#[source] io::Error),
}

message_as_debug!(Problem);

impl Problem {
    /// Returns the error of this path.
    pub(crate) fn at(self, path: &Path) -> PrivateFolderError {
        PrivateFolderError { path: path.to_owned(), problem: self }
    }
}
