//! What a person sees on standard error: words, and while a run trains a live display on a terminal or plain lines
//! elsewhere.
//!
//! [`screen`] is the only writer of standard error; everything else composes text. The road: [`Display`] takes the
//! figures of each step, `frame` or `lines` turn them into text, and `summary` says at the end what became of the run.

mod chart;
mod figures;
mod frame;
mod lines;
mod live;
pub(crate) mod log;
mod overview;
mod progress;
pub(crate) mod screen;
mod summary;

pub(crate) use figures::bytes;
pub(crate) use overview::Overview;
pub(crate) use progress::Display;
pub(crate) use screen::say;
pub(crate) use summary::Ending;
