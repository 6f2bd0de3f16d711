//! The ranks of this process: commands to all of them, and the cleanup after a failure. `answers.rs` waits for
//! their answers.

use std::time::Duration;

use crossbeam_channel::Receiver;

use super::error::PipelineError;
use super::setup::Setup;
use super::step_plan::StepAttempt;
use crate::driver::{Command, RankThread, Reply};
use crate::failure::{Abort, Cause, Divergence, StepError};
use crate::ids::{Attempt, StepNumber, WorldRank};
use crate::progress::ProgressBoard;
use crate::random::runs_layer_alone;

/// Why a pipeline accepts no further command.
#[derive(Clone, Copy, Debug)]
pub(super) enum End {
    /// A rank has stopped answering.
    Lost(WorldRank),
    /// A restore failed after some ranks had restored their state.
    HalfRestored,
    /// A change of a module, such as freezing its parameters, failed after some ranks had changed theirs.
    HalfChanged,
}

/// The running ranks of this process. Dropping them ends their threads.
pub(super) struct Ranks {
    pub(super) threads: Vec<RankThread>,
    pub(super) board: ProgressBoard,
    pub(super) abort: Abort,
    pub(super) deadline: Duration,
    /// How long the pipeline waits without progress on any rank. It is longer than the ranks' own deadline,
    /// because their errors name the missing message.
    pub(super) patience: Duration,
    /// The last step, and the number of the last command that all ranks run together.
    pub(super) at: StepAttempt,
    /// Why the ranks accept no further command; `None` while they accept commands.
    pub(super) end: Option<End>,
}

impl Ranks {
    /// Takes over the threads of the ranks of this process.
    pub(super) fn new(threads: Vec<RankThread>, setup: &Setup, patience: Duration) -> Self {
        Self {
            threads,
            board: setup.board.clone(),
            abort: setup.abort.clone(),
            deadline: setup.config.deadline,
            patience,
            at: StepAttempt::default(),
            end: None,
        }
    }

    /// Returns the ranks of this process.
    pub(super) fn ids(&self) -> impl Iterator<Item = WorldRank> {
        self.threads.iter().map(|thread| thread.rank)
    }

    /// Returns the number of the step that runs, or of the last one.
    pub(super) fn step(&self) -> StepNumber {
        self.at.step
    }

    /// Returns the number of the last command that all ranks ran together.
    pub(super) fn attempt(&self) -> Attempt {
        self.at.attempt
    }

    /// Returns the numbers of the next step.
    pub(super) fn next_step(&self) -> StepAttempt {
        self.at.next()
    }

    /// Begins a step with these numbers, or goes back to them if the ranks have not begun the later ones.
    pub(super) fn begin(&mut self, at: StepAttempt) {
        self.at = at;
    }

    /// Begins a command between two steps in which ranks exchange messages. Returns its number.
    pub(super) fn begin_exchange(&mut self) -> Attempt {
        self.at.attempt = self.at.attempt.next();
        self.at.attempt
    }

    /// Goes back to an earlier step, which the next one follows.
    pub(super) fn return_to(&mut self, step: StepNumber) {
        self.at.step = step;
    }

    /// Returns whether the ranks accept no further command.
    pub(super) fn has_ended(&self) -> bool {
        self.end.is_some()
    }

    /// Accepts no further command, unless the reason is known already.
    pub(super) fn end(&mut self, end: End) {
        self.end.get_or_insert(end);
    }

    /// Sends every rank its command. All ranks answer on the channel that is returned.
    pub(super) fn command<R>(
        &mut self,
        mut command: impl FnMut(Reply<R>) -> Command,
    ) -> Result<Receiver<(WorldRank, R)>, PipelineError> {
        if runs_layer_alone() {
            return Err(PipelineError::InsideLayer);
        }
        match self.end {
            Some(End::Lost(peer)) => return Err(self.lost_peer(peer).into()),
            Some(End::HalfRestored) => return Err(PipelineError::HalfRestored),
            Some(End::HalfChanged) => return Err(PipelineError::HalfChanged),
            None => {}
        }
        if let Some(diverged) = self.abort.diverged() {
            return Err(self.diverged(diverged));
        }
        let (sender, replies) = crossbeam_channel::unbounded();
        for thread in &self.threads {
            let reply = Reply::new(thread.rank, sender.clone());
            if thread.commands.send(command(reply)).is_err() {
                return Err(self.lost_peer(thread.rank).into());
            }
        }
        Ok(replies)
    }

    fn lost_peer(&self, peer: WorldRank) -> StepError {
        Self::lost_in(self.at.step, peer)
    }

    pub(super) fn lost_in(step: StepNumber, peer: WorldRank) -> StepError {
        StepError { rank: peer, step, action: None, cause: Cause::LostPeer { peer } }
    }

    /// Returns the error of a pipeline whose parameters have diverged. If the other processes treated a rank of
    /// this process as lost, because it was paused, that is the error. So is a mistake that another process has
    /// found.
    fn diverged(&self, diverged: Divergence) -> PipelineError {
        let is_own = |rank: WorldRank| self.threads.iter().any(|thread| thread.rank == rank);
        match diverged.first.cause {
            Cause::LostPeer { peer } | Cause::SilentPeer { peer, .. } if is_own(peer) => {
                diverged.first.into()
            }
            Cause::WrongInput { .. } => diverged.first.into(),
            _ => diverged.into(),
        }
    }

    /// Prepares the ranks for the next step after the failed step `at`, if they can take one. Returns the error
    /// of the failed step.
    pub(super) fn fail(&mut self, at: StepNumber, error: StepError, any_updated: bool) -> PipelineError {
        if any_updated {
            self.abort.diverge(at, &error);
        }
        match self.abort.diverged() {
            // In an earlier step ranks of another process had updated; this process was notified after that
            // step.
            Some(diverged) if diverged.step != at => return self.diverged(diverged),
            Some(_) => {}
            None => {
                // Ranks that finished may hold gradients of this step; the others have dropped the gradients
                // of earlier steps.
                for thread in &self.threads {
                    let _ = thread.commands.send(Command::Reset);
                }
            }
        }
        error.into()
    }

    /// Returns a function that notifies the ranks of other processes that this process is busy.
    pub(super) fn keep_alive(&self) -> impl Fn() + Send + use<> {
        let (board, rank) = (self.board.clone(), self.ids().next());
        move || {
            if let Some(rank) = rank {
                board.keep_alive(rank);
            }
        }
    }

    /// Makes an error of the first rank of this process in the command with the numbers `at`.
    pub(super) fn own_error(&self, at: StepAttempt, cause: Cause) -> StepError {
        let rank = self.ids().next().unwrap_or(WorldRank::new(0));
        StepError { rank, step: at.step, action: None, cause }
    }

    /// Stops all ranks in the command with the numbers `at` and in later ones.
    pub(super) fn raise(&self, at: StepAttempt, error: &StepError) {
        self.abort.raise_from(at.attempt, error.clone());
    }

    /// Notifies the ranks of other processes that this process cannot continue.
    pub(super) fn abandon(&self, cause: Cause) {
        self.abort.raise(self.own_error(self.at, cause));
    }

    /// Stops all ranks in the command with the numbers `at` and in later ones, because this process does not
    /// continue.
    pub(super) fn stop(&self, at: StepAttempt, reason: &str) {
        self.raise(at, &self.own_error(at, Cause::Abandoned { message: reason.to_owned() }));
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        for RankThread { commands, handle, .. } in self.threads.drain(..) {
            drop(commands);
            // A lost rank's thread may never end. The others end when their channel is closed.
            if !matches!(self.end, Some(End::Lost(_))) {
                let _ = handle.join();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::sync::{Arc, Mutex, OnceLock};

    use burn::module::Module;
    use burn::nn::{Linear, LinearConfig};
    use burn::optim::AdamWConfig;
    use burn::tensor::{Device, Tensor};
    use pipewright_schedule::{
        Action, Level, LowerConfig, ScheduleSpec, StageIndex, ValidatedProgram, generate, lower, validate,
    };

    use super::*;
    use crate::failure::FailureNotice;
    use crate::hook::ActionHook;
    use crate::nn::TensorParallel;
    use crate::pipeline::{Pipeline, PipelineConfig};
    use crate::stage::{Stage, StageContext, StageModule};
    use crate::transport::World;

    #[derive(Module, Debug)]
    struct Layer {
        linear: Linear,
    }

    impl StageModule for Layer {
        type Input = Tensor<2>;
        type Output = Tensor<2>;

        fn forward(&self, input: Tensor<2>, _context: &StageContext) -> Tensor<2> {
            self.linear.forward(input)
        }
    }

    /// Another process: in the middle of every step it notifies this one of a failure.
    struct Other {
        cause: Cause,
        abort: OnceLock<Abort>,
        diverged: Mutex<Option<StepNumber>>,
    }

    impl ActionHook for Other {
        fn before(&self, _rank: WorldRank, _action: Action) {
            let error = StepError {
                rank: WorldRank::new(1),
                step: StepNumber::new(1),
                action: None,
                cause: self.cause.clone(),
            };
            let diverged = *self.diverged.lock().expect("no panic");
            let notice = FailureNotice { error, attempt: Attempt::new(1), stops_all: false, diverged };
            self.abort.get().expect("it was launched").raise_from_remote(notice);
        }
    }

    fn compiled(ranks: u32) -> ValidatedProgram {
        let spec = ScheduleSpec { ranks, microbatches: 2, ..ScheduleSpec::default() };
        let program = lower(&generate("gpipe", &spec).expect("a schedule"), &LowerConfig::from(Level::Comms));
        validate(program.expect("it lowers"), Level::Comms).expect("it is sound")
    }

    fn config(seconds: u64) -> PipelineConfig {
        let (optimizer, deadline) = (Some(AdamWConfig::new().init()), Duration::from_secs(seconds));
        PipelineConfig { optimizer, deadline, ..PipelineConfig::default() }
    }

    fn stage(stage: StageIndex, is_last: bool) -> Stage {
        let linear = LinearConfig::new(3, 3).init(&Device::flex().autodiff());
        let loss = |output: Tensor<2>, target: Tensor<2>| (output - target).square().mean();
        let made =
            if is_last { Stage::with_loss(Layer { linear }, loss) } else { Stage::new(Layer { linear }) };
        made.with_prefix(&format!("stages.{stage}"))
    }

    /// Starts a pipeline of `ranks` ranks. The ranks of `world` are in this process.
    fn launch_in(world: World, ranks: u32, hook: Option<Arc<dyn ActionHook>>) -> Pipeline {
        let make = move |index: StageIndex| Ok::<_, Infallible>(stage(index, index.get() + 1 == ranks));
        let config = PipelineConfig { hook, ..config(5) };
        Pipeline::launch(compiled(ranks), world, &config, make).expect("it starts")
    }

    /// Starts a pipeline of one rank, and another process that fails with `cause`.
    fn launch(cause: Cause) -> (Pipeline, Arc<Other>) {
        let other = Arc::new(Other { cause, abort: OnceLock::new(), diverged: Mutex::default() });
        let pipeline = launch_in(World::local(1), 1, Some(other.clone()));
        let _ = other.abort.set(pipeline.ranks.abort.clone());
        (pipeline, other)
    }

    fn failed_step(pipeline: &mut Pipeline) -> String {
        let batch = || Tensor::<2>::ones([4, 3], &Device::flex());
        pipeline.step(batch(), batch(), 1e-2).expect_err("another process has failed").to_string()
    }

    #[test]
    fn a_step_that_cannot_end_is_refused_when_another_process_has_updated() {
        let (mut pipeline, other) = launch(Cause::Remote { message: "out of cheese".to_owned() });
        assert_eq!(failed_step(&mut pipeline), "step 1: rank 1: out of cheese");
        *other.diverged.lock().expect("no panic") = Some(StepNumber::new(1));
        let expected = failed_step(&mut pipeline);
        assert!(
            expected.starts_with("step 1 failed after some ranks had updated"),
            "it had begun: {expected}"
        );
        assert!(expected.ends_with("the first failure is: step 1: rank 1: out of cheese"), "{expected}");
        assert_eq!(failed_step(&mut pipeline), expected, "it does not begin");
        let frozen = pipeline.freeze(|_| true).expect_err("no command begins").to_string();
        let changed = pipeline.change_module(StageIndex::new(0), |layer: Layer| layer);
        assert_eq!(
            [frozen, changed.expect_err("no command begins").to_string()],
            [(); 2].map(|()| expected.clone())
        );
        assert_eq!(pipeline.parameters().expect_err("they are not usable").to_string(), expected);
    }

    #[test]
    fn a_change_that_one_process_refuses_does_not_keep_the_others_waiting() {
        let in_process = |world| {
            let mut pipeline = launch_in(world, 2, None);
            let changed = pipeline.change_module(StageIndex::new(1), |linear: Linear| linear);
            let batch = || Tensor::<2>::ones([4, 3], &Device::flex());
            pipeline.step(batch(), batch(), 1e-2).expect("nothing has changed");
            changed.err().map(|error| error.to_string()).unwrap_or_default()
        };
        let processes = World::local(2).apart().into_iter();
        let processes = processes.map(|world| std::thread::spawn(move || in_process(world)));
        let processes: Vec<_> = processes.collect();
        let outcomes = processes.into_iter().map(|process| process.join().expect("no panic"));
        let [first, second] = <[String; 2]>::try_from(outcomes.collect::<Vec<_>>()).expect("two processes");
        assert_eq!(first, "", "it does not have the module");
        assert!(second.starts_with("the module of stage 1 is a `"), "{second}");
    }

    /// A rank that makes its stage for longer than the deadline is treated as failed, unless it reports
    /// progress.
    #[test]
    fn a_stage_may_take_longer_than_the_deadline_while_it_makes_progress() {
        let launched = |reports: bool| {
            let make = move |index: StageIndex, tensor: &TensorParallel| -> Result<Stage, Infallible> {
                for _ in 0..6 {
                    std::thread::sleep(Duration::from_millis(300));
                    if reports {
                        tensor.keep_alive();
                    }
                }
                Ok(stage(index, true))
            };
            Pipeline::launch_split(compiled(1), World::local(1), &config(1), make).map(|_| ())
        };
        launched(true).expect("it makes progress");
        let error = launched(false).expect_err("it is silent").to_string();
        assert!(error.contains("no rank has moved for 1.0 s"), "{error}");
    }

    #[test]
    fn a_mistake_of_a_process_that_has_updated_is_the_error() {
        let (mut pipeline, other) = launch(Cause::WrongInput { message: "out of cheese".to_owned() });
        *other.diverged.lock().expect("no panic") = Some(StepNumber::new(1));
        for _ in 0..2 {
            assert_eq!(failed_step(&mut pipeline), "step 1: rank 1: the run cannot continue: out of cheese");
        }
    }

    /// A process whose transport has failed takes part in no further step, so the next one does not wait for
    /// it.
    #[test]
    fn a_rank_whose_transport_has_failed_is_lost() {
        let (mut pipeline, _) = launch(Cause::Transport { message: "out of cheese".to_owned() });
        assert_eq!(failed_step(&mut pipeline), "step 1: rank 1: the transport failed: out of cheese");
        let next = failed_step(&mut pipeline);
        assert!(next.ends_with("rank 1 is lost: its thread or process has ended"), "{next}");
    }

    /// A step fails on a rank and the transport of its process fails too. The step names the first failure, and
    /// the next one does not wait until the deadline for a process that takes part in it no more.
    #[test]
    fn a_transport_that_fails_in_a_failed_step_ends_the_next_step() {
        let [own, other] = World::local(2).apart().try_into().ok().expect("two processes");
        let other = std::thread::spawn(move || launch_in(other, 2, None));
        let mut pipeline = launch_in(own, 2, None);
        let _other = other.join().expect("it starts");
        let failed = |message: &str, cause: fn(String) -> Cause| {
            let (rank, step, cause) = (WorldRank::new(1), StepNumber::new(1), cause(message.to_owned()));
            StepError { rank, step, action: None, cause }
        };
        let attempt = pipeline.ranks.at.attempt.next();
        let abort = &pipeline.ranks.abort;
        abort.raise_from(attempt, failed("out of cheese", |message| Cause::Panic { message }));
        abort.raise(failed("no route", |message| Cause::Transport { message }));
        let start = std::time::Instant::now();
        assert_eq!(failed_step(&mut pipeline), "step 1: rank 1: the stage panicked: out of cheese");
        assert_eq!(failed_step(&mut pipeline), "step 1: rank 1: the transport failed: no route");
        assert!(start.elapsed() < pipeline.ranks.deadline / 2, "{:?}", start.elapsed());
        let next = failed_step(&mut pipeline);
        assert!(next.ends_with("rank 1 is lost: its thread or process has ended"), "{next}");
    }

    #[test]
    fn a_rank_whose_thread_ends_without_an_answer_is_lost() {
        let (mut pipeline, _) = launch(Cause::Remote { message: "not used".to_owned() });
        let (sender, replies) = crossbeam_channel::unbounded::<(WorldRank, ())>();
        drop(sender);
        let error = pipeline.ranks.await_ranks(&replies, Ok).expect_err("no rank can answer").to_string();
        let expected = "rank 0 is lost: its thread or process has ended";
        assert!(error.ends_with(expected), "{error}");
        assert!(failed_step(&mut pipeline).ends_with(expected));
    }

    #[test]
    fn a_paused_process_that_the_others_have_updated_without_is_the_lost_one() {
        let (mut pipeline, other) = launch(Cause::LostPeer { peer: WorldRank::new(0) });
        *other.diverged.lock().expect("no panic") = Some(StepNumber::new(1));
        for _ in 0..2 {
            let error = failed_step(&mut pipeline);
            assert!(error.ends_with("rank 0 is lost: its thread or process has ended"), "{error}");
        }
    }
}
