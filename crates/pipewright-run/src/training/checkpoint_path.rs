//! Finds the run and the checkpoint that a path names. The path is a run's folder, its folder of checkpoints,
//! or one checkpoint.

use std::path::{Path, PathBuf};

use pipewright::checkpoint::{Checkpoint, CheckpointError, CheckpointFolder};

use crate::error::RunError;
use crate::run_folder::checkpoints_of;

/// A run, and the checkpoint to resume from.
pub(crate) struct RunPath {
    /// The absolute folder of the run.
    pub(crate) run: PathBuf,
    /// The checkpoint that the path names, or `None` for the newest checkpoint of the run.
    pub(crate) checkpoint: Option<PathBuf>,
}

impl RunPath {
    /// Reads `path` as a run's folder, its folder of checkpoints, or a checkpoint in that folder.
    pub(crate) fn of(path: &Path) -> Result<Self, RunError> {
        let absolute = std::path::absolute(path).map_err(|error| {
            RunError::input(format!("{}: not a path: {error}; name the run's folder", path.display()))
        })?;
        let is_checkpoint = CheckpointFolder::is_checkpoint(&absolute);
        let folder = if is_checkpoint { absolute.parent() } else { Some(absolute.as_path()) };
        let run = folder.and_then(Path::parent).filter(|run| Some(checkpoints_of(run).as_path()) == folder);
        match (is_checkpoint, run) {
            (true, Some(run)) => Ok(Self { run: run.to_owned(), checkpoint: Some(absolute) }),
            (true, None) => Err(RunError::input(format!(
                "{}: the checkpoint is not in the `checkpoints` folder of a run; name a run's folder, or a checkpoint \
                 in it",
                path.display()
            ))),
            (false, Some(run)) if !checkpoints_of(&absolute).exists() => {
                Ok(Self { run: run.to_owned(), checkpoint: None })
            }
            (false, _) => Ok(Self { run: absolute, checkpoint: None }),
        }
    }
}

/// Opens the checkpoint that a path names, or else the newest checkpoint of the run, and reads every byte of
/// it.
pub fn open(path: &Path) -> Result<Checkpoint, RunError> {
    let checkpoints = checkpoints_of(path);
    let opened = if CheckpointFolder::is_checkpoint(path) {
        Checkpoint::open(path)
    } else if checkpoints.is_dir() {
        CheckpointFolder::newest(&checkpoints)
    } else {
        CheckpointFolder::newest(path)
    };
    opened.map_err(|error| match error {
        CheckpointError::NoneComplete { .. } => {
            RunError::input(format!("{error}; name a run's folder, or a checkpoint in it"))
        }
        error => RunError::input(error),
    })
}

/// Returns a sentence about the parameters that have elements that are not finite; `None` if there are none.
pub fn not_finite(checkpoint: &Checkpoint) -> Option<String> {
    let flaws: Vec<_> = checkpoint.not_finite().collect();
    let (first, found) = flaws.first()?;
    let found = match flaws.len() - 1 {
        0 => found.to_string(),
        1 => format!("{found}, and 1 more parameter has such elements"),
        others => format!("{found}, and {others} more parameters have such elements"),
    };
    Some(format!(
        "{}: the model is ruined: after step {} the parameter `{first}` has {found}; use an earlier checkpoint",
        checkpoint.path().display(),
        checkpoint.step()
    ))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_run_is_found_by_itself_and_by_what_is_in_it() {
        let scratch = tempfile::tempdir().expect("a scratch folder");
        let run = scratch.path().join("run");
        let newest = run.join("checkpoints/step-00000004");
        fs::create_dir_all(&newest).expect("the scratch folder takes folders");
        let check = |path: &Path, checkpoint: Option<&Path>| {
            let found = RunPath::of(path).expect("the run exists");
            assert_eq!((found.run.as_path(), found.checkpoint.as_deref()), (run.as_path(), checkpoint));
        };
        check(&run, None);
        check(&run.join("checkpoints"), None);
        check(&newest, Some(&newest));
        let elsewhere = scratch.path().join("step-00000004");
        assert!(RunPath::of(&elsewhere).is_err());
    }
}
