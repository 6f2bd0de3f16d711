//! Draws many actions as few paths: one per lane, height and fill.
//!
//! A path is a row of horizontal strokes as thick as a lane, in tenths of the picture's unit and each
//! relative to the previous one: `m24 0h7`. Strokes that are too fine to see are merged, so that the size of
//! a lane is bounded.

use crate::ids::Rank;
use crate::picture::palette::{LIGHT, Sort, sort};
use std::collections::BTreeMap;

use super::layout::{Drawing, LABEL, PLOT};

/// Steps of one unit of the picture.
const STEPS: f64 = 10.0;
/// The largest number of cells of a lane that are drawn by themselves.
const MOST_CELLS: usize = 1600;
/// Bars that are closer to each other than this, in steps, are drawn as one.
const BAR_GAP: i64 = 20;

/// Which part of a lane's height a stroke fills.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum LaneRegion {
    Whole,
    UpperHalf,
    LowerHalf,
    Bar,
}

/// The common properties of the strokes of one path: their position, and the sort and chunk that determine
/// their colour.
type Path = (LaneRegion, Sort, usize);

/// A stroke, in steps from the start of the timeline.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Stroke {
    path: Path,
    start: i64,
    end: i64,
}

/// Draws the actions of one rank.
pub(super) fn push_strokes(picture: &mut String, drawing: &Drawing<'_>, rank: Rank) {
    let (layout, chunks) = (&drawing.layout, drawing.chunks.most());
    let mut paths: BTreeMap<Path, Vec<Stroke>> = BTreeMap::new();
    for stroke in coarse_cells(cells(drawing, rank)).into_iter().chain(bars(drawing, rank)) {
        paths.entry(stroke.path).or_default().push(stroke);
    }
    picture.push_str(&format!(
        "<g transform=\"translate({LABEL} {:.2})scale({} 1)\">\n",
        layout.top(rank),
        1.0 / STEPS
    ));
    for ((part, sort, chunk), strokes) in paths {
        let (lane, bar) = (layout.lane_height(), layout.bar_height());
        let (middle, height) = match part {
            LaneRegion::Whole => (lane / 2.0, lane),
            LaneRegion::UpperHalf => (lane / 4.0, lane / 2.0),
            LaneRegion::LowerHalf => (lane * 3.0 / 4.0, lane / 2.0),
            LaneRegion::Bar => (lane - bar / 2.0, bar),
        };
        let fill = LIGHT.fill(sort, chunk, chunks);
        picture.push_str(&format!("<path stroke=\"{fill}\" stroke-width=\"{height:.2}\" d=\"M0 {middle:.2}"));
        push_path(picture, &strokes);
        picture.push_str("\"/>\n");
    }
    picture.push_str("</g>\n");
}

fn push_path(picture: &mut String, strokes: &[Stroke]) {
    let mut at = 0;
    for &Stroke { start, end, .. } in strokes {
        // A stroke without length is not drawn.
        let end = end.max(start + 1);
        picture.push_str(&format!("m{} 0h{}", start - at, end - start));
        at = end;
    }
}

/// Returns the computation of a rank, with both halves of an overlap as separate strokes.
fn cells(drawing: &Drawing<'_>, rank: Rank) -> Vec<Stroke> {
    let mut cells = Vec::new();
    let events = drawing.timeline.events_of(rank).iter();
    for event in events.filter(|event| event.action.is_compute() && event.end > event.start) {
        let heights: &[LaneRegion] = match event.action.parts().count() {
            1 => &[LaneRegion::Whole],
            _ => &[LaneRegion::UpperHalf, LaneRegion::LowerHalf],
        };
        for (part, &height) in event.action.parts().zip(heights) {
            let path = (height, sort(part), drawing.chunks.chunk(rank, part.stage()));
            cells.push(stroke(drawing, path, event.start, event.end));
        }
    }
    cells
}

/// Returns the messages and collectives of a rank. Bars of one colour that touch or nearly touch are one bar.
fn bars(drawing: &Drawing<'_>, rank: Rank) -> Vec<Stroke> {
    let mut merged: Vec<Stroke> = Vec::new();
    for bar in crate::picture::bars::bars(drawing.timeline, rank) {
        let bar = stroke(drawing, (LaneRegion::Bar, bar.of.sort(), 0), bar.start, bar.end);
        match merged.iter_mut().rev().find(|last| last.path == bar.path) {
            Some(last) if bar.start - last.end < BAR_GAP => last.end = last.end.max(bar.end),
            _ => merged.push(bar),
        }
    }
    merged
}

fn stroke(drawing: &Drawing<'_>, path: Path, start: f64, end: f64) -> Stroke {
    let steps = |time| (drawing.layout.offset(time) * STEPS).round() as i64;
    Stroke { path, start: steps(start), end: steps(end) }
}

/// Returns the cells themselves or, if they are too many, the longest content of each column of one unit.
fn coarse_cells(cells: Vec<Stroke>) -> Vec<Stroke> {
    if cells.len() <= MOST_CELLS {
        return cells;
    }
    let column_width = STEPS as i64;
    let mut columns: Vec<BTreeMap<Path, i64>> = vec![BTreeMap::new(); PLOT as usize];
    for cell in &cells {
        for (at, column) in (0..).zip(&mut columns).skip((cell.start / column_width) as usize) {
            let (from, to) = (at * column_width, (at + 1) * column_width);
            if from >= cell.end {
                break;
            }
            *column.entry(cell.path).or_default() += cell.end.min(to) - cell.start.max(from);
        }
    }
    let mut coarse: Vec<Stroke> = Vec::new();
    for (at, column) in (0..).zip(&columns) {
        let (start, end) = (at * column_width, (at + 1) * column_width);
        for path in longest(column, column_width) {
            match coarse.iter_mut().rev().take(2).find(|last| last.path == path && last.end == start) {
                Some(last) => last.end = end,
                None => coarse.push(Stroke { path, start, end }),
            }
        }
    }
    coarse
}

/// Returns the longest content of a column: a whole cell, both halves of overlaps, or nothing if it is mostly
/// idle.
fn longest(column: &BTreeMap<Path, i64>, width: i64) -> Vec<Path> {
    let best_of = |part| {
        let of_part = column.iter().filter(move |(path, _)| path.0 == part);
        of_part.max_by_key(|(_, length)| **length).map(|(path, length)| (*path, *length))
    };
    let total =
        |part| -> i64 { column.iter().filter(|(path, _)| path.0 == part).map(|(_, length)| length).sum() };
    let (whole, halves) = (total(LaneRegion::Whole), total(LaneRegion::UpperHalf));
    if whole + halves < width - whole - halves {
        return Vec::new();
    }
    let parts: &[LaneRegion] =
        if whole >= halves { &[LaneRegion::Whole] } else { &[LaneRegion::UpperHalf, LaneRegion::LowerHalf] };
    parts.iter().filter_map(|&part| best_of(part)).map(|(path, _)| path).collect()
}
