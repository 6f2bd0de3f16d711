//! Runs the ranks of a replay that compute together: each on a thread, until all are done or wait for messages of other ranks.
//!
//! The caller's thread passes on the messages among these ranks. They are stuck when each of them is done or waits for a message
//! that has not been sent, and no message is under way: what such a rank waits for must come from outside. The threads then end.

use std::collections::{BTreeMap, HashSet};
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

/// The results of replayed ranks.
#[derive(Default)]
pub(super) struct Replayed {
    /// The hashes before the step, of the ranks that have hashed their state.
    pub(super) before: BTreeMap<WorldRank, StageLeaves>,
    /// The messages that were sent to ranks outside of the group.
    pub(super) sent: Vec<(Key, Message)>,
    /// The messages that ranks wait for, if the ranks are stuck.
    pub(super) awaited: Vec<(WorldRank, Attempt, AwaitedMessage)>,
    /// The reports of the ranks that are done, unless they have only computed batches.
    pub(super) reports: Vec<RankReport>,
}

/// A rank's thread, as the others see it.
struct ReplayThread {
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
        let thread_of = |(endpoint, _): &(Endpoint, _)| ReplayThread {
            rank: endpoint.rank(),
            attempt: AtomicU64::default(),
        };
        let group: Vec<ReplayThread> = ranks.iter().map(thread_of).collect();
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
            for (parts, own) in ranks.into_iter().zip(&group) {
                let (compute, rank, attempt) = (&compute, own.rank, &own.attempt);
                threads.push(scope.spawn(move || {
                    let failure = |cause| StepError { rank, step, action: None, cause };
                    let done = caught(|| compute(parts, attempt)).unwrap_or_else(|cause| Err(failure(cause)));
                    done.inspect_err(|error| setup.abort.raise(error.clone()))
                }));
            }
            let (mut replayed, mut passed) = (Replayed::default(), HashSet::new());
            while threads.iter().any(|thread| !thread.is_finished()) {
                let has_moved = pass_on(in_flight, &group, &mut passed, &mut replayed.sent);
                let is_arrived = |key: &Key| is_known(key) || passed.contains(key);
                let running = threads.iter().zip(&group).filter(|(thread, _)| !thread.is_finished());
                let waits = running.map(|(_, own)| own.awaited(setup, is_arrived));
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
            pass_on(in_flight, &group, &mut passed, &mut replayed.sent);
            replayed.before = std::mem::take(&mut *before.lock().unwrap_or_else(PoisonError::into_inner));
            failed.map_or(Ok(replayed), |error| Err(error.into()))
        })
    }
}

impl ReplayThread {
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

/// Delivers the messages that are for the ranks of the group, and adds them to `passed`. The others are `sent`. Returns whether
/// there were messages.
fn pass_on(
    in_flight: &InFlight,
    group: &[ReplayThread],
    passed: &mut HashSet<Key>,
    sent: &mut Vec<(Key, Message)>,
) -> bool {
    let messages = in_flight.take_all();
    let has_sent = !messages.is_empty();
    for (to, message) in messages {
        let key = (to, message.attempt, message.from, message.tag);
        if group.iter().any(|own| own.rank == to) {
            passed.insert(key);
            in_flight.deliver(to, message);
        } else {
            sent.push((key, message));
        }
    }
    has_sent
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::Payload;
    use crate::transport::World;

    #[test]
    fn only_messages_that_leave_the_group_are_kept() {
        let (world, in_flight) = World::controlled(3);
        let mut endpoints = world.into_endpoints();
        let [first, second, outside] = [0, 1, 2].map(WorldRank::new);
        let group = [first, second].map(|rank| ReplayThread { rank, attempt: AtomicU64::default() });
        let (mut passed, mut sent) = (HashSet::new(), Vec::new());
        assert!(!pass_on(&in_flight, &group, &mut passed, &mut sent));
        endpoints.iter_mut().for_each(|endpoint| endpoint.begin_step(Attempt::default()));
        for to in [second, outside] {
            endpoints[0].send(to, Tag::Parameters, Payload::of(&0u32));
        }
        assert!(pass_on(&in_flight, &group, &mut passed, &mut sent));
        assert!(endpoints[1].try_take(first, Tag::Parameters).is_some(), "it is delivered");
        let key = |to| (to, Attempt::default(), first, Tag::Parameters);
        assert_eq!(passed, HashSet::from([key(second)]));
        assert_eq!(sent.iter().map(|(key, _)| *key).collect::<Vec<_>>(), [key(outside)]);
    }
}
