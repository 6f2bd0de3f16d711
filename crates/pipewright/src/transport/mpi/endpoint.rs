//! The endpoint of a process's rank in a world, and how a world begins.

use std::any::Any;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
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
use crate::byte_channel::ByteChannel;
use crate::ids::{Attempt, WorldRank};
use crate::message::{Payload, Tag};
use crate::progress::ProgressBoard;
use crate::transport::local::{LocalEndpoint, Mailboxes};
use crate::transport::wait::Waited;
use crate::transport::wire::{self, Frame};

/// This process's rank in a world of processes that `mpirun` started.
pub struct MpiEndpoint {
    pub(crate) inner: LocalEndpoint,
    commands: Sender<Command>,
    shared: Arc<ThreadShared>,
    /// The messages of bytes that have arrived.
    bytes: Receiver<(WorldRank, Vec<u8>)>,
    /// The messages of the exchange of reports that have arrived.
    reports: Receiver<(WorldRank, Vec<u8>)>,
    /// The messages about files that have arrived.
    files: Receiver<(WorldRank, Vec<u8>)>,
    /// Present until the endpoint is dropped.
    sends: Option<DeviceSends>,
    /// Ends when the processes have left the world.
    done: Option<Receiver<()>>,
    /// Keeps the process in MPI.
    process: Option<Arc<dyn Any + Send + Sync>>,
}

/// This process's rank in a world, and the progress of all its ranks.
pub(crate) type Joined = (MpiEndpoint, ProgressBoard);

/// A world that the MPI thread begins.
pub(super) struct NewWorld {
    deadline: Duration,
    error: ClockError,
    commands: Sender<Command>,
    orders: Receiver<Command>,
    joined: Sender<Result<Joined, MpiError>>,
    done: Sender<()>,
}

/// The channels on which the caller gets the endpoint of a world, and learns that its loop has ended.
pub(super) struct WorldReceivers {
    pub(super) joined: Receiver<Result<Joined, MpiError>>,
    pub(super) done: Receiver<()>,
}

impl NewWorld {
    pub(super) fn new(deadline: Duration, error: ClockError) -> (Self, WorldReceivers) {
        let (commands, orders) = crossbeam_channel::unbounded();
        let (sender, joined) = crossbeam_channel::bounded(1);
        let (finished, done) = crossbeam_channel::bounded(1);
        let world = Self { deadline, error, commands, orders, joined: sender, done: finished };
        (world, WorldReceivers { joined, done })
    }

    /// Sends the endpoint to the caller and runs until it is dropped. Returns whether the processes left the
    /// world together, and the channel whose end says so to the endpoint. Called on the MPI thread.
    pub(super) fn run(self, calls: Result<Calls, MpiError>) -> (bool, Sender<()>) {
        let Self { deadline, error, commands, orders, joined, done } = self;
        let calls = match calls {
            Ok(calls) => calls,
            Err(error) => {
                // After the deadline no receiver is left.
                let _ = joined.send(Err(error));
                return (false, done);
            }
        };
        let (rank, ranks) = (calls.rank, calls.ranks);
        let is_first = rank == FIRST;
        let shared = Arc::new(ThreadShared::new(ProcessClock::new(is_first, error)));
        let (mailboxes, board) = (Mailboxes::new(ranks), ProgressBoard::new(ranks));
        let fail = commands.clone();
        mailboxes.abort().on_raise(move |notice| {
            let _ = fail.send(Command::Fail(notice));
        });
        let inner = LocalEndpoint::new(rank, mailboxes.clone());
        let encoder = Encoder { commands: commands.clone(), shared: shared.clone() };
        let sends = Some(DeviceSends::new(encoder, mailboxes.abort().clone(), board.clone()));
        let (bytes_sender, bytes) = crossbeam_channel::unbounded();
        let (reports_sender, reports) = crossbeam_channel::unbounded();
        let (files_sender, files) = crossbeam_channel::unbounded();
        let endpoint = MpiEndpoint {
            inner,
            commands,
            shared: shared.clone(),
            bytes,
            reports,
            files,
            sends,
            done: None,
            process: None,
        };
        let mpi_thread = MpiThread {
            heartbeats: Heartbeats::new(rank, ranks, deadline, Instant::now()),
            local_processes: LocalProcesses::new(),
            probe: (!is_first).then(|| ClockProbe::new(Instant::now())),
            measures_clock: false,
            ended: None,
            calls,
            commands: orders,
            mailboxes,
            bytes: bytes_sender,
            reports: reports_sender,
            files: files_sender,
            board: board.clone(),
            shared,
            deadline,
            sending: Vec::new(),
            receiving: Vec::new(),
            posted: PostedReceives::default(),
            room: BTreeMap::new(),
        };
        let left = joined.send(Ok((endpoint, board))).is_ok() && mpi_thread.run();
        (left, done)
    }
}

impl MpiEndpoint {
    /// Keeps the process in MPI as long as the endpoint lives, and lets the endpoint wait for the end of its
    /// world.
    pub(super) fn keep(&mut self, process: Arc<dyn Any + Send + Sync>, done: Receiver<()>) {
        (self.process, self.done) = (Some(process), Some(done));
    }

    /// Returns whether the difference from the first process's clock is known.
    pub(super) fn is_clock_measured(&self) -> bool {
        self.shared.clock.is_measured()
    }

    /// Returns the channel for messages that belong to no step.
    pub(crate) fn byte_channel(&self) -> ByteChannel {
        self.channel(Frame::Bytes, &self.bytes)
    }

    /// Returns the channel for the exchange of reports between processes.
    pub(crate) fn report_channel(&self) -> ByteChannel {
        self.channel(Frame::Reports, &self.reports)
    }

    /// Returns the channel for files that another host does not have.
    pub(crate) fn file_channel(&self) -> ByteChannel {
        self.channel(Frame::Files, &self.files)
    }

    /// Returns a channel for messages of bytes. They are encoded on the thread that sends them.
    fn channel(
        &self,
        frame_of: fn(Vec<u8>) -> Frame,
        incoming: &Receiver<(WorldRank, Vec<u8>)>,
    ) -> ByteChannel {
        let (commands, shared, abort) =
            (self.commands.clone(), self.shared.clone(), self.inner.abort().clone());
        let send = move |to, bytes| {
            let mut frame = shared.buffer();
            wire::encode(frame_of(bytes), shared.clock.moment(), &mut frame);
            // If the MPI thread has ended, it failed and raised the abort flag.
            let _ = commands.send(Command::SendBytes(to, frame));
        };
        ByteChannel::new(self.inner.rank, send, incoming.clone(), move || !abort.is_raised())
    }

    pub(crate) fn begin_step(&mut self, attempt: Attempt) {
        self.inner.begin_step(attempt);
        self.restart_sends();
    }

    pub(crate) fn restart_sends(&self) {
        self.shared.sends.restart_peak();
    }

    pub(crate) fn send(&mut self, to: WorldRank, tag: Tag, payload: Payload) {
        if to == self.inner.rank {
            return self.inner.send(to, tag, payload);
        }
        let message = (to, self.inner.attempt, tag);
        self.shared.sends.start(message);
        let envelope = self.inner.envelope(tag, payload);
        if let Some(sends) = &mut self.sends {
            sends.send(message, envelope);
        }
    }

    /// Returns whether the buffer of a message is free. A message to this rank is delivered at once.
    pub(crate) fn is_sent(&self, to: WorldRank, tag: Tag) -> bool {
        self.shared.sends.is_sent(&(to, self.inner.attempt, tag))
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

    pub(crate) fn wait(&mut self, until: Instant) -> Waited {
        self.shared.waits.store(true, Ordering::Relaxed);
        let waited = self.inner.wait(until);
        self.shared.waits.store(false, Ordering::Relaxed);
        waited
    }

    pub(crate) fn wait_in_attempt(&mut self, until: Instant) -> Waited {
        self.shared.waits.store(true, Ordering::Relaxed);
        let waited = self.inner.wait_in_attempt(until);
        self.shared.waits.store(false, Ordering::Relaxed);
        waited
    }

    /// Returns how long after the deadline a silent rank is known.
    pub(crate) fn detection_lag(&self, deadline: Duration) -> Duration {
        detection_lag(self.inner.ranks(), deadline)
    }

    pub(crate) fn set_deadline(&self, deadline: Duration) {
        let _ = self.commands.send(Command::SetDeadline(deadline));
    }
}

impl Drop for MpiEndpoint {
    /// Leaves the world with the others; waits for them as long as they send heartbeats.
    fn drop(&mut self) {
        // The messages that wait for a device are sent first.
        drop(self.sends.take());
        let _ = self.commands.send(Command::Leave);
        if let Some(done) = self.done.take() {
            let _ = done.recv();
        }
        drop(self.process.take());
    }
}
