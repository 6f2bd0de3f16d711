//! The processes of a run: one alone, or those that `mpirun` started. Who speaks, and whether all are about to do the
//! same.

use std::time::Duration;

use pipewright::failure::{Cause, StepError};
use pipewright::transport::{AgreementError, Fields, World};
use pipewright_schedule::Rank;

use crate::failure::{Exit, Failure, sentence};

/// How long processes wait for each other before the configuration's own deadline is known.
const START: Duration = Duration::from_secs(60);

/// How long processes that do not speak wait before they end with a failure.
const TIME_TO_SPEAK: Duration = Duration::from_millis(300);

/// The process that speaks.
const FIRST: Rank = Rank::new(0);

/// What launchers tell their processes: Open MPI and PRRTE, MPICH and Intel MPI.
const LAUNCHERS: [&str; 3] = ["OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_SIZE"];

/// Whose fault it is that processes do not agree: the user's, unless one of them is gone.
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
pub(crate) struct Crew {
    /// The processes, until ranks are made of them.
    world: Option<World>,
    /// This process's place among them.
    rank: Rank,
    /// Whether it speaks for all.
    speaks: bool,
    /// How long it waits for the others at the start.
    deadline: Duration,
}

impl Crew {
    /// Joins the other processes when a launcher started this one; a launcher unknown here is joined when the
    /// configuration asks for MPI.
    pub(crate) fn gather() -> Result<Self, Failure> {
        let is_launched = LAUNCHERS.iter().any(|name| std::env::var_os(name).is_some());
        let mut crew = Self { world: None, rank: FIRST, speaks: true, deadline: START };
        if cfg!(feature = "mpi") && is_launched {
            crew.join()?;
        }
        Ok(crew)
    }

    /// Whether this process writes files and speaks for all.
    pub(crate) fn speaks(&self) -> bool {
        self.speaks
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
        self.speaks = self.rank == FIRST;
        self.world = Some(world);
        Ok(())
    }

    /// Waits for the others as long as the configuration says.
    pub(crate) fn set_deadline(&mut self, deadline: Duration) {
        self.deadline = deadline;
    }

    /// What was prepared, once all processes have prepared the same: `fields` names what must not differ.
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
            // Its own error is the fullest that this process can tell.
            (Err(own), Err(_)) => Err(own),
            (Ok(_), Err(error)) => Err(disagreement(&error)),
        }
    }

    /// The outcome, with a failure shown if this process speaks for all. A launcher ends all processes as soon as one
    /// of them has failed, so the others give it time. If the process that speaks is lost, the next one does in its
    /// place; the lost one, should it have been stopped and go on, does not.
    pub(crate) fn settle<T>(&mut self, outcome: Result<T, Failure>) -> Result<T, Failure> {
        outcome.map_err(|mut failure| {
            match failure.lost() {
                Some(lost) if lost == self.rank => self.speaks = false,
                Some(FIRST) => self.speaks = self.rank.get() == FIRST.get() + 1,
                _ => {}
            }
            if !self.speaks {
                std::thread::sleep(TIME_TO_SPEAK);
                return failure.told_elsewhere();
            }
            failure.report();
            failure
        })
    }
}
