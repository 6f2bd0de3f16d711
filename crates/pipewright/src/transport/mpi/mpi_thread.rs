//! The thread that calls MPI: it sends and receives frames, sends heartbeats, and reports failures.
//!
//! Frames move while the rank computes, because this thread makes all MPI calls. It sleeps between two polls:
//! for a short time if the rank waits for a frame, longer if the rank computes.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender};

use super::calls::{Calls, MpiError, Transfer, Way};
use super::clock_probe::ClockProbe;
use super::heartbeats::Heartbeats;
use super::posted::PostedReceives;
use super::process_clock::ProcessClock;
use super::same_machine::LocalProcesses;
use super::sends::{Sends, SentMessage, is_boundary};
use crate::failure::{Cause, FailureNotice, StepError};
use crate::ids::WorldRank;
use crate::progress::ProgressBoard;
use crate::transport::clock::RoundTrip;
use crate::transport::local::Mailboxes;
use crate::transport::wire::{self, Frame};

/// How long to sleep between polls while the rank waits for a frame.
const PAUSE_WAITING: Duration = Duration::from_micros(20);
/// How long to sleep between polls while frames are in transfer.
const PAUSE_MOVING: Duration = Duration::from_micros(100);
/// How many polls without progress show that a frame takes several milliseconds. A longer pause is then a small part of its time.
/// On a machine with one core, each poll interrupts the computations.
const SLOW_POLLS: u32 = 48;
/// How long to sleep between polls while the rank computes.
const PAUSE_QUIET: Duration = Duration::from_micros(300);
/// How often to poll again without sleeping while the rank waits.
const LOOKS: u32 = 64;
/// How many empty buffers are kept.
const BUFFERS: usize = 32;
/// How long to wait for others to leave after a failure, so that they can report theirs.
const PARTING: Duration = Duration::from_secs(1);

/// The rank of the process whose clock is the common one.
pub(super) const FIRST: WorldRank = WorldRank::new(0);

/// A command for the MPI thread.
pub(super) enum Command {
    /// Send the frame of a message.
    Send(SentMessage, Vec<u8>),
    /// Send the frame of a message of bytes.
    SendBytes(WorldRank, Vec<u8>),
    /// Report a failed step to every other process.
    Fail(FailureNotice),
    /// Set the time without heartbeats after which a process is lost.
    SetDeadline(Duration),
    /// Send the remaining frames and leave together with the others.
    Leave,
}

/// State that the rank's thread and the MPI thread share.
pub(super) struct ThreadShared {
    /// Whether the rank waits for a frame.
    pub(super) waits: AtomicBool,
    pub(super) clock: ProcessClock,
    pub(super) sends: Sends,
    /// The number of messages that have arrived in receives that were posted for them.
    pub(super) posted: AtomicU64,
    buffers: Mutex<Vec<Vec<u8>>>,
}

impl ThreadShared {
    pub(super) fn new(clock: ProcessClock) -> Self {
        let (waits, posted) = (AtomicBool::new(false), AtomicU64::new(0));
        Self { waits, clock, sends: Sends::default(), posted, buffers: Mutex::default() }
    }

    /// Returns a buffer with any content, reused if possible.
    pub(super) fn buffer(&self) -> Vec<u8> {
        self.buffers.lock().unwrap_or_else(PoisonError::into_inner).pop().unwrap_or_default()
    }

    fn put_back(&self, buffer: Vec<u8>) {
        let mut buffers = self.buffers.lock().unwrap_or_else(PoisonError::into_inner);
        if buffers.len() < BUFFERS {
            buffers.push(buffer);
        }
    }
}

/// The MPI thread, on its own thread.
pub(super) struct MpiThread {
    pub(super) calls: Calls,
    pub(super) commands: Receiver<Command>,
    pub(super) mailboxes: Arc<Mailboxes>,
    /// Takes the messages of bytes that arrive.
    pub(super) bytes: Sender<(WorldRank, Vec<u8>)>,
    /// Takes the messages of the exchange of reports.
    pub(super) reports: Sender<(WorldRank, Vec<u8>)>,
    /// Takes the messages about files.
    pub(super) files: Sender<(WorldRank, Vec<u8>)>,
    pub(super) board: ProgressBoard,
    pub(super) shared: Arc<ThreadShared>,
    pub(super) heartbeats: Heartbeats,
    pub(super) local_processes: LocalProcesses,
    /// The measurements of this process's clock; `None` in the first process.
    pub(super) probe: Option<ClockProbe>,
    /// Whether a frame of a measurement came or left a short time ago, so that the next may follow soon.
    pub(super) measures_clock: bool,
    /// A rank whose process had ended at the last poll.
    pub(super) ended: Option<WorldRank>,
    pub(super) deadline: Duration,
    pub(super) sending: Vec<Transfer>,
    pub(super) receiving: Vec<Transfer>,
    pub(super) posted: PostedReceives,
    /// The size of the receives that other ranks have posted for the boundary messages of this one.
    pub(super) room: BTreeMap<WorldRank, usize>,
}

impl MpiThread {
    /// Runs until the endpoint is dropped and all frames are sent. Returns whether all processes of the world
    /// left together.
    pub(super) fn run(mut self) -> bool {
        let outcome = self.work().and_then(|()| self.leave());
        match outcome {
            Ok(left) => left,
            Err(error) => {
                self.fail(Cause::Transport { message: error.to_string() });
                self.send_notices();
                false
            }
        }
    }

    /// Sends the notices of failures although a call has failed. Otherwise the other processes would wait for
    /// this one until their deadline. These calls may fail too; their errors are ignored.
    fn send_notices(&mut self) {
        let (own, since) = (self.calls.rank, Instant::now());
        let mut notices = Vec::new();
        while let Ok(command) = self.commands.try_recv() {
            let Command::Fail(notice) = command else { continue };
            for to in (0..self.calls.ranks).map(WorldRank::new).filter(|&to| to != own) {
                let mut frame = self.shared.buffer();
                wire::encode(Frame::Failed(notice.clone()), self.shared.clock.moment(), &mut frame);
                notices.extend(self.calls.send(to, frame, Way::Announced).ok());
            }
        }
        while !notices.is_empty() && since.elapsed() < PARTING && self.calls.next_done(&mut notices).is_ok() {
            std::thread::sleep(PAUSE_MOVING);
        }
    }

    /// Runs commands and moves frames until the command to leave.
    fn work(&mut self) -> Result<(), MpiError> {
        let own = self.local_processes.own();
        self.send_all(|| Frame::Process(own.clone()))?;
        let mut idle = 0;
        loop {
            let command = match self.pause(idle) {
                None => {
                    std::thread::yield_now();
                    self.commands.try_recv().ok()
                }
                Some(pause) => match self.commands.recv_timeout(pause) {
                    Err(RecvTimeoutError::Disconnected) => return Ok(()),
                    command => command.ok(),
                },
            };
            let is_busy = match command {
                Some(Command::Leave) => return Ok(()),
                Some(command) => self.run_command(command).map(|()| true)?,
                None => false,
            };
            let moved = self.move_frames()?;
            self.probe_clock()?;
            idle = if moved || is_busy { 0 } else { idle + 1 };
            self.measures_clock &= idle <= LOOKS;
        }
    }

    fn run_command(&mut self, command: Command) -> Result<(), MpiError> {
        match command {
            Command::Send(message, frame) => self.send_message(message, frame),
            Command::SendBytes(to, frame) => {
                self.sending.push(self.calls.send(to, frame, Way::Announced)?);
                Ok(())
            }
            Command::Fail(notice) => self.send_all(|| Frame::Failed(notice.clone())),
            Command::SetDeadline(deadline) => {
                self.deadline = deadline;
                self.heartbeats.set_deadline(deadline);
                Ok(())
            }
            // The caller handles this command.
            Command::Leave => Ok(()),
        }
    }

    /// Returns how long to sleep after `idle` polls without progress.
    fn pause(&self, idle: u32) -> Option<Duration> {
        match idle {
            0 => None,
            _ if self.measures_clock && idle <= LOOKS => None,
            _ if self.shared.waits.load(Ordering::Relaxed) => (idle > LOOKS).then_some(PAUSE_WAITING),
            _ if self.probe.as_ref().is_some_and(ClockProbe::is_measuring) => Some(PAUSE_WAITING),
            _ if idle <= SLOW_POLLS && self.sending.len() + self.receiving.len() > 0 => Some(PAUSE_MOVING),
            _ => Some(PAUSE_QUIET),
        }
    }

    /// Polls all transfers and the clock once; returns whether anything moved.
    fn move_frames(&mut self) -> Result<bool, MpiError> {
        let moved = self.move_transfers()?;
        self.heartbeat()?;
        Ok(moved)
    }

    fn move_transfers(&mut self) -> Result<bool, MpiError> {
        let mut moved = false;
        while let Some(sent) = self.calls.next_done(&mut self.sending)? {
            self.shared.put_back(sent.buffer);
            if sent.message.is_some_and(|message| self.shared.sends.complete(&message)) {
                self.mailboxes.nudge(self.calls.rank);
            }
            moved = true;
        }
        while let Some(received) = self.posted.next_done(&self.calls)? {
            if let Some(bytes) = received.bytes {
                self.shared.posted.fetch_add(1, Ordering::Relaxed);
                self.open(received.peer, &received.buffer[..bytes])?;
            }
            let told = self.posted.post_again(&self.calls, received.peer, received.buffer)?;
            self.tell_room(received.peer, told)?;
            moved = true;
        }
        let room = |bytes| {
            let mut buffer = self.shared.buffer();
            buffer.resize(bytes, 0);
            buffer
        };
        if let Some(transfer) = self.calls.receive(room)? {
            self.receiving.push(transfer);
            moved = true;
        }
        while let Some(received) = self.calls.next_done(&mut self.receiving)? {
            self.open(received.peer, &received.buffer)?;
            self.shared.put_back(received.buffer);
            moved = true;
        }
        Ok(moved)
    }

    /// Completes the remaining transfers, which are late heartbeats, once all processes are leaving. Returns
    /// whether none is left.
    fn finish_frames(&mut self) -> Result<bool, MpiError> {
        let start = Instant::now();
        self.posted.close(&self.calls)?;
        loop {
            let moved = self.move_transfers()?;
            let is_idle = self.sending.is_empty() && self.receiving.is_empty() && self.posted.is_empty();
            if is_idle && !moved {
                return Ok(true);
            }
            if start.elapsed() > PARTING {
                return Ok(false);
            }
        }
    }

    /// Sends a message. A message of a boundary goes to a receive that the other rank has posted, if it fits.
    fn send_message(&mut self, message: SentMessage, frame: Vec<u8>) -> Result<(), MpiError> {
        let (to, _, tag) = message;
        let fits = self.room.get(&to).is_some_and(|&bytes| frame.len() <= bytes);
        let way = if fits && is_boundary(tag) { Way::Posted } else { Way::Announced };
        let transfer = self.calls.send_message(to, frame, way)?;
        self.sending.push(transfer.of(Some(message)));
        Ok(())
    }

    /// Tells a rank the size of the receives that are posted for it, if it has changed.
    fn tell_room(&mut self, to: WorldRank, bytes: Option<usize>) -> Result<(), MpiError> {
        bytes.map_or(Ok(()), |bytes| self.send_frame(to, Frame::Room { bytes }))
    }

    fn send_frame(&mut self, to: WorldRank, frame: Frame) -> Result<(), MpiError> {
        let mut bytes = self.shared.buffer();
        wire::encode(frame, self.shared.clock.moment(), &mut bytes);
        self.sending.push(self.calls.send(to, bytes, Way::Announced)?);
        Ok(())
    }

    fn send_all(&mut self, frame: impl Fn() -> Frame) -> Result<(), MpiError> {
        let own = self.calls.rank;
        for to in (0..self.calls.ranks).map(WorldRank::new).filter(|&to| to != own) {
            self.send_frame(to, frame())?;
        }
        Ok(())
    }

    /// Decodes a frame that has arrived and handles it.
    fn open(&mut self, from: WorldRank, frame: &[u8]) -> Result<(), MpiError> {
        match wire::decode(from, frame, self.shared.clock.moment()) {
            Ok(Frame::Message(message)) => {
                let is_boundary = is_boundary(message.tag);
                self.mailboxes.deliver(self.calls.rank, message);
                if is_boundary {
                    let told = self.posted.make_room(&self.calls, from, frame.len())?;
                    self.tell_room(from, told)?;
                }
            }
            Ok(Frame::Room { bytes }) => {
                self.room.insert(from, bytes);
            }
            // The receiver ends with the endpoint. A later message is not needed.
            Ok(Frame::Bytes(bytes)) => drop(self.bytes.send((from, bytes))),
            Ok(Frame::Reports(bytes)) => drop(self.reports.send((from, bytes))),
            Ok(Frame::Files(bytes)) => drop(self.files.send((from, bytes))),
            Ok(Frame::Failed(notice)) => self.mailboxes.abort().raise_from_remote(notice),
            Ok(Frame::Process(process)) => self.local_processes.add(from, &process),
            Ok(Frame::Heartbeats(lines)) => self.heartbeats.merge(&lines, &self.board, Instant::now()),
            Ok(Frame::ClockRequest { sent }) => {
                self.measures_clock = true;
                let answered = self.shared.clock.now();
                self.send_frame(from, Frame::ClockAnswer { sent, answered })?;
            }
            Ok(Frame::ClockAnswer { sent, answered }) => {
                let trip = RoundTrip { sent, answered, received: self.shared.clock.now() };
                let probe = self.probe.as_mut();
                if let Some(offset) = probe.and_then(|probe| probe.answer(trip, Instant::now())) {
                    self.shared.clock.add(offset);
                }
            }
            Err(error) => self.fail(Cause::Transport { message: error.to_string() }),
        }
        Ok(())
    }

    /// Asks the first process for its time when a measurement of this process's clock needs it.
    fn probe_clock(&mut self) -> Result<(), MpiError> {
        let Some(probe) = &mut self.probe else { return Ok(()) };
        if !probe.is_due(Instant::now()) {
            return Ok(());
        }
        self.measures_clock = true;
        let sent = self.shared.clock.now();
        self.send_frame(FIRST, Frame::ClockRequest { sent })
    }

    /// Sends a heartbeat when it is due, and checks for ranks that send none.
    fn heartbeat(&mut self) -> Result<(), MpiError> {
        let now = Instant::now();
        if let Some((partner, lines)) = self.heartbeats.due(&self.board, now) {
            self.send_frame(partner, Frame::Heartbeats(lines))?;
            self.look_for_lost(now);
        }
        Ok(())
    }

    fn look_for_lost(&mut self, now: Instant) {
        if self.mailboxes.abort().is_raised() {
            return;
        }
        let silent = self.heartbeats.silent(now);
        // Frames that it sent before it ended are read first.
        let ended = self.local_processes.ended();
        let was_ended = std::mem::replace(&mut self.ended, ended);
        silent.iter().for_each(|&rank| self.board.mark_silent(rank));
        if let Some(&peer) = silent.first() {
            let (waited, report) = (self.deadline, self.board.report());
            self.fail(Cause::SilentPeer { peer, waited, report });
        } else if let Some(peer) = ended.filter(|_| ended == was_ended) {
            let (waited, report) = (self.deadline, self.board.report());
            self.fail(if self.heartbeats.was_stopped(now) {
                // The others treated this process as failed while it was stopped, and have ended.
                Cause::SilentPeer { peer: self.calls.rank, waited, report }
            } else {
                Cause::LostPeer { peer }
            });
        }
    }

    /// Stops this process's rank in all attempts with an error of the MPI thread itself.
    fn fail(&self, cause: Cause) {
        let (rank, step) = (self.calls.rank, self.board.step());
        self.mailboxes.abort().raise(StepError { rank, step, action: None, cause });
    }

    /// Sends the remaining frames and waits until the others leave too; returns whether they all did. A
    /// process that is still busy, for example with its last checkpoint, sends heartbeats. If one sends none,
    /// the abort flag is raised and the wait ends.
    fn leave(&mut self) -> Result<bool, MpiError> {
        let mut leaving = None;
        let mut failed: Option<Instant> = None;
        loop {
            while let Ok(command) = self.commands.try_recv() {
                self.run_command(command)?;
            }
            self.move_frames()?;
            // An answer that is still under way would find no receiver later.
            let is_idle =
                self.sending.is_empty() && !self.probe.as_ref().is_some_and(|probe| probe.is_waiting);
            if is_idle && leaving.is_none() {
                leaving = Some(self.calls.leave()?);
            }
            if let Some(leaving) = &mut leaving
                && self.calls.all_leave(leaving)?
            {
                return self.finish_frames();
            }
            if self.mailboxes.abort().is_raised()
                && failed.get_or_insert_with(Instant::now).elapsed() > PARTING
            {
                return Ok(false);
            }
            std::thread::sleep(PAUSE_MOVING);
        }
    }
}
