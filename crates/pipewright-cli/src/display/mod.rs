//! What a person sees while a run trains, on standard error: a live display on a terminal, plain lines elsewhere.

mod figures;
mod lines;
mod live;
pub(crate) mod log;
mod progress;

pub(crate) use figures::bytes;
pub(crate) use progress::{Display, say};
