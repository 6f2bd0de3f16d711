//! One rank's step as a state machine: its next action, or the message that it waits for.
//!
//! An [`Executor`] runs its rank's row of a validated program. [`Executor::poll`] runs at most one action, and blocks only
//! in the exchanges of a tensor group (`tensor_group.rs`). A driver ([`crate::driver`]) polls, sleeps while the executor
//! waits, and watches the deadline. After the program the ranks sum the gradients of replicas and of shared parameters,
//! compute the gradient norm, and update their parameters. The protocol of these phases is in `README.md` beside this file.
//!
//! | file | content |
//! |---|---|
//! | `machine.rs` | the executor: polling, running actions |
//! | `place.rs` | the action that an error names |
//! | `step.rs` | a step: its input, its phase, its results so far |
//! | `agreement.rs` | the comparison of the processes' batches before a step |
//! | `actions.rs` | one handler for each kind of action |
//! | `boundary.rs` | both ends of a message between two stages; its parts, between tensor groups |
//! | `compute.rs` | the actions that compute, and the hooks that run them |
//! | `edges.rs` | the inputs and outputs of a stage |
//! | `tensor_shards.rs` | whether the ranks of a tensor group hold the parts of parameters that their modules say |
//! | `skip.rs` | skip connections that go directly to their stage |
//! | `gather.rs` | sharded parameters, gathered before a stage computes |
//! | `epilogue.rs` | the phases after the program, in order |
//! | `losses.rs` | losses, read and checked |
//! | `statistics.rs` | running statistics, averaged over replicas |
//! | `reduction.rs` | gradients, summed over replicas |
//! | `parameters.rs` | which parameters are shared, and the order of the norm: computed once |
//! | `sharing.rs` | gradients of shared parameters |
//! | `norm.rs` | the gradient norm and the update |
//! | `report.rs` | a rank's report, and the exchange of reports between processes |
//! | `figures.rs` | a report as a message |
//! | `messages.rs` | sending messages and taking those that have arrived |
//! | `mesh_endpoint.rs` | the transport, with the rank's place in the mesh |
//! | `patience.rs` | how long a rank waits |
//! | `tensor_group.rs` | exchanges between the ranks that compute a stage together |
//! | `copies.rs` | gradients of shards that several of these ranks hold |
//! | `local_stage.rs` | a stage on its rank, with the tensors between two actions |
//! | `state.rs` | parameters and optimizer state, read and restored |

mod actions;
mod agreement;
mod boundary;
mod copies;
mod compute;
mod edges;
mod epilogue;
mod figures;
mod gather;
mod local_stage;
mod losses;
mod machine;
mod mesh_endpoint;
mod messages;
mod norm;
mod parameters;
mod patience;
mod place;
mod reduction;
mod report;
mod sharing;
mod skip;
mod tensor_shards;
mod state;
mod statistics;
mod step;
mod tensor_group;

pub(crate) use agreement::Agreement;
pub use gather::NamedParameter;
pub(crate) use gather::Visited;
pub(crate) use machine::{Executor, ExecutorConfig};
pub(crate) use mesh_endpoint::{MeshEndpoint, MeshSettings};
pub use report::UndeferredParameter;
pub(crate) use report::{AuxiliaryPart, RankReport, sums_of};
pub(crate) use step::{Poll, StepInput};
