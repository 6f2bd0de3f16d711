//! The pass `merge-bw`: merges the halves of a split backward if they are adjacent.
//!
//! Rule: an `I` that is directly followed by the `W` of the same stage and microbatch becomes a `B` together
//! with it. Any action in between, even a wait or a message, keeps them apart, because it was placed there to
//! overlap with `W`. Merging saves a second pass over the stage's graph and the tensors kept between the
//! halves. Time: linear in the row, in place.

use crate::action::Action;
use crate::schedule::Program;

/// Replaces every adjacent `I W` pair by `B`.
pub fn merge_bw(program: Program) -> Program {
    program.map_rows(|_, mut row| {
        let mut kept = 0;
        for at in 0..row.len() {
            match merged(row[..kept].last(), row[at]) {
                Some(full) => row[kept - 1] = full,
                None => {
                    row[kept] = row[at];
                    kept += 1;
                }
            }
        }
        row.truncate(kept);
        row
    })
}

/// Returns the full backward that `previous` and `action` make together, if they do.
fn merged(previous: Option<&Action>, action: Action) -> Option<Action> {
    match (previous?, action) {
        (
            &Action::InputBackward { stage, microbatch },
            Action::WeightBackward { stage: of, microbatch: on },
        ) if stage == of && microbatch == on => Some(Action::Backward { stage, microbatch }),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::csv::{parse_program, print_program};

    fn check(rows: &str, expected: &str) {
        let program = parse_program(rows).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(print_program(&merge_bw(program)), expected);
    }

    #[test]
    fn neighbours_merge() {
        check("0F0,0I0,0W0\n", "0F0,0B0\n");
        check("0F0,0F1,0I0,0W0,0I1,0W1\n", "0F0,0F1,0B0,0B1\n");
    }

    #[test]
    fn others_stay() {
        check("0F0,0F1,0I0,0I1,0W0,0W1\n", "0F0,0F1,0I0,0I1,0W0,0W1\n");
        check("1F0,1I0,1SEND_B0,1W0\n0F0\n", "1F0,1I0,1SEND_B0,1W0\n0F0\n");
        check("0I0,1W0\n", "0I0,1W0\n");
    }

    #[test]
    fn short_rows_are_fine() {
        check("0I0\n", "0I0\n");
        check("0W0,0I0\n", "0W0,0I0\n");
    }
}
