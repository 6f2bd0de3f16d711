//! The prediction of one choice: what `simulate --profile` prints, and by which plans are judged.

use thiserror::Error;

use crate::costs::Costs;
use crate::lower::{LowerError, TrainingLowering, for_training};
use crate::partition::{Method, PartitionError, partition};
use crate::plan::evaluate::peaks;
use crate::plan::layers::Layers;
use crate::plan::order::Order;
use crate::plan::search::optimizer_time;
use crate::plan::stage_load::{StageLoad, engine_costs, stage_loads};
use crate::profile::Profile;
use crate::schedule::Schedule;
use crate::simulate::{SimulateError, TimedRun, timed};
use crate::validate::ValidatedProgram;

/// The choices besides the schedule.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct PlanChoice {
    /// The first layer of each stage except the first.
    pub boundaries: Vec<usize>,
    /// For each stage, whether it recomputes its forward.
    pub recompute: Vec<bool>,
    /// The number of replicas.
    pub data_parallel: u32,
    /// The number of rows of a microbatch.
    pub microbatch_rows: u32,
}

/// The predicted step of a choice.
#[derive(Debug, Clone)]
pub struct Prediction {
    /// The program that each replica runs.
    pub program: ValidatedProgram,
    /// The costs of its stages.
    pub costs: Costs,
    /// The predicted run, without the optimizer.
    pub run: TimedRun,
    /// The time of the optimizer, in seconds. It begins when all ranks have finished.
    pub optimizer_s: f64,
    /// The peak bytes of each rank: parameters, optimizer state, gradients and activations.
    pub peak_bytes: Vec<u64>,
}

/// The errors of a prediction.
#[derive(Debug, Error)]
pub enum PredictError {
    /// The boundaries do not cut the layers into the stages of the schedule.
    #[error(transparent)]
    Partition(#[from] PartitionError),
    /// There are more or fewer entries than stages.
    #[error(
        "recomputation is given for {entries} stages, and the schedule has {stages}; give one entry for each"
    )]
    Recompute {
        /// The number of entries.
        entries: usize,
        /// The number of stages.
        stages: u32,
    },
    /// The schedule is unsound.
    #[error(transparent)]
    Lower(#[from] LowerError),
    /// The program cannot be simulated.
    #[error(transparent)]
    Simulate(#[from] SimulateError),
}

impl Prediction {
    /// Returns the time of a step, in seconds.
    pub fn step_s(&self) -> f64 {
        self.run.timeline().makespan() + self.optimizer_s
    }
}

/// Predicts a step of `schedule` at the costs of `profile`, which has no problems.
///
/// # Errors
/// When the choice does not fit the schedule, or the schedule is unsound.
pub fn predict(
    profile: &Profile,
    schedule: &Schedule,
    choice: &PlanChoice,
) -> Result<Prediction, PredictError> {
    let layers = Layers::of(profile, choice.microbatch_rows);
    let loads = loads(&layers, schedule.placement().stages(), choice)?;
    let lowering = TrainingLowering { replicas: choice.data_parallel, ..TrainingLowering::default() };
    let program = for_training(schedule, &lowering)?;
    let costs = engine_costs(&layers, &loads);
    let run = timed(program.as_program(), &costs)?;
    let order = Order::of(schedule);
    let (optimizer_s, peak_bytes) = (optimizer_time(&order, &loads), peaks(&order, &loads));
    Ok(Prediction { program, costs, run, optimizer_s, peak_bytes })
}

/// Returns the costs of `stages` stages at a choice, for schedules that are made to measure.
///
/// # Errors
/// When the choice does not fit the stages.
pub fn choice_costs(profile: &Profile, stages: u32, choice: &PlanChoice) -> Result<Costs, PredictError> {
    let layers = Layers::of(profile, choice.microbatch_rows);
    Ok(engine_costs(&layers, &loads(&layers, stages, choice)?))
}

fn loads(layers: &Layers, stages: u32, choice: &PlanChoice) -> Result<Vec<StageLoad>, PredictError> {
    let method = Method::Explicit { boundaries: choice.boundaries.clone() };
    let cut = partition(&vec![1; layers.count()], stages, &method)?;
    if choice.recompute.len() != stages as usize {
        return Err(PredictError::Recompute { entries: choice.recompute.len(), stages });
    }
    let starts: Vec<usize> = cut.ranges().map(|range| range.start).chain([layers.count()]).collect();
    Ok(stage_loads(layers, &starts, &choice.recompute, choice.data_parallel))
}
