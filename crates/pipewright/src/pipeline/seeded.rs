//! Runs all ranks on one thread, for tests. A seed decides the order in which ranks are polled and messages
//! arrive.
//!
//! Each seed gives one interleaving, which can be repeated. There is no clock: when every rank waits and no
//! message is in transit, the step fails at once.

use std::collections::VecDeque;
use std::fmt::Display;
use std::time::{Duration, Instant};

use pipewright_schedule::{StageIndex, ValidatedProgram};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::accumulation::Accumulation;
use super::error::PipelineError;
use super::setup::Setup;
use super::step_plan::{CheckedBatch, StepAttempt, StepPlan};
use super::summary::{StepSummary, batch_gradients, training};
use crate::batch::{Batch, Purpose};
use crate::config::PipelineConfig;
use crate::driver::caught;
use crate::executor::{Executor, Outcome, Poll, StepInput, StepOrigin};
use crate::failure::{Cause, StepError};
use crate::ids::{Attempt, StepNumber, WorldRank};
use crate::memory::RankMemory;
use crate::message::Tag;
use crate::nn::TensorParallel;
use crate::stage::Stage;
use crate::transport::{InFlight, Traffic, World};

/// A pipeline on the calling thread, for tests. It has the executors and the results of a
/// [`Pipeline`](super::Pipeline).
pub struct SeededPipeline {
    setup: Setup,
    executors: Vec<Executor>,
    in_flight: InFlight,
    rng: ChaCha8Rng,
    step: StepNumber,
    attempt: Attempt,
    accumulation: Accumulation,
    lose: Option<usize>,
    lost: Option<Tag>,
}

impl SeededPipeline {
    /// Builds all stages, in stage order by rank.
    ///
    /// # Errors
    /// As [`crate::pipeline::Pipeline::launch`].
    pub fn new<E: Display>(
        program: ValidatedProgram,
        config: &PipelineConfig,
        seed: u64,
        make: impl Fn(StageIndex) -> Result<Stage, E>,
    ) -> Result<Self, PipelineError> {
        if config.tensor_parallel > 1 {
            return Err(PipelineError::setup(format!(
                "a seeded pipeline has one thread, and {} tensor ranks need one each: set tensor_parallel to 1",
                config.tensor_parallel
            )));
        }
        if config.expert_parallel > 1 {
            let setting = "a seeded pipeline, which has one thread";
            return Err(PipelineError::beside_expert_groups(config.expert_parallel, setting));
        }
        let (world, in_flight) = World::controlled(program.ranks().saturating_mul(config.data_parallel));
        let (setup, endpoints) = Setup::new(program, world, config)?;
        let build =
            |endpoint| setup.build(endpoint, RankMemory::new(), &|stage, _: &TensorParallel| make(stage));
        let executors = endpoints.into_iter().map(build).collect::<Result<_, _>>()?;
        setup.end_launch();
        let accumulation = Accumulation::new(&setup.config, None);
        let mut pipeline = Self {
            setup,
            executors,
            in_flight,
            rng: ChaCha8Rng::seed_from_u64(seed),
            step: StepNumber::default(),
            attempt: Attempt::default(),
            accumulation,
            lose: None,
            lost: None,
        };
        let begin = |executor: &mut Executor| executor.begin_finding_shared(Attempt::default());
        pipeline.executors.iter_mut().for_each(begin);
        pipeline.drive(Vec::new());
        match pipeline.setup.abort.first() {
            Some(error) => Err(error.into()),
            None => Ok(pipeline),
        }
    }

    /// Loses the `nth` message of the next step, counted from 0 in the order of this seed's arrivals.
    pub fn lose_message(&mut self, nth: usize) {
        self.lose = Some(nth);
    }

    /// Returns the tag of the message that [`SeededPipeline::lose_message`] lost last.
    pub fn lost(&self) -> Option<Tag> {
        self.lost
    }

    /// Returns what a rank has sent to others since the launch.
    pub fn sent_by(&self, rank: WorldRank) -> Traffic {
        self.in_flight.sent_by(rank)
    }

    /// Takes a training step, like [`crate::pipeline::Pipeline::step_batch`].
    ///
    /// # Errors
    /// When a rank fails, or when every rank waits for a message that does not arrive.
    pub fn step_batch(&mut self, batch: Batch, learning_rate: f64) -> Result<StepSummary, PipelineError> {
        let mut summaries = self.steps(vec![batch], learning_rate)?;
        summaries.pop().unwrap_or(Err(PipelineError::NoStepBegun))
    }

    /// Takes two training steps. Each rank begins the second one as soon as its part of the first one has
    /// ended, like the ranks of a pipeline after two calls of [`crate::pipeline::Pipeline::begin`]. Returns
    /// the results of both; only the first one if it fails. Losses are not scaled.
    ///
    /// # Errors
    /// When a batch cannot be used, or parameters have diverged.
    pub fn step_both(
        &mut self,
        batches: [Batch; 2],
        learning_rate: f64,
    ) -> Result<Vec<Result<StepSummary, PipelineError>>, PipelineError> {
        self.steps(batches.into(), learning_rate)
    }

    /// Takes steps. A rank begins the next one as soon as its part of the one before has ended.
    /// Returns their results until the first one that fails.
    fn steps(
        &mut self,
        batches: Vec<Batch>,
        learning_rate: f64,
    ) -> Result<Vec<Result<StepSummary, PipelineError>>, PipelineError> {
        if let Some(diverged) = self.setup.abort.diverged() {
            return Err(diverged.into());
        }
        let start = Instant::now();
        let ranks = || (0..self.executors.len() as u32).map(WorldRank::new);
        let mut plans = Vec::new();
        let mut inputs: Vec<VecDeque<_>> = self.executors.iter().map(|_| VecDeque::new()).collect();
        let mut at = StepAttempt { step: self.step, attempt: self.attempt };
        for batch in batches {
            at = at.next();
            let batch = CheckedBatch::new(&self.setup, ranks(), batch, Purpose::Update { learning_rate })?;
            let scale = self.accumulation.step_scale(0, &self.setup.config);
            let plan = StepPlan::training(at, &batch, batch.unit(), scale, None);
            let plan = plan.scaled(self.accumulation.scale());
            let of_ranks = plan.inputs_of(&self.setup, ranks(), batch, (&StepOrigin::default(), None));
            inputs.iter_mut().zip(of_ranks).for_each(|(queue, input)| queue.push_back(Box::new(input)));
            plans.push(plan);
        }
        self.attempt = at.attempt;
        for (executor, queue) in self.executors.iter_mut().zip(&mut inputs) {
            if let Some(input) = queue.pop_front() {
                executor.begin(*input);
            }
        }
        let mut done = self.drive(inputs);
        self.lose = None;
        let mut results = Vec::new();
        for plan in plans {
            let at = plan.at;
            self.step = at.step;
            if let Some(error) = self.setup.abort.first_in(at.attempt) {
                results.push(Err(self.fail(at.step, error, &done)));
                break;
            }
            let mut reports: Vec<_> = done.iter_mut().flat_map(|steps| steps.remove(0).reports).collect();
            let gradients = batch_gradients(&self.setup, &plan, &mut reports);
            let gradients = gradients.map_err(PipelineError::slices)?;
            let summary = training(&self.setup, plan, reports, gradients, start.elapsed());
            self.accumulation.scale_losses(&self.setup.config, summary.skipped);
            results.push(Ok(summary));
        }
        Ok(results)
    }

    /// Ends a step that has failed. `done` has the results of each rank in this step and later ones.
    fn fail(&mut self, step: StepNumber, error: StepError, done: &[Vec<Outcome>]) -> PipelineError {
        let has_ended = done.iter().any(|steps| !steps.is_empty());
        if has_ended || self.executors.iter().any(Executor::has_updated) {
            self.setup.abort.diverge(step, &error);
        }
        self.executors.iter_mut().for_each(Executor::reset);
        while !self.in_flight.is_empty() {
            self.in_flight.lose(0);
        }
        self.setup.abort.clear();
        error.into()
    }

    /// Polls a random rank or delivers a random message, until all ranks are done or stop. A rank that is done
    /// begins its next step, if it has one. Returns the results of each rank.
    fn drive(&mut self, mut inputs: Vec<VecDeque<Box<StepInput>>>) -> Vec<Vec<Outcome>> {
        // Ranks that may be able to continue. A message that arrives may unblock any of the others.
        let mut ready: Vec<usize> = (0..self.executors.len()).collect();
        let mut blocked: Vec<usize> = Vec::new();
        let mut done: Vec<Vec<Outcome>> = self.executors.iter().map(|_| Vec::new()).collect();
        let mut arrivals = 0;
        loop {
            let held = self.in_flight.len();
            if ready.is_empty() && held == 0 {
                // A rank in the first step of all is stuck there; one in a later step may wait for it.
                let Some(&stuck) = blocked.iter().min_by_key(|rank| done[**rank].len()) else { return done };
                let error = self.stuck(stuck);
                self.executors[stuck].fail(error);
                ready.append(&mut blocked);
                continue;
            }
            let choice = self.rng.random_range(0..ready.len() + held.min(ready.len() + 1));
            if choice < ready.len() {
                let rank = ready[choice];
                let executor = &mut self.executors[rank];
                match caught(|| executor.poll()).unwrap_or_else(|cause| Err(executor.error(cause))) {
                    Ok(Poll::Progress) => {}
                    Ok(Poll::Pending) => {
                        ready.swap_remove(choice);
                        blocked.push(rank);
                    }
                    Ok(Poll::Done) => {
                        done[rank].push(executor.take_outcome());
                        match inputs.get_mut(rank).and_then(VecDeque::pop_front) {
                            Some(input) => executor.begin(*input),
                            None => drop(ready.swap_remove(choice)),
                        }
                    }
                    Err(error) => {
                        executor.fail(error);
                        ready.swap_remove(choice);
                        // The others may be in its step.
                        ready.append(&mut blocked);
                    }
                }
            } else {
                let index = self.rng.random_range(0..held);
                if self.lose == Some(arrivals) {
                    self.lost = self.in_flight.lose(index);
                } else {
                    self.in_flight.release(index);
                }
                arrivals += 1;
                ready.append(&mut blocked);
            }
        }
    }

    fn stuck(&self, rank: usize) -> StepError {
        let report = self.setup.board.report();
        self.executors[rank].error(Cause::Deadline { waited: Duration::ZERO, report })
    }
}
