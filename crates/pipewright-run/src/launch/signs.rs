//! [`RunSigns`]: what a launch sees of its run: the files that the processes leave, and the folder itself.
//!
//! The processes tell the launch through a mark that they are running. It is next to the folder of the run, so that it
//! remains if that folder is moved or removed.
//!
//! A folder that was moved, removed or replaced, or whose file system was unmounted, looks as if the run had not begun.
//! So the launch remembers the folder, and never starts the run again in another one.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use pipewright::checkpoint::{CheckpointError, FolderIdentity};
use pipewright_schedule::error_text::with_causes as sentence;

use crate::error::RunError;
use crate::fault::Fault;
use crate::launch::ended::Ended;
use crate::launch::watch::Seen;
use crate::recovery::{GROWTH, RESTART, SLOW_RANKS, Sign, is_full, renewed};
use crate::run_folder::{checkpoints_of, config_of, is_lost_folder, newest_checkpoint_bytes};
use crate::run_record::metrics;
use crate::training::shared_folder::{Token, unwritable};

/// The time between two looks at the heartbeat.
const HEARTBEAT_PAUSE: Duration = Duration::from_millis(500);

/// The signs of a run. The mark is removed when this is dropped.
pub(super) struct RunSigns {
    folder: PathBuf,
    mark: Token,
    /// Whether the launch resumes a run.
    resumes: bool,
    /// When the configuration of an earlier run in the folder was written.
    earlier: Option<SystemTime>,
    /// The folder that the processes have written to, once they have.
    identity: Option<FolderIdentity>,
    /// Whether the processes have said that they have made the folder.
    has_begun: bool,
    /// The report of a process about the loss of the folder.
    report: Option<String>,
    attempt: AttemptSigns,
    /// Whether there was an attempt.
    has_started: bool,
}

/// The signs of one attempt.
#[derive(Default)]
struct AttemptSigns {
    number: u64,
    /// When the configuration before it was written.
    config: Option<SystemTime>,
    /// Whether its processes have written into the mark.
    has_sent: bool,
    /// The last heartbeat, and when it was looked for.
    beat: Option<SystemTime>,
    heard: Option<Instant>,
}

impl RunSigns {
    /// Makes the mark for a run in a folder.
    ///
    /// # Errors
    /// Fails if the mark cannot be written.
    pub(super) fn create(folder: &Path, resumes: bool) -> Result<Self, RunError> {
        let mark = create_mark(folder).map_err(|error| unwritable(folder, &error))?;
        let mut signs = Self {
            folder: folder.to_owned(),
            mark,
            resumes,
            earlier: None,
            identity: None,
            has_begun: false,
            report: None,
            attempt: AttemptSigns::default(),
            has_started: false,
        };
        signs.earlier = signs.config_written();
        signs.remember(resumes, None);
        Ok(signs)
    }

    /// Returns the path of the mark, which is the name of the launch for its processes.
    pub(super) fn mark(&self) -> &Path {
        self.mark.file()
    }

    /// Removes what an earlier attempt has left for this process or for the processes of attempt `number`.
    ///
    /// # Errors
    /// Fails if the folder of the run is lost or its files cannot be removed.
    pub(super) fn clear(&mut self, number: u64) -> Result<(), RunError> {
        self.has_started = true;
        // The fault of an earlier attempt would end the processes of this one.
        Fault::remove(&self.folder).map_err(|error| {
            let folder = self.folder.display();
            RunError::input(format!(
                "{folder}: the record of an earlier fault cannot be removed: {error}; remove `failure*.json` there"
            ))
        })?;
        SLOW_RANKS.remove(&self.folder);
        GROWTH.remove(&self.folder);
        fs::write(self.mark(), "").map_err(|error| unwritable(&self.folder, &error))?;
        self.attempt = AttemptSigns { number, config: self.config_written(), ..AttemptSigns::default() };
        Ok(())
    }

    /// Looks at what the processes have left.
    pub(super) fn look(&mut self) -> Seen {
        let has_run = self.has_run();
        let sign = if self.attempt.has_sent && has_run { None } else { self.sign() };
        self.attempt.has_sent |= sign.is_some();
        self.remember(has_run, sign);
        let AttemptSigns { has_sent, heard, .. } = self.attempt;
        // The file may be on another machine.
        if has_sent && heard.is_none_or(|heard| heard.elapsed() > HEARTBEAT_PAUSE) {
            self.attempt.heard = Some(Instant::now());
            self.attempt.beat = renewed(self.mark());
        }
        // The mark may not be readable here. An earlier start has written the configuration too.
        let is_written = || self.config_written().is_some_and(|written| Some(written) != self.attempt.config);
        let has_joined = has_sent || is_written();
        let has_fault = Fault::is_left(&self.folder);
        Seen { has_fault, has_joined, beat: self.attempt.beat, is_stopped: false }
    }

    /// Takes what the processes have left after their end. After a success, and in the place of a lost folder, no record
    /// is taken, and nothing is written.
    pub(super) fn end(&mut self, code: Option<i32>) -> Ended {
        // They may have begun the run, or lost its folder, after the last look.
        let has_run = self.has_run();
        self.remember(has_run, self.sign());
        let folder = &self.folder;
        let (has_resumed, is_slow) = (!RESTART.is_left(folder), SLOW_RANKS.find(folder).is_some());
        if code == Some(0) || self.loss().is_some() {
            return Ended { has_resumed, is_slow, ..Ended::default() };
        }
        let first = Fault::take(folder);
        let is_second = first.is_none();
        let knows_space = first.as_ref().is_some_and(|(fault, _)| fault.space.is_some());
        let is_full = has_run && !knows_space && is_full(folder);
        let steps = if has_run { metrics(folder).unwrap_or_default() } else { Vec::new() };
        Ended {
            is_second,
            fault: first.or_else(|| Fault::take_second(folder)),
            space: is_full.then(|| newest_checkpoint_bytes(folder).unwrap_or_default()),
            done: steps.last().map_or(0, |step| step.step),
            has_resumed,
            is_slow,
            ..Ended::default()
        }
    }

    /// Removes all records of the launch from the folder of the run, unless another folder may be in its place.
    pub(super) fn remove(&self) {
        if !self.has_started || self.loss().is_some() {
            return;
        }
        // Other processes than the leader may have left the fault too. Best effort.
        let _ = Fault::remove(&self.folder);
        // The last restart may have failed before the run resumed.
        RESTART.remove(&self.folder);
        SLOW_RANKS.remove(&self.folder);
        GROWTH.remove(&self.folder);
    }

    /// Returns whether the processes have begun or resumed the run, which writes its configuration. Before
    /// that, only the command that was launched has the settings of the run.
    pub(super) fn has_begun(&self) -> bool {
        let written = self.config_written();
        written.is_some() && written != self.earlier
    }

    /// Returns whether the folder has the run that was launched. Before the processes of `train` have agreed,
    /// it may have an earlier run.
    pub(super) fn has_run(&self) -> bool {
        self.resumes || self.has_begun()
    }

    /// Returns the report of the loss of the folder; `None` if it is in its place or the run has not begun.
    pub(super) fn loss(&self) -> Option<String> {
        let error = match &self.identity {
            // If the system does not tell, the processes of the next start report it.
            Some(identity) => identity.require().err().filter(is_lost_folder)?,
            None if self.has_begun && config_of(&self.folder).is_err() => {
                CheckpointError::FolderGone { path: self.folder.clone() }
            }
            None => return None,
        };
        // A process knows what is saved.
        Some(self.report.clone().unwrap_or_else(|| sentence(&error)))
    }

    /// Remembers the folder, which has the run if `has_run`, and the newest sign of the processes.
    fn remember(&mut self, has_run: bool, sign: Option<Sign>) {
        if self.identity.is_none() && has_run {
            self.identity = FolderIdentity::find(&checkpoints_of(&self.folder), Duration::ZERO).ok();
        }
        if let Some(sign) = sign {
            self.has_begun |= sign.has_begun;
            self.report = sign.loss.or(self.report.take());
        }
    }

    /// Returns what the processes of the attempt have said so far.
    fn sign(&self) -> Option<Sign> {
        Sign::find(self.mark(), self.attempt.number)
    }

    /// Returns when the configuration in the folder was written.
    fn config_written(&self) -> Option<SystemTime> {
        fs::metadata(config_of(&self.folder).ok()?).and_then(|file| file.modified()).ok()
    }
}

/// Makes the mark of a run.
fn create_mark(run: &Path) -> io::Result<Token> {
    let run = std::path::absolute(run)?;
    // Only the folder itself may be shared between the hosts if it is a file system of its own.
    let next_to = run.parent().filter(|_| !is_mounted(&run)).map(Token::create);
    match next_to {
        Some(Ok(token)) => Ok(token),
        Some(Err(error)) if !run.is_dir() => Err(error),
        // The folder of the run may be the only one that takes files.
        _ => Token::create(&run),
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

    /// Returns the signs of a run in the folder `out`, which has the run if it `resumes`.
    fn signs(scratch: &Path, resumes: bool) -> RunSigns {
        RunSigns::create(&scratch.join("out"), resumes).expect("the scratch folder takes files")
    }

    /// Changes the folder of a run. Checks what is said about it.
    fn check(change: impl Fn(&Path), expected: Option<&str>) {
        let scratch = tempfile::tempdir().expect("a scratch folder");
        let folder = scratch.path().join("out");
        fs::create_dir_all(checkpoints_of(&folder)).expect("a folder");
        fs::write(checkpoints_of(&folder).join("lock"), "").expect("a file");
        let mut signs = signs(scratch.path(), true);
        change(&folder);
        signs.remember(true, None);
        let own = signs.loss();
        assert_eq!(own.is_some(), expected.is_some(), "{own:?}");
        assert!(own.unwrap_or_default().contains(expected.unwrap_or_default()));
        let sign = Sign { has_begun: true, loss: Some("step 4 is saved".to_owned()), ..Sign::default() };
        signs.remember(true, Some(sign));
        assert_eq!(signs.loss().as_deref(), expected.map(|_| "step 4 is saved"));
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
        let mut signs = signs(scratch.path(), false);
        signs.remember(false, Some(Sign::default()));
        assert_eq!(signs.loss(), None, "the run has not begun");
        signs.remember(false, Some(Sign { has_begun: true, ..Sign::default() }));
        assert!(signs.loss().is_some());
    }

    #[test]
    fn a_mark_lies_next_to_the_folder_and_is_removed() {
        let scratch = tempfile::tempdir().expect("a scratch folder");
        let run = scratch.path().join("a/out");
        let signs = RunSigns::create(&run, false).expect("the scratch folder takes files");
        assert_eq!(signs.mark().parent(), run.parent());
        assert!(!run.exists() && signs.sign().is_none());
        drop(signs);
        assert_eq!(fs::read_dir(scratch.path()).expect("a folder").count(), 0);
    }

    #[test]
    fn a_file_system_of_its_own_holds_its_mark() {
        assert!(is_mounted(Path::new("/proc")) && !is_mounted(Path::new("/proc/self")));
    }
}
