//! The rules of order on one rank.
//!
//! Rules: (1) a forward follows the action that brings its input: the receive, or the forward of the previous
//! stage on the same rank; (2) a backward follows its stage's forward and the action that brings its
//! gradient; (3) `W` follows `I`; (4) a send follows the computation of its tensor; (5) a wait follows the
//! action that it waits for, `OFFLOAD` the forward, and `RELOAD` its `OFFLOAD`; (6) the forward of a slice
//! follows the forward of the slice before it in its microbatch, and its backward follows the backward of the
//! slice after it ([`crate::slices`]). The halves of an overlap start together, so neither can provide a tensor
//! for the other.
//!
//! If the needed action is nowhere in the program, other families report it as missing. For a send or a wait,
//! this family reports it.

use crate::action::{Action, ActionKind};
use crate::action_set::{ActionSet, bit};
use crate::ids::{Microbatch, Rank, StageIndex};
use crate::level::Level;
use crate::neighbours::{Neighbour, Neighbours};
use crate::slices::Slices;
use crate::validate::context::{Context, position_of};
use crate::validate::violation::Report;

/// Checks the order of every row.
pub(super) fn check(context: &Context<'_>, report: &mut Report) {
    let mut done = ActionSet::for_program(context.program);
    for (rank, row) in (0..).map(Rank::new).zip(context.program.rows()) {
        for (position, &cell) in row.iter().enumerate() {
            for action in cell.parts() {
                let needs = context.needs(action).into_iter().flatten();
                for needs in needs.filter(|&needs| !done.contains(needs)) {
                    check_missing(context, report, rank, position, action, needs);
                }
                if let Some(needs) = context.neighbouring_slice(action).filter(|&needs| !done.contains(needs))
                {
                    check_slice(context, report, rank, position, action, needs);
                }
            }
            for action in cell.parts() {
                done.insert(action);
            }
        }
    }
}

/// Returns whether `before`, the set of earlier actions, contains the actions that `action` needs on its
/// rank, except the ones on other slices. `action` is not an overlap. The result is reliable if no action is
/// on a wrong rank or occurs twice, which the coverage rules check. It may then be false for a correct
/// program, but is never true for a wrong one.
#[inline]
pub(super) fn dependencies_precede(
    action: Action,
    before: &ActionSet,
    neighbours: &Neighbours,
    level: Level,
) -> bool {
    const GRADIENT: u16 = bit(ActionKind::Backward) | bit(ActionKind::InputBackward);
    let (stage, microbatch) = (action.stage(), action.microbatch());
    let has = |stage, kinds: u16| before.kinds(stage, microbatch) & kinds != 0;
    let kind = action.kind();
    match kind {
        ActionKind::Forward => match neighbours.before(stage) {
            Neighbour::None => true,
            Neighbour::SameRank => stage.before().is_some_and(|stage| has(stage, bit(ActionKind::Forward))),
            Neighbour::OtherRank(_) => level == Level::Compute || has(stage, bit(ActionKind::RecvForward)),
        },
        ActionKind::Backward | ActionKind::InputBackward if !has(stage, bit(ActionKind::Forward)) => false,
        ActionKind::Backward | ActionKind::InputBackward => match neighbours.after(stage) {
            Neighbour::None => true,
            Neighbour::SameRank => stage.after().is_some_and(|stage| has(stage, GRADIENT)),
            Neighbour::OtherRank(_) => level == Level::Compute || has(stage, bit(ActionKind::RecvBackward)),
        },
        ActionKind::WeightBackward => has(stage, bit(ActionKind::InputBackward)),
        ActionKind::SendForward => has(stage, bit(ActionKind::Forward)),
        ActionKind::SendBackward => has(stage, GRADIENT),
        ActionKind::WaitSendForward => has(stage, bit(ActionKind::SendForward)),
        ActionKind::WaitSendBackward => has(stage, bit(ActionKind::SendBackward)),
        ActionKind::WaitReduceGrad => has(stage, bit(ActionKind::ReduceGrad)),
        ActionKind::Offload => has(stage, bit(ActionKind::Forward)),
        ActionKind::Reload => has(stage, bit(ActionKind::Offload)),
        _ => true,
    }
}

/// Reports that the neighbouring slice does not come before `action`. If it is nowhere, it is reported as
/// missing.
fn check_slice(
    context: &Context<'_>,
    report: &mut Report,
    rank: Rank,
    position: usize,
    action: Action,
    needs: Action,
) {
    if context.present.contains(needs) {
        report.push(rank, || {
            let at = position_of(context.program, rank, needs);
            let why = why_slices(context.program.slices(), action, needs);
            let early = format!("{action} needs {needs}, which comes only at position {at}");
            (position, format!("{early}: {why}; move one of them"))
        });
    }
}

/// Reports that `needs` does not come before `action`, unless another family reports it.
fn check_missing(
    context: &Context<'_>,
    report: &mut Report,
    rank: Rank,
    position: usize,
    action: Action,
    needs: Action,
) {
    if context.present.contains(needs) {
        report.push(rank, || {
            let at = position_of(context.program, rank, needs);
            (position, format!("{action} needs {needs}, which comes only at position {at}; move one of them"))
        });
    } else if !action.is_compute() {
        let problem = || format!("{action} needs {needs}, which is missing; add {needs} or drop {action}");
        report.push(rank, || (position, problem()));
    }
}

/// Returns why an action on a slice needs that on another slice, for an error message.
fn why_slices(slices: Slices, action: Action, needs: Action) -> String {
    let place = |action: Action| action.microbatch().map(|number| slices.place(number));
    let (Some((microbatch, slice)), Some((_, other))) = (place(action), place(needs)) else {
        return String::new();
    };
    let stage = action.stage();
    match action.kind() {
        ActionKind::Forward => format!(
            "at stage {stage}, slice {slice} of microbatch {microbatch} attends to the keys and values of slice {other}"
        ),
        _ => format!(
            "at stage {stage}, slice {other} of microbatch {microbatch} adds to the gradients of the keys and values of \
             slice {slice}"
        ),
    }
}

impl Context<'_> {
    /// Returns the action on a neighbouring slice of the same microbatch that must come before `action`,
    /// which is not an overlap.
    fn neighbouring_slice(&self, action: Action) -> Option<Action> {
        let slices = self.program.slices();
        match action {
            Action::Forward { stage, microbatch } => {
                Some(Action::Forward { stage, microbatch: slices.before(microbatch)? })
            }
            Action::Backward { stage, microbatch } | Action::InputBackward { stage, microbatch } => {
                Some(self.present.input_gradient(stage, slices.after(microbatch)?))
            }
            _ => None,
        }
    }

    /// Returns the actions, at most two, that must come before `action` on its rank. `action` is not an
    /// overlap.
    #[inline]
    fn needs(&self, action: Action) -> [Option<Action>; 2] {
        let own = |kind| [action.with_kind(kind), None];
        match action {
            Action::Forward { stage, microbatch } => [self.input(stage, microbatch), None],
            Action::Backward { stage, microbatch } | Action::InputBackward { stage, microbatch } => {
                [Some(Action::Forward { stage, microbatch }), self.gradient(stage, microbatch)]
            }
            Action::WeightBackward { .. } => own(ActionKind::InputBackward),
            Action::SendForward { .. } | Action::Offload { .. } => own(ActionKind::Forward),
            Action::SendBackward { stage, microbatch } => {
                [Some(self.present.input_gradient(stage, microbatch)), None]
            }
            Action::WaitSendForward { .. } => own(ActionKind::SendForward),
            Action::WaitSendBackward { .. } => own(ActionKind::SendBackward),
            Action::WaitReduceGrad { stage } => [Some(Action::ReduceGrad { stage }), None],
            Action::Reload { .. } => own(ActionKind::Offload),
            _ => [None, None],
        }
    }

    /// Returns the action that brings the input of a forward to its rank; `None` if the input is the batch,
    /// or at a level without receives.
    fn input(&self, stage: StageIndex, microbatch: Microbatch) -> Option<Action> {
        match self.neighbours.before(stage) {
            Neighbour::None => None,
            Neighbour::SameRank => {
                Some(Action::Forward { stage: self.program.placement().previous(stage)?, microbatch })
            }
            Neighbour::OtherRank(_) => self.received(Action::RecvForward { stage, microbatch }),
        }
    }

    /// Returns the action that brings the output gradient of a backward to its rank; `None` if the loss
    /// provides it, or at a level without receives.
    fn gradient(&self, stage: StageIndex, microbatch: Microbatch) -> Option<Action> {
        match self.neighbours.after(stage) {
            Neighbour::None => None,
            Neighbour::SameRank => {
                Some(self.present.input_gradient(self.program.placement().next(stage)?, microbatch))
            }
            Neighbour::OtherRank(_) => self.received(Action::RecvBackward { stage, microbatch }),
        }
    }

    /// Returns `receive`, or `None` at the level `compute`, which has no receives.
    fn received(&self, receive: Action) -> Option<Action> {
        (self.level != Level::Compute).then_some(receive)
    }
}
