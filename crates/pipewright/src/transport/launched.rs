//! [`Mpi`]: this process as one of the processes that `mpirun` started, and the worlds that it has.

use std::time::Duration;

#[cfg(feature = "mpi")]
use super::endpoint::Endpoint;
#[cfg(feature = "mpi")]
use super::mpi::{ClockError, MpiProcess};
use super::world::{World, WorldError};

/// This process as one of the processes that a launcher such as `mpirun` started. It has one world at a time:
/// of all processes, or of some of them. A world ends when the pipeline that uses it is dropped, and the
/// process may then have another one. So pipelines of different processes run side by side, and pipelines of
/// the same processes one after another.
///
/// Clones are the same process. It leaves MPI when the last clone and the last world are dropped, and then
/// waits for all processes that `mpirun` started. A process cannot join again.
///
/// ```no_run
/// use std::time::Duration;
/// use pipewright::transport::Mpi;
///
/// let deadline = Duration::from_secs(60);
/// let mpi = Mpi::join(deadline)?;
/// // Two halves train different models. Only the processes of a world ask for it.
/// let half = mpi.ranks() / 2;
/// let own: Vec<u32> = if mpi.rank() < half { (0..half).collect() } else { (half..2 * half).collect() };
/// let world = mpi.world_of(&own, deadline)?;
/// // `Pipeline::builder(layers).world(world)` uses it. When that pipeline is dropped, all processes may train together.
/// # drop(world);
/// let world = mpi.world(deadline)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct Mpi {
    #[cfg(feature = "mpi")]
    process: MpiProcess,
    #[cfg(not(feature = "mpi"))]
    none: std::convert::Infallible,
}

#[cfg(feature = "mpi")]
impl Mpi {
    /// Joins MPI, with all processes that `mpirun` started.
    ///
    /// # Errors
    /// Without the feature `mpi`, and when MPI cannot be joined within the deadline, or this process has
    /// joined it before.
    pub fn join(deadline: Duration) -> Result<Self, WorldError> {
        Ok(Self { process: MpiProcess::join(deadline)? })
    }

    /// Returns the number of this process, from 0.
    pub fn rank(&self) -> u32 {
        self.process.rank()
    }

    /// Returns the number of processes.
    pub fn ranks(&self) -> u32 {
        self.process.ranks()
    }

    /// Returns this process's rank in a world of all processes. All of them ask for it.
    ///
    /// # Errors
    /// As [`Mpi::world_of`].
    pub fn world(&self, deadline: Duration) -> Result<World, WorldError> {
        self.world_of(&(0..self.ranks()).collect::<Vec<_>>(), deadline)
    }

    /// Returns this process's rank in a world of these processes. All of them ask for it with the same list.
    /// The first one is rank 0 of the world, and so on. The other processes take no part. A process that
    /// sends no heartbeat for `deadline` counts as lost; a pipeline that is launched sets its own deadline.
    ///
    /// # Errors
    /// When the list has a process that does not exist, has one twice or lacks this process, when this
    /// process has a world already, or when the others do not ask for it within `deadline`.
    pub fn world_of(&self, ranks: &[u32], deadline: Duration) -> Result<World, WorldError> {
        self.world_with(ranks, deadline, ClockError::default())
    }

    /// Returns a world as [`Mpi::world_of`] does, with an error of this process's clock.
    pub(super) fn world_with(
        &self,
        ranks: &[u32],
        deadline: Duration,
        error: ClockError,
    ) -> Result<World, WorldError> {
        let (endpoint, board) = self.process.world(ranks.to_vec(), deadline, error)?;
        Ok(World::new(vec![Endpoint::Mpi(endpoint)], board))
    }
}

#[cfg(not(feature = "mpi"))]
impl Mpi {
    /// Joins MPI, with all processes that `mpirun` started.
    ///
    /// # Errors
    /// Without the feature `mpi`.
    pub fn join(_deadline: Duration) -> Result<Self, WorldError> {
        Err(WorldError::NotCompiledIn { transport: "mpi" })
    }

    /// Returns the number of this process, from 0.
    pub fn rank(&self) -> u32 {
        match self.none {}
    }

    /// Returns the number of processes.
    pub fn ranks(&self) -> u32 {
        match self.none {}
    }

    /// Returns this process's rank in a world of all processes.
    ///
    /// # Errors
    /// Never, because no process joins MPI without the feature `mpi`.
    pub fn world(&self, _deadline: Duration) -> Result<World, WorldError> {
        match self.none {}
    }

    /// Returns this process's rank in a world of these processes.
    ///
    /// # Errors
    /// Never, because no process joins MPI without the feature `mpi`.
    pub fn world_of(&self, _ranks: &[u32], _deadline: Duration) -> Result<World, WorldError> {
        match self.none {}
    }
}

impl World {
    /// Returns this process's rank in the world of the processes that `mpirun` started, one rank each. A
    /// process joins once; it leaves, together with the others, when the pipeline is dropped. For further
    /// worlds, or worlds of some of the processes, join with [`Mpi::join`].
    ///
    /// A process that sends no heartbeat for `deadline` counts as lost. A pipeline that is launched sets its
    /// own deadline.
    ///
    /// # Errors
    /// Without the feature `mpi`, and when MPI cannot be joined.
    pub fn mpi(deadline: Duration) -> Result<Self, WorldError> {
        Mpi::join(deadline)?.world(deadline)
    }

    /// Returns a world as [`World::mpi`] does, with an error of this process's clock, for tests.
    ///
    /// # Errors
    /// When MPI cannot be joined.
    #[cfg(all(feature = "mpi", feature = "testing"))]
    pub fn mpi_with_clock_error(deadline: Duration, error: ClockError) -> Result<Self, WorldError> {
        let mpi = Mpi::join(deadline)?;
        mpi.world_with(&(0..mpi.ranks()).collect::<Vec<_>>(), deadline, error)
    }
}
