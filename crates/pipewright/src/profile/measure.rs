//! Runs the short model and collects its figures.

use std::fmt::Display;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pipewright_schedule::recompute::LayerParts;
use pipewright_schedule::{ModelDesc, Recompute, StageIndex, TrainedStages};

use super::measured::{Collection, Measured};
use super::probe::{Probe, Probed};
use super::program::program;
use super::sample::Sample;
use crate::mesh::DataParallelMode;
use crate::pipeline::{Pipeline, PipelineConfig, PipelineError, StepSummary};
use crate::stage::Stage;
use crate::transport::World;

/// How a model is measured.
#[derive(Clone)]
pub struct MeasureConfig {
    /// The settings of training: the optimizer, devices and threads. Replicas, recomputation and hook are
    /// replaced.
    pub pipeline: PipelineConfig,
    /// The number of ranks that run at the same time, each of them the same short model.
    pub ranks: u32,
    /// The rows of a microbatch.
    pub rows: u32,
    /// The number of layers of each kind.
    pub copies: usize,
    /// The number of steps that count. More are taken if they last less than half a second together, or if the process is
    /// stopped again and again.
    pub steps: u32,
    /// The time after which no further step begins. A few steps are taken in any case.
    pub time_limit: Duration,
    /// The memory that all ranks may use together; with less than that, one layer of each kind is measured.
    pub memory: Option<u64>,
    /// For each layer of the model, the bytes of its parameters, of the optimizer's state, and of the copy in
    /// half precision. If empty, parameters in single precision with two moments.
    pub state_bytes: Vec<u64>,
}

impl Default for MeasureConfig {
    /// One rank and one row, two layers of each kind, and twelve steps in at most eight seconds.
    fn default() -> Self {
        Self {
            pipeline: PipelineConfig::default(),
            ranks: 1,
            rows: 1,
            copies: 2,
            steps: 12,
            time_limit: Duration::from_secs(8),
            memory: None,
            state_bytes: Vec::new(),
        }
    }
}

/// The tensors of a parameter's size that training holds: the parameter, its gradient and two moments.
const TENSORS: u64 = 4;
/// The bytes of a parameter with two moments.
const STATE_BYTES: u64 = 12;
/// The steps before the first step that counts.
const WARM_UP: u32 = 2;
/// The steps that are taken whatever their time.
const FEWEST_STEPS: u32 = 2;

/// Measures the layers of `model`. `make` builds the stage of a range of layers; the one with the last layer
/// has a loss. `feed` gets each pipeline and returns a function that takes a step of it, for batches of three
/// microbatches for each rank.
///
/// # Errors
/// As [`Pipeline::launch`] and [`Pipeline::step`].
///
/// # Panics
/// If the model has no layer.
pub fn measure<F, E, S>(
    model: &ModelDesc,
    config: &MeasureConfig,
    make: F,
    mut feed: impl FnMut(Pipeline) -> S,
) -> Result<Measured, PipelineError>
where
    F: Fn(Range<usize>) -> Result<Stage, E> + Clone + Send + Sync + 'static,
    E: Display,
    S: FnMut() -> Result<StepSummary, PipelineError>,
{
    let ranks = config.ranks.max(1);
    let sample = sample(model, config, ranks);
    let split = sample.split();
    let parameters = model.layers.iter().map(|layer| layer.parameters);
    let state = if config.state_bytes.len() == model.layers.len() {
        config.state_bytes.clone()
    } else {
        parameters.map(|number| number.saturating_mul(STATE_BYTES)).collect()
    };
    let times = (config.rows, config.time_limit / 2);
    let mut collection = Collection::new(&sample, &split, model, state, times);
    // The other runs have one or two figures for each layer and need fewer steps. If stages are recomputed,
    // each layer is a stage, which shows what a stage holds.
    let mut runs = vec![
        Run { recompute: Recompute::None, steps: config.steps, time: config.time_limit / 2 },
        Run { recompute: Recompute::Stage, steps: config.steps / 3, time: config.time_limit / 4 },
    ];
    if !LayerParts::of_layers(&model.layers).is_empty() {
        runs.push(Run { recompute: Recompute::Parts, steps: config.steps / 3, time: config.time_limit / 4 });
    }
    for run in runs {
        let layers = if run.recompute == Recompute::Stage { &split } else { &sample };
        let subject = (layers, layers.trained(model));
        run.steps(subject, config, ranks, make.clone(), &mut feed, |step, probed| {
            match run.recompute {
                Recompute::None => collection.add(&step, &probed.holdings),
                Recompute::Stage => collection.add_recomputing(&step.timeline, &probed.holdings),
                _ => collection.add_remade(&probed.remade),
            }
            run.recompute == Recompute::None && collection.needs_more()
        })?;
    }
    Ok(collection.finish(ranks).expect("every stage of a model with layers has run"))
}

/// Returns the layers to measure.
fn sample(model: &ModelDesc, config: &MeasureConfig, ranks: u32) -> Sample {
    let sample = Sample::of(model, config.copies);
    let needed = sample.parameter_bytes(model).saturating_mul(TENSORS).saturating_mul(u64::from(ranks));
    match config.memory {
        // The other half is for activations.
        Some(memory) if needed > memory / 2 => Sample::of(model, 1),
        _ => sample,
    }
}

/// One run of the short model.
struct Run {
    recompute: Recompute,
    steps: u32,
    time: Duration,
}

impl Run {
    /// Takes the steps of the run, with the layers of a sample and its trained stages. `keep` gets the steps
    /// that count, and returns whether they are still too few.
    fn steps<F, E, S>(
        &self,
        (sample, trained): (&Sample, TrainedStages),
        config: &MeasureConfig,
        ranks: u32,
        make: F,
        feed: &mut impl FnMut(Pipeline) -> S,
        mut keep: impl FnMut(StepSummary, Probed) -> bool,
    ) -> Result<(), PipelineError>
    where
        F: Fn(Range<usize>) -> Result<Stage, E> + Send + Sync + 'static,
        E: Display,
        S: FnMut() -> Result<StepSummary, PipelineError>,
    {
        let has_second_forwards = self.recompute == Recompute::Stage;
        let program =
            program(sample.stages.len(), trained, ranks, has_second_forwards).expect("the program is sound");
        let actions = program.as_program().rows().iter().map(Vec::len).sum();
        let probe =
            Arc::new(Probe::new(config.pipeline.devices.clone(), actions, self.recompute.has_parts()));
        let pipeline_config = PipelineConfig {
            data_parallel: ranks,
            data_parallel_mode: DataParallelMode::Replicated,
            recompute: self.recompute.clone(),
            offload: None,
            hook: Some(probe.clone()),
            ..config.pipeline.clone()
        };
        let layers: Vec<Range<usize>> = sample.stages.iter().map(|stage| stage.layers.clone()).collect();
        let make_stage = move |stage: StageIndex| make(layers[stage.index()].clone());
        let pipeline = Pipeline::launch(program, World::local(ranks), &pipeline_config, make_stage)?;
        let mut step = feed(pipeline);
        let start = Instant::now();
        for warm_up in 0..WARM_UP {
            if warm_up == 0 || start.elapsed() < self.time / 3 {
                step()?;
            }
        }
        drop(probe.take());
        let (mut taken, mut needs_more) = (0, true);
        while taken < FEWEST_STEPS || start.elapsed() < self.time && (taken < self.steps || needs_more) {
            let summary = step()?;
            needs_more = keep(summary, probe.take());
            taken += 1;
        }
        Ok(())
    }
}
