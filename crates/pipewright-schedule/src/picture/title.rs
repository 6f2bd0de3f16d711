//! The line that names a schedule and its size above a picture.

use crate::schedule::Program;
use crate::slices::Slices;
use crate::words::counted;

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
    format!("{name}: {ranks}, {stages}, {}", microbatches_in_words(program.microbatches(), program.slices()))
}

/// Returns the number of microbatches and of their slices in words. `numbers` counts all slices.
pub fn microbatches_in_words(numbers: u32, slices: Slices) -> String {
    let microbatches = counted(numbers / slices.get(), "microbatch");
    if slices.is_one() { microbatches } else { format!("{microbatches} of {slices} slices") }
}
