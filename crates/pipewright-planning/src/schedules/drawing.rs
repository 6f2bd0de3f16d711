//! Draws pictures of a program, in the formats that several commands share.

use clap::{Args, ValueEnum};
use pipewright_schedule::picture::{MAX_CELLS, PictureSettings, TimeUnit, html, svg, with_whole_overlaps};
use pipewright_schedule::{Action, Program, Timeline};

use crate::failure::Failure;
use crate::output::PageOutput;

/// A picture of a timeline.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum Picture {
    /// A drawing, to scale
    Svg,
    /// A page to explore in a browser: zoom, hover, memory of each rank
    Html,
    /// For Perfetto and chrome://tracing
    Trace,
}

/// The arguments that select the contents of a picture.
#[derive(Debug, Args)]
pub struct PictureArguments {
    /// Draw the memory of each rank below its row, for --format svg and html
    #[arg(long)]
    memory_lane: bool,
}

impl PictureArguments {
    /// Refuses arguments that have no effect on the output. `picture` is the picture that the format draws,
    /// if any.
    pub fn check(&self, picture: Option<Picture>, output: &PageOutput) -> Result<(), Failure> {
        match picture {
            Some(Picture::Svg | Picture::Html) => Ok(()),
            _ if output.is_opened() => {
                Err(Failure::input("--open is for drawings; add --format html or --format svg"))
            }
            _ if self.memory_lane => {
                Err(Failure::input("--memory-lane is for drawings; add --format svg or --format html"))
            }
            _ => Ok(()),
        }
    }
}

impl Picture {
    /// Returns the ending of a file with this picture.
    pub fn extension(self) -> &'static str {
        match self {
            Self::Svg => "svg",
            Self::Html => "html",
            Self::Trace => "json",
        }
    }

    /// Draws the timeline of `program`, with a title if the picture has one.
    pub fn draw(
        self,
        timeline: &Timeline,
        program: &Program,
        title: &str,
        unit: TimeUnit,
        arguments: &PictureArguments,
    ) -> String {
        let memory_lane = arguments.memory_lane;
        let settings = PictureSettings { title, memory_lane, unit, ..PictureSettings::default() };
        match self {
            Self::Svg => svg(&with_whole_overlaps(timeline, program), &settings),
            Self::Html => html(&with_whole_overlaps(timeline, program), &settings),
            Self::Trace => timeline.chrome_trace(),
        }
    }
}

/// Refuses programs that are too large to draw.
pub fn check_size(program: &Program) -> Result<(), Failure> {
    let actions: u64 = program.rows().iter().map(|row| row.len() as u64).sum();
    check_cells(actions)
}

/// Refuses pictures with too many cells.
pub fn check_cells(cells: u64) -> Result<(), Failure> {
    if cells > MAX_CELLS {
        return Err(Failure::input(format!(
            "a picture of {cells} cells is too large to draw; use --format csv, or a size with at most {MAX_CELLS}"
        )));
    }
    Ok(())
}

/// Refuses pictures with too many exchanges of tokens.
pub fn check_exchanges(timeline: &Timeline) -> Result<(), Failure> {
    let exchanges = timeline.scopes().iter().filter(|scope| scope.is_exchange()).count();
    if exchanges as u64 > MAX_CELLS {
        return Err(Failure::input(format!(
            "a picture of {exchanges} exchanges is too large to draw; use --format csv, fewer exchanges in each action, or \
             fewer microbatches, with at most {MAX_CELLS}"
        )));
    }
    Ok(())
}

/// Returns rows of cells as JSON strings. An empty cell is null.
pub fn json_rows<Row: IntoIterator<Item = Option<Action>>>(
    rows: impl IntoIterator<Item = Row>,
) -> serde_json::Value {
    let cells = |row: Row| row.into_iter().map(|cell| cell.map(|action| action.to_string())).collect();
    let rows: Vec<Vec<Option<String>>> = rows.into_iter().map(cells).collect();
    serde_json::json!(rows)
}
