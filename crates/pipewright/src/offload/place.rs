//! The place to which tensors move.

use std::fmt;
use std::io;
use std::path::PathBuf;

use pipewright_system::private_folder::create_for_scratch;

use super::scratch::ScratchFile;

/// The place to which the tensors of forwards move.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OffloadTo {
    /// The memory of the processor. The stages must compute on another device.
    Host,
    /// Files in this folder, which is made if it does not exist. A file has no name from the moment at which it is
    /// made, where the system allows that: its space is free when the run ends, however it ends.
    Folder(PathBuf),
}

impl OffloadTo {
    /// Makes the folder, and writes a byte to a file there.
    pub(crate) fn prepare(&self) -> io::Result<()> {
        let Self::Folder(folder) = self else { return Ok(()) };
        create_for_scratch(folder).map_err(io::Error::other)?;
        ScratchFile::create(folder, "test")?.write_all(&[0])
    }
}

impl fmt::Display for OffloadTo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host => f.write_str("host"),
            Self::Folder(folder) => folder.display().fmt(f),
        }
    }
}

#[cfg(unix)]
#[cfg(test)]
mod tests {
    use std::os::unix::fs::{chown, symlink};

    use super::*;

    #[test]
    fn a_folder_of_another_user_is_refused() {
        let scratch = tempfile::tempdir().expect("a folder");
        let (planted, link) = (scratch.path().join("planted"), scratch.path().join("link"));
        let is_usable = |folder: &std::path::Path| OffloadTo::Folder(folder.to_owned()).prepare().is_ok();
        std::fs::create_dir(&planted).and_then(|()| symlink("planted", &link)).expect("a folder and a link");
        assert!(is_usable(&planted) && is_usable(&link), "they are the user's own");
        // Only root can give a folder to another user.
        if chown(&planted, Some(65534), None).is_ok() {
            assert!(!is_usable(&planted) && !is_usable(&link));
        }
    }
}
