//! A thread of a rank that does requests one after another while the rank computes, such as transfers to and from a disk.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, unbounded};
use pipewright_schedule::error_text::panic_message;

use crate::memory::RankMemory;

/// How often a rank that waits for its thread looks whether another rank has failed.
pub(crate) const LOOK: Duration = Duration::from_millis(50);

/// A running thread that takes requests `J` and answers with `D`.
pub(crate) struct RankThread<J, D> {
    /// `None` when the thread is to end.
    jobs: Option<Sender<J>>,
    done: Receiver<D>,
    /// Whether the thread leaves out the requests that it has not begun.
    is_stopped: Arc<AtomicBool>,
    /// `None` when its panic is reported.
    thread: Option<JoinHandle<()>>,
}

/// The thread has panicked; the message of the panic.
pub(crate) struct Panicked(pub(crate) String);

impl<J: Send + 'static, D: Send + 'static> RankThread<J, D> {
    /// Starts the thread, which does requests with `run`, and gives it a function that says whether it continues. Its
    /// allocations count as the rank's.
    pub(crate) fn start(
        name: String,
        memory: RankMemory,
        mut run: impl FnMut(J, &dyn Fn() -> bool) -> Option<D> + Send + 'static,
    ) -> io::Result<Self> {
        let ((jobs, requests), (answers, done)) = (unbounded(), unbounded());
        let is_stopped = Arc::new(AtomicBool::new(false));
        let stopped = is_stopped.clone();
        let work = move || {
            let _counted = memory.count_this_thread();
            let continues = || !stopped.load(Ordering::Relaxed);
            for job in requests {
                if !continues() {
                    return;
                }
                if run(job, &continues).is_some_and(|done| answers.send(done).is_err()) {
                    return;
                }
            }
        };
        let thread = thread::Builder::new().name(name).spawn(work)?;
        Ok(Self { jobs: Some(jobs), done, is_stopped, thread: Some(thread) })
    }

    /// Adds a request.
    pub(crate) fn ask(&mut self, job: J) -> Result<(), Panicked> {
        let sent = self.jobs.as_ref().is_some_and(|jobs| jobs.send(job).is_ok());
        if sent { Ok(()) } else { Err(self.panicked()) }
    }

    /// Returns the next request that is done; `None` if none is after `patience`.
    pub(crate) fn next(&mut self, patience: Duration) -> Result<Option<D>, Panicked> {
        match self.done.recv_timeout(patience) {
            Ok(done) => Ok(Some(done)),
            Err(RecvTimeoutError::Timeout) => Ok(None),
            Err(RecvTimeoutError::Disconnected) => Err(self.panicked()),
        }
    }

    /// Returns the error of a thread that has dropped its ends of the channels, and so is about to end.
    fn panicked(&mut self) -> Panicked {
        let payload = self.thread.take().and_then(|thread| thread.join().err());
        Panicked(payload.map_or_else(|| "no message is left".to_owned(), |payload| panic_message(&*payload)))
    }
}

impl<J, D> Drop for RankThread<J, D> {
    /// Ends the thread, and waits a moment for that, so that its files are gone. It ends by itself after a request that it
    /// has begun.
    fn drop(&mut self) {
        self.is_stopped.store(true, Ordering::Relaxed);
        self.jobs = None;
        let until = Instant::now() + Duration::from_secs(5);
        while self.done.recv_deadline(until).is_ok() {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_message_of_a_panic_is_kept() {
        let run = |_: u32, _: &dyn Fn() -> bool| -> Option<u32> { panic!("no space on the device") };
        let mut thread = RankThread::start("a".to_owned(), RankMemory::new(), run).expect("a thread");
        assert!(thread.ask(1).is_ok(), "the thread waits for a request");
        let Err(Panicked(message)) = thread.next(Duration::from_secs(20)) else { panic!("it has panicked") };
        assert_eq!(message, "no space on the device");
    }
}
