//! One thread per rank: it polls the rank's executor, sleeps while the executor waits, and watches the
//! deadline.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;

use crossbeam_channel::{Receiver, Sender};
use pipewright_schedule::Event;

use crate::batch::StepForm;
use crate::checkpoint::{Checkpoint, RankState};
use crate::executor::{
    Agreement, Executor, Follow, NamedParameter, OpenReport, Outcome, OverlapPoll, OverlapRule, Poll,
    RankReport, StageChange, StepInput, Visited,
};
use crate::failure::{Abort, Cause, StepError};
use crate::ids::{Attempt, StepNumber, WorldRank};
use crate::memory::RankMemory;
use crate::progress::ProgressBoard;
use crate::stage::{RestoredPaths, Visit};
use crate::step_gate::Gate;
use crate::verification::Difference;

/// A request to a rank's thread. A command that is answered carries the channel for its answer.
pub(crate) enum Command {
    /// Finds out which parameters stages share, before the first step and after a change of a module.
    FindShared {
        attempt: Attempt,
        reply: Reply<Result<(), StepError>>,
    },
    /// Compares what the processes know of a step.
    Agree {
        step: StepNumber,
        attempt: Attempt,
        form: Arc<StepForm>,
        reply: Reply<Result<Agreement, StepError>>,
    },
    Step {
        input: Box<StepInput>,
        /// The rank does not begin the step if the gate is closed.
        gate: Option<Gate>,
        reply: Reply<StepReply>,
    },
    /// Between processes, the step after one that runs. The rank begins it only if a gradient norm says that all ranks have the
    /// same batch.
    NextStep {
        input: Box<StepInput>,
        reply: Reply<StepReply>,
    },
    /// Collects the whole parameters, under this attempt number.
    Parameters {
        attempt: Attempt,
        reply: Reply<Result<Vec<NamedParameter>, StepError>>,
    },
    /// Visits the modules of all stages, under this attempt number.
    Visit {
        attempt: Attempt,
        visit: Visit,
        reply: Reply<Result<Visited, StepError>>,
    },
    /// Passes the bytes of the first rank to all, under this attempt number.
    Share {
        attempt: Attempt,
        own: Arc<[u8]>,
        reply: Reply<Result<Arc<[u8]>, StepError>>,
    },
    /// Moves layers between stages, under this attempt number.
    Move {
        attempt: Attempt,
        change: Arc<StageChange>,
        reply: Reply<Result<(), StepError>>,
    },
    State {
        reply: Reply<Result<Box<RankState>, StepError>>,
    },
    Restore {
        checkpoint: Arc<Checkpoint>,
        /// Whether parameters that the checkpoint does not have keep their values.
        may_miss: bool,
        reply: Reply<Result<RestoredPaths, StepError>>,
    },
    /// Drops the gradients that wait for an update.
    Reset,
}

/// A rank's answer to a step.
pub(crate) struct StepReply {
    /// The rank's report, and across processes the reports of all other ranks.
    pub outcome: Result<Vec<RankReport>, StepError>,
    /// Whether the rank has begun to update its parameters.
    pub has_updated: bool,
    /// Present if the step failed.
    pub failed: Option<FailedRank>,
    /// The rank's report if the rank begins the next step, and its process exchanges the reports.
    pub open: Option<OpenReport>,
    /// Between processes, the last batch that all of them have, as far as the rank knows.
    pub granted: Attempt,
    /// Whether the rank has begun the step before it had updated with the one before.
    pub overlaps: bool,
}

impl StepReply {
    /// Returns the answer of a rank that does not begin the step.
    fn not_begun() -> Self {
        Self::without_reports(Ok(Vec::new()))
    }

    /// Returns the answer of a rank that has done nothing that counts.
    fn without_reports(outcome: Result<Vec<RankReport>, StepError>) -> Self {
        let granted = Attempt::default();
        Self { outcome, has_updated: false, failed: None, open: None, granted, overlaps: false }
    }
}

/// The data of one rank about a failed step.
pub(crate) struct FailedRank {
    pub rank: WorldRank,
    /// The number of its actions that the rank had done.
    pub position: usize,
    /// The progress of all ranks when this rank failed; `None` if it stopped because another had failed.
    pub report: Option<String>,
    /// The actions of the rank until the failure.
    pub events: Vec<Event>,
    /// The first result that differs, if the step was a repetition whose bits are confirmed.
    pub difference: Option<Difference>,
}

impl FailedRank {
    fn new(executor: &mut Executor, error: &StepError) -> Self {
        let is_own = !matches!(error.cause, Cause::Aborted { .. });
        let report = is_own.then(|| executor.progress_report());
        let (rank, position) = (executor.world_rank(), executor.position());
        let difference = executor.take_difference();
        Self { rank, position, report, events: executor.failed_events(is_own), difference }
    }
}

/// The channel for one rank's answer to one command. All ranks answer a command on one channel.
pub(crate) struct Reply<T> {
    rank: WorldRank,
    sender: Sender<(WorldRank, T)>,
}

impl<T> Reply<T> {
    pub(crate) fn new(rank: WorldRank, sender: Sender<(WorldRank, T)>) -> Self {
        Self { rank, sender }
    }

    /// Answers the command.
    fn send(self, answer: T) {
        // If the pipeline was dropped or treats this rank as failed, the answer has no receiver.
        let _ = self.sender.send((self.rank, answer));
    }
}

/// The handle of a running rank. Dropping it ends the thread after the commands that it has.
pub(crate) struct RankThread {
    pub(crate) rank: WorldRank,
    pub(crate) commands: Sender<Command>,
    pub(crate) handle: JoinHandle<()>,
}

/// The data with which a rank's thread starts. The executor is built on that thread, so that a stage's
/// parameters are allocated and counted on the rank that uses them.
pub(crate) struct RankStart<B> {
    pub rank: WorldRank,
    /// The threads of the rank's tensor operations.
    pub threads: usize,
    pub board: ProgressBoard,
    pub abort: Abort,
    pub memory: RankMemory,
    pub build: B,
    /// Reports that the rank is built, or why it cannot be built.
    pub ready: Reply<Result<(), StepError>>,
}

impl RankThread {
    /// Starts a rank.
    ///
    /// # Errors
    /// When the system cannot start a thread.
    pub(crate) fn start<B>(start: RankStart<B>) -> std::io::Result<Self>
    where
        B: FnOnce(RankMemory) -> Result<Executor, StepError> + Send + 'static,
    {
        let (commands, inbox) = crossbeam_channel::unbounded();
        let rank = start.rank;
        let name = format!("rank-{rank}");
        let handle = std::thread::Builder::new().name(name).spawn(move || start.run(&inbox))?;
        Ok(Self { rank, commands, handle })
    }
}

impl<B> RankStart<B>
where
    B: FnOnce(RankMemory) -> Result<Executor, StepError>,
{
    fn run(self, inbox: &Receiver<Command>) {
        let Self { rank, threads, board, abort, memory, build, ready } = self;
        memory.locate_by(move || board.locate(rank));
        // The rank has its own pool, so that its tensor operations use this number of threads and no others.
        let counted = memory.clone();
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .use_current_thread()
            .thread_name(move |index| format!("rank-{rank}-{index}"))
            .start_handler(move |_| std::mem::forget(counted.count_this_thread()))
            .build();
        let _counted = memory.count_this_thread();
        let failure = |cause| StepError { rank, step: StepNumber::default(), action: None, cause };
        let built = match &pool {
            Ok(_) => caught(|| build(memory)).unwrap_or_else(|cause| Err(failure(cause))),
            Err(error) => Err(failure(Cause::Build { message: format!("no thread pool: {error}") })),
        };
        let mut executor = match built {
            Ok(executor) => {
                ready.send(Ok(()));
                executor
            }
            Err(error) => {
                // Other processes wait for this rank.
                abort.raise(error.clone());
                ready.send(Err(error));
                return;
            }
        };
        // The channel closes when the pipeline is dropped.
        let mut next = None;
        while let Some(command) = next.take().or_else(|| inbox.recv().ok()) {
            next = execute(&mut executor, command, inbox);
        }
    }
}

/// Executes a command and answers it. A step may continue with the steps in `inbox` that overlap. Returns a command that follows
/// at once.
fn execute(executor: &mut Executor, command: Command, inbox: &Receiver<Command>) -> Option<Command> {
    let rank = executor.world_rank();
    let failure = |cause| StepError { rank, step: StepNumber::default(), action: None, cause };
    match command {
        Command::FindShared { attempt, reply } => reply.send(find_shared(executor, attempt)),
        Command::Agree { step, attempt, form, reply } => {
            executor.begin_agreeing(step, attempt, (*form).clone());
            let agreed = run_or_reset(executor).map(|()| executor.take_outcome().agreed);
            reply.send(agreed.map(|agreed| agreed.expect("ranks that have compared batches agree or not")));
        }
        Command::NextStep { input, reply } if input.attempt > executor.granted() => {
            reply.send(StepReply::not_begun());
        }
        Command::Step { gate: Some(gate), reply, .. } if !gate.is_open() => {
            reply.send(StepReply::not_begun());
        }
        Command::Step { input, reply, .. } | Command::NextStep { input, reply }
            if input.overlap.is_some() =>
        {
            return OverlappingSteps::run(executor, input, reply, inbox);
        }
        Command::Step { input, reply, .. } | Command::NextStep { input, reply } => {
            reply.send(step(executor, *input));
        }
        Command::Parameters { attempt, reply } => {
            executor.begin_collecting(attempt, None);
            reply.send(run_or_reset(executor).map(|()| executor.take_outcome().parameters));
        }
        Command::Visit { attempt, visit, reply } => {
            executor.begin_collecting(attempt, Some(visit));
            reply.send(run_or_reset(executor).map(|()| executor.take_outcome().visited));
        }
        Command::Share { attempt, own, reply } => {
            executor.begin_sharing(attempt, own);
            let shared = run_or_reset(executor).map(|()| executor.take_outcome().shared);
            reply.send(shared.map(|shared| shared.expect("the phase ends with the bytes")));
        }
        Command::Move { attempt, change, reply } => reply.send(move_layers(executor, attempt, change)),
        Command::State { reply } => {
            reply.send(caught(|| Box::new(executor.state())).map_err(failure));
        }
        Command::Restore { checkpoint, may_miss, reply } => {
            let restored = caught(|| executor.restore(&*checkpoint, may_miss)).unwrap_or_else(Err);
            reply.send(restored.map_err(failure));
        }
        Command::Reset => executor.reset(),
    }
    None
}

/// Runs one step to its end.
fn step(executor: &mut Executor, input: StepInput) -> StepReply {
    executor.begin(input);
    let outcome = run(executor);
    let has_updated = executor.has_updated();
    let failed = outcome.as_ref().err().map(|error| FailedRank::new(executor, error));
    let outcome = reset_after(executor, outcome).map(|()| executor.take_outcome());
    let (outcome, open) = match outcome {
        Ok(Outcome { reports, open, .. }) => (Ok(reports), open),
        Err(error) => (Err(error), None),
    };
    StepReply { outcome, has_updated, failed, open, granted: executor.granted(), overlaps: false }
}

/// The answer to a step that has ended.
fn ended(executor: &mut Executor, overlaps: bool) -> StepReply {
    let (has_updated, granted) = (executor.has_updated(), executor.granted());
    let Outcome { reports, open, .. } = executor.take_outcome();
    StepReply { outcome: Ok(reports), has_updated, failed: None, open, granted, overlaps }
}

/// A step of a rank that runs.
struct BegunStep {
    step: StepNumber,
    /// Whether it has begun before this rank, or one whose row mixes two batches, had updated with the one before.
    overlaps: bool,
    reply: Reply<StepReply>,
}

/// The steps of a rank that overlap, in order, which it has not answered.
struct OverlappingSteps<'a> {
    executor: &'a mut Executor,
    inbox: &'a Receiver<Command>,
    begun: VecDeque<BegunStep>,
    /// Whether a step follows the last one.
    follow: Follow,
    /// A command of another kind, which follows at once.
    other: Option<Command>,
}

impl<'a> OverlappingSteps<'a> {
    /// Runs a step and the steps that follow it without a drain, and answers each.
    fn run(
        executor: &'a mut Executor,
        input: Box<StepInput>,
        reply: Reply<StepReply>,
        inbox: &'a Receiver<Command>,
    ) -> Option<Command> {
        let OverlapRule { row, follow, .. } = input.overlap.clone()?;
        let begun = VecDeque::from([BegunStep { step: input.step, overlaps: false, reply }]);
        executor.begin_overlap(*input, row);
        let mut steps = Self { executor, inbox, begun, follow, other: None };
        loop {
            match steps.poll() {
                Ok(OverlapPoll::Progress | OverlapPoll::Pending) => {}
                Ok(OverlapPoll::Asks) => steps.take_next(),
                Ok(OverlapPoll::Ended) => {
                    if let Some(BegunStep { overlaps, reply, .. }) = steps.begun.pop_front() {
                        reply.send(ended(steps.executor, overlaps));
                    }
                }
                Ok(OverlapPoll::Done) => return steps.other,
                Err(error) => {
                    if !steps.fail(error) {
                        return steps.other;
                    }
                }
            }
        }
    }

    /// Polls the executor, and sleeps if it waits. A panic becomes an error.
    fn poll(&mut self) -> Result<OverlapPoll, StepError> {
        let polled = caught(|| self.executor.poll_overlap());
        let polled = polled.unwrap_or_else(|cause| Err(self.executor.error_of_overlap(cause)))?;
        if polled == OverlapPoll::Pending {
            self.executor.wait_overlap()?;
        }
        Ok(polled)
    }

    /// Takes the next step, if one follows. Within one process, the pipeline has announced it before it sends it to the ranks.
    /// Between processes, all ranks have it.
    fn take_next(&mut self) {
        let follows = self.executor.has_next() || self.follow.decide();
        let next = if follows { self.inbox.recv_timeout(self.executor.deadline()).ok() } else { None };
        let next = match next {
            Some(Command::Step { gate: Some(gate), reply, .. }) if !gate.is_open() => {
                reply.send(StepReply::not_begun());
                None
            }
            Some(Command::Step { input, reply, .. } | Command::NextStep { input, reply })
                if input.overlap.is_some() =>
            {
                let rule = input.overlap.as_ref();
                let overlaps = !self.begun.is_empty() || rule.is_some_and(|rule| rule.is_mixed);
                self.follow = rule.map(|rule| rule.follow.clone()).unwrap_or_default();
                self.begun.push_back(BegunStep { step: input.step, overlaps, reply });
                Some(input)
            }
            other => {
                self.other = other;
                None
            }
        };
        self.executor.give_next(next);
    }

    /// Answers a step that has failed. Returns whether an earlier one continues; otherwise the later one has failed too.
    fn fail(&mut self, error: StepError) -> bool {
        self.executor.fail(error.clone());
        let (rank, has_updated) = (self.executor.world_rank(), self.executor.has_updated());
        let failed = FailedRank::new(self.executor, &error);
        let continues = self.executor.drop_later();
        let reply = if continues { self.begun.pop_back() } else { self.begun.pop_front() };
        if let Some(BegunStep { reply, .. }) = reply {
            let answer = StepReply::without_reports(Err(error));
            reply.send(StepReply { has_updated, failed: Some(failed), ..answer });
        }
        if !continues {
            self.executor.reset();
            for BegunStep { step, reply, .. } in self.begun.drain(..) {
                let error = StepError { rank, step, action: None, cause: Cause::Aborted { first: rank } };
                let failed =
                    FailedRank { rank, position: 0, report: None, events: Vec::new(), difference: None };
                let answer = StepReply::without_reports(Err(error));
                reply.send(StepReply { failed: Some(failed), ..answer });
            }
        }
        continues
    }
}

/// Finds out which parameters stages share. A failure is raised for all ranks.
fn find_shared(executor: &mut Executor, attempt: Attempt) -> Result<(), StepError> {
    // A back end may report here that it failed to make the parameters, which a list of them reads.
    let begun = caught(|| executor.begin_finding_shared(attempt)).map_err(|cause| executor.error(cause));
    begun.and_then(|()| run(executor)).inspect_err(|error| executor.fail(error.clone()))
}

/// Moves layers between stages. A failure is raised for all ranks.
fn move_layers(executor: &mut Executor, attempt: Attempt, change: Arc<StageChange>) -> Result<(), StepError> {
    let begun = caught(|| executor.begin_moving(attempt, change)).and_then(|begun| begun);
    let begun = begun.map_err(|cause| executor.error(cause));
    let moved = begun.and_then(|()| run(executor));
    reset_after(executor, moved)
}

fn run_or_reset(executor: &mut Executor) -> Result<(), StepError> {
    let outcome = run(executor);
    reset_after(executor, outcome)
}

/// After a failure, raises the error for all ranks and leaves the executor clean.
fn reset_after(executor: &mut Executor, outcome: Result<(), StepError>) -> Result<(), StepError> {
    if let Err(error) = &outcome {
        executor.fail(error.clone());
        executor.reset();
    }
    outcome
}

/// Polls the executor until it is done, and sleeps while it waits. A panic becomes an error.
pub(crate) fn run(executor: &mut Executor) -> Result<(), StepError> {
    let outcome = caught(|| {
        loop {
            match executor.poll()? {
                Poll::Progress => {}
                Poll::Done => return Ok(()),
                // The next poll reports a failure of another rank.
                Poll::Pending => executor.wait_for_message()?,
            }
        }
    });
    outcome.unwrap_or_else(|cause| Err(executor.error(cause)))
}

/// Runs user code; a panic becomes a cause.
pub(crate) fn caught<T>(run: impl FnOnce() -> T) -> Result<T, Cause> {
    // A panic may leave the executor's step half done, which is reset, and the stage's own module.
    catch_unwind(AssertUnwindSafe(run)).map_err(|payload| Cause::from_panic(&*payload))
}
