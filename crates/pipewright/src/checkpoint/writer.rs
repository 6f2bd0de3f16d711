//! A thread that writes checkpoints while training continues.

use std::cell::{OnceCell, RefCell};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender};

use super::committed::committed_name;
use super::copy::CopyFolder;
use super::copy_exchange::CopyExchange;
use super::error::CheckpointError;
use super::folder::CheckpointFolder;
use super::identity::FolderIdentity;
use super::manifest::{Manifest, StateFile};
use super::save::{Saving, check_paths};
use super::sent_parts::{PartArrivals, PartSender};
use super::state::{RankState, TrainingState};
use crate::ids::WorldRank;

/// How much longer than the deadline its owner waits for the thread. The thread's own error at the deadline
/// says more.
const GRACE: Duration = Duration::from_secs(1);

/// Time between two checks of the thread's progress.
const WATCH: Duration = Duration::from_millis(50);

/// How much lower than the ranks' the priority of the thread is on Linux: it gets a tenth of the time of a
/// thread that competes with it. At the lowest priority, 19, it would get a seventieth, and the end of a run
/// on a busy machine would wait a minute for a small checkpoint.
#[cfg(target_os = "linux")]
const NICE: i32 = 10;

/// Time between two checks for the files of other processes.
const LOOK: Duration = Duration::from_millis(2);

/// Writes checkpoints one after another on its own thread, and keeps the newest. The thread has a lower
/// priority than ranks that compute.
///
/// Only the next checkpoint waits for a checkpoint: at most one is being written, so that at most one old
/// state is held in addition to the running one. The next call returns the error of a checkpoint that failed.
#[derive(Debug)]
pub struct CheckpointWriter {
    path: PathBuf,
    /// Dropped to end the thread.
    jobs: Option<Sender<Job>>,
    outcomes: Receiver<Result<PathBuf, CheckpointError>>,
    thread: Option<JoinHandle<()>>,
    under_way: bool,
    /// Whether a wait has ended without progress for the whole deadline.
    is_stuck: bool,
    /// Bytes written so far.
    written: Arc<AtomicU64>,
    deadline: Duration,
    /// Called while a wait sees progress.
    progress: Option<Progress>,
}

/// A checkpoint to write.
struct Job {
    state: TrainingState,
    /// Whether it is the best so far.
    is_best: bool,
}

/// Where a process writes its part of copies of the state.
#[derive(Debug)]
pub struct CopyTarget {
    /// The folder, which its machine keeps in memory.
    pub folder: CopyFolder,
    /// The number of files of a copy: one for each rank that has a part of the state.
    pub files: u32,
    /// The series of the copies: a text that no other start of the processes has.
    pub series: String,
    /// A process on another machine that holds this process's parts too.
    pub neighbour: Option<(Arc<CopyExchange>, WorldRank)>,
}

/// See [`CheckpointWriter::on_progress`].
struct Progress(Box<dyn Fn() + Send>);

impl std::fmt::Debug for Progress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Progress")
    }
}

impl CheckpointWriter {
    /// Starts the thread. It keeps the `keep` newest checkpoints of `folder`, and at least one. A checkpoint
    /// has the parts of `ranks` ranks, which are the ranks of one replica or, if parameters are sharded, of
    /// one group of replicas that hold all parameters together. The thread waits for the parts of other
    /// processes. A wait fails if nothing was written for the whole `deadline`.
    ///
    /// # Errors
    /// When the system cannot start a thread.
    pub fn start(
        folder: CheckpointFolder,
        keep: usize,
        ranks: u32,
        deadline: Duration,
    ) -> Result<Self, CheckpointError> {
        Self::start_receiving(folder, keep, ranks, deadline, PartArrivals::default())
    }

    /// Like [`CheckpointWriter::start`], for a folder that also gets parts from other hosts. `arrivals` belong to
    /// the receiver ([`PartReceiver::arrivals`](super::PartReceiver::arrivals)): a wait does not fail while a part arrives
    /// slowly, and parts of a checkpoint that has failed are refused.
    ///
    /// # Errors
    /// When the system cannot start a thread.
    pub fn start_receiving(
        folder: CheckpointFolder,
        keep: usize,
        ranks: u32,
        deadline: Duration,
        arrivals: PartArrivals,
    ) -> Result<Self, CheckpointError> {
        let path = folder.path().to_owned();
        let wait = Wait { deadline, arrivals };
        Self::spawn(path, deadline, give_way, move |Job { state, is_best }, written| {
            let step = state.step;
            let save = || {
                let committed = commit(&folder, state, ranks, &wait, written)?;
                if is_best {
                    folder.set_best(Some(step))?;
                }
                folder.keep_newest(keep.max(1))?;
                Ok(committed)
            };
            save().map_err(|error| folder.identity().cause_of(error))
        })
    }

    /// Like [`CheckpointWriter::start`], but the process writes its ranks' parts of checkpoints that another
    /// process commits. The path of a checkpoint is returned when its part is written, before the checkpoint
    /// is committed. The first checkpoint waits until the owner has created the folder.
    ///
    /// # Errors
    /// When the system cannot start a thread.
    pub fn join(folder: &Path, deadline: Duration) -> Result<Self, CheckpointError> {
        let path = folder.to_owned();
        // A folder that exists before the first checkpoint may belong to an earlier run, and the owner moves
        // it aside.
        let found = OnceCell::new();
        Self::spawn(path.clone(), deadline, give_way, move |Job { state, .. }, written| {
            let committed = path.join(committed_name(state.step));
            if state.ranks.is_empty() {
                // No process waits for this one, and the checkpoint may be committed already.
                return Ok(committed);
            }
            let folder = match found.get() {
                Some(folder) => folder,
                None => {
                    let folder = FolderIdentity::find(&path, deadline)?;
                    found.get_or_init(|| folder)
                }
            };
            let save = || {
                let saving = Saving::join(folder, state.step)?.counting(written.clone());
                state.ranks.into_iter().try_for_each(|part| saving.write_with_note(part))
            };
            save().map_err(|error| folder.cause_of(error))?;
            Ok(committed)
        })
    }

    /// Like [`CheckpointWriter::join`], for a process whose host does not see the folder of the checkpoints: it writes its
    /// part into a `folder` of its own, sends it, and removes it.
    ///
    /// # Errors
    /// When the system cannot start a thread.
    pub fn send(
        folder: CheckpointFolder,
        sender: impl PartSender + 'static,
        deadline: Duration,
    ) -> Result<Self, CheckpointError> {
        let path = folder.path().to_owned();
        Self::spawn(path, deadline, give_way, move |Job { state, .. }, written| {
            let committed = folder.path().join(committed_name(state.step));
            if state.ranks.is_empty() {
                return Ok(committed);
            }
            let saving = Saving::begin(&folder, state.step)?.counting(written.clone());
            for part in state.ranks {
                let rank = part.rank();
                let noted = saving.write_with_note(part);
                let mut files = saving.noted_files(rank, &noted).into_iter();
                let sent = files.try_for_each(|file| sender.send(state.step, &file, written));
                noted.and(sent)?;
            }
            Ok(committed)
        })
    }

    /// Like [`CheckpointWriter::start`], but the process writes its part of copies of the state. The path of a
    /// copy is returned when this process has written its part, and the neighbour has it. If the neighbour
    /// cannot have it, the outcome is [`CheckpointError::NotSent`] once, and later copies are not sent.
    ///
    /// # Errors
    /// When the system cannot start a thread.
    pub fn copy(target: CopyTarget, deadline: Duration) -> Result<Self, CheckpointError> {
        let CopyTarget { folder, files, series, neighbour } = target;
        let path = folder.path().to_owned();
        let neighbour = RefCell::new(neighbour);
        // The run waits for the copy of each step during the next one, so the thread has the priority of
        // ranks.
        let begin = || ();
        Self::spawn(path, deadline, begin, move |Job { state, .. }, written| {
            let copy = folder.write(state, files, &series, written)?;
            let sent = match (&*neighbour.borrow(), &copy.part) {
                (Some((exchange, rank)), Some(part)) => exchange.send_part(*rank, copy.step, part, written),
                _ => Ok(()),
            };
            sent.map_err(|error| {
                neighbour.take();
                CheckpointError::NotSent { source: Box::new(error) }
            })?;
            Ok(copy.path)
        })
    }

    /// Starts the thread, which calls `begin` once and `write` for each job.
    fn spawn(
        path: PathBuf,
        deadline: Duration,
        begin: impl FnOnce() + Send + 'static,
        write: impl Fn(Job, &Arc<AtomicU64>) -> Result<PathBuf, CheckpointError> + Send + 'static,
    ) -> Result<Self, CheckpointError> {
        let written = Arc::new(AtomicU64::new(0));
        let (jobs, inbox) = crossbeam_channel::bounded::<Job>(1);
        let (sender, outcomes) = crossbeam_channel::bounded(1);
        let counted = written.clone();
        let run = move || {
            begin();
            for job in inbox {
                // If the writer was dropped, there is no receiver for the outcome.
                let _ = sender.send(write(job, &counted));
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
            is_stuck: false,
            written,
            deadline,
            progress: None,
        })
    }

    /// Sets a function that is called whenever a wait sees progress, for example to report that the process
    /// is still alive.
    pub fn on_progress(&mut self, call: impl Fn() + Send + 'static) {
        self.progress = Some(Progress(Box::new(call)));
    }

    /// Waits until the previous checkpoint is written, and passes `state` to the thread. Returns the path of
    /// the previous checkpoint, if there was one.
    ///
    /// # Errors
    /// When the previous checkpoint could not be written, or does not end.
    pub fn save(&mut self, state: TrainingState) -> Result<Option<PathBuf>, CheckpointError> {
        self.hand_over(Job { state, is_best: false })
    }

    /// Like [`CheckpointWriter::save`], but for the best state so far. When its checkpoint is complete,
    /// `best` is a link to it, and it is kept ([`CheckpointFolder::set_best`]).
    ///
    /// # Errors
    /// As [`CheckpointWriter::save`].
    pub fn save_best(&mut self, state: TrainingState) -> Result<Option<PathBuf>, CheckpointError> {
        self.hand_over(Job { state, is_best: true })
    }

    fn hand_over(&mut self, job: Job) -> Result<Option<PathBuf>, CheckpointError> {
        let earlier = self.wait()?;
        let sent = self.jobs.as_ref().is_some_and(|jobs| jobs.send(job).is_ok());
        self.under_way = sent;
        if sent { Ok(earlier) } else { Err(self.has_ended()) }
    }

    fn has_ended(&self) -> CheckpointError {
        CheckpointError::unusable(&self.path, "the thread that writes checkpoints has ended early")
    }

    /// Returns the outcome of the checkpoint in progress, if there is one and its outcome is known.
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

    /// Waits for the checkpoint in progress, if there is one, and returns its path.
    ///
    /// # Errors
    /// When it could not be written, or nothing was written for the whole deadline.
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
                    } else if since.elapsed() > self.deadline.saturating_add(GRACE) {
                        self.is_stuck = true;
                        let (path, waited) = (self.path.clone(), self.deadline);
                        return Err(CheckpointError::Stuck { path, waited });
                    }
                }
                Err(RecvTimeoutError::Disconnected) => {
                    self.under_way = false;
                    return Err(self.has_ended());
                }
            }
        }
        Ok(None)
    }
}

impl Drop for CheckpointWriter {
    fn drop(&mut self) {
        self.jobs = None;
        // The last checkpoint is still completed, unless the disk hangs. The whole deadline passes only once.
        if !self.is_stuck
            && !matches!(self.wait(), Err(CheckpointError::Stuck { .. }))
            && let Some(thread) = self.thread.take()
        {
            let _ = thread.join();
        }
    }
}

/// Lowers the priority of the calling thread, so that the ranks' threads run first.
fn give_way() {
    // On other systems a thread has the priority of its process. If the call fails, the thread competes with
    // the ranks.
    #[cfg(target_os = "linux")]
    let _ = rustix::process::nice(NICE);
}

/// How the process that commits waits for the parts of others.
struct Wait {
    deadline: Duration,
    /// The parts that come from other hosts.
    arrivals: PartArrivals,
}

/// Writes this process's parts, waits for the parts of the others, and commits.
fn commit(
    folder: &CheckpointFolder,
    state: TrainingState,
    ranks: u32,
    wait: &Wait,
    written: &Arc<AtomicU64>,
) -> Result<PathBuf, CheckpointError> {
    let TrainingState { step, cursor, description, ranks: parts } = state;
    check_paths(&parts)?;
    let saving = Saving::begin(folder, step)?.counting(written.clone());
    let files = gather(&saving, folder, parts, ranks, wait, written);
    // A part that comes later would create the scratch folder again.
    let files = files.inspect_err(|_| wait.arrivals.give_up(step))?;
    saving.commit(&Manifest::new(step, cursor, description, files))
}

/// Writes this process's parts, waits for the parts of the others, and returns all files in their order.
fn gather(
    saving: &Saving,
    folder: &CheckpointFolder,
    parts: Vec<RankState>,
    ranks: u32,
    wait: &Wait,
    written: &Arc<AtomicU64>,
) -> Result<Vec<StateFile>, CheckpointError> {
    let own: BTreeSet<u32> = parts.iter().map(|part| part.rank().get()).collect();
    let mut missing: BTreeSet<u32> = (0..ranks).filter(|rank| !own.contains(rank)).collect();
    let written_here = parts.into_iter().map(|part| saving.write_file(part));
    let mut files = written_here.collect::<Result<Vec<_>, _>>()?;
    let (mut since, mut arrived) = (Instant::now(), wait.arrivals.bytes());
    while !missing.is_empty() {
        let now = wait.arrivals.bytes();
        if now != arrived {
            written.fetch_add(now.wrapping_sub(arrived), Ordering::Relaxed);
            (arrived, since) = (now, Instant::now());
        }
        for rank in missing.clone() {
            if let Some(file) = saving.take_note(WorldRank::new(rank))? {
                missing.remove(&rank);
                written.fetch_add(file.bytes, Ordering::Relaxed);
                files.push(file);
                since = Instant::now();
            }
        }
        if since.elapsed() > wait.deadline {
            let (ranks, waited) = (missing.iter().collect::<Vec<_>>(), wait.deadline.as_secs_f64());
            return Err(CheckpointError::unusable(
                folder.path(),
                format!(
                    "the files of ranks {ranks:?} are missing, and nothing has moved for {waited:.0} s: every process of the \
                     run must see this folder"
                ),
            ));
        }
        std::thread::sleep(LOOK);
    }
    files.sort_unstable_by(|a, b| a.name.cmp(&b.name));
    Ok(files)
}
