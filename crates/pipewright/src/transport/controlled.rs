//! The local transport with deliveries that the caller controls, for tests (late, out of order, or never) and for steps
//! that are computed again.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::local::{LocalEndpoint, Mailboxes};
use crate::ids::WorldRank;
use crate::message::{Message, Payload, Tag};

/// The messages that were sent and have not arrived.
#[derive(Clone)]
pub struct InFlight {
    mailboxes: Arc<Mailboxes>,
    state: Arc<Mutex<State>>,
}

#[derive(Default)]
struct State {
    messages: Vec<(WorldRank, Message)>,
    /// The messages that each rank has sent to others.
    traffic: Vec<Traffic>,
}

/// The amount that a rank has sent to other ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// The number of messages.
    pub messages: u64,
    /// The bytes of their tensors and encoded values.
    pub bytes: u64,
}

impl InFlight {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the amount that `rank` has sent to others since the world was made.
    pub fn sent_by(&self, rank: WorldRank) -> Traffic {
        self.lock().traffic[rank.index()]
    }

    /// Returns the number of messages in flight.
    pub fn len(&self) -> usize {
        self.lock().messages.len()
    }

    /// Returns whether no message is in flight.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Delivers the message at `index % len`; does nothing if no message is in flight.
    pub fn release(&self, index: usize) {
        if let Some((to, message)) = self.remove(index) {
            self.mailboxes.deliver(to, message);
        }
    }

    /// Delivers the messages for which `is_due` returns true, which gets their senders, receivers and tags.
    pub fn release_if(&self, mut is_due: impl FnMut(WorldRank, WorldRank, Tag) -> bool) {
        let due = {
            let messages = &mut self.lock().messages;
            let due = |(to, message): &mut (WorldRank, Message)| is_due(message.from, *to, message.tag);
            messages.extract_if(.., due).collect::<Vec<_>>()
        };
        for (to, message) in due {
            // The sender may wait until the message is sent.
            self.mailboxes.nudge(message.from);
            self.mailboxes.deliver(to, message);
        }
    }

    /// Takes out all messages in flight, with their receivers.
    pub(crate) fn take_all(&self) -> Vec<(WorldRank, Message)> {
        let messages = std::mem::take(&mut self.lock().messages);
        // The senders may wait until the messages are sent.
        messages.iter().for_each(|(_, message)| self.mailboxes.nudge(message.from));
        messages
    }

    /// Delivers a message that was not sent in this world.
    pub(crate) fn deliver(&self, to: WorldRank, message: Message) {
        self.mailboxes.deliver(to, message);
    }

    /// Drops the message at `index % len` and returns its tag.
    pub fn lose(&self, index: usize) -> Option<Tag> {
        self.remove(index).map(|(_, message)| message.tag)
    }

    fn remove(&self, index: usize) -> Option<(WorldRank, Message)> {
        let (to, message) = {
            let messages = &mut self.lock().messages;
            let index = index.checked_rem(messages.len())?;
            messages.swap_remove(index)
        };
        // The sender may wait until the message is sent.
        self.mailboxes.nudge(message.from);
        Some((to, message))
    }
}

/// A local endpoint whose messages stay in [`InFlight`] until the test delivers them.
pub struct ControlledEndpoint {
    pub(super) inner: LocalEndpoint,
    in_flight: InFlight,
}

pub(crate) fn world(ranks: u32) -> (Vec<ControlledEndpoint>, InFlight) {
    let mailboxes = Mailboxes::new(ranks);
    let state = State { messages: Vec::new(), traffic: vec![Traffic::default(); ranks as usize] };
    let in_flight = InFlight { mailboxes: mailboxes.clone(), state: Arc::new(Mutex::new(state)) };
    let endpoints = (0..ranks)
        .map(|rank| ControlledEndpoint {
            inner: LocalEndpoint::new(WorldRank::new(rank), mailboxes.clone()),
            in_flight: in_flight.clone(),
        })
        .collect();
    (endpoints, in_flight)
}

impl ControlledEndpoint {
    pub(crate) fn send(&mut self, to: WorldRank, tag: Tag, payload: Payload) {
        let message = self.inner.envelope(tag, payload);
        let mut state = self.in_flight.lock();
        if to != message.from {
            let traffic = &mut state.traffic[message.from.index()];
            traffic.messages += 1;
            traffic.bytes += message.payload.bytes();
        }
        state.messages.push((to, message));
    }

    pub(crate) fn is_sent(&self, to: WorldRank, tag: Tag) -> bool {
        let (own, attempt) = (self.inner.rank, self.inner.attempt);
        let state = self.in_flight.lock();
        !state.messages.iter().any(|(receiver, message)| {
            (*receiver, message.from, message.attempt, message.tag) == (to, own, attempt, tag)
        })
    }
}
