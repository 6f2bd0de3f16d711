//! Schedules and programs as CSV: one row a rank, cells separated by commas, an empty cell for a bubble, no
//! quotes.
//!
//! It is the format in which PyTorch's pipelining loads and dumps schedules, so that either side runs the
//! other's. Reading accepts `\r\n` line ends, blanks around a cell and a missing last line end; writing uses
//! `\n` alone. Reading allocates in proportion to the text, whatever the text says.
//!
//! ```
//! use pipewright_schedule::csv;
//! let schedule = csv::parse_schedule("0F0,0B0\n")?;
//! assert_eq!(csv::print_schedule(&schedule), "0F0,0B0\n");
//! let error = csv::parse_schedule("0F0,\n1F0,1F1x\n").unwrap_err();
//! assert!(error.to_string().starts_with("line 2, column 8: "));
//! # Ok::<(), csv::CsvError>(())
//! ```

use std::fmt::{Display, Write};

use thiserror::Error;

use crate::action::Action;
use crate::notation::ParseActionError;
use crate::schedule::{Program, Schedule, ScheduleError};

/// Why a text is not a schedule or a program.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum CsvError {
    /// A cell holds no action.
    #[error("line {line}, column {column}: {source}")]
    Cell {
        /// The line, counted from 1.
        line: usize,
        /// The byte in the line, counted from 1.
        column: usize,
        /// What is wrong with the cell.
        source: ParseActionError,
    },
    /// The cells are actions, but they do not fit together.
    #[error(transparent)]
    Rows(#[from] ScheduleError),
}

/// Reads a schedule; its placement and number of microbatches follow from the cells.
///
/// # Errors
/// At the first cell that is no action, or where [`Schedule::infer`] refuses the rows.
pub fn parse_schedule(text: &str) -> Result<Schedule, CsvError> {
    Ok(Schedule::infer(parse_rows(text)?)?)
}

/// Reads a program of any level, without its bubbles; its placement and number of microbatches follow from
/// the cells.
///
/// # Errors
/// At the first cell that is no action, or where [`Program::infer`] refuses the rows.
pub fn parse_program(text: &str) -> Result<Program, CsvError> {
    let rows = parse_rows(text)?.into_iter().map(|row| row.into_iter().flatten().collect());
    Ok(Program::infer(rows.collect())?)
}

/// Reads rows of cells, without asking what they mean together.
///
/// # Errors
/// At the first cell that is no action.
pub fn parse_rows(text: &str) -> Result<Vec<Vec<Option<Action>>>, CsvError> {
    (1..).zip(text.lines()).map(|(line, row)| parse_row(line, row)).collect()
}

/// Writes a schedule, with its bubbles.
pub fn print_schedule(schedule: &Schedule) -> String {
    print_rows(schedule.placement().all_ranks().map(|rank| schedule.row(rank).iter().copied()))
}

/// Writes a program.
pub fn print_program(program: &Program) -> String {
    print_rows(program.rows().iter().map(|row| row.iter().copied().map(Some)))
}

/// Writes rows of cells, such as those of a simulation.
pub fn print_rows<Row: IntoIterator<Item = Option<Action>>>(rows: impl IntoIterator<Item = Row>) -> String {
    let mut text = String::new();
    for row in rows {
        for (place, cell) in row.into_iter().enumerate() {
            let separator = if place == 0 { "" } else { "," };
            let cell: &dyn Display = match &cell {
                Some(action) => action,
                None => &"",
            };
            write!(text, "{separator}{cell}").expect("writing to a string does not fail");
        }
        text.push('\n');
    }
    text
}

fn parse_row(line: usize, row: &str) -> Result<Vec<Option<Action>>, CsvError> {
    let mut start = 0;
    let cells = row.split(',').map(|cell| {
        let blanks = cell.len() - cell.trim_ascii_start().len();
        let column = start + blanks;
        start += cell.len() + 1;
        match cell.trim_ascii() {
            "" => Ok(None),
            text => text.parse().map(Some).map_err(|source: ParseActionError| CsvError::Cell {
                line,
                column: column + source.column,
                source,
            }),
        }
    });
    cells.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn check(text: &str, printed: &str) {
        let schedule = parse_schedule(text).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(print_schedule(&schedule), printed);
    }

    fn check_error(text: &str, message: &str) {
        assert_eq!(parse_schedule(text).expect_err(text).to_string(), message);
    }

    #[test]
    fn line_ends_and_blanks_do_not_matter() {
        check("0F0,,0B0\n,1F0,1B0\n", "0F0,,0B0\n,1F0,1B0\n");
        check("0F0,,0B0\r\n,1F0,1B0", "0F0,,0B0\n,1F0,1B0\n");
        check(" 0F0 ,\t0B0\n", "0F0,0B0\n");
        check("0F0,\n", "0F0,\n");
    }

    #[test]
    fn errors_name_line_and_column() {
        check_error(
            "0F0\n1F0, 1SENT_F0\n",
            "line 2, column 7: unknown action `SENT_F`; did you mean `SEND_F`?",
        );
        check_error(
            "0F0,0F",
            "line 1, column 7: missing microbatch: `F` ends with its microbatch's number, such as `0F0`",
        );
        check_error("", "no action in any row; write one row a rank, with cells such as `0F0`");
    }

    #[test]
    fn a_program_has_no_bubbles() {
        let program = parse_program("0F0,,0SEND_F0\n,1RECV_F0,1F0\n").expect("a program");
        assert_eq!(print_program(&program), "0F0,0SEND_F0\n1RECV_F0,1F0\n");
    }

    proptest! {
        #[test]
        fn no_text_panics(text in "([0-9]{0,10}[FBIWSENDRCV_()\\r\\n,;]{0,3}){0,12}") {
            let _schedule = parse_schedule(&text);
            let _program = parse_program(&text);
        }
    }
}
