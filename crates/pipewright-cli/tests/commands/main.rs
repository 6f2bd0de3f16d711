//! The commands that train, and the commands that read what a training needs or leaves.

mod command_line;
mod schedule_files;
mod scores;
mod help;
mod library_run;
mod written_files;
mod check;
mod training;
mod validation;
mod slices;
mod optimizers;
mod optimizer_groups;
mod post_validation;
mod delayed_weights;
mod learning_rates;
mod efficiency;
mod experts;
mod expert_groups;
mod fingerprints;
mod audits;
mod processors;
mod vocabulary_parts;
mod patterns;
#[cfg(feature = "tokenizers")]
mod preferences;
mod generate;
mod profile;
mod memory_peaks;
mod plan_memory;
mod unlike_ranks;
mod offload;
mod real_files;
mod restarts;
mod signals;
mod slow_ranks;
mod layer_moves;
mod verified_steps;
mod resume;
mod checkpoint_interval;
mod epochs;
mod added_tokens;
mod equal_checkpoints;
mod state_copies;
mod chats;
mod tokenize;
mod mixtures;
mod fine_tuning;
mod adapters;
mod tied_heads;
mod exported_adapters;
mod quantised;
mod streamed;
mod gguf;
mod chat_adapters;
mod adapter_plans;
mod folders;
mod ruined;
mod observed;
#[cfg(unix)]
mod hostile_files;
#[cfg(target_os = "linux")]
mod exhaustion;
#[cfg(unix)]
mod full_disk;
#[path = "../run/mod.rs"]
mod run;
#[path = "../scratch/mod.rs"]
mod scratch;
