//! The pass `wait-send`: makes sends only start, and adds waits for their completion at places where they
//! cost no time.
//!
//! A send with a wait (`WAIT_SEND_F`, `WAIT_SEND_B`) does not block its rank. Its tensor stays allocated
//! until the wait.
//!
//! Rules without a budget: (1) the wait for a forward send directly follows the backward of the same stage
//! and microbatch, because its gradient proves that the send has arrived; (2) all other waits come at the end
//! of the row, in the order of the sends. These waits take no time, but keep a boundary's tensor as long as
//! the stage's activations.
//!
//! Rules with a budget of `k`: (1) before a send that would be the `k + 1`st in flight, comes the wait for
//! the oldest; (2) a wait that is due earlier by the rules above comes there; (3) the other waits come at the
//! end. So a rank has at most `k` sends in flight.
//!
//! A send with a later wait blocks less than a blocking send, so a program that is sound with blocking sends
//! stays sound under any budget. A program with deferred receives ([`super::defer_recv`]) may deadlock under
//! a small budget; validation finds that.

use std::collections::{HashSet, VecDeque};
use std::num::NonZeroU32;

use crate::action::{Action, ActionKind};
use crate::schedule::Program;

/// Adds a wait for every send that lacks one. `budget` is the largest number of sends of a rank in flight.
pub fn wait_send(program: Program, budget: Option<NonZeroU32>) -> Program {
    program.map_rows(|_, row| wait_row(row, budget))
}

fn wait_row(row: Vec<Action>, budget: Option<NonZeroU32>) -> Vec<Action> {
    let budget = budget.map_or(usize::MAX, |budget| budget.get() as usize);
    let present: HashSet<Action> =
        row.iter().copied().filter(|action| action.kind().is_wait_for_send()).collect();
    let mut waits = PendingWaits::default();
    waits.lowered.reserve(row.len() + row.len() / 4);
    for action in row {
        if let Some(wait) = wait_of(action).filter(|wait| !present.contains(wait)) {
            while waits.open.len() >= budget {
                waits.emit_oldest();
            }
            waits.open.insert(wait);
            waits.started.push_back(wait);
        }
        waits.lowered.push(action);
        for part in action.parts() {
            waits.emit_if_proved(part);
        }
    }
    while !waits.open.is_empty() {
        waits.emit_oldest();
    }
    waits.lowered
}

/// The pending waits of a row, and the new row so far.
#[derive(Default)]
struct PendingWaits {
    open: HashSet<Action>,
    /// In the order of the sends; entries that are not in `open` are skipped.
    started: VecDeque<Action>,
    lowered: Vec<Action>,
}

impl PendingWaits {
    fn emit_oldest(&mut self) {
        let oldest = std::iter::from_fn(|| self.started.pop_front()).find(|wait| self.open.remove(wait));
        self.lowered.extend(oldest);
    }

    /// PendingAppends the wait for the forward send whose arrival the backward `part` proves.
    fn emit_if_proved(&mut self, part: Action) {
        if let Action::Backward { stage, microbatch } | Action::InputBackward { stage, microbatch } = part {
            let wait = Action::WaitSendForward { stage, microbatch };
            if self.open.remove(&wait) {
                self.lowered.push(wait);
            }
        }
    }
}

fn wait_of(send: Action) -> Option<Action> {
    match send.kind() {
        ActionKind::SendForward => send.with_kind(ActionKind::WaitSendForward),
        ActionKind::SendBackward => send.with_kind(ActionKind::WaitSendBackward),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(budget: u32, row: &str, expected: &str) {
        let row = row.split_whitespace().map(|cell| cell.parse().expect("an action")).collect();
        let lowered: Vec<String> =
            wait_row(row, NonZeroU32::new(budget)).iter().map(Action::to_string).collect();
        assert_eq!(lowered.join(" "), expected);
    }

    #[test]
    fn a_gradient_proves_the_send() {
        check(
            0,
            "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0I1 0W1",
            "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0WAIT_SEND_F0 0RECV_B1 0I1 0WAIT_SEND_F1 0W1",
        );
        check(
            0,
            "0SEND_F0 (1F1;0B0)OVERLAP_F_B 1SEND_F1",
            "0SEND_F0 (1F1;0B0)OVERLAP_F_B 0WAIT_SEND_F0 1SEND_F1 1WAIT_SEND_F1",
        );
    }

    #[test]
    fn the_rest_is_waited_for_at_the_end() {
        check(0, "1B0 1SEND_B0 1B1 1SEND_B1", "1B0 1SEND_B0 1B1 1SEND_B1 1WAIT_SEND_B0 1WAIT_SEND_B1");
    }

    #[test]
    fn a_budget_is_kept() {
        check(
            1,
            "0SEND_F0 0SEND_F1 0SEND_F2",
            "0SEND_F0 0WAIT_SEND_F0 0SEND_F1 0WAIT_SEND_F1 0SEND_F2 0WAIT_SEND_F2",
        );
        check(
            2,
            "0SEND_F0 0SEND_F1 0B0 0SEND_F2 0SEND_F3",
            "0SEND_F0 0SEND_F1 0B0 0WAIT_SEND_F0 0SEND_F2 0WAIT_SEND_F1 0SEND_F3 0WAIT_SEND_F2 0WAIT_SEND_F3",
        );
    }

    #[test]
    fn waits_are_not_added_twice() {
        check(0, "0SEND_F0 0F1 0WAIT_SEND_F0 0SEND_F1", "0SEND_F0 0F1 0WAIT_SEND_F0 0SEND_F1 0WAIT_SEND_F1");
    }
}
