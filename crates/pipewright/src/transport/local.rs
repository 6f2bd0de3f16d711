//! The local transport: ranks are threads of one process, each with a mailbox; messages are moved.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use super::mailbox::{Mailbox, Woken};
use super::wait::Waited;
use crate::failure::{Abort, StepError};
use crate::ids::{Attempt, WorldRank};
use crate::message::{Message, Payload, Tag};

/// Mailboxes of all ranks, shared by their endpoints.
pub(crate) struct Mailboxes {
    boxes: Arc<[Mailbox<Message>]>,
    /// Raising it wakes all ranks.
    abort: Abort,
}

impl Mailboxes {
    pub(crate) fn new(ranks: u32) -> Arc<Self> {
        let boxes: Arc<[Mailbox<Message>]> = (0..ranks).map(|_| Mailbox::default()).collect();
        let woken = boxes.clone();
        Arc::new(Self { boxes, abort: Abort::waking(move || woken.iter().for_each(Mailbox::wake)) })
    }

    /// Adds a message to a rank's mailbox and wakes the rank.
    pub(crate) fn deliver(&self, to: WorldRank, mut message: Message) {
        message.arrived = Instant::now();
        self.boxes[to.index()].deliver(message);
    }

    /// Wakes a rank that may wait for a message that it has sent.
    pub(crate) fn nudge(&self, rank: WorldRank) {
        self.boxes[rank.index()].nudge();
    }

    pub(crate) fn abort(&self) -> &Abort {
        &self.abort
    }
}

/// A rank's endpoint of the local transport.
pub struct LocalEndpoint {
    pub(crate) rank: WorldRank,
    pub(crate) attempt: Attempt,
    /// The first and the last attempt in which the rank is: it may be in two at once.
    alive: [Attempt; 2],
    mailboxes: Arc<Mailboxes>,
    /// Messages that have arrived. The attempt is part of the key, because a neighbour may be an attempt
    /// ahead.
    arrived: HashMap<(Attempt, WorldRank, Tag), Message>,
    /// Whether messages other than the wanted one were taken out of the mailbox since the last wait. The next
    /// wait then returns at once. A rank may look for several messages before it waits. The first of them may
    /// arrive while it looks for the later ones.
    took_others: bool,
    /// An empty list, kept for its allocation.
    spare: Vec<Message>,
}

/// Returns one endpoint per rank.
pub(crate) fn world(ranks: u32) -> Vec<LocalEndpoint> {
    let mailboxes = Mailboxes::new(ranks);
    (0..ranks).map(|rank| LocalEndpoint::new(WorldRank::new(rank), mailboxes.clone())).collect()
}

impl LocalEndpoint {
    pub(crate) fn new(rank: WorldRank, mailboxes: Arc<Mailboxes>) -> Self {
        Self {
            rank,
            attempt: Attempt::default(),
            alive: [Attempt::default(); 2],
            mailboxes,
            arrived: HashMap::new(),
            took_others: false,
            spare: Vec::new(),
        }
    }

    pub(crate) fn ranks(&self) -> u32 {
        u32::try_from(self.mailboxes.boxes.len()).expect("the world was made for a number of ranks")
    }

    pub(crate) fn abort(&self) -> &Abort {
        self.mailboxes.abort()
    }

    pub(crate) fn begin_step(&mut self, attempt: Attempt) {
        self.mailboxes.abort.begin_step(attempt);
        self.continue_in(attempt, [attempt; 2]);
    }

    /// Sends and takes the messages of `attempt` from now on. The rank is in the attempts `alive`, the first and the last.
    pub(crate) fn continue_in(&mut self, attempt: Attempt, alive: [Attempt; 2]) {
        self.attempt = attempt;
        let [first, _] = alive;
        if std::mem::replace(&mut self.alive, alive)[0] != first {
            self.arrived.retain(|(sent_in, ..), _| *sent_in >= first);
        }
    }

    pub(crate) fn send(&mut self, to: WorldRank, tag: Tag, payload: Payload) {
        let message = self.envelope(tag, payload);
        self.mailboxes.deliver(to, message);
    }

    pub(crate) fn envelope(&self, tag: Tag, payload: Payload) -> Message {
        let now = Instant::now();
        Message { from: self.rank, attempt: self.attempt, tag, payload, sent: now, arrived: now }
    }

    pub(crate) fn try_take(&mut self, from: WorldRank, tag: Tag) -> Option<Message> {
        // Lock the mailbox only if the message has not been sorted already.
        let key = (self.attempt, from, tag);
        if let Some(message) = self.arrived.remove(&key) {
            return Some(message);
        }
        self.sort(key);
        self.arrived.remove(&key)
    }

    pub(crate) fn has_arrived(&mut self, from: WorldRank, tag: Tag) -> bool {
        let key = (self.attempt, from, tag);
        if !self.arrived.contains_key(&key) {
            self.sort(key);
        }
        self.arrived.contains_key(&key)
    }

    /// Takes all messages out of the mailbox. One of them is wanted.
    fn sort(&mut self, key: (Attempt, WorldRank, Tag)) {
        self.mailboxes.boxes[self.rank.index()].take_into(&mut self.spare);
        for message in self.spare.drain(..).filter(|message| message.attempt >= self.alive[0]) {
            let own = (message.attempt, message.from, message.tag);
            self.took_others |= own != key;
            let earlier = self.arrived.insert(own, message);
            debug_assert!(earlier.is_none(), "two messages {own:?}");
        }
    }

    pub(crate) fn wait(&mut self, until: Instant) -> Waited {
        self.wait_in(self.alive[1], until)
    }

    pub(crate) fn wait_in_attempt(&mut self, until: Instant) -> Waited {
        self.wait_in(self.attempt, until)
    }

    /// Waits until something fails in an attempt or before, or until the wait ends otherwise.
    fn wait_in(&mut self, attempt: Attempt, until: Instant) -> Waited {
        let must_stop = || self.mailboxes.abort.is_raised_in(attempt);
        if std::mem::take(&mut self.took_others) && !must_stop() {
            return Waited::Arrived;
        }
        let mailbox = &self.mailboxes.boxes[self.rank.index()];
        match mailbox.wait(until, must_stop) {
            Woken::Arrived => Waited::Arrived,
            Woken::TimedOut => Waited::TimedOut,
            Woken::Stopped => Waited::Aborted,
        }
    }

    pub(crate) fn fail(&self, error: StepError) {
        self.abort().raise_from(self.attempt, error);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use pipewright_schedule::StageIndex;

    use super::*;
    use crate::failure::Cause;
    use crate::ids::StepNumber;

    #[test]
    fn a_raised_flag_wakes_a_rank_that_waits() {
        let mut ends = world(1);
        let mut endpoint = ends.remove(0);
        let abort = endpoint.abort().clone();
        let rank = endpoint.rank;
        let waits = std::thread::spawn(move || endpoint.wait(Instant::now() + Duration::from_secs(60)));
        // The rank sleeps by then.
        std::thread::sleep(Duration::from_millis(100));
        let start = Instant::now();
        abort.raise(StepError {
            rank,
            step: StepNumber::default(),
            action: None,
            cause: Cause::LostPeer { peer: rank },
        });
        assert_eq!(waits.join().expect("no panic"), Waited::Aborted);
        assert!(start.elapsed() < Duration::from_secs(30));
    }

    #[test]
    fn a_failure_of_a_later_attempt_ends_no_wait_of_an_earlier_one() {
        let mut endpoint = world(1).remove(0);
        let [earlier, later] = [1, 2].map(Attempt::new);
        endpoint.continue_in(earlier, [earlier, later]);
        let cause = Cause::LostPeer { peer: endpoint.rank };
        let error = StepError { rank: endpoint.rank, step: StepNumber::default(), action: None, cause };
        endpoint.abort().raise_from(later, error);
        let soon = || Instant::now() + Duration::from_millis(20);
        assert_eq!(endpoint.wait(soon()), Waited::Aborted);
        assert_eq!(endpoint.wait_in_attempt(soon()), Waited::TimedOut);
    }

    #[test]
    fn a_message_that_comes_with_a_later_wanted_one_ends_the_next_wait() {
        let mut ends = world(2);
        let (mut sender, mut receiver) = (ends.remove(1), ends.remove(0));
        let [first, second] = [0, 1].map(|stage| Tag::Statistics { stage: StageIndex::new(stage) });
        let from = sender.rank;
        assert!(receiver.try_take(from, first).is_none());
        for tag in [first, second] {
            sender.send(receiver.rank, tag, Payload::Bytes(Vec::new().into()));
        }
        assert!(receiver.try_take(from, second).is_some());
        assert_eq!(receiver.wait(Instant::now() + Duration::from_millis(50)), Waited::Arrived);
        assert!(receiver.try_take(from, first).is_some());
        assert_eq!(receiver.wait(Instant::now() + Duration::from_millis(50)), Waited::TimedOut);
    }
}
