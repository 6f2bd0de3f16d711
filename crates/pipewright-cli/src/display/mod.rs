//! The output on standard error: messages and, during training, a live display on a terminal or plain lines
//! elsewhere.
//!
//! [`screen`](pipewright_planning::screen) is the only writer of standard error; everything else composes text. [`Display`] receives the metrics of
//! each step, `frame` or `lines` turns them into text, and `summary` composes the text at the end of the run.

mod chart;
mod figures;
mod frame;
mod lines;
mod live;
pub(crate) mod log;
mod progress;
mod ranks;
mod summary;
mod tokenize_bar;
mod undeferred;

pub(crate) use figures::milliseconds;
pub(crate) use progress::Display;
pub(crate) use tokenize_bar::TokenizeBar;
