//! Stages: the modules that users write, and the operations that the executor runs on them.
//!
//! [`StageModule`] is the typed trait that a user implements. [`Stage`] is such a module without its types. A pipeline
//! prepares it for its rank, which gives it the state of training: [`Stage`] `--prepare-->` `TrainingStage`, which the
//! executor sees as `dyn StageRunner`.
//!
//! | file | content |
//! |---|---|
//! | `module.rs` | `StageModule` |
//! | `prepare.rs` | `Stage`, and how it is prepared for its rank |
//! | `body.rs` | what a stage computes: layers in a row, or a part of a graph |
//! | `runner.rs` | the traits through which the executor uses a stage: computing, and access to parameters |
//! | `training.rs` | `TrainingStage`: the state of a stage that trains, and how it is prepared |
//! | `segment.rs` | how the module or a block of it runs |
//! | `compute.rs`, `forward.rs`, `backward.rs` | its computations: in one go, and block by block |
//! | `optimizer.rs` | its optimizer, with groups of parameters |
//! | `parameters.rs`, `update.rs` | access to its parameters, and their update |
//! | `visit.rs`, `place.rs` | access to its modules after the launch |
//! | `tape.rs`, `tape_ends.rs` | the tape of a microbatch in flight |
//! | `carry.rs` | what the slices of a microbatch pass to each other |
//! | `recompute.rs` | forwards that keep only their inputs |
//! | `weight_work.rs` | weight gradients that are deferred |
//! | `gradients.rs` | the sums of gradients |
//! | `module_parameters.rs` | the parameters of a module as a list |
//! | `statistics.rs` | running statistics, which forwards change |
//! | `shards.rs` | parameters of which each replica holds some rows |
//! | `error.rs` | errors of stages |

mod error;
mod tape_ends;
mod carry;
mod module;
mod place;
mod body;
mod weight_work;
mod gradients;
mod module_parameters;
mod shards;
mod tape;
mod runner;
mod fingerprint;
mod prepare;
mod training;
mod segment;
mod optimizer;
mod forward;
mod backward;
mod recompute;
mod statistics;
mod compute;
mod parameters;
mod update;
mod visit;

pub(crate) use backward::BackwardState;
pub(crate) use body::{NO_SKIPS, Skip, Skips, StageBody};
pub use error::{ElementTypeError, StageError};
pub(crate) use error::{in_layer, panic_message};
pub(crate) use forward::ForwardState;
pub(crate) use module::{Auxiliary, ExpertLoad};
pub use module::{StageContext, StageModule};
pub use place::ModulePlace;
pub(crate) use place::{any, any_mut};
pub use prepare::Stage;
pub(crate) use prepare::StageSettings;
pub(crate) use runner::{
    BatchPart, ForwardTask, Held, InputGradients, RestoredPaths, StageCompute, StageParameters, StageRunner,
};
pub(crate) use tape_ends::without_tape;
pub(crate) use visit::{ChangeModule, ReadModule, Visit, for_stage};
pub use weight_work::WeightWork;
