//! The thread that moves the tensors of a rank, one microbatch after another, in the order of the rank's actions.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, unbounded};
use pipewright_schedule::error_text::panic_message;
use pipewright_schedule::{Microbatch, StageIndex};

use super::error::{OffloadError, OffloadErrorKind};
use super::kept::Kept;
use super::place::OffloadTo;
use crate::ids::WorldRank;
use crate::memory::RankMemory;
use crate::tensor::Values;

/// A stage and a microbatch.
pub(super) type Key = (StageIndex, Microbatch);

/// A request to the thread.
enum Job {
    Write(Key, Values),
    Read(Key),
}

/// A request that is done.
pub(super) struct Done {
    pub(super) key: Key,
    /// The tensors that are back; `None` if they have left.
    pub(super) values: Option<Values>,
    pub(super) start: Instant,
    pub(super) end: Instant,
}

type Answer = Result<Done, OffloadError>;

/// A running thread.
pub(super) struct Mover {
    /// `None` when the thread is to end.
    jobs: Option<Sender<Job>>,
    done: Receiver<Answer>,
    /// Whether the thread leaves out the requests that it has not begun.
    is_stopped: Arc<AtomicBool>,
    /// `None` when its panic is reported.
    thread: Option<JoinHandle<()>>,
}

impl Mover {
    /// Starts the thread. Its allocations count as the rank's.
    pub(super) fn start(place: OffloadTo, rank: WorldRank, memory: RankMemory) -> io::Result<Self> {
        Self::run(format!("rank-{rank}-offload"), move |requests, answers, is_stopped| {
            let _counted = memory.count_this_thread();
            move_all(&place, rank, requests, answers, is_stopped);
        })
    }

    /// Starts a thread that does requests with `run`.
    fn run(
        name: String,
        run: impl FnOnce(&Receiver<Job>, &Sender<Answer>, &AtomicBool) + Send + 'static,
    ) -> io::Result<Self> {
        let ((jobs, requests), (answers, done)) = (unbounded(), unbounded());
        let is_stopped = Arc::new(AtomicBool::new(false));
        let stopped = is_stopped.clone();
        let thread = thread::Builder::new().name(name).spawn(move || run(&requests, &answers, &stopped))?;
        Ok(Self { jobs: Some(jobs), done, is_stopped, thread: Some(thread) })
    }

    /// Asks for tensors to leave.
    pub(super) fn write(&mut self, key: Key, values: Values) -> Result<(), OffloadError> {
        self.ask(key, Job::Write(key, values))
    }

    /// Asks for tensors to come back, which were asked to leave before.
    pub(super) fn read(&mut self, key: Key) -> Result<(), OffloadError> {
        self.ask(key, Job::Read(key))
    }

    fn ask(&mut self, key: Key, job: Job) -> Result<(), OffloadError> {
        let sent = self.jobs.as_ref().is_some_and(|jobs| jobs.send(job).is_ok());
        if sent { Ok(()) } else { Err(self.panicked(key)) }
    }

    /// Returns the next request that is done; `None` if none is after `patience`. `key` is what the rank waits for, for
    /// an error.
    pub(super) fn next(&mut self, key: Key, patience: Duration) -> Result<Option<Done>, OffloadError> {
        match self.done.recv_timeout(patience) {
            Ok(done) => done.map(Some),
            Err(RecvTimeoutError::Timeout) => Ok(None),
            Err(RecvTimeoutError::Disconnected) => Err(self.panicked(key)),
        }
    }

    /// Returns the error of a thread that has dropped its ends of the channels, and so is about to end.
    fn panicked(&mut self, key: Key) -> OffloadError {
        let payload = self.thread.take().and_then(|thread| thread.join().err());
        let message =
            payload.map_or_else(|| "no message is left".to_owned(), |payload| panic_message(&*payload));
        error(key, OffloadErrorKind::Panicked { message })
    }
}

impl Drop for Mover {
    /// Ends the thread, and waits a moment for that, so that its files are gone. It ends by itself after a request that it
    /// has begun.
    fn drop(&mut self) {
        self.is_stopped.store(true, Ordering::Relaxed);
        self.jobs = None;
        let until = Instant::now() + Duration::from_secs(5);
        while self.done.recv_deadline(until).is_ok() {}
    }
}

/// Does all requests.
fn move_all(
    place: &OffloadTo,
    rank: WorldRank,
    requests: &Receiver<Job>,
    answers: &Sender<Answer>,
    is_stopped: &AtomicBool,
) {
    let mut away: HashMap<Key, Kept> = HashMap::new();
    for job in requests {
        if is_stopped.load(Ordering::Relaxed) {
            return;
        }
        let start = Instant::now();
        let (key, moved) = match job {
            Job::Write(key, values) => {
                let name = format!("rank-{rank}-stage-{}-microbatch-{}", key.0, key.1);
                let written = Kept::write(place, &name, values).map(|kept| drop(away.insert(key, kept)));
                (key, written.map(|()| None))
            }
            Job::Read(key) => {
                // If they could not leave, the rank has the error already.
                let Some(kept) = away.remove(&key) else { continue };
                (key, kept.read().map(Some))
            }
        };
        let done = moved
            .map(|values| Done { key, values, start, end: Instant::now() })
            .map_err(|kind| error(key, kind));
        if answers.send(done).is_err() {
            return;
        }
    }
}

pub(super) fn error((stage, microbatch): Key, kind: OffloadErrorKind) -> OffloadError {
    OffloadError { stage, microbatch, kind }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_message_of_a_panic_is_kept() {
        let mover = Mover::run("mover".to_owned(), |requests, _, _| {
            let _ = requests.recv();
            panic!("no space on the device");
        });
        let (mut mover, key) = (mover.expect("a thread"), (StageIndex::new(1), Microbatch::new(2)));
        mover.write(key, Values::new()).expect("the thread waits for a request");
        let Err(error) = mover.next(key, Duration::from_secs(20)) else { panic!("the thread has panicked") };
        let expected = "the inputs that stage 1 keeps of microbatch 2 are lost: the thread that moves them panicked: no space on \
                        the device";
        assert_eq!(error.to_string(), expected);
    }
}
