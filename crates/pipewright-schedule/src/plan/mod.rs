//! Plans a run: searches how to cut a model into stages, where to place them, and in which order to run them,
//! for the costs of a [`Profile`](crate::profile::Profile), and proves how much better a plan could be.
//!
//! `README.md` in this folder describes the search space, the cost of a plan and the proofs of the bounds.
//!
//! ```
//! use pipewright_schedule::plan::{PlanRequest, plan};
//! use pipewright_schedule::profile::{LayerProfile, LinkProfile, Profile};
//! let block = LayerProfile {
//!     kind: "block".into(),
//!     count: 8,
//!     forward_s: 1e-3,
//!     input_backward_s: 1e-3,
//!     weight_backward_s: 1e-3,
//!     parameter_bytes: 1 << 24,
//!     ..LayerProfile::default()
//! };
//! let link = LinkProfile::new(1e-6, 1e10);
//! let profile = Profile { link, layers: vec![block], ..Profile::default() };
//! let request = PlanRequest { ranks: 2, microbatches: 8, ..PlanRequest::default() };
//! let report = plan(&profile, &request, &mut || true)?;
//! assert!(report.gap() < 0.02);
//! # Ok::<(), pipewright_schedule::plan::PlanError>(())
//! ```

mod system;
mod request;
mod tuning;
mod rank_memory;
mod head_parts;
mod network;
mod report;
mod layers;
mod stage_load;
mod class;
mod cuts;
mod rank_times;
mod unlike_times;
mod unlike_cut;
mod bound;
mod numbers;
mod placed_cut;
mod unlike_walk;
mod balance;
mod recut;
mod order;
mod links;
mod second_forwards;
mod evaluate;
mod peaks;
mod greedy;
mod justify;
mod families;
mod recompute;
mod shape;
mod search;
mod predict;
mod delayed_step;
mod best_cut;
mod pool;
mod unlike_pool;
mod named;
mod explore;
mod replica_rows;
mod machines;
mod change;
mod critical;
mod draws;
mod polish;
mod planner;
mod unlike_replicas;
mod streamed;
mod dispatch;
#[cfg(test)]
mod tests;

pub use best_cut::best_cut;
pub use delayed_step::{DelayedPrograms, DelayedStep};
pub use dispatch::plan;
pub use head_parts::with_head_parts;
pub use predict::{
    PlanChoice, PredictError, Prediction, StreamChoice, choice_costs, predict, predict_program,
};
pub use report::{
    Collectives, MachineUse, Outcome, OutcomeKind, Plan, PlanError, PlanMesh, PlanReport, PlanSettings,
    PlanStream, SEARCHED, Shortage,
};
pub use request::{PlanRequest, TrainingState};
pub use streamed::READ_ROOM;
pub use system::{PlacedSchedule, Refusal, System};
pub(crate) use system::{group_size, is_loop};
