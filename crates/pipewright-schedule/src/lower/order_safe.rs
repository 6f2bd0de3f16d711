//! The pass `order-safe`: orders the sends and receives of a program so that it is sound on a communicator.
//!
//! Rules: (1) a program that is sound on the communicator does not change; (2) receives without tags take the
//! order of their sends: a receive moves up to the first receive from the same rank that was sent later; (3) if
//! the program may still hang, all messages get one global order instead, in which each send is next to its
//! receive. Such a program is sound on every communicator, even if each send blocks until it is received. The
//! computations of a rank, their order, and waits for sends stay where they are.
//!
//! The global order follows the rows as far as it can. A send and its receive are appended to both rows as soon
//! as both ranks have reached them. When no rank can continue, one message moves: (a) if a rank waits for a
//! tensor that is made, its send moves up, and so does its receive; (b) otherwise the receive of a send that a
//! rank has reached moves up; (c) otherwise a receive that a rank has reached moves down to the time of its
//! send. If no rank has reached a message, the ranks wait for each other's computations, and no order of
//! messages exists.
//!
//! Time: linear in the program.

use std::collections::{BTreeMap, HashMap, VecDeque};

use crate::action::Action;
use crate::action_set::ActionSet;
use crate::communicator::{Communicator, judge};
use crate::ids::Rank;
use crate::lower::error::LowerError;
use crate::neighbours::Neighbours;
use crate::schedule::Program;
use crate::transfer::Transfer;
use crate::validate::BlockedRank;

/// Orders the messages of `program` for `communicator`.
///
/// ```
/// use pipewright_schedule::communicator::{Communicator, Streams};
/// use pipewright_schedule::csv::{parse_program, print_program};
/// use pipewright_schedule::lower::order_safe;
/// // Both ranks send before they receive.
/// let program = "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n\
///                1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1\n";
/// let communicator = Communicator { streams: Streams::Pair, ..Communicator::default() };
/// let program = order_safe(parse_program(program)?, &communicator)?;
/// let rank_1 = "1RECV_F0,1F0,1B0,1RECV_F1,1SEND_B0,1F1,1B1,1SEND_B1";
/// assert_eq!(print_program(&program).lines().nth(1), Some(rank_1));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// When actions of the program are missing or misplaced, or when the computations wait for each other, so that
/// no order of messages exists; for batches that overlap, also when waits for their updates cause a deadlock in the order.
pub fn order_safe(program: Program, communicator: &Communicator) -> Result<Program, LowerError> {
    let level = program.level();
    if judge(&program, level, communicator)?.is_sound() {
        return Ok(program);
    }
    if !communicator.streams.is_tagged() {
        let ordered = receive_in_order(program.clone());
        if judge(&ordered, level, communicator)?.is_sound() {
            return Ok(ordered);
        }
    }
    let rows = GlobalOrder::over(&program).run()?;
    let ordered = Program::made(program.placement().clone(), program.numbering(), rows);
    let ordered = ordered.with_trained(program.trained().clone());
    // The order leaves out waits for updates.
    if ordered.batches() > 1
        && let Some(reason) = judge(&ordered, level, communicator)?.reason()
    {
        let problem = "no order of the messages was found in which ranks wait for updates without a deadlock";
        return Err(LowerError::Refused(format!("{problem}: {reason}")));
    }
    Ok(ordered)
}

/// Moves receives up so that each rank receives from another one in the order in which that sends.
fn receive_in_order(program: Program) -> Program {
    let placement = program.placement().clone();
    let mut in_order: BTreeMap<(Rank, Rank), VecDeque<Action>> = BTreeMap::new();
    for &action in program.rows().iter().flatten() {
        if let Some(transfer) = Transfer::of(&placement, action).filter(|transfer| transfer.send == action) {
            in_order.entry((transfer.sender, transfer.receiver)).or_default().push_back(transfer.receive);
        }
    }
    let mut is_received = ActionSet::for_program(&program);
    program.map_rows(|_, row| {
        let mut lowered = Vec::with_capacity(row.len());
        for action in row {
            let transfer = Transfer::of(&placement, action).filter(|transfer| transfer.receive == action);
            let Some(transfer) = transfer else {
                lowered.push(action);
                continue;
            };
            let receives = in_order.entry((transfer.sender, transfer.receiver)).or_default();
            while !is_received.contains(action)
                && let Some(receive) = receives.pop_front()
            {
                is_received.insert(receive);
                lowered.push(receive);
            }
        }
        lowered
    })
}

/// The rows so far, and the state of each rank.
struct GlobalOrder<'a> {
    program: &'a Program,
    neighbours: Neighbours,
    lowered: Vec<Vec<Action>>,
    /// The number of actions of each row that have been passed.
    passed: Vec<usize>,
    /// For each rank that cannot continue, the receive of the tensor that it waits for.
    waits_for: HashMap<Rank, Action>,
    /// The sends whose tensors are made.
    made: ActionSet,
    /// The sends and receives that are in the new rows.
    moved: ActionSet,
    /// The receives that have been passed, and take their places when they are sent.
    deferred: ActionSet,
    ready: Vec<Rank>,
    /// The messages that may move when no rank can continue, each with the rank that has reached it: tensors
    /// that a rank waits for, sends, and receives. Some have moved already.
    wanted: VecDeque<(Rank, Action)>,
    sends: VecDeque<(Rank, Action)>,
    receives: VecDeque<(Rank, Action)>,
}

impl<'a> GlobalOrder<'a> {
    fn over(program: &'a Program) -> Self {
        let set = || ActionSet::for_program(program);
        Self {
            program,
            neighbours: Neighbours::of(program.placement()),
            lowered: program.rows().iter().map(|row| Vec::with_capacity(row.len())).collect(),
            passed: vec![0; program.rows().len()],
            waits_for: HashMap::new(),
            made: set(),
            moved: set(),
            deferred: set(),
            ready: program.placement().all_ranks().rev().collect(),
            wanted: VecDeque::new(),
            sends: VecDeque::new(),
            receives: VecDeque::new(),
        }
    }

    /// Returns the new rows.
    fn run(mut self) -> Result<Vec<Vec<Action>>, LowerError> {
        while let Some(rank) = self.ready.pop().or_else(|| self.move_one()) {
            self.waits_for.remove(&rank);
            while self.pass(rank) {}
        }
        let blocked: Vec<BlockedRank> =
            self.program.placement().all_ranks().filter_map(|rank| self.blocked(rank)).collect();
        if blocked.is_empty() { Ok(self.lowered) } else { Err(LowerError::Stuck { blocked }) }
    }

    fn next(&self, rank: Rank) -> Option<Action> {
        self.program.row(rank).get(self.passed[rank.index()]).copied()
    }

    /// Passes the next action of `rank`, and returns whether it could.
    fn pass(&mut self, rank: Rank) -> bool {
        let Some(action) = self.next(rank) else { return false };
        let can_pass = match Transfer::of(self.program.placement(), action) {
            Some(transfer) if transfer.send == action => self.send(rank, transfer),
            Some(transfer) if transfer.receive == action => self.receive(rank, transfer),
            _ => self.act(rank, action),
        };
        if can_pass {
            self.passed[rank.index()] += 1;
        }
        can_pass
    }

    /// Sends a message if its receiver has reached it, or returns whether it has been sent before.
    fn send(&mut self, rank: Rank, transfer: Transfer) -> bool {
        if self.moved.contains(transfer.send) {
            return true;
        }
        let is_awaited = self.deferred.contains(transfer.receive)
            || self.next(transfer.receiver) == Some(transfer.receive);
        if is_awaited {
            self.exchange(transfer);
        } else {
            self.sends.push_back((rank, transfer.send));
        }
        is_awaited
    }

    /// Receives a message if its sender has reached it, or returns whether it has been received before.
    fn receive(&mut self, rank: Rank, transfer: Transfer) -> bool {
        if self.moved.contains(transfer.receive) {
            return true;
        }
        let is_sent = self.next(transfer.sender) == Some(transfer.send);
        if is_sent {
            self.exchange(transfer);
        } else {
            self.receives.push_back((rank, transfer.receive));
            self.wait_for(rank, transfer);
        }
        is_sent
    }

    /// Appends an action that is not a message, if the tensors that it uses have been received.
    fn act(&mut self, rank: Rank, action: Action) -> bool {
        let needs = action.parts().filter_map(|part| self.neighbours.receive_for(part));
        let missing = needs.into_iter().find(|&receive| !self.moved.contains(receive));
        if let Some(transfer) = missing.and_then(|receive| Transfer::of(self.program.placement(), receive)) {
            self.wait_for(rank, transfer);
            return false;
        }
        self.lowered[rank.index()].push(action);
        for transfer in action.parts().filter_map(|part| Transfer::after(self.program.placement(), part)) {
            self.made.insert(transfer.send);
            if self.waits_for.get(&transfer.receiver) == Some(&transfer.receive) {
                self.wanted.push_back((transfer.receiver, transfer.receive));
            }
        }
        true
    }

    /// Notes that `rank` waits for a message.
    fn wait_for(&mut self, rank: Rank, transfer: Transfer) {
        self.waits_for.insert(rank, transfer.receive);
        if self.made.contains(transfer.send) {
            self.wanted.push_back((rank, transfer.receive));
        }
    }

    /// Appends a message to the rows of both ranks, and makes both ready.
    fn exchange(&mut self, transfer: Transfer) {
        let Transfer { send, receive, sender, receiver } = transfer;
        for (rank, action) in [(sender, send), (receiver, receive)] {
            self.lowered[rank.index()].push(action);
            self.moved.insert(action);
            self.ready.push(rank);
        }
    }

    /// Moves one message when no rank can continue, and returns a rank that can; `None` if there is none.
    fn move_one(&mut self) -> Option<Rank> {
        let placement = self.program.placement();
        while let Some((rank, receive)) = self.wanted.pop_front() {
            if self.waits_for.get(&rank) == Some(&receive) && !self.moved.contains(receive) {
                self.exchange(Transfer::of(placement, receive)?);
                return Some(rank);
            }
        }
        while let Some((rank, send)) = self.sends.pop_front() {
            if self.next(rank) == Some(send) && !self.moved.contains(send) {
                self.exchange(Transfer::of(placement, send)?);
                return Some(rank);
            }
        }
        while let Some((rank, receive)) = self.receives.pop_front() {
            if self.next(rank) == Some(receive) && !self.moved.contains(receive) {
                self.deferred.insert(receive);
                self.passed[rank.index()] += 1;
                return Some(rank);
            }
        }
        None
    }

    fn blocked(&self, rank: Rank) -> Option<BlockedRank> {
        let action = self.next(rank)?;
        let receive = self.waits_for.get(&rank)?;
        let waits_for = self.neighbours.peer(*receive)?;
        Some(BlockedRank { rank, position: self.passed[rank.index()], action, waits_for })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::communicator::Streams;
    use crate::csv::{parse_program, print_program};

    fn check(streams: Streams, rows: &str, expected: Result<&str, &str>) {
        let program = parse_program(rows).unwrap_or_else(|error| panic!("{error}"));
        let found = order_safe(program, &Communicator { streams, ..Communicator::default() });
        let found = found.map(|program| print_program(&program)).map_err(|error| error.to_string());
        assert_eq!(found.as_deref().map_err(String::as_str), expected, "{streams}");
    }

    #[test]
    fn receives_take_the_order_of_the_sends() {
        let rows = "0F0,0SEND_F0,0F1,0SEND_F1\n1RECV_F1,1F1,1RECV_F0,1F0\n";
        let ordered = "0F0,0SEND_F0,0F1,0SEND_F1\n1RECV_F0,1RECV_F1,1F1,1F0\n";
        check(Streams::Buffered, rows, Ok(rows));
        for streams in [Streams::Edge, Streams::Pair, Streams::Rank] {
            check(streams, rows, Ok(ordered));
        }
    }

    #[test]
    fn a_receive_moves_up_to_its_send() {
        let rows = "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n\
                    1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1\n";
        check(Streams::Edge, rows, Ok(rows));
        let moved = "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n\
                     1RECV_F0,1F0,1B0,1RECV_F1,1SEND_B0,1F1,1B1,1SEND_B1\n";
        check(Streams::Pair, rows, Ok(moved));
    }

    #[test]
    fn a_send_moves_up_to_its_use() {
        let late = "0F0,0F1,0SEND_F1,0RECV_B0,0B0,0SEND_F0,0RECV_B1,0B1\n\
                    1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1\n";
        let early = "0F0,0F1,0SEND_F0,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n\
                     1RECV_F0,1F0,1B0,1RECV_F1,1SEND_B0,1F1,1B1,1SEND_B1\n";
        for streams in Streams::ALL {
            check(streams, late, Ok(early));
        }
    }

    #[test]
    fn computations_that_wait_for_each_other_have_no_order() {
        let rows = "0F0,0SEND_F0,0RECV_B0,0B0,0F1,0SEND_F1,0RECV_B1,0B1\n\
                    1RECV_F0,1F0,1RECV_F1,1F1,1B0,1SEND_B0,1B1,1SEND_B1\n";
        let message = "no rank can continue: rank 0 at position 3 (0B0) waits for rank 1, \
                       rank 1 at position 3 (1F1) waits for rank 0; correct the order of the schedule";
        for streams in Streams::ALL {
            check(streams, rows, Err(message));
        }
    }

    #[test]
    fn missing_actions_are_named() {
        let violations = "unsound program, 1 violation; the first: rank 1, position 1: 1F0 is missing";
        let program = parse_program("0F0,0SEND_F0\n1RECV_F0\n").expect("rows");
        let error = order_safe(program, &Communicator::default()).expect_err("a forward is missing");
        assert!(error.to_string().starts_with(violations), "{error}");
    }
}
