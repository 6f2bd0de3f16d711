//! Schedules and programs as CSV: one row per rank, one cell per action, and an empty cell for a bubble.
//!
//! PyTorch's pipelining loads and dumps schedules in this format, so that either side can run the schedules
//! of the other. Writing uses commas, `\n` line ends and no quotes. Reading also accepts what spreadsheets
//! write: a byte-order mark, `\r\n` line ends, quoted cells, semicolons instead of commas, blanks around a
//! cell, and a missing last line end. Reading allocates memory in proportion to the text.
//!
//! The reader is our own, because a cell may contain a semicolon outside of quotes (`(0F7;7B3)OVERLAP_F_B`)
//! and every error names its column.
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
#[derive(Clone, PartialEq, Eq, Error)]
#[error("{}{problem}", place(.at))]
pub struct CsvError {
    /// The line and the byte in the line, both counted from 1; `None` if the cells are actions, but do not fit
    /// together.
    pub at: Option<(usize, usize)>,
    /// What is wrong, and what to write instead.
    pub problem: String,
}

crate::error_text::message_as_debug!(CsvError);

fn place(at: &Option<(usize, usize)>) -> String {
    at.map_or_else(String::new, |(line, column)| format!("line {line}, column {column}: "))
}

impl From<ScheduleError> for CsvError {
    fn from(error: ScheduleError) -> Self {
        Self { at: None, problem: error.to_string() }
    }
}

/// The form of a quoted cell, as a message.
const QUOTED_CELL: &str = "a cell that begins with a quote must end with the next quote, such as `\"0F0\"`; correct or remove the quotes";

/// Reads a schedule; its placement and number of microbatches follow from the cells.
///
/// # Errors
/// At the first cell that is not an action, or where [`Schedule::infer`] refuses the rows.
pub fn parse_schedule(text: &str) -> Result<Schedule, CsvError> {
    Ok(Schedule::infer(parse_rows(text)?)?)
}

/// Reads a program of any level, without its bubbles; its placement and number of microbatches follow from
/// the cells.
///
/// # Errors
/// At the first cell that is not an action, or where [`Program::infer`] refuses the rows.
pub fn parse_program(text: &str) -> Result<Program, CsvError> {
    let rows = parse_rows(text)?.into_iter().map(|row| row.into_iter().flatten().collect());
    Ok(Program::infer(rows.collect())?)
}

/// Reads rows of cells, without asking what they mean together.
///
/// # Errors
/// At the first cell that is not an action.
pub fn parse_rows(text: &str) -> Result<Vec<Vec<Option<Action>>>, CsvError> {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let separator = find_separator(text);
    (1..).zip(text.lines()).map(|(line, row)| parse_row(line, row, separator)).collect()
}

/// Writes a schedule, with its bubbles.
pub fn print_schedule(schedule: &Schedule) -> String {
    print_rows(schedule.placement().all_ranks().map(|rank| schedule.row(rank).iter().copied()))
}

/// Writes a program.
pub fn print_program(program: &Program) -> String {
    print_rows(program.rows().iter().map(|row| row.iter().copied().map(Some)))
}

/// Writes rows of cells, such as the ticks of a simulation.
pub fn print_rows<Row: IntoIterator<Item = Option<Action>>>(rows: impl IntoIterator<Item = Row>) -> String {
    let mut text = String::new();
    for row in rows {
        for (index, cell) in row.into_iter().enumerate() {
            let separator = if index == 0 { "" } else { "," };
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

/// The separator of the cells: the first comma or semicolon that is not inside of quotes or of an overlap.
fn find_separator(text: &str) -> u8 {
    let (mut is_quoted, mut is_overlap) = (false, false);
    for byte in text.bytes() {
        match byte {
            b'"' => is_quoted = !is_quoted,
            b'(' => is_overlap = true,
            b')' => is_overlap = false,
            b',' | b';' if !is_quoted && !is_overlap => return byte,
            _ => {}
        }
    }
    b','
}

fn parse_row(line: usize, row: &str, separator: u8) -> Result<Vec<Option<Action>>, CsvError> {
    let error = |column, problem| CsvError { at: Some((line, column)), problem };
    let mut cells = Vec::new();
    let mut start = 0;
    while start <= row.len() {
        let rest = &row[start..];
        // Cells are short: a search that is set up for long texts is slower.
        let end = rest.bytes().position(|byte| byte == separator).unwrap_or(rest.len());
        let mut cell = CellText { text: rest[..end].trim_ascii(), length: end };
        if let Some(b'"' | b'(') = cell.text.as_bytes().first() {
            cell = CellText::with_separators(rest, separator)
                .map_err(|unexpected| error(start + unexpected + 1, QUOTED_CELL.to_owned()))?;
        }
        cells.push(match cell.text {
            "" => None,
            text => Some(text.parse().map_err(|wrong: ParseActionError| {
                error(text.as_ptr().addr() - row.as_ptr().addr() + wrong.column, wrong.problem)
            })?),
        });
        start += cell.length + 1;
    }
    Ok(cells)
}

/// The first cell of a text.
struct CellText<'a> {
    /// The content, without quotes and blanks around it.
    text: &'a str,
    /// The bytes up to the separator behind the cell, or to the end of the row.
    length: usize,
}

impl<'a> CellText<'a> {
    /// The first cell of `rest`, which is quoted or an overlap, and so may contain separators; or the byte at
    /// which the cell goes wrong.
    fn with_separators(rest: &'a str, separator: u8) -> Result<Self, usize> {
        let separator = char::from(separator);
        let start = rest.len() - rest.trim_ascii_start().len();
        let is_quoted = rest[start..].starts_with('"');
        let close = rest[start + 1..].find(if is_quoted { '"' } else { ')' }).map(|close| start + 1 + close);
        let close = match close {
            Some(close) => close,
            None if is_quoted => return Err(start),
            None => start,
        };
        let length = rest[close..].find(separator).map_or(rest.len(), |behind| close + behind);
        if !is_quoted {
            return Ok(Self { text: rest[start..length].trim_ascii_end(), length });
        }
        match rest[close + 1..length].trim_ascii() {
            "" => Ok(Self { text: rest[start + 1..close].trim_ascii(), length }),
            _ => Err(close + 1),
        }
    }
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
    fn what_spreadsheets_write_is_read() {
        let plain = "0F0,,0B0\n,1F0,1B0\n";
        check("\u{feff}0F0,,0B0\r\n,1F0,1B0\r\n", plain);
        check("\"0F0\",\"\",\"0B0\"\n\"\", \"1F0\" ,1B0\n", plain);
        check("0F0;;0B0\n;1F0;1B0\n", plain);
        check("\"0F0\";;\" 0B0\"\r\n;1F0;1B0\r\n", plain);
    }

    #[test]
    fn overlaps_have_a_semicolon_of_their_own() {
        let overlap = "(0F1;0B0)OVERLAP_F_B";
        let rows = |text: &str| parse_rows(text).map(print_rows);
        assert_eq!(rows(&format!("0F0,{overlap},0B1\n")), Ok(format!("0F0,{overlap},0B1\n")));
        assert_eq!(rows(&format!("0F0; {overlap} ;0B1\n")), Ok(format!("0F0,{overlap},0B1\n")));
        assert_eq!(rows(&format!("{overlap};0B1\n")), Ok(format!("{overlap},0B1\n")));
        assert_eq!(rows(&format!("0F0;\"{overlap}\"\n")), Ok(format!("0F0,{overlap}\n")));
        assert_eq!(rows(&format!("{overlap}\n")), Ok(format!("{overlap}\n")));
    }

    #[test]
    fn errors_in_quoted_cells_name_line_and_column() {
        let quotes = "a cell that begins with a quote must end with the next quote, such as `\"0F0\"`; correct or \
                      remove the quotes";
        check_error("0F0,\"1F0\n", &format!("line 1, column 5: {quotes}"));
        check_error("0F0\n\"0B0\"x,\n", &format!("line 2, column 6: {quotes}"));
        check_error("\"0F0\"\"\"\n", &format!("line 1, column 6: {quotes}"));
        check_error(
            "\u{feff}0F0, \"1SENT_F0\"\n",
            "line 1, column 8: unknown action `SENT_F`; did you mean `SEND_F`?",
        );
        check_error(
            "(0F1;0B0\n",
            "line 1, column 9: expected `)OVERLAP_F_B`: an overlap is written `(0F7;7B3)OVERLAP_F_B`",
        );
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
        check_error("", "no action in any row; write one row per rank, with cells such as `0F0`");
    }

    #[test]
    fn a_program_has_no_bubbles() {
        let program = parse_program("0F0,,0SEND_F0\n,1RECV_F0,1F0\n").expect("a program");
        assert_eq!(print_program(&program), "0F0,0SEND_F0\n1RECV_F0,1F0\n");
    }

    proptest! {
        #[test]
        fn no_text_panics(text in "([0-9]{0,10}[FBIWSENDRCV_()\"\u{feff} \\r\\n,;]{0,3}){0,12}") {
            let _schedule = parse_schedule(&text);
            let _program = parse_program(&text);
        }
    }
}
