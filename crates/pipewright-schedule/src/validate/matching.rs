//! The rules of messages: every receive has its send, and every send its receive.
//!
//! Rules: (1) a result that a neighbouring stage on another rank needs is sent and received; the gradient for
//! a stage that runs forward only is not; (2) there is no send without its receive, and no receive without
//! its send; (3) there is no communication at the ends of the model or between stages of one rank.
//! [`super::peer_order`] checks the order of messages.

use crate::action::{Action, ActionKind};
use crate::action_set::bit;
use crate::ids::{Microbatch, Rank, StageIndex};
use crate::neighbours::Neighbour;
use crate::trained::StageBackward;
use crate::transfer::Transfer;
use crate::validate::context::{Context, position_of};
use crate::validate::violation::Report;

/// Checks all messages.
pub(super) fn check(context: &Context<'_>, report: &mut Report) {
    check_peers(context, report);
    check_pairs(context, report);
}

/// Checks rule 3.
fn check_peers(context: &Context<'_>, report: &mut Report) {
    let placement = context.program.placement();
    if !placement.all_stages().any(|stage| has_impossible_message(context, stage)) {
        return;
    }
    for (rank, row) in (0..).map(Rank::new).zip(context.program.rows()) {
        for (position, &action) in row.iter().enumerate() {
            // The coverage rules report actions outside the sizes of the program or on a wrong rank.
            let known = action.is_communication() && context.present.contains(action);
            if known && Transfer::of(placement, action).is_none() {
                let problem = || format!("{action} has no peer on another rank; drop it");
                report.push(rank, || (position, problem()));
            }
        }
    }
}

/// Returns whether `stage` has a message in a direction in which there is no other rank.
fn has_impossible_message(context: &Context<'_>, stage: StageIndex) -> bool {
    const BEFORE: u16 =
        bit(ActionKind::RecvForward) | bit(ActionKind::SendBackward) | bit(ActionKind::WaitSendBackward);
    const AFTER: u16 =
        bit(ActionKind::SendForward) | bit(ActionKind::RecvBackward) | bit(ActionKind::WaitSendForward);
    let lacks = |neighbour| !matches!(neighbour, Neighbour::OtherRank(_));
    let before = if lacks(context.neighbours.before(stage)) { BEFORE } else { 0 };
    let after = if lacks(context.neighbours.after(stage)) { AFTER } else { 0 };
    let wrong = before | after;
    wrong != 0 && context.present.of_stage(stage).iter().any(|kinds| kinds & wrong != 0)
}

/// Checks rules 1 and 2.
fn check_pairs(context: &Context<'_>, report: &mut Report) {
    for stage in context.program.placement().all_stages() {
        if matches!(context.neighbours.after(stage), Neighbour::OtherRank(_)) {
            check_boundary(context, report, stage);
        }
    }
}

/// Checks all messages between `stage` and the next one, which is on another rank.
fn check_boundary(context: &Context<'_>, report: &mut Report, stage: StageIndex) {
    let placement = context.program.placement();
    let Some(next) = placement.next(stage) else { return };
    const FORWARD: [u16; 2] = [bit(ActionKind::SendForward), bit(ActionKind::RecvForward)];
    const BACKWARD: [u16; 2] = [bit(ActionKind::RecvBackward), bit(ActionKind::SendBackward)];
    let has = |kinds: u16, wanted: u16| kinds & wanted != 0;
    let has_gradient = context.backward_of(stage) != StageBackward::None;
    let here = context.present.of_stage(stage).iter().zip(context.present.of_stage(next));
    for (microbatch, (&here, &there)) in (0..).map(Microbatch::new).zip(here) {
        let forward = has(here, FORWARD[0]) && has(there, FORWARD[1]);
        let backward = [has(here, BACKWARD[0]), has(there, BACKWARD[1])];
        if forward && backward == [has_gradient; 2] {
            continue;
        }
        let sources = [
            (Action::Forward { stage, microbatch }, true),
            (Action::Backward { stage: next, microbatch }, has_gradient),
        ];
        for (source, required) in sources {
            if let Some(transfer) = Transfer::after(placement, source) {
                check_pair(context, report, transfer, required);
            }
        }
    }
}

fn check_pair(context: &Context<'_>, report: &mut Report, transfer: Transfer, required: bool) {
    let Transfer { send, receive, sender, receiver } = transfer;
    match (context.present.contains(send), context.present.contains(receive)) {
        (true, true) if required => {}
        (true, true) => report.push_unused(sender, || position_of(context.program, sender, send), send),
        (true, false) => report.push(sender, || {
            let problem = format!("{send} is never received; add {receive} to rank {receiver}");
            (position_of(context.program, sender, send), problem)
        }),
        (false, true) => report.push(receiver, || {
            let problem = format!("{receive} has no send; add {send} to rank {sender}");
            (position_of(context.program, receiver, receive), problem)
        }),
        (false, false) if required => {
            report.push_missing(context.program, sender, send);
            report.push_missing(context.program, receiver, receive);
        }
        (false, false) => {}
    }
}
