//! Drops bubbles: turns the cells of each tick into actions in order.
//!
//! Rule: the actions of a row keep their order, and empty cells are removed. In the program a rank idles only
//! when it waits for a tensor.
//!
//! A large schedule takes a large part of the memory of lowering, and copying it takes time. So its rows are
//! copied only for a pass that changes them. If no pass does, sends and receives are added to the schedule
//! directly, and its bubbles are skipped ([`Computation`]).

use crate::schedule::{Program, Schedule};

/// The computation of the ranks, before sends and receives are added.
pub(super) enum Computation<'a> {
    /// The actions of a schedule.
    Scheduled(&'a Schedule),
    /// A program that a pass has made from the schedule.
    Changed(Program),
}

impl Computation<'_> {
    /// Returns the number of batches.
    pub(super) fn batches(&self) -> u32 {
        match self {
            Self::Scheduled(schedule) => schedule.batches(),
            Self::Changed(program) => program.batches(),
        }
    }

    /// Returns the program without messages.
    pub(super) fn into_program(self) -> Program {
        match self {
            Self::Scheduled(schedule) => drop_bubbles(schedule),
            Self::Changed(program) => program,
        }
    }
}

/// Makes the program of the actions of `schedule`, without its bubbles.
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
