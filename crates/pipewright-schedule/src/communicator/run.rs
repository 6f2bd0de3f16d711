//! Runs a program on a communicator, without tensors and without time.

use std::collections::{BTreeSet, VecDeque};

use crate::action::Action;
use crate::action_set::ActionSet;
use crate::batch_gate::BatchGate;
use crate::communicator::model::{Communicator, Groups, QueueKey, Streams};
use crate::ids::Rank;
use crate::neighbours::Neighbours;
use crate::placement::Placement;
use crate::schedule::Program;
use crate::transfer::Transfer;

/// The state of all ranks.
pub(super) struct Run<'a> {
    program: &'a Program,
    communicator: &'a Communicator,
    neighbours: Neighbours,
    ranks: Vec<RankState>,
    /// The receives and sends that have completed. In buffered mode, the receives whose message has been
    /// sent.
    completed: ActionSet,
    /// What is left of each batch, if there are several.
    batches: Option<BatchGate>,
    /// The ranks that may be able to advance.
    ready: Vec<Rank>,
}

/// One rank: its place in its row, and the operations that it has given to the communicator.
#[derive(Default)]
struct RankState {
    /// The number of actions that have been passed.
    passed: usize,
    /// The number of the group to which the next operation belongs.
    group: usize,
    is_ready: bool,
    streams: Vec<Stream>,
    /// How many operations have been given for each peer and direction.
    given: Vec<(Rank, Direction, usize)>,
}

/// A queue of operations with the ranks and directions that it serves.
struct Stream {
    key: QueueKey,
    operations: VecDeque<Operation>,
    /// The eager messages that have arrived and that no receive has taken: the sender, and the message's number
    /// among those of the sender. Only for receives.
    arrived: BTreeSet<(Rank, usize)>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Direction {
    Out,
    In,
}

/// A send or a receive that has been given to the communicator and has not completed.
#[derive(Clone, Copy)]
pub(super) struct Operation {
    pub(super) action: Action,
    pub(super) position: usize,
    pub(super) peer: Rank,
    direction: Direction,
    group: usize,
    /// Its number among the operations with this peer and direction. It meets the operation of the peer that has
    /// the same number.
    number: usize,
}

/// An operation in its stream.
pub(super) struct Given {
    pub(super) operation: Operation,
    /// The first operation of the group that runs, if that is another group.
    pub(super) behind: Option<Operation>,
}

impl<'a> Run<'a> {
    /// Runs all ranks until none can advance. Every message has its two ends, on different ranks.
    pub(super) fn execute(program: &'a Program, communicator: &'a Communicator) -> Self {
        let ranks = program.ranks() as usize;
        let mut run = Self {
            program,
            communicator,
            neighbours: Neighbours::of(program.placement()),
            ranks: std::iter::repeat_with(RankState::default).take(ranks).collect(),
            completed: ActionSet::for_program(program),
            batches: BatchGate::over(program.numbering(), program.rows()),
            ready: Vec::new(),
        };
        program.placement().all_ranks().rev().for_each(|rank| run.wake(rank));
        while let Some(rank) = run.ready.pop() {
            run.ranks[rank.index()].is_ready = false;
            run.pass_actions(rank);
            run.run_streams(rank);
        }
        run
    }

    pub(super) fn placement(&self) -> &'a Placement {
        self.program.placement()
    }

    /// Returns the next action of `rank` with its position; `None` at the end of its row.
    pub(super) fn next(&self, rank: Rank) -> Option<(usize, Action)> {
        let passed = self.ranks[rank.index()].passed;
        self.program.row(rank).get(passed).map(|&action| (passed, action))
    }

    /// Returns the first operation of `rank` that has not completed.
    pub(super) fn first_left(&self, rank: Rank) -> Option<Operation> {
        self.ranks[rank.index()].streams.iter().find_map(|stream| stream.operations.front().copied())
    }

    /// Returns the operation of `action` on `rank`, if it has been given and has not completed.
    pub(super) fn given(&self, rank: Rank, action: Action) -> Option<Given> {
        self.find(rank, |operation| operation.action == action)
    }

    /// Returns the operation that `operation` of `rank` meets.
    pub(super) fn counterpart(&self, rank: Rank, operation: &Operation) -> Option<Given> {
        self.find(operation.peer, |other| other.meets(rank, operation))
    }

    fn find(&self, rank: Rank, is_wanted: impl Fn(&Operation) -> bool) -> Option<Given> {
        self.ranks[rank.index()].streams.iter().find_map(|stream| {
            let operation = *stream.operations.iter().find(|operation| is_wanted(operation))?;
            let front = *stream.operations.front()?;
            Some(Given { operation, behind: (front.group != operation.group).then_some(front) })
        })
    }

    /// Returns the message that `rank` waits for at its next action; `None` if it can pass.
    pub(super) fn blocker(&self, action: Action) -> Option<Action> {
        let is_missing = |message: &Action| !self.completed.contains(*message);
        match action {
            Action::WaitSendForward { stage, microbatch } => {
                Some(Action::SendForward { stage, microbatch }).filter(is_missing)
            }
            Action::WaitSendBackward { stage, microbatch } => {
                Some(Action::SendBackward { stage, microbatch }).filter(is_missing)
            }
            _ => action.parts().find_map(|part| self.neighbours.receive_for(part).filter(is_missing)),
        }
    }

    /// Returns the batch whose update `action` waits for, and a rank that has not ended it; `None` if it waits for none.
    pub(super) fn awaited_update(&self, action: Action) -> Option<(u32, Rank)> {
        let gate = self.batches.as_ref()?;
        let batch = gate.closed_for(action)?;
        Some((batch, gate.behind(batch)?))
    }

    fn can_pass(&self, action: Action) -> bool {
        self.blocker(action).is_none() && self.awaited_update(action).is_none()
    }

    fn wake(&mut self, rank: Rank) {
        let state = &mut self.ranks[rank.index()];
        if !state.is_ready {
            state.is_ready = true;
            self.ready.push(rank);
        }
    }

    /// Moves `rank` along its row until an action has to wait, and gives its sends and receives to the
    /// communicator.
    fn pass_actions(&mut self, rank: Rank) {
        while let Some((position, action)) = self.next(rank) {
            if self.blocker(action).is_some() {
                return;
            }
            if let Some(gate) = &mut self.batches {
                if let Some(batch) = gate.closed_for(action) {
                    gate.wait(rank, batch);
                    return;
                }
                let mut woken = Vec::new();
                gate.computed(rank, action, |_, ranks| woken.extend(ranks));
                woken.into_iter().for_each(|rank| self.wake(rank));
            }
            let is_operation = self.give(rank, position, action);
            let state = &mut self.ranks[rank.index()];
            state.passed += 1;
            if !is_operation || self.communicator.groups == Groups::Single {
                state.group += 1;
            }
        }
    }

    /// Gives `action` to the communicator, and returns whether it is a send or a receive.
    fn give(&mut self, rank: Rank, position: usize, action: Action) -> bool {
        let direction = match action {
            Action::SendForward { .. } | Action::SendBackward { .. } => Direction::Out,
            Action::RecvForward { .. } | Action::RecvBackward { .. } => Direction::In,
            _ => return false,
        };
        let Some(peer) = self.neighbours.peer(action) else { return false };
        if self.communicator.streams == Streams::Buffered {
            self.deliver(action, peer, direction);
            return true;
        }
        let state = &mut self.ranks[rank.index()];
        let number = state.next_number(peer, direction);
        let operation = Operation { action, position, peer, direction, group: state.group, number };
        state.stream(self.communicator.streams, peer, direction).operations.push_back(operation);
        true
    }

    /// Completes a send and its receive at once.
    fn deliver(&mut self, action: Action, peer: Rank, direction: Direction) {
        if direction == Direction::Out {
            self.completed.insert(action);
            if let Some(receive) = Transfer::other_end(action) {
                self.completed.insert(receive);
            }
            self.wake(peer);
        }
    }

    /// Completes the operations of `rank` that run and whose counterpart runs.
    fn run_streams(&mut self, rank: Rank) {
        for index in 0..self.ranks[rank.index()].streams.len() {
            while let Some(at) = self.completable(rank, index) {
                self.complete(rank, index, at);
            }
        }
        if self.next(rank).is_some_and(|(_, action)| self.can_pass(action)) {
            self.wake(rank);
        }
    }

    /// Returns the index of an operation in the running group of a stream that can complete.
    fn completable(&self, rank: Rank, index: usize) -> Option<usize> {
        let stream = &self.ranks[rank.index()].streams[index];
        let mut running = stream.running().enumerate();
        running.find_map(|(at, operation)| self.can_complete(rank, stream, operation).then_some(at))
    }

    fn can_complete(&self, rank: Rank, stream: &Stream, operation: &Operation) -> bool {
        match operation.direction {
            Direction::Out if self.communicator.sends.sends_at_once(operation.action) => true,
            Direction::In if stream.arrived.contains(&(operation.peer, operation.number)) => true,
            _ => self.running_counterpart(rank, operation).is_some_and(|other| {
                // An eager send completes by itself.
                other.direction == Direction::In || !self.communicator.sends.sends_at_once(other.action)
            }),
        }
    }

    /// Returns the operation that `operation` of `rank` meets, if it is in a group that runs.
    fn running_counterpart(&self, rank: Rank, operation: &Operation) -> Option<&Operation> {
        let mut streams = self.ranks[operation.peer.index()].streams.iter();
        streams.find_map(|stream| stream.running().find(|other| other.meets(rank, operation)))
    }

    /// Completes the operation `at` of a stream, and its counterpart.
    fn complete(&mut self, rank: Rank, index: usize, at: usize) {
        let streams = self.communicator.streams;
        let stream = &mut self.ranks[rank.index()].streams[index];
        let Some(operation) = stream.operations.remove(at) else { return };
        self.completed.insert(operation.action);
        let took_arrived = operation.direction == Direction::In
            && stream.arrived.remove(&(operation.peer, operation.number));
        if operation.direction == Direction::Out && self.communicator.sends.sends_at_once(operation.action) {
            let peer = &mut self.ranks[operation.peer.index()];
            peer.stream(streams, rank, Direction::In).arrived.insert((rank, operation.number));
        } else if !took_arrived {
            let state = &mut self.ranks[operation.peer.index()];
            let counterpart = state.stream(streams, rank, operation.direction.opposite());
            if let Some(action) = counterpart.remove(rank, &operation) {
                self.completed.insert(action);
            }
        }
        self.wake(operation.peer);
    }
}

impl RankState {
    /// Returns the stream of the operations with `peer` in `direction`.
    fn stream(&mut self, streams: Streams, peer: Rank, direction: Direction) -> &mut Stream {
        let key = streams.key(peer, direction == Direction::Out);
        let index = self.streams.iter().position(|stream| stream.key == key).unwrap_or_else(|| {
            self.streams.push(Stream { key, operations: VecDeque::new(), arrived: BTreeSet::new() });
            self.streams.len() - 1
        });
        &mut self.streams[index]
    }

    /// Returns the number of the next operation with `peer` in `direction`, and counts it.
    fn next_number(&mut self, peer: Rank, direction: Direction) -> usize {
        let is_it = |given: &&mut (Rank, Direction, usize)| (given.0, given.1) == (peer, direction);
        if let Some((.., count)) = self.given.iter_mut().find(is_it) {
            *count += 1;
            return *count - 1;
        }
        self.given.push((peer, direction, 1));
        0
    }
}

impl Operation {
    /// Returns whether this operation, which is not of `rank`, is the other end of `operation` of `rank`.
    fn meets(&self, rank: Rank, operation: &Operation) -> bool {
        self.peer == rank && self.direction != operation.direction && self.number == operation.number
    }
}

impl Stream {
    /// Returns the operations of the first group, which run at the same time.
    fn running(&self) -> impl Iterator<Item = &Operation> {
        let group = self.operations.front().map(|operation| operation.group);
        self.operations.iter().take_while(move |operation| Some(operation.group) == group)
    }

    /// Removes the operation that `operation` of `rank` meets.
    fn remove(&mut self, rank: Rank, operation: &Operation) -> Option<Action> {
        let at = self.operations.iter().position(|other| other.meets(rank, operation))?;
        self.operations.remove(at).map(|operation| operation.action)
    }
}

impl Direction {
    fn opposite(self) -> Self {
        match self {
            Self::Out => Self::In,
            Self::In => Self::Out,
        }
    }
}
