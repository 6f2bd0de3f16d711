//! The program that runs only the forwards of another: evaluation with the placement of training.
//!
//! Rules: (1) each rank runs its forwards in the order in which the program has them, the forwards of
//! overlaps included; (2) sends and receives are added again; (3) if the program gathers parameters, this one
//! gathers them too, as many stages of a rank at once as the program holds at most.

use std::num::NonZeroU32;

use crate::action::Action;
use crate::ids::Rank;
use crate::level::Level;
use crate::lower::error::LowerError;
use crate::lower::passes::{LowerConfig, lower};
use crate::lower::unshard::UnshardConfig;
use crate::schedule::Schedule;
use crate::validate::{ValidatedProgram, validate};

/// Makes the forward-only program of `program`, with the same placement and microbatches.
///
/// # Errors
/// When the forwards alone do not make a sound program.
pub fn forward_part(program: &ValidatedProgram) -> Result<ValidatedProgram, LowerError> {
    let placement = program.placement();
    let forwards = |rank: Rank| {
        let parts = program.row(rank).iter().flat_map(|action| action.parts());
        parts.filter(|part| matches!(part, Action::Forward { .. })).map(Some).collect()
    };
    let rows = placement.all_ranks().map(forwards).collect();
    let schedule = Schedule::made(placement.clone(), program.as_program().numbering(), rows);
    let (level, unshard) = match most_gathered(program) {
        None => (Level::Comms, None),
        Some(window) => (Level::Full, Some(UnshardConfig { window, ..UnshardConfig::default() })),
    };
    let lowered = lower(&schedule, &LowerConfig { unshard, ..LowerConfig::from(level) })?;
    Ok(validate(lowered, level)?)
}

/// Returns the largest number of stages of one rank whose parameters are gathered or read at once; `None` if the
/// program gathers none.
pub fn most_gathered(program: &ValidatedProgram) -> Option<NonZeroU32> {
    let on_rank = |rank| {
        let (mut gathered, mut most) = (0u32, 0);
        for action in program.row(rank) {
            match action {
                Action::Unshard { .. } => gathered += 1,
                Action::Reshard { .. } => gathered = gathered.saturating_sub(1),
                _ => {}
            }
            most = most.max(gathered);
        }
        most
    };
    NonZeroU32::new(program.placement().all_ranks().map(on_rank).max()?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::csv::{parse_program, parse_schedule, print_program};
    use crate::slices::Slices;

    fn check(level: Level, rows: &str, expected: &str) {
        let program = validate(parse_program(rows).expect("a program"), level).expect("a sound program");
        let forwards = forward_part(&program).expect("its forwards are a program");
        assert!(forwards.is_forward_only());
        assert_eq!(print_program(forwards.as_program()), expected);
    }

    #[test]
    fn forwards_keep_their_order() {
        check(
            Level::Comms,
            "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n\
             1RECV_F0,1F0,1RECV_F1,1B0,1SEND_B0,1F1,1B1,1SEND_B1\n",
            "0F0,0SEND_F0,0F1,0SEND_F1\n1RECV_F0,1F0,1RECV_F1,1F1\n",
        );
    }

    #[test]
    fn slices_stay_slices() {
        let program = parse_program("0F0,0F1,0B1,0B0\n").expect("a program");
        let program = program.with_slices(Slices::new(2).expect("not 0")).expect("whole microbatches");
        let program = validate(program, Level::Compute).expect("a sound program");
        let forwards = forward_part(&program).expect("its forwards are a program");
        assert_eq!(forwards.slices(), program.slices());
    }

    #[test]
    fn an_overlap_leaves_its_forward() {
        check(Level::Compute, "0F0,(0F1;0B0)OVERLAP_F_B,0B1\n", "0F0,0F1\n");
    }

    #[test]
    fn parameters_are_gathered_as_in_training() {
        let schedule = parse_schedule("0F0,1F0,1B0,0B0\n").expect("a schedule");
        let window = NonZeroU32::new(1).expect("1 is not 0");
        let unshard = Some(UnshardConfig { window, ..UnshardConfig::default() });
        let config = LowerConfig { unshard, ..LowerConfig::from(Level::Full) };
        let program = lower(&schedule, &config).expect("it lowers");
        let forwards = forward_part(&validate(program, Level::Full).expect("a sound program"));
        let found = print_program(forwards.expect("its forwards are a program").as_program());
        assert_eq!(found, "0UNSHARD,0F0,0RESHARD,1UNSHARD,1F0,1RESHARD\n");
    }
}
