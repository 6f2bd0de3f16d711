//! A second timed simulation, which shares no code with the crate's: the times of a program on a communicator
//! as a system of equations, each a maximum of sums, which is evaluated again until nothing changes.

use std::collections::HashMap;

use pipewright_schedule::communicator::{Communicator, Groups, Sends, Streams};
use pipewright_schedule::{Action, Program, StageIndex};

/// The times of actions and messages, in whole seconds.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Times {
    pub(crate) forward: u64,
    pub(crate) input_backward: u64,
    pub(crate) weight_backward: u64,
    pub(crate) latency: u64,
    /// How long a message from each stage occupies its link.
    pub(crate) occupied: [u64; 2],
}

/// A message: whether it is a gradient, the lower one of its stages, and its microbatch.
type Message = (bool, u32, u32);

/// A send or a receive in a row.
struct Operation {
    rank: usize,
    position: usize,
    is_send: bool,
    message: Message,
    peer: usize,
    group: usize,
}

/// The unknowns: the end of each action of each row, when its operation begins and ends, and when each message
/// starts to move, has left and arrives.
#[derive(Clone, PartialEq, Default)]
struct Solution {
    ends: HashMap<(usize, usize), u64>,
    first_halves: HashMap<(usize, usize), u64>,
    begins: HashMap<(usize, usize), u64>,
    completions: HashMap<(usize, usize), u64>,
    moves: HashMap<Message, (u64, u64, u64)>,
}

/// Returns the events of each rank: the action, its start and its end, in the order of the row.
pub(crate) fn events(
    program: &Program,
    times: Times,
    communicator: &Communicator,
) -> Vec<Vec<(String, u64, u64)>> {
    let operations = operations(program, communicator);
    let receives = operations.iter().filter(|it| !it.is_send);
    let receives = receives.map(|it| (it.message, (it.rank, it.position))).collect();
    let system = System { program, times, communicator, operations, receives };
    let mut solution = Solution::default();
    loop {
        let before = solution.clone();
        system.evaluate(&mut solution);
        if before == solution {
            return (0..program.rows().len()).map(|rank| system.events_of(rank, &solution)).collect();
        }
    }
}

struct System<'a> {
    program: &'a Program,
    times: Times,
    communicator: &'a Communicator,
    operations: Vec<Operation>,
    /// The rank and the position of the receive of each message.
    receives: HashMap<Message, (usize, usize)>,
}

impl System<'_> {
    /// Evaluates every equation once.
    fn evaluate(&self, known: &mut Solution) {
        for (rank, row) in self.program.rows().iter().enumerate() {
            for position in 0..row.len() {
                let before = if position == 0 { 0 } else { at(&known.ends, (rank, position - 1)) };
                let (first_half, end) = self.end(rank, position, before, known);
                known.first_halves.insert((rank, position), first_half);
                known.ends.insert((rank, position), end);
            }
        }
        for operation in &self.operations {
            let key = (operation.rank, operation.position);
            let begin = self.begin(operation, known);
            known.begins.insert(key, begin);
            let (_, left, arrival) = at(&known.moves, operation.message);
            let completion = if !operation.is_send {
                arrival.max(at(&known.begins, key))
            } else if self.is_eager(operation) {
                left
            } else {
                arrival
            };
            known.completions.insert(key, completion);
            if operation.is_send {
                let movement = self.movement(operation, known);
                known.moves.insert(operation.message, movement);
            }
        }
    }

    /// Returns the end of the first half of an action, and of the action.
    fn end(&self, rank: usize, position: usize, before: u64, known: &Solution) -> (u64, u64) {
        let action = self.program.rows()[rank][position];
        let mut ends = [before, before];
        for (half, part) in action.parts().enumerate() {
            let ready = needed(part).and_then(|(message, is_send)| {
                let (_, _, arrival) = *known.moves.get(&message)?;
                if is_send {
                    return Some(arrival);
                }
                Some(at(&known.completions, *self.receives.get(&message)?))
            });
            let since = if half == 0 { before } else { ends[0] };
            ends[half..].fill(since.max(ready.unwrap_or(0)) + self.duration(part));
        }
        (ends[0], ends[1])
    }

    fn duration(&self, part: Action) -> u64 {
        let Times { forward, input_backward, weight_backward, .. } = self.times;
        match part {
            Action::Forward { .. } => forward,
            Action::Backward { .. } => input_backward + weight_backward,
            Action::InputBackward { .. } => input_backward,
            Action::WeightBackward { .. } => weight_backward,
            _ => 0,
        }
    }

    /// Returns when an operation is given to its queue.
    fn given(&self, operation: &Operation, known: &Solution) -> u64 {
        let Operation { rank, position, is_send, message, .. } = *operation;
        let is_single_send = is_send && self.communicator.groups == Groups::Single;
        let row = &self.program.rows()[rank];
        let maker = (0..position).rev().find(|&at| row[at].is_compute());
        let makes_it = |at: &usize| row[*at].parts().next().and_then(made) == Some(message);
        let is_overlap = |at: &usize| row[*at].parts().count() == 2;
        match maker.filter(|at| is_single_send && is_overlap(at) && makes_it(at)) {
            Some(overlap) => at(&known.first_halves, (rank, overlap)),
            None if position == 0 => 0,
            None => at(&known.ends, (rank, position - 1)),
        }
    }

    fn begin(&self, operation: &Operation, known: &Solution) -> u64 {
        let before = self.operations.iter().filter(|other| {
            other.rank == operation.rank
                && other.group < operation.group
                && self.share_a_queue(other, operation)
        });
        let ends = before.map(|other| at(&known.completions, (other.rank, other.position)));
        ends.fold(self.given(operation, known), u64::max)
    }

    fn share_a_queue(&self, one: &Operation, other: &Operation) -> bool {
        match self.communicator.streams {
            Streams::Buffered => false,
            Streams::Edge => one.peer == other.peer && one.is_send == other.is_send,
            Streams::Pair => one.peer == other.peer,
            Streams::Rank => true,
        }
    }

    /// Returns when the message of a send starts to move, has left and arrives.
    fn movement(&self, send: &Operation, known: &Solution) -> (u64, u64, u64) {
        let mut start = at(&known.begins, (send.rank, send.position));
        if let Some(&receive) = self.receives.get(&send.message).filter(|_| !self.is_eager(send)) {
            start = start.max(at(&known.begins, receive));
        }
        let order = |it: &Operation| (it.group, !self.is_eager(it), it.position);
        let on_link = |it: &&Operation| it.is_send && (it.rank, it.peer) == (send.rank, send.peer);
        for other in self.operations.iter().filter(on_link) {
            if order(other) < order(send) {
                start = start.max(at(&known.moves, other.message).1);
            }
        }
        let (_, boundary, _) = send.message;
        let left = start + self.times.occupied[boundary.min(1) as usize];
        (start, left, left + self.times.latency)
    }

    fn is_eager(&self, send: &Operation) -> bool {
        match &self.communicator.sends {
            Sends::Rendezvous => false,
            Sends::Eager => true,
            Sends::EagerUpTo { limit, messages } => {
                let boundary = send.message.1 as usize;
                messages.get(boundary).or(messages.last()).is_some_and(|bytes| bytes <= limit)
            }
        }
    }

    fn events_of(&self, rank: usize, solution: &Solution) -> Vec<(String, u64, u64)> {
        let mut events = Vec::new();
        for (position, &action) in self.program.rows()[rank].iter().enumerate() {
            let key = (rank, position);
            let operation = self.operations.iter().find(|it| (it.rank, it.position) == key);
            if let Some(operation) = operation {
                let (start, left, arrival) = at(&solution.moves, operation.message);
                let begin = at(&solution.begins, key);
                let end = if operation.is_send && self.is_eager(operation) { left } else { arrival };
                events.push((action.to_string(), start.max(begin), end.max(begin)));
                continue;
            }
            let ends = [at(&solution.first_halves, key), at(&solution.ends, key)];
            for (part, end) in action.parts().zip(ends) {
                let is_wait = !action.is_compute();
                let before = if position == 0 { 0 } else { at(&solution.ends, (rank, position - 1)) };
                let start = if is_wait { before } else { end - self.duration(part) };
                events.push((part.to_string(), start, end));
            }
        }
        events
    }
}

fn at<K: std::hash::Hash + Eq, V: Copy + Default>(values: &HashMap<K, V>, key: K) -> V {
    values.get(&key).copied().unwrap_or_default()
}

/// Returns the message that a part of an action waits for, and whether it waits for its send.
fn needed(part: Action) -> Option<(Message, bool)> {
    let microbatch = part.microbatch()?.get();
    let before = |stage: StageIndex| stage.get().checked_sub(1);
    Some(match part {
        Action::Forward { stage, .. } => ((false, before(stage)?, microbatch), false),
        Action::Backward { stage, .. } | Action::InputBackward { stage, .. } => {
            ((true, stage.get(), microbatch), false)
        }
        Action::WaitSendForward { stage, .. } => ((false, stage.get(), microbatch), true),
        Action::WaitSendBackward { stage, .. } => ((true, before(stage)?, microbatch), true),
        _ => return None,
    })
}

/// Returns the message that carries the result of a part.
fn made(part: Action) -> Option<Message> {
    let microbatch = part.microbatch()?.get();
    match part {
        Action::Forward { stage, .. } => Some((false, stage.get(), microbatch)),
        Action::Backward { stage, .. } | Action::InputBackward { stage, .. } => {
            Some((true, stage.get().checked_sub(1)?, microbatch))
        }
        _ => None,
    }
}

fn operations(program: &Program, communicator: &Communicator) -> Vec<Operation> {
    let owner = |stage: u32| program.placement().owner(StageIndex::new(stage)).expect("a stage").index();
    let mut operations = Vec::new();
    for (rank, row) in program.rows().iter().enumerate() {
        let mut group = 0;
        for (position, &action) in row.iter().enumerate() {
            let (is_send, is_gradient, boundary, other) = match action {
                Action::SendForward { stage, .. } => (true, false, stage.get(), stage.get() + 1),
                Action::RecvForward { stage, .. } => (false, false, stage.get() - 1, stage.get() - 1),
                Action::SendBackward { stage, .. } => (true, true, stage.get() - 1, stage.get() - 1),
                Action::RecvBackward { stage, .. } => (false, true, stage.get(), stage.get() + 1),
                _ => {
                    group += 1;
                    continue;
                }
            };
            if communicator.groups == Groups::Single {
                group += 1;
            }
            let message = (is_gradient, boundary, action.microbatch().expect("of a message").get());
            operations.push(Operation { rank, position, is_send, message, peer: owner(other), group });
        }
    }
    operations
}
