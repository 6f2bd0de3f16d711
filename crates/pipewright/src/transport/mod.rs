//! How tensors get from one rank to another. What is sent and when is the executor's business.
//!
//! A [`World`] is made before the ranks start and taken apart into one [`Endpoint`] a rank. An endpoint belongs to its
//! rank's thread: it sends without blocking, takes what has arrived by [`Tag`], and waits, with a deadline, for
//! anything to arrive. Messages carry their tag, so they may arrive in any order.
//!
//! Every transport passes the suite in `tests/transport.rs`.
//!
//! # Why nothing hangs
//!
//! Sending never blocks. Waiting ends at a message, at the deadline, or when the shared [`Abort`] flag is raised,
//! whichever comes first; raising it wakes every waiter.

mod held;
mod local;
mod message;

use std::time::Instant;

use pipewright_schedule::Rank;

use crate::failure::{Abort, StepError};
pub use held::{HeldEndpoint, Limbo};
pub use local::LocalEndpoint;
pub use message::{Contribution, Direction, Message, OwnedParameter, Payload, Tag};

/// The ends of one transport that are not yet handed out to their ranks.
pub struct World {
    endpoints: Vec<Endpoint>,
}

impl World {
    /// Ranks that are threads of this process. Messages are moved, never copied.
    pub fn local(ranks: u32) -> Self {
        Self { endpoints: local::world(ranks).into_iter().map(Endpoint::Local).collect() }
    }

    /// As [`World::local`], but a message arrives only once it is let go of through the [`Limbo`]: for tests that
    /// decide the order of arrival, or lose a message.
    pub fn held(ranks: u32) -> (Self, Limbo) {
        let (endpoints, limbo) = held::world(ranks);
        (Self { endpoints: endpoints.into_iter().map(Endpoint::Held).collect() }, limbo)
    }

    /// One end a rank of this process, in rank order.
    pub fn into_endpoints(self) -> Vec<Endpoint> {
        self.endpoints
    }
}

/// A rank's end of a transport.
pub enum Endpoint {
    /// Threads of one process.
    Local(LocalEndpoint),
    /// Threads of one process, with arrival under a test's control.
    Held(HeldEndpoint),
}

/// How a wait ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Waited {
    /// Something arrived: look again.
    Arrived,
    /// The deadline passed.
    TimedOut,
    /// A rank failed.
    Aborted,
}

impl Endpoint {
    /// The rank that this end belongs to.
    pub fn rank(&self) -> Rank {
        match self {
            Self::Local(endpoint) => endpoint.rank(),
            Self::Held(endpoint) => endpoint.rank(),
        }
    }

    /// Number of ranks.
    pub fn ranks(&self) -> u32 {
        match self {
            Self::Local(endpoint) => endpoint.ranks(),
            Self::Held(endpoint) => endpoint.ranks(),
        }
    }

    /// The flag that every rank of this world watches.
    pub fn abort(&self) -> &Abort {
        match self {
            Self::Local(endpoint) => endpoint.abort(),
            Self::Held(endpoint) => endpoint.abort(),
        }
    }

    /// Starts a step: messages of other steps, left over from one that failed, are dropped when they turn up.
    pub fn begin_step(&mut self, step: u64) {
        match self {
            Self::Local(endpoint) => endpoint.begin_step(step),
            Self::Held(endpoint) => endpoint.begin_step(step),
        }
    }

    /// Sends without blocking; the payload is gone from here.
    pub fn send(&mut self, to: Rank, tag: Tag, payload: Payload) {
        match self {
            Self::Local(endpoint) => endpoint.send(to, tag, payload),
            Self::Held(endpoint) => endpoint.send(to, tag, payload),
        }
    }

    /// Takes the message that `from` sent under `tag`, if it has arrived.
    pub fn try_take(&mut self, from: Rank, tag: Tag) -> Option<Message> {
        match self {
            Self::Local(endpoint) => endpoint.try_take(from, tag),
            Self::Held(endpoint) => endpoint.try_take(from, tag),
        }
    }

    /// Sleeps until a message arrives, `until` passes, or a rank fails.
    pub fn wait(&mut self, until: Instant) -> Waited {
        match self {
            Self::Local(endpoint) => endpoint.wait(until),
            Self::Held(endpoint) => endpoint.wait(until),
        }
    }

    /// Raises the abort flag and wakes every waiting rank.
    pub fn fail(&self, error: StepError) {
        match self {
            Self::Local(endpoint) => endpoint.fail(error),
            Self::Held(endpoint) => endpoint.fail(error),
        }
    }
}
