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
use crate::costs::TransferCost;
use crate::ids::Rank;
use crate::simulate::boundary_tensors::Arrival;
use crate::simulate::tape::{Links, Moment, Tape, Transit};
use crate::timeline::QueueWait;
use crate::transfer::Transfer;

/// A send or a receive, with its message.
#[derive(Debug, Clone, Copy)]
pub(super) struct Operation {
    pub(super) rank: Rank,
    pub(super) action: Action,
    pub(super) transfer: Transfer,
    /// The time at which the rank gives it to the communicator.
    pub(super) given: Moment,
    pub(super) cost: TransferCost,
    /// The index of its event.
    pub(super) event: usize,
}

/// The end of an operation.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ended {
    pub(super) operation: Operation,
    /// When the operation occupies its link: the times of its event.
    pub(super) times: [Moment; 2],
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
    /// The operations in their lines, if the tape records.
    lines: Vec<Line>,
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
    free: Moment,
    /// The time at which the operations of the running group have ended so far.
    free_of_group: Option<Moment>,
    /// The operation that ended last, with its end.
    last: Option<(Action, f64)>,
    /// The events of the group that ended last, in the order in which they ended, if the tape records.
    ended: Vec<usize>,
}

/// A send or a receive, and the operations after which it runs at the earliest.
pub(super) struct Line {
    pub(super) rank: Rank,
    pub(super) event: usize,
    pub(super) given: Moment,
    /// The events of the group before it in its queue.
    pub(super) behind: Vec<usize>,
}

/// An operation that runs.
#[derive(Clone, Copy)]
struct Running {
    queue: usize,
    since: Moment,
    operation: Operation,
}

/// The state of a message if one of its ends has run.
enum Half {
    /// This end runs, and waits for the other one.
    Waits(Running),
    /// It was sent without its receive.
    Sent { start: Moment, arrival: Arrival },
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
            lines: Vec::new(),
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
    pub(super) fn run(&mut self, tape: &mut Tape, rank: Rank) -> Vec<Ended> {
        self.idle.extend(self.ranks[rank.index()].queues.iter().map(|&(_, index)| index));
        while let Some(queue) = self.idle.pop() {
            self.begin_group(tape, queue);
        }
        std::mem::take(&mut self.ended)
    }

    /// Returns the operations that have waited in line, and what the tape needs to tell which ones wait at
    /// other costs.
    pub(super) fn into_waits(self) -> (Vec<QueueWait>, Vec<Line>) {
        (self.waits, self.lines)
    }

    /// Begins the next group of a queue if its group has ended.
    fn begin_group(&mut self, tape: &mut Tape, index: usize) {
        let queue = &mut self.queues[index];
        let Some(&(group, _)) = queue.waiting.front().filter(|_| queue.running == 0) else { return };
        let mut begun = std::mem::take(&mut self.begun);
        while let Some((_, operation)) = queue.waiting.pop_front_if(|(other, _)| *other == group) {
            let since = tape.latest(operation.rank, [operation.given, queue.free]);
            begun.push(Running { queue: index, since, operation });
        }
        (queue.running, queue.free_of_group) = (begun.len(), None);
        self.note_waits(index, &begun);
        let behind = std::mem::take(&mut self.queues[index].ended);
        if !behind.is_empty() {
            let line = |Running { operation: Operation { rank, event, given, .. }, .. }: &Running| Line {
                rank: *rank,
                event: *event,
                given: *given,
                behind: behind.clone(),
            };
            self.lines.extend(begun.iter().map(line));
        }
        let communicator = self.communicator;
        let is_eager = |running: &&Running| {
            let Operation { action, transfer, .. } = running.operation;
            action == transfer.send && communicator.sends.sends_at_once(action)
        };
        begun.iter().filter(is_eager).for_each(|&send| self.send_at_once(tape, send));
        begun.iter().filter(|one| !is_eager(one)).for_each(|&operation| self.meet(tape, operation));
        begun.clear();
        self.begun = begun;
    }

    fn note_waits(&mut self, index: usize, begun: &[Running]) {
        let Some((behind, until)) = self.queues[index].last else { return };
        let waits = begun.iter().filter(|running| running.operation.given.at < until);
        self.waits.extend(waits.map(|Running { operation, .. }| QueueWait {
            rank: operation.rank,
            action: operation.action,
            behind,
            from: operation.given.at,
            until,
        }));
    }

    /// Sends an eager message.
    fn send_at_once(&mut self, tape: &mut Tape, send: Running) {
        let operation = send.operation;
        let Transit { start, left, arrival } = self.occupy_link(tape, &operation, &[send.since]);
        let arrival = Arrival { issued: operation.given, at: arrival };
        self.end(tape, send, [start, left], arrival);
        match self.halfway.remove(&operation.transfer.receive) {
            Some(Half::Waits(receive)) => self.receive_sent(tape, receive, start, arrival),
            _ => _ = self.halfway.insert(operation.transfer.receive, Half::Sent { start, arrival }),
        }
    }

    /// Moves the message of an operation if its other end runs too, or has sent it.
    fn meet(&mut self, tape: &mut Tape, one: Running) {
        let receive = one.operation.transfer.receive;
        match self.halfway.remove(&receive) {
            None => _ = self.halfway.insert(receive, Half::Waits(one)),
            Some(Half::Sent { start, arrival }) => self.receive_sent(tape, one, start, arrival),
            Some(Half::Waits(other)) => {
                let ready = [one.since, other.since];
                let Transit { start, arrival: at, .. } = self.occupy_link(tape, &one.operation, &ready);
                let is_send = one.operation.action != receive;
                let send = if is_send { one.operation } else { other.operation };
                for end in [one, other] {
                    self.end(tape, end, [start, at], Arrival { issued: send.given, at });
                }
            }
        }
    }

    /// Ends the receive of a message that was sent at `start` without it.
    fn receive_sent(&mut self, tape: &mut Tape, receive: Running, start: Moment, arrival: Arrival) {
        let rank = receive.operation.rank;
        let at = tape.latest(rank, [arrival.at, receive.since]);
        let start = tape.latest(rank, [start, receive.since]);
        self.end(tape, receive, [start, at], Arrival { at, ..arrival });
    }

    /// Puts a message on its link, not before the latest of `ready`.
    fn occupy_link(&mut self, tape: &mut Tape, operation: &Operation, ready: &[Moment]) -> Transit {
        let Operation { transfer, cost, .. } = *operation;
        self.links.occupy(tape, (transfer.sender, transfer.receiver), cost, ready)
    }

    /// Ends an operation. Its queue is free of it from the end of its event on.
    fn end(&mut self, tape: &mut Tape, running: Running, times: [Moment; 2], arrival: Arrival) {
        let (queue, free) = (&mut self.queues[running.queue], times[1]);
        if queue.last.is_none_or(|(_, last)| last <= free.at) {
            queue.last = Some((running.operation.action, free.at));
        }
        // The first of a group cannot end before the group in front.
        let earlier = queue.free_of_group.unwrap_or(free);
        queue.free = tape.latest(running.operation.rank, [earlier, free]);
        queue.free_of_group = Some(queue.free);
        if tape.records() {
            queue.ended.push(running.operation.event);
        }
        queue.running -= 1;
        if queue.running == 0 {
            self.idle.push(running.queue);
        }
        self.ended.push(Ended { operation: running.operation, times, arrival });
    }
}
