//! The pictures of `schedule` and `simulate`, made by the binary and opened in headless Chromium.
//!
//! Without Chromium these tests say so on standard error and pass. With `PIPEWRIGHT_REQUIRE_CHROMIUM=1` they fail
//! then; that is for continuous integration.

mod browser;
mod made;
mod drawing;
mod page_input;
mod page_look;
mod redraw;
