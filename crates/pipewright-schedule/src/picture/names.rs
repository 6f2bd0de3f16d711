//! The names of actions in pictures, which are their text form with slices named by their microbatch, and of programs.

use std::fmt;

use crate::action::Action;
use crate::schedule::Program;
use crate::slices::Slices;
use crate::words::counted;

/// The name of an action. If microbatches are cut into slices, it ends with the microbatch and the slice:
/// `0F3.1`.
#[derive(Clone, Copy)]
pub(super) struct Named(pub(super) Action, pub(super) Slices);

impl fmt::Display for Named {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(action, slices) = *self;
        match (action, action.microbatch()) {
            (Action::Overlap(_), _) => {
                let parts: Vec<String> = action.parts().map(|part| Self(part, slices).to_string()).collect();
                write!(f, "({}){}", parts.join(";"), action.kind())
            }
            (_, Some(number)) => write!(f, "{}{}{}", action.stage(), action.kind(), slices.name(number)),
            (_, None) => action.fmt(f),
        }
    }
}

/// Returns the name of a schedule and the size of its program, on one line.
///
/// ```
/// use pipewright_schedule::{csv, picture};
/// let program = csv::parse_program("0F0,0B0\n1F0,1B0\n")?;
/// assert_eq!(picture::title("gpipe", &program), "gpipe: 2 ranks, 2 stages, 1 microbatch");
/// # Ok::<(), pipewright_schedule::csv::CsvError>(())
/// ```
pub fn title(name: &str, program: &Program) -> String {
    let ranks = counted(program.ranks(), "rank");
    let stages = counted(program.placement().stages(), "stage");
    let microbatches = microbatches_in_words(program.microbatches() / program.batches(), program.slices());
    match program.batches() {
        1 => format!("{name}: {ranks}, {stages}, {microbatches}"),
        batches => format!("{name}: {ranks}, {stages}, {batches} batches of {microbatches}"),
    }
}

/// Returns the number of microbatches and of their slices in words. `numbers` counts all slices.
pub fn microbatches_in_words(numbers: u32, slices: Slices) -> String {
    let microbatches = counted(numbers / slices.get(), "microbatch");
    if slices.is_one() { microbatches } else { format!("{microbatches} of {slices} slices") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(action: &str, slices: u32, expected: &str) {
        let slices = Slices::new(slices).expect("not 0");
        assert_eq!(Named(action.parse().expect(action), slices).to_string(), expected);
    }

    #[test]
    fn a_whole_microbatch_has_its_text_form() {
        for action in ["2F7", "0UNSHARD", "1SEND_F3", "(0F7;7B3)OVERLAP_F_B"] {
            check(action, 1, action);
        }
    }

    #[test]
    fn a_slice_is_named_by_its_microbatch() {
        check("2F7", 2, "2F3.1");
        check("1RECV_B8", 4, "1RECV_B2.0");
        check("0UNSHARD", 4, "0UNSHARD");
        check("(0F7;7B3)OVERLAP_F_B", 3, "(0F2.1;7B1.0)OVERLAP_F_B");
    }
}
