//! The parts around the lanes: title, rank names, axis and legend.

use crate::ids::Rank;
use crate::picture::palette::{LIGHT, Theme, occurring};
use crate::picture::settings::escaped;

use super::exchanges::{MEANING, PATTERN, has_exchanges};
use super::layout::{Drawing, LABEL, Layout, text_width};

pub(super) fn push_title(picture: &mut String, layout: &Layout, title: &str) {
    if !title.is_empty() {
        picture.push_str(&format!(
            "<text x=\"{LABEL}\" y=\"{}\" font-size=\"14\" font-weight=\"600\" fill=\"{}\">{}</text>\n",
            layout.head() - 12.0,
            layout.theme.ink,
            escaped(title)
        ));
    }
}

/// Draws the background of a lane, and the name of its rank.
pub(super) fn push_lane(picture: &mut String, layout: &Layout, rank: Rank) {
    let (y, width, height) = (layout.top(rank), layout.lane_width(), layout.lane_height());
    picture.push_str(&format!(
        "<rect x=\"{LABEL}\" y=\"{y:.2}\" width=\"{width}\" height=\"{height:.2}\" fill=\"url(#bubble)\"/>\n\
         <text x=\"{}\" y=\"{:.2}\" text-anchor=\"end\" fill=\"{}\">rank {rank}</text>\n",
        LABEL - 8.0,
        y + height / 2.0 + 4.0,
        layout.theme.ink
    ));
}

/// Draws times at round numbers below the lanes, with lines up through them.
pub(super) fn push_axis(picture: &mut String, layout: &Layout) {
    let step = round_step(layout.makespan);
    let marks = if step > 0.0 { (layout.makespan / step + 1e-9) as u32 } else { 0 };
    let (head, bottom) = (layout.head(), layout.bottom());
    for time in (0..=marks).map(|mark| f64::from(mark) * step) {
        let x = LABEL + layout.length(time);
        picture.push_str(&format!("<line x1=\"{x:.2}\" x2=\"{x:.2}\" y1=\"{head}\" y2=\"{:.2}\" stroke=\"{}\" stroke-width=\"0.7\"/>\
             <text x=\"{x:.2}\" y=\"{:.2}\" text-anchor=\"middle\" fill=\"{}\">{}</text>\n",
            bottom + 5.0,
            layout.theme.rule,
            bottom + 18.0,
            layout.theme.faint,
            layout.time(time)));
    }
}

/// Returns the distance of marks on an axis of length `whole`: 1, 2 or 5 times a power of ten, for 5 to 12
/// marks.
fn round_step(whole: f64) -> f64 {
    if whole <= 0.0 {
        return 0.0;
    }
    let power = 10f64.powf((whole / 12.0).log10().floor());
    [1.0, 2.0, 5.0, 10.0]
        .map(|times| times * power)
        .into_iter()
        .find(|step| whole / step <= 12.0)
        .unwrap_or(whole)
}

/// Draws the sorts that occur with their shades, the meaning of the shades, and the share of bubbles.
pub(super) fn push_legend(picture: &mut String, drawing: &Drawing<'_>) {
    let chunks = drawing.chunks.most();
    let y = drawing.layout.bottom() + 38.0;
    let mut x = LABEL;
    for sort in occurring(drawing.timeline) {
        let shades = LIGHT.shades(sort, chunks);
        let width = if shades.len() > 1 { 9.0 * shades.len() as f64 } else { 13.0 };
        push_entry(picture, drawing.layout.theme, [x, y, width], &shades, sort.meaning());
        x += width + 23.0 + text_width(sort.meaning(), 11.0);
    }
    let bubble = format!("bubble, {:.1} % of all ranks' time", drawing.timeline.bubble_fraction() * 100.0);
    push_entry(picture, drawing.layout.theme, [x, y, 13.0], &["url(#bubble)".to_owned()], &bubble);
    x += 36.0 + text_width(&bubble, 11.0);
    if has_exchanges(drawing.timeline) {
        push_entry(picture, drawing.layout.theme, [x - 18.0, y, 13.0], &[PATTERN.to_owned()], MEANING);
        x += 18.0 + text_width(MEANING, 11.0);
    }
    if chunks > 1 {
        let text = format!("shades: chunks 0 to {} of a rank", chunks - 1);
        push_entry(picture, drawing.layout.theme, [x - 18.0, y, 0.0], &[], &text);
    }
}

/// Draws a swatch of one or more fills, and its meaning.
fn push_entry(picture: &mut String, theme: &Theme, [x, y, width]: [f64; 3], fills: &[String], meaning: &str) {
    let part = width / fills.len().max(1) as f64;
    for (place, fill) in fills.iter().enumerate() {
        picture.push_str(&format!(
            "<rect x=\"{:.1}\" y=\"{y:.2}\" width=\"{part:.1}\" height=\"13\" fill=\"{fill}\" stroke=\"{}\" \
             stroke-width=\"0.4\"/>",
            x + part * place as f64,
            theme.rule
        ));
    }
    picture.push_str(&format!(
        "<text x=\"{:.1}\" y=\"{:.2}\" fill=\"{}\">{meaning}</text>\n",
        x + width + 5.0,
        y + 10.5,
        theme.ink
    ));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_axis_has_round_marks() {
        for (whole, step) in [(3.0, 0.5), (39.0, 5.0), (0.117, 0.01), (12.0, 1.0), (0.0, 0.0)] {
            assert!((round_step(whole) - step).abs() < 1e-12, "{whole}: {}", round_step(whole));
        }
    }
}
