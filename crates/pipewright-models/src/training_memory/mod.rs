//! The memory that a training run needs, before it starts: of each stage, of each rank, and compared with the
//! memory of the machine or of its devices.
//!
//! Parameters, gradients and the optimizer's state are counted exactly. Activations are the peak of the
//! program's simulation, with the sizes in bytes that the model's description has.
//! Rows that arrive from other replicas, which hold the experts together, are counted as if all experts were
//! chosen equally often, or as if all tokens chose experts of one replica ([`ExpertLoad`]).
//! Ranks that compute a stage together keep their heads and their part of the inner width, and with shares of the tokens
//! also their share of the hidden states ([`TensorShare`]); families other than dense decoders are counted as if each rank
//! kept all. The tensors of a backward besides the activations are counted as the operations on the processor hold them
//! (`backward.rs`). Gathered hidden states, messages in transit, data, and a checkpoint that is being written are not counted.
//!
//! The tensors that operations keep are counted as in predictions for clusters (`kept` of `pipewright-shapes`). The rest is
//! exact for Pipewright: shapes of its tensors, and what it gathers. `memory` of `pipewright-cluster` has the rules
//! of other systems, which hold and divide parameters, gradients and the optimizer's state in other ways.
//!
//! Nothing here asks the system: the caller gives the memory of the machine and of its devices.

mod compute_devices;
mod adapters;
mod expert_adapters;
mod arrived_rows;
mod sizes;
mod tensor_share;
mod kept;
mod backward;
mod state;
mod expert_share;

mod held;
mod moving;
mod plan;

pub use arrived_rows::ExpertLoad;
pub use compute_devices::ComputeDevices;
pub use expert_share::ExpertShare;
pub use held::{StreamedBytes, TrainingMemory, TrainingRun};
pub use kept::KeptActivations;
pub use plan::{DeviceLoad, MemoryPlan, RunShape, Shortage, SmallRank, device_loads};
pub use sizes::layers_in;
pub use state::{OptimizerState, StateRule, add_streamed, is_hidden_matrix};
pub use tensor_share::TensorShare;
