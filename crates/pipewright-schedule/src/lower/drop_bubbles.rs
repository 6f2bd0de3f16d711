//! Drops bubbles: from what a rank does at each tick to what it does in order.
//!
//! Rule: the actions of a row stay, in their order; empty cells go. When a rank idles is decided from here on
//! by what it waits for, not by the schedule.
//!
//! A large schedule takes a good part of the memory that lowering takes, and filling memory takes time. So its rows
//! are copied only for a pass that changes them; sends and receives are added to the schedule as it is, whose bubbles
//! are dropped on the way ([`Computation`]).

use crate::schedule::{Program, Schedule};

/// What the ranks compute, before sends and receives are added.
pub(super) enum Computation<'a> {
    /// What a schedule says, without its bubbles.
    Scheduled(&'a Schedule),
    /// What a pass has made of it.
    Changed(Program),
}

impl Computation<'_> {
    /// The program that computes this, and nothing more.
    pub(super) fn into_program(self) -> Program {
        match self {
            Self::Scheduled(schedule) => drop_bubbles(schedule),
            Self::Changed(program) => program,
        }
    }
}

/// The program of `schedule`'s actions, without its bubbles.
pub fn drop_bubbles(schedule: &Schedule) -> Program {
    Program::without_bubbles(schedule)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::csv::{parse_schedule, print_program};

    #[test]
    fn only_bubbles_go() {
        let schedule = parse_schedule(",0F0,,,0B0,\n1F0,1B0\n").expect("a schedule");
        assert_eq!(print_program(&drop_bubbles(&schedule)), "0F0,0B0\n1F0,1B0\n");
    }
}
