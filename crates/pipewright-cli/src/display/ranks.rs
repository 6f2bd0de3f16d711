//! The lines of the live display that show each rank: the share of the step in which it computes, and its
//! memory.

use pipewright::train::Metrics;
use pipewright_planning::numbers::bytes;

use crate::display::chart::sparkline_from;
use crate::display::figures::{RANKS_SHOWN, percent};

/// The number of spaces between two ranks.
const GAP: usize = 4;
/// The width of the texts of a rank, and the smallest width of a rank with its bar.
const TEXTS: usize = 27;
const NARROWEST: usize = TEXTS + 8;
/// The largest width of a bar and of the curve over the ranks.
const WIDEST_BAR: usize = 24;
const WIDEST_CURVE: usize = 48;

/// Returns the lines for a width of `width` characters: some ranks on each line, or one curve over all ranks
/// if there are many. Returns nothing if the metrics do not have the share of each rank.
pub(super) fn rank_lines(metrics: &Metrics, width: usize) -> Vec<String> {
    let busy: Vec<f64> = metrics.bubble_per_rank.iter().map(|bubble| 1.0 - bubble).collect();
    if busy.is_empty() || width < NARROWEST {
        return Vec::new();
    }
    let held = &of_rows(&metrics.peak_bytes, busy.len());
    if busy.len() > RANKS_SHOWN {
        return over_all_ranks(&busy, held);
    }
    let columns = ((width + GAP) / (NARROWEST + GAP)).min(busy.len());
    let bar = ((width + GAP) / columns - GAP).saturating_sub(TEXTS).min(WIDEST_BAR);
    let rank_text = |(rank, busy): (usize, &f64)| {
        let full = (busy.clamp(0.0, 1.0) * bar as f64).round() as usize;
        let memory = held.get(rank).map_or(String::new(), |held| bytes(*held));
        let drawn = format!("{}{}", "━".repeat(full), "─".repeat(bar - full));
        format!("rank {rank} {drawn} {:>3.0}% busy {memory:>9}", busy * 100.0)
    };
    let ranks: Vec<String> = busy.iter().enumerate().map(rank_text).collect();
    ranks.chunks(columns).map(|ranks| ranks.join(&" ".repeat(GAP))).collect()
}

/// Returns the largest memory of the ranks of each row: the ranks that compute stages together share a row.
fn of_rows(held: &[u64], rows: usize) -> Vec<u64> {
    let ranks = (held.len() / rows.max(1)).max(1);
    held.chunks(ranks).filter_map(|ranks| ranks.iter().copied().max()).collect()
}

/// Returns one line for the shares and one for the memory, with a character for each rank or for a few
/// neighbours.
fn over_all_ranks(busy: &[f64], held: &[u64]) -> Vec<String> {
    let range = |values: &[f64], word: &dyn Fn(f64) -> String| {
        let least = values.iter().copied().fold(f64::INFINITY, f64::min);
        format!("{} to {}", word(least), word(values.iter().copied().fold(0.0, f64::max)))
    };
    let memory: Vec<f64> = held.iter().map(|held| *held as f64).collect();
    let mut lines = vec![format!(
        "{} ranks busy  {}  {}",
        busy.len(),
        sparkline_from(busy, WIDEST_CURVE, 0.0..=1.0),
        range(busy, &percent)
    )];
    if memory.iter().any(|held| *held > 0.0) {
        let most = memory.iter().copied().fold(0.0, f64::max);
        let curve = sparkline_from(&memory, WIDEST_CURVE, 0.0..=most);
        lines.push(format!("their memory   {curve}  {}", range(&memory, &|held| bytes(held as u64))));
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_that_share_a_row_show_the_largest_memory() {
        assert_eq!(of_rows(&[1, 4, 3, 2], 2), [4, 3]);
        assert_eq!(of_rows(&[1, 4], 2), [1, 4]);
        assert!(of_rows(&[], 2).is_empty());
    }

    fn check(bubbles: &[f64], width: usize, expected: &[&str]) {
        let peak_bytes = (1..=bubbles.len() as u64).map(|rank| rank * (10 << 20)).collect();
        let metrics = Metrics { bubble_per_rank: bubbles.to_vec(), peak_bytes, ..Metrics::default() };
        let lines = rank_lines(&metrics, width);
        assert_eq!(lines, expected);
        assert!(lines.iter().all(|line| line.chars().count() <= width), "{lines:?}");
    }

    #[test]
    fn two_ranks_fit_on_a_line_of_80_columns() {
        check(
            &[0.25, 0.5, 0.0],
            79,
            &[
                "rank 0 ━━━━━━━━──  75% busy  10.0 MiB    rank 1 ━━━━━─────  50% busy  20.0 MiB",
                "rank 2 ━━━━━━━━━━ 100% busy  30.0 MiB",
            ],
        );
    }

    #[test]
    fn many_ranks_are_curves() {
        let bubbles: Vec<f64> = (0..16).map(|rank| f64::from(rank) / 16.0).collect();
        check(
            &bubbles,
            79,
            &[
                "16 ranks busy  ██▇▇▆▆▅▅▅▄▄▃▃▂▂▁  6.2% to 100.0%",
                "their memory   ▁▂▂▃▃▄▄▅▅▅▆▆▇▇██  10.0 MiB to 160.0 MiB",
            ],
        );
    }

    #[test]
    fn without_shares_there_are_no_lines() {
        check(&[], 79, &[]);
        check(&[0.5], 20, &[]);
    }
}
