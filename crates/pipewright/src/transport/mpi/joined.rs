//! A process that has joined MPI, and the worlds that it has one after another.
//!
//! One thread makes all MPI calls. It runs the loop of a world ([`MpiThread`]) until the world's endpoint is
//! dropped, and then waits for the next request. When the last handle and the last endpoint are gone, it
//! leaves MPI.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender};

use super::calls::MpiError;
use super::endpoint::{Joined, NewWorld, WorldReceivers};
use super::process::Process;
use super::process_clock::ClockError;
use crate::transport::wait::end_of_wait;

/// How often to look whether the clock is measured.
const CLOCK_PAUSE: Duration = Duration::from_micros(200);

/// A process that has joined MPI. Clones are the same process.
#[derive(Clone)]
pub(crate) struct MpiProcess(Arc<Inner>);

struct Inner {
    rank: u32,
    ranks: u32,
    /// Present until the process leaves.
    requests: Option<Sender<Request>>,
    thread: Option<JoinHandle<()>>,
    /// Whether the process has a world.
    in_use: Arc<AtomicBool>,
}

/// A request for a world.
struct Request {
    members: Vec<u32>,
    world: NewWorld,
}

impl MpiProcess {
    /// Joins MPI; returns when all processes have joined.
    ///
    /// # Errors
    /// When MPI cannot be joined within the deadline.
    pub(crate) fn join(deadline: Duration) -> Result<Self, MpiError> {
        let (requests, asked) = crossbeam_channel::unbounded();
        let (sender, joined) = crossbeam_channel::bounded(1);
        let in_use = Arc::new(AtomicBool::new(false));
        let is_free = in_use.clone();
        let work = move || serve(&asked, &sender, &is_free);
        let thread = std::thread::Builder::new().name("mpi".to_owned()).spawn(work);
        let thread = thread.map_err(|error| cannot_run(&error))?;
        let late = |_| cannot_run(format_args!("MPI_Init did not return within {deadline:?}"));
        let (rank, ranks) = joined.recv_timeout(deadline).map_err(late)??;
        Ok(Self(Arc::new(Inner { rank, ranks, requests: Some(requests), thread: Some(thread), in_use })))
    }

    pub(crate) fn rank(&self) -> u32 {
        self.0.rank
    }

    pub(crate) fn ranks(&self) -> u32 {
        self.0.ranks
    }

    /// Returns this process's rank in a world of these processes, once all of them have asked for it and its
    /// clock is measured. `error` is added to the clock.
    ///
    /// # Errors
    /// When the list is wrong, the process has a world already, or the others do not ask for it within the
    /// deadline.
    pub(crate) fn world(
        &self,
        members: Vec<u32>,
        deadline: Duration,
        error: ClockError,
    ) -> Result<Joined, MpiError> {
        check_members(&members, self.rank(), self.ranks())?;
        let until = end_of_wait(deadline);
        if self.0.in_use.swap(true, Ordering::SeqCst) {
            let reason = "this process has a world of MPI already, and has one at a time: drop the pipeline or the world that \
                          uses it first";
            return Err(MpiError(reason.to_owned()));
        }
        let (world, WorldReceivers { joined, done }) = NewWorld::new(deadline, error);
        let request = Request { members: members.clone(), world };
        let ended = || cannot_run("it has ended");
        let requests = self.0.requests.as_ref().ok_or_else(ended)?;
        requests.send(request).map_err(|_| ended())?;
        let (mut endpoint, board) = match joined.recv_timeout(deadline) {
            Ok(joined) => joined?,
            Err(RecvTimeoutError::Timeout) => {
                let waited = deadline.as_secs_f64();
                return Err(MpiError(format!(
                    "the processes {members:?} have not all asked for this world within {waited:.1} s: each of them must ask \
                     for it, with the same list"
                )));
            }
            Err(RecvTimeoutError::Disconnected) => return Err(ended()),
        };
        endpoint.keep(self.0.clone(), done);
        // A rank that has failed is reported when the processes agree on the run.
        while !endpoint.is_clock_measured() && !endpoint.inner.abort().is_raised() {
            if Instant::now() > until {
                let waited = deadline.as_secs_f64();
                return Err(MpiError(format!(
                    "rank 0 did not answer within {waited:.1} s when this process compared its clock with rank 0's clock: it \
                     may still be starting, or it has ended"
                )));
            }
            std::thread::sleep(CLOCK_PAUSE);
        }
        Ok((endpoint, board))
    }
}

impl Drop for Inner {
    /// Leaves MPI, unless the MPI thread waits for processes that do not come.
    fn drop(&mut self) {
        drop(self.requests.take());
        if let Some(thread) = self.thread.take().filter(|_| !self.in_use.load(Ordering::SeqCst)) {
            let _ = thread.join();
        }
    }
}

/// The main function of the MPI thread: joins, reports that it has joined, runs one world after another, and
/// leaves.
fn serve(asked: &Receiver<Request>, joined: &Sender<Result<(u32, u32), MpiError>>, in_use: &AtomicBool) {
    let process = match Process::init() {
        Ok(process) => process,
        // After the deadline no receiver is left.
        Err(error) => return joined.send(Err(error)).unwrap_or_default(),
    };
    if joined.send(Ok((process.rank, process.ranks))).is_err() {
        return;
    }
    let mut is_together = true;
    for Request { members, world } in asked {
        let (left, done) = world.run(process.world(&members));
        is_together &= left;
        in_use.store(false, Ordering::SeqCst);
        drop(done);
    }
    if !is_together {
        // Other processes have ended or do not respond: MPI_Finalize would wait for them.
        tracing::debug!("left without MPI_Finalize");
    } else if let Err(error) = process.finalize() {
        tracing::warn!(%error, "leaving MPI");
    }
}

fn cannot_run(reason: impl std::fmt::Display) -> MpiError {
    MpiError(format!("the thread that calls MPI cannot run: {reason}"))
}

/// Checks the processes of a world.
fn check_members(members: &[u32], own: u32, ranks: u32) -> Result<(), MpiError> {
    let refuse =
        |problem: String| Err(MpiError(format!("the processes {members:?} are not a world: {problem}")));
    if let Some(member) = members.iter().find(|member| **member >= ranks) {
        return refuse(format!(
            "there is no process {member}; name processes from 0 to {}",
            ranks.saturating_sub(1)
        ));
    }
    let mut seen = HashSet::new();
    match members.iter().find(|member| !seen.insert(**member)) {
        Some(member) => refuse(format!("it has process {member} twice; name each process once")),
        None if !members.contains(&own) => {
            refuse(format!("it lacks this process, {own}; only the processes of a world ask for it"))
        }
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_processes_are_checked() {
        let problem = |members: &[u32]| check_members(members, 1, 4).err().map(|error| error.to_string());
        assert_eq!(problem(&[3, 1]), None);
        assert_eq!(problem(&[0, 1, 2, 3]), None);
        let begins = |members: &[u32], expected: &str| {
            let found = problem(members).unwrap_or_default();
            assert!(found.starts_with(expected), "{found}");
        };
        begins(
            &[1, 4],
            "the processes [1, 4] are not a world: there is no process 4; name processes from 0 to 3",
        );
        begins(&[1, 2, 1], "the processes [1, 2, 1] are not a world: it has process 1 twice");
        begins(&[0, 2], "the processes [0, 2] are not a world: it lacks this process, 1");
        begins(&[], "the processes [] are not a world: it lacks this process, 1");
    }
}
