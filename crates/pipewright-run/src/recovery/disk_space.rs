//! Waits until a full disk has the space that a run needs to continue.

use std::path::Path;
use std::time::{Duration, Instant};
use std::{fs, io};

use pipewright::bounded_file::write_fresh;
use rustix::fs::statvfs;

use crate::fault;

/// The time between two looks at a full disk.
const PAUSE: Duration = Duration::from_millis(250);

/// The bytes that are written as a trial. A quota may refuse them although the disk has space.
const TRIAL_BYTES: usize = 1 << 20;

/// Waits until the disk of a folder has `needed` bytes and takes a file, at most for `patience`, and only
/// until `is_stopped`. Returns whether it has the space.
pub(crate) fn wait_for_space(
    folder: &Path,
    needed: u64,
    patience: Duration,
    is_stopped: impl Fn() -> bool,
) -> bool {
    let since = Instant::now();
    loop {
        let has_space = has_space(folder, needed);
        if has_space || since.elapsed() >= patience || is_stopped() {
            return has_space;
        }
        std::thread::sleep(PAUSE);
    }
}

/// Returns whether the disk of a folder has `needed` bytes and takes a file.
fn has_space(folder: &Path, needed: u64) -> bool {
    // A file system that does not tell its space may still take the trial.
    let is_free = statvfs(folder).map_or(true, |disk| disk.f_bavail.saturating_mul(disk.f_frsize) >= needed);
    is_free && write_trial(folder).is_ok()
}

/// Returns whether the disk of a folder takes no file because the disk or a quota is full.
pub fn is_full(folder: &Path) -> bool {
    write_trial(folder).is_err_and(|error| fault::is_full(&error))
}

/// Writes a file into a folder, and removes it.
fn write_trial(folder: &Path) -> io::Result<()> {
    let trial = folder.join(".pipewright-space");
    let written = write_fresh(&trial, &vec![0; TRIAL_BYTES]);
    // Best effort: the file may not exist.
    let _ = fs::remove_file(&trial);
    written
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn space_is_awaited_only_as_long_as_the_patience() {
        let folder = tempfile::tempdir().expect("a scratch folder");
        let has_space = |folder: &Path, needed| wait_for_space(folder, needed, Duration::ZERO, || false);
        assert!(has_space(folder.path(), 0));
        assert_eq!(fs::read_dir(folder.path()).expect("a folder").count(), 0);
        let missing = folder.path().join("missing");
        assert!(!has_space(&missing, 0) && !is_full(&missing), "a folder that is missing is not a full disk");
        assert!(!has_space(folder.path(), u64::MAX), "no disk has that much");
    }

    #[test]
    fn a_signal_ends_the_wait() {
        let folder = tempfile::tempdir().expect("a scratch folder");
        // The test would not end in a day otherwise.
        let patience = Duration::from_secs(86_400);
        assert!(!wait_for_space(folder.path(), u64::MAX, patience, || true));
    }
}
