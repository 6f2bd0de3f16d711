//! The folder of a run's results: `metrics.jsonl`, `config.toml`, `timeline.json`, the timelines of further
//! steps, and its checkpoints.
//!
//! Files of an earlier run are never overwritten. `train` renames the folder of an earlier run: it appends
//! `.1`, `.2` and so on to the name. If the folder also has files that no run has written, which would be moved
//! along, it refuses the run. `resume` from a checkpoint before the run's last step moves the later
//! lines of the metrics to `metrics.1.jsonl`, later fingerprints to `fingerprints.1.jsonl`, the later checkpoints to
//! `checkpoints.1` and the later timelines to `timelines.1`. If the folder contains files of the same names that do not belong to a run,
//! the run is refused. The folder of the checkpoints is locked during a run, and so are the metrics, so two
//! runs never write to the same folder. If the path leads to another folder during the run, for example
//! because a user moved the folder, nothing more is written, and the folder is never created again.

mod aside;
mod contents;
mod error;
mod folder;
mod lock;
mod metrics_lines;
mod paths;
#[cfg(test)]
mod tests;

pub use error::{RunFolderError, is_lost_folder};
pub(crate) use folder::RunFolder;
pub use folder::{probe, replace_config};
pub use lock::RunLock;
pub use metrics_lines::losses;
pub use paths::{
    CONFIG, LARGEST, METRICS, PLAN, PROFILE, REPORT, VIEW, checkpoints_of, config_of, is_profile,
    newest_checkpoint_bytes, replanned,
};
pub(crate) use paths::{COPIES, FINGERPRINTS, MODEL, OVERVIEW, REFERENCE, TIMELINE, kept_timelines};
