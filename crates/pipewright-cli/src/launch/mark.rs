//! [`LaunchMark`]: the file through which the processes of a run tell `launch` that they are running. It is next to
//! the folder of the run, so that it remains if that folder is moved or removed.

use std::fs;
use std::io;
use std::path::Path;
use std::time::SystemTime;

use pipewright_run::recovery::{Sign, renewed};
use pipewright_run::training::shared_folder::Token;

/// The mark of a launch. It is removed when this is dropped.
pub(super) struct LaunchMark(Token);

impl LaunchMark {
    /// Makes the mark for a run in a folder.
    ///
    /// # Errors
    /// Fails if the file cannot be written.
    pub(super) fn create(run: &Path) -> io::Result<Self> {
        let run = std::path::absolute(run)?;
        // Only the folder itself may be shared between the hosts if it is a file system of its own.
        let next_to = run.parent().filter(|_| !is_mounted(&run)).map(Token::create);
        Ok(Self(match next_to {
            Some(Ok(token)) => token,
            Some(Err(error)) if !run.is_dir() => return Err(error),
            // The folder of the run may be the only one that takes files.
            _ => Token::create(&run)?,
        }))
    }

    /// Returns the path of the file, which is the name of the launch for its processes.
    pub(super) fn path(&self) -> &Path {
        self.0.file()
    }

    /// Prepares the mark for the next start.
    ///
    /// # Errors
    /// Fails if the file cannot be written.
    pub(super) fn clear(&self) -> io::Result<()> {
        fs::write(self.path(), "")
    }

    /// Returns what the processes of start `number` have said so far.
    pub(super) fn sign(&self, number: u64) -> Option<Sign> {
        Sign::find(self.path(), number)
    }

    /// Returns the time of the last heartbeat, by the clock of the process that sent it.
    pub(super) fn beat(&self) -> Option<SystemTime> {
        renewed(self.path())
    }
}

/// Returns whether a folder is a file system of its own.
#[cfg(unix)]
fn is_mounted(folder: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;

    let device = |path: &Path| fs::metadata(path).ok().map(|found| found.dev());
    let (own, around) = (device(folder), folder.parent().and_then(device));
    own.is_some() && around.is_some() && own != around
}

#[cfg(not(unix))]
fn is_mounted(_: &Path) -> bool {
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_lies_next_to_the_folder_and_is_removed() {
        let scratch = tempfile::tempdir().expect("a scratch folder");
        let run = scratch.path().join("a/out");
        let mark = LaunchMark::create(&run).expect("the scratch folder takes files");
        assert_eq!(mark.path().parent(), run.parent());
        assert!(!run.exists() && mark.sign(0).is_none());
        drop(mark);
        assert_eq!(fs::read_dir(scratch.path()).expect("a folder").count(), 0);
    }

    #[test]
    fn a_file_system_of_its_own_holds_its_mark() {
        assert!(is_mounted(Path::new("/proc")) && !is_mounted(Path::new("/proc/self")));
    }
}
