//! Runs all ranks on one thread, for tests. A seed decides the order in which ranks are polled and messages arrive.
//!
//! Each seed gives one interleaving, which can be repeated. There is no clock: when every rank waits and no message is
//! in transit, the step fails at once.

use std::fmt::Display;
use std::time::{Duration, Instant};

use pipewright_schedule::{StageIndex, ValidatedProgram};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::assembly::Assembly;
use super::error::PipelineError;
use super::step_inputs::{StepAttempt, StepKind};
use super::summary::{StepSummary, TakenStep, training};
use crate::batch::{Batch, Purpose};
use crate::config::PipelineConfig;
use crate::driver::caught;
use crate::executor::{Executor, Poll};
use crate::failure::{Abort, Cause, StepError};
use crate::ids::{Attempt, StepNumber, WorldRank};
use crate::loss_scale::LossScale;
use crate::memory::RankMemory;
use crate::message::Tag;
use crate::nn::TensorParallel;
use crate::stage::Stage;
use crate::transport::{InFlight, Traffic, World};

/// A pipeline on the calling thread, for tests. Executors and results are those of a [`Pipeline`](super::Pipeline).
pub struct SeededPipeline {
    assembly: Assembly,
    executors: Vec<Executor>,
    in_flight: InFlight,
    abort: Abort,
    rng: ChaCha8Rng,
    step: StepNumber,
    /// As in [`Pipeline`](super::Pipeline).
    loss_scale: Option<LossScale>,
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
            return Err(PipelineError::SeededTensorRanks { tensor_ranks: config.tensor_parallel });
        }
        let (world, in_flight) = World::controlled(program.ranks().saturating_mul(config.data_parallel));
        let (assembly, endpoints) = Assembly::new(program, world, config)?;
        let abort = assembly.abort.clone();
        let build =
            |endpoint| assembly.build(endpoint, RankMemory::new(), &|stage, _: &TensorParallel| make(stage));
        let executors = endpoints.into_iter().map(build).collect::<Result<_, _>>()?;
        let (rng, loss_scale) = (ChaCha8Rng::seed_from_u64(seed), assembly.loss_scale());
        let mut pipeline = Self {
            assembly,
            executors,
            in_flight,
            abort,
            rng,
            step: StepNumber::default(),
            loss_scale,
            lose: None,
            lost: None,
        };
        let begin = |executor: &mut Executor| executor.begin_finding_shared(Attempt::default());
        pipeline.executors.iter_mut().for_each(begin);
        pipeline.drive()?;
        Ok(pipeline)
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

    /// As [`crate::pipeline::Pipeline::step_batch`].
    ///
    /// # Errors
    /// When a rank fails, or when every rank waits for a message that does not arrive.
    pub fn step_batch(&mut self, batch: Batch, learning_rate: f64) -> Result<StepSummary, PipelineError> {
        if let Some(step) = self.abort.diverged() {
            return Err(PipelineError::Diverged { step });
        }
        let start = Instant::now();
        self.step = self.step.next();
        let ranks = || (0..self.executors.len() as u32).map(WorldRank::new);
        self.assembly.check_batch(ranks(), &batch, Purpose::Update { learning_rate })?;
        let factors = batch.loss_factors(batch.unit());
        let taken = TakenStep::new(&self.assembly, (self.step, self.loss_scale), &batch, factors)?;
        let loss_scale = self.loss_scale.map_or(1.0, |scale| scale.factor);
        let kind = StepKind::Train { learning_rate, loss_scale, update: true };
        let inputs = self.assembly.step_inputs(
            ranks(),
            StepAttempt { step: self.step, attempt: Attempt::new(self.step.get()) },
            batch,
            &taken.factors,
            kind,
            start,
        )?;
        self.executors.iter_mut().zip(inputs).for_each(|(executor, input)| executor.begin(input));
        let outcome = self.drive();
        self.lose = None;
        if let Err(error) = outcome {
            self.abort.raise(error.clone());
            if self.executors.iter().any(Executor::has_updated) {
                self.abort.diverge(self.step, &error);
            }
            self.executors.iter_mut().for_each(Executor::reset);
            while !self.in_flight.is_empty() {
                self.in_flight.lose(0);
            }
            self.abort.clear();
            return Err(error.into());
        }
        let reports =
            self.executors.iter_mut().flat_map(|executor| executor.take_outcome().reports).collect();
        let summary = training(taken, reports, start.elapsed());
        let summary = summary.map_err(|source| PipelineError::Cut { source })?;
        let settings = self.assembly.config.loss_scaling;
        self.loss_scale = self.loss_scale.map(|scale| scale.after(summary.skipped, settings));
        Ok(summary)
    }

    /// Polls a random rank or delivers a random message, until all ranks are done.
    fn drive(&mut self) -> Result<(), StepError> {
        // Ranks that may be able to continue. A message that arrives may unblock any of the others.
        let mut ready: Vec<usize> = (0..self.executors.len()).collect();
        let mut blocked: Vec<usize> = Vec::new();
        let mut arrivals = 0;
        loop {
            let held = self.in_flight.len();
            if ready.is_empty() && held == 0 {
                return match blocked.first() {
                    None => Ok(()),
                    Some(&stuck) => Err(self.stuck(stuck)),
                };
            }
            let choice = self.rng.random_range(0..ready.len() + held.min(ready.len() + 1));
            if choice < ready.len() {
                let rank = ready[choice];
                let executor = &mut self.executors[rank];
                let poll = caught(|| executor.poll()).unwrap_or_else(|cause| Err(executor.error(cause)))?;
                if poll != Poll::Progress {
                    ready.swap_remove(choice);
                    blocked.extend((poll == Poll::Pending).then_some(rank));
                }
            } else {
                let place = self.rng.random_range(0..held);
                if self.lose == Some(arrivals) {
                    self.lost = self.in_flight.lose(place);
                } else {
                    self.in_flight.release(place);
                }
                arrivals += 1;
                ready.append(&mut blocked);
            }
        }
    }

    fn stuck(&self, rank: usize) -> StepError {
        let report = self.assembly.board.report();
        self.executors[rank].error(Cause::Deadline { waited: Duration::ZERO, report })
    }
}
