//! Runs all ranks on one thread, for tests. A seed decides the order in which ranks are polled and messages
//! arrive.
//!
//! Each seed gives one interleaving, which can be repeated. There is no clock: when every rank waits and no
//! message is in transit, the step fails at once.

use std::fmt::Display;
use std::time::{Duration, Instant};

use pipewright_schedule::{StageIndex, ValidatedProgram};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::accumulation::Accumulation;
use super::error::PipelineError;
use super::setup::Setup;
use super::step_plan::{CheckedBatch, StepAttempt, StepPlan};
use super::summary::{StepSummary, training};
use crate::batch::{Batch, Purpose};
use crate::config::PipelineConfig;
use crate::driver::caught;
use crate::executor::{Executor, Poll};
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
            return Err(PipelineError::SeededTensorRanks { tensor_ranks: config.tensor_parallel });
        }
        if config.expert_parallel > 1 {
            let setting = "a seeded pipeline, which has one thread";
            return Err(PipelineError::BesideExpertGroups { experts: config.expert_parallel, setting });
        }
        let (world, in_flight) = World::controlled(program.ranks().saturating_mul(config.data_parallel));
        let (setup, endpoints) = Setup::new(program, world, config)?;
        let build =
            |endpoint| setup.build(endpoint, RankMemory::new(), &|stage, _: &TensorParallel| make(stage));
        let executors = endpoints.into_iter().map(build).collect::<Result<_, _>>()?;
        let accumulation = Accumulation::new(setup.loss_scale());
        let mut pipeline = Self {
            setup,
            executors,
            in_flight,
            rng: ChaCha8Rng::seed_from_u64(seed),
            step: StepNumber::default(),
            accumulation,
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

    /// Takes a training step, like [`crate::pipeline::Pipeline::step_batch`].
    ///
    /// # Errors
    /// When a rank fails, or when every rank waits for a message that does not arrive.
    pub fn step_batch(&mut self, batch: Batch, learning_rate: f64) -> Result<StepSummary, PipelineError> {
        if let Some(step) = self.setup.abort().diverged() {
            return Err(PipelineError::Diverged { step });
        }
        let start = Instant::now();
        self.step = self.step.next();
        let ranks = || (0..self.executors.len() as u32).map(WorldRank::new);
        let batch = CheckedBatch::new(&self.setup, ranks(), batch, Purpose::Update { learning_rate })?;
        let at = StepAttempt { step: self.step, attempt: Attempt::new(self.step.get()) };
        let plan = StepPlan::training(at, &batch, batch.unit(), self.accumulation.loss_scale(), None);
        let inputs = plan.inputs_of(&self.setup, ranks(), batch, start);
        self.executors.iter_mut().zip(inputs).for_each(|(executor, input)| executor.begin(input));
        let outcome = self.drive();
        self.lose = None;
        if let Err(error) = outcome {
            self.setup.abort().raise(error.clone());
            if self.executors.iter().any(Executor::has_updated) {
                self.setup.abort().diverge(self.step, &error);
            }
            self.executors.iter_mut().for_each(Executor::reset);
            while !self.in_flight.is_empty() {
                self.in_flight.lose(0);
            }
            self.setup.abort().clear();
            return Err(error.into());
        }
        let reports =
            self.executors.iter_mut().flat_map(|executor| executor.take_outcome().reports).collect();
        let summary = training(&self.setup, plan, reports, start.elapsed());
        let mut summary = summary.map_err(|source| PipelineError::Cut { source })?;
        self.accumulation.update(self.setup.config().loss_scaling, &mut summary);
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
        let report = self.setup.board().report();
        self.executors[rank].error(Cause::Deadline { waited: Duration::ZERO, report })
    }
}
