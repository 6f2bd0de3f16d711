//! [`Record`]: a file in the folder of a run, which one process leaves there for another.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::marker::PhantomData;
use std::path::Path;
use std::{fs, io};

use pipewright::bounded_file::{SMALL_TEXT, read_regular_text, write_fresh};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::recovery::restart::Restart;
use crate::recovery::slow_rank::SlowRank;

/// The record of a restart, which `launch` leaves for the process that resumes the run and removes it.
pub const RESTART: Record<Restart> = Record::new("restart.json");

/// The request of `launch` that a run ends after its next checkpoint, so that it can continue on more processes: the hosts
/// that answer again. The process that writes the metrics looks for it before each step with a checkpoint, and then ends
/// all processes after that step, as a signal does.
pub const GROWTH: Record<Vec<String>> = Record::new("growth.json");

/// The slow ranks of a step, which the process that writes the metrics leaves with `run.replace_slow`. `launch` removes
/// them, if no host can take the place of a slow one, or ends the processes and starts them on other hosts.
pub const SLOW_RANKS: Record<Vec<SlowRank>> = Record::new("slow-rank.json");

/// The files of records in the folder of a run.
pub(crate) const RECORDS: [&str; 3] = [RESTART.file, GROWTH.file, SLOW_RANKS.file];

/// A file in the folder of a run with content in JSON.
#[derive(Clone, Copy, Debug)]
pub struct Record<T> {
    file: &'static str,
    content: PhantomData<T>,
}

impl<T: Serialize + DeserializeOwned> Record<T> {
    /// Writes the record into the folder of a run.
    ///
    /// # Errors
    /// Fails if the file cannot be written.
    pub fn leave(&self, run: &Path, content: &T) -> io::Result<()> {
        leave(&run.join(self.file), content)
    }

    /// Returns the record in the folder of a run; `None` if there is none, or if it is not complete yet.
    pub fn find(&self, run: &Path) -> Option<T> {
        find(&run.join(self.file))
    }

    /// Returns whether the folder of a run has the file.
    pub fn is_left(&self, run: &Path) -> bool {
        run.join(self.file).exists()
    }

    /// Removes the record from the folder of a run.
    pub fn remove(&self, run: &Path) {
        // Best effort: the file may not exist, and the next record replaces it.
        let _ = fs::remove_file(run.join(self.file));
    }
}

impl<T> Record<T> {
    const fn new(file: &'static str) -> Self {
        Self { file, content: PhantomData }
    }
}

/// Writes a record.
///
/// # Errors
/// Fails if the file cannot be written.
pub(super) fn leave(path: &Path, content: &impl Serialize) -> io::Result<()> {
    let text = serde_json::to_string(content).map_err(io::Error::from)?;
    // Processes of several hosts may write the record at the same time, and others read it: each finds a whole one.
    let draft = path.with_extension(format!("{:016x}.draft", RandomState::new().build_hasher().finish()));
    write_fresh(&draft, text.as_bytes()).and_then(|()| fs::rename(&draft, path)).inspect_err(|_| {
        // Best effort: the file may not exist.
        let _ = fs::remove_file(&draft);
    })
}

/// Returns a record; `None` if there is none, or if it is not complete yet.
pub(super) fn find<T: DeserializeOwned>(path: &Path) -> Option<T> {
    serde_json::from_str(&read_regular_text(path, SMALL_TEXT).ok()?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recovery::SpeedEvent;

    fn check<T: Serialize + DeserializeOwned + PartialEq + std::fmt::Debug>(record: Record<T>, content: T) {
        let folder = tempfile::tempdir().expect("a scratch folder");
        let run = folder.path();
        assert_eq!((record.is_left(run), record.find(run)), (false, None));
        record.leave(run, &content).expect("the folder takes files");
        assert_eq!((record.is_left(run), record.find(run)), (true, Some(content)));
        record.remove(run);
        assert_eq!(fs::read_dir(run).expect("a folder").count(), 0);
    }

    #[test]
    fn a_record_is_found_until_it_is_removed() {
        check(RESTART, Restart::growth("b answers".to_owned(), 1, 2));
        check(GROWTH, vec!["b".to_owned()]);
        let slow = SlowRank { event: SpeedEvent::SlowRank, step: 7, ranks: vec![1], slowdown: 2.5 };
        check(SLOW_RANKS, vec![slow.clone(), slow]);
    }
}
