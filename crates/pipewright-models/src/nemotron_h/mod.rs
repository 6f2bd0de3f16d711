//! The Nemotron-H family: blocks of Mamba-2, attention, feed-forward layers and experts in an order that a
//! pattern gives.
//!
//! Keys and parameters have the names of Hugging Face's `NemotronHForCausalLM`, in the spelling of both
//! generations of published files; what is written has the later spelling. In the list of layers, layer 0 is
//! the token embedding, one layer for each block follows, and the last layer is the final norm with the head.

mod block;
mod cached;
mod config;
mod describe;
mod experts;
mod initial;
mod json;
mod keys;
mod stage;

pub use config::{BlockKind, Experts, NemotronHConfig};
pub use stage::NemotronHStage;
