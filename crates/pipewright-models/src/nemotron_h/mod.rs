//! The Nemotron-H family: blocks of Mamba-2, attention, feed-forward layers and experts in an order that a
//! pattern gives.
//!
//! Keys and parameters have the names of Hugging Face's `NemotronHForCausalLM`, in the spelling of both
//! generations of published files; what is written has the later spelling. In the list of layers, layer 0 is
//! the token embedding, one layer for each block follows, and the last layer is the final norm with the head.

mod block;
mod cached;
mod describe;
mod experts;
mod initial;
mod sizes;
mod stage;

pub use pipewright_shapes::nemotron_h::{BlockKind, Experts, NemotronHConfig};
pub use stage::NemotronHStage;
