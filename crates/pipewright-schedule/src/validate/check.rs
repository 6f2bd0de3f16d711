//! Runs every rule family over a program: the validator's table of contents.

use crate::action::Action;
use crate::ids::Rank;
use crate::level::Level;
use crate::marks::Marks;
use crate::schedule::Program;
use crate::validate::violation::Report;
use crate::validate::{coverage, deadlock, matching, order, sharding, validated};

/// What the rule families share.
pub(super) struct Context<'a> {
    pub(super) program: &'a Program,
    pub(super) level: Level,
    /// The actions that are somewhere in the program, on the rank that owns their stage.
    pub(super) present: Marks,
    /// Whether no stage runs backward.
    pub(super) forward_only: bool,
}

/// Everything that is wrong with `program` at `level`. Takes time and memory linear in the program.
pub(crate) fn check(program: &Program, level: Level) -> Report {
    let mut report = Report::new();
    let present = coverage::check_each(program, level, &mut report);
    let context = Context { program, level, present, forward_only: !validated::has_backward(program) };
    coverage::check_all(&context, &mut report);
    order::check(&context, &mut report);
    if level != Level::Compute {
        matching::check(&context, &mut report);
    }
    deadlock::check(&context, &mut report);
    sharding::check(&context, &mut report);
    report
}

/// Where in the row of `rank` `action` is, alone or as a part of an overlap; the row's end where it is not. A
/// scan: for reports only.
pub(super) fn position_of(program: &Program, rank: Rank, action: Action) -> usize {
    let row = program.row(rank);
    row.iter().position(|cell| cell.parts().any(|part| part == action)).unwrap_or(row.len())
}
