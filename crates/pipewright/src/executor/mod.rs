//! One rank's step as a state machine: its next action, or the message that it waits for.
//!
//! An [`Executor`] runs its rank's row of a validated program. [`Executor::poll`] runs at most one action,
//! and blocks only in the exchanges of a group (`group_link.rs`). A driver ([`crate::driver`])
//! polls, sleeps while the executor waits, and watches the deadline. After the program the ranks sum the
//! gradients of replicas and of shared parameters, compute the gradient norm, and update their parameters.
//! The protocol of these phases is in `README.md` in this folder.
//!
//! The state has owners, which are the fields of the executor: the facts about the rank (`context.rs`), its
//! connection to the others (`connection.rs`), its stages (`stages.rs`), what it knows of the pipeline's
//! parameters (`parameters.rs`), the batches whose gradients wait (`accumulation.rs`), the sums over replicas
//! (`reduction.rs`), the record of events and figures (`recorder.rs`), and the step (`step.rs`). A handler
//! gets as arguments the ones that it uses.
//!
//! | file | content |
//! |---|---|
//! | `context.rs` | the facts about a rank that do not change |
//! | `shared_endpoint.rs` | the endpoint that a rank shares with its stages, and how long it waits |
//! | `turns.rs` | the halves of an overlap: one computes while the other waits for tokens |
//! | `group_link.rs` | exchanges in the middle of a stage: between its tensor ranks, and between the replicas of an expert group |
//! | `connection.rs` | sending messages, and taking messages that have arrived |
//! | `step_input.rs` | the input of a step |
//! | `stages.rs` | the stages of a rank, with the tensors between two actions |
//! | `recorder.rs` | the events and figures of a step |
//! | `checks.rs` | checksums of results, compared in a repetition of a step |
//! | `accumulation.rs` | the batches whose gradients wait for an update |
//! | `losses.rs` | losses, read and checked |
//! | `reduction.rs` | gradients, summed over replicas |
//! | `gather.rs` | sharded parameters, gathered before a stage computes |
//! | `skip.rs` | skip connections that go directly to their stage |
//! | `boundary.rs` | both ends of a message between two stages, which tensor groups send in parts |
//! | `edges.rs` | the inputs and outputs of a stage |
//! | `transfers.rs` | the actions that move tensors out of memory and back |
//! | `compute.rs` | the actions that compute, and the hooks that run them |
//! | `statistics.rs` | running statistics, averaged over replicas |
//! | `copies.rs` | gradients of shards that several ranks of a tensor group hold |
//! | `parameters.rs` | which parameters are shared, and the order of the norm: computed once |
//! | `expert_holders.rs` | whether the replicas of an expert group hold the experts that they describe |
//! | `tensor_shards.rs` | whether the ranks of a tensor group hold the shards that their modules describe |
//! | `sharing.rs` | gradients of shared parameters |
//! | `agreement.rs` | the comparison of the processes' batches before a step |
//! | `next_batch.rs` | the batches that a process has begun while another one runs |
//! | `collection.rs` | whole parameters, or a visit to modules, between two steps |
//! | `moves.rs` | layers that move from stage to stage, between two steps |
//! | `report.rs` | a rank's report |
//! | `report_message.rs`, `report_exchange.rs` | a report as a message, and the exchange of reports between processes |
//! | `norm.rs`, `square_parts.rs` | the gradient norm, and the squares that it adds |
//! | `early_updates.rs` | the record of updates before the gradient norm is known |
//! | `state.rs` | parameters and optimizer state, read and restored |
//! | `step.rs` | a step: its phase, how far it is, and its result |
//! | `update.rs` | the update of the parameters |
//! | `idle_threads.rs` | the threads of all ranks, for the squares and the update of a rank that works alone |
//! | `failed_action.rs` | the action that an error names |
//! | `machine.rs` | the executor: its parts, and polling |
//! | `actions.rs` | one handler for each kind of action |
//! | `overlap.rs`, `two_batches.rs` | two batches at once, if parameters are delayed: their order, and how they run |
//! | `group_turns.rs` | actions that a tensor group or an expert group begins together while batches overlap |
//! | `epilogue.rs` | the phases after the program, in order |

mod accumulation;
mod actions;
mod agreement;
mod boundary;
mod checks;
mod collection;
mod compute;
mod connection;
mod context;
mod conversion;
mod copies;
mod early_updates;
mod edges;
mod epilogue;
mod expert_holders;
mod failed_action;
mod gather;
mod exchange_time;
mod group_link;
mod group_turns;
mod idle_threads;
mod losses;
mod machine;
mod moves;
mod next_batch;
mod norm;
mod overlap;
mod parameters;
mod recorder;
mod reduction;
mod report;
mod report_exchange;
mod report_message;
mod shared_endpoint;
mod sharing;
mod skip;
mod square_parts;
mod stages;
mod state;
mod statistics;
mod step;
mod step_input;
mod tensor_shards;
mod transfers;
mod streams;
mod turns;
mod two_batches;
mod update;

pub(crate) use agreement::{Agreement, agree_alike, agreed_before, digest};
pub use collection::NamedParameter;
pub(crate) use collection::Visited;
pub(crate) use connection::Connection;
pub(crate) use context::RankContext;
pub use exchange_time::ExchangeTime;
pub(crate) use group_link::GroupLink;
pub(crate) use idle_threads::IdleThreads;
pub(crate) use machine::Executor;
pub use moves::MovedLayers;
pub(crate) use moves::StageChange;
pub(crate) use next_batch::NextBatch;
pub(crate) use recorder::AuxiliaryPart;
pub use report::UndeferredParameter;
pub(crate) use report::{RankReport, sums_of};
pub(crate) use report_exchange::OpenReport;
pub(crate) use shared_endpoint::SharedEndpoint;
pub(crate) use step::{Outcome, Poll};
pub(crate) use step_input::{Follow, OverlapRule, StepInput, StepOrigin, StepVerification};
pub(crate) use two_batches::OverlapPoll;
