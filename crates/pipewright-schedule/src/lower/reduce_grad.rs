//! The pass `reduce-grad`: reduces a stage's gradients over its data-parallel replicas once they are complete.
//!
//! Rules: (1) the `REDUCE_GRAD` of a stage directly follows its last weight gradient (`W`, `B`, or the backward of an
//! overlap); (2) its `WAIT_REDUCE_GRAD` directly follows the reduction, or with [`ReduceWait::AtEnd`] comes at the end
//! of the row, in the order of the reductions, so that a reduction overlaps with later computation. A stage without a
//! backward is not reduced. Gradients are summed locally over the microbatches and reduced once.

use crate::action::{Action, ActionKind};
use crate::ids::Rank;
use crate::schedule::Program;

/// The place at which a rank waits for its reductions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ReduceWait {
    /// Directly after each reduction.
    AtOnce,
    /// At the end of the row.
    AtEnd,
}

/// Adds `REDUCE_GRAD` and `WAIT_REDUCE_GRAD` to every stage that runs backward.
pub fn reduce_grad(program: Program, wait: ReduceWait) -> Program {
    let mut last = vec![None; program.placement().stages() as usize];
    for (rank, row) in (0..).map(Rank::new).zip(program.rows()) {
        for (position, action) in row.iter().enumerate() {
            for part in action.parts().filter(|&part| adds_to_weights(part)) {
                if let Some(last) = last.get_mut(part.stage().index()) {
                    *last = Some((rank, position));
                }
            }
        }
    }
    program.map_rows(|rank, row| {
        let mut lowered = Vec::with_capacity(row.len() + 2);
        let mut waits = Vec::new();
        for (position, action) in row.into_iter().enumerate() {
            lowered.push(action);
            for stage in action.parts().filter(|&part| adds_to_weights(part)).map(Action::stage) {
                if last.get(stage.index()) == Some(&Some((rank, position))) {
                    lowered.push(Action::ReduceGrad { stage });
                    match wait {
                        ReduceWait::AtOnce => lowered.push(Action::WaitReduceGrad { stage }),
                        ReduceWait::AtEnd => waits.push(Action::WaitReduceGrad { stage }),
                    }
                }
            }
        }
        lowered.append(&mut waits);
        lowered
    })
}

fn adds_to_weights(action: Action) -> bool {
    matches!(action.kind(), ActionKind::Backward | ActionKind::WeightBackward)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::csv::{parse_program, print_program};

    fn check(wait: ReduceWait, rows: &str, expected: &str) {
        let program = parse_program(rows).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(print_program(&reduce_grad(program, wait)), expected);
    }

    #[test]
    fn after_the_last_weight_gradient() {
        let at_once = ReduceWait::AtOnce;
        check(at_once, "0F0,0F1,0B1,0B0\n", "0F0,0F1,0B1,0B0,0REDUCE_GRAD,0WAIT_REDUCE_GRAD\n");
        check(at_once, "0F0,0I0,0W0,1F0\n", "0F0,0I0,0W0,0REDUCE_GRAD,0WAIT_REDUCE_GRAD,1F0\n");
        check(at_once, "(0F0;1B0)OVERLAP_F_B\n", "(0F0;1B0)OVERLAP_F_B,1REDUCE_GRAD,1WAIT_REDUCE_GRAD\n");
    }

    #[test]
    fn waits_can_come_last() {
        check(
            ReduceWait::AtEnd,
            "0F0,1F0,1B0,0B0\n",
            "0F0,1F0,1B0,1REDUCE_GRAD,0B0,0REDUCE_GRAD,1WAIT_REDUCE_GRAD,0WAIT_REDUCE_GRAD\n",
        );
    }

    #[test]
    fn nothing_without_a_backward() {
        check(ReduceWait::AtOnce, "0F0\n1F0\n", "0F0\n1F0\n");
        check(ReduceWait::AtEnd, "0F0\n1F0\n", "0F0\n1F0\n");
    }
}
