//! The local transport with deliveries that a test controls: late, out of order, or never.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use super::Waited;
use super::local::{LocalEndpoint, Mailboxes};
use crate::failure::{Abort, StepError};
use crate::ids::{Attempt, WorldRank};
use crate::message::{Message, Payload, Tag};

/// The messages that were sent and have not arrived.
#[derive(Clone)]
pub struct InFlight {
    mailboxes: Arc<Mailboxes>,
    messages: Arc<Mutex<Vec<(WorldRank, Message)>>>,
}

impl InFlight {
    fn lock(&self) -> MutexGuard<'_, Vec<(WorldRank, Message)>> {
        self.messages.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the number of messages in flight.
    pub fn len(&self) -> usize {
        self.lock().len()
    }

    /// Whether no message is in flight.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Delivers the message at `index % len`; does nothing if no message is in flight.
    pub fn release(&self, index: usize) {
        if let Some((to, message)) = self.remove(index) {
            self.mailboxes.deliver(to, message);
        }
    }

    /// Drops the message at `index % len` and returns its tag.
    pub fn lose(&self, index: usize) -> Option<Tag> {
        self.remove(index).map(|(_, message)| message.tag)
    }

    fn remove(&self, index: usize) -> Option<(WorldRank, Message)> {
        let mut messages = self.lock();
        let index = index.checked_rem(messages.len())?;
        Some(messages.swap_remove(index))
    }
}

/// A local endpoint whose messages stay in [`InFlight`] until the test delivers them.
pub struct ControlledEndpoint {
    inner: LocalEndpoint,
    in_flight: InFlight,
}

pub(crate) fn world(ranks: u32) -> (Vec<ControlledEndpoint>, InFlight) {
    let mailboxes = Mailboxes::new(ranks);
    let in_flight = InFlight { mailboxes: mailboxes.clone(), messages: Arc::default() };
    let endpoints = (0..ranks)
        .map(|rank| ControlledEndpoint {
            inner: LocalEndpoint::new(WorldRank::new(rank), mailboxes.clone()),
            in_flight: in_flight.clone(),
        })
        .collect();
    (endpoints, in_flight)
}

impl ControlledEndpoint {
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
    }

    pub(crate) fn send(&mut self, to: WorldRank, tag: Tag, payload: Payload) {
        let message = self.inner.envelope(tag, payload);
        self.in_flight.lock().push((to, message));
    }

    pub(crate) fn try_take(&mut self, from: WorldRank, tag: Tag) -> Option<Message> {
        self.inner.try_take(from, tag)
    }

    pub(crate) fn wait(&mut self, until: Instant) -> Waited {
        self.inner.wait(until)
    }

    pub(crate) fn fail(&self, error: StepError) {
        self.inner.fail(error);
    }
}
