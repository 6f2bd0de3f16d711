//! [`KnownRun`]: the facts that `launch` remembers about its run, because the folder of the run may be gone.
//!
//! A folder that was moved, removed or replaced, or whose file system was unmounted, looks as if the run had not begun.
//! So the launch remembers the folder, and never starts the run again in another one.

use std::path::{Path, PathBuf};
use std::time::Duration;

use pipewright::checkpoint::{CheckpointError, FolderIdentity};

use crate::failure::{Exit, Failure};
use pipewright_run::recovery::Sign;
use pipewright_run::run_folder::{checkpoints_of, config_of, is_lost_folder};

/// The facts that are known about a run.
#[derive(Debug)]
pub(super) struct KnownRun {
    folder: PathBuf,
    /// The folder that its processes have written to, once they have.
    identity: Option<FolderIdentity>,
    /// Whether the processes have said that they have made the folder.
    has_begun: bool,
    /// The report of a process about the loss of the folder.
    report: Option<String>,
}

/// The state of the folder of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// The run has not begun, as far as it is known.
    Unknown,
    Same,
    Lost,
}

impl KnownRun {
    /// Returns what is known of a run that has not begun.
    pub(super) fn new(folder: &Path) -> Self {
        Self { folder: folder.to_owned(), identity: None, has_begun: false, report: None }
    }

    /// Looks at the folder of a run, which contains the run if `has_run`. `sign` is the newest sign of its processes.
    pub(super) fn look(&mut self, has_run: bool, sign: Option<Sign>) {
        if self.identity.is_none() && has_run {
            self.identity = FolderIdentity::find(&checkpoints_of(&self.folder), Duration::ZERO).ok();
        }
        if let Some(sign) = sign {
            self.has_begun |= sign.has_begun;
            self.report = sign.loss.or(self.report.take());
        }
    }

    /// Returns the failure of a run whose folder is lost, in place of an end with the code `exit`; `None` if the
    /// folder is in its place or the end has another reason. `is_saved` tells whether the run has saved a checkpoint
    /// before, because a signal asked for it.
    pub(super) fn lost(&self, exit: Exit, is_saved: bool) -> Option<Failure> {
        let (place, error) = self.place();
        let error = error.filter(|_| is_lost(place, exit, is_saved))?;
        // A process knows what is saved.
        let failure = Failure::new(Exit::RankFailed, error);
        Some(self.report.as_ref().map_or(failure, |report| Failure::new(Exit::RankFailed, report.clone())))
    }

    /// Returns whether the folder of the run is lost.
    pub(super) fn is_lost(&self) -> bool {
        self.place().0 == Place::Lost
    }

    /// Returns the state of the folder, and the error if it is lost.
    fn place(&self) -> (Place, Option<CheckpointError>) {
        match &self.identity {
            Some(identity) => match identity.require() {
                Err(error) if is_lost_folder(&error) => (Place::Lost, Some(error)),
                // If the system does not tell, the processes of the next start report it.
                _ => (Place::Same, None),
            },
            None if self.has_begun && config_of(&self.folder).is_err() => {
                (Place::Lost, Some(CheckpointError::FolderGone { path: self.folder.clone() }))
            }
            None => (Place::Unknown, None),
        }
    }
}

/// Returns whether a run ends because its folder is lost, if its processes have ended with the code `exit`. Their own
/// reason counts if it is not a consequence of the loss.
fn is_lost(place: Place, exit: Exit, is_saved: bool) -> bool {
    place == Place::Lost && !is_saved && !matches!(exit, Exit::CheckFailed | Exit::Bug)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_lost_folder_ends_the_run_unless_it_has_ended_before() {
        for (place, exit, is_saved, expected) in [
            (Place::Lost, Exit::RankFailed, false, true),
            (Place::Lost, Exit::WrongInput, false, true),
            (Place::Lost, Exit::Interrupted, false, true),
            (Place::Lost, Exit::Interrupted, true, false),
            (Place::Lost, Exit::Bug, false, false),
            (Place::Lost, Exit::CheckFailed, false, false),
            (Place::Same, Exit::RankFailed, false, false),
            (Place::Unknown, Exit::RankFailed, false, false),
        ] {
            assert_eq!(is_lost(place, exit, is_saved), expected, "{place:?} {exit:?} {is_saved}");
        }
    }

    /// Changes the folder of a run. Checks what is said about it.
    fn check(change: impl Fn(&Path), expected: Option<&str>) {
        let scratch = tempfile::tempdir().expect("a scratch folder");
        let folder = scratch.path().join("out");
        fs::create_dir_all(checkpoints_of(&folder)).expect("a folder");
        fs::write(checkpoints_of(&folder).join("lock"), "").expect("a file");
        let mut known = KnownRun::new(&folder);
        known.look(true, None);
        change(&folder);
        known.look(true, None);
        let text = |known: &KnownRun| known.lost(Exit::RankFailed, false).map(|failure| failure.text());
        let own = text(&known);
        assert_eq!(own.is_some(), expected.is_some(), "{own:?}");
        assert!(own.unwrap_or_default().contains(expected.unwrap_or_default()));
        let sign = Sign { has_begun: true, loss: Some("step 4 is saved".to_owned()), ..Sign::default() };
        known.look(true, Some(sign));
        assert_eq!(text(&known).as_deref(), expected.map(|_| "step 4 is saved"));
    }

    #[test]
    fn a_folder_that_is_not_the_same_any_more_is_lost() {
        let gone = Some("the folder was moved or removed");
        let moved = |folder: &Path| fs::rename(folder, folder.with_extension("aside")).expect("a free name");
        check(|_| {}, None);
        check(moved, gone);
        check(|folder| fs::remove_dir_all(folder).expect("it is ours"), gone);
        check(|folder| fs::remove_dir_all(checkpoints_of(folder)).expect("it is ours"), gone);
        let replaced = |folder: &Path| {
            moved(folder);
            fs::create_dir_all(checkpoints_of(folder)).expect("a free name");
            fs::write(checkpoints_of(folder).join("lock"), "").expect("a file");
        };
        check(replaced, Some("this is not the folder any more"));
    }

    #[test]
    fn a_folder_that_was_gone_before_it_was_seen_is_lost() {
        let scratch = tempfile::tempdir().expect("a scratch folder");
        let mut known = KnownRun::new(&scratch.path().join("out"));
        known.look(false, Some(Sign::default()));
        assert!(!known.is_lost(), "the run has not begun");
        known.look(false, Some(Sign { has_begun: true, ..Sign::default() }));
        assert!(known.is_lost());
    }
}
