//! The output on standard error: messages and, during training, a live display on a terminal or plain lines
//! elsewhere.
//!
//! [`screen`] is the only writer of standard error; everything else composes text. [`Display`] receives the metrics of
//! each step, `frame` or `lines` turns them into text, and `summary` composes the text at the end of the run.

mod chart;
mod figures;
mod frame;
mod lines;
mod live;
pub(crate) mod log;
mod progress;
mod ranks;
pub(crate) mod screen;
mod summary;
mod tokenize_bar;
mod undeferred;
mod wrap;

pub(crate) use figures::{bytes, milliseconds, short_count};
pub(crate) use progress::Display;
pub(crate) use screen::{say, set_quiet};
pub(crate) use tokenize_bar::TokenizeBar;
