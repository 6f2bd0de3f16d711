//! The two halves of an overlap, which run by turns: while one of them waits for the tokens of its experts,
//! the other computes.
//!
//! The forward runs on the rank's thread, and the backward on a thread of its own. A half runs only while it
//! has the turn. It gives the turn to the other half if messages that it needs have not arrived, and when it
//! ends. So the rank computes one thing at a time, with as many threads as without an overlap, and each half
//! does what it would do alone, in the same order. The bits of the results are the same.
//!
//! The messages of a half arrive while the other one computes. Nothing watches for them: a half looks for
//! them when it gets the turn.
//!
//! # Why it cannot block for ever
//!
//! The half that has the turn computes, or waits for a message. It waits only if the other half has ended, or
//! if both halves have missed messages since one of them computed. A message for either half ends the wait,
//! and then both look again. A message may also arrive between the looks of the two halves, and the half that
//! looks last takes it for the other one: then the wait ends at once (`wait_for_message`). The wait has the
//! deadline of any other wait. A half waits only for messages that the same half sends on the other replicas,
//! which send theirs before they wait. So each half ends as it would end alone.
//!
//! A half that computes takes no lock that the other half holds while it waits for its turn. Burn's autodiff
//! locks a graph for the whole backward, and tensors that descend from one leaf belong to one graph. So the
//! two halves must not have a leaf in common: each stage has leaves of its own (`Moved::new`), and the halves
//! of an overlap of a stage with itself run one after the other.
//!
//! If a half fails, the other one fails at its next exchange, or does not begin.

use std::any::Any;
use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use rayon::{ThreadPool, ThreadPoolBuilder};

use crate::ids::WorldRank;
use crate::memory::RankMemory;
use crate::message::Direction;
use crate::stage::StageError;

/// The threads of a rank's backwards in overlaps. They are started when the first such backward runs.
#[derive(Default)]
pub(super) struct BackwardThreads(Option<ThreadPool>);

impl BackwardThreads {
    /// Returns the threads, as many as the rank's own thread computes with. They count the memory of the
    /// rank.
    fn get(&mut self, rank: WorldRank, memory: &RankMemory) -> Result<&ThreadPool, StageError> {
        let pool = match self.0.take() {
            Some(pool) => pool,
            None => {
                let counted = memory.clone();
                let builder = ThreadPoolBuilder::new()
                    .num_threads(rayon::current_num_threads())
                    .thread_name(move |index| format!("rank-{rank}-backward-{index}"))
                    .start_handler(move |_| std::mem::forget(counted.count_this_thread()));
                builder.build().map_err(StageError::function)?
            }
        };
        Ok(self.0.insert(pool))
    }

    /// Runs two halves by turns, the forward first. Returns the spans in which each of them computed.
    ///
    /// # Errors
    /// The error of the half that failed first. If it panicked, the panic continues. The failure of the other
    /// half, which follows from it, is dropped.
    pub(super) fn run(
        &mut self,
        rank: WorldRank,
        memory: &RankMemory,
        forward: impl FnOnce() -> Result<(), StageError>,
        backward: impl FnOnce() -> Result<(), StageError> + Send,
    ) -> Result<Vec<ComputingSpan>, StageError> {
        let pool = self.get(rank, memory)?;
        let turns = Arc::new(Turns::default());
        let turn = |half| Turn { turns: turns.clone(), half };
        let (forward_turn, backward_turn) = (turn(Direction::Forward), turn(Direction::Backward));
        let (mut forward_outcome, mut backward_outcome) = (None, None);
        pool.in_place_scope(|scope| {
            scope.spawn(|_| backward_outcome = backward_turn.run(backward));
            forward_outcome = forward_turn.run(forward);
        });
        let mut state = turns.lock();
        let failed = match state.failed {
            None => return Ok(std::mem::take(&mut state.computed)),
            Some(Direction::Forward) => forward_outcome,
            Some(Direction::Backward) => backward_outcome,
        };
        drop(state);
        match failed.expect("the half that failed first has run") {
            Ok(outcome) => outcome.map(|()| Vec::new()),
            Err(panic) => resume_unwind(panic),
        }
    }
}

/// A time in which a half computed.
#[derive(Clone, Copy, Debug)]
pub(super) struct ComputingSpan {
    pub(super) half: Direction,
    pub(super) start: Instant,
    pub(super) end: Instant,
}

thread_local! {
    /// The half that this thread runs; `None` outside of overlaps that run by turns.
    static CURRENT: RefCell<Option<Turn>> = const { RefCell::new(None) };
}

/// A half, which computes while it has the turn.
#[derive(Clone)]
pub(super) struct Turn {
    turns: Arc<Turns>,
    pub(super) half: Direction,
}

/// The other half has failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct OtherFailed;

#[derive(Default)]
struct Turns {
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    /// The half that has the turn.
    running: Direction,
    /// The halves that have ended, by index.
    ended: [bool; 2],
    /// The halves that have looked for their messages, and missed some, since a half computed or a wait
    /// ended.
    has_missed: [bool; 2],
    /// The half that failed first.
    failed: Option<Direction>,
    /// The time since which the running half computes; `None` while it waits.
    computes_since: Option<Instant>,
    computed: Vec<ComputingSpan>,
}

impl Default for State {
    fn default() -> Self {
        Self {
            running: Direction::Forward,
            ended: [false; 2],
            has_missed: [false; 2],
            failed: None,
            computes_since: None,
            computed: Vec::new(),
        }
    }
}

impl Turns {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing panics under the lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Turn {
    /// Returns the half that the calling thread runs, if it runs by turns with another one.
    pub(super) fn current() -> Option<Self> {
        CURRENT.with_borrow(Clone::clone)
    }

    /// Gives the turn to the other half, because messages that this half needs have not arrived, and returns
    /// true when it gets the turn back. Returns false at once if the other half has ended or has missed
    /// messages too: then this half waits for a message, and calls [`Turn::message_arrived`] after it.
    pub(super) fn give_way(&self) -> Result<bool, OtherFailed> {
        let mut state = self.turns.lock();
        state.end_span(self.half);
        let [own, other] = [self.half, opposite(self.half)].map(index);
        state.has_missed[own] = true;
        if state.ended[other] || state.has_missed[other] {
            return Ok(false);
        }
        self.hand_over(&mut state);
        self.await_turn(state).map(|_| true)
    }

    /// Notes that a message has arrived, which either half may wait for.
    pub(super) fn message_arrived(&self) {
        self.turns.lock().has_missed = [false; 2];
    }

    /// Notes that the messages that this half needs have arrived, and that it computes again.
    pub(super) fn compute(&self) {
        self.turns.lock().compute();
    }

    /// Runs this half when it gets the turn. Returns `None` if the other half has failed before.
    fn run<T, E>(self, run: impl FnOnce() -> Result<T, E>) -> Option<std::thread::Result<Result<T, E>>> {
        match self.await_turn(self.turns.lock()) {
            Ok(mut state) => state.compute(),
            Err(OtherFailed) => return None,
        }
        CURRENT.set(Some(self.clone()));
        let outcome: Result<_, Box<dyn Any + Send>> = catch_unwind(AssertUnwindSafe(run));
        CURRENT.set(None);
        let mut state = self.turns.lock();
        state.end_span(self.half);
        state.ended[index(self.half)] = true;
        if !matches!(outcome, Ok(Ok(_))) {
            state.failed.get_or_insert(self.half);
        }
        self.hand_over(&mut state);
        Some(outcome)
    }

    fn hand_over(&self, state: &mut State) {
        state.running = opposite(self.half);
        self.turns.changed.notify_all();
    }

    /// Sleeps until this half has the turn. The other half computes, or waits with a deadline of its own.
    fn await_turn<'a>(&self, state: MutexGuard<'a, State>) -> Result<MutexGuard<'a, State>, OtherFailed> {
        let is_other = |state: &mut State| state.running != self.half;
        let state = self.turns.changed.wait_while(state, is_other).unwrap_or_else(PoisonError::into_inner);
        if state.failed.is_some() { Err(OtherFailed) } else { Ok(state) }
    }
}

impl State {
    /// Begins or continues the span in which the running half computes. Messages may arrive meanwhile, so
    /// both halves look for theirs before one of them waits.
    fn compute(&mut self) {
        self.has_missed = [false; 2];
        self.computes_since.get_or_insert_with(Instant::now);
    }

    /// Ends the span in which `half` computed.
    fn end_span(&mut self, half: Direction) {
        if let Some(start) = self.computes_since.take() {
            self.computed.push(ComputingSpan { half, start, end: Instant::now() });
        }
    }
}

fn opposite(half: Direction) -> Direction {
    match half {
        Direction::Forward => Direction::Backward,
        Direction::Backward => Direction::Forward,
    }
}

fn index(half: Direction) -> usize {
    match half {
        Direction::Forward => 0,
        Direction::Backward => 1,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::executor::shared_endpoint::SharedEndpoint;
    use crate::message::{Payload, Tag};
    use crate::transport::{Waited, World};

    /// Waits until `has_arrived`, as an exchange does. `wait` waits for a message.
    fn exchange(has_arrived: impl Fn() -> bool, wait: impl Fn()) -> Result<(), OtherFailed> {
        let turn = Turn::current().expect("a half runs");
        while !has_arrived() {
            if !turn.give_way()? {
                wait();
                turn.message_arrived();
            }
        }
        turn.compute();
        Ok(())
    }

    type Log = Mutex<Vec<&'static str>>;

    fn note(log: &Log, text: &'static str) {
        log.lock().expect("no panic").push(text);
    }

    /// Runs two halves that have a list of entries each.
    fn check(
        forward: impl FnOnce(&Log) -> Result<(), StageError>,
        backward: impl FnOnce(&Log) -> Result<(), StageError> + Send,
        expected: &[&str],
    ) -> Result<Vec<Direction>, String> {
        let log = Log::default();
        let mut threads = BackwardThreads::default();
        let (rank, memory) = (WorldRank::new(0), RankMemory::new());
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            threads.run(rank, &memory, || forward(&log), || backward(&log))
        }));
        assert_eq!(*log.lock().expect("no panic"), expected);
        match outcome {
            Ok(Ok(spans)) => {
                assert!(spans.is_sorted_by(|one, next| one.end <= next.start), "one half computes at a time");
                Ok(spans.into_iter().map(|span| span.half).collect())
            }
            Ok(Err(error)) => Err(error.to_string()),
            Err(panic) => Err(panic.downcast_ref::<&str>().copied().unwrap_or_default().to_owned()),
        }
    }

    #[test]
    fn a_half_computes_while_the_other_waits() {
        // The message of the forward arrives with the first wait, and the one of the backward with the
        // second.
        let waits = Mutex::new(0);
        let (count, more) = (|| *waits.lock().expect("no panic"), || *waits.lock().expect("no panic") += 1);
        let (count, more) = (&count, &more);
        use Direction::{Backward, Forward};
        let spans = check(
            |log| {
                note(log, "forward");
                exchange(|| count() > 0, more).expect("no failure");
                note(log, "forward goes on");
                Ok(())
            },
            |log| {
                note(log, "backward");
                exchange(|| count() > 1, more).expect("no failure");
                note(log, "backward goes on");
                Ok(())
            },
            &["forward", "backward", "forward goes on", "backward goes on"],
        );
        assert_eq!(spans, Ok(vec![Forward, Backward, Forward, Backward]));
    }

    /// The messages of the two halves, which a test sends while the halves look for them.
    struct Messages {
        receiver: SharedEndpoint,
        sender: SharedEndpoint,
    }

    impl Messages {
        fn new() -> Self {
            let mut endpoints = World::local(2).into_parts().0.into_iter().map(SharedEndpoint::new);
            let mut next = || endpoints.next().expect("two ranks");
            Self { receiver: next(), sender: next() }
        }

        fn tag(half: Direction) -> Tag {
            Tag::ExpertGroup { half: Some(half), round: 0 }
        }

        fn send(&self, half: Direction) {
            let payload = Payload::Bytes(Vec::new().into());
            self.sender.lock().send(WorldRank::new(0), Self::tag(half), payload);
        }

        fn has_arrived(&self, half: Direction) -> bool {
            self.receiver.lock().try_take(WorldRank::new(1), Self::tag(half)).is_some()
        }

        fn wait(&self) {
            let until = Instant::now() + Duration::from_secs(10);
            assert_eq!(self.receiver.lock().wait(until), Waited::Arrived);
        }
    }

    #[test]
    fn a_message_that_arrives_while_the_other_half_computes_ends_no_wait() {
        use Direction::{Backward, Forward};
        let messages = Messages::new();
        let no_wait = || unreachable!("the message of the forward has arrived");
        let spans = check(
            |log| {
                exchange(|| messages.has_arrived(Forward), no_wait).expect("no failure");
                note(log, "forward goes on");
                messages.send(Backward);
                Ok(())
            },
            |log| {
                note(log, "backward");
                messages.send(Forward);
                exchange(|| messages.has_arrived(Backward), no_wait).expect("no failure");
                Ok(())
            },
            &["backward", "forward goes on"],
        );
        assert_eq!(spans, Ok(vec![Forward, Backward, Forward, Backward]));
    }

    /// The message of the backward arrives between its own look and the look of the forward.
    #[test]
    fn a_message_that_the_other_half_takes_ends_the_wait() {
        use Direction::{Backward, Forward};
        let messages = Messages::new();
        let looks = Mutex::new(0);
        let spans = check(
            |log| {
                let has_arrived = || {
                    let mut looks = looks.lock().expect("no panic");
                    *looks += 1;
                    if *looks == 2 {
                        messages.send(Backward);
                    }
                    messages.has_arrived(Forward)
                };
                exchange(has_arrived, || messages.wait()).expect("no failure");
                note(log, "forward goes on");
                Ok(())
            },
            |log| {
                exchange(|| messages.has_arrived(Backward), || messages.wait()).expect("no failure");
                note(log, "backward goes on");
                messages.send(Forward);
                Ok(())
            },
            &["backward goes on", "forward goes on"],
        );
        assert_eq!(spans, Ok(vec![Forward, Backward, Backward, Forward]));
    }

    #[test]
    fn halves_that_never_wait_run_one_after_the_other() {
        let half = |text| {
            move |log: &Log| {
                exchange(|| true, || unreachable!("the messages have arrived")).expect("no failure");
                note(log, text);
                Ok(())
            }
        };
        let spans = check(half("forward"), half("backward"), &["forward", "backward"]);
        assert_eq!(spans, Ok(vec![Direction::Forward, Direction::Backward]));
    }

    #[test]
    fn a_failure_of_one_half_ends_the_other() {
        let never = |log: &Log| {
            let failed = exchange(|| false, || unreachable!("the other half fails first"));
            assert_eq!(failed, Err(OtherFailed));
            note(log, "ended");
            Err(StageError::function("the other half has failed"))
        };
        let fails = |_: &Log| Err(StageError::function("out of cheese"));
        let panics = |_: &Log| panic!("no cheese");
        let found = check(never, fails, &["ended"]).expect_err("it fails");
        assert!(found.contains("out of cheese"), "{found}");
        assert_eq!(check(never, panics, &["ended"]), Err("no cheese".to_owned()));
        // The backward does not begin.
        let found = check(fails, never, &[]).expect_err("it fails");
        assert!(found.contains("out of cheese"), "{found}");
        let waits = |log: &Log| {
            let has_arrived = || log.lock().expect("no panic").len() > 1;
            exchange(has_arrived, || note(log, "arrived for the backward")).map_err(|OtherFailed| {
                note(log, "ended");
                StageError::function("the other half has failed")
            })
        };
        let fails_later = |log: &Log| {
            let has_arrived = || !log.lock().expect("no panic").is_empty();
            exchange(has_arrived, || unreachable!("the forward waits")).expect("no failure");
            Err(StageError::function("out of cheese"))
        };
        let found = check(waits, fails_later, &["arrived for the backward", "ended"]).expect_err("it fails");
        assert!(found.contains("out of cheese"), "{found}");
    }
}
