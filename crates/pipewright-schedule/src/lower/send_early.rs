//! The pass `send-early`: splits computations if another rank waits for the result of a part.
//!
//! Rules: (1) an overlap becomes its forward and its backward; (2) `B` of a stage becomes `I` and `W` if the
//! previous stage is on another rank and runs backward. A message follows the action that makes its tensor.
//! With this pass before `send-recv`, the output of an overlap's forward leaves before its backward begins,
//! the forward does not wait for the gradient of the backward, and a gradient leaves while its sender
//! computes weight gradients. The pass runs after the passes for replicas, which treat both halves of an
//! overlap together.
//!
//! The computations of a rank, their order, their results and the memory stay the same. The bubble of 1F1B
//! shrinks from `(p - 1) (F + I + W)` to `(p - 1) (F + I)`. The reference sends after whole actions, so its
//! levels do not use this pass. With [`Overlaps::Keep`], overlaps stay whole, for ranks that run both halves
//! together.
//!
//! The pass is the inverse of `merge-bw` for such stages. Time: linear in the row.

use crate::action::Action;
use crate::ids::StageIndex;
use crate::neighbours::{Neighbour, Neighbours};
use crate::schedule::Program;

/// The treatment of overlaps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Overlaps {
    /// An overlap becomes its forward and its backward.
    TakeApart,
    /// An overlap stays one action, and its messages follow the whole.
    Keep,
}

/// Splits computations so that outputs and gradients leave as soon as they are computed.
pub fn send_early(program: Program, overlaps: Overlaps) -> Program {
    let (neighbours, trained) = (Neighbours::of(program.placement()), program.trained().clone());
    let is_sent = |stage: StageIndex| {
        matches!(neighbours.before(stage), Neighbour::OtherRank(_))
            && stage.before().is_some_and(|before| trained.runs_backward(before))
    };
    program.map_rows(|_, row| {
        let mut lowered = Vec::with_capacity(row.len());
        for action in row {
            match overlaps {
                Overlaps::Keep if matches!(action, Action::Overlap(_)) => lowered.push(action),
                _ => action.parts().for_each(|part| split_backward(part, &is_sent, &mut lowered)),
            }
        }
        lowered
    })
}

/// Appends `part`, a full backward as two halves if its gradient is sent to another rank.
fn split_backward(part: Action, is_sent: &impl Fn(StageIndex) -> bool, lowered: &mut Vec<Action>) {
    match part {
        Action::Backward { stage, microbatch } if is_sent(stage) => {
            lowered.push(Action::InputBackward { stage, microbatch });
            lowered.push(Action::WeightBackward { stage, microbatch });
        }
        whole => lowered.push(whole),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::csv::{parse_program, print_program};

    fn check(rows: &str, expected: &str) {
        let program = parse_program(rows).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(print_program(&send_early(program, Overlaps::TakeApart)), expected);
    }

    #[test]
    fn gradients_for_another_rank_leave_before_weights() {
        check("0F0,0B0\n1F0,1B0\n", "0F0,0B0\n1F0,1I0,1W0\n");
    }

    #[test]
    fn a_turn_of_a_v_stays_whole() {
        check("0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0\n", "0F0,3F0,3I0,3W0,0B0\n1F0,2F0,2B0,1I0,1W0\n");
    }

    #[test]
    fn overlaps_come_apart() {
        check(
            "0F0,0F1,(0F2;0B0)OVERLAP_F_B,0B1,0B2\n1F0,(1F1;1B0)OVERLAP_F_B,1B1,1F2,1B2\n",
            "0F0,0F1,0F2,0B0,0B1,0B2\n1F0,1F1,1I0,1W0,1I1,1W1,1F2,1I2,1W2\n",
        );
    }

    #[test]
    fn gathered_parameters_stay_around_both_halves() {
        check(
            "0F0,(0F1;0B0)OVERLAP_F_B,0B1\n1UNSHARD,1F0,(1F1;1B0)OVERLAP_F_B,1RESHARD,1B1\n",
            "0F0,0F1,0B0,0B1\n1UNSHARD,1F0,1F1,1I0,1W0,1RESHARD,1I1,1W1\n",
        );
    }

    #[test]
    fn what_is_apart_stays() {
        check("0F0,0B0\n1F0,1I0,1W0\n", "0F0,0B0\n1F0,1I0,1W0\n");
    }
}
