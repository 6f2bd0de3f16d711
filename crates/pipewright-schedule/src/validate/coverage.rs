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
use crate::ids::{Microbatch, Rank, StageIndex};
use crate::level::Level;
use crate::neighbours::Neighbours;
use crate::schedule::Program;
use crate::trained::StageBackward;
use crate::validate::context::{Context, position_of};
use crate::validate::order;
use crate::validate::violation::{Report, ViolationKind};

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
                let kind = ViolationKind::UnexpectedCommunication { action: cell, level };
                report.push(rank, || (position, kind));
            }
            for action in cell.parts() {
                in_order &= order::dependencies_precede(action, &present, neighbours, level);
            }
            for action in cell.parts() {
                if let Some(kind) = misplaced(program, rank, action) {
                    report.push(rank, || (position, kind));
                } else if !present.insert(action) && !may_repeat(action) {
                    let first = || position_of(program, rank, action);
                    report.push(rank, || (position, ViolationKind::Duplicate { action, first: first() }));
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
        report.push(Rank::new(0), || (0, ViolationKind::NoMicrobatches));
    }
    for stage in placement.all_stages() {
        let (rank, backward) = (placement.rank_of(stage), context.backward_of(stage));
        for (microbatch, &kinds) in (0..).map(Microbatch::new).zip(context.present.of_stage(stage)) {
            if is_covered(kinds, backward) {
                continue;
            }
            check_forward(context, report, rank, Action::Forward { stage, microbatch });
            match backward {
                StageBackward::Whole => check_backward(context, report, rank, stage, microbatch),
                StageBackward::Inputs => check_inputs(context, report, rank, stage, microbatch),
                StageBackward::None => check_unused(context, report, rank, &BACKWARDS, stage, microbatch),
            }
        }
    }
}

/// The kinds of backwards.
const BACKWARDS: [ActionKind; 3] =
    [ActionKind::Backward, ActionKind::InputBackward, ActionKind::WeightBackward];

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

fn check_forward(context: &Context<'_>, report: &mut Report, rank: Rank, forward: Action) {
    if !context.present.contains(forward) {
        report.push(rank, || (context.program.row(rank).len(), ViolationKind::Missing { action: forward }));
    }
}

fn check_backward(
    context: &Context<'_>,
    report: &mut Report,
    rank: Rank,
    stage: StageIndex,
    microbatch: Microbatch,
) {
    let full = Action::Backward { stage, microbatch };
    let inputs = Action::InputBackward { stage, microbatch };
    let weights = Action::WeightBackward { stage, microbatch };
    let has = |action| context.present.contains(action);
    let missing = match (has(full), has(inputs), has(weights)) {
        (true, false, false) | (false, true, true) => return,
        (true, has_inputs, _) => {
            let other = if has_inputs { inputs } else { weights };
            let position = || position_of(context.program, rank, full);
            report.push(rank, || (position(), ViolationKind::MixedBackward { action: full, other }));
            return;
        }
        (false, false, false) => full,
        (false, true, false) => weights,
        (false, false, true) => inputs,
    };
    report.push(rank, || (context.program.row(rank).len(), ViolationKind::Missing { action: missing }));
}

/// Checks the backward of a stage without trained parameters.
fn check_inputs(
    context: &Context<'_>,
    report: &mut Report,
    rank: Rank,
    stage: StageIndex,
    microbatch: Microbatch,
) {
    let inputs = Action::InputBackward { stage, microbatch };
    if !context.present.contains(inputs) {
        report.push(rank, || (context.program.row(rank).len(), ViolationKind::Missing { action: inputs }));
    }
    let unused = [ActionKind::Backward, ActionKind::WeightBackward];
    check_unused(context, report, rank, &unused, stage, microbatch);
}

/// Reports backwards of these kinds, whose gradients nothing uses.
fn check_unused(
    context: &Context<'_>,
    report: &mut Report,
    rank: Rank,
    kinds: &[ActionKind],
    stage: StageIndex,
    microbatch: Microbatch,
) {
    let backwards = kinds.iter().filter_map(|&kind| Action::of_microbatch(kind, stage, microbatch));
    for action in backwards.filter(|&action| context.present.contains(action)) {
        let position = || position_of(context.program, rank, action);
        report.push(rank, || (position(), ViolationKind::Frozen { action }));
    }
}

/// Returns the violation if `action` may not be on `rank`.
fn misplaced(program: &Program, rank: Rank, action: Action) -> Option<ViolationKind> {
    let placement = program.placement();
    let Some(owner) = placement.owner(action.stage()) else {
        return Some(ViolationKind::StageOutOfRange { action, stages: placement.stages() });
    };
    let microbatches = program.microbatches();
    if action.microbatch().is_some_and(|microbatch| microbatch.get() >= microbatches) {
        return Some(ViolationKind::MicrobatchOutOfRange { action, microbatches });
    }
    (owner != rank).then_some(ViolationKind::NotOwned { action, owner })
}

/// Returns whether a stage may run this action several times in a step.
fn may_repeat(action: Action) -> bool {
    matches!(action.kind(), ActionKind::Unshard | ActionKind::Reshard)
}
