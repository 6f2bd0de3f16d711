//! The processes of a run: a single process, or the processes that `mpirun` started. Decides which process
//! writes files and reports to the user, and checks that all processes have prepared the same run.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use pipewright::byte_channel::ByteChannel;
use pipewright::device::Devices;
use pipewright::failure::{Cause, StepError};
use pipewright::ids::WorldRank;
use pipewright::transport::{AgreementError, Fields, LinkSpeed, World};
use pipewright_schedule::error_text::with_causes as sentence;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use signal_hook::consts::SIGTERM;
use signal_hook::flag;

use crate::error::{ErrorKind, FailedRun, RunError};
use crate::fault::{Fault, launched_start};
use crate::observer::Observer;
use crate::recovery::Heartbeat;
use crate::settings::pipeline::TransportChoice;
use crate::training::remote_files::Files;

/// The time that processes wait for each other before the configuration's own deadline is known.
const START: Duration = Duration::from_secs(60);

/// The longest time in which a process opens its data while others wait.
const LONGEST_PREPARATION: Duration = Duration::from_secs(4 * 3600);

/// The time that the other processes wait before they end with a failure. A launcher ends all processes when
/// one of them fails, and the leader must report the failure before that.
const TIME_TO_REPORT: Duration = Duration::from_millis(300);

/// The rank of the leader.
const FIRST: WorldRank = WorldRank::new(0);

/// The variables that launchers set for their processes: Open MPI and PRRTE, MPICH and Intel MPI.
const LAUNCHERS: [&str; 3] = ["OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_SIZE"];

/// Returns whether a launcher has started this process as one of several. No other process is asked.
pub fn is_one_of_several() -> bool {
    let above = |name, least: u32| {
        let value = std::env::var(name).ok().and_then(|value| value.parse::<u32>().ok());
        value.is_some_and(|value| value >= least)
    };
    above("OMPI_COMM_WORLD_SIZE", 2) || above("PMI_SIZE", 2) || above("PMIX_RANK", 1)
}

/// Returns the failure for processes that do not agree. It is wrong input, unless one of the processes is
/// lost.
pub(crate) fn disagreement(error: &AgreementError) -> RunError {
    match (error, error.silent()) {
        (AgreementError::Failed(step), _) => {
            RunError::new(ErrorKind::RankFailed, sentence(error)).loss_of(lost(step))
        }
        (_, Some(rank)) => RunError::new(ErrorKind::RankFailed, sentence(error)).loss_of(Some(rank)),
        (_, None) => RunError::input(sentence(error)),
    }
}

/// Returns the rank whose loss ended a step.
pub fn lost(error: &StepError) -> Option<WorldRank> {
    match error.cause {
        Cause::SilentPeer { peer, .. } | Cause::LostPeer { peer } => Some(peer),
        _ => None,
    }
}

/// This process and the other processes of the run.
pub struct ProcessGroup {
    observer: Arc<dyn Observer>,
    /// The heartbeat for `launch`, in the leader until the run ends. It ends before the process leaves the others,
    /// because the launcher may not let it leave.
    heartbeat: Option<Heartbeat>,
    /// The connection to all processes, until the ranks take it.
    world: Option<World>,
    /// The rank of this process.
    rank: WorldRank,
    is_leader: bool,
    /// The time that this process waits for the others at the start.
    deadline: Duration,
    /// Where this process has the files of the run.
    files: Files,
    /// The folder of the run, for the fault that ends it, if `launch` reports faults.
    folder: Option<PathBuf>,
}

impl ProcessGroup {
    /// Joins the other processes if a launcher started this one. If the launcher sets none of the variables
    /// in `LAUNCHERS`, the process joins later, when the configuration selects MPI.
    pub fn gather(observer: Arc<dyn Observer>) -> Result<Self, RunError> {
        let is_launched = LAUNCHERS.iter().any(|name| std::env::var_os(name).is_some());
        let mut group = Self {
            observer,
            heartbeat: None,
            world: None,
            rank: FIRST,
            is_leader: true,
            deadline: START,
            files: Files::Shared,
            folder: None,
        };
        if cfg!(feature = "mpi") && is_launched {
            group.join()?;
        }
        Ok(group)
    }

    /// Returns the receiver of this process's reports.
    pub fn observer(&self) -> &Arc<dyn Observer> {
        &self.observer
    }

    /// Reports a sentence, if this process is the leader.
    pub fn note(&self, sentence: &str) {
        if self.is_leader {
            self.observer.note(sentence);
        }
    }

    /// Returns whether this process writes files and reports to the user.
    pub fn is_leader(&self) -> bool {
        self.is_leader
    }

    /// Returns the rank of this process.
    pub fn rank(&self) -> WorldRank {
        self.rank
    }

    /// Measures the links between ranks, processes or threads. All processes call it, and get the same links.
    pub fn measure_links(&mut self, devices: &Devices) -> Result<Vec<LinkSpeed>, RunError> {
        let deadline = self.deadline;
        let measured = match &mut self.world {
            Some(world) => world.measure_links(devices, deadline),
            None => World::local(2).measure_links(devices, deadline),
        };
        measured.map_err(|error| disagreement(&error))
    }

    /// Returns in every process the result of `combine`, which the leader calls with the values of all
    /// processes. A process may take the time `work` to get its value, in addition to the deadline.
    pub fn combine<T, R>(
        &mut self,
        own: &T,
        combine: impl Fn(&[(WorldRank, T)]) -> R,
        work: Duration,
    ) -> Result<R, RunError>
    where
        T: Clone + Serialize + for<'de> Deserialize<'de>,
        R: Serialize + for<'de> Deserialize<'de>,
    {
        let deadline = self.deadline.saturating_add(START).saturating_add(work);
        match &mut self.world {
            Some(world) => world.combine(own, combine, deadline).map_err(|error| disagreement(&error)),
            None => Ok(combine(&[(FIRST, own.clone())])),
        }
    }

    /// Returns the channel for messages to other processes that belong to no step, if there are others.
    pub fn byte_channel(&self) -> Option<ByteChannel> {
        self.world.as_ref().and_then(World::byte_channel)
    }

    /// Returns the channel for the files of the first process, if there are other processes.
    pub(crate) fn file_channel(&self) -> Option<ByteChannel> {
        self.world.as_ref().and_then(World::file_channel)
    }

    /// Returns where this process has the files of the run.
    pub(crate) fn files(&self) -> &Files {
        &self.files
    }

    /// Sets where this process has the files of the run.
    pub(crate) fn set_files(&mut self, files: Files) {
        self.files = files;
    }

    /// Returns the text of the leader in every process.
    pub fn share(&mut self, own: String) -> Result<String, RunError> {
        // The leader may have to search for a plan before it answers.
        let deadline = self.deadline.saturating_add(START);
        match &mut self.world {
            Some(world) => world.share(own, deadline).map_err(|error| disagreement(&error)),
            None => Ok(own),
        }
    }

    /// Returns the value of the leader in every process.
    pub(crate) fn share_value<T: Serialize + DeserializeOwned>(&mut self, own: &T) -> Result<T, RunError> {
        let shared = self.share(serde_json::to_string(own).expect("plain data has a JSON text"))?;
        serde_json::from_str(&shared).map_err(|error| RunError::new(ErrorKind::Bug, error))
    }

    /// Returns the number of processes.
    pub fn count(&self) -> u32 {
        self.world.as_ref().filter(|world| world.is_distributed()).map_or(1, World::ranks)
    }

    /// Returns whether it is one of several processes.
    pub fn is_several(&self) -> bool {
        self.world.as_ref().is_some_and(World::is_distributed)
    }

    /// Takes the connection to all processes, for the ranks to use.
    pub fn take_world(&mut self) -> Result<World, RunError> {
        self.join_for(TransportChoice::Mpi)?;
        Ok(self.world.take().expect("it was joined"))
    }

    /// Joins the other processes if the configuration selects MPI and they are not joined yet.
    pub fn join_for(&mut self, transport: TransportChoice) -> Result<(), RunError> {
        if transport == TransportChoice::Mpi && self.world.is_none() {
            self.join()?;
        }
        Ok(())
    }

    fn join(&mut self) -> Result<(), RunError> {
        let world = World::mpi(START).map_err(|error| RunError::new(ErrorKind::RankFailed, error))?;
        self.rank = world.own_ranks().next().unwrap_or(FIRST);
        self.is_leader = self.rank == FIRST;
        self.world = Some(world);
        if self.is_leader {
            let heartbeat = Heartbeat::start();
            self.heartbeat = heartbeat.map_err(|error| {
                RunError::new(
                    ErrorKind::RankFailed,
                    format!("the mark of the launch cannot be written: {error}"),
                )
            })?;
        }
        Ok(())
    }

    /// Tells `launch` that the processes have made the folder of the run.
    pub fn note_begun(&self) {
        self.heartbeat.iter().for_each(Heartbeat::note_begun);
    }

    /// Ends the heartbeat for `launch`: the run has ended, and so do the processes.
    pub fn note_end(&mut self) {
        self.heartbeat = None;
    }

    /// Returns the time that this process waits for the others.
    pub fn deadline(&self) -> Duration {
        self.deadline
    }

    /// Sets the time that this process waits for the others, to the value in the configuration.
    pub fn set_deadline(&mut self, deadline: Duration) {
        self.deadline = deadline;
    }

    /// Returns `prepared` after all processes have prepared the same. `fields` returns the values that must
    /// be equal.
    pub fn agree<T>(
        &mut self,
        prepared: Result<T, RunError>,
        fields: impl FnOnce(&T) -> Fields,
    ) -> Result<T, RunError> {
        self.agree_within(prepared, fields, self.deadline)
    }

    /// Returns the result of work that every process does by itself, after all of them have succeeded. If it
    /// failed in another process, the error is of this `kind`. The processes may take different
    /// times.
    pub fn all_succeed<T>(&mut self, done: Result<T, RunError>, kind: ErrorKind) -> Result<T, RunError> {
        self.all_succeed_within(done, kind, Duration::ZERO)
    }

    /// Like [`ProcessGroup::all_succeed`], for work that may take the time `work` in addition to the deadline.
    pub(crate) fn all_succeed_within<T>(
        &mut self,
        done: Result<T, RunError>,
        kind: ErrorKind,
        work: Duration,
    ) -> Result<T, RunError> {
        let is_done = done.is_ok();
        let deadline = self.deadline.saturating_add(START).saturating_add(work);
        self.agree_within(done, |_| Fields::new(), deadline).map_err(|mut failure| {
            if is_done && failure.lost().is_none() {
                failure.kind = kind;
            }
            failure
        })
    }

    /// Returns `prepared` after all processes have prepared their part. Only some of them read data meanwhile, which may
    /// take much longer than the deadline. A process that is lost ends the wait.
    pub(crate) fn agree_on_preparation<T>(&mut self, prepared: Result<T, RunError>) -> Result<T, RunError> {
        self.agree_within(prepared, |_| Fields::new(), LONGEST_PREPARATION)
    }

    fn agree_within<T>(
        &mut self,
        prepared: Result<T, RunError>,
        fields: impl FnOnce(&T) -> Fields,
        deadline: Duration,
    ) -> Result<T, RunError> {
        let Some(world) = &mut self.world else { return prepared };
        let hello = prepared.as_ref().map(fields).map_err(RunError::text);
        let agreed = world.agree(hello, deadline);
        match (prepared, agreed) {
            (prepared, Ok(())) => prepared,
            // The process's own error is more detailed than the report that the others receive.
            (Err(own), Err(_)) => Err(own),
            (Ok(_), Err(error)) => Err(disagreement(&error)),
        }
    }

    /// Lets the fault that ends the run be written into its folder if `launch` started this process.
    pub fn leave_faults_in(&mut self, folder: &Path) {
        self.folder = launched_start().map(|_| folder.to_owned());
    }

    /// Reports a failure if this process is the leader, and returns the outcome. If the leader is lost, the
    /// next process becomes the leader. A lost process that was only paused and continues reports nothing.
    /// `launch` reports the faults of the processes that it starts, from the record of the leader, or of
    /// another process if the leader has left none.
    pub fn settle<T>(&mut self, outcome: Result<T, RunError>) -> Result<T, RunError> {
        outcome.map_err(|failure| {
            self.note_end();
            match failure.lost() {
                Some(lost) if lost == self.rank => self.is_leader = false,
                Some(FIRST) => self.is_leader = self.rank.get() == FIRST.get() + 1,
                _ => {}
            }
            let fault = failure.fault().zip(self.folder.as_ref());
            if !self.is_leader {
                // A launcher ends this process when the leader has ended. Slurm's launcher takes the greatest
                // exit code, and a process which SIGTERM ends has a greater one than the leader's. Best
                // effort.
                let _ = flag::register(SIGTERM, Arc::default());
                std::thread::sleep(TIME_TO_REPORT);
                // The launcher may end the leader before it has left the fault.
                if let Some((fault, folder)) = fault.filter(|_| failure.lost() != Some(self.rank)) {
                    fault.leave_second(folder, &failure.full_text(), self.rank);
                }
                return failure.reported_elsewhere();
            }
            // `launch` reports a folder that is lost.
            let is_left = |(fault, folder): (&Fault, &PathBuf)| {
                fault.leave(folder, &failure.full_text()) || !folder.exists()
            };
            if fault.is_some_and(is_left) {
                return failure.reported_elsewhere();
            }
            if !failure.is_reported() {
                self.observer.failed(&failure);
            }
            failure.reported_elsewhere()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks who leaves a record for `launch` when the process of `rank` learns that rank `lost` is lost:
    /// the leader, another process, or none.
    fn check(rank: u32, lost: u32, is_first: bool, is_second: bool) {
        let folder = tempfile::tempdir().expect("a scratch folder");
        let (rank, peer) = (WorldRank::new(rank), WorldRank::new(lost));
        let mut group = ProcessGroup {
            observer: Arc::new(crate::observer::Silent),
            heartbeat: None,
            world: None,
            rank,
            is_leader: rank == FIRST,
            deadline: START,
            files: Files::Shared,
            folder: Some(folder.path().to_owned()),
        };
        let cause = Cause::LostPeer { peer };
        let error = StepError { rank: WorldRank::new(2), step: 7.into(), action: None, cause };
        let failure = RunError::new(ErrorKind::RankFailed, "lost").loss_of(Some(peer));
        let failure = failure.with_fault(Some(Fault::of_step(&error)));
        group.settle::<()>(Err(failure)).expect_err("it has failed");
        let left = [Fault::take(folder.path()), Fault::take_second(folder.path())];
        let expected = |is_left: bool| is_left.then(|| (Fault::of_step(&error), "lost".to_owned()));
        assert_eq!(left, [expected(is_first), expected(is_second)], "{rank} of {peer}");
    }

    #[test]
    fn each_process_but_the_lost_one_leaves_the_fault() {
        check(0, 1, true, false);
        check(2, 1, false, true);
        check(1, 1, false, false);
        // The next process becomes the leader.
        check(1, 0, true, false);
        check(2, 0, false, true);
        check(0, 0, false, false);
    }
}
