//! The Nemotron-H family: blocks of Mamba-2, attention, feed-forward layers and experts in an order that a
//! pattern gives.
//!
//! Keys and parameters have the names of Hugging Face's `NemotronHForCausalLM`, in the spelling of both
//! generations of published files; what is written has the later spelling. In the list of layers, layer 0 is
//! the token embedding, one layer for each block follows, and the last layer is the final norm with the head.

mod describe;
mod experts;
mod rectified;
mod sizes;

pub(crate) use describe::describe_layers;
pub(crate) use experts::LatentExperts;
pub use pipewright_shapes::nemotron_h::{BlockKind, Experts, NemotronHConfig};
pub(crate) use rectified::RectifiedLayer;
pub(crate) use sizes::mamba_sizes;
