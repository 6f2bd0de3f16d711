//! Pictures of schedules and timelines: [`grid()`] for a terminal, [`svg()`] for a document, [`html()`] to
//! explore in a browser.
//!
//! All return text, and what they return needs nothing else to be looked at. Colour on a terminal, files and
//! viewers are the caller's business.

mod grid;
mod chunks;
mod palette;
mod overlaps;
mod svg;
mod page_data;
mod html;

pub use grid::grid;
pub use html::html;
pub use overlaps::with_whole_overlaps;
pub use svg::svg;

use crate::costs::StageSizes;
use crate::simulate::UNIT;

/// What a picture shows besides the timeline.
#[derive(Debug, Clone, Copy, Default)]
pub struct PictureSettings<'a> {
    /// The heading.
    pub title: &'a str,
    /// Bytes of each stage, one entry for each stage or one for all. Empty: memory is counted in activations
    /// of one stage and microbatch.
    pub sizes: &'a [StageSizes],
    /// Whether each rank has a memory lane below its actions. The page can show and hide it; without this
    /// setting it shows it at first if there is room.
    pub memory_lane: bool,
}

impl PictureSettings<'_> {
    /// The sizes by which memory is counted.
    fn counted_sizes(&self) -> &[StageSizes] {
        if self.sizes.is_empty() { &[UNIT] } else { self.sizes }
    }
}

/// Escapes `text` for XML and HTML.
fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
