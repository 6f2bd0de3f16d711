//! The keys of decoder-only models in the form of Llama: sizes, constants, rotary positions, windows and
//! experts.

mod config;
mod labels;
mod json;
mod latent;
mod mixture;
mod rope;
mod rope_json;
mod windows;

pub use config::DecoderConfig;
pub use labels::{add_labels, labels_in, usual_label};
pub use latent::{DeepseekExperts, ExpertGroups, LatentConfig};
pub use mixture::MixtureConfig;
pub use rope::{Llama3Scaling, LongRopeScaling, RopeScaling, YarnScaling};
pub use windows::{LayerType, LayerWindows, has_window, require_listed, require_window};
