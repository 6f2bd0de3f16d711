//! Reads the frozen matrices of a stage from their file before the stage computes, and drops them afterwards: the actions
//! `UNSHARD` and `RESHARD` of stages with [`StreamedMatrix`](crate::memory::StreamedMatrix).
//!
//! A base of adapters that is larger than memory stays in its file. The program says how many stages of a rank are in
//! memory at once, and asks for each stage before it computes
//! ([`LowerConfig::unshard`](pipewright_schedule::LowerConfig::unshard)). A thread of the rank reads one stage after another in
//! this order while the rank computes. A computation waits for its stage, at most the deadline of any other wait.
//! Tapes refer to a matrix and do not keep it, so a backward takes it from memory when its stage is read again.
//!
//! The matrices have the same bits whenever they are read, so results do not depend on the number of stages in memory.

mod error;
mod streams;

pub use error::{StreamError, StreamErrorKind};
pub(crate) use streams::Streams;
