//! The grid of a timeline: one line per rank, on which time runs to the right, in plain text.
//!
//! A column is a step of time, so a computation that takes twice as long is twice as wide, and blanks are
//! bubbles. Rules: (1) a column is the longest time that all starts and ends are multiples of, unless the
//! shortest computation would have more than five columns: then it is the shortest computation, and starts
//! and ends are rounded to columns; (2) the name of a computation is written at its start, and dashes fill
//! the rest if it has several columns; (3) communication, and computations that take no time, are not shown.
//!
//! ```
//! use pipewright_schedule::picture::{TimeGrid, computation_of};
//! use pipewright_schedule::{Costs, csv, lower::for_training, simulate::timed};
//! let schedule = csv::parse_schedule("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")?;
//! let program = for_training(&schedule, &Default::default())?;
//! let run = timed(program.as_program(), &Costs::default())?;
//! let expected = "        0   1   2   3   4   5   6   7\n\
//!                 rank 0  0F0 0F1     0B0----     0B1----\n\
//!                 rank 1      1F0 1B0---- 1F1 1B1----\n";
//! assert_eq!(TimeGrid::of(&computation_of(&schedule, run.timeline())).to_string(), expected);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use std::fmt;

use crate::action::Action;
use crate::ids::Rank;
use crate::picture::names::Named;
use crate::picture::page_data::Clock;
use crate::picture::settings::TimeUnit;
use crate::slices::Slices;
use crate::timeline::{Event, Timeline};

/// The most columns of the shortest computation.
const MOST_COLUMNS: f64 = 5.0;

/// A timeline as a table with columns of equal time. [`Display`](fmt::Display) draws it.
#[derive(Debug, Clone)]
pub struct TimeGrid {
    /// The time of a column.
    step: f64,
    /// The number of columns.
    columns: u64,
    /// The number of characters of a column.
    width: u64,
    rows: Vec<Vec<GridCell>>,
}

/// A computation, from its first column to the one after its last.
#[derive(Debug, Clone)]
struct GridCell {
    name: String,
    columns: std::ops::Range<u64>,
}

impl TimeGrid {
    /// Arranges the computations of a timeline.
    pub fn of(timeline: &Timeline) -> Self {
        let step = step(timeline);
        // The small share makes halves round in one direction, whatever their last bits.
        let column = |time: f64| ((time - timeline.start()) / step + 0.5 + 1e-6).floor() as u64;
        let cell = |event: &Event| GridCell {
            name: name(event.action, timeline.slices()),
            columns: column(event.start)..column(event.end).max(column(event.start) + 1),
        };
        let row = |rank| shown(timeline.events_of(rank)).map(cell).collect();
        let rows: Vec<Vec<GridCell>> = (0..timeline.ranks()).map(Rank::new).map(row).collect();
        let cells = || rows.iter().flatten();
        let columns = cells().map(|cell| cell.columns.end).max().unwrap_or(0);
        // A blank behind each name keeps neighbours apart.
        let width =
            |cell: &GridCell| (cell.name.len() as u64 + 1).div_ceil(cell.columns.end - cell.columns.start);
        let width = cells().map(width).max().unwrap_or(1);
        Self { step, columns, width, rows }
    }

    /// Returns the number of places for computations, over all ranks.
    pub fn cells(&self) -> u64 {
        self.columns.saturating_mul(self.rows.len() as u64)
    }

    /// Returns the line of times: as many as fit above the starts of their columns.
    fn times(&self) -> String {
        let time =
            |column: u64| TimeUnit::Costs.format(column as f64 * self.step, self.columns as f64 * self.step);
        let longest = (0..self.columns.min(1000)).chain(self.columns.checked_sub(1)).map(|it| time(it).len());
        let longest = longest.max().unwrap_or(0) as u64;
        let fits = |every: &u64| longest < every * self.width;
        let every = (0..).flat_map(|power| [1, 2, 5].map(|times| times * 10_u64.pow(power))).find(fits);
        let mut line = String::new();
        for column in (0..self.columns).step_by(every.unwrap_or(1) as usize) {
            pad(&mut line, column * self.width);
            line.push_str(&time(column));
        }
        line
    }

    fn line(&self, row: &[GridCell]) -> String {
        let mut line = String::new();
        for GridCell { name, columns } in row {
            pad(&mut line, columns.start * self.width);
            line.push_str(name);
            if columns.end - columns.start > 1 {
                let end = (columns.end * self.width - 1) as usize;
                line.extend(std::iter::repeat_n('-', end.saturating_sub(line.len())));
            }
        }
        line
    }
}

impl fmt::Display for TimeGrid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let labels: Vec<String> = (0..self.rows.len()).map(|rank| format!("rank {rank}")).collect();
        let width = labels.last().map_or(0, String::len);
        writeln!(f, "{}", format!("{:width$}  {}", "", self.times()).trim_end())?;
        for (label, row) in labels.iter().zip(&self.rows) {
            writeln!(f, "{}", format!("{label:width$}  {}", self.line(row)).trim_end())?;
        }
        Ok(())
    }
}

/// Returns the events that the grid shows.
fn shown(events: &[Event]) -> impl Iterator<Item = &Event> {
    events.iter().filter(|event| event.action.is_compute() && event.end > event.start)
}

/// Returns the time of a column; 0 if nothing is shown.
fn step(timeline: &Timeline) -> f64 {
    let events: Vec<Event> = shown(timeline.events()).copied().collect();
    let Some(shortest) = events.iter().map(|event| event.end - event.start).reduce(f64::min) else {
        return 0.0;
    };
    let exact = Clock::of(&Timeline::new(timeline.ranks(), events)).quantum();
    if shortest <= MOST_COLUMNS * exact * (1.0 + 1e-9) { exact } else { shortest }
}

/// Returns the name of a computation, an overlap without its kind.
fn name(action: Action, slices: Slices) -> String {
    let name = Named(action, slices).to_string();
    name.strip_suffix(action.kind().name())
        .filter(|_| name.ends_with("OVERLAP_F_B"))
        .unwrap_or(&name)
        .to_owned()
}

/// Appends blanks up to a column of characters.
fn pad(line: &mut String, column: u64) {
    line.extend(std::iter::repeat_n(' ', (column as usize).saturating_sub(line.len())));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::costs::Costs;
    use crate::csv::parse_schedule;
    use crate::lower::{TrainingLowering, for_training};
    use crate::picture::computation_of;
    use crate::simulate::timed;

    const GPIPE: &str = "0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n";
    const ONE: &str = "0F0,0B0\n1F0,1B0\n";

    fn check(rows: &str, costs: &str, expected: &[&str]) {
        let schedule = parse_schedule(rows).expect("a schedule");
        let program = for_training(&schedule, &TrainingLowering::default()).expect("a program");
        let costs: Costs = costs.parse().expect("costs");
        let run = timed(program.as_program(), &costs).expect("it runs");
        let grid = TimeGrid::of(&computation_of(&schedule, run.timeline()));
        let text = grid.to_string();
        assert_eq!(text.lines().collect::<Vec<_>>(), expected, "\n{text}");
        assert_eq!(grid.cells(), grid.columns * u64::from(schedule.ranks()));
    }

    #[test]
    fn a_backward_is_twice_as_wide_and_bubbles_are_blank() {
        check(
            GPIPE,
            "",
            &[
                "        0   1   2   3   4   5   6   7",
                "rank 0  0F0 0F1         0B0---- 0B1----",
                "rank 1      1F0 1F1 1B0---- 1B1----",
            ],
        );
    }

    #[test]
    fn halves_of_units_make_narrower_columns() {
        check(
            ONE,
            "F=1,B=3",
            &[
                "        0   1   2   3   4   5   6",
                "rank 0  0F0           0B0--------",
                "rank 1      1F0 1B0--------",
            ],
        );
    }

    #[test]
    fn short_messages_are_rounded_away() {
        check(
            ONE,
            "hop=0.01",
            &["        0   1   2   3   4", "rank 0  0F0         0B0----", "rank 1      1F0 1B0----"],
        );
    }

    #[test]
    fn nothing_is_drawn_for_no_time() {
        check("0F0,0B0\n", "F=0,B=0", &["", "rank 0"]);
    }
}
