//! The mark of a launch: a file next to the folder of the run, through which the processes tell `launch` that they
//! have joined each other, that the run has begun, that they are running, and why the run ends if its folder is lost.
//!
//! `launch` makes the file and names it to the processes ([`Start`]). It does not move with the folder of the run. The
//! first process writes a [`Sign`] into it and then renews the time of the file, until it ends or the run does. The time
//! of a file needs no space, so a full disk does not stop it.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::Thread;
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};

use crate::fault::Start;
use crate::recovery::record;

/// The time between two renewals.
const BEAT: Duration = Duration::from_secs(1);

/// The content of the mark.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sign {
    /// The number of the start whose processes have joined each other.
    pub start: u64,
    /// Whether they have made the folder of the run.
    pub has_begun: bool,
    /// The report of the loss of that folder.
    pub loss: Option<String>,
}

impl Sign {
    /// Returns the sign of start `number` in a mark; `None` if its processes have not joined each other yet.
    pub fn find(mark: &Path, number: u64) -> Option<Self> {
        record::find(mark).filter(|sign: &Self| sign.start == number)
    }
}

/// Leaves the report of the loss of the run's folder for `launch`. The first report stays. Returns whether `launch` has
/// started this process and finds a report.
pub(crate) fn leave_loss(report: &str) -> bool {
    let Some(Start { number: start, mark: Some(mark), .. }) = Start::of_this_process() else { return false };
    leave_loss_in(&mark, start, report)
}

fn leave_loss_in(mark: &Path, start: u64, report: &str) -> bool {
    Sign::find(mark, start).is_some_and(|sign| sign.loss.is_some())
        || record::leave(mark, &Sign { start, has_begun: true, loss: Some(report.to_owned()) }).is_ok()
}

/// Returns when a mark was renewed. The file is opened, because a file system in a network then asks its server.
pub fn renewed(mark: &Path) -> Option<SystemTime> {
    File::open(mark).and_then(|mark| mark.metadata()?.modified()).ok()
}

/// Renews the mark of the launch that has started this process, until this is dropped.
#[derive(Debug)]
pub(crate) struct Heartbeat {
    mark: PathBuf,
    number: u64,
    has_ended: Arc<AtomicBool>,
    thread: Thread,
}

impl Heartbeat {
    /// Says that the processes have joined each other, and starts to renew the mark. Returns `None` if `launch` did
    /// not start this process.
    ///
    /// # Errors
    /// Fails if the mark cannot be written.
    pub(crate) fn start() -> io::Result<Option<Self>> {
        let Some(Start { number, mark: Some(mark), .. }) = Start::of_this_process() else { return Ok(None) };
        record::leave(&mark, &Sign { start: number, ..Sign::default() })?;
        let has_ended = Arc::new(AtomicBool::new(false));
        let (path, is_over) = (mark.clone(), has_ended.clone());
        let renew = move || {
            while !is_over.load(Ordering::SeqCst) {
                // A mark that is missing is not made again: its folder may have been moved.
                let _ = File::options()
                    .write(true)
                    .open(&path)
                    .and_then(|mark| mark.set_modified(SystemTime::now()));
                std::thread::park_timeout(BEAT);
            }
        };
        let thread = std::thread::Builder::new().name("heartbeat".to_owned()).spawn(renew)?.thread().clone();
        Ok(Some(Self { mark, number, has_ended, thread }))
    }

    /// Says that the processes have made the folder of the run.
    pub(crate) fn note_begun(&self) {
        // Best effort: `launch` also finds the configuration in the folder.
        let _ = record::leave(&self.mark, &Sign { start: self.number, has_begun: true, loss: None });
    }
}

impl Drop for Heartbeat {
    fn drop(&mut self) {
        self.has_ended.store(true, Ordering::SeqCst);
        // The thread is not joined, because a file system that does not answer would hold this process.
        self.thread.unpark();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use super::*;

    #[test]
    fn only_the_sign_of_the_same_start_counts() {
        let folder = tempfile::tempdir().expect("a scratch folder");
        let mark = folder.path().join("mark");
        assert_eq!((Sign::find(&mark, 2), renewed(&mark)), (None, None));
        let sign = Sign { start: 2, ..Sign::default() };
        record::leave(&mark, &sign).expect("the folder takes files");
        assert_eq!([Sign::find(&mark, 2), Sign::find(&mark, 3)], [Some(sign), None]);
        assert!(renewed(&mark).is_some());
    }

    #[test]
    fn all_processes_may_leave_the_loss_at_once() {
        const PROCESSES: usize = 8;
        let folder = tempfile::tempdir().expect("a scratch folder");
        let mark = folder.path().join("mark");
        for number in 0..100 {
            record::leave(&mark, &Sign { start: number, ..Sign::default() }).expect("the folder takes files");
            let together = Barrier::new(PROCESSES);
            let leave = || {
                together.wait();
                assert!(leave_loss_in(&mark, number, "it was moved"), "start {number}");
            };
            std::thread::scope(|scope| (0..PROCESSES).for_each(|_| _ = scope.spawn(leave)));
            let sign = Sign::find(&mark, number).expect("a whole sign");
            assert_eq!(sign.loss.as_deref(), Some("it was moved"), "start {number}");
        }
        std::fs::remove_file(&mark).and_then(|()| std::fs::create_dir(&mark)).expect("the folder takes both");
        assert!(!leave_loss_in(&mark, 1, "it was moved"), "nothing can be written");
    }
}
