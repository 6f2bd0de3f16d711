//! The rows of schedules as lists of texts, and the texts and files that they are read from.

use std::path::PathBuf;

use pipewright_schedule::csv::parse_rows;
use pipewright_schedule::footprint::Use;
use pipewright_schedule::lower::{PassInput, apply};
use pipewright_schedule::{Action, Program, Rank, Slices};
use pipewright_system::bounded_file::read_text;
use pipewright_system::schedule_memory::check_text;
use pyo3::prelude::*;
use pyo3::types::PyString;

use crate::errors::{Raised, csv_error, exception, os_error, type_error};
use crate::interrupt::interruptible;

/// A row for each rank; `None` is a cell without an action.
pub(crate) type Cells = Vec<Vec<Option<Action>>>;

/// The largest file that is read, as on the command line.
const LARGEST_FILE: u64 = 1 << 30;

/// Returns rows as lists of texts.
pub(crate) fn texts<'a>(
    rows: impl IntoIterator<Item = impl IntoIterator<Item = &'a Option<Action>>>,
) -> Vec<Vec<Option<String>>> {
    let text = |cell: &Option<Action>| cell.map(|action| action.to_string());
    rows.into_iter().map(|row| row.into_iter().map(text).collect()).collect()
}

/// Reads rows of texts, in which `None` and empty texts are cells without an action.
pub(crate) fn cells_of(rows: &Bound<'_, PyAny>) -> PyResult<Cells> {
    let not_rows = |_| type_error("the rows are not a list of lists of texts, one list for each rank");
    let row_of = |(rank, row): (usize, PyResult<Bound<'_, PyAny>>)| {
        let row = row?;
        if row.is_instance_of::<PyString>() {
            return Err(type_error(
                "a row is a text, not a list of texts; read a text with `pipewright_pp.read_csv`",
            ));
        }
        let cells = row.try_iter().map_err(not_rows)?;
        cells.enumerate().map(|(position, cell)| cell_of((rank, position), &cell?)).collect()
    };
    rows.try_iter().map_err(not_rows)?.enumerate().map(row_of).collect()
}

fn cell_of((rank, position): (usize, usize), cell: &Bound<'_, PyAny>) -> PyResult<Option<Action>> {
    if cell.is_none() {
        return Ok(None);
    }
    let text = cell.cast::<PyString>().map_err(|_| {
        type_error(format!(
            "rank {rank}, position {position}: a cell is not a text such as `0F0`, and not None"
        ))
    })?;
    match text.to_string().trim() {
        "" => Ok(None),
        text => text.parse().map(Some).map_err(|error| {
            let message = format!("rank {rank}, position {position}: {error}");
            exception(cell.py(), "ParseError", &message, |fields| {
                fields.set_item("rank", rank)?;
                fields.set_item("position", position)
            })
        }),
    }
}

/// A text of a schedule, and the file that it was read from.
pub(crate) struct Text {
    text: String,
    path: Option<PathBuf>,
}

impl Text {
    /// Takes a text with a line end as the schedule itself, and everything else as the path of its file.
    pub(crate) fn of(source: &Bound<'_, PyAny>) -> PyResult<Self> {
        let text = source.cast::<PyString>().ok().map(ToString::to_string);
        if let Some(text) = text.filter(|text| text.contains('\n')) {
            return Ok(Self { text, path: None });
        }
        let path: PathBuf = source.extract()?;
        let file = path.clone();
        let read = interruptible(source.py(), move |_| read_text(&file, LARGEST_FILE))?;
        let text = read.map_err(|error| os_error(source.py(), &path, &error))?;
        Ok(Self { text, path: Some(path) })
    }

    /// Returns the file's name without its ending, or `rows` for a text.
    pub(crate) fn name(&self) -> String {
        let stem = self.path.as_deref().and_then(|path| path.file_stem());
        stem.map_or_else(|| "rows".to_owned(), |stem| stem.to_string_lossy().into_owned())
    }

    /// Reads the cells.
    pub(crate) fn cells(self, py: Python<'_>) -> PyResult<Cells> {
        let Self { text, path } = self;
        check_text(&text, Use::Simulate).map_err(|error| error.raised(py))?;
        let cells = interruptible(py, move |_| parse_rows(&text))?;
        cells.map_err(|error| csv_error(py, path.as_deref(), &error))
    }
}

/// The sizes of a program that its rows may not show.
pub(crate) struct Sizes {
    /// The rank of each stage; `None` to infer it from the rows.
    pub(crate) stage_to_rank: Option<Vec<u32>>,
    /// The number of microbatches; `None` to infer it from the rows.
    pub(crate) microbatches: Option<u32>,
    /// The number of slices of each microbatch.
    pub(crate) slices: Slices,
}

impl Sizes {
    /// Makes the program of the cells, without the empty ones.
    pub(crate) fn program(self, py: Python<'_>, cells: &Cells) -> PyResult<Program> {
        let stage_to_rank = self.stage_to_rank.map(|ranks| ranks.into_iter().map(Rank::new).collect());
        let input = PassInput { rows: cells.clone(), stage_to_rank, microbatches: self.microbatches };
        let program = apply(input, &[]).map_err(|error| error.raised(py))?;
        program.with_slices(self.slices).map_err(|error| error.raised(py))
    }
}
