//! Curves drawn with characters: one line of blocks, or a chart of several lines with labelled values.

use std::ops::RangeInclusive;

/// The block characters, from one eighth to the full height of a line.
const BLOCKS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
/// The number of lines of a chart.
pub(super) const CHART_LINES: usize = 8;
/// The smallest number of losses and the smallest and largest width of the curve of the loss.
const FEWEST_LOSSES: usize = 8;
const NARROWEST_CHART: usize = 16;
const WIDEST_CHART: usize = 100;
/// The width of the labels next to that curve.
const CHART_LABELS: usize = 24;
/// The number of points in a Braille character: 2 columns of 4 points.
const POINTS_ACROSS: usize = 2;
const POINTS_DOWN: usize = 4;
/// The first Braille character, which has no points.
const BRAILLE: u32 = 0x2800;
/// The bit of each point, by column and then from the top.
const POINT_BITS: [[u32; POINTS_DOWN]; POINTS_ACROSS] = [[0x01, 0x02, 0x04, 0x40], [0x08, 0x10, 0x20, 0x80]];

/// Returns a curve of at most `width` characters on one line.
pub(super) fn sparkline(values: &[f64], width: usize) -> String {
    let means = means(values, width);
    let Some((least, most)) = range(&means) else { return String::new() };
    sparkline_from(&means, width, least..=most)
}

/// Returns the same curve, with the lowest block at the start of `range` and the highest block at its end.
pub(super) fn sparkline_from(values: &[f64], width: usize, range: RangeInclusive<f64>) -> String {
    let means = means(values, width);
    let (least, most) = range.into_inner();
    let block = |value: &f64| {
        let height = if most > least { ((value - least) / (most - least)).clamp(0.0, 1.0) } else { 0.5 };
        BLOCKS[(height * (BLOCKS.len() - 1) as f64).round() as usize]
    };
    means.iter().map(block).collect()
}

/// Returns the curve of the loss for a terminal of this width, with the loss of guessing each token by how
/// often it occurs. Nothing is drawn if there are few losses or little room.
pub(super) fn loss_chart(losses: &[f64], by_frequency: f64, columns: usize) -> Vec<String> {
    // The last column stays empty, because a character there makes some terminals wrap.
    let width = columns.saturating_sub(1 + CHART_LABELS).min(WIDEST_CHART);
    if losses.len() < FEWEST_LOSSES || width < NARROWEST_CHART {
        return Vec::new();
    }
    chart(losses, width, Some((by_frequency, "by frequency")))
}

/// Returns a chart whose curve is `width` characters wide, with its largest and smallest value to the left.
/// If `level` is between them, it is drawn as a dotted line with its name.
fn chart(values: &[f64], width: usize, level: Option<(f64, &str)>) -> Vec<String> {
    let (points, rows) = (width * POINTS_ACROSS, CHART_LINES * POINTS_DOWN);
    let means = means(values, points);
    let Some((least, most)) = range(&means).filter(|(least, most)| most > least) else { return Vec::new() };
    let row_of = |value: f64| ((most - value) / (most - least) * (rows - 1) as f64).round() as usize;
    let level = level.filter(|(level, _)| (least..=most).contains(level));
    let level_line = level.map(|(level, _)| row_of(level) / POINTS_DOWN);

    let mut cells = vec![vec![0; width]; CHART_LINES];
    // If there are fewer values than points, each value is repeated. Neighbours are joined, so the curve has
    // no gaps.
    let value_at = |point: usize| means[point * means.len() / points];
    let mut before = row_of(value_at(0));
    for point in 0..points {
        let row = row_of(value_at(point));
        for row in row.min(before)..=row.max(before) {
            let bits = POINT_BITS[point % POINTS_ACROSS][row % POINTS_DOWN];
            cells[row / POINTS_DOWN][point / POINTS_ACROSS] |= bits;
        }
        before = row;
    }
    let character = |line: usize, bits: u32| match bits {
        0 if level_line == Some(line) => '·',
        0 => ' ',
        bits => char::from_u32(BRAILLE + bits).unwrap_or(' '),
    };
    let label = |line: usize| match line {
        0 => format!("{most:.2}"),
        _ if line + 1 == CHART_LINES => format!("{least:.2}"),
        _ => String::new(),
    };
    let line = |(line, cells): (usize, &Vec<u32>)| {
        let curve: String = cells.iter().map(|bits| character(line, *bits)).collect();
        let name = level.filter(|_| level_line == Some(line)).map(|(_, name)| format!(" {name}"));
        format!("{:>6} ┤{curve}{}", label(line), name.unwrap_or_default()).trim_end().to_owned()
    };
    cells.iter().enumerate().map(line).collect()
}

/// Returns the finite values. If there are more than `most`, returns the means of `most` pieces of about
/// equal length.
fn means(values: &[f64], most: usize) -> Vec<f64> {
    let finite: Vec<f64> = values.iter().copied().filter(|value| value.is_finite()).collect();
    let pieces = finite.len().min(most);
    let mean = |piece: usize| {
        let values = &finite[piece * finite.len() / pieces..(piece + 1) * finite.len() / pieces];
        values.iter().sum::<f64>() / values.len() as f64
    };
    (0..pieces).map(mean).collect()
}

/// Returns the smallest and the largest value.
fn range(values: &[f64]) -> Option<(f64, f64)> {
    let least = values.iter().copied().reduce(f64::min);
    least.zip(values.iter().copied().reduce(f64::max))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sparklines() {
        assert_eq!(sparkline(&[1.0, 2.0, 3.0, 8.0], 8), "▁▂▃█");
        assert_eq!(sparkline(&[8.0, 8.0, 1.0, 1.0], 2), "█▁", "two values a character");
        assert_eq!(sparkline(&[1.0, 1.0], 8), "▅▅");
        assert_eq!(sparkline(&[f64::NAN], 8), "");
        assert_eq!(sparkline(&[1.0], 0), "");
    }

    #[test]
    fn charts() {
        let falling: Vec<f64> = (0..16).map(|step| 16.0 - f64::from(step)).collect();
        let chart = chart(&falling, 16, Some((4.0, "a level")));
        assert_eq!(chart.len(), CHART_LINES);
        let text = chart.join("\n");
        assert!(text.starts_with(" 16.00 ┤") && chart[7].starts_with("  1.00 ┤"), "{text}");
        let level: Vec<&String> = chart.iter().filter(|line| line.ends_with(" a level")).collect();
        assert!(level.len() == 1 && level[0].contains("·"), "{text}");
    }

    #[test]
    fn a_chart_of_one_value_says_nothing() {
        assert!(chart(&[2.0, 2.0], 16, None).is_empty());
        assert!(chart(&[], 16, None).is_empty());
    }
}
