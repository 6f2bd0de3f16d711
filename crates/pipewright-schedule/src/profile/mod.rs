//! A profile: the measured costs of a model's layers and of the link between ranks, in seconds and bytes.
//!
//! A profile is measured on a device or written by hand. It is plain data, and [`Profile::problems`] lists
//! its mistakes. [`mod@crate::plan`] searches for the best run at these costs.
//!
//! ```
//! use pipewright_schedule::profile::{LayerProfile, LinkProfile, Profile};
//! let layer = LayerProfile { kind: "block".into(), count: 8, forward_s: 1e-3, ..LayerProfile::default() };
//! let profile = Profile { layers: vec![layer], link: LinkProfile::new(0.0, 1e10), ..Profile::default() };
//! assert_eq!(profile.layer_count(), 8);
//! assert!(profile.problems().is_empty());
//! ```

mod figures;
mod problems;
mod ranks;
mod replicas;

pub use figures::{
    DeviceProfile, LayerProfile, LinkProfile, NodeProfile, PROCESSOR, PairProfile, PartProfile, Profile,
    RankProfile, TENSOR_SUMS,
};
pub use problems::{
    MAX_BYTES_PER_SECOND, MAX_LAYERS, MAX_NODE_RANKS, MAX_PAIRS, MAX_PROFILE_BYTES, MAX_PROFILE_RANKS,
    MAX_PROFILE_ROWS, MAX_PROFILE_SECONDS, MAX_PROFILE_TOKENS, MAX_SPEED, MAX_TENSOR_SUMS, MIN_SPEED,
    ProfilePart, ProfileProblem,
};

pub use crate::model::{EMBEDDING, EMBEDDING_PART, HEAD, HEAD_PART, PREDICTION};

#[cfg(test)]
mod tests;
