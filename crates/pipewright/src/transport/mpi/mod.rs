//! Ranks as processes, over whatever MPI is installed.
//!
//! A process has one rank. Its [`MpiEndpoint`] is a mailbox as in the local transport, and a thread of its own, the
//! *office*, moves letters between the mailbox and MPI while the rank computes. `README.md` beside this file states the
//! protocol, and why it cannot deadlock.

mod beats;
mod calls;
mod neighbours;
mod office;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender};
use pipewright_schedule::Rank;

use self::beats::Beats;
use self::calls::Calls;
pub use self::calls::MpiError;
use self::neighbours::Neighbours;
use self::office::{Counter, Errand, Office};
use super::Waited;
use super::local::{LocalEndpoint, Post};
use super::message::{Message, Payload, Tag};
use super::wire::{self, Letter};
use crate::failure::{Abort, StepError};
use crate::progress::Board;

/// This process's rank among those that `mpirun` started.
pub struct MpiEndpoint {
    inner: LocalEndpoint,
    errands: Sender<Errand>,
    counter: Arc<Counter>,
    office: Option<JoinHandle<()>>,
}

/// What the office says once it has joined.
type Joined = Result<(MpiEndpoint, Board), MpiError>;

/// Joins MPI; returns this process's rank once all processes have joined.
///
/// # Errors
/// When MPI cannot be joined within the deadline.
pub(super) fn world(deadline: Duration) -> Joined {
    let (errands, orders) = crossbeam_channel::unbounded();
    let (sender, joined) = crossbeam_channel::bounded(1);
    let work = move || join(deadline, errands, orders, &sender);
    let office = std::thread::Builder::new().name("mpi".to_owned()).spawn(work);
    let office = office.map_err(|error| MpiError::Thread { message: error.to_string() })?;
    let late = |_| MpiError::Thread { message: format!("MPI_Init did not return within {deadline:?}") };
    let (mut endpoint, board) = joined.recv_timeout(deadline).map_err(late)??;
    endpoint.office = Some(office);
    Ok((endpoint, board))
}

/// The office's life: it joins, says so, and works.
fn join(deadline: Duration, errands: Sender<Errand>, orders: Receiver<Errand>, joined: &Sender<Joined>) {
    let calls = match Calls::init() {
        Ok(calls) => calls,
        // Nobody waits any more when the deadline has passed.
        Err(error) => return joined.send(Err(error)).unwrap_or_default(),
    };
    let (rank, ranks) = (calls.rank(), calls.ranks());
    let (post, board, counter) = (Post::new(ranks), Board::new(ranks), Arc::new(Counter::default()));
    let fail = errands.clone();
    post.abort().on_raise(move |error, attempt, diverged| {
        let _ = fail.send(Errand::Fail(error.clone(), attempt, diverged));
    });
    let inner = LocalEndpoint::new(rank, post.clone());
    let endpoint = MpiEndpoint { inner, errands, counter: counter.clone(), office: None };
    let office = Office {
        beats: Beats::new(rank, ranks, deadline, Instant::now()),
        neighbours: Neighbours::new(),
        ended: None,
        calls,
        errands: orders,
        post,
        board: board.clone(),
        counter,
        deadline,
        sending: Vec::new(),
        receiving: Vec::new(),
    };
    if joined.send(Ok((endpoint, board))).is_ok() {
        office.run();
    }
}

impl MpiEndpoint {
    pub(crate) fn rank(&self) -> Rank {
        self.inner.rank()
    }

    pub(crate) fn ranks(&self) -> u32 {
        self.inner.ranks()
    }

    pub(crate) fn abort(&self) -> &Abort {
        self.inner.abort()
    }

    pub(crate) fn begin_step(&mut self, step: u64) {
        self.inner.begin_step(step);
    }

    pub(crate) fn send(&mut self, to: Rank, tag: Tag, payload: Payload) {
        if to == self.rank() {
            return self.inner.send(to, tag, payload);
        }
        let mut letter = self.counter.buffer();
        wire::encode(Letter::Message(self.inner.envelope(tag, payload)), &mut letter);
        // An office that is gone has failed, and has raised the abort flag.
        let _ = self.errands.send(Errand::Send(to, letter));
    }

    pub(crate) fn try_take(&mut self, from: Rank, tag: Tag) -> Option<Message> {
        self.inner.try_take(from, tag)
    }

    pub(crate) fn wait(&mut self, until: Instant) -> Waited {
        self.counter.waits.store(true, Ordering::Relaxed);
        let waited = self.inner.wait(until);
        self.counter.waits.store(false, Ordering::Relaxed);
        waited
    }

    /// How much later than the deadline it is known which rank has fallen silent.
    pub(crate) fn latest_news(&self, deadline: Duration) -> Duration {
        beats::latest_news(self.ranks(), deadline)
    }

    pub(crate) fn set_deadline(&self, deadline: Duration) {
        let _ = self.errands.send(Errand::SetDeadline(deadline));
    }

    pub(crate) fn fail(&self, error: StepError) {
        self.inner.fail(error);
    }
}

impl Drop for MpiEndpoint {
    /// Leaves MPI with the others; waits for them as long as they give signs of life.
    fn drop(&mut self) {
        let _ = self.errands.send(Errand::Leave);
        if let Some(office) = self.office.take() {
            let _ = office.join();
        }
    }
}
