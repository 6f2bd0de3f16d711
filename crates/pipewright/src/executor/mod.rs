//! One rank's step as a state machine: what to do next, and what it waits for.
//!
//! An [`Executor`] walks its rank's row of a validated program. [`Executor::poll`] does at most one action and never
//! blocks; who polls, parks and watches the deadline is a driver ([`crate::driver`]). After the program the ranks add
//! up the gradients of shared parameters and the gradient norm, and each takes its optimizer step.
//!
//! ```text
//! actions --> replicas --> shared --> squares --> norm --> ready --> update --> reports --> done
//!    ^  |     gradients    their      other       other    are the             across
//!    +--+     of all       gradients  replicas'   ranks'   replicas?           processes
//!    waiting on a message: try again when something has arrived
//!    (before the first step, once: which parameters are shared)
//!    (from replicas to update only where an update follows; replicas and ready only where there are some, squares only
//!    where each has a part of the parameters)
//! ```
//!
//! | file | what it holds |
//! |---|---|
//! | `machine.rs` | the executor: a poll, an action, an error in its place |
//! | `step.rs` | where a step stands |
//! | `phases.rs` | one function for each phase after the program |
//! | `actions.rs` | one handler an action |
//! | `link.rs` | the transport as seen from the rank's coord in the mesh |
//! | `reduction.rs` | gradients summed over replicas |
//! | `gather.rs` | parameters that are spread over replicas |
//! | `edges.rs` | what a stage takes and gives |
//! | `skip.rs` | skip connections that go straight to their stage |
//! | `sharing.rs` | parameters with several owners |
//! | `finish.rs` | losses, gradient norm, optimizer step |
//! | `report.rs` | what a rank says of its step, and to whom |
//! | `state.rs` | parameters and optimizer state, out and in |
//! | `local.rs` | what a rank keeps for each of its stages |

mod actions;
mod local_stage;
mod edges;
mod finish;
mod gather;
mod mesh_endpoint;
mod machine;
mod phases;
mod reduction;
mod report;
mod sharing;
mod state;
mod step;
mod skip;

pub use gather::NamedParameter;
pub(crate) use machine::{Executor, ExecutorConfig};
pub(crate) use mesh_endpoint::MeshEndpoint;
pub(crate) use report::RankReport;
pub(crate) use step::{Poll, StepInput};
