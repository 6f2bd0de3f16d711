//! The pass `drop-frozen`: removes the backwards of stages that have nothing to train.
//!
//! Rules: (1) a stage that runs forward only loses `B`, `I` and `W`, and an overlap of its backward becomes
//! the forward of the overlap; (2) a stage without trained parameters behind the first trained one loses `W`,
//! its `B` becomes `I`, and an overlap becomes its forward and that `I`; (3) `REDUCE_GRAD` and
//! `WAIT_REDUCE_GRAD` of both are removed. The other actions keep their order. The passes after this one add
//! no message for a gradient that no stage uses. Time: linear in the row.

use crate::action::{Action, ActionKind};
use crate::schedule::Program;
use crate::trained::{StageBackward, TrainedStages};

/// Removes what stages without trained parameters need not compute, from a program that does not communicate.
pub fn drop_frozen(program: Program, trained: &TrainedStages) -> Program {
    if trained.are_all() {
        return program;
    }
    let program = program.map_rows(|_, row| {
        let mut kept = Vec::with_capacity(row.len());
        for action in row {
            let is_whole =
                action.parts().all(|part| part.kind() == ActionKind::Forward || is_trained(part, trained));
            match action {
                Action::Overlap(_) if is_whole => kept.push(action),
                _ => kept.extend(action.parts().filter_map(|part| needed(part, trained))),
            }
        }
        kept
    });
    program.with_trained(trained.clone())
}

fn is_trained(part: Action, trained: &TrainedStages) -> bool {
    trained.backward_of(part.stage()) == StageBackward::Whole
}

/// Returns what is left of `part`, which is not an overlap.
fn needed(part: Action, trained: &TrainedStages) -> Option<Action> {
    let inputs = trained.runs_backward(part.stage());
    match part {
        _ if is_trained(part, trained) => Some(part),
        Action::Backward { stage, microbatch } | Action::InputBackward { stage, microbatch } => {
            inputs.then_some(Action::InputBackward { stage, microbatch })
        }
        Action::WeightBackward { .. } | Action::ReduceGrad { .. } | Action::WaitReduceGrad { .. } => None,
        Action::Offload { .. } | Action::Reload { .. } => inputs.then_some(part),
        _ => Some(part),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::csv::{parse_program, print_program};

    /// Checks the rows that are left when the stages with the flag true are trained.
    fn check(rows: &str, trained: &[bool], expected: &str) {
        let program = parse_program(rows).unwrap_or_else(|error| panic!("{error}"));
        let program = drop_frozen(program, &TrainedStages::of(trained));
        assert_eq!(print_program(&program), expected);
        assert_eq!(program.trained(), &TrainedStages::of(trained));
    }

    #[test]
    fn stages_below_the_first_trained_one_run_forward_only() {
        check("0F0,0B0\n1F0,1I0,1W0\n", &[false, true], "0F0\n1F0,1I0,1W0\n");
        check("0F0,0I0,0W0,0REDUCE_GRAD,0WAIT_REDUCE_GRAD\n1F0,1B0\n", &[false, true], "0F0\n1F0,1B0\n");
    }

    #[test]
    fn frozen_stages_behind_it_keep_their_input_gradients() {
        check("0F0,0B0\n1F0,1B0\n", &[true, false], "0F0,0B0\n1F0,1I0\n");
        check(
            "0UNSHARD,0F0,0B0\n1UNSHARD,1F0,1I0,1W0\n",
            &[true, false],
            "0UNSHARD,0F0,0B0\n1UNSHARD,1F0,1I0\n",
        );
    }

    #[test]
    fn an_overlap_keeps_what_is_needed() {
        let rows = "0F0,1F0,(0F1;1B0)OVERLAP_F_B,0B0,1F1,1B1,0B1\n";
        check(rows, &[true, true], rows);
        check(rows, &[true, false], "0F0,1F0,0F1,1I0,0B0,1F1,1I1,0B1\n");
        check(rows, &[false, true], "0F0,1F0,(0F1;1B0)OVERLAP_F_B,1F1,1B1\n");
        check("0F0,1F0,1B0,(1F1;0B0)OVERLAP_F_B\n", &[false, true], "0F0,1F0,1B0,1F1\n");
    }
}
