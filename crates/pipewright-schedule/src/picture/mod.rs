//! Pictures of schedules and timelines: [`grid()`] for a terminal, [`svg()`] for a document, [`html()`] to explore
//! one timeline in a browser, and [`view()`] to compare a prediction with measured steps and to explain them.
//!
//! All return text that needs no other files to be displayed. The caller handles colours of a terminal, files and
//! viewers.

mod grid;
mod names;
mod chunks;
mod palette;
mod bars;
mod overlaps;
mod svg;
mod page_data;
mod html;
mod view;

pub use grid::{grid, grid_around};
pub use html::html;
pub use overlaps::with_whole_overlaps;
pub use svg::svg;
pub use view::{RecordedStep, View, WholeStep, view};

use crate::costs::StageSizes;
use crate::simulate::UNIT;

/// The content of a picture in addition to the timeline.
#[derive(Debug, Clone, Copy, Default)]
pub struct PictureSettings<'a> {
    /// The heading.
    pub title: &'a str,
    /// The bytes of each stage, one entry per stage or one for all. If empty, memory is counted in activations of one
    /// stage and microbatch, or slice.
    pub sizes: &'a [StageSizes],
    /// Whether each rank has a memory lane below its actions. The page can show and hide it. Without this setting the
    /// page shows it at first if there is room.
    pub memory_lane: bool,
}

impl PictureSettings<'_> {
    /// Returns the sizes by which memory is counted.
    fn counted_sizes(&self) -> &[StageSizes] {
        if self.sizes.is_empty() { &[UNIT] } else { self.sizes }
    }
}

/// Escapes `text` for XML and HTML.
fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
