//! Runs every family of rules over a program.

use crate::level::Level;
use crate::neighbours::Neighbours;
use crate::schedule::Program;
use crate::validate::context::{Context, has_backward};
use crate::validate::violation::Report;
use crate::validate::{batches, coverage, deadlock, matching, offload, order, peer_order, sharding};

/// Finds all violations of `program` at `level`, in time and memory linear in the program.
pub(crate) fn check(program: &Program, level: Level) -> Report {
    let mut report = Report::new();
    let context = check_actions(program, level, &mut report);
    // Each message has its two ends, and both block. Then a run without deadlock also shows that each pair of
    // ranks agrees on the order of messages.
    let rendezvous = level != Level::Compute && report.total() == 0 && !context.waits_for_sends();
    let run = deadlock::Run::execute(&context, rendezvous);
    if level != Level::Compute && (!rendezvous || run.is_stuck()) {
        peer_order::check(&context, &mut report);
    }
    run.report_cycles(&mut report);
    sharding::check(&context, &mut report);
    offload::check(&context, &mut report);
    report
}

/// Finds the violations of the rules that do not depend on how messages travel.
pub(crate) fn check_content(program: &Program, level: Level) -> Report {
    let mut report = Report::new();
    let context = check_actions(program, level, &mut report);
    sharding::check(&context, &mut report);
    offload::check(&context, &mut report);
    report
}

/// Checks that the actions and both ends of each message exist, and that each rank computes in order.
fn check_actions<'a>(program: &'a Program, level: Level, report: &mut Report) -> Context<'a> {
    let neighbours = Neighbours::of(program.placement());
    let (present, in_order) = coverage::check_each(program, level, &neighbours, report);
    let forward_only = !has_backward(program);
    let context = Context { program, level, present, neighbours, forward_only };
    coverage::check_all(&context, report);
    // Most programs are sound, and then the walk above has already checked the order, except the order of
    // slices.
    if !in_order || report.total() > 0 || !program.slices().is_one() {
        order::check(&context, report);
    }
    batches::check(&context, report);
    if level != Level::Compute {
        matching::check(&context, report);
    }
    context
}
