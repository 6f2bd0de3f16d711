//! Checks before the training that all processes of a run see the folder of its results, as they all write
//! parts of checkpoints into it.
//!
//! The leader writes a small file with a unique name into the folder, and all others look for it. The file is
//! removed afterwards, together with the folders that were created for it.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use pipewright::bounded_file::{SMALL_TEXT, read_regular};
use pipewright::transport::Fields;
use sysinfo::System;

use crate::error::{ErrorKind, RunError};
use crate::training::process_group::ProcessGroup;

/// The longest time that a process looks for the file. A file system in a network may show it late.
const LONGEST_LOOK: Duration = Duration::from_secs(10);
/// The time that a host looks for the file before any process starts.
pub(crate) const SHORT_LOOK: Duration = Duration::from_secs(3);
/// The time between two looks.
const PAUSE: Duration = Duration::from_millis(5);

/// Fails in every process if one of them does not see the leader's folder at its own path `folder`. All
/// processes call it.
pub(crate) fn require(processes: &mut ProcessGroup, folder: &Path) -> Result<(), RunError> {
    if !processes.is_several() {
        return Ok(());
    }
    let token = processes.is_leader().then(|| Token::create(folder)).transpose();
    let token = processes.agree(token.map_err(|error| unwritable(folder, &error)), |_| Fields::new())?;
    let name = processes.share(token.as_ref().map_or_else(String::new, |token| token.name.clone()))?;
    let seen = match token {
        Some(_) => Ok(()),
        None => look_for(folder, &name, processes.deadline().min(LONGEST_LOOK)),
    };
    // The leader keeps the file until all others have answered.
    processes.all_succeed(seen, ErrorKind::WrongInput)
}

/// Waits until the file of this name is in the folder.
fn look_for(folder: &Path, name: &str, deadline: Duration) -> Result<(), RunError> {
    let since = Instant::now();
    loop {
        let error = match read_regular(&folder.join(name), SMALL_TEXT) {
            Ok(content) if content == name.as_bytes() => return Ok(()),
            Ok(_) => io::Error::other("its content differs from what rank 0 wrote"),
            Err(error) => error,
        };
        if since.elapsed() >= deadline {
            return Err(RunError::input(format!(
                "{}: the process on {} does not see in this folder what rank 0 writes there ({error}): let `run.out` \
                 be a folder of a file system that all processes share",
                shown(folder).display(),
                host(),
            )));
        }
        std::thread::sleep(PAUSE);
    }
}

/// Returns whether this process sees the file of a token at this path within a time.
pub(crate) fn is_seen(file: &Path, patience: Duration) -> bool {
    let parts = file.parent().zip(file.file_name().and_then(|name| name.to_str()));
    parts.is_some_and(|(folder, name)| look_for(folder, name, patience).is_ok())
}

/// Returns the failure of a run whose folder cannot be written.
pub fn unwritable(folder: &Path, error: &io::Error) -> RunError {
    RunError::unwritten(folder, error, "choose another run.out")
}

/// Returns the absolute path, since processes may have different working folders.
fn shown(folder: &Path) -> PathBuf {
    std::path::absolute(folder).unwrap_or_else(|_| folder.to_owned())
}

fn host() -> String {
    System::host_name().unwrap_or_else(|| "an unnamed machine".to_owned())
}

/// The file of the leader. It is removed when this is dropped.
pub struct Token {
    name: String,
    file: PathBuf,
    /// The folders that were created for it, the innermost first.
    created: Vec<PathBuf>,
}

impl Token {
    /// Creates the file, and the folder if it is missing.
    pub fn create(folder: &Path) -> io::Result<Self> {
        let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let name = format!(".pipewright-{}-{}-{}", host(), std::process::id(), since_1970.as_nanos());
        let missing = folder.ancestors().take_while(|ancestor| {
            !ancestor.as_os_str().is_empty() && fs::symlink_metadata(ancestor).is_err()
        });
        let created = missing.map(Path::to_owned).collect();
        // If a later line fails, the folders are removed again.
        let token = Self { file: folder.join(&name), name, created };
        fs::create_dir_all(folder)?;
        File::create_new(&token.file)?.write_all(token.name.as_bytes())?;
        Ok(token)
    }
}

impl Token {
    /// Returns the path of the file.
    pub fn file(&self) -> &Path {
        &self.file
    }
}

impl Drop for Token {
    fn drop(&mut self) {
        // Best effort: the file is small and hidden, and a folder that is not empty stays.
        let _ = fs::remove_file(&self.file);
        for folder in &self.created {
            let _ = fs::remove_dir(folder);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_seen_only_in_its_own_folder_and_leaves_nothing() {
        let scratch = tempfile::tempdir().expect("a scratch folder");
        let folder = scratch.path().join("a/b");
        let token = Token::create(&folder).expect("the scratch folder takes folders");
        assert!(look_for(&folder, &token.name, Duration::ZERO).is_ok());
        let elsewhere = look_for(&scratch.path().join("a"), &token.name, Duration::ZERO);
        let text = elsewhere.expect_err("another folder").text();
        assert!(text.contains("does not see in this folder what rank 0 writes there"), "{text}");
        fs::write(&token.file, "another").expect("the file");
        assert!(look_for(&folder, &token.name, Duration::ZERO).is_err(), "a file of another run");
        drop(token);
        assert_eq!(fs::read_dir(scratch.path()).expect("a folder").count(), 0);
    }
}
