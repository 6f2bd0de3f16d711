//! The endpoint of a process's rank, and how the process joins MPI.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender};
use pipewright_schedule::ClockSkew;

use super::calls::{Calls, MpiError};
use super::clock_probe::ClockProbe;
use super::device_sends::{DeviceSends, Encoder};
use super::heartbeats::{Heartbeats, detection_lag};
use super::mpi_thread::{Command, FIRST, MpiThread, ThreadShared};
use super::posted::PostedReceives;
use super::process_clock::{ClockError, ProcessClock};
use super::same_machine::LocalProcesses;
use crate::failure::{Abort, StepError};
use crate::ids::{Attempt, WorldRank};
use crate::message::{Message, Payload, Tag};
use crate::progress::ProgressBoard;
use crate::transport::local::{LocalEndpoint, Mailboxes};
use crate::transport::{Waited, end_of_wait};

/// This process's rank among those that `mpirun` started.
pub struct MpiEndpoint {
    inner: LocalEndpoint,
    commands: Sender<Command>,
    shared: Arc<ThreadShared>,
    /// Present until the endpoint is dropped.
    sends: Option<DeviceSends>,
    mpi_thread: Option<JoinHandle<()>>,
}

/// The MPI thread's result of joining.
type Joined = Result<(MpiEndpoint, ProgressBoard), MpiError>;

/// How often to look whether the clock is measured.
const CLOCK_PAUSE: Duration = Duration::from_micros(200);

/// Joins MPI; returns this process's rank once all processes have joined and its clock is measured. `error` is added to
/// the clock.
///
/// # Errors
/// When MPI cannot be joined within the deadline, or the first process does not answer.
pub(in crate::transport) fn world(deadline: Duration, error: ClockError) -> Joined {
    let until = end_of_wait(deadline);
    let (commands, orders) = crossbeam_channel::unbounded();
    let (sender, joined) = crossbeam_channel::bounded(1);
    let work = move || join(deadline, error, commands, orders, &sender);
    let mpi_thread = std::thread::Builder::new().name("mpi".to_owned()).spawn(work);
    let mpi_thread = mpi_thread.map_err(|error| MpiError::Thread { message: error.to_string() })?;
    let late = |_| MpiError::Thread { message: format!("MPI_Init did not return within {deadline:?}") };
    let (mut endpoint, board) = joined.recv_timeout(deadline).map_err(late)??;
    endpoint.mpi_thread = Some(mpi_thread);
    // A rank that has failed is reported when the processes agree on the run.
    while !endpoint.shared.clock.is_measured() && !endpoint.abort().is_raised() {
        if Instant::now() > until {
            return Err(MpiError::Clock { waited: deadline });
        }
        std::thread::sleep(CLOCK_PAUSE);
    }
    Ok((endpoint, board))
}

/// The main function of the MPI thread: joins, reports that it has joined, and runs.
fn join(
    deadline: Duration,
    error: ClockError,
    commands: Sender<Command>,
    orders: Receiver<Command>,
    joined: &Sender<Joined>,
) {
    let calls = match Calls::init() {
        Ok(calls) => calls,
        // After the deadline no receiver is left.
        Err(error) => return joined.send(Err(error)).unwrap_or_default(),
    };
    let (rank, ranks) = (calls.rank(), calls.ranks());
    let is_first = rank == FIRST;
    let shared = Arc::new(ThreadShared::new(ProcessClock::new(is_first, error)));
    let (mailboxes, board) = (Mailboxes::new(ranks), ProgressBoard::new(ranks));
    let fail = commands.clone();
    mailboxes.abort().on_raise(move |notice| {
        let _ = fail.send(Command::Fail(notice));
    });
    let inner = LocalEndpoint::new(rank, mailboxes.clone());
    let encoder = Encoder { commands: commands.clone(), shared: shared.clone() };
    let sends = Some(DeviceSends::new(encoder, mailboxes.clone(), board.clone()));
    let endpoint = MpiEndpoint { inner, commands, shared: shared.clone(), sends, mpi_thread: None };
    let mpi_thread = MpiThread {
        heartbeats: Heartbeats::new(rank, ranks, deadline, Instant::now()),
        local_processes: LocalProcesses::new(),
        probe: (!is_first).then(|| ClockProbe::new(Instant::now())),
        measures_clock: false,
        ended: None,
        calls,
        commands: orders,
        mailboxes,
        board: board.clone(),
        shared,
        deadline,
        sending: Vec::new(),
        receiving: Vec::new(),
        posted: PostedReceives::default(),
        room: BTreeMap::new(),
    };
    if joined.send(Ok((endpoint, board))).is_ok() {
        mpi_thread.run();
    }
}

impl MpiEndpoint {
    pub(crate) fn rank(&self) -> WorldRank {
        self.inner.rank()
    }

    pub(crate) fn ranks(&self) -> u32 {
        self.inner.ranks()
    }

    pub(crate) fn abort(&self) -> &Abort {
        self.inner.abort()
    }

    pub(crate) fn begin_step(&mut self, attempt: Attempt) {
        self.inner.begin_step(attempt);
        self.shared.sends.begin_attempt();
    }

    pub(crate) fn send(&mut self, to: WorldRank, tag: Tag, payload: Payload) {
        if to == self.rank() {
            return self.inner.send(to, tag, payload);
        }
        let message = (to, self.inner.attempt(), tag);
        self.shared.sends.start(message);
        let envelope = self.inner.envelope(tag, payload);
        if let Some(sends) = &mut self.sends {
            sends.send(message, envelope);
        }
    }

    /// Returns whether the buffer of a message is free. A message to this rank is delivered at once.
    pub(crate) fn is_sent(&self, to: WorldRank, tag: Tag) -> bool {
        self.shared.sends.is_sent(&(to, self.inner.attempt(), tag))
    }

    pub(crate) fn sends_in_flight(&self) -> u32 {
        self.shared.sends.peak()
    }

    pub(crate) fn posted_receives(&self) -> u64 {
        self.shared.posted.load(Ordering::Relaxed)
    }

    pub(crate) fn common_seconds(&self, at: Instant) -> f64 {
        self.shared.clock.common_seconds(at)
    }

    pub(crate) fn clock_skew(&self, at: Instant) -> ClockSkew {
        self.shared.clock.skew(at)
    }

    pub(crate) fn try_take(&mut self, from: WorldRank, tag: Tag) -> Option<Message> {
        self.inner.try_take(from, tag)
    }

    pub(crate) fn wait(&mut self, until: Instant) -> Waited {
        self.shared.waits.store(true, Ordering::Relaxed);
        let waited = self.inner.wait(until);
        self.shared.waits.store(false, Ordering::Relaxed);
        waited
    }

    /// Returns how long after the deadline a silent rank is known.
    pub(crate) fn detection_lag(&self, deadline: Duration) -> Duration {
        detection_lag(self.ranks(), deadline)
    }

    pub(crate) fn set_deadline(&self, deadline: Duration) {
        let _ = self.commands.send(Command::SetDeadline(deadline));
    }

    pub(crate) fn fail(&self, error: StepError) {
        self.inner.fail(error);
    }
}

impl Drop for MpiEndpoint {
    /// Leaves MPI with the others; waits for them as long as they send heartbeats.
    fn drop(&mut self) {
        // The messages that wait for a device are sent first.
        drop(self.sends.take());
        let _ = self.commands.send(Command::Leave);
        if let Some(mpi_thread) = self.mpi_thread.take() {
            let _ = mpi_thread.join();
        }
    }
}
