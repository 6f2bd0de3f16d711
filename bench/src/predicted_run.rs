//! Runs of a model in turn with the measurement of a profile: what the profile predicts for each run, and
//! what was measured.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use burn::tensor::{Device, Int, Tensor};
use pipewright::device::Devices;
use pipewright::optimizer::AdamW;
use pipewright::pipeline::{Pipeline, PipelineConfig, PipelineError, StepSummary};
use pipewright::profile::{MeasureConfig, measure, unlike_links};
use pipewright::stage::Stage;
use pipewright::transport::World;
use pipewright_models::{CutModel, InitialParameters, ModelError};
use pipewright_schedule::analytic::{PeakRates, Workload};
use pipewright_schedule::lower::{TrainingLowering, for_training};
use pipewright_schedule::mesh::Mesh;
use pipewright_schedule::plan::{Plan, PlanChoice, Prediction, predict};
use pipewright_schedule::profile::{LinkProfile, Profile};
use pipewright_schedule::{Method, Rank, Schedule, StageIndex, partition};

use crate::harness::{Outcome, Spread};
use crate::model::{SEQUENCE, tokens};

const SEED: u64 = 7;
/// The bytes of a parameter with both moments.
const STATIC: u64 = 12;
const WARM_UP: usize = 2;

/// A run: a schedule with a cut, and replicas.
pub(crate) struct Run {
    pub(crate) schedule: Schedule,
    /// The first layer of each stage except the first.
    pub(crate) boundaries: Vec<usize>,
    pub(crate) replicas: u32,
}

/// Figures of a run, predicted or measured. Times are in seconds.
pub(crate) struct RunFigures {
    pub(crate) step: f64,
    /// The time in which each rank computes.
    pub(crate) busy: Vec<f64>,
    /// The most bytes of each rank besides parameters and optimizer state: activations and gradients.
    pub(crate) activations: Vec<f64>,
}

/// A run whose steps are taken in turn with others.
struct Turn {
    pipeline: Pipeline,
    inputs: Tensor<2, Int>,
    targets: Tensor<2, Int>,
    taken: Vec<StepSummary>,
}

impl Turn {
    fn step(&mut self) -> Result<(), PipelineError> {
        self.taken.push(self.pipeline.step(self.inputs.clone(), self.targets.clone(), 3e-4)?);
        Ok(())
    }
}

/// The results of measurements that alternate.
pub(crate) struct InTurn {
    pub(crate) profile: Profile,
    /// The steps of each run that count.
    pub(crate) taken: Vec<Vec<StepSummary>>,
}

/// Measures the link between two ranks.
pub(crate) fn link() -> Outcome<Option<LinkProfile>> {
    let links = World::local(2).measure_links(&Devices::default(), Duration::from_secs(60))?;
    Ok(unlike_links(&links).map(|(link, _)| link))
}

/// Measures the profile of a model with this number of ranks at once. Each step of the measurement follows a
/// step of each run, so that changes in the speed of the machine affect all.
///
/// Without runs, the measurement takes `steps` steps alone.
pub(crate) fn in_turn(
    model: &CutModel,
    link: Option<LinkProfile>,
    ranks: u32,
    runs: &[&Run],
    steps: usize,
) -> Outcome<InTurn> {
    let turns = runs.iter().map(|run| run.turn(model)).collect::<Result<Vec<_>, _>>()?;
    let turns = Rc::new(RefCell::new(turns));
    let layers = model.describe(SEQUENCE);
    let config = MeasureConfig {
        pipeline: pipeline_config(model),
        ranks,
        steps: steps as u32,
        time_limit: Duration::from_secs(600),
        ..MeasureConfig::default()
    };
    let made = model.clone();
    let make = move |range| stage(&made, range);
    let feed = |mut pipeline: Pipeline| {
        let shape = [(3 * ranks) as usize, SEQUENCE];
        let [inputs, targets] = [0, 1].map(|shift| tokens(shape, shift));
        let turns = Rc::clone(&turns);
        move || {
            // The second pipeline of the measurement recomputes, which no run does.
            for turn in turns.borrow_mut().iter_mut().filter(|turn| turn.taken.len() < WARM_UP + steps) {
                turn.step()?;
            }
            pipeline.step(inputs.clone(), targets.clone(), 0.0)
        }
    };
    let measured = measure(&layers, &config, make, feed)?;
    let workload = Workload { model: &layers, tokens: SEQUENCE as u32, rows: 1 };
    // Nothing is assumed on the processor.
    let rates = PeakRates { flops_per_s: 1e11, bytes_per_s: 1e10 };
    let profile = measured.profile(&workload, link, LinkProfile::new(1e-5, 1e10), rates);
    let taken = turns.take().into_iter().map(|turn| turn.taken.into_iter().skip(WARM_UP).collect());
    Ok(InTurn { profile, taken: taken.collect() })
}

impl Run {
    /// Returns the run of a plan.
    pub(crate) fn of_plan(plan: &Plan) -> Self {
        Self {
            schedule: plan.schedule.clone(),
            boundaries: plan.boundaries.clone(),
            replicas: plan.mesh.data,
        }
    }

    /// Cuts the model so that the heaviest stage is as light as possible by its description.
    pub(crate) fn by_weight(model: &CutModel, schedule: Schedule, replicas: u32) -> Outcome<Self> {
        Self::cut_by(model, schedule, replicas, &Method::Optimal)
    }

    /// Cuts the model by a method.
    pub(crate) fn cut_by(
        model: &CutModel,
        schedule: Schedule,
        replicas: u32,
        method: &Method,
    ) -> Outcome<Self> {
        let weights = model.describe(SEQUENCE).weights();
        let cut = partition(&weights, schedule.placement().stages(), method)?;
        let boundaries = cut.ranges().skip(1).map(|range| range.start).collect();
        Ok(Self { schedule, boundaries, replicas })
    }

    fn prediction(&self, model: &CutModel, profile: &Profile) -> Outcome<Prediction> {
        let choice = PlanChoice {
            head_parts: Some(model.parts()),
            boundaries: self.boundaries.clone(),
            recompute: vec![None; self.schedule.placement().stages() as usize],
            mesh: Mesh { data: self.replicas, ..Mesh::default() },
            ..PlanChoice::default()
        };
        Ok(predict(profile, &self.schedule, &choice)?)
    }

    /// Returns the bytes that each rank always holds.
    fn fixed(&self, model: &CutModel) -> Vec<u64> {
        let layers = model.describe(SEQUENCE).layers;
        let placement = self.schedule.placement();
        let start = |stage: usize| match stage.checked_sub(1) {
            None => 0,
            Some(before) => self.boundaries.get(before).copied().unwrap_or(layers.len()),
        };
        let bytes_of = |stage: &StageIndex| -> u64 {
            let range = start(stage.index())..start(stage.index() + 1);
            layers[range].iter().map(|layer| layer.parameters * STATIC).sum()
        };
        placement.all_ranks().map(|rank| placement.stages_of(rank).iter().map(bytes_of).sum()).collect()
    }

    /// Returns what a profile predicts.
    pub(crate) fn predicted(&self, model: &CutModel, profile: &Profile) -> Outcome<RunFigures> {
        let prediction = self.prediction(model, profile)?;
        let busy = |rank| prediction.run.timeline().busy(Rank::new(rank));
        let fixed = self.fixed(model).into_iter();
        Ok(RunFigures {
            step: prediction.step_s(),
            busy: (0..self.schedule.ranks()).map(busy).collect(),
            activations: prediction
                .peak_bytes
                .iter()
                .zip(fixed)
                .map(|(&peak, fixed)| peak as f64 - fixed as f64)
                .collect(),
        })
    }

    /// Returns the medians of steps that were taken. With replicas, busy times and memory are the means of
    /// each rank over the replicas.
    pub(crate) fn measured(&self, model: &CutModel, taken: &[StepSummary]) -> RunFigures {
        let ranks = self.schedule.ranks();
        let median = |of: &dyn Fn(&StepSummary) -> f64| Spread::new(taken.iter().map(of).collect()).median();
        let over_replicas = |of: &dyn Fn(u32) -> f64, rank: u32| {
            (0..self.replicas).map(|replica| of(replica * ranks + rank)).sum::<f64>()
                / f64::from(self.replicas)
        };
        let busy = |rank| median(&|step| over_replicas(&|rank| step.timeline.busy(Rank::new(rank)), rank));
        let peak = |rank| median(&|step| over_replicas(&|rank| step.peak_bytes[rank as usize] as f64, rank));
        let fixed = self.fixed(model);
        RunFigures {
            step: median(&|step| step.wall.as_secs_f64()),
            busy: (0..ranks).map(busy).collect(),
            activations: (0..ranks).map(|rank| peak(rank) - fixed[rank as usize] as f64).collect(),
        }
    }

    fn turn(&self, model: &CutModel) -> Outcome<Turn> {
        let lowering = TrainingLowering { replicas: self.replicas, ..TrainingLowering::default() };
        let program = for_training(&self.schedule, &lowering)?;
        let starts: Vec<usize> = [0]
            .into_iter()
            .chain(self.boundaries.clone())
            .chain([model.describe(SEQUENCE).layers.len()])
            .collect();
        let world = World::local(program.ranks() * self.replicas);
        let config = PipelineConfig { data_parallel: self.replicas, ..pipeline_config(model) };
        let model = model.clone();
        let make = move |index: StageIndex| stage(&model, starts[index.index()]..starts[index.index() + 1]);
        let pipeline = Pipeline::launch(program, world, &config, make)?;
        let shape = [(self.schedule.microbatches() * self.replicas) as usize, SEQUENCE];
        let [inputs, targets] = [0, 1].map(|shift| tokens(shape, shift));
        Ok(Turn { pipeline, inputs, targets, taken: Vec::new() })
    }
}

fn pipeline_config(model: &CutModel) -> PipelineConfig {
    let optimizer = AdamW { betas: (0.9, 0.95), epsilon: 1e-8, weight_decay: 0.1 }.init();
    PipelineConfig {
        optimizer: Some(optimizer),
        clip_norm: Some(1.0),
        targets_for_all: model.needs_targets(),
        ..PipelineConfig::default()
    }
}

fn stage(model: &CutModel, range: std::ops::Range<usize>) -> Result<Stage, ModelError> {
    model.training_stage(range, &InitialParameters::Seed(SEED), Device::flex().autodiff())
}
