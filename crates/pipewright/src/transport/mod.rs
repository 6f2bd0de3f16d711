//! Moves messages between ranks. The executor decides what is sent and when.
//!
//! A [`World`] is made before the ranks start and is split into one [`Endpoint`] per rank. An endpoint belongs to its
//! rank's thread: it sends without blocking, takes messages that have arrived by their [`Tag`], and waits, with a deadline,
//! until a message arrives. Messages carry their tag, so they may arrive in any order.
//!
//! Every transport passes the suite in `tests/transport/checks.rs`.
//!
//! # Waits always end
//!
//! Sending never blocks. A wait ends when a message arrives, at the deadline, or when the shared [`Abort`] flag is raised,
//! whichever comes first. Raising the flag wakes every waiting rank.

mod agreement;
#[cfg(any(feature = "mpi", test))]
mod clock;
mod controlled;
mod link_speed;
mod local;
mod mailbox;
mod sync;
#[cfg(feature = "mpi")]
mod mpi;
#[cfg(any(feature = "mpi", test))]
mod wire;

use std::time::{Duration, Instant};

use pipewright_schedule::ClockSkew;

use crate::device::Devices;
use crate::failure::{Abort, StepError};
use crate::ids::{Attempt, WorldRank};
use crate::message::{Message, Payload, Tag};
use crate::progress::ProgressBoard;
pub use agreement::{AgreementError, Differences, Fields};
pub use controlled::{ControlledEndpoint, InFlight, Traffic};
pub use link_speed::LinkSpeed;
pub use local::LocalEndpoint;
#[cfg(all(feature = "mpi", not(feature = "testing")))]
use mpi::ClockError;
#[cfg(all(feature = "mpi", feature = "testing"))]
pub use mpi::ClockError;
#[cfg(feature = "mpi")]
pub use mpi::{MpiEndpoint, MpiError};

/// The endpoints of one transport, before they are given to their ranks.
pub struct World {
    endpoints: Vec<Endpoint>,
    /// The progress of all ranks, including those of other processes.
    board: ProgressBoard,
}

/// Why a transport is not available.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum WorldError {
    /// The transport is not compiled in.
    #[error("this build has no `{transport}` transport: build with `--features {transport}`")]
    NotCompiledIn {
        /// The transport, which is also the name of its feature.
        transport: &'static str,
    },
    /// MPI cannot be joined.
    #[cfg(feature = "mpi")]
    #[error("MPI cannot be joined: {0}")]
    Mpi(#[from] MpiError),
}

impl World {
    /// Returns a world whose ranks are threads of this process. Messages are moved, never copied.
    pub fn local(ranks: u32) -> Self {
        let endpoints = local::world(ranks).into_iter().map(Endpoint::Local).collect();
        Self { endpoints, board: ProgressBoard::new(ranks) }
    }

    /// Returns this process's rank in the world of the processes that `mpirun` started, one rank each. A process joins
    /// once; it leaves, together with the others, when the pipeline is dropped.
    ///
    /// A process that sends no heartbeat for `deadline` counts as lost. A pipeline that is launched sets its own deadline.
    ///
    /// # Errors
    /// Without the feature `mpi`, and when MPI cannot be joined.
    pub fn mpi(deadline: Duration) -> Result<Self, WorldError> {
        #[cfg(feature = "mpi")]
        {
            let (endpoint, board) = mpi::world(deadline, ClockError::default())?;
            Ok(Self { endpoints: vec![Endpoint::Mpi(endpoint)], board })
        }
        #[cfg(not(feature = "mpi"))]
        {
            let _ = deadline;
            Err(WorldError::NotCompiledIn { transport: "mpi" })
        }
    }

    /// Returns a world as [`World::mpi`] does, with an error of this process's clock, for tests.
    ///
    /// # Errors
    /// When MPI cannot be joined.
    #[cfg(all(feature = "mpi", feature = "testing"))]
    pub fn mpi_with_clock_error(deadline: Duration, error: ClockError) -> Result<Self, WorldError> {
        let (endpoint, board) = mpi::world(deadline, error)?;
        Ok(Self { endpoints: vec![Endpoint::Mpi(endpoint)], board })
    }

    /// Whether ranks run in other processes.
    pub fn is_distributed(&self) -> bool {
        self.endpoints.iter().any(Endpoint::is_distributed)
    }

    /// Checks that all processes are about to run the same. Every process calls it with a description of its run, or with
    /// the reason why it cannot run. Within one process there is nothing to compare.
    ///
    /// # Errors
    /// When processes differ, some cannot run, or some do not answer within `deadline`. Every process gets the same error.
    pub fn agree(&mut self, hello: Result<Fields, String>, deadline: Duration) -> Result<(), AgreementError> {
        match self.endpoints.as_mut_slice() {
            [endpoint] if endpoint.is_distributed() => agreement::agree(endpoint, &hello, deadline),
            _ => Ok(()),
        }
    }

    /// Returns the text of the first rank's process in every process, all of which call it.
    ///
    /// # Errors
    /// When a rank fails, or the first one does not answer within `deadline`.
    pub fn share(&mut self, own: String, deadline: Duration) -> Result<String, AgreementError> {
        match self.endpoints.as_mut_slice() {
            [endpoint] if endpoint.is_distributed() => agreement::share(endpoint, own, deadline),
            _ => Ok(own),
        }
    }

    /// Measures the link between two ranks: between the first two processes, all of which call it, or between two
    /// threads of this process. Takes a fraction of a second. Only the process of the first rank gets the result, and no
    /// process gets one if it is alone.
    ///
    /// # Errors
    /// When a rank fails, or does not answer within `deadline`.
    pub fn measure_link(
        &mut self,
        devices: &Devices,
        deadline: Duration,
    ) -> Result<Option<LinkSpeed>, AgreementError> {
        match self.endpoints.as_mut_slice() {
            [endpoint] if endpoint.is_distributed() => link_speed::measure(endpoint, devices, deadline),
            [] | [Endpoint::Local(_), ..] => link_speed::between_threads(devices, deadline),
            _ => Ok(None),
        }
    }

    /// Returns the number of ranks, including those of other processes.
    pub fn ranks(&self) -> u32 {
        self.endpoints.first().map_or(0, Endpoint::ranks)
    }

    /// Returns the ranks of this process.
    pub fn own_ranks(&self) -> impl Iterator<Item = WorldRank> {
        self.endpoints.iter().map(Endpoint::rank)
    }

    /// Returns a world as [`World::local`] does, in which a message arrives only when a test releases it from [`InFlight`].
    /// Tests use it to choose the order of arrival or to lose a message.
    pub fn controlled(ranks: u32) -> (Self, InFlight) {
        let (endpoints, in_flight) = controlled::world(ranks);
        let endpoints = endpoints.into_iter().map(Endpoint::Controlled).collect();
        (Self { endpoints, board: ProgressBoard::new(ranks) }, in_flight)
    }

    /// Returns one endpoint per rank of this process, in rank order.
    pub fn into_endpoints(self) -> Vec<Endpoint> {
        self.endpoints
    }

    /// Sets the time after which a process without heartbeats counts as lost.
    pub(crate) fn set_deadline(&self, deadline: Duration) {
        #[cfg(feature = "mpi")]
        for endpoint in &self.endpoints {
            if let Endpoint::Mpi(endpoint) = endpoint {
                endpoint.set_deadline(deadline);
            }
        }
        #[cfg(not(feature = "mpi"))]
        let _ = deadline;
    }

    pub(crate) fn into_parts(self) -> (Vec<Endpoint>, ProgressBoard) {
        (self.endpoints, self.board)
    }
}

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

/// How a wait ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Waited {
    /// A message arrived, or one that this rank waits for has left ([`Endpoint::is_sent`]).
    Arrived,
    /// The deadline passed.
    TimedOut,
    /// A rank failed.
    Aborted,
}

impl Endpoint {
    /// Returns the rank of this endpoint.
    pub fn rank(&self) -> WorldRank {
        match self {
            Self::Local(endpoint) => endpoint.rank(),
            Self::Controlled(endpoint) => endpoint.rank(),
            #[cfg(feature = "mpi")]
            Self::Mpi(endpoint) => endpoint.rank(),
        }
    }

    /// Returns the number of ranks.
    pub fn ranks(&self) -> u32 {
        match self {
            Self::Local(endpoint) => endpoint.ranks(),
            Self::Controlled(endpoint) => endpoint.ranks(),
            #[cfg(feature = "mpi")]
            Self::Mpi(endpoint) => endpoint.ranks(),
        }
    }

    /// Whether other ranks run in other processes.
    pub fn is_distributed(&self) -> bool {
        match self {
            Self::Local(_) | Self::Controlled(_) => false,
            #[cfg(feature = "mpi")]
            Self::Mpi(endpoint) => endpoint.ranks() > 1,
        }
    }

    /// Returns how long after the deadline the transport reports a lost rank by itself. A rank that only notices that
    /// nothing moves waits this much longer, so that the more precise report comes first.
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
        match self {
            Self::Local(endpoint) => endpoint.abort(),
            Self::Controlled(endpoint) => endpoint.abort(),
            #[cfg(feature = "mpi")]
            Self::Mpi(endpoint) => endpoint.abort(),
        }
    }

    /// Starts an attempt at a step. Messages that are left over from earlier attempts are dropped.
    pub fn begin_step(&mut self, attempt: impl Into<Attempt>) {
        let attempt = attempt.into();
        match self {
            Self::Local(endpoint) => endpoint.begin_step(attempt),
            Self::Controlled(endpoint) => endpoint.begin_step(attempt),
            #[cfg(feature = "mpi")]
            Self::Mpi(endpoint) => endpoint.begin_step(attempt),
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

    /// Returns whether the message with `tag` that this rank has sent to `to` in this attempt has left: its memory is free
    /// at the sender. Within a process this is when it is delivered. If it has not left, [`Endpoint::wait`] returns when it
    /// may have.
    pub fn is_sent(&self, to: WorldRank, tag: Tag) -> bool {
        match self {
            // Sending delivers a message.
            Self::Local(_) => true,
            Self::Controlled(endpoint) => endpoint.is_sent(to, tag),
            #[cfg(feature = "mpi")]
            Self::Mpi(endpoint) => endpoint.is_sent(to, tag),
        }
    }

    /// Returns the largest number of boundary messages of this attempt that were sent and had not left at once; 0 within a
    /// process, where messages are moved.
    pub(crate) fn sends_in_flight(&self) -> u32 {
        match self {
            Self::Local(_) | Self::Controlled(_) => 0,
            #[cfg(feature = "mpi")]
            Self::Mpi(endpoint) => endpoint.sends_in_flight(),
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
        match self {
            Self::Local(endpoint) => endpoint.try_take(from, tag),
            Self::Controlled(endpoint) => endpoint.try_take(from, tag),
            #[cfg(feature = "mpi")]
            Self::Mpi(endpoint) => endpoint.try_take(from, tag),
        }
    }

    /// Sleeps until a message arrives or may have left, `until` passes, or a rank fails.
    pub fn wait(&mut self, until: Instant) -> Waited {
        match self {
            Self::Local(endpoint) => endpoint.wait(until),
            Self::Controlled(endpoint) => endpoint.wait(until),
            #[cfg(feature = "mpi")]
            Self::Mpi(endpoint) => endpoint.wait(until),
        }
    }

    /// Raises the abort flag and wakes every waiting rank.
    pub fn fail(&self, error: StepError) {
        match self {
            Self::Local(endpoint) => endpoint.fail(error),
            Self::Controlled(endpoint) => endpoint.fail(error),
            #[cfg(feature = "mpi")]
            Self::Mpi(endpoint) => endpoint.fail(error),
        }
    }
}
