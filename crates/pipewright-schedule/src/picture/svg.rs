//! The drawing: a self-contained SVG of a timeline, to scale.
//!
//! One lane a rank. Computation fills its lane, an overlap with its two halves above each other; messages and
//! collectives are thin bars along the lower edge, so that what they overlap stays visible. What is left of a
//! lane is a bubble, and hatched. Every mark has a title, which a browser shows on hovering. To zoom, or to
//! see memory, there is [`super::html()`].

use std::fmt::Write;

use crate::action::Action;
use crate::ids::Rank;
use crate::picture::palette::{BUBBLE, STYLES, Style, duration, style};
use crate::timeline::{Event, Timeline};

/// Lengths in the picture, in its own units.
const LABEL: f64 = 64.0;
const PLOT: f64 = 1100.0;
const HEAD: f64 = 12.0;
const FOOT: f64 = 64.0;
/// About the width of a letter, as a share of the font's size.
const LETTER: f64 = 0.61;

/// Draws `timeline` as an SVG document.
pub fn svg(timeline: &Timeline) -> String {
    let scale = Scale::of(timeline);
    let bottom = HEAD + f64::from(timeline.ranks()) * scale.lane;
    let (width, height) = (LABEL + PLOT + 24.0, bottom + FOOT);
    let [plain, hatched] = BUBBLE;
    let mut picture = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" height=\"{height}\" \
         font-family=\"system-ui, 'Segoe UI', 'DejaVu Sans', sans-serif\" font-size=\"11\">\n\
         <defs><pattern id=\"bubble\" width=\"6\" height=\"6\" patternUnits=\"userSpaceOnUse\" patternTransform=\"rotate(45)\">\
         <rect width=\"6\" height=\"6\" fill=\"{plain}\"/><rect width=\"1.2\" height=\"6\" fill=\"{hatched}\"/></pattern></defs>\n\
         <rect width=\"{width}\" height=\"{height}\" fill=\"#ffffff\"/>\n"
    );
    push_axis(&mut picture, &scale, bottom);
    for rank in (0..timeline.ranks()).map(Rank::new) {
        push_lane(&mut picture, &scale, rank);
    }
    // Bars lie over the computation that they overlap.
    for is_compute in [true, false] {
        for event in timeline.events().iter().filter(|event| event.action.is_compute() == is_compute) {
            push_event(&mut picture, &scale, event);
        }
    }
    push_legend(&mut picture, timeline, bottom + 38.0);
    picture.push_str("</svg>\n");
    picture
}

/// Seconds and ranks to lengths.
struct Scale {
    start: f64,
    makespan: f64,
    /// The height of a lane.
    lane: f64,
}

impl Scale {
    fn of(timeline: &Timeline) -> Self {
        // Few ranks get room for labels; many still fit a screen's width and a long page.
        let lane = (720.0 / f64::from(timeline.ranks().max(1))).clamp(12.0, 34.0);
        Self { start: timeline.start(), makespan: timeline.makespan(), lane }
    }

    fn length(&self, seconds: f64) -> f64 {
        if self.makespan > 0.0 { seconds / self.makespan * PLOT } else { 0.0 }
    }

    fn x(&self, time: f64) -> f64 {
        LABEL + self.length(time - self.start)
    }

    fn top(&self, rank: Rank) -> f64 {
        HEAD + f64::from(rank.get()) * self.lane + 1.0
    }

    /// The height of what fills a lane.
    fn height(&self) -> f64 {
        self.lane - 2.0
    }
}

fn push_lane(picture: &mut String, scale: &Scale, rank: Rank) {
    let (y, height) = (scale.top(rank), scale.height());
    let lane = format!(
        "<rect x=\"{LABEL}\" y=\"{y:.2}\" width=\"{PLOT}\" height=\"{height:.2}\" fill=\"url(#bubble)\"/>\n\
         <text x=\"{}\" y=\"{:.2}\" text-anchor=\"end\" fill=\"#343a40\">rank {rank}</text>\n",
        LABEL - 8.0,
        y + height / 2.0 + 4.0
    );
    picture.push_str(&lane);
}

fn push_event(picture: &mut String, scale: &Scale, event: &Event) {
    let (x, width) = (scale.x(event.start), scale.length(event.end - event.start));
    if width <= 0.0 {
        return;
    }
    let (top, height) = (scale.top(event.rank), scale.height());
    let title = format!(
        "{} on rank {}, {} to {}",
        event.action,
        event.rank,
        duration(event.start - scale.start, scale.makespan),
        duration(event.end - scale.start, scale.makespan)
    );
    writeln!(picture, "<g><title>{title}</title>").expect("writing to a string does not fail");
    if event.action.is_compute() {
        let halves = event.action.parts().count() as f64;
        for (place, part) in event.action.parts().enumerate() {
            let height = height / halves;
            push_cell(picture, part, [x, top + place as f64 * height, width, height]);
        }
    } else {
        let bar = (scale.lane / 5.0).min(6.0);
        let y = top + height - bar;
        let fill = style(event.action).fill;
        push_rect(picture, [x, y, width, bar], fill, "#ffffff");
    }
    picture.push_str("</g>\n");
}

/// A compute action in its place, with as much text as fits.
fn push_cell(picture: &mut String, part: Action, place: [f64; 4]) {
    let Style { fill, ink, .. } = style(part);
    let [x, y, width, height] = place;
    push_rect(picture, place, fill, "#ffffff");
    let microbatch = part.microbatch().map(|microbatch| microbatch.to_string()).unwrap_or_default();
    // As much as fits: the whole action, smaller, or its microbatch alone.
    let texts = [(part.to_string(), 11.0), (part.to_string(), 9.0), (microbatch, 9.0)];
    let fits =
        |(text, size): &(String, f64)| LETTER * size * text.len() as f64 + 1.0 <= width && height >= *size;
    if let Some((text, size)) = texts.into_iter().find(fits) {
        let (x, y) = (x + width / 2.0, y + height / 2.0 + size * 0.36);
        let text = format!(
            "<text x=\"{x:.2}\" y=\"{y:.2}\" text-anchor=\"middle\" font-size=\"{size}\" fill=\"{ink}\">{text}</text>\n"
        );
        picture.push_str(&text);
    }
}

fn push_rect(picture: &mut String, [x, y, width, height]: [f64; 4], fill: &str, stroke: &str) {
    // A white edge would hide what is thin.
    let edge = if width > 3.0 { 0.8 } else { 0.0 };
    writeln!(
        picture,
        "<rect x=\"{x:.2}\" y=\"{y:.2}\" width=\"{width:.2}\" height=\"{height:.2}\" fill=\"{fill}\" \
         stroke=\"{stroke}\" stroke-width=\"{edge}\"/>"
    )
    .expect("writing to a string does not fail");
}

/// Times at round numbers under the lanes, with lines up through them.
fn push_axis(picture: &mut String, scale: &Scale, y: f64) {
    let step = round_step(scale.makespan);
    let marks = if step > 0.0 { (scale.makespan / step + 1e-9) as u32 } else { 0 };
    for seconds in (0..=marks).map(|mark| f64::from(mark) * step) {
        let x = scale.x(scale.start + seconds);
        writeln!(
            picture,
            "<line x1=\"{x:.2}\" x2=\"{x:.2}\" y1=\"{HEAD}\" y2=\"{}\" stroke=\"#adb5bd\" stroke-width=\"0.7\"/>\
             <text x=\"{x:.2}\" y=\"{}\" text-anchor=\"middle\" fill=\"#495057\">{}</text>",
            y + 5.0,
            y + 18.0,
            duration(seconds, scale.makespan)
        )
        .expect("writing to a string does not fail");
    }
}

/// The distance of marks on an axis as long as `whole`: 1, 2 or 5 times a power of ten, for 5 to 12 marks.
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

/// The fills that occur, with their meaning, and how much is bubble.
fn push_legend(picture: &mut String, timeline: &Timeline, y: f64) {
    let parts = timeline.events().iter().flat_map(|event| event.action.parts());
    let mut present: Vec<Style> = Vec::new();
    for style in parts.map(style) {
        if !present.contains(&style) {
            present.push(style);
        }
        if present.len() == STYLES.len() {
            break;
        }
    }
    present.sort_unstable();
    let bubble = format!("bubble, {:.1} % of all ranks' time", timeline.bubble_fraction() * 100.0);
    let entries = present.iter().map(|style| (style.fill, style.meaning));
    let mut x = LABEL;
    for (fill, meaning) in entries.chain([("url(#bubble)", bubble.as_str())]) {
        let entry = format!(
            "<rect x=\"{x:.1}\" y=\"{y:.2}\" width=\"13\" height=\"13\" rx=\"2\" fill=\"{fill}\" stroke=\"#868e96\" \
             stroke-width=\"0.5\"/><text x=\"{:.1}\" y=\"{:.2}\" fill=\"#343a40\">{meaning}</text>\n",
            x + 18.0,
            y + 10.5
        );
        picture.push_str(&entry);
        x += 38.0 + LETTER * 11.0 * meaning.len() as f64;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::csv::parse_program;
    use crate::simulate::logical;

    fn drawn(rows: &str) -> String {
        let program = parse_program(rows).expect("a program");
        svg(&logical(&program).expect("no deadlock").timeline(1e-3))
    }

    #[test]
    fn every_action_is_drawn_to_scale() {
        let picture = drawn("0F0,0SEND_F0\n1RECV_F0,1F0\n");
        assert_eq!(picture.matches("<title>").count(), 4);
        assert!(picture.contains("<title>1F0 on rank 1, 2 ms to 3 ms</title>"), "{picture}");
        // Three ticks fill the plot; the last action starts after two of them.
        assert!(picture.contains(&format!("x=\"{:.2}\"", LABEL + PLOT * 2.0 / 3.0)), "{picture}");
        assert!(picture.contains("bubble, 66.7 %"));
    }

    #[test]
    fn elements_are_closed() {
        let picture = drawn("0F0,0B0\n");
        let mut open = Vec::new();
        for tag in picture.split('<').skip(1).map(|rest| rest.split('>').next().expect("a tag")) {
            let name = tag.trim_start_matches('/').split(' ').next().expect("a name");
            match (tag.starts_with('/'), tag.ends_with('/')) {
                (true, _) => assert_eq!(open.pop(), Some(name)),
                (false, false) => open.push(name),
                (false, true) => {}
            }
        }
        assert!(open.is_empty(), "{open:?}");
    }

    #[test]
    fn nothing_is_no_error() {
        assert!(svg(&Timeline::new(0, Vec::new())).ends_with("</svg>\n"));
    }

    #[test]
    fn an_overlap_shows_both_halves() {
        let picture = drawn("0F0,(0F1;0B0)OVERLAP_F_B,0B1\n");
        assert!(picture.contains(">0F1</text>") && picture.contains(">0B0</text>"), "{picture}");
    }

    #[test]
    fn the_axis_has_round_marks() {
        for (whole, step) in [(3.0, 0.5), (39.0, 5.0), (0.117, 0.01), (12.0, 1.0), (0.0, 0.0)] {
            assert!((round_step(whole) - step).abs() < 1e-12, "{whole}: {}", round_step(whole));
        }
    }
}
