//! Runs the ranks of a replay that compute together: each on a thread, until all are done or wait for messages of other ranks.
//!
//! The caller's thread passes on the messages among these ranks. They are stuck when each of them is done or waits for a message
//! that has not been sent, and no message is under way: what such a rank waits for must come from outside. The threads then end.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use pipewright_schedule::StageIndex;

use super::error::PipelineError;
use super::setup::Setup;
use crate::checkpoint::{Checkpoint, StageLeaves};
use crate::driver::{caught, run};
use crate::executor::{RankReport, StepInput};
use crate::failure::{Cause, StepError};
use crate::ids::{Attempt, StepNumber, WorldRank};
use crate::memory::RankMemory;
use crate::message::{AwaitedMessage, Message, Tag};
use crate::nn::TensorParallel;
use crate::progress::Activity;
use crate::stage::Stage;
use crate::transport::{Endpoint, InFlight};

/// The receiver, the attempt, the sender and the purpose of a message.
pub(super) type Key = (WorldRank, Attempt, WorldRank, Tag);

/// The time between two looks at the ranks.
const PAUSE: Duration = Duration::from_micros(100);

/// Ranks that compute together, before they have begun.
pub(super) struct ReplayedRanks<'a, F> {
    pub(super) setup: &'a Setup,
    pub(super) in_flight: &'a InFlight,
    /// The rank's endpoint, and the batches that it computes.
    pub(super) ranks: Vec<(Endpoint, Vec<StepInput>)>,
    pub(super) step: StepNumber,
    /// The microbatches of the batches before these, on each replica.
    pub(super) skipped: u32,
    pub(super) make: &'a F,
    pub(super) checkpoint: Option<&'a Checkpoint>,
    /// Whether they hash their state before the step.
    pub(super) hashes: bool,
}

/// What replayed ranks have done.
#[derive(Default)]
pub(super) struct Replayed {
    /// The hashes before the step, of the ranks that have hashed their state.
    pub(super) before: BTreeMap<WorldRank, StageLeaves>,
    /// The messages that were sent.
    pub(super) sent: Vec<(Key, Message)>,
    /// The messages that ranks wait for, if the ranks are stuck.
    pub(super) awaited: Vec<(WorldRank, Attempt, AwaitedMessage)>,
    /// The reports of the ranks that are done, unless they have only computed batches.
    pub(super) reports: Vec<RankReport>,
}

/// A rank's thread, as the others see it.
struct Watched {
    rank: WorldRank,
    attempt: AtomicU64,
}

impl<F, E> ReplayedRanks<'_, F>
where
    F: Fn(StageIndex, &TensorParallel) -> Result<Stage, E> + Sync,
    E: Display,
{
    /// Runs the ranks. `is_known` returns whether a message has been delivered to one of them before.
    pub(super) fn run(self, is_known: impl Fn(&Key) -> bool) -> Result<Replayed, PipelineError> {
        let Self { setup, in_flight, ranks, step, skipped, make, checkpoint, hashes } = self;
        let watch =
            |(endpoint, _): &(Endpoint, _)| Watched { rank: endpoint.rank(), attempt: AtomicU64::default() };
        let watched: Vec<Watched> = ranks.iter().map(watch).collect();
        let (unbuilt, before) = (AtomicUsize::new(ranks.len()), Mutex::new(BTreeMap::new()));
        let compute = |(endpoint, inputs): (Endpoint, Vec<StepInput>), attempt: &AtomicU64| {
            let rank = endpoint.rank();
            let failure = |cause| StepError { rank, step, action: None, cause };
            let mut executor =
                setup.build(endpoint, RankMemory::new(), &|stage, tensor: &TensorParallel| {
                    make(stage, tensor)
                })?;
            if unbuilt.fetch_sub(1, Ordering::SeqCst) == 1 {
                setup.end_launch();
            }
            executor.begin_finding_shared(Attempt::default());
            run(&mut executor)?;
            if let Some(checkpoint) = checkpoint {
                executor.restore(checkpoint, false).map_err(failure)?;
            }
            if hashes {
                let leaves = executor.fingerprint().map_err(failure)?;
                before.lock().unwrap_or_else(PoisonError::into_inner).insert(rank, leaves);
            }
            executor.skip_microbatches(skipped);
            for input in inputs {
                // In this order: an awaited message belongs to the attempt that is seen before and after it.
                setup.board.set_activity(rank, Activity::Computes);
                attempt.store(input.attempt.get(), Ordering::SeqCst);
                executor.begin(input);
                run(&mut executor)?;
            }
            Ok(executor.take_outcome().reports)
        };
        let stopped = |rank| StepError { rank, step, action: None, cause: Cause::Aborted { first: rank } };
        thread::scope(|scope| {
            let mut threads = Vec::new();
            for (parts, watched) in ranks.into_iter().zip(&watched) {
                let (compute, rank, attempt) = (&compute, watched.rank, &watched.attempt);
                threads.push(scope.spawn(move || {
                    let failure = |cause| StepError { rank, step, action: None, cause };
                    let done = caught(|| compute(parts, attempt)).unwrap_or_else(|cause| Err(failure(cause)));
                    done.inspect_err(|error| setup.abort.raise(error.clone()))
                }));
            }
            let mut replayed = Replayed::default();
            while threads.iter().any(|thread| !thread.is_finished()) {
                let has_moved = pass_on(in_flight, &watched, &mut replayed.sent);
                let is_arrived =
                    |key: &Key| is_known(key) || replayed.sent.iter().any(|(sent, _)| sent == key);
                let running = threads.iter().zip(&watched).filter(|(thread, _)| !thread.is_finished());
                let waits = running.map(|(_, watched)| watched.awaited(setup, is_arrived));
                if let Some(awaited) = waits.collect::<Option<Vec<_>>>()
                    && let Some((rank, ..)) = awaited.first()
                    && !has_moved
                    && in_flight.is_empty()
                {
                    setup.abort.raise(stopped(*rank));
                    replayed.awaited = awaited;
                    break;
                }
                thread::sleep(PAUSE);
            }
            let mut failed = None;
            for thread in threads {
                match thread.join().expect("panics are caught") {
                    Ok(reports) => replayed.reports.extend(reports),
                    Err(StepError { cause: Cause::Aborted { .. }, .. }) => {}
                    Err(error) => failed = failed.or(Some(error)),
                }
            }
            pass_on(in_flight, &watched, &mut replayed.sent);
            replayed.before = std::mem::take(&mut *before.lock().unwrap_or_else(PoisonError::into_inner));
            failed.map_or(Ok(replayed), |error| Err(error.into()))
        })
    }
}

impl Watched {
    /// Returns the message that the rank waits for; `None` if it computes or the message has arrived.
    fn awaited(
        &self,
        setup: &Setup,
        is_arrived: impl Fn(&Key) -> bool,
    ) -> Option<(WorldRank, Attempt, AwaitedMessage)> {
        let attempt = self.attempt.load(Ordering::SeqCst);
        let awaited = setup.board.awaited_by(self.rank)?;
        let is_current = self.attempt.load(Ordering::SeqCst) == attempt;
        let attempt = Attempt::new(attempt);
        let arrived = is_arrived(&(self.rank, attempt, awaited.from, awaited.tag));
        (is_current && !arrived).then_some((self.rank, attempt, awaited))
    }
}

/// Delivers the messages that are for the ranks of the group. Returns whether messages were sent.
fn pass_on(in_flight: &InFlight, group: &[Watched], sent: &mut Vec<(Key, Message)>) -> bool {
    let messages = in_flight.take_all();
    let has_sent = !messages.is_empty();
    for (to, message) in messages {
        sent.push(((to, message.attempt, message.from, message.tag), message.clone()));
        if group.iter().any(|watched| watched.rank == to) {
            in_flight.deliver(to, message);
        }
    }
    has_sent
}
