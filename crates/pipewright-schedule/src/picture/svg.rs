//! The drawing: a self-contained SVG of a timeline, to scale.
//!
//! One lane a rank. Computation fills its lane; communication and sharding are thin bars along its lower
//! edge, so that what they overlap stays visible. Every mark has a title, which a browser shows on hovering.

use std::fmt::Write;

use crate::action::{Action, ActionKind};
use crate::ids::Rank;
use crate::timeline::{Event, Timeline};

/// Lengths in the picture, in its own units.
const LABEL: f64 = 64.0;
const PLOT: f64 = 1100.0;
const LANE: f64 = 34.0;
const BAR: f64 = 7.0;
const HEAD: f64 = 16.0;
const FOOT: f64 = 56.0;
/// About the width of a letter of the cell's font.
const LETTER: f64 = 6.2;

/// Draws `timeline` as an SVG document.
pub fn svg(timeline: &Timeline) -> String {
    let lanes = f64::from(timeline.ranks()) * LANE;
    let (width, height) = (LABEL + PLOT + 16.0, HEAD + lanes + FOOT);
    let mut picture = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" height=\"{height}\" \
         font-family=\"system-ui, sans-serif\" font-size=\"11\">\n\
         <rect width=\"{width}\" height=\"{height}\" fill=\"#ffffff\"/>\n"
    );
    let scale = Scale { start: timeline.start(), makespan: timeline.makespan() };
    for rank in (0..timeline.ranks()).map(Rank::new) {
        push_lane(&mut picture, rank);
    }
    // Bars lie over the computation that they overlap.
    for is_compute in [true, false] {
        for event in timeline.events().iter().filter(|event| event.action.is_compute() == is_compute) {
            push_event(&mut picture, &scale, event);
        }
    }
    push_axis(&mut picture, &scale, HEAD + lanes);
    push_legend(&mut picture, timeline, HEAD + lanes + 36.0);
    picture.push_str("</svg>\n");
    picture
}

/// Seconds to lengths.
struct Scale {
    start: f64,
    makespan: f64,
}

impl Scale {
    fn length(&self, seconds: f64) -> f64 {
        if self.makespan > 0.0 { seconds / self.makespan * PLOT } else { 0.0 }
    }

    fn x(&self, time: f64) -> f64 {
        LABEL + self.length(time - self.start)
    }
}

fn lane_top(rank: Rank) -> f64 {
    HEAD + f64::from(rank.get()) * LANE
}

fn push_lane(picture: &mut String, rank: Rank) {
    let top = lane_top(rank);
    let (y, height, text) = (top + 1.0, LANE - 2.0, top + LANE / 2.0 + 4.0);
    let lane = format!(
        "<rect x=\"{LABEL}\" y=\"{y}\" width=\"{PLOT}\" height=\"{height}\" fill=\"#f1f3f5\"/>\n\
         <text x=\"{}\" y=\"{text}\" text-anchor=\"end\" fill=\"#343a40\">rank {rank}</text>\n",
        LABEL - 8.0
    );
    picture.push_str(&lane);
}

fn push_event(picture: &mut String, scale: &Scale, event: &Event) {
    let (fill, ink, _) = style(event.action);
    let (x, width) = (scale.x(event.start), scale.length(event.end - event.start));
    let (top, height) = match event.action.is_compute() {
        true => (lane_top(event.rank) + 1.0, LANE - 2.0),
        false => (lane_top(event.rank) + LANE - 1.0 - BAR, BAR),
    };
    let milliseconds = (event.end - event.start) * 1e3;
    let title = format!("{} on rank {}, {milliseconds:.3} ms", event.action, event.rank);
    let mark = format!(
        "<rect x=\"{x:.2}\" y=\"{top}\" width=\"{width:.2}\" height=\"{height}\" fill=\"{fill}\" stroke=\"#ffffff\" \
         stroke-width=\"0.6\"><title>{title}</title></rect>\n"
    );
    picture.push_str(&mark);
    let label = label(event.action);
    if event.action.is_compute() && width > LETTER * label.len() as f64 {
        let (x, y) = (x + width / 2.0, top + LANE / 2.0 - 2.0);
        let text = format!(
            "<text x=\"{x:.2}\" y=\"{y}\" text-anchor=\"middle\" fill=\"{ink}\" pointer-events=\"none\">{label}</text>\n"
        );
        picture.push_str(&text);
    }
}

/// What is written into a cell: the action, and of an overlap its two halves.
fn label(action: Action) -> String {
    action.parts().map(|part| part.to_string()).collect::<Vec<_>>().join(" ")
}

/// Ten lines of time under the lanes.
fn push_axis(picture: &mut String, scale: &Scale, y: f64) {
    const MARKS: u32 = 10;
    for mark in 0..=MARKS {
        let seconds = scale.makespan * f64::from(mark) / f64::from(MARKS);
        let x = scale.x(scale.start + seconds);
        let anchor = if mark == MARKS { "end" } else { "middle" };
        writeln!(
            picture,
            "<line x1=\"{x:.2}\" x2=\"{x:.2}\" y1=\"{y}\" y2=\"{}\" stroke=\"#868e96\"/>\
             <text x=\"{x:.2}\" y=\"{}\" text-anchor=\"{anchor}\" fill=\"#495057\">{}</text>",
            y + 4.0,
            y + 16.0,
            duration(seconds, scale.makespan)
        )
        .expect("writing to a string does not fail");
    }
}

/// A time in the unit that suits the whole length of the axis.
fn duration(seconds: f64, longest: f64) -> String {
    match longest {
        _ if longest >= 10.0 => format!("{seconds:.1} s"),
        _ if longest >= 0.01 => format!("{:.1} ms", seconds * 1e3),
        _ => format!("{:.1} us", seconds * 1e6),
    }
}

/// The colours that occur, with their meaning, and the bubble.
fn push_legend(picture: &mut String, timeline: &Timeline, y: f64) {
    let mut entries: Vec<_> = timeline.events().iter().map(|event| style(event.action)).collect();
    entries.sort_unstable();
    entries.dedup();
    let mut x = LABEL;
    for (fill, _, meaning) in entries {
        let entry = format!(
            "<rect x=\"{x:.1}\" y=\"{y}\" width=\"12\" height=\"12\" fill=\"{fill}\"/>\
             <text x=\"{:.1}\" y=\"{}\" fill=\"#343a40\">{meaning}</text>\n",
            x + 17.0,
            y + 10.0
        );
        picture.push_str(&entry);
        x += 34.0 + LETTER * meaning.len() as f64;
    }
    let bubble = format!(
        "<text x=\"{}\" y=\"{}\" text-anchor=\"end\" fill=\"#343a40\">bubble {:.1} %</text>\n",
        LABEL + PLOT,
        y + 10.0,
        timeline.bubble_fraction() * 100.0
    );
    picture.push_str(&bubble);
}

/// The fill, the colour of text on it, and what the fill means. Lightness differs too, for readers who do not
/// tell the hues apart.
fn style(action: Action) -> (&'static str, &'static str, &'static str) {
    match action.kind() {
        ActionKind::Forward => ("#4c8bd6", "#ffffff", "forward"),
        ActionKind::Backward => ("#2b9a66", "#ffffff", "backward"),
        ActionKind::InputBackward => ("#66c2a0", "#14302a", "backward, inputs"),
        ActionKind::WeightBackward => ("#e3c567", "#3d3211", "backward, weights"),
        ActionKind::Overlap => ("#7a5cc0", "#ffffff", "forward and backward"),
        kind if kind.is_communication() => ("#495057", "#ffffff", "send and receive"),
        _ => ("#d9780f", "#ffffff", "gather and reduce"),
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
        assert!(picture.contains("<title>1F0 on rank 1, 1.000 ms</title>"));
        // Three ticks fill the plot; the last action starts after two of them.
        assert!(picture.contains(&format!("x=\"{:.2}\"", LABEL + PLOT * 2.0 / 3.0)), "{picture}");
        assert!(picture.contains("bubble 66.7 %"));
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
}
