//! The pass `order-safe`: whatever the order of the messages of a program, the pass makes it sound on every
//! communicator, as a second judge says, or no order exists.

use std::collections::HashSet;

use pipewright_schedule::communicator::judge;
use pipewright_schedule::csv::print_program;
use pipewright_schedule::lower::order_safe;
use pipewright_schedule::{Action, Level, LowerError, Program};
use proptest::prelude::*;

use crate::{any_program, checker, communicators, shuffled};

/// Moves messages of a program to other positions of their rows, as far as their computations permit.
fn moved(
    program: Program,
    moves: &[(prop::sample::Index, prop::sample::Index, prop::sample::Index)],
) -> Program {
    let mut rows: Vec<_> = program.rows().to_vec();
    for (rank, from, to) in moves {
        let row = rank.get_mut(&mut rows);
        let (from, to) = (from.index(row.len()), to.index(row.len()));
        if is_message(row[from]) {
            let action = row.remove(from);
            row.insert(to, action);
        }
    }
    let placement = program.placement().clone();
    Program::new(placement, program.microbatches(), rows).expect("the same actions")
}

fn is_message(action: Action) -> bool {
    let is_wait = matches!(action, Action::WaitSendForward { .. } | Action::WaitSendBackward { .. });
    action.is_communication() && !is_wait
}

/// Returns the actions of each rank that are not messages.
fn others(program: &Program) -> Vec<Vec<Action>> {
    let others = |row: &Vec<Action>| row.iter().copied().filter(|&action| !is_message(action)).collect();
    program.rows().iter().map(others).collect()
}

/// Returns the actions of each rank in a fixed order.
fn sorted(program: &Program) -> Vec<Vec<String>> {
    let sorted = |row: &Vec<Action>| {
        let mut row: Vec<String> = row.iter().map(ToString::to_string).collect();
        row.sort();
        row
    };
    program.rows().iter().map(sorted).collect()
}

/// Returns whether all ranks come to their end if every tensor arrives as soon as it is made.
fn can_compute(program: &Program) -> bool {
    let rows = others(program);
    let (mut next, mut made) = (vec![0; rows.len()], HashSet::new());
    let stages = program.placement().stages();
    loop {
        let before = next.clone();
        for (rank, row) in rows.iter().enumerate() {
            let is_ready = |part: Action| match part {
                Action::Forward { stage, microbatch } => {
                    stage.get() == 0 || made.contains(&(true, stage.get() - 1, microbatch))
                }
                Action::Backward { stage, microbatch } | Action::InputBackward { stage, microbatch } => {
                    stage.get() + 1 == stages || made.contains(&(false, stage.get() + 1, microbatch))
                }
                _ => true,
            };
            let Some(action) = row.get(next[rank]).filter(|action| action.parts().all(is_ready)) else {
                continue;
            };
            next[rank] += 1;
            for part in action.parts() {
                if let Some(microbatch) = part.microbatch().filter(|_| part.is_compute()) {
                    let is_forward = matches!(part, Action::Forward { .. });
                    let is_weight = matches!(part, Action::WeightBackward { .. });
                    if !is_weight {
                        made.insert((is_forward, part.stage().get(), microbatch));
                    }
                }
            }
        }
        if next == before {
            return next.iter().zip(&rows).all(|(&next, row)| next == row.len());
        }
    }
}

fn check(program: &Program) -> Result<(), TestCaseError> {
    for communicator in communicators() {
        let text = || format!("{communicator:?}\n{}", print_program(program));
        let verdict = judge(program, Level::Comms, &communicator);
        let ordered = match order_safe(program.clone(), &communicator) {
            Ok(ordered) => ordered,
            Err(LowerError::Invalid(_)) => {
                prop_assert!(verdict.is_err(), "{}", text());
                continue;
            }
            Err(error) => {
                prop_assert!(!can_compute(program), "{error}: {}", text());
                continue;
            }
        };
        if verdict.is_ok_and(|verdict| verdict.is_sound()) {
            prop_assert_eq!(&ordered, program, "{}", text());
            continue;
        }
        let found = checker::judge(&ordered, &communicator);
        prop_assert!(!found.is_crossed && !found.hangs, "{}to\n{}", text(), print_program(&ordered));
        let verdict = judge(&ordered, Level::Comms, &communicator).expect("nothing is missing");
        prop_assert!(verdict.is_sound(), "{}to\n{}{verdict}", text(), print_program(&ordered));
        prop_assert_eq!(others(&ordered), others(program), "{}", text());
        prop_assert_eq!(sorted(&ordered), sorted(program), "{}", text());
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    #[test]
    fn any_order_of_messages_becomes_sound(
        program in any_program(),
        swaps in prop::collection::vec(any::<(prop::sample::Index, prop::sample::Index)>(), 0..6),
        moves in prop::collection::vec(any::<(prop::sample::Index, prop::sample::Index, prop::sample::Index)>(), 0..8),
    ) {
        check(&moved(shuffled(program, &swaps), &moves))?;
    }
}
