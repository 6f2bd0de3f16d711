//! Pictures of schedules and timelines: [`grid()`] for a terminal, [`svg()`] for a document, [`html()`] to
//! explore in a browser.
//!
//! All return text, and what they return needs nothing else to be looked at. Colour on a terminal, files and
//! viewers are the caller's business.

mod grid;
mod html;
mod palette;
mod svg;

pub use grid::grid;
pub use html::html;
pub use svg::svg;
