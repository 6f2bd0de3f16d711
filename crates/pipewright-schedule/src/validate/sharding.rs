//! The rules of gathered parameters and reduced gradients.
//!
//! Rules for each stage that gathers its parameters somewhere (at the level `full`, for every stage): (1) it
//! computes only while they are gathered, except that a stage that reduces no gradients may compute weight gradients without
//! them, because what it gathers is frozen; (2) `UNSHARD` and `RESHARD` alternate, beginning with `UNSHARD`.
//! For each stage that reduces its gradients (at the level `full`, unless the program is forward-only, for
//! every stage with trained parameters): (3) the reduction follows its last weight gradient, and the stage is
//! not frozen; (4) at the level `full`, the reduction and its wait are present.

use crate::action::{Action, ActionKind};
use crate::ids::{Rank, StageIndex};
use crate::level::Level;
use crate::trained::StageBackward;
use crate::validate::context::Context;
use crate::validate::violation::Report;

/// Checks every stage.
pub(super) fn check(context: &Context<'_>, report: &mut Report) {
    let full = context.level == Level::Full;
    if full || context.present.contains_any(&[ActionKind::Unshard, ActionKind::Reshard]) {
        check_gathering(context, report);
    }
    if context.present.contains_any(&[ActionKind::ReduceGrad]) {
        check_reduction(context, report);
    }
    if context.level == Level::Full && !context.forward_only {
        check_reduced(context, report);
    }
}

/// Checks rules 1 and 2.
fn check_gathering(context: &Context<'_>, report: &mut Report) {
    let mut gathered = vec![false; context.program.placement().stages() as usize];
    let shards = |stage| {
        let present = |action| context.present.contains(action);
        context.level == Level::Full
            || present(Action::Unshard { stage })
            || present(Action::Reshard { stage })
    };
    let needs = |action: Action| {
        let stage = action.stage();
        let is_frozen =
            context.level != Level::Full && !context.present.contains(Action::ReduceGrad { stage });
        action.kind().is_compute() && !(is_frozen && action.kind() == ActionKind::WeightBackward)
    };
    for (rank, row) in (0..).map(Rank::new).zip(context.program.rows()) {
        for (position, &cell) in row.iter().enumerate() {
            for action in cell.parts() {
                let Some(gathered) = gathered.get_mut(action.stage().index()) else { continue };
                let (kind, stage) = (action.kind(), action.stage());
                if kind == ActionKind::Unshard && *gathered {
                    let again = "gathers parameters that are already gathered; drop it, or put";
                    report.push(rank, || (position, format!("{action} {again} {stage}RESHARD before it")));
                } else if !*gathered && (kind == ActionKind::Reshard || needs(action) && shards(stage)) {
                    let absent = "needs parameters that are not gathered; put";
                    report.push(rank, || (position, format!("{action} {absent} {stage}UNSHARD before it")));
                } else {
                    *gathered = (*gathered || kind == ActionKind::Unshard) && kind != ActionKind::Reshard;
                }
            }
        }
    }
}

/// Checks rule 3.
fn check_reduction(context: &Context<'_>, report: &mut Report) {
    let mut reduced = vec![false; context.program.placement().stages() as usize];
    for (rank, row) in (0..).map(Rank::new).zip(context.program.rows()) {
        for (position, &cell) in row.iter().enumerate() {
            for action in cell.parts() {
                let reduce = Action::ReduceGrad { stage: action.stage() };
                let Some(reduced) = reduced.get_mut(action.stage().index()) else { continue };
                if action == reduce && context.is_frozen(action.stage()) {
                    report.push_unused(rank, || position, action);
                }
                if action.kind().adds_weight_gradients() && *reduced {
                    let after = "adds to gradients that are already reduced; put";
                    report.push(rank, || (position, format!("{action} {after} {reduce} after it")));
                }
                *reduced |= action == reduce;
            }
        }
    }
}

/// Checks rule 4.
fn check_reduced(context: &Context<'_>, report: &mut Report) {
    let placement = context.program.placement();
    let is_trained = |stage: &StageIndex| context.backward_of(*stage) == StageBackward::Whole;
    for stage in placement.all_stages().filter(is_trained) {
        let rank = placement.rank_of(stage);
        for action in [Action::ReduceGrad { stage }, Action::WaitReduceGrad { stage }] {
            if !context.present.contains(action) {
                report.push_missing(context.program, rank, action);
            }
        }
    }
}
