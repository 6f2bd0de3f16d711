//! The pass `defer-recv`: moves each receive directly before the action that uses its tensor, so that earlier
//! actions do not wait for it.
//!
//! The pass `send-recv` places a receive at the moment of its send, which may be long before its use. On
//! transports that process the messages of a rank one after another, such a receive delays the sends after
//! it.
//!
//! Rules: (1) a receive moves directly before the forward or backward that uses its tensor; (2) before a rank
//! sends to a higher rank, it runs all deferred receives from that rank, so that two ranks do not both send
//! first; (3) if the order of use is not the order of arrival, the earlier receives from the same rank move
//! together with a receive, because a transport without tags delivers in order; (4) receives of unused
//! tensors move to the end of the row. A receive never moves to an earlier position.
//!
//! The result needs sends that only start (`wait-send`). If sends block until they are received, two ranks
//! that send to each other before they receive deadlock, and rule 2 does not prevent cycles of three ranks.
//! If sends do not block, a later receive only relaxes the order, so a sound program stays sound.
//!
//! Time: linear in the program.

use std::collections::{BTreeMap, HashSet, VecDeque};

use crate::action::Action;
use crate::ids::Rank;
use crate::placement::Placement;
use crate::schedule::Program;
use crate::transfer::Transfer;

/// Defers every receive until its tensor is used.
pub fn defer_recv(program: Program) -> Program {
    let placement = program.placement().clone();
    program.map_rows(|rank, row| {
        let mut deferred = DeferredReceives::new(&placement);
        for (position, action) in row.into_iter().enumerate() {
            deferred.push(rank, position, action);
        }
        deferred.finish()
    })
}

/// The deferred receives of a row, and the new row so far.
struct DeferredReceives<'a> {
    placement: &'a Placement,
    waiting: HashSet<Action>,
    /// By sending rank, in their original order, each with its original position.
    from: BTreeMap<Rank, VecDeque<(usize, Action)>>,
    lowered: Vec<Action>,
}

impl<'a> DeferredReceives<'a> {
    fn new(placement: &'a Placement) -> Self {
        Self { placement, waiting: HashSet::new(), from: BTreeMap::new(), lowered: Vec::new() }
    }

    fn push(&mut self, rank: Rank, position: usize, action: Action) {
        match (action, Transfer::of(self.placement, action)) {
            (Action::RecvForward { .. } | Action::RecvBackward { .. }, Some(transfer)) => {
                self.waiting.insert(action);
                self.from.entry(transfer.sender).or_default().push_back((position, action));
                return;
            }
            (Action::SendForward { .. } | Action::SendBackward { .. }, Some(transfer))
                if rank < transfer.receiver =>
            {
                while self.emit_next_from(transfer.receiver).is_some() {}
            }
            _ => {
                for part in action.parts() {
                    self.emit_before_use(part);
                }
            }
        }
        self.lowered.push(action);
    }

    /// Appends the receive of the tensor that `part` uses, after the earlier receives from the same rank.
    fn emit_before_use(&mut self, part: Action) {
        let wanted = match part {
            Action::Forward { stage, microbatch } => Action::RecvForward { stage, microbatch },
            Action::Backward { stage, microbatch } | Action::InputBackward { stage, microbatch } => {
                Action::RecvBackward { stage, microbatch }
            }
            _ => return,
        };
        let Some(transfer) = Transfer::of(self.placement, wanted) else { return };
        while self.waiting.contains(&wanted) && self.emit_next_from(transfer.sender).is_some() {}
    }

    /// Appends the first deferred receive from `peer`.
    fn emit_next_from(&mut self, peer: Rank) -> Option<Action> {
        let (_, receive) = self.from.get_mut(&peer)?.pop_front()?;
        self.waiting.remove(&receive);
        self.lowered.push(receive);
        Some(receive)
    }

    /// Returns the row, with receives of unused tensors at its end.
    fn finish(mut self) -> Vec<Action> {
        let mut unused: Vec<(usize, Action)> = self.from.into_values().flatten().collect();
        unused.sort_unstable();
        self.lowered.extend(unused.into_iter().map(|(_, receive)| receive));
        self.lowered
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::csv::{parse_program, print_program};

    fn check(rows: &str, expected: &str) {
        let program = parse_program(rows).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(print_program(&defer_recv(program)), expected);
    }

    #[test]
    fn a_receive_comes_before_its_use() {
        check(
            "0F0,0SEND_F0,0F1,0SEND_F1\n1RECV_F0,1RECV_F1,1F0,1F1\n",
            "0F0,0SEND_F0,0F1,0SEND_F1\n1RECV_F0,1F0,1RECV_F1,1F1\n",
        );
    }

    #[test]
    fn the_lower_rank_receives_before_it_sends() {
        check(
            "0F0,0SEND_F0,0F1,0RECV_B0,0SEND_F1,0B0\n1F0\n",
            "0F0,0SEND_F0,0F1,0RECV_B0,0SEND_F1,0B0\n1F0\n",
        );
    }

    #[test]
    fn messages_of_one_rank_keep_their_order() {
        check(
            "0F0,0SEND_F0,0F1,0SEND_F1\n1RECV_F0,1RECV_F1,1F1,1F0\n",
            "0F0,0SEND_F0,0F1,0SEND_F1\n1RECV_F0,1RECV_F1,1F1,1F0\n",
        );
    }

    #[test]
    fn what_nobody_uses_comes_last() {
        check("0F0,0SEND_F0\n1RECV_F0,1F7\n", "0F0,0SEND_F0\n1F7,1RECV_F0\n");
    }
}
