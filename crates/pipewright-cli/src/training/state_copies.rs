//! Copies of the state of a run in the memory of its machine (`run.copy_every`). They outlive the processes,
//! so that a fault costs no more than the steps since the last copy.
//!
//! A file in the run's folder names the folder of the copies, which has a name of its own for each run. The
//! copies of a machine are gone when the machine is: a resumed run then takes its newest checkpoint.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use pipewright::bounded_file::{SMALL_TEXT, read_regular, write_regular};
use pipewright::checkpoint::{
    COPIES, Checkpoint, CheckpointError, CheckpointFolder, CheckpointWriter, CopyFolder, Manifest,
};
use pipewright::train::Trainer;
use pipewright::transport::Fields;
use rustix::fs::statvfs;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::config::Settings;
use crate::config::pipeline::TransportChoice;
use crate::display::{bytes, say};
use crate::failure::{Exit, Failure, sentence};
use crate::run_folder::checkpoints_of;
use crate::training::checkpoint_path::RunPath;
use crate::training::checkpoint_space::CheckpointSpace;
use crate::training::evaluations::lowest_step;
use crate::training::launch::failure;
use crate::training::prepare::Prepared;
use crate::training::process_group::ProcessGroup;

/// The file in the folder of a run that names the folder of its copies.
const LINK: &str = "copies.json";

/// The content of the file.
#[derive(Debug, Serialize, Deserialize)]
struct Link {
    /// The folder of the run. The copies do not belong to a folder that was copied or moved.
    run: PathBuf,
    copies: PathBuf,
}

/// A copy from which a run resumes.
pub(crate) struct FoundCopy {
    path: PathBuf,
    /// The copy, in the process that has verified it.
    opened: Option<Checkpoint>,
    /// The time for which this process has looked for it.
    took: Duration,
}

impl FoundCopy {
    /// Returns the copy as a checkpoint, and the time that finding and reading it took.
    pub(crate) fn open(self) -> Result<(Checkpoint, Duration), CheckpointError> {
        let began = Instant::now();
        let checkpoint = self.opened.map_or_else(|| Checkpoint::open(&self.path), Ok)?;
        Ok((checkpoint, self.took + began.elapsed()))
    }
}

/// Returns the bytes that the copies of a run take on this machine: the copies of all ranks, or the copies of one
/// rank if each is a process, because processes may be on several machines.
pub(crate) fn copy_bytes(prepared: &Prepared) -> u64 {
    let settings = &prepared.settings;
    if settings.run.copy_every == 0 {
        return 0;
    }
    let all = CheckpointSpace::of(prepared).estimate().saturating_mul(COPIES);
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
    let (folder, needed) = (&prepared.settings.run.copy_folder, copy_bytes(prepared));
    if needed == 0 {
        return Ok(());
    }
    let advice = "name another folder in memory (run.copy_folder), or set run.copy_every=0";
    let space = statvfs(folder).map_err(|error| {
        Failure::input(format!("{}: copies cannot be kept here: {error}; {advice}", folder.display()))
    })?;
    let free = space.f_bavail.saturating_mul(space.f_frsize);
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

/// Returns the newest copy of a run that is newer than its checkpoints; `None` if there is none, or if the path
/// names a checkpoint. All processes call it, and the first one decides. `steps` is the number of steps of the run.
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
    let own = steps.filter(|_| decides).and_then(|steps| newest_here(&path.run, steps));
    let own_path = own.as_ref().map_or_else(String::new, |copy| copy.path().display().to_string());
    let shared = PathBuf::from(processes.share(own_path)?);
    if shared.as_os_str().is_empty() {
        return Ok(None);
    }
    let found = FoundCopy { path: shared, opened: own, took: began.elapsed() };
    // Processes on other machines do not see the memory of the first one.
    let files = Manifest::read(&found.path).map(|manifest| manifest.files).unwrap_or_default();
    let hashes: Vec<String> = files.into_iter().map(|file| file.hash).collect();
    let seen = |hashes: &Vec<String>| Fields::from([("copy in memory".to_owned(), hashes.join(" "))]);
    match processes.agree(Ok(hashes), seen) {
        Ok(_) => Ok(Some(found)),
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
    let folder = CopyFolder::find(&link_of(run)?).ok()?;
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

/// Returns the folder of a run's copies, the same in all processes; `None` if it makes none. All processes call it.
/// If the run `continues`, the folder stays the same.
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
    let earlier = link_of(&run.out).filter(|copies| continues && copies.parent() == Some(&*run.copy_folder));
    let folder = earlier.unwrap_or_else(|| run.copy_folder.join(unique_name(&run.out)));
    processes.share(folder.display().to_string()).map(|folder| Some(PathBuf::from(folder)))
}

/// Returns the name of the folder of a run's copies, which no other run has.
fn unique_name(run: &Path) -> String {
    let parts = format!("{} {} {:?}", run.display(), std::process::id(), SystemTime::now());
    format!("pipewright-{}", &blake3::hash(parts.as_bytes()).to_hex()[..16])
}

/// Returns the folder of the copies of the run in a folder, if a file names it.
pub(crate) fn link_of(run: &Path) -> Option<PathBuf> {
    let link: Link = serde_json::from_slice(&read_regular(&run.join(LINK), SMALL_TEXT).ok()?).ok()?;
    (link.run == fs::canonicalize(run).ok()?).then_some(link.copies)
}

/// Removes the copies of a run that does not need them any more.
pub(crate) fn remove(copies: &Path) {
    // Best effort: what stays is never used.
    let _ = CopyFolder::remove(copies);
}

/// The copies that a run makes.
pub(crate) struct StateCopies {
    every: u64,
    /// `None` after a copy could not be written.
    writer: Option<CheckpointWriter>,
    folder: PathBuf,
    /// The file that names the folder, in the process that has written it.
    link: Option<PathBuf>,
}

impl StateCopies {
    /// Begins to make copies in `folder` after step `done`, and removes the copies of later steps; makes none if
    /// there is no folder. The `leader` writes to the folder of the run.
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
            let _ = fs::remove_file(run.out.join(LINK));
            remove(&earlier);
        }
        let Some(path) = folder else { return Ok(None) };
        let folder = CopyFolder::create(&path).map_err(Failure::input)?;
        folder.remove_after(done).map_err(Failure::input)?;
        let link = leader.then(|| write_link(&run.out, &path)).transpose()?;
        let writer =
            CheckpointWriter::copy(folder, writers(settings), run.deadline()).map_err(Failure::input)?;
        Ok(Some(Self { every: run.copy_every, writer: Some(writer), folder: path, link }))
    }

    /// Waits for the copy that was begun after the last step. Then a step that is in the metrics costs no more than
    /// itself: the state before it has a copy.
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

    /// Makes no further copy. A run is worth more than its copies. The other processes continue, and no copy is
    /// complete any more.
    fn give_up(&mut self, error: &CheckpointError) {
        say(&format!(
            "warning: copies in memory are not written any more, and the training continues without them: {}",
            sentence(error)
        ));
        self.writer = None;
    }

    /// Removes the copies of a run that has saved its last state.
    pub(crate) fn finish(self) {
        // The thread ends first.
        drop(self.writer);
        if let Some(link) = &self.link {
            let _ = fs::remove_file(link);
        }
        remove(&self.folder);
    }
}

/// Writes the file that names the folder of the copies. Returns its path.
fn write_link(run: &Path, copies: &Path) -> Result<PathBuf, Failure> {
    let (path, draft) = (run.join(LINK), run.join(format!(".{LINK}")));
    let written = fs::canonicalize(run).and_then(|run| {
        let link = Link { run, copies: copies.to_owned() };
        write_regular(&draft, &serde_json::to_vec(&link)?)?;
        fs::rename(&draft, &path)
    });
    written.map_err(|error| Failure::input(format!("{}: cannot be written: {error}", path.display())))?;
    Ok(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_copies_of_a_run_do_not_belong_to_its_folder_elsewhere() {
        let scratch = tempfile::tempdir().expect("a scratch folder");
        let (run, moved) = (scratch.path().join("run"), scratch.path().join("moved"));
        fs::create_dir(&run).expect("a folder");
        let copies = scratch.path().join(unique_name(&run));
        write_link(&run, &copies).expect("the folder takes files");
        assert_eq!(link_of(&run), Some(copies));
        fs::rename(&run, &moved).expect("a free name");
        assert_eq!([link_of(&run), link_of(&moved)], [None, None]);
    }
}
