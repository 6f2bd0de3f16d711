//! Pictures of schedules and timelines: [`grid()`] for a terminal, [`svg()`] for a page.
//!
//! Both return text. Colour on a terminal, files and viewers are the caller's business.

mod grid;
mod svg;

pub use grid::grid;
pub use svg::svg;
