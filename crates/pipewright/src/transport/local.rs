//! Ranks as threads of one process: a mailbox a rank, messages moved by value.

use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use pipewright_schedule::Rank;

use super::Waited;
use super::message::{Message, Payload, Tag};
use crate::failure::{Abort, StepError};

/// How often a rank offers its core to others before it parks.
const YIELDS: u32 = 32;

/// Mailboxes of all ranks, shared by their endpoints.
pub(crate) struct Post {
    boxes: Vec<Mailbox>,
    abort: Abort,
}

#[derive(Default)]
struct Mailbox {
    queue: Mutex<Vec<Message>>,
    bell: Condvar,
}

impl Mailbox {
    fn lock(&self) -> MutexGuard<'_, Vec<Message>> {
        // A panic cannot leave the queue half changed: nothing under the lock runs foreign code.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Post {
    pub(crate) fn new(ranks: u32) -> Arc<Self> {
        let boxes = (0..ranks).map(|_| Mailbox::default()).collect();
        Arc::new(Self { boxes, abort: Abort::default() })
    }

    /// Puts a message into a rank's mailbox and rings.
    pub(crate) fn deliver(&self, to: Rank, message: Message) {
        let mailbox = &self.boxes[to.index()];
        mailbox.lock().push(message);
        mailbox.bell.notify_one();
    }

    pub(crate) fn abort(&self) -> &Abort {
        &self.abort
    }

    pub(crate) fn fail(&self, error: StepError) {
        self.abort.raise(error);
        self.wake_all();
    }

    /// As [`Post::fail`], for what another process tells.
    #[cfg(feature = "mpi")]
    pub(crate) fn fail_elsewhere(&self, error: StepError) {
        if self.abort.raise_told(error) {
            self.wake_all();
        }
    }

    fn wake_all(&self) {
        for mailbox in &self.boxes {
            // Taking the lock orders the flag before the bell: a rank cannot look at the flag, miss it, and then
            // sleep through the bell.
            drop(mailbox.lock());
            mailbox.bell.notify_all();
        }
    }
}

/// A rank's mailbox and its way to the others'.
pub struct LocalEndpoint {
    rank: Rank,
    step: u64,
    post: Arc<Post>,
    /// Sorted mail. The step is in the key, since a neighbour may be a step ahead.
    arrived: HashMap<(u64, Rank, Tag), Message>,
    /// Emptied mailbox, kept for its allocation.
    spare: Vec<Message>,
}

/// One endpoint a rank.
pub(crate) fn world(ranks: u32) -> Vec<LocalEndpoint> {
    let post = Post::new(ranks);
    (0..ranks).map(|rank| LocalEndpoint::new(Rank::new(rank), post.clone())).collect()
}

impl LocalEndpoint {
    pub(crate) fn new(rank: Rank, post: Arc<Post>) -> Self {
        Self { rank, step: 0, post, arrived: HashMap::new(), spare: Vec::new() }
    }

    pub(crate) fn rank(&self) -> Rank {
        self.rank
    }

    pub(crate) fn ranks(&self) -> u32 {
        u32::try_from(self.post.boxes.len()).expect("the world was made for a number of ranks")
    }

    pub(crate) fn abort(&self) -> &Abort {
        self.post.abort()
    }

    pub(crate) fn begin_step(&mut self, step: u64) {
        self.step = step;
        self.post.abort.begin_step(step);
        self.arrived.retain(|(sent_in, ..), _| *sent_in >= step);
    }

    pub(crate) fn send(&mut self, to: Rank, tag: Tag, payload: Payload) {
        let message = self.envelope(tag, payload);
        self.post.deliver(to, message);
    }

    pub(crate) fn envelope(&self, tag: Tag, payload: Payload) -> Message {
        Message { from: self.rank, step: self.step, tag, payload, sent: Instant::now() }
    }

    pub(crate) fn try_take(&mut self, from: Rank, tag: Tag) -> Option<Message> {
        let key = (self.step, from, tag);
        // The mailbox is locked only when what has been sorted already does not serve.
        if let Some(message) = self.arrived.remove(&key) {
            return Some(message);
        }
        std::mem::swap(&mut self.spare, &mut self.post.boxes[self.rank.index()].lock());
        for message in self.spare.drain(..).filter(|message| message.step >= self.step) {
            self.arrived.insert((message.step, message.from, message.tag), message);
        }
        self.arrived.remove(&key)
    }

    pub(crate) fn wait(&mut self, until: Instant) -> Waited {
        let mailbox = &self.post.boxes[self.rank.index()];
        // A neighbour that is nearly done answers within microseconds, and waking a parked thread takes longer.
        for _ in 0..YIELDS {
            if self.post.abort.is_raised() {
                return Waited::Aborted;
            }
            if !mailbox.lock().is_empty() {
                return Waited::Arrived;
            }
            std::thread::yield_now();
        }
        let mut queue = mailbox.lock();
        loop {
            if self.post.abort.is_raised() {
                return Waited::Aborted;
            }
            if !queue.is_empty() {
                return Waited::Arrived;
            }
            let Some(left) = until.checked_duration_since(Instant::now()) else { return Waited::TimedOut };
            queue = mailbox.bell.wait_timeout(queue, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    pub(crate) fn fail(&self, error: StepError) {
        self.post.fail(error);
    }
}
