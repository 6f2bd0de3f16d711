//! Schedules by name: what each rank computes, in which order.
//!
//! One generator a file. A generator documents its paper, its order, its bubble and its memory, and is
//! entered into the list in `catalogue.rs`; nothing else knows it. Communication is added by
//! [`mod@crate::lower`].
//!
//! ```
//! use pipewright_schedule::{ScheduleSpec, csv, generate};
//! let schedule = generate("1f1b", &ScheduleSpec { ranks: 2, stages_per_rank: None, microbatches: 3 })?;
//! assert_eq!(csv::print_schedule(&schedule), "0F0,0F1,0B0,0F2,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n");
//! # Ok::<(), pipewright_schedule::GenerateError>(())
//! ```

mod catalogue;
mod forward_only;
mod gpipe;
mod one_f_one_b;
mod spec;

pub use catalogue::{Generator, catalogue, generate};
pub use spec::{GenerateError, MAX_COMPUTE_ACTIONS, ScheduleSpec};
