//! Pictures of schedules and timelines: [`grid()`] and [`TimeGrid`] for a terminal, [`svg()`] for a document,
//! [`html()`] to explore one timeline in a browser, and [`view()`] to compare a prediction with measured
//! steps and to explain them.
//!
//! All return text that needs no other files to be displayed. The caller handles colours of a terminal, files
//! and viewers.

mod settings;
mod grid;
mod names;
mod chunks;
mod palette;
mod bars;
mod computation;
mod overlaps;
mod svg;
mod comparison;
mod page_data;
mod html;
mod buffers;
mod time_grid;
mod what_if;
mod view;

pub use comparison::{ComparedPicture, Comparison, comparison, html_table};
pub use computation::computation_of;
pub use grid::{grid, grid_around};
pub use html::{html, page_colours};
pub use names::{microbatches_in_words, title};
pub use overlaps::with_whole_overlaps;
pub use settings::{MAX_CELLS, PictureSettings, TimeUnit};
pub use svg::svg;
pub use time_grid::TimeGrid;
pub use view::{RecordedStep, View, WholeStep, view};
