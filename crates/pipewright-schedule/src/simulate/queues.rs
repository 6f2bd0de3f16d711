//! The queues of a communicator in the timed simulation: when each message moves, and what waits in line.
//!
//! Rules, after the model of [`crate::communicator`]: (1) a rank gives a send or a receive to its queue when
//! it reaches it, and continues; (2) a queue runs one group of operations at a time, in the order of the row,
//! and a group begins when the group before it has ended; (3) a message of a rendezvous moves once both ends
//! run and its link is free: it occupies the link for its bytes divided by the bandwidth and arrives after the
//! latency, and both ends end with the arrival; (4) an eager send moves once it runs and its link is free,
//! before the other sends of its group, and ends when its bytes have left; its receive ends with the arrival,
//! or as soon as it runs if that is later.
//!
//! The program is sound on the communicator, so the receive of a message is the one that meets its send, and
//! every time is a maximum of sums of earlier times. The order in which ranks are visited does not matter.
//! Time: linear in the number of messages.

use std::collections::{HashMap, VecDeque};

use crate::action::Action;
use crate::communicator::{Communicator, Groups, QueueKey};
use crate::ids::Rank;
use crate::simulate::boundary_tensors::Arrival;
use crate::simulate::links::{Links, Transit};
use crate::timeline::QueueWait;
use crate::transfer::Transfer;

/// A send or a receive, with its message.
#[derive(Debug, Clone, Copy)]
pub(super) struct Operation {
    pub(super) rank: Rank,
    pub(super) action: Action,
    pub(super) transfer: Transfer,
    /// The time at which the rank gives it to the communicator.
    pub(super) given: f64,
    /// How long its message occupies the link, and how long it travels after that.
    pub(super) cost: (f64, f64),
    /// The index of its event.
    pub(super) event: usize,
}

/// The end of an operation.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ended {
    pub(super) operation: Operation,
    /// When the operation occupies its link: the times of its event.
    pub(super) times: (f64, f64),
    /// When its tensor was given to the communicator, and when it arrives.
    pub(super) arrival: Arrival,
}

/// The queues of all ranks.
pub(super) struct Queues<'a> {
    communicator: &'a Communicator,
    ranks: Vec<RankQueues>,
    queues: Vec<Queue>,
    links: Links,
    /// The messages with one end that has run, by their receives.
    halfway: HashMap<Action, Half>,
    /// The queues whose next group may begin.
    idle: Vec<usize>,
    ended: Vec<Ended>,
    waits: Vec<QueueWait>,
    /// The operations of a group that begins; empty between groups.
    begun: Vec<Running>,
}

/// The queues of one rank.
#[derive(Clone, Default)]
struct RankQueues {
    /// The number of the group to which the next operation belongs.
    group: usize,
    /// The key of each queue, and its index among the queues of all ranks.
    queues: Vec<(QueueKey, usize)>,
}

#[derive(Default)]
struct Queue {
    /// The operations that do not run yet, with the numbers of their groups.
    waiting: VecDeque<(usize, Operation)>,
    /// The number of operations of the running group that have not ended.
    running: usize,
    /// The time at which all earlier groups have ended.
    free: f64,
    /// The operation that ended last, with its end.
    last: Option<(Action, f64)>,
}

/// An operation that runs.
#[derive(Clone, Copy)]
struct Running {
    queue: usize,
    since: f64,
    operation: Operation,
}

/// The state of a message if one of its ends has run.
enum Half {
    /// This end runs, and waits for the other one.
    Waits(Running),
    /// It was sent without its receive.
    Sent { start: f64, arrival: Arrival },
}

impl<'a> Queues<'a> {
    pub(super) fn new(communicator: &'a Communicator, ranks: usize) -> Self {
        Self {
            communicator,
            ranks: vec![RankQueues::default(); ranks],
            queues: Vec::new(),
            links: Links::default(),
            halfway: HashMap::new(),
            idle: Vec::new(),
            ended: Vec::new(),
            waits: Vec::new(),
            begun: Vec::new(),
        }
    }

    pub(super) fn communicator(&self) -> &Communicator {
        self.communicator
    }

    /// Returns whether sends and receives that follow each other start together.
    pub(super) fn are_grouped(&self) -> bool {
        self.communicator.groups == Groups::Consecutive
    }

    /// Appends `operation` to its queue. It runs with [`Queues::run`] at the earliest.
    pub(super) fn give(&mut self, operation: Operation) {
        let Transfer { send, sender, receiver, .. } = operation.transfer;
        let is_send = operation.action == send;
        let peer = if is_send { receiver } else { sender };
        let key = self.communicator.streams.key(peer, is_send);
        let rank = &mut self.ranks[operation.rank.index()];
        let known = rank.queues.iter().find(|(known, _)| *known == key).map(|&(_, index)| index);
        let index = known.unwrap_or_else(|| {
            rank.queues.push((key, self.queues.len()));
            self.queues.push(Queue::default());
            self.queues.len() - 1
        });
        self.queues[index].waiting.push_back((rank.group, operation));
        if self.communicator.groups == Groups::Single {
            rank.group += 1;
        }
    }

    /// Ends the group of `rank`, because the rank has reached an action that is not a send or a receive.
    pub(super) fn end_group(&mut self, rank: Rank) {
        self.ranks[rank.index()].group += 1;
    }

    /// Runs what can run after `rank` has given operations, and returns the operations that end.
    pub(super) fn run(&mut self, rank: Rank) -> Vec<Ended> {
        self.idle.extend(self.ranks[rank.index()].queues.iter().map(|&(_, index)| index));
        while let Some(queue) = self.idle.pop() {
            self.begin_group(queue);
        }
        std::mem::take(&mut self.ended)
    }

    /// Returns the operations that have waited in line.
    pub(super) fn into_waits(self) -> Vec<QueueWait> {
        self.waits
    }

    /// Begins the next group of a queue if its group has ended.
    fn begin_group(&mut self, index: usize) {
        let queue = &mut self.queues[index];
        let Some(&(group, _)) = queue.waiting.front().filter(|_| queue.running == 0) else { return };
        let mut begun = std::mem::take(&mut self.begun);
        while let Some((_, operation)) = queue.waiting.pop_front_if(|(other, _)| *other == group) {
            begun.push(Running { queue: index, since: operation.given.max(queue.free), operation });
        }
        queue.running = begun.len();
        self.note_waits(index, &begun);
        let communicator = self.communicator;
        let is_eager = |running: &&Running| {
            let Operation { action, transfer, .. } = running.operation;
            action == transfer.send && communicator.sends.sends_at_once(action)
        };
        begun.iter().filter(is_eager).for_each(|&send| self.send_at_once(send));
        begun.iter().filter(|one| !is_eager(one)).for_each(|&operation| self.meet(operation));
        begun.clear();
        self.begun = begun;
    }

    fn note_waits(&mut self, index: usize, begun: &[Running]) {
        let Some((behind, until)) = self.queues[index].last else { return };
        let waits = begun.iter().filter(|running| running.operation.given < until);
        self.waits.extend(waits.map(|Running { operation, .. }| QueueWait {
            rank: operation.rank,
            action: operation.action,
            behind,
            from: operation.given,
            until,
        }));
    }

    /// Sends an eager message.
    fn send_at_once(&mut self, send: Running) {
        let operation = send.operation;
        let Transit { start, left, arrival } = self.occupy_link(&operation, send.since);
        let arrival = Arrival { issued: operation.given, at: arrival };
        self.end(send, (start, left), arrival, left);
        match self.halfway.remove(&operation.transfer.receive) {
            Some(Half::Waits(receive)) => self.receive_sent(receive, start, arrival),
            _ => _ = self.halfway.insert(operation.transfer.receive, Half::Sent { start, arrival }),
        }
    }

    /// Moves the message of an operation if its other end runs too, or has sent it.
    fn meet(&mut self, one: Running) {
        let receive = one.operation.transfer.receive;
        match self.halfway.remove(&receive) {
            None => _ = self.halfway.insert(receive, Half::Waits(one)),
            Some(Half::Sent { start, arrival }) => self.receive_sent(one, start, arrival),
            Some(Half::Waits(other)) => {
                let since = one.since.max(other.since);
                let Transit { start, arrival: at, .. } = self.occupy_link(&one.operation, since);
                let is_send = one.operation.action != receive;
                let send = if is_send { one.operation } else { other.operation };
                for end in [one, other] {
                    self.end(end, (start, at), Arrival { issued: send.given, at }, at);
                }
            }
        }
    }

    /// Ends the receive of a message that was sent at `start` without it.
    fn receive_sent(&mut self, receive: Running, start: f64, arrival: Arrival) {
        let at = arrival.at.max(receive.since);
        self.end(receive, (start.max(receive.since), at), Arrival { at, ..arrival }, at);
    }

    /// Puts a message on its link, at `ready` at the earliest.
    fn occupy_link(&mut self, operation: &Operation, ready: f64) -> Transit {
        let Operation { transfer, cost, .. } = *operation;
        self.links.occupy((transfer.sender, transfer.receiver), cost, ready)
    }

    /// Ends an operation, whose queue is free of it from `free` on.
    fn end(&mut self, running: Running, times: (f64, f64), arrival: Arrival, free: f64) {
        let queue = &mut self.queues[running.queue];
        if queue.last.is_none_or(|(_, last)| last <= free) {
            queue.last = Some((running.operation.action, free));
        }
        queue.free = queue.free.max(free);
        queue.running -= 1;
        if queue.running == 0 {
            self.idle.push(running.queue);
        }
        self.ended.push(Ended { operation: running.operation, times, arrival });
    }
}
