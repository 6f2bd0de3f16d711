//! Pipeline schedules, from a model's description to a program that is proved sound.
//!
//! ```text
//! ModelDesc --partition--> Stages --place--> Placement --generate--> Schedule (compute only, per rank)
//!    --lower--> Program (compute + communication) --validate--> ValidatedProgram --simulate--> Timeline
//! ```
//!
//! The modules stand in the order in which the data meets them. The crate never depends on Burn, never reads
//! a clock or a file, and never starts a thread: what runs a [`ValidatedProgram`] is elsewhere.

// Reading order, which is not that of the alphabet: blank lines keep the formatter from sorting.
pub mod ids;

pub mod model;

pub mod partition;

pub mod placement;

pub mod vpp;

pub mod overlap;

pub mod action;

mod packed;

pub mod notation;

pub mod schedule;

pub mod csv;

pub mod costs;

pub mod generate;

pub mod level;

mod marks;
mod side_by_side;
mod transfer;
mod turns;
mod wiring;

pub mod lower;

pub mod validate;

pub mod simulate;

pub mod timeline;

mod trace;

pub mod picture;

pub use action::{Action, ActionKind};
pub use costs::Costs;
pub use generate::{GenerateError, ScheduleSpec, generate};
pub use ids::{Chunk, Microbatch, Rank, StageIndex};
pub use level::Level;
pub use lower::{LowerConfig, LowerError, lower};
pub use model::{LayerDesc, ModelDesc};
pub use overlap::Overlap;
pub use partition::{Method, Partition, PartitionError, partition};
pub use placement::{Placement, PlacementError};
pub use schedule::{Program, Schedule, ScheduleError};
pub use timeline::{Event, Timeline};
pub use validate::{ValidatedProgram, Violation, ViolationKind, Violations, validate};
