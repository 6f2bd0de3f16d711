//! Makes pipeline schedules: from a model's description to a program that is proved sound.
//!
//! ```text
//! name, ScheduleSpec --generate--> Schedule (compute only, per rank) with its Placement (stages on ranks)
//!    --lower--> Program (compute + communication) --validate--> ValidatedProgram --simulate--> Timeline
//! ModelDesc, number of stages --partition--> Partition (layers of each stage)
//! ```
//!
//! A module imports only modules that are declared before it (`tools/layers` checks it). The crate never
//! depends on Burn, never reads a clock or a file, and never starts a thread. The runtime that executes a
//! [`ValidatedProgram`] is another crate.

/// Compiles the code in the crate's README.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

pub mod error_text;
pub mod words;
pub mod bytes;
pub mod held_bytes;
pub mod divisor;
pub mod checkpoint_interval;
pub mod ids;
pub mod mesh;
pub mod slices;
pub mod trained;
pub mod model;
pub mod partition;
pub mod placement;
pub mod vpp;
pub mod overlap;
pub mod action;
mod packed;
pub mod notation;
pub mod schedule;
pub mod pairing;
pub mod csv;
pub mod recompute;
pub mod costs;
mod cost_text;
mod slice_costs;
pub mod generate;
mod batch_gate;
pub mod footprint;
pub mod level;
pub mod sharding;
mod action_set;
mod neighbours;
mod rank_set;
mod row_cursors;
mod transfer;
pub mod validate;
pub mod delay;
pub mod communicator;
pub mod lower;
pub mod skip_event;
pub mod message_record;
pub mod timeline;
pub mod slow_ranks;
pub mod simulate;
pub mod causes;
pub mod profile;
pub mod analytic;
pub mod plan;
pub mod emit;
mod trace;
pub mod measured;
pub mod rebalance;
pub mod picture;
pub mod comparison;

pub use action::{Action, ActionKind};
pub use costs::Costs;
pub use generate::{GenerateError, GenerateErrorKind, ScheduleSpec, generate};
pub use ids::{Chunk, Microbatch, Rank, StageIndex};
pub use level::Level;
pub use lower::{LowerConfig, LowerError, lower};
pub use message_record::{MessageEnd, MessageRecord, TensorForm};
pub use model::{EMBEDDING_PART, LayerDesc, ModelDesc};
pub use overlap::Overlap;
pub use partition::{Method, Partition, PartitionError, partition};
pub use placement::{Placement, PlacementError};
pub use recompute::Recompute;
pub use schedule::{Program, Schedule, ScheduleError};
pub use skip_event::{SkipAction, SkipEvent, SkipMessage};
pub use slices::Slices;
pub use timeline::{ClockSkew, Event, QueueWait, Scope, ScopeKind, Timeline};
pub use trained::{StageBackward, TrainedStages};
pub use validate::{ValidatedProgram, Violation, Violations, validate};
