//! Stages: the modules that users write, and the operations that the executor runs on them.
//!
//! [`StageModule`] is the typed trait that a user implements. [`Stage`] is such a module without its types. A pipeline
//! prepares it for its rank, which gives it the state of training: [`Stage`] `--prepare-->` `TrainingStage`,
//! which the executor sees as `dyn StageRunner`. A forward has one name from the executor to the user's
//! module: `StageCompute::forward` runs `StageBody::forward`, which runs `StageModule::forward`; blocks run
//! as `forward_block`.
//!
//! | file | content |
//! |---|---|
//! | `module.rs` | `StageModule` |
//! | `body.rs` | what a stage computes: a user's module, layers in a row, or a part of a graph |
//! | `settings.rs`, `prepare.rs` | the parts and settings of a stage; `Stage`, and how it is prepared for its rank |
//! | `runner.rs` | the traits through which the executor uses a stage: computing, and access to parameters |
//! | `training.rs` | `TrainingStage`, which has these traits; its folder has its methods |
//! | `held_module.rs`, `shards.rs` | the module with rounded parameters, and with the rows of a replica |
//! | `parameter_table.rs`, `module_parameters.rs` | paths, shapes and placements of its parameters; their values |
//! | `gradients.rs`, `optimizer.rs` | the sums of gradients; the optimizer, with groups of parameters |
//! | `in_flight.rs`, `microbatch.rs` | the microbatches in flight; a forward or a backward that has begun |
//! | `segment.rs` | the whole module or a block of it, which runs at once |
//! | `tape.rs`, `tape_ends.rs` | the tape of a segment |
//! | `watch.rs`, `first_value.rs` | the search for the first value that is not finite |
//! | `forwarded.rs` | the results of a forward, and their fingerprint |
//! | `carry.rs` | what the slices of a microbatch pass to each other |
//! | `weight_work.rs` | weight gradients that are deferred |
//! | `statistics.rs` | running statistics, which forwards change |
//! | `visit.rs` | access to a stage's modules after the launch |
//! | `error.rs` | errors of stages |

mod first_value;
mod error;
mod tape_ends;
mod watch;
mod carry;
mod side_leaves;
mod module;
mod visit;
mod body;
mod module_parameters;
mod parameter_table;
mod shards;
mod held_module;
mod gradients;
mod weight_work;
mod settings;
mod optimizer;
mod tape;
mod forwarded;
mod segment;
mod microbatch;
mod in_flight;
mod statistics;
mod runner;
mod training;
mod prepare;

pub(crate) use body::{NO_SKIPS, Skip, Skips, StageBody};
pub use error::StageError;
pub(crate) use error::in_layer;
pub use first_value::FirstValue;
pub(crate) use forwarded::Forwarded;
pub(crate) use microbatch::{BackwardState, ForwardState, ForwardTask, InputGradients};
pub(crate) use module::{Auxiliary, ExpertLoad};
pub use module::{StageContext, StageModule};
pub use prepare::Stage;
pub(crate) use runner::{BatchPart, Held, RestoredPaths, StageCompute, StageParameters, StageRunner};
pub(crate) use settings::StageSettings;
pub(crate) use tape_ends::without_tape;
pub use visit::ModulePlace;
pub(crate) use visit::{ChangeModule, ReadModule, Visit, any, any_mut, for_stage};
pub use weight_work::WeightWork;
