//! A rank's endpoint: the calls that every transport has.

use std::time::{Duration, Instant};

use pipewright_schedule::ClockSkew;

use super::controlled::ControlledEndpoint;
use super::local::LocalEndpoint;
#[cfg(feature = "mpi")]
use super::mpi::MpiEndpoint;
use super::wait::Waited;
use crate::byte_channel::ByteChannel;
use crate::failure::{Abort, StepError};
use crate::ids::{Attempt, WorldRank};
use crate::message::{Message, Payload, Tag};

/// A rank's endpoint of a transport.
pub enum Endpoint {
    /// Threads of one process.
    Local(LocalEndpoint),
    /// Threads of one process; a test controls the arrival of messages.
    Controlled(ControlledEndpoint),
    /// One process of several, over MPI.
    #[cfg(feature = "mpi")]
    Mpi(MpiEndpoint),
}

impl Endpoint {
    /// Returns the part that all transports have: the rank's mailbox, and the failures of all ranks.
    fn local(&self) -> &LocalEndpoint {
        match self {
            Self::Local(endpoint) => endpoint,
            Self::Controlled(endpoint) => &endpoint.inner,
            #[cfg(feature = "mpi")]
            Self::Mpi(endpoint) => &endpoint.inner,
        }
    }

    fn local_mut(&mut self) -> &mut LocalEndpoint {
        match self {
            Self::Local(endpoint) => endpoint,
            Self::Controlled(endpoint) => &mut endpoint.inner,
            #[cfg(feature = "mpi")]
            Self::Mpi(endpoint) => &mut endpoint.inner,
        }
    }

    /// Returns the rank of this endpoint.
    pub fn rank(&self) -> WorldRank {
        self.local().rank
    }

    /// Returns the number of ranks.
    pub fn ranks(&self) -> u32 {
        self.local().ranks()
    }

    /// Returns whether other ranks run in other processes.
    pub fn is_distributed(&self) -> bool {
        match self {
            Self::Local(_) | Self::Controlled(_) => false,
            #[cfg(feature = "mpi")]
            Self::Mpi(endpoint) => endpoint.inner.ranks() > 1,
        }
    }

    /// Returns how long after the deadline the transport reports a lost rank by itself. A rank that only
    /// notices that nothing moves waits this much longer, so that the more precise report comes first.
    pub(crate) fn detection_lag(&self, deadline: Duration) -> Duration {
        #[cfg(feature = "mpi")]
        if let Self::Mpi(endpoint) = self {
            return endpoint.detection_lag(deadline);
        }
        let _ = deadline;
        Duration::ZERO
    }

    /// Returns the flag that every rank of this world watches.
    pub fn abort(&self) -> &Abort {
        self.local().abort()
    }

    /// Returns the first error if a rank has failed in this rank's attempt or before.
    pub(crate) fn failure(&self) -> Option<StepError> {
        let (abort, attempt) = (self.abort(), self.local().attempt);
        if abort.is_raised_in(attempt) { abort.first_in(attempt) } else { None }
    }

    /// Returns the channel for messages between processes that belong to no step; `None` within one process.
    pub(crate) fn byte_channel(&self) -> Option<ByteChannel> {
        match self {
            Self::Local(_) | Self::Controlled(_) => None,
            #[cfg(feature = "mpi")]
            Self::Mpi(endpoint) => Some(endpoint.byte_channel()),
        }
    }

    /// Returns the channel for files that another host does not have; `None` within one process.
    pub(crate) fn file_channel(&self) -> Option<ByteChannel> {
        match self {
            Self::Local(_) | Self::Controlled(_) => None,
            #[cfg(feature = "mpi")]
            Self::Mpi(endpoint) => Some(endpoint.file_channel()),
        }
    }

    /// Returns the channel for the exchange of reports between processes; `None` within one process.
    pub(crate) fn report_channel(&self) -> Option<ByteChannel> {
        match self {
            Self::Local(_) | Self::Controlled(_) => None,
            #[cfg(feature = "mpi")]
            Self::Mpi(endpoint) => (endpoint.inner.ranks() > 1).then(|| endpoint.report_channel()),
        }
    }

    /// Starts an attempt at a step. Messages that are left over from earlier attempts are dropped.
    pub fn begin_step(&mut self, attempt: impl Into<Attempt>) {
        let attempt = attempt.into();
        match self {
            #[cfg(feature = "mpi")]
            Self::Mpi(endpoint) => endpoint.begin_step(attempt),
            _ => self.local_mut().begin_step(attempt),
        }
    }

    /// Continues an attempt, or begins one during another: the rank is in the attempts `alive`, the first and the last.
    pub(crate) fn continue_in(&mut self, attempt: Attempt, alive: [Attempt; 2]) {
        self.local_mut().continue_in(attempt, alive);
    }

    /// Counts the peak of the boundary messages in flight from now on.
    pub(crate) fn restart_sends(&self) {
        #[cfg(feature = "mpi")]
        if let Self::Mpi(endpoint) = self {
            endpoint.restart_sends();
        }
    }

    /// Sends a message without blocking; the payload is moved.
    pub fn send(&mut self, to: WorldRank, tag: Tag, payload: Payload) {
        match self {
            Self::Local(endpoint) => endpoint.send(to, tag, payload),
            Self::Controlled(endpoint) => endpoint.send(to, tag, payload),
            #[cfg(feature = "mpi")]
            Self::Mpi(endpoint) => endpoint.send(to, tag, payload),
        }
    }

    /// Returns whether the message with `tag` that this rank has sent to `to` in this attempt has left: its
    /// memory is free at the sender. Within a process this is when it is delivered. If it has not left,
    /// [`Endpoint::wait`] returns when it may have.
    pub fn is_sent(&self, to: WorldRank, tag: Tag) -> bool {
        match self {
            // Sending delivers a message.
            Self::Local(_) => true,
            Self::Controlled(endpoint) => endpoint.is_sent(to, tag),
            #[cfg(feature = "mpi")]
            Self::Mpi(endpoint) => endpoint.is_sent(to, tag),
        }
    }

    /// Returns the largest number of boundary messages of this attempt that were sent and had not left at
    /// once; 0 within a process, where messages are moved.
    pub(crate) fn sends_in_flight(&self) -> u32 {
        match self {
            Self::Local(_) | Self::Controlled(_) => 0,
            #[cfg(feature = "mpi")]
            Self::Mpi(endpoint) => endpoint.sends_in_flight(),
        }
    }

    /// Returns the number of messages that have arrived in receives that were posted for them before they
    /// were sent; 0 within a process, where messages are moved.
    pub fn posted_receives(&self) -> u64 {
        match self {
            Self::Local(_) | Self::Controlled(_) => 0,
            #[cfg(feature = "mpi")]
            Self::Mpi(endpoint) => endpoint.posted_receives(),
        }
    }

    /// Returns an instant on the clock that all processes share, in seconds; `None` within one process.
    pub(crate) fn common_seconds(&self, at: Instant) -> Option<f64> {
        #[cfg(not(feature = "mpi"))]
        let _ = at;
        match self {
            Self::Local(_) | Self::Controlled(_) => None,
            #[cfg(feature = "mpi")]
            Self::Mpi(endpoint) => Some(endpoint.common_seconds(at)),
        }
    }

    /// Returns the accuracy of [`Endpoint::common_seconds`].
    pub(crate) fn clock_skew(&self, at: Instant) -> Option<ClockSkew> {
        #[cfg(not(feature = "mpi"))]
        let _ = at;
        match self {
            Self::Local(_) | Self::Controlled(_) => None,
            #[cfg(feature = "mpi")]
            Self::Mpi(endpoint) => Some(endpoint.clock_skew(at)),
        }
    }

    /// Takes the message with `tag` from `from`, if it has arrived.
    pub fn try_take(&mut self, from: WorldRank, tag: Tag) -> Option<Message> {
        self.local_mut().try_take(from, tag)
    }

    /// Returns whether the message with `tag` from `from` has arrived and was not taken.
    pub(crate) fn has_arrived(&mut self, from: WorldRank, tag: Tag) -> bool {
        self.local_mut().has_arrived(from, tag)
    }

    /// Sleeps until a message arrives or may have left, `until` passes, or a rank fails. Returns at once if a
    /// message other than the wanted one was taken since the last wait.
    pub fn wait(&mut self, until: Instant) -> Waited {
        match self {
            #[cfg(feature = "mpi")]
            Self::Mpi(endpoint) => endpoint.wait(until),
            _ => self.local_mut().wait(until),
        }
    }

    /// Like [`Endpoint::wait`], but a failure of a later attempt than the current one does not end it.
    pub(crate) fn wait_in_attempt(&mut self, until: Instant) -> Waited {
        match self {
            #[cfg(feature = "mpi")]
            Self::Mpi(endpoint) => endpoint.wait_in_attempt(until),
            _ => self.local_mut().wait_in_attempt(until),
        }
    }

    /// Raises the abort flag in this rank's attempt and in later ones, and wakes every waiting rank.
    pub fn fail(&self, error: StepError) {
        self.local().fail(error);
    }
}
