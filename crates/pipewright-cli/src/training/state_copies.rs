//! Copies of the state of a run in the memory of its machine (`run.copy_every`). They outlive the processes,
//! so that a fault costs no more than the steps since the last copy.
//!
//! A file in the run's folder names the folder of the copies, which has a name of its own for each run. The
//! copies of a machine are gone when the machine is: a resumed run then takes its newest checkpoint.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use pipewright::checkpoint::{
    COPIES, Checkpoint, CheckpointError, CheckpointFolder, CheckpointWriter, CopyFolder,
};
use pipewright::train::Trainer;
use pipewright::transport::Fields;
use rustix::fs::statvfs;
use serde_json::{Map, Value};

use crate::config::Settings;
use crate::config::pipeline::TransportChoice;
use crate::display::{bytes, say};
use crate::failure::{Exit, Failure, sentence};
use crate::run_folder::checkpoints_of;
use crate::training::checkpoint_path::RunPath;
use crate::training::checkpoint_space::CheckpointSpace;
use crate::training::copies_link::{
    bytes_below, earlier_bytes, link_of, remove_copies, remove_link, unique_name, usable_copies, write_link,
};
use crate::training::evaluations::lowest_step;
use crate::training::launch::failure;
use crate::training::prepare::{Prepared, RunParts};
use crate::training::process_group::ProcessGroup;

/// The time between two looks at the last checkpoint.
const LOOK: Duration = Duration::from_millis(20);

/// The slowest reading of a copy that processes wait for, in bytes per second.
const SLOWEST_READING: u64 = 100_000_000;

/// A copy from which a run resumes, which this process has verified.
pub(crate) struct FoundCopy {
    pub(crate) copy: Checkpoint,
    /// The time that finding and reading it took.
    pub(crate) took: Duration,
}

/// Returns the bytes that the copies of a run take on this machine: the copies of all ranks, or the copies of
/// one rank if each is a process, because processes may be on several machines.
pub(crate) fn copy_bytes(run: RunParts<'_>) -> u64 {
    let settings = run.settings;
    if settings.run.copy_every == 0 {
        return 0;
    }
    let all = CheckpointSpace::of(run).estimate().saturating_mul(COPIES);
    match settings.pipeline.transport {
        TransportChoice::Local => all,
        TransportChoice::Mpi => all.div_ceil(writers(settings).into()),
    }
}

/// Returns the number of ranks that have parts of a copy.
fn writers(settings: &Settings) -> u32 {
    settings.pipeline.ranks * settings.mesh.shards() * settings.mesh.tensor_parallel
}

/// Checks that the folder of the copies has the space that they need.
///
/// # Errors
/// Fails if the folder does not exist or has too little space.
pub(crate) fn require_space(prepared: &Prepared) -> Result<(), Failure> {
    let (folder, needed) = (&prepared.settings.run.copy_folder, copy_bytes(prepared.parts()));
    if needed == 0 {
        return Ok(());
    }
    let advice = "name another folder in memory (run.copy_folder), or set run.copy_every=0";
    let space = statvfs(folder).map_err(|error| {
        Failure::input(format!("{}: copies cannot be kept here: {error}; {advice}", folder.display()))
    })?;
    // A run that is moved aside loses its copies.
    let earlier = earlier_bytes(&prepared.settings.run.out, folder);
    let free = space.f_bavail.saturating_mul(space.f_frsize).saturating_add(earlier);
    if free >= needed {
        return Ok(());
    }
    let message = format!(
        "{}: the copies of the state take up to {}, and {} are free; {advice}",
        folder.display(),
        bytes(needed),
        bytes(free)
    );
    Err(Failure::new(Exit::CheckFailed, message))
}

/// Returns whether the run in a folder has copies, or had some.
pub(crate) fn has_copies(run: &Path) -> bool {
    link_of(run).is_some()
}

/// Returns the newest copy of a run that is newer than its checkpoints; `None` if there is none, or if the
/// path names a checkpoint. All processes call it, and the first one decides. `steps` is the number of steps
/// of the run.
///
/// # Errors
/// Fails if the processes do not reach each other.
pub(crate) fn newest(
    processes: &mut ProcessGroup,
    path: &RunPath,
    steps: Option<u64>,
) -> Result<Option<FoundCopy>, Failure> {
    let began = Instant::now();
    let decides = processes.is_leader() && path.checkpoint.is_none();
    // Each process reads every byte of a copy, the leader first.
    let bytes = usable_copies(&path.run).map_or(0, |copies| bytes_below(&copies));
    let reading = Duration::from_secs(bytes / SLOWEST_READING);
    let own = steps.filter(|_| decides).and_then(|steps| newest_here(&path.run, steps));
    let own_path = own.as_ref().map_or_else(String::new, |copy| copy.path().display().to_string());
    let shared = processes.share_after(own_path, reading)?;
    if shared.is_empty() {
        return Ok(None);
    }
    // Processes on other machines do not see the memory of the first one.
    let copy = own.or_else(|| Checkpoint::open(Path::new(&shared)).ok());
    let seen = |copy: &Option<Checkpoint>| {
        let files = copy.iter().flat_map(|copy| &copy.manifest().files);
        let hashes: Vec<&str> = files.map(|file| file.hash.as_str()).collect();
        Fields::from([("copy in memory".to_owned(), hashes.join(" "))])
    };
    match processes.agree_after(Ok(copy), seen, reading) {
        Ok(copy) => Ok(copy.map(|copy| FoundCopy { copy, took: began.elapsed() })),
        Err(failure) if failure.lost().is_some() => Err(failure),
        Err(_) => {
            if processes.is_leader() {
                say("the copy in memory is not on all machines of the run, so an earlier state is used");
            }
            Ok(None)
        }
    }
}

/// Returns the newest copy on this machine from which a run of `steps` steps can continue.
fn newest_here(run: &Path, steps: u64) -> Option<Checkpoint> {
    let folder = CopyFolder::find(&usable_copies(run)?).ok()?;
    // The reading of the checkpoints reports the error again.
    let saved: Vec<u64> =
        CheckpointFolder::list(&checkpoints_of(run)).ok()?.into_iter().map(|(step, _)| step).collect();
    let newest = saved.last().copied().unwrap_or(0);
    let copies = folder.complete().ok()?.into_iter().filter(|step| (newest + 1..steps).contains(step));
    for step in copies {
        match folder.open(step) {
            // The checkpoint of the lowest validation loss may not have been complete.
            Ok(copy) if lowest_step(&copy).is_none_or(|best| saved.contains(&best)) => return Some(copy),
            Ok(_) => {}
            Err(error) => say(&format!(
                "the copy of step {step} in memory cannot be used, so an earlier state is: {}",
                sentence(&error)
            )),
        }
    }
    None
}

/// Returns the folder of a run's copies, the same in all processes; `None` if it makes none. All processes
/// call it. If the run `continues`, the folder stays the same.
///
/// # Errors
/// Fails if the processes do not reach each other.
pub(crate) fn folder_of(
    processes: &mut ProcessGroup,
    settings: &Settings,
    continues: bool,
) -> Result<Option<PathBuf>, Failure> {
    let run = &settings.run;
    if run.copy_every == 0 {
        return Ok(None);
    }
    let earlier =
        usable_copies(&run.out).filter(|copies| continues && copies.parent() == Some(&*run.copy_folder));
    let folder = earlier.unwrap_or_else(|| run.copy_folder.join(unique_name(&run.out)));
    processes.share(folder.display().to_string()).map(|folder| Some(PathBuf::from(folder)))
}

/// The copies that a run makes.
pub(crate) struct StateCopies {
    every: u64,
    /// `None` after a copy could not be written.
    writer: Option<CheckpointWriter>,
    folder: PathBuf,
    /// The folder of the run, in the process that has written the file there.
    link: Option<PathBuf>,
}

impl StateCopies {
    /// Begins to make copies in `folder` after step `done`, and removes the copies of later steps; makes none
    /// if there is no folder. The `leader` writes to the folder of the run.
    ///
    /// # Errors
    /// Fails if a folder cannot be written.
    pub(crate) fn begin(
        folder: Option<PathBuf>,
        settings: &Settings,
        done: u64,
        leader: bool,
    ) -> Result<Option<Self>, Failure> {
        let run = &settings.run;
        let earlier = link_of(&run.out).filter(|_| leader);
        if let Some(earlier) = earlier.filter(|earlier| Some(earlier) != folder.as_ref()) {
            remove_link(&run.out);
            remove_copies(&earlier);
        }
        let Some(path) = folder else { return Ok(None) };
        let folder = CopyFolder::create(&path).map_err(Failure::input)?;
        folder.remove_after(done).map_err(Failure::input)?;
        let link = leader.then(|| write_link(&run.out, &path).map(|()| run.out.clone())).transpose()?;
        let writer =
            CheckpointWriter::copy(folder, writers(settings), run.deadline()).map_err(Failure::input)?;
        Ok(Some(Self { every: run.copy_every, writer: Some(writer), folder: path, link }))
    }

    /// Sets a function that is called whenever a wait for a copy sees progress.
    pub(crate) fn on_progress(&mut self, call: impl Fn() + Send + 'static) {
        if let Some(writer) = &mut self.writer {
            writer.on_progress(call);
        }
    }

    /// Waits for the copy that was begun after the last step. Then a step that is in the metrics costs no
    /// more than itself: the state before it has a copy.
    pub(crate) fn settle(&mut self) {
        if let Some(Err(error)) = self.writer.as_mut().map(CheckpointWriter::wait) {
            self.give_up(&error);
        }
    }

    /// Begins a copy if one is due. It is written while the next step computes.
    ///
    /// # Errors
    /// Fails if a rank does not answer.
    pub(crate) fn begin_copy(
        &mut self,
        trainer: &mut Trainer,
        description: &Map<String, Value>,
    ) -> Result<(), Failure> {
        let Some(writer) = self.writer.as_mut().filter(|_| trainer.steps_done().is_multiple_of(self.every))
        else {
            return Ok(());
        };
        let state = trainer.state(description.clone()).map_err(|error| failure(&error))?;
        if let Err(error) = writer.save(state) {
            self.give_up(&error);
        }
        Ok(())
    }

    /// Makes no further copy. A run is worth more than its copies. The other processes continue, and no copy
    /// is complete any more.
    fn give_up(&mut self, error: &CheckpointError) {
        say(&format!(
            "warning: copies in memory are not written any more, and the training continues without them: {}",
            sentence(error)
        ));
        self.writer = None;
    }

    /// Removes the copies of a run whose last state is the checkpoint `saved`. Only the leader's own
    /// checkpoint is complete at once: the others wait for it, and leave the copies if it does not get its
    /// name within `patience`.
    pub(crate) fn finish(self, saved: Option<&Path>, patience: Duration) {
        // The thread ends first.
        drop(self.writer);
        if !wait_until(patience, || saved.is_none_or(Path::exists)) {
            return;
        }
        if let Some(run) = &self.link {
            remove_link(run);
        }
        // Best effort: the other processes of the machine remove it too.
        let _ = CopyFolder::remove(&self.folder);
    }
}

/// Waits until something is so, at most for `patience`. Returns whether it is.
fn wait_until(patience: Duration, is_so: impl Fn() -> bool) -> bool {
    let began = Instant::now();
    loop {
        if is_so() {
            return true;
        }
        if began.elapsed() >= patience {
            return false;
        }
        std::thread::sleep(LOOK);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_keeps_the_copies_until_the_last_checkpoint_is_complete() {
        let scratch = tempfile::tempdir().expect("a scratch folder");
        let (folder, saved) = (scratch.path().join("copies"), scratch.path().join("step-00000040"));
        let finish = |saved: Option<&Path>| {
            CopyFolder::create(&folder).expect("a folder");
            let copies = StateCopies { every: 1, writer: None, folder: folder.clone(), link: None };
            copies.finish(saved, Duration::ZERO);
            folder.exists()
        };
        assert!(finish(Some(&saved)), "the leader may fail to complete the checkpoint");
        std::fs::create_dir(&saved).expect("a folder");
        assert!(!finish(Some(&saved)));
        assert!(!finish(None), "no checkpoint was due");
    }
}
