//! Actions drawn one by one, each with a title and with as long a label as fits.

use std::fmt::Display;

use crate::action::Action;
use crate::ids::Rank;
use crate::picture::bars::{BarOf, bars};
use crate::picture::names::Named;
use crate::picture::palette::{LIGHT, Theme, ink_on, sort};
use crate::timeline::Event;

use super::layout::{Drawing, text_width};

/// Draws the actions of one rank.
pub(super) fn push_cells(picture: &mut String, drawing: &Drawing<'_>, rank: Rank) {
    for event in drawing.timeline.events_of(rank).iter().filter(|event| event.action.is_compute()) {
        let name = Named(event.action, drawing.timeline.slices());
        let Some(lane) = open(picture, drawing, rank, &name, [event.start, event.end]) else { continue };
        push_cell(picture, drawing, event, lane);
        picture.push_str("</g>\n");
    }
    push_bars(picture, drawing, rank);
    push_labels(picture, drawing, rank);
}

/// Draws the messages and collectives of one rank.
fn push_bars(picture: &mut String, drawing: &Drawing<'_>, rank: Rank) {
    // Bars are drawn after the computation that they overlap, and so are on top.
    for bar in bars(drawing.timeline, rank) {
        let name: &dyn Display = match &bar.of {
            BarOf::Action(action) => &Named(*action, drawing.timeline.slices()),
            BarOf::Skip(skip) => skip,
        };
        let Some(lane) = open(picture, drawing, rank, name, [bar.start, bar.end]) else { continue };
        let height = drawing.layout.bar_height();
        let place = Rectangle { y: lane.y + lane.height - height, height, ..lane };
        push_rect(picture, place, &LIGHT.fill(bar.of.sort(), 0, drawing.chunks.most()));
        push_edge(picture, drawing.layout.theme, place);
        picture.push_str("</g>\n");
    }
}

/// A rectangle of the drawing.
#[derive(Clone, Copy)]
struct Rectangle {
    x: f64,
    y: f64,
    width: f64,
    height: f64,
}

/// Opens the group of a cell or bar, with its title. Returns its place in the lane, or `None` if it takes no
/// time.
fn open(
    picture: &mut String,
    drawing: &Drawing<'_>,
    rank: Rank,
    name: &dyn Display,
    [start, end]: [f64; 2],
) -> Option<Rectangle> {
    let layout = &drawing.layout;
    let place = place(drawing, rank, [start, end])?;
    let [from, to] = [start, end].map(|time| layout.time(layout.since_start(time)));
    picture.push_str(&format!("<g><title>{name} on rank {rank}, {from} to {to}</title>"));
    Some(place)
}

/// Returns the place of a cell or bar in its lane, or `None` if it takes no time.
fn place(drawing: &Drawing<'_>, rank: Rank, [start, end]: [f64; 2]) -> Option<Rectangle> {
    let layout = &drawing.layout;
    let (x, width) = (layout.x(start), layout.length(end - start));
    (width > 0.0).then(|| Rectangle { x, y: layout.top(rank), width, height: layout.lane_height() })
}

/// Draws one cell without its labels. The cell of an overlap has one half per action.
fn push_cell(picture: &mut String, drawing: &Drawing<'_>, event: &Event, cell: Rectangle) {
    for (part, place) in halves(event, cell) {
        push_rect(picture, place, &fill(drawing, event.rank, part));
    }
    push_edge(picture, drawing.layout.theme, cell);
}

/// Returns the actions of a cell, each with its place: one, or the upper and the lower half of an overlap.
fn halves(event: &Event, cell: Rectangle) -> impl Iterator<Item = (Action, Rectangle)> {
    let height = cell.height / event.action.parts().count() as f64;
    let place = move |half: usize| Rectangle { y: cell.y + half as f64 * height, height, ..cell };
    event.action.parts().enumerate().map(move |(half, part)| (part, place(half)))
}

/// Draws the labels of one rank, after its bars, which would cover the cells of overlaps. The pointer finds
/// the cells below.
fn push_labels(picture: &mut String, drawing: &Drawing<'_>, rank: Rank) {
    picture.push_str("<g pointer-events=\"none\">");
    for event in drawing.timeline.events_of(rank).iter().filter(|event| event.action.is_compute()) {
        let cell = place(drawing, rank, [event.start, event.end]);
        for (part, place) in cell.into_iter().flat_map(|cell| halves(event, cell)) {
            push_label(picture, drawing, rank, part, (place, &fill(drawing, rank, part)));
        }
    }
    picture.push_str("</g>\n");
}

fn fill(drawing: &Drawing<'_>, rank: Rank, part: Action) -> String {
    LIGHT.fill(sort(part), drawing.chunks.chunk(rank, part.stage()), drawing.chunks.most())
}

fn push_rect(picture: &mut String, Rectangle { x, y, width, height }: Rectangle, fill: &str) {
    picture.push_str(&format!(
        "<rect x=\"{x:.2}\" y=\"{y:.2}\" width=\"{width:.2}\" height=\"{height:.2}\" fill=\"{fill}\"/>"
    ));
}

/// Draws a thin line of the background's colour around a cell. A thin cell gets none, because the line would
/// hide it.
fn push_edge(picture: &mut String, theme: &Theme, Rectangle { x, y, width, height }: Rectangle) {
    if width > 3.0 {
        picture.push_str(&format!(
            "<rect x=\"{x:.2}\" y=\"{y:.2}\" width=\"{width:.2}\" height=\"{height:.2}\" fill=\"none\" \
             stroke=\"{}\" stroke-width=\"0.8\"/>",
            theme.page
        ));
    }
}

/// Draws the longest label that fits: the whole action, a smaller one, one on two lines, or the microbatch
/// alone.
fn push_label(
    picture: &mut String,
    drawing: &Drawing<'_>,
    rank: Rank,
    part: Action,
    (place, fill): (Rectangle, &str),
) {
    let slices = drawing.timeline.slices();
    let whole = Named(part, slices).to_string();
    let microbatch = part.microbatch().map(|microbatch| slices.name(microbatch)).unwrap_or_default();
    let stage = whole.strip_suffix(microbatch.as_str()).unwrap_or(&whole).to_owned();
    let mut labels = vec![(vec![whole.clone()], 11.0), (vec![whole], 9.0)];
    if drawing.chunks.stages_of(rank).len() > 1 {
        // The chunk matters as much as the microbatch; the hue shows the sort of action.
        labels.push((vec![stage, microbatch.clone()], 9.0));
        labels.push((vec![part.stage().to_string(), microbatch.clone()], 9.0));
    }
    labels.push((vec![microbatch], 9.0));
    let fits = |(lines, size): &(Vec<String>, f64)| {
        let width = lines.iter().map(|line| text_width(line, *size)).fold(0.0, f64::max);
        width + 1.0 <= place.width && lines.len() as f64 * size <= place.height
    };
    let Some((lines, size)) = labels.into_iter().find(fits) else { return };
    let ink = ink_on(fill);
    let x = place.x + place.width / 2.0;
    let first = place.y + place.height / 2.0 - (lines.len() - 1) as f64 * size / 2.0 + size * 0.36;
    for (line, text) in lines.iter().enumerate() {
        let y = first + line as f64 * size;
        picture.push_str(&format!("<text x=\"{x:.2}\" y=\"{y:.2}\" text-anchor=\"middle\" font-size=\"{size}\" fill=\"{ink}\">{text}</text>"));
    }
}
