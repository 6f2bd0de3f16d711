//! Runs a program on a communicator, without tensors and without time.

use std::collections::VecDeque;

use crate::action::Action;
use crate::action_set::ActionSet;
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
}

/// A queue of operations with the ranks and directions that it serves.
struct Stream {
    key: QueueKey,
    operations: VecDeque<Operation>,
    /// The eager messages that have arrived and that no receive has taken, by sender. Only for receives.
    arrived: Vec<(Rank, usize)>,
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

    /// Returns the first operation of `rank` with the same direction and peer as the counterpart of
    /// `operation`.
    pub(super) fn counterpart(&self, rank: Rank, operation: &Operation) -> Option<Given> {
        self.find(operation.peer, |other| other.peer == rank && other.direction != operation.direction)
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
        let operation = Operation { action, position, peer, direction, group: state.group };
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
        if self.next(rank).is_some_and(|(_, action)| self.blocker(action).is_none()) {
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
            Direction::In if stream.has_arrived(operation.peer) => true,
            _ => self.running_counterpart(rank, operation).is_some_and(|(stream, other)| {
                match other.direction {
                    // A message that arrived earlier comes first.
                    Direction::In => !stream.has_arrived(rank),
                    // An eager send completes by itself.
                    Direction::Out => !self.communicator.sends.sends_at_once(other.action),
                }
            }),
        }
    }

    /// Returns the counterpart of `operation` of `rank` with its stream, if it is in a group that runs.
    fn running_counterpart(&self, rank: Rank, operation: &Operation) -> Option<(&Stream, &Operation)> {
        let is_it = |other: &&Operation| other.peer == rank && other.direction != operation.direction;
        let mut streams = self.ranks[operation.peer.index()].streams.iter();
        streams.find_map(|stream| Some((stream, stream.running().find(is_it)?)))
    }

    /// Completes the operation `at` of a stream, and its counterpart.
    fn complete(&mut self, rank: Rank, index: usize, at: usize) {
        let streams = self.communicator.streams;
        let stream = &mut self.ranks[rank.index()].streams[index];
        let Some(operation) = stream.operations.remove(at) else { return };
        self.completed.insert(operation.action);
        let took_arrived = operation.direction == Direction::In && stream.take_arrived(operation.peer);
        if operation.direction == Direction::Out && self.communicator.sends.sends_at_once(operation.action) {
            let peer = &mut self.ranks[operation.peer.index()];
            peer.stream(streams, rank, Direction::In).add_arrived(rank);
        } else if !took_arrived {
            let state = &mut self.ranks[operation.peer.index()];
            let counterpart = state.stream(streams, rank, operation.direction.opposite());
            if let Some(action) = counterpart.remove_first(rank, operation.direction.opposite()) {
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
            self.streams.push(Stream { key, operations: VecDeque::new(), arrived: Vec::new() });
            self.streams.len() - 1
        });
        &mut self.streams[index]
    }
}

impl Stream {
    /// Returns the operations of the first group, which run at the same time.
    fn running(&self) -> impl Iterator<Item = &Operation> {
        let group = self.operations.front().map(|operation| operation.group);
        self.operations.iter().take_while(move |operation| Some(operation.group) == group)
    }

    fn has_arrived(&self, sender: Rank) -> bool {
        self.arrived.iter().any(|&(rank, count)| rank == sender && count > 0)
    }

    fn add_arrived(&mut self, sender: Rank) {
        match self.arrived.iter_mut().find(|(rank, _)| *rank == sender) {
            Some((_, count)) => *count += 1,
            None => self.arrived.push((sender, 1)),
        }
    }

    /// Takes an eager message of `sender`, and returns whether there was one.
    fn take_arrived(&mut self, sender: Rank) -> bool {
        let arrived = self.arrived.iter_mut().find(|(rank, count)| *rank == sender && *count > 0);
        arrived.map(|(_, count)| *count -= 1).is_some()
    }

    /// Removes the first operation with `peer` in `direction`.
    fn remove_first(&mut self, peer: Rank, direction: Direction) -> Option<Action> {
        let is_it = |operation: &Operation| operation.peer == peer && operation.direction == direction;
        let at = self.operations.iter().position(is_it)?;
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
