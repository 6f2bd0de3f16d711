//! Simulates programs: predicts when each rank runs each action, and its memory.
//!
//! In [`logical()`], every action takes one tick, which shows the order of events and proves that the program
//! has no deadlock. In [`timed()`], actions and messages take the times of their costs, with buffered
//! messages or, with [`timed_on()`], on the communicator of another system. All give a
//! [`crate::Timeline`], the type of measured runs. [`memory_curve`] computes the memory of a rank from any
//! timeline, and [`lifetimes()`] the number of buffers for a rank's activations. [`ClosedForm`] has the time and the
//! memory of 1F1B without a simulation.
//!
//! ```
//! use pipewright_schedule::simulate::summarize;
//! use pipewright_schedule::{Costs, Level, LowerConfig, csv, lower};
//! let schedule = csv::parse_schedule("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")?;
//! let program = lower(&schedule, &LowerConfig::from(Level::Comms))?;
//! let summary = summarize(&program, &Costs::default())?;
//! assert_eq!((summary.makespan, summary.bubble_fraction), (9.0, 1.0 - 6.0 / 9.0));
//! assert_eq!(summary.peak_activations, [2, 1]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

pub(crate) mod alternation;
mod boundary_tensors;
mod closed_form;
mod dependencies;
mod error;
mod few_microbatches;
mod lifetimes;
pub mod logical;
mod memory;
mod queues;
mod rank_clock;
mod summary;
mod tape;
mod timed;
mod timed_run;
mod steady;

pub use boundary_tensors::Tensor;
pub use closed_form::ClosedForm;
pub use dependencies::{Dependencies, dependencies};
pub(crate) use dependencies::{Dependent, NeededMessage, index};
pub use error::SimulateError;
pub use few_microbatches::{FewMicrobatches, few_microbatches};
pub use lifetimes::{LifetimeOf, Lifetimes, LiveRange, all_lifetimes, lifetimes};
pub use logical::{LogicalRun, logical};
pub(crate) use memory::{MemoryChange, WithGradients, memory_changes};
pub use memory::{MemoryStep, UNIT, memory_curve, peak_memory};
pub use steady::{Steady, steady};
pub use summary::{Summary, summarize};
pub use tape::CostOf;
pub(crate) use tape::Node;
pub use timed::{timed, timed_on};
pub use timed_run::{PredictedExchange, TimedRun};
