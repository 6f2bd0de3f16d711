//! The grid: one line per rank and one column per tick or position, in plain text.
//!
//! ```
//! use pipewright_schedule::{Rank, csv, picture};
//! let rows = csv::parse_rows("0F0,0B0\n,1F0,1B0\n")?;
//! let expected = "        0    1    2\n\
//!                 rank 0  0F0  0B0\n\
//!                 rank 1  .    1F0! 1B0\n";
//! assert_eq!(picture::grid(rows, &[(Rank::new(1), 1)]), expected);
//! # Ok::<(), csv::CsvError>(())
//! ```

use crate::action::Action;
use crate::ids::Rank;

/// Draws rows of cells, for example of a schedule, a program or a simulation. Bubbles are dots.
///
/// The `marked` places, for example the places of violations, get an exclamation mark. A mark after a row's
/// last cell, where something is missing, has no cell in front of it. Marks that are further right are drawn
/// at the same place.
pub fn grid<Row: IntoIterator<Item = Option<Action>>>(
    rows: impl IntoIterator<Item = Row>,
    marked: &[(Rank, usize)],
) -> String {
    let mut marked = marked.to_vec();
    marked.sort_unstable();
    let rows = (0..).map(Rank::new).zip(rows).map(|(rank, row)| (rank, texts(rank, row, &marked)));
    draw(&rows.collect::<Vec<_>>(), 0)
}

/// How many columns [`grid_around`] shows on each side of the place.
const COLUMNS_AROUND: usize = 8;
/// How many ranks [`grid_around`] shows on each side of the place.
const RANKS_AROUND: u32 = 4;

/// Draws the part of a grid around the cell of `rank` in `column`, and marks this cell.
pub fn grid_around<Row: IntoIterator<Item = Option<Action>>>(
    rows: impl IntoIterator<Item = Row>,
    rank: Rank,
    column: usize,
) -> String {
    let first = column.saturating_sub(COLUMNS_AROUND);
    let part = |(other, row): (Rank, Row)| {
        let mut texts = texts(other, row, &[(rank, column)]);
        texts.truncate(column + COLUMNS_AROUND + 1);
        (other, texts.split_off(first.min(texts.len())))
    };
    let is_near = |(other, _): &(Rank, Row)| other.get().abs_diff(rank.get()) <= RANKS_AROUND;
    draw(&(0..).map(Rank::new).zip(rows).filter(is_near).map(part).collect::<Vec<_>>(), first)
}

/// Draws the cells of ranks, whose first column has the number `first`.
fn draw(rows: &[(Rank, Vec<String>)], first: usize) -> String {
    let columns = rows.iter().map(|(_, row)| row.len()).max().unwrap_or(0);
    let header: Vec<String> = (first..first + columns).map(|column| column.to_string()).collect();
    let mut widths: Vec<usize> = header.iter().map(String::len).collect();
    for (_, row) in rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = cell.len().max(*width);
        }
    }
    let labels: Vec<String> = rows.iter().map(|(rank, _)| format!("rank {rank}")).collect();
    let label_width = labels.last().map_or(0, String::len);
    let mut picture = String::new();
    let cells = rows.iter().map(|(_, row)| row);
    for (label, row) in std::iter::once(("", &header)).chain(labels.iter().map(String::as_str).zip(cells)) {
        let cells = row.iter().zip(&widths).map(|(cell, &width)| format!("{cell:width$}"));
        let line = format!("{label:label_width$}  {}", cells.collect::<Vec<_>>().join(" "));
        picture.push_str(line.trim_end());
        picture.push('\n');
    }
    picture
}

/// Returns the cells of one rank, with their marks. Every cell has room for a mark, so that marks do not
/// shift columns.
fn texts(rank: Rank, row: impl IntoIterator<Item = Option<Action>>, marked: &[(Rank, usize)]) -> Vec<String> {
    let is_marked = |position| marked.binary_search(&(rank, position)).is_ok();
    let text = |(position, cell): (usize, Option<Action>)| {
        let cell = cell.map_or_else(|| ".".to_owned(), |action| action.to_string());
        format!("{cell}{}", if is_marked(position) { '!' } else { ' ' })
    };
    let mut texts: Vec<String> = row.into_iter().enumerate().map(text).collect();
    let last_of_rank = marked.iter().rev().find(|(of, _)| *of == rank);
    if last_of_rank.is_some_and(|&(_, position)| position >= texts.len()) {
        texts.push("!".to_owned());
    }
    texts
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::csv::parse_rows;

    fn check(rows: &str, marked: &[(u32, usize)], expected: &[&str]) {
        let marked: Vec<_> = marked.iter().map(|&(rank, position)| (Rank::new(rank), position)).collect();
        let picture = grid(parse_rows(rows).expect("rows"), &marked);
        assert_eq!(picture.lines().collect::<Vec<_>>(), expected);
    }

    #[test]
    fn columns_line_up() {
        check(
            "0F0,0SEND_F0,0B0\n,1F0\n",
            &[],
            &["        0    1         2", "rank 0  0F0  0SEND_F0  0B0", "rank 1  .    1F0"],
        );
    }

    #[test]
    fn ranks_line_up() {
        let rows = "0F0\n".repeat(11);
        let picture = grid(parse_rows(&rows).expect("rows"), &[]);
        assert!(picture.contains("\nrank 9   0F0\nrank 10  0F0\n"), "{picture}");
    }

    #[test]
    fn marks_stand_where_something_is_wrong_or_missing() {
        check("0F0,0B0\n1F0\n", &[(0, 0), (1, 1)], &["        0    1", "rank 0  0F0! 0B0", "rank 1  1F0  !"]);
        check("0F0\n", &[(0, 9)], &["        0    1", "rank 0  0F0  !"]);
    }

    #[test]
    fn a_part_has_the_numbers_of_the_whole() {
        let row = |rank: u32| (0..40).map(|m| format!("{rank}F{m}")).collect::<Vec<_>>().join(",") + "\n";
        let rows = parse_rows(&(0..12).map(row).collect::<String>()).expect("rows");
        let picture = grid_around(rows.clone(), Rank::new(10), 30);
        let lines: Vec<&str> = picture.lines().collect();
        assert_eq!(lines.len(), 1 + 6, "ranks 6 to 11:\n{picture}");
        let starts = ["         22", "rank 6   6F22", "rank 11  11F22"];
        assert!(
            starts.iter().zip([0, 1, 6]).all(|(start, line)| lines[line].starts_with(start)),
            "{picture}"
        );
        assert!(lines[5].contains(" 10F30! ") && lines[5].ends_with(" 10F38"), "{picture}");
        assert_eq!(picture.matches('!').count(), 1, "{picture}");
        // After the last action.
        let picture = grid_around(rows, Rank::new(0), 40);
        assert!(picture.lines().nth(1).is_some_and(|line| line.ends_with("0F39  !")), "{picture}");
    }

    #[test]
    fn nothing_is_drawn_for_nothing() {
        check("", &[], &[""]);
    }
}
