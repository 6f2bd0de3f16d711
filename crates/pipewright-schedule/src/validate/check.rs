//! Runs every rule family over a program: the validator's table of contents.

use crate::action::{Action, ActionKind};
use crate::action_set::{ActionSet, bit};
use crate::ids::Rank;
use crate::level::Level;
use crate::neighbours::Neighbours;
use crate::schedule::Program;
use crate::validate::violation::Report;
use crate::validate::{coverage, deadlock, matching, order, peer_order, sharding, validated};

/// What the rule families share.
pub(super) struct Context<'a> {
    pub(super) program: &'a Program,
    pub(super) level: Level,
    /// The actions that are somewhere in the program, on the rank that owns their stage.
    pub(super) present: ActionSet,
    pub(super) neighbours: Neighbours,
    /// Whether no stage runs backward.
    pub(super) forward_only: bool,
}

/// Everything that is wrong with `program` at `level`. Takes time and memory linear in the program.
pub(crate) fn check(program: &Program, level: Level) -> Report {
    let mut report = Report::new();
    let neighbours = Neighbours::of(program.placement());
    let (present, in_order) = coverage::check_each(program, level, &neighbours, &mut report);
    let forward_only = !validated::has_backward(program);
    let context = Context { program, level, present, neighbours, forward_only };
    coverage::check_all(&context, &mut report);
    // Most programs are sound, and the walk above has seen that already.
    if !in_order || report.total() > 0 {
        order::check(&context, &mut report);
    }
    if level != Level::Compute {
        matching::check(&context, &mut report);
    }
    // Where every message has exactly its two ends, and each blocks until the other is reached, running to
    // the end also proves that each pair of ranks agrees on their order.
    let rendezvous = level != Level::Compute && report.total() == 0 && !context.waits_for_sends();
    let run = deadlock::Run::execute(&context, rendezvous);
    if level != Level::Compute && (!rendezvous || run.is_stuck()) {
        peer_order::check(&context, &mut report);
    }
    run.report_cycles(&mut report);
    sharding::check(&context, &mut report);
    report
}

impl Context<'_> {
    /// Whether any send only starts, because it is waited for later.
    fn waits_for_sends(&self) -> bool {
        const WAITS: u16 = bit(ActionKind::WaitSendForward) | bit(ActionKind::WaitSendBackward);
        let mut stages = self.program.placement().all_stages();
        stages.any(|stage| self.present.of_stage(stage).iter().any(|kinds| kinds & WAITS != 0))
    }
}

/// Where in the row of `rank` `action` is, alone or as a part of an overlap; the row's end where it is not. A
/// scan: for reports only.
pub(super) fn position_of(program: &Program, rank: Rank, action: Action) -> usize {
    let row = program.row(rank);
    row.iter().position(|cell| cell.parts().any(|part| part == action)).unwrap_or(row.len())
}
