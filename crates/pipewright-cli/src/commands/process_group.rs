//! The processes of a run: one alone, or those that `mpirun` started. Decides which of them writes files and reports
//! to the user, and makes sure that all are about to do the same.

use std::time::Duration;

use pipewright::failure::{Cause, StepError};
use pipewright::transport::{AgreementError, Fields, World};
use pipewright_schedule::Rank;

use crate::failure::{Exit, Failure, sentence};

/// How long processes wait for each other before the configuration's own deadline is known.
const START: Duration = Duration::from_secs(60);

/// How long the other processes wait before they end with a failure. A launcher ends all processes as soon as one of
/// them has failed, and the leader must have reported the failure by then.
const TIME_TO_REPORT: Duration = Duration::from_millis(300);

/// The rank of the leader.
const FIRST: Rank = Rank::new(0);

/// Variables that launchers set for their processes: Open MPI and PRRTE, MPICH and Intel MPI.
const LAUNCHERS: [&str; 3] = ["OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_SIZE"];

/// The failure of processes that do not agree. It is wrong input, unless one of them is gone.
pub(super) fn disagreement(error: &AgreementError) -> Failure {
    match (error, error.silent()) {
        (AgreementError::Failed(step), _) => {
            Failure::new(Exit::RankFailed, sentence(error)).loss_of(lost(step))
        }
        (_, Some(rank)) => Failure::new(Exit::RankFailed, sentence(error)).loss_of(Some(rank)),
        (_, None) => Failure::input(sentence(error)),
    }
}

/// The rank whose loss ended a step.
pub(super) fn lost(error: &StepError) -> Option<Rank> {
    match error.cause {
        Cause::SilentPeer { peer, .. } | Cause::LostPeer { peer } => Some(peer),
        _ => None,
    }
}

/// This process among those of the run.
pub(crate) struct ProcessGroup {
    /// The processes, until ranks are made of them.
    world: Option<World>,
    /// This process's place among them.
    rank: Rank,
    is_leader: bool,
    /// How long it waits for the others at the start.
    deadline: Duration,
}

impl ProcessGroup {
    /// Joins the other processes if a launcher started this one. A launcher that is unknown here is joined later, when
    /// the configuration asks for MPI.
    pub(crate) fn gather() -> Result<Self, Failure> {
        let is_launched = LAUNCHERS.iter().any(|name| std::env::var_os(name).is_some());
        let mut group = Self { world: None, rank: FIRST, is_leader: true, deadline: START };
        if cfg!(feature = "mpi") && is_launched {
            group.join()?;
        }
        Ok(group)
    }

    /// Whether this process writes files and reports to the user.
    pub(crate) fn is_leader(&self) -> bool {
        self.is_leader
    }

    /// Whether it is one of several processes.
    pub(crate) fn is_several(&self) -> bool {
        self.world.as_ref().is_some_and(World::is_distributed)
    }

    /// The processes as ranks.
    pub(crate) fn take_world(&mut self) -> Result<World, Failure> {
        if self.world.is_none() {
            self.join()?;
        }
        Ok(self.world.take().expect("it was joined"))
    }

    fn join(&mut self) -> Result<(), Failure> {
        let world = World::mpi(START).map_err(|error| Failure::new(Exit::RankFailed, error))?;
        self.rank = world.own_ranks().next().unwrap_or(FIRST);
        self.is_leader = self.rank == FIRST;
        self.world = Some(world);
        Ok(())
    }

    /// Sets how long it waits for the others, as the configuration says.
    pub(crate) fn set_deadline(&mut self, deadline: Duration) {
        self.deadline = deadline;
    }

    /// Returns `prepared` once all processes have prepared the same; `fields` names what must not differ.
    pub(crate) fn agree<T>(
        &mut self,
        prepared: Result<T, Failure>,
        fields: impl FnOnce(&T) -> Fields,
    ) -> Result<T, Failure> {
        let Some(world) = &mut self.world else { return prepared };
        let hello = prepared.as_ref().map(fields).map_err(Failure::text);
        let agreed = world.agree(hello, self.deadline);
        match (prepared, agreed) {
            (prepared, Ok(())) => prepared,
            // Its own error says more than the others' report of it.
            (Err(own), Err(_)) => Err(own),
            (Ok(_), Err(error)) => Err(disagreement(&error)),
        }
    }

    /// Reports a failure if this process is the leader, and passes the outcome on. If the leader is lost, the next
    /// process takes its place; the lost one reports nothing if it was only stopped and goes on.
    pub(crate) fn settle<T>(&mut self, outcome: Result<T, Failure>) -> Result<T, Failure> {
        outcome.map_err(|mut failure| {
            match failure.lost() {
                Some(lost) if lost == self.rank => self.is_leader = false,
                Some(FIRST) => self.is_leader = self.rank.get() == FIRST.get() + 1,
                _ => {}
            }
            if !self.is_leader {
                std::thread::sleep(TIME_TO_REPORT);
                return failure.told_elsewhere();
            }
            failure.report();
            failure
        })
    }
}
