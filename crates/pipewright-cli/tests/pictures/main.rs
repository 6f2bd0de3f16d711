//! Tests of the pictures of `schedule` and `simulate` and of the pages of `view` and `report`, made by the
//! binary and opened in headless Chromium.
//!
//! If Chromium is not installed, these tests print a note to standard error and pass. Continuous integration
//! sets `PIPEWRIGHT_REQUIRE_CHROMIUM=1`, so that they fail instead.

mod book;
#[path = "../turns/mod.rs"]
mod turns;
mod chromium;
mod browser;
mod made;
mod causes;
mod drawing;
mod escaping;
mod page_input;
mod page_look;
mod redraw;
mod report_page;
mod report_look;
mod simulation;
mod view_page;
mod view_run;
