//! Drops bubbles: from what a rank does at each tick to what it does in order.
//!
//! Rule: the actions of a row stay, in their order; empty cells go. When a rank idles is decided from here on
//! by what it waits for, not by the schedule.

use crate::schedule::{Program, Schedule};

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
