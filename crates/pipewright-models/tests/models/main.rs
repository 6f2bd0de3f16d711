//! Models without a reference run: how they are cut, their directories, rows of several documents, and the
//! metrics of experts.

mod head_parts;
mod embedding_parts;
mod stages;
mod config_keys;
mod hf;
mod packed;
mod adapters;
mod expert_metrics;
mod model_copy;
mod real_files;
mod quantised;
mod gguf;
mod quantised_experts;
mod spoiled;
mod stacked_experts;
