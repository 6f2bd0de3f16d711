//! The built page in headless Chromium: its figures are those of the native library, and it makes no requests.
//!
//! If Chromium is not installed, or the page cannot be built, these tests print a note to standard error and pass.
//! Continuous integration sets `PIPEWRIGHT_REQUIRE_CHROMIUM=1`, so that they fail instead.

#[path = "../../../pipewright-cli/tests/turns/mod.rs"]
#[expect(dead_code, reason = "no test of the page measures times alone")]
mod turns;
#[path = "../../../pipewright-cli/tests/pictures/chromium.rs"]
mod chromium;
#[path = "../../../pipewright-cli/tests/pictures/browser.rs"]
#[expect(dead_code, reason = "the tests of the pictures use the rest")]
mod browser;
mod opened;
mod look;
mod figures;
mod input;
