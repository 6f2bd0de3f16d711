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

/// Draws rows of cells, such as those of a schedule, a program or a simulation. Bubbles are dots.
///
/// The `marked` places, such as those of violations, get an exclamation mark. A mark after a row's last cell, where
/// something is missing, has no cell in front of it. Marks that are further right are drawn at the same place.
pub fn grid<Row: IntoIterator<Item = Option<Action>>>(
    rows: impl IntoIterator<Item = Row>,
    marked: &[(Rank, usize)],
) -> String {
    let mut marked = marked.to_vec();
    marked.sort_unstable();
    let rows = (0..).map(Rank::new).zip(rows).map(|(rank, row)| texts(rank, row, &marked));
    let rows: Vec<Vec<String>> = rows.collect();
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let header: Vec<String> = (0..columns).map(|column| column.to_string()).collect();
    let mut widths: Vec<usize> = header.iter().map(String::len).collect();
    for row in &rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = cell.len().max(*width);
        }
    }
    let labels: Vec<String> = (0..rows.len()).map(|rank| format!("rank {rank}")).collect();
    let label_width = labels.last().map_or(0, String::len);
    let mut picture = String::new();
    for (label, row) in std::iter::once(("", &header)).chain(labels.iter().map(String::as_str).zip(&rows)) {
        let cells = row.iter().zip(&widths).map(|(cell, &width)| format!("{cell:width$}"));
        let line = format!("{label:label_width$}  {}", cells.collect::<Vec<_>>().join(" "));
        picture.push_str(line.trim_end());
        picture.push('\n');
    }
    picture
}

/// Returns the cells of one rank, with their marks. Every cell has room for a mark, so that marks do not shift columns.
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
    fn nothing_is_drawn_for_nothing() {
        check("", &[], &[""]);
    }
}
