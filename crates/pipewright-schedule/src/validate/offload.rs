//! The rules of offloading: what a forward keeps is in memory when its backward uses it.
//!
//! Rules: (1) `OFFLOAD` follows the forward and comes before the backward; (2) `RELOAD` follows `OFFLOAD` and comes
//! before the backward; (3) without a backward there is nothing to move. [`super::order`] checks that the forward comes
//! before `OFFLOAD`, and that before `RELOAD`; [`super::coverage`] refuses a second one of either.

use std::collections::HashMap;

use crate::action::{Action, ActionKind};
use crate::ids::{Microbatch, Rank, StageIndex};
use crate::validate::context::Context;
use crate::validate::violation::Report;

/// The first `OFFLOAD`, `RELOAD` and backward of a stage and microbatch, with their positions.
#[derive(Default)]
struct Places {
    offload: Option<usize>,
    reload: Option<usize>,
    backward: Option<(Action, usize)>,
}

/// Checks every row that moves tensors.
pub(super) fn check(context: &Context<'_>, report: &mut Report) {
    for (rank, row) in (0..).map(Rank::new).zip(context.program.rows()) {
        if row.iter().any(|action| action.kind().is_offload()) {
            check_row(context, report, rank, row);
        }
    }
}

fn check_row(context: &Context<'_>, report: &mut Report, rank: Rank, row: &[Action]) {
    let mut places: HashMap<(StageIndex, Microbatch), Places> = HashMap::new();
    for (position, part) in
        row.iter().enumerate().flat_map(|(position, cell)| cell.parts().map(move |part| (position, part)))
    {
        let Some(microbatch) = part.microbatch() else { continue };
        let places = places.entry((part.stage(), microbatch)).or_default();
        match part.kind() {
            ActionKind::Offload => {
                places.offload.get_or_insert(position);
            }
            ActionKind::Reload => {
                places.reload.get_or_insert(position);
            }
            ActionKind::Backward | ActionKind::InputBackward => {
                places.backward.get_or_insert((part, position));
            }
            _ => {}
        }
    }
    for (position, &action) in row.iter().enumerate() {
        let Action::Offload { stage, microbatch } = action else { continue };
        let Some(places) = places.get(&(stage, microbatch)) else { continue };
        // What is outside the program or on a wrong rank, and a second `OFFLOAD`, is reported already.
        let is_own = context.program.placement().owner(stage) == Some(rank);
        if !is_own || !context.present.contains(action) || places.offload != Some(position) {
            continue;
        }
        check_times(report, rank, action, position, places);
    }
}

/// Reports the `OFFLOAD` at `position` unless its tensors are back before the backward that uses them.
fn check_times(report: &mut Report, rank: Rank, action: Action, position: usize, places: &Places) {
    let Some((backward, at)) = places.backward else {
        let unused = "moves tensors that no backward of its stage uses; drop it and its RELOAD";
        return report.push(rank, || (position, format!("{action} {unused}")));
    };
    if at < position {
        let advice = "has used the tensors; move it between the forward and the backward";
        let problem = || format!("{action} comes after {backward} at position {at}, which {advice}");
        return report.push(rank, || (position, problem()));
    }
    match places.reload {
        None => {
            let used = || format!("{backward} at position {at} uses the tensors; add one before that");
            report.push(rank, || (position, format!("{action} has no RELOAD, and {}", used())));
        }
        Some(reload) if reload > at => {
            let problem = || {
                format!(
                    "{backward} uses the tensors that {action} has moved away, and they come back only at position \
                     {reload}; move their RELOAD before it"
                )
            };
            report.push(rank, || (at, problem()));
        }
        Some(_) => {}
    }
}
