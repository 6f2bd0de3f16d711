//! A thread a rank: it polls its executor, parks while nothing can be done, and watches the deadline.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender};
use pipewright_schedule::Rank;

use crate::checkpoint::{Checkpoint, RankState};
use crate::executor::{Executor, NamedParameter, Poll, RankReport, StepInput};
use crate::failure::{Abort, Cause, StepError};
use crate::memory::RankMemory;
use crate::progress::Board;
use crate::transport::Waited;

/// What a rank's thread is asked to do.
pub(crate) enum Command {
    /// Learn which parameters the other ranks hold.
    Introduce,
    Step(Box<StepInput>),
    /// Collects the whole parameters, as this attempt.
    Parameters(u64),
    State,
    Restore(Arc<Checkpoint>),
    /// Forget the gradients that wait for an update; there is no answer.
    Reset,
}

/// What a rank's thread answers.
pub(crate) enum Reply {
    /// The rank is built, or why it is not.
    Ready(Result<(), StepError>),
    Introduced(Result<(), StepError>),
    /// The rank's report, and across processes those of all others.
    Step {
        outcome: Result<Vec<RankReport>, StepError>,
        /// Whether the rank has begun to update its parameters.
        has_updated: bool,
    },
    Parameters(Result<Vec<NamedParameter>, StepError>),
    State(Box<RankState>),
    Restored(Result<(), StepError>),
}

/// How a rank's thread runs.
#[derive(Clone)]
pub(crate) struct ThreadSettings {
    pub threads: usize,
    pub deadline: Duration,
}

/// A running rank, as its owner sees it. Dropping it ends the thread after the command that it is at.
pub(crate) struct RankThread {
    pub(crate) rank: Rank,
    pub(crate) commands: Sender<Command>,
    pub(crate) handle: JoinHandle<()>,
}

/// Everything that a rank's thread begins with. The executor is built on its own thread, so that a stage's parameters
/// are allocated, counted and kept near where they are used.
pub(crate) struct RankSeed<B> {
    pub rank: Rank,
    pub settings: ThreadSettings,
    pub board: Board,
    pub abort: Abort,
    pub memory: RankMemory,
    pub build: B,
    pub replies: Sender<(Rank, Reply)>,
}

impl RankThread {
    /// Starts a rank. Its first reply is [`Reply::Ready`].
    ///
    /// # Errors
    /// When the system gives no thread.
    pub(crate) fn start<B>(seed: RankSeed<B>) -> std::io::Result<Self>
    where
        B: FnOnce(RankMemory) -> Result<Executor, StepError> + Send + 'static,
    {
        let (commands, inbox) = crossbeam_channel::unbounded();
        let rank = seed.rank;
        let name = format!("rank-{rank}");
        let handle = std::thread::Builder::new().name(name).spawn(move || seed.run(&inbox))?;
        Ok(Self { rank, commands, handle })
    }
}

impl<B> RankSeed<B>
where
    B: FnOnce(RankMemory) -> Result<Executor, StepError>,
{
    fn run(self, inbox: &Receiver<Command>) {
        let Self { rank, settings, board, abort, memory, build, replies } = self;
        let located = board.clone();
        memory.locate_by(move || located.locate(rank));
        // A pool of the rank's own: its tensor operations use so many threads and no others.
        let counted = memory.clone();
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(settings.threads)
            .use_current_thread()
            .thread_name(move |index| format!("rank-{rank}-{index}"))
            .start_handler(move |_| std::mem::forget(counted.count_this_thread()))
            .build();
        let _counted = memory.count_this_thread();
        let failure = |cause| StepError { rank, step: 0, action: None, cause };
        let built = match &pool {
            Ok(_) => caught(|| build(memory)).unwrap_or_else(|cause| Err(failure(cause))),
            Err(error) => Err(failure(Cause::Build { message: format!("no thread pool: {error}") })),
        };
        let mut executor = match built {
            Ok(executor) => {
                let _ = replies.send((rank, Reply::Ready(Ok(()))));
                executor
            }
            Err(error) => {
                // Other processes wait for this rank.
                abort.raise(error.clone());
                let _ = replies.send((rank, Reply::Ready(Err(error))));
                return;
            }
        };
        let watch = Watch { board, deadline: settings.deadline };
        // The channel closes when the pipeline is dropped; a reply that nobody takes is no reason to fail then.
        for command in inbox {
            let reply = match command {
                Command::Introduce => Reply::Introduced(introduce(&mut executor, &watch)),
                Command::Step(input) => step(&mut executor, *input, &watch),
                Command::Reset => {
                    executor.reset();
                    continue;
                }
                Command::Parameters(attempt) => Reply::Parameters(collect(&mut executor, attempt, &watch)),
                Command::State => Reply::State(Box::new(executor.state())),
                Command::Restore(checkpoint) => {
                    let restored = caught(|| executor.restore(&checkpoint)).unwrap_or_else(Err);
                    Reply::Restored(restored.map_err(failure))
                }
            };
            if replies.send((rank, reply)).is_err() {
                return;
            }
        }
    }
}

/// What a waiting rank watches.
struct Watch {
    board: Board,
    deadline: Duration,
}

/// Runs one step to its end; a failure is raised for all ranks and leaves the executor clean.
fn step(executor: &mut Executor, input: StepInput, watch: &Watch) -> Reply {
    executor.begin(input);
    let outcome = caught(|| drive(executor, watch)).unwrap_or_else(|cause| Err(executor.error(cause)));
    let has_updated = executor.has_updated();
    let outcome = match outcome {
        Ok(()) => Ok(executor.reports()),
        Err(error) => {
            executor.endpoint().fail(error.clone());
            executor.reset();
            Err(error)
        }
    };
    Reply::Step { outcome, has_updated }
}

/// Learns which parameters the other ranks hold; a failure is raised for all ranks.
fn introduce(executor: &mut Executor, watch: &Watch) -> Result<(), StepError> {
    executor.begin_introduction();
    drive(executor, watch).inspect_err(|error| executor.endpoint().fail(error.clone()))
}

fn drive(executor: &mut Executor, watch: &Watch) -> Result<(), StepError> {
    loop {
        match executor.poll()? {
            Poll::Progress => {}
            Poll::Done => return Ok(()),
            Poll::Pending => park(executor, watch)?,
        }
    }
}

/// Sleeps until something arrives. The deadline starts anew whenever any rank of the world moves.
fn park(executor: &mut Executor, watch: &Watch) -> Result<(), StepError> {
    loop {
        let moves = watch.board.moves();
        let patience = watch.deadline + executor.endpoint().detection_lag(watch.deadline);
        match executor.endpoint().wait(Instant::now() + patience) {
            // An abort is reported by the next poll.
            Waited::Arrived | Waited::Aborted => return Ok(()),
            Waited::TimedOut if watch.board.moves() != moves => {}
            Waited::TimedOut => {
                let report = watch.board.report();
                return Err(executor.error(Cause::Deadline { waited: watch.deadline, report }));
            }
        }
    }
}

/// The whole parameters of the rank's stages; a failure is raised for all ranks.
fn collect(executor: &mut Executor, attempt: u64, watch: &Watch) -> Result<Vec<NamedParameter>, StepError> {
    executor.begin_collect(attempt);
    let outcome = caught(|| drive(executor, watch)).unwrap_or_else(|cause| Err(executor.error(cause)));
    match outcome {
        Ok(()) => Ok(executor.collected()),
        Err(error) => {
            executor.endpoint().fail(error.clone());
            executor.reset();
            Err(error)
        }
    }
}

/// Runs user code; a panic becomes a cause.
pub(crate) fn caught<T>(run: impl FnOnce() -> T) -> Result<T, Cause> {
    // What a panic may leave half done is the executor's step state, which is reset, and the stage's own module.
    catch_unwind(AssertUnwindSafe(run)).map_err(|payload| Cause::from_panic(&*payload))
}
