//! Training runs for the commands: preparation, launch, the loop of steps, and what is known of a run
//! afterwards.

pub(crate) mod arguments;
pub(crate) mod summary;
pub(crate) mod checkpoint_path;
pub(crate) mod checkpoint_timing;
pub(crate) mod resume_arguments;
pub(crate) mod data;
pub(crate) mod origin;
pub(crate) mod samples;
pub(crate) mod evaluations;
pub(crate) mod identity;
pub(crate) mod launch;
pub(crate) mod memory;
pub(crate) mod model;
pub(crate) mod optimizer;
pub(crate) mod overview;
pub(crate) mod prepare;
pub(crate) mod efficiency;
pub(crate) mod checkpoint_space;
pub(crate) mod process_group;
pub(crate) mod rank_hosts;
pub(crate) mod rate_change;
pub(crate) mod recorded_run;
pub(crate) mod run_adapter;
pub(crate) mod shared_folder;
pub(crate) mod copies_link;
pub(crate) mod copy_hosts;
pub(crate) mod copy_search;
pub(crate) mod state_copies;
pub(crate) mod timeline_recorder;
mod next_step;
mod run_checkpoints;
mod run_log;
pub(crate) mod trained_model;
pub(crate) mod training_loop;
