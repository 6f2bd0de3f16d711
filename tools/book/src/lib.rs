//! The book in `docs/`: its generated pages, and checks of all of its pages.
//!
//! ```text
//! cargo run -p pipewright-book                      # writes the chapter of the schedules and its pictures
//! mdbook build && cargo run -p pipewright-book check target/book    # checks the links of the built book
//! ```
//!
//! The tests check that the generated pages are up to date, that every formula agrees with the simulation,
//! that links and paths lead to something, and that the messages in the chapter on errors exist.

pub mod markdown;
pub mod formula;
pub mod schedules;
pub mod html;

use std::path::PathBuf;

/// Returns the folder of the repository.
pub fn root() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
}
