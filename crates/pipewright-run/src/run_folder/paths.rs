//! The names of the files in a run's folder, and how they are found.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use pipewright::checkpoint::{CheckpointFolder, Manifest};
pub(crate) use pipewright::train::TIMELINE_FILE as TIMELINE;
pub(super) use pipewright::train::TIMELINES_FOLDER as TIMELINES;
pub use pipewright::train::{CONFIG_FILE as CONFIG, METRICS_FILE as METRICS};

use crate::run_folder::error::{RunFolderError, refused};

/// The folder of the checkpoints.
pub(super) const CHECKPOINTS: &str = "checkpoints";
/// The folder of the files that an exported model needs.
pub(crate) const MODEL: &str = "model";
/// The file that names the folder of the copies in memory.
pub(crate) const COPIES: &str = "copies.json";
/// The hashes of the state after steps.
pub(crate) const FINGERPRINTS: &str = "fingerprints.jsonl";
/// The description of the run for `watch`.
pub(crate) const OVERVIEW: &str = "pipewright-run.json";
/// The log-probabilities of the data of preference training under the reference.
pub(crate) const REFERENCE: &str = "reference.json";
/// The schedule of a plan.
pub const PLAN: &str = "plan.csv";
/// The beginning and the ending of the name of a profile.
pub const PROFILE: [&str; 2] = ["profile-", ".toml"];
/// The page that `pipewright view` makes of a run.
pub const VIEW: &str = "view.html";
/// The page that `pipewright report` makes of a run.
pub const REPORT: &str = "report.html";
/// The most bytes of a file in a run's folder that are read: the metrics of some million steps.
pub const LARGEST: u64 = 2 << 30;

/// Returns the path of the configuration of the run in a folder.
///
/// # Errors
/// Fails if there is no configuration.
pub fn config_of(run: &Path) -> Result<PathBuf, RunFolderError> {
    let config = run.join(CONFIG);
    if config.is_file() {
        return Ok(config);
    }
    Err(refused(run, format!("there is no run to resume in this folder: {CONFIG} is missing; train first")))
}

/// Returns the folder of the checkpoints of the run in a folder.
pub fn checkpoints_of(run: &Path) -> PathBuf {
    run.join(CHECKPOINTS)
}

/// Returns the bytes of the newest complete checkpoint of the run in a folder; `None` if there is none.
pub fn newest_checkpoint_bytes(run: &Path) -> Option<u64> {
    let (_, checkpoint) = CheckpointFolder::list(&checkpoints_of(run)).ok()?.pop()?;
    let manifest = Manifest::read(&checkpoint).ok()?;
    Some(manifest.files.iter().map(|file| file.bytes).fold(0, u64::saturating_add))
}

/// Returns the name of the schedule of a run that was planned again for these replicas and ranks.
pub fn replanned(replicas: u32, ranks: u32) -> String {
    format!("plan-{replicas}x{ranks}.csv")
}

/// Returns whether a path has the name of a profile.
pub fn is_profile(path: &Path) -> bool {
    let (name, [beginning, ending]) = (path.file_name().and_then(|name| name.to_str()), PROFILE);
    name.is_some_and(|name| name.starts_with(beginning) && name.ends_with(ending))
}

/// Returns whether the folder contains a run: its metrics, or checkpoints if the metrics were deleted.
pub(super) fn is_run(path: &Path) -> bool {
    path.join(METRICS).exists() || checkpoints_of(path).exists()
}

/// Returns the folder of the timelines of a run's steps.
pub(super) fn timelines_of(run: &Path) -> PathBuf {
    run.join(TIMELINES)
}

/// Returns the steps of a run whose timelines are kept, each with its file, in their order. No folder means
/// no steps.
///
/// # Errors
/// Fails if the folder cannot be read.
pub(crate) fn kept_timelines(run: &Path) -> io::Result<Vec<(u64, PathBuf)>> {
    let entries = match fs::read_dir(timelines_of(run)) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut kept = Vec::new();
    for entry in entries {
        let path = entry?.path();
        let name = path.file_name().and_then(|name| name.to_str());
        let step = name.and_then(|name| name.strip_prefix("step-")?.strip_suffix(".json")?.parse().ok());
        kept.extend(step.map(|step| (step, path)));
    }
    kept.sort_unstable();
    Ok(kept)
}
