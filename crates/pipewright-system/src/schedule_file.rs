//! Reads the text of schedules in files, locates mistakes in it, and gives a hint if its actions may number
//! slices.

use std::io;
use std::path::{Path, PathBuf};

use pipewright_schedule::csv::CsvError;
use pipewright_schedule::generate::find;
use pipewright_schedule::{ActionKind, Program};
use thiserror::Error;

use crate::bounded_file::{read_regular_text, read_text, read_text_from};
use crate::schedule_memory::OutOfMemory;

/// The largest file that is read: enough for the largest program that can run.
const LARGEST_SCHEDULE: u64 = 1 << 30;

/// The reason why a file cannot be used as a schedule.
#[derive(Error)]
pub enum ScheduleFileError {
    /// The file cannot be read.
    #[error("{}: cannot read the schedule: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// The schedule does not fit into memory.
    #[error("{source}")]
    Memory {
        /// The numbers.
        #[from]
        source: OutOfMemory,
    },
    /// The text is not a schedule.
    #[error("{}", locate(path, source))]
    Csv {
        /// The file.
        path: PathBuf,
        /// The mistake and its place.
        source: CsvError,
    },
}

pipewright_schedule::message_as_debug!(ScheduleFileError);

/// Returns whether the name of a file says that it has a schedule.
pub fn has_ending(name: &Path) -> bool {
    name.extension().is_some_and(|ending| ending.eq_ignore_ascii_case("csv"))
}

/// Returns whether a text is the name of a schedule's file, at `path`: it has the ending, or a file has the name and no
/// schedule has.
pub fn is_file(name: &str, path: &Path) -> bool {
    has_ending(path) || find(name).is_err() && path.is_file()
}

/// Returns the text of a schedule's file, which may be a pipe, or of standard input for the name `-`.
pub fn read(file: &Path) -> Result<String, ScheduleFileError> {
    let text = if file == Path::new("-") {
        read_text_from(io::stdin().lock(), LARGEST_SCHEDULE)
    } else {
        read_text(file, LARGEST_SCHEDULE)
    };
    text.map_err(|source| ScheduleFileError::Read { path: file.to_owned(), source })
}

/// Returns the text of a schedule's file, which must be a regular file.
pub fn read_regular(file: &Path) -> Result<String, ScheduleFileError> {
    read_regular_text(file, LARGEST_SCHEDULE)
        .map_err(|source| ScheduleFileError::Read { path: file.to_owned(), source })
}

/// Returns the message of an error in a schedule's file, with its place in a form that editors recognize.
pub fn locate(file: &Path, error: &CsvError) -> String {
    let CsvError { at, problem } = error;
    let place = at.map_or_else(String::new, |(line, column)| format!(":{line}:{column}"));
    format!("{}{place}: {problem}", file.display())
}

/// Returns a line that names `--slices`, if the program counts whole microbatches but each stage runs its
/// backwards like the backwards of slices: in groups of one size, each in descending order.
pub fn slice_hint(program: &Program) -> Option<String> {
    let stages = program.placement().stages() as usize;
    let mut backwards: Vec<Vec<u32>> = vec![Vec::new(); stages];
    for action in program.rows().iter().flatten() {
        if let (ActionKind::Backward | ActionKind::InputBackward, Some(number)) =
            (action.kind(), action.microbatch())
        {
            backwards[action.stage().index()].push(number.get());
        }
    }
    let slices = backwards.first()?.first()? + 1;
    let are_slices = program.slices().is_one()
        && slices > 1
        && slices < program.microbatches()
        && backwards.iter().all(|numbers| is_descending_in_groups(numbers, slices));
    are_slices.then(|| {
        format!(
            "each stage runs its backwards in groups of {slices}, in descending order, as a schedule with slices does; if the actions \
             number slices, add --slices {slices}"
        )
    })
}

/// Returns whether `numbers` are 0, 1, 2 and so on, in groups of `size` that are each reversed.
fn is_descending_in_groups(numbers: &[u32], size: u32) -> bool {
    let expected = (0..).map(|index| index / size * size + (size - 1 - index % size));
    numbers.iter().zip(expected).all(|(&number, expected)| number == expected)
}
