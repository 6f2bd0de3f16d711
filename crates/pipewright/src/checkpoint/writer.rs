//! A thread that writes checkpoints while training goes on.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender};
use pipewright_schedule::Rank;

use super::error::CheckpointError;
use super::folder::{CheckpointFolder, committed_name};
use super::manifest::Manifest;
use super::save::{Saving, check_paths};
use super::state::TrainingState;

/// How much longer than the deadline the thread is waited for: it says better than its owner what it waits for.
const GRACE: Duration = Duration::from_secs(1);

/// Time between two looks at how far the thread is.
const WATCH: Duration = Duration::from_millis(50);

/// The lowest priority of a thread on Linux.
#[cfg(target_os = "linux")]
const LOWEST: i32 = 19;

/// Time between two looks for the parts of other processes.
const LOOK: Duration = Duration::from_millis(2);

/// Writes checkpoints on a thread of its own, one after another, and keeps the newest. The thread gives way to ranks that
/// compute.
///
/// Nobody waits for a checkpoint but the next one: at most one is being written, so that no more than one old state is
/// held beside the running one. What goes wrong is told by the next call.
#[derive(Debug)]
pub struct CheckpointWriter {
    path: PathBuf,
    /// Closed to end the thread.
    jobs: Option<Sender<TrainingState>>,
    outcomes: Receiver<Result<PathBuf, CheckpointError>>,
    thread: Option<JoinHandle<()>>,
    under_way: bool,
    /// Bytes given to the system so far.
    written: Arc<AtomicU64>,
    deadline: Duration,
    /// Called while a wait sees that writing goes on.
    progress: Option<Progress>,
}

/// See [`CheckpointWriter::on_progress`].
struct Progress(Box<dyn Fn() + Send>);

impl std::fmt::Debug for Progress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Progress")
    }
}

impl CheckpointWriter {
    /// Starts the thread. It keeps the `keep` newest checkpoints of `folder`, and at least one. A checkpoint has parts
    /// of `ranks` ranks, those of one replica or, sharded, of all; those of other processes are waited for. A wait ends
    /// with an error when nothing was written for the whole `deadline`.
    ///
    /// # Errors
    /// When the system gives no thread.
    pub fn start(
        folder: CheckpointFolder,
        keep: usize,
        ranks: u32,
        deadline: Duration,
    ) -> Result<Self, CheckpointError> {
        let path = folder.path().to_owned();
        Self::spawn(path, deadline, move |state, written| {
            let committed = commit(&folder, state, ranks, deadline, written)?;
            folder.keep_newest(keep.max(1))?;
            Ok(committed)
        })
    }

    /// As [`CheckpointWriter::start`], in a process that writes its ranks' parts of checkpoints that another one
    /// commits. Where a checkpoint is becomes known when the part is written, before it is committed.
    ///
    /// # Errors
    /// When the system gives no thread.
    pub fn join(folder: &Path, deadline: Duration) -> Result<Self, CheckpointError> {
        let path = folder.to_owned();
        Self::spawn(path.clone(), deadline, move |state, written| {
            let committed = path.join(committed_name(state.step));
            if state.ranks.is_empty() {
                // Nobody waits for this process, and the checkpoint may be committed already.
                return Ok(committed);
            }
            let saving = Saving::join(&path, state.step)?.counting(written.clone());
            for part in state.ranks {
                let rank = part.rank();
                saving.leave_note(rank, &saving.write_shard(part)?)?;
            }
            Ok(committed)
        })
    }

    fn spawn(
        path: PathBuf,
        deadline: Duration,
        write: impl Fn(TrainingState, &Arc<AtomicU64>) -> Result<PathBuf, CheckpointError> + Send + 'static,
    ) -> Result<Self, CheckpointError> {
        let written = Arc::new(AtomicU64::new(0));
        let (jobs, inbox) = crossbeam_channel::bounded::<TrainingState>(1);
        let (sender, outcomes) = crossbeam_channel::bounded(1);
        let counted = written.clone();
        let run = move || {
            give_way();
            for state in inbox {
                // Nobody is left to tell when the writer was dropped.
                let _ = sender.send(write(state, &counted));
            }
        };
        let thread = std::thread::Builder::new().name("checkpoints".to_owned()).spawn(run);
        let thread = thread.map_err(CheckpointError::io("start a thread for", &path))?;
        Ok(Self {
            path,
            jobs: Some(jobs),
            outcomes,
            thread: Some(thread),
            under_way: false,
            written,
            deadline,
            progress: None,
        })
    }

    /// Has `call` called whenever a wait sees that writing goes on: for those who would think otherwise that nothing
    /// does.
    pub fn on_progress(&mut self, call: impl Fn() + Send + 'static) {
        self.progress = Some(Progress(Box::new(call)));
    }

    /// Hands a state to the thread, once the one before is written; returns where that one is, if there was one.
    ///
    /// # Errors
    /// When the one before could not be written, or does not end.
    pub fn save(&mut self, state: TrainingState) -> Result<Option<PathBuf>, CheckpointError> {
        let earlier = self.wait()?;
        let sent = self.jobs.as_ref().is_some_and(|jobs| jobs.send(state).is_ok());
        self.under_way = sent;
        if sent { Ok(earlier) } else { Err(CheckpointError::WriterGone { path: self.path.clone() }) }
    }

    /// The outcome of the checkpoint under way, if there is one and it is known by now.
    ///
    /// # Errors
    /// When it could not be written.
    pub fn poll(&mut self) -> Result<Option<PathBuf>, CheckpointError> {
        match self.outcomes.try_recv() {
            Ok(outcome) => {
                self.under_way = false;
                outcome.map(Some)
            }
            Err(_) => Ok(None),
        }
    }

    /// Waits for the checkpoint under way, if there is one; returns where it is.
    ///
    /// # Errors
    /// When it could not be written, or nothing of it was for the whole deadline.
    pub fn wait(&mut self) -> Result<Option<PathBuf>, CheckpointError> {
        let mut written = self.written.load(Ordering::Relaxed);
        let mut since = Instant::now();
        while self.under_way {
            match self.outcomes.recv_timeout(WATCH) {
                Ok(outcome) => {
                    self.under_way = false;
                    return outcome.map(Some);
                }
                Err(RecvTimeoutError::Timeout) => {
                    let now = self.written.load(Ordering::Relaxed);
                    if now != written {
                        (written, since) = (now, Instant::now());
                        if let Some(Progress(call)) = &self.progress {
                            call();
                        }
                    } else if since.elapsed() > self.deadline + GRACE {
                        let (path, waited) = (self.path.clone(), self.deadline);
                        return Err(CheckpointError::Stuck { path, waited });
                    }
                }
                Err(RecvTimeoutError::Disconnected) => {
                    self.under_way = false;
                    return Err(CheckpointError::WriterGone { path: self.path.clone() });
                }
            }
        }
        Ok(None)
    }
}

impl Drop for CheckpointWriter {
    fn drop(&mut self) {
        self.jobs = None;
        // A checkpoint that nobody waited for is still completed, unless the disk hangs.
        if !matches!(self.wait(), Err(CheckpointError::Stuck { .. }))
            && let Some(thread) = self.thread.take()
        {
            let _ = thread.join();
        }
    }
}

/// Lets the ranks' threads go first: writing takes the time that they leave.
fn give_way() {
    // Elsewhere a thread has the priority of its process. Where it is refused, the thread merely competes with the ranks.
    #[cfg(target_os = "linux")]
    let _ = rustix::process::nice(LOWEST);
}

/// Writes this process's parts, waits for those of the others, and commits.
fn commit(
    folder: &CheckpointFolder,
    state: TrainingState,
    ranks: u32,
    deadline: Duration,
    written: &Arc<AtomicU64>,
) -> Result<PathBuf, CheckpointError> {
    let TrainingState { step, cursor, description, ranks: parts } = state;
    check_paths(&parts)?;
    let saving = Saving::begin(folder.path(), step)?.counting(written.clone());
    let own: BTreeSet<u32> = parts.iter().map(|part| part.rank().get()).collect();
    let mut missing: BTreeSet<u32> = (0..ranks).filter(|rank| !own.contains(rank)).collect();
    let written_here = parts.into_iter().map(|part| saving.write_shard(part));
    let mut shards = written_here.collect::<Result<Vec<_>, _>>()?;
    let mut since = Instant::now();
    while !missing.is_empty() {
        for rank in missing.clone() {
            if let Some(shard) = saving.take_note(Rank::new(rank))? {
                missing.remove(&rank);
                written.fetch_add(shard.bytes, Ordering::Relaxed);
                shards.push(shard);
                since = Instant::now();
            }
        }
        if since.elapsed() > deadline {
            let (path, ranks) = (folder.path().to_owned(), missing.into_iter().collect());
            return Err(CheckpointError::SilentRanks { path, ranks, waited: deadline });
        }
        std::thread::sleep(LOOK);
    }
    shards.sort_unstable_by(|a, b| a.name.cmp(&b.name));
    saving.commit(&Manifest::new(step, cursor, description, shards))
}
