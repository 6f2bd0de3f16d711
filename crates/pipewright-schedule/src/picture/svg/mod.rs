//! The drawing: a self-contained SVG of a timeline, to scale.
//!
//! Each rank has one lane. Computation fills its lane, and an overlap has its two halves above each other.
//! Messages and collectives are thin bars along the lower edge, so that the computation behind them stays
//! visible. Exchanges of tokens are hatched bars along the upper edge. The rest of a lane is a bubble and is
//! hatched. [`super::html()`] can zoom.
//!
//! If there are few actions, they are drawn one by one, each with a label and a title, which a browser shows
//! on hovering. If there are many, they are drawn as one path per lane and fill, without titles, so that the
//! file stays small.

mod layout;
mod cells;
mod strokes;
mod exchanges;
mod memory_lane;
mod frame;

use crate::ids::Rank;
use crate::picture::chunks::Chunks;
use crate::picture::palette::{LIGHT, Theme};
use crate::picture::settings::{PictureSettings, escaped};
use crate::timeline::Timeline;

use cells::push_cells;
use exchanges::{has_exchanges, push_exchanges, push_pattern};
use frame::{push_axis, push_lane, push_legend, push_title};
use layout::{Drawing, Layout};
use memory_lane::{HighestPeak, push_memory};
use strokes::push_strokes;

/// The largest number of events that are drawn one by one.
const MOST_DETAILED: usize = 2500;

/// Draws `timeline` as an SVG document.
pub fn svg(timeline: &Timeline, settings: &PictureSettings<'_>) -> String {
    svg_in(timeline, settings, &LIGHT)
}

/// Draws `timeline` in the colours of a theme. The actions have those of the light one.
pub(super) fn svg_in(timeline: &Timeline, settings: &PictureSettings<'_>, theme: &'static Theme) -> String {
    let drawing = Drawing {
        timeline,
        chunks: Chunks::of(timeline),
        layout: Layout::of(timeline, settings, theme),
        is_detailed: timeline.events().len() <= MOST_DETAILED,
    };
    let mut picture = opening(&drawing.layout, settings.title);
    if has_exchanges(timeline) {
        push_pattern(&mut picture, theme);
    }
    push_title(&mut picture, &drawing.layout, settings.title);
    push_axis(&mut picture, &drawing.layout);
    let highest = settings.memory_lane.then(|| HighestPeak::of(timeline, settings));
    for rank in (0..timeline.ranks()).map(Rank::new) {
        push_lane(&mut picture, &drawing.layout, rank);
        if drawing.is_detailed {
            push_cells(&mut picture, &drawing, rank);
        } else {
            push_strokes(&mut picture, &drawing, rank);
        }
        push_exchanges(&mut picture, &drawing, rank);
        if let Some(highest) = highest {
            push_memory(&mut picture, &drawing, rank, settings, highest);
        }
    }
    push_legend(&mut picture, &drawing);
    picture.push_str("</svg>\n");
    picture
}

/// Returns the start of the document: its size, its name for screen readers, the hatching of bubbles and the
/// background.
fn opening(layout: &Layout, title: &str) -> String {
    let (width, height) = (layout.width(), layout.height());
    let name = if title.is_empty() { "Timeline of a pipeline schedule".to_owned() } else { escaped(title) };
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height:.0}\" width=\"{width}\" \
         height=\"{height:.0}\" role=\"img\" aria-labelledby=\"name\" \
         font-family=\"system-ui, 'Segoe UI', 'DejaVu Sans', sans-serif\" font-size=\"11\">\n\
         <title id=\"name\">{name}</title>\n\
         <defs><pattern id=\"bubble\" width=\"6\" height=\"6\" patternUnits=\"userSpaceOnUse\" patternTransform=\"rotate(45)\">\
         <rect width=\"6\" height=\"6\" fill=\"{}\"/><rect width=\"1.2\" height=\"6\" fill=\"{}\"/></pattern></defs>\n\
         <rect width=\"{width}\" height=\"{height:.0}\" fill=\"{}\"/>\n",
        layout.theme.bubble, layout.theme.hatch, layout.theme.page
    )
}

#[cfg(test)]
mod tests;
