//! The rules of coverage: every stage runs every microbatch exactly once, on the rank that owns it.
//!
//! Rules: (1) stages and microbatches are in range; (2) an action is on the rank that owns its stage; (3) no
//! action occurs twice, except `UNSHARD` and `RESHARD`; (4) every stage has a forward for every microbatch;
//! (5) unless the program is forward-only, every stage has for every microbatch either a full backward or
//! both halves of a split one; a stage without trained parameters has the input half alone, and a stage below
//! the first trained one has no backward ([`crate::trained`]); (6) there is no communication at the level
//! `compute`. [`super::matching`] checks sends and receives.

use crate::action::{Action, ActionKind};
use crate::action_set::{ActionSet, bit};
use crate::ids::{Microbatch, Rank};
use crate::level::Level;
use crate::neighbours::Neighbours;
use crate::schedule::Program;
use crate::trained::StageBackward;
use crate::validate::context::{Context, position_of};
use crate::validate::order;
use crate::validate::violation::Report;

/// Checks each action by itself (rules 1, 2, 3 and 6). Returns the set of actions, and whether each follows
/// the actions that it needs on its rank ([`super::order`]); the latter is meaningful only if there is no
/// violation.
pub(super) fn check_each(
    program: &Program,
    level: Level,
    neighbours: &Neighbours,
    report: &mut Report,
) -> (ActionSet, bool) {
    let mut present = ActionSet::for_program(program);
    let mut in_order = true;
    for (rank, row) in (0..).map(Rank::new).zip(program.rows()) {
        for (position, &cell) in row.iter().enumerate() {
            if level == Level::Compute && cell.is_communication() {
                let problem = || {
                    format!(
                        "{cell} communicates, which the level `{level}` does not; validate at the level `comms` or `full`"
                    )
                };
                report.push(rank, || (position, problem()));
            }
            for action in cell.parts() {
                in_order &= order::dependencies_precede(action, &present, neighbours, level);
            }
            for action in cell.parts() {
                let is_in_place = check_place(program, report, (rank, position), action);
                if is_in_place && !present.insert(action) && !may_repeat(action) {
                    let first = || position_of(program, rank, action);
                    let problem = || {
                        format!(
                            "{action} occurs a second time, first at position {}; drop one of them",
                            first()
                        )
                    };
                    report.push(rank, || (position, problem()));
                }
            }
        }
    }
    (present, in_order)
}

/// Checks that the required actions are present (rules 4 and 5).
pub(super) fn check_all(context: &Context<'_>, report: &mut Report) {
    let placement = context.program.placement();
    if context.program.microbatches() == 0 {
        let problem = || "the program has no microbatch; use at least one".to_owned();
        report.push(Rank::new(0), || (0, problem()));
    }
    for stage in placement.all_stages() {
        let (rank, backward) = (placement.rank_of(stage), context.backward_of(stage));
        for (microbatch, &kinds) in (0..).map(Microbatch::new).zip(context.present.of_stage(stage)) {
            if is_covered(kinds, backward) {
                continue;
            }
            require(context, report, rank, Action::Forward { stage, microbatch });
            let full = Action::Backward { stage, microbatch };
            let inputs = Action::InputBackward { stage, microbatch };
            let weights = Action::WeightBackward { stage, microbatch };
            match backward {
                StageBackward::Whole => check_backward(context, report, rank, [full, inputs, weights]),
                StageBackward::Inputs => {
                    require(context, report, rank, inputs);
                    check_unused(context, report, rank, &[full, weights]);
                }
                StageBackward::None => check_unused(context, report, rank, &[full, inputs, weights]),
            }
        }
    }
}

/// Returns whether `kinds`, the kinds of a stage and microbatch in the program, are the required ones.
fn is_covered(kinds: u16, backward: StageBackward) -> bool {
    const FORWARD: u16 = bit(ActionKind::Forward);
    const FULL: u16 = FORWARD | bit(ActionKind::Backward);
    const INPUTS: u16 = FORWARD | bit(ActionKind::InputBackward);
    const SPLIT: u16 = INPUTS | bit(ActionKind::WeightBackward);
    let compute = kinds & (FULL | SPLIT);
    match backward {
        StageBackward::None => compute == FORWARD,
        StageBackward::Inputs => compute == INPUTS,
        StageBackward::Whole => compute == FULL || compute == SPLIT,
    }
}

/// Reports `action` if it is missing.
fn require(context: &Context<'_>, report: &mut Report, rank: Rank, action: Action) {
    if !context.present.contains(action) {
        report.push_missing(context.program, rank, action);
    }
}

/// Checks that a stage has its full backward or both halves of it for a microbatch.
fn check_backward(context: &Context<'_>, report: &mut Report, rank: Rank, backwards: [Action; 3]) {
    let [full, inputs, weights] = backwards;
    let missing = match backwards.map(|action| context.present.contains(action)) {
        [true, false, false] | [false, true, true] => return,
        [true, has_inputs, _] => {
            let other = if has_inputs { inputs } else { weights };
            let problem = || format!("{full} and {other} compute the same gradients; keep one of them");
            report.push(rank, || (position_of(context.program, rank, full), problem()));
            return;
        }
        [false, false, false] => full,
        [false, true, false] => weights,
        [false, false, true] => inputs,
    };
    require(context, report, rank, missing);
}

/// Reports those of `backwards` that are present: nothing uses their gradients.
fn check_unused(context: &Context<'_>, report: &mut Report, rank: Rank, backwards: &[Action]) {
    for &action in backwards.iter().filter(|&&action| context.present.contains(action)) {
        report.push_unused(rank, || position_of(context.program, rank, action), action);
    }
}

/// Reports `action` if it may not be on `rank`, and returns whether it may.
fn check_place(
    program: &Program,
    report: &mut Report,
    (rank, position): (Rank, usize),
    action: Action,
) -> bool {
    let (placement, microbatches) = (program.placement(), program.microbatches());
    let owner = placement.owner(action.stage());
    if owner.is_none() {
        let last = placement.last_stage();
        let problem = || format!("{action} names a stage above the last, {last}; correct its stage");
        report.push(rank, || (position, problem()));
    } else if action.microbatch().is_some_and(|microbatch| microbatch.get() >= microbatches) {
        let last = microbatches.saturating_sub(1);
        let problem =
            || format!("{action} names a microbatch above the last, {last}; correct its microbatch");
        report.push(rank, || (position, problem()));
    } else if let Some(owner) = owner.filter(|owner| *owner != rank) {
        let problem = || format!("{action} belongs to rank {owner}, which owns its stage; move it there");
        report.push(rank, || (position, problem()));
    } else {
        return true;
    }
    false
}

/// Returns whether a stage may run this action several times in a step.
fn may_repeat(action: Action) -> bool {
    matches!(action.kind(), ActionKind::Unshard | ActionKind::Reshard)
}
