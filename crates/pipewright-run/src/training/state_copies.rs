//! Copies of the state of a run in the memory of its machine (`run.copy_every`). They outlive the processes,
//! so that a fault costs no more than the steps since the last copy.
//!
//! A file in the run's folder names the folder of the copies, which has a name of its own for each run. Each
//! process writes its part into the memory of its own host and, with `run.copies = "neighbour"`, sends it to a
//! process of the next host, which holds it too. The copies of a host are gone when the host is.

use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use pipewright::byte_channel::ByteChannel;
use pipewright::checkpoint::{
    COPIES, CheckpointError, CheckpointWriter, CopyExchange, CopyFolder, CopyTarget,
};
use pipewright::ids::WorldRank;
use pipewright::train::Trainer;
use pipewright_schedule::bytes::bytes_text as bytes;
use pipewright_schedule::error_text::with_causes as sentence;
use pipewright_system::private_folder;
use rustix::fs::statvfs;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::error::{ErrorKind, RunError};
use crate::observer::Observer;
use crate::settings::Settings;
use crate::settings::checkpoints::Copies;
use crate::settings::pipeline::TransportChoice;
use crate::training::checkpoint_space::CheckpointSpace;
use crate::training::copies_link::{
    Origin, earlier_bytes, link_of, remove_copies, remove_link, unique_name, unique_series, write_link,
};
use crate::training::copy_hosts::CopyHosts;
use crate::training::launch::failure;
use crate::training::prepare::{Prepared, RunParts};
use crate::training::process_group::ProcessGroup;

/// The time between two looks at the last checkpoint.
const LOOK: Duration = Duration::from_millis(20);

/// Returns the bytes that the copies of a run take on this machine: the copies of all ranks, or the copies of a
/// host with one process if each rank is a process, because processes may be on several machines.
pub(crate) fn copy_bytes(run: RunParts<'_>) -> u64 {
    let settings = run.settings;
    if settings.run.copy_every == 0 {
        return 0;
    }
    let state = CheckpointSpace::of(run).estimate();
    match settings.pipeline.transport {
        TransportChoice::Local => state.saturating_mul(COPIES),
        TransportChoice::Mpi => {
            let holders = match settings.run.copies {
                Copies::Machine => 1,
                // A process holds its own part and the part of a process of another host.
                Copies::Neighbour => 2,
            };
            let part = state.saturating_mul(holders).div_ceil(writers(settings).into());
            // After a restart, each host has all of one copy.
            let resumed = state.saturating_add(part.saturating_mul(COPIES - 1));
            part.saturating_mul(COPIES).max(resumed)
        }
    }
}

/// Returns the number of ranks that have parts of a copy.
fn writers(settings: &Settings) -> u32 {
    settings.mesh.writers(settings.pipeline.ranks)
}

/// Checks that the folder of the copies has the space that they need.
///
/// # Errors
/// Fails if the folder does not exist or has too little space.
pub fn require_space(prepared: &Prepared) -> Result<(), RunError> {
    let (folder, needed) = (&prepared.settings.run.copy_folder, copy_bytes(prepared.parts()));
    if needed == 0 {
        return Ok(());
    }
    let advice = "name another folder in memory (run.copy_folder), or set run.copy_every=0";
    let refused = |error: &dyn Display| {
        RunError::input(format!("{}: copies cannot be kept here: {error}; {advice}", folder.display()))
    };
    let space = statvfs(folder).map_err(|error| refused(&error))?;
    private_folder::require_place(folder).map_err(|error| refused(&error))?;
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
    Err(RunError::new(ErrorKind::CheckFailed, message))
}

/// Where a run makes its copies.
pub(crate) struct CopyPlace {
    observer: Arc<dyn Observer>,
    /// `None` if it makes none.
    folder: Option<PathBuf>,
    /// The series of the copies.
    series: String,
    /// The copy from which the run resumes.
    origin: Option<Origin>,
    /// The folder of copies that the run, or the earlier one in its folder, has made so far.
    earlier: Option<PathBuf>,
    /// Whether the run has made them.
    continues: bool,
    /// The hosts, and the channel to their processes, if copies are sent to the next host.
    neighbours: Option<(CopyHosts, ByteChannel)>,
}

/// The decisions of the leader.
#[derive(Serialize, Deserialize)]
struct ChosenPlace {
    /// A name that no folder has; `None` if the run makes no copies.
    folder: Option<PathBuf>,
    /// The folder that has the run's copies so far, if the run can keep it.
    kept: Option<PathBuf>,
    series: String,
    earlier: Option<PathBuf>,
}

/// Chooses where a run makes its copies, the same in all processes. All processes call it. If the run
/// `continues`, the folder stays the same, unless another user has taken its name; `origin` is the copy from
/// which it continues.
///
/// # Errors
/// Fails if the processes do not reach each other.
pub(crate) fn place_of(
    processes: &mut ProcessGroup,
    settings: &Settings,
    continues: bool,
    origin: Option<Origin>,
) -> Result<CopyPlace, RunError> {
    let run = &settings.run;
    let earlier = link_of(&run.out);
    let kept = earlier.clone().filter(|copies| continues && copies.parent() == Some(&*run.copy_folder));
    let makes_copies = run.copy_every > 0;
    let chosen = ChosenPlace {
        folder: makes_copies.then(|| run.copy_folder.join(unique_name(&run.out))),
        kept: kept.filter(|_| makes_copies),
        series: unique_series(&run.out),
        earlier,
    };
    let ChosenPlace { mut folder, kept, series, earlier } = processes.share_value(&chosen)?;
    if let Some(kept) = kept
        && !is_planted(processes, &kept)?
    {
        folder = Some(kept);
    }
    let sends = run.copies == Copies::Neighbour;
    let hosts = folder.as_ref().filter(|_| sends).map(|folder| CopyHosts::find(processes, folder));
    let neighbours = hosts.transpose()?.filter(|hosts| {
        if hosts.count() == 1 {
            processes.note("all processes are on one host, so no copy of the state is sent to another one");
        }
        hosts.count() > 1
    });
    let neighbours = neighbours.zip(processes.byte_channel());
    let observer = processes.observer().clone();
    Ok(CopyPlace { observer, folder, series, origin, earlier, continues, neighbours })
}

/// Returns whether another user could have made the folder of the copies on one of the hosts. All processes call it.
fn is_planted(processes: &mut ProcessGroup, copies: &Path) -> Result<bool, RunError> {
    let own = matches!(CopyFolder::find(copies), Err(CheckpointError::NotPrivate(_)));
    let any = |hosts: &[(WorldRank, bool)]| hosts.iter().any(|(_, is_planted)| *is_planted);
    processes.combine(&own, any, Duration::ZERO)
}

/// Removes the copies of a run that is finished, on the hosts of all processes. All processes call it.
///
/// # Errors
/// Fails if the processes do not reach each other.
pub(crate) fn remove_all(processes: &mut ProcessGroup, settings: &Settings) -> Result<(), RunError> {
    let run = &settings.run.out;
    if let Some(copies) = processes.share_value(&link_of(run))? {
        remove_copies(&copies);
    }
    if processes.is_leader() {
        remove_link(run);
    }
    Ok(())
}

/// The copies that a run makes.
pub(crate) struct StateCopies {
    observer: Arc<dyn Observer>,
    every: u64,
    /// `None` after a copy could not be written.
    writer: Option<CheckpointWriter>,
    folder: PathBuf,
    /// The rank of this process, if copies are sent to another host.
    rank: WorldRank,
    /// The folder of the run, in the process that has written the file there.
    link: Option<PathBuf>,
    /// The copies of an earlier run, until this run has taken a step.
    earlier: Option<PathBuf>,
    /// Sends copies to the next host, and keeps the copies of the host before. It ends after the writer.
    #[expect(dead_code, reason = "it works until it is dropped")]
    exchange: Option<Arc<CopyExchange>>,
}

impl StateCopies {
    /// Begins to make copies after step `done`, and removes the copies of later steps; makes none if there is
    /// no folder. The `leader` writes to the folder of the run.
    ///
    /// # Errors
    /// Fails if a folder cannot be written.
    pub(crate) fn begin(
        place: CopyPlace,
        settings: &Settings,
        done: u64,
        leader: bool,
    ) -> Result<Option<Self>, RunError> {
        let (run, CopyPlace { observer, folder, series, origin, mut earlier, continues, neighbours }) =
            (&settings.run, place);
        earlier = earlier.filter(|earlier| Some(earlier) != folder.as_ref());
        // An earlier run in the folder may still be running, until the leader has moved it aside.
        if let Some(earlier) = earlier.take_if(|_| continues) {
            if leader {
                remove_link(&run.out);
            }
            remove_copies(&earlier);
        }
        let Some(path) = folder else { return Ok(None) };
        let folder = CopyFolder::create(&path).map_err(RunError::input)?;
        folder.remove_after(done).map_err(RunError::input)?;
        let write_link = || write_link(&run.out, &path, &series, origin).map(|()| run.out.clone());
        let link = leader.then(write_link).transpose()?;
        let rank = neighbours.as_ref().map(|(hosts, _)| hosts.rank()).unwrap_or_default();
        let exchange = match neighbours {
            None => None,
            Some((hosts, channel)) => {
                let exchange = CopyExchange::start(channel, folder.clone(), run.deadline());
                Some((Arc::new(exchange.map_err(RunError::input)?), hosts.neighbour()))
            }
        };
        let neighbour = exchange.as_ref().and_then(|(exchange, rank)| Some((exchange.clone(), (*rank)?)));
        let target = CopyTarget { folder, files: writers(settings), series, neighbour };
        let writer = CheckpointWriter::copy(target, run.deadline()).map_err(RunError::input)?;
        let exchange = exchange.map(|(exchange, _)| exchange);
        let (every, writer) = (run.copy_every, Some(writer));
        Ok(Some(Self { observer, every, writer, folder: path, rank, link, earlier, exchange }))
    }

    /// Sets a function that is called whenever a wait for a copy sees progress.
    pub(crate) fn on_progress(&mut self, call: impl Fn() + Send + 'static) {
        if let Some(writer) = &mut self.writer {
            writer.on_progress(call);
        }
    }

    /// Waits for the copy that was begun after the last step, and until the neighbour has it. Then a step that
    /// is in the metrics costs no more than itself: the state before it has a copy.
    pub(crate) fn settle(&mut self) {
        if let Some(earlier) = self.earlier.take() {
            remove_copies(&earlier);
        }
        match self.writer.as_mut().map(CheckpointWriter::wait) {
            // The next step reports why the run has failed.
            Some(Err(CheckpointError::NotSent { source }))
                if matches!(*source, CheckpointError::CopyAbandoned { .. }) => {}
            Some(Err(error @ CheckpointError::NotSent { .. })) => self.observer.note(&format!(
                "warning: rank {} does not send copies of the state to another host any more; the training \
                 continues with the copies on its own host, and if that host is lost, the run resumes from \
                 its newest checkpoint: {}",
                self.rank,
                sentence(&error)
            )),
            Some(Err(error)) => self.give_up(&error),
            None | Some(Ok(_)) => {}
        }
    }

    /// Returns whether a copy is due after a step, in some process.
    pub(crate) fn are_due(&self, step: u64) -> bool {
        step.is_multiple_of(self.every)
    }

    /// Begins a copy if one is due. It is written while the next step computes.
    ///
    /// # Errors
    /// Fails if a rank does not answer.
    pub(crate) fn begin_copy(
        &mut self,
        trainer: &mut Trainer,
        description: &Map<String, Value>,
    ) -> Result<(), RunError> {
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

    /// Makes no further copy. The other processes continue, and no copy is complete any more.
    fn give_up(&mut self, error: &CheckpointError) {
        self.observer.note(&format!(
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
            self.observer.note(&format!(
                "the copies of the state stay in {}, because the last checkpoint was not complete within \
                 {:.0} s; remove the folder when it is",
                self.folder.display(),
                patience.as_secs_f64()
            ));
            return;
        }
        if let Some(run) = &self.link {
            remove_link(run);
        }
        // Best effort: the other processes of the machine remove it too.
        let _ = CopyFolder::remove(&self.folder);
    }
}

/// Waits until `is_met` returns true, at most for `patience`. Returns whether it does.
fn wait_until(patience: Duration, is_met: impl Fn() -> bool) -> bool {
    let began = Instant::now();
    loop {
        if is_met() {
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
    use crate::observer::Silent;

    #[test]
    fn a_process_keeps_the_copies_until_the_last_checkpoint_is_complete() {
        let scratch = tempfile::tempdir().expect("a scratch folder");
        let (folder, saved) = (scratch.path().join("copies"), scratch.path().join("step-00000040"));
        let finish = |saved: Option<&Path>| {
            CopyFolder::create(&folder).expect("a folder");
            let copies = StateCopies {
                observer: Arc::new(Silent),
                every: 1,
                writer: None,
                folder: folder.clone(),
                rank: WorldRank::default(),
                link: None,
                earlier: None,
                exchange: None,
            };
            copies.finish(saved, Duration::ZERO);
            folder.exists()
        };
        assert!(finish(Some(&saved)), "the leader may fail to complete the checkpoint");
        std::fs::create_dir(&saved).expect("a folder");
        assert!(!finish(Some(&saved)));
        assert!(!finish(None), "no checkpoint was due");
    }
}
