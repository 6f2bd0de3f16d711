//! The pass `wait-send`: makes sends only start, and adds waits for their completion at places where they
//! cost no time.
//!
//! A send with a wait (`WAIT_SEND_F`, `WAIT_SEND_B`) does not block its rank. Its tensor stays allocated
//! until the wait.
//!
//! Rules: (1) the wait for a forward send directly follows the backward of the same stage and microbatch,
//! because its gradient proves that the send has arrived; (2) all other waits come at the end of the row, in
//! the order of the sends. These waits take no time, but keep a boundary's tensor as long as the stage's
//! activations. [`super::limit_sends`] moves them to earlier places.
//!
//! A send with a later wait blocks less than a blocking send, so a program that is sound with blocking sends
//! stays sound.

use std::collections::HashSet;

use crate::action::Action;
use crate::schedule::Program;

/// Adds a wait for every send that lacks one.
pub fn wait_send(program: Program) -> Program {
    program.map_rows(|_, row| wait_row(row))
}

fn wait_row(row: Vec<Action>) -> Vec<Action> {
    let present: HashSet<Action> =
        row.iter().copied().filter(|action| action.kind().is_wait_for_send()).collect();
    // In the order of the sends; entries that are not in `open` are skipped.
    let mut started = Vec::new();
    let mut open = HashSet::new();
    let mut lowered = Vec::with_capacity(row.len() + row.len() / 4);
    for action in row {
        lowered.push(action);
        if let Some(wait) = action.wait_of_send().filter(|wait| !present.contains(wait)) {
            open.insert(wait);
            started.push(wait);
        }
        for part in action.parts() {
            // The backward proves that the forward send has arrived.
            if let Action::Backward { stage, microbatch } | Action::InputBackward { stage, microbatch } = part
            {
                let proved = Action::WaitSendForward { stage, microbatch };
                lowered.extend(open.take(&proved));
            }
        }
    }
    lowered.extend(started.into_iter().filter(|wait| open.remove(wait)));
    lowered
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(row: &str, expected: &str) {
        let row = row.split_whitespace().map(|cell| cell.parse().expect("an action")).collect();
        let lowered: Vec<String> = wait_row(row).iter().map(Action::to_string).collect();
        assert_eq!(lowered.join(" "), expected);
    }

    #[test]
    fn a_gradient_proves_the_send() {
        check(
            "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0I1 0W1",
            "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0WAIT_SEND_F0 0RECV_B1 0I1 0WAIT_SEND_F1 0W1",
        );
        check(
            "0SEND_F0 (1F1;0B0)OVERLAP_F_B 1SEND_F1",
            "0SEND_F0 (1F1;0B0)OVERLAP_F_B 0WAIT_SEND_F0 1SEND_F1 1WAIT_SEND_F1",
        );
    }

    #[test]
    fn the_rest_is_waited_for_at_the_end() {
        check("1B0 1SEND_B0 1B1 1SEND_B1", "1B0 1SEND_B0 1B1 1SEND_B1 1WAIT_SEND_B0 1WAIT_SEND_B1");
    }

    #[test]
    fn waits_are_not_added_twice() {
        check("0SEND_F0 0F1 0WAIT_SEND_F0 0SEND_F1", "0SEND_F0 0F1 0WAIT_SEND_F0 0SEND_F1 0WAIT_SEND_F1");
    }
}
