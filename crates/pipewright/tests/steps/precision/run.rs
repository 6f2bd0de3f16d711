//! A run of the small model, and the figures by which runs are compared.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use burn::tensor::TensorData;
use pipewright::batch::Batch;
use pipewright::checkpoint::{Checkpoint, CheckpointFolder, CheckpointWriter, TrainingState};
use pipewright::loss_scale::LossScaling;
use pipewright::pipeline::{Pipeline, PipelineConfig};
use pipewright::tensor::Precision;
use pipewright::train::data::Cursor;
use pipewright::transport::World;

use crate::support::{LAYERS, batch, config, program, split, stage};

pub(crate) const MICROBATCHES: u32 = 8;
pub(crate) const STEPS: u64 = 3;

/// Both types of half precision.
pub(crate) const HALF: [Precision; 2] = [Precision::Bf16, Precision::F16];

/// The configuration of a run. The default loss scale is too large for the gradients of the small model.
pub(crate) fn in_precision(precision: Precision) -> PipelineConfig {
    let loss_scaling = LossScaling { initial: 1024.0, ..LossScaling::default() };
    PipelineConfig { precision, loss_scaling, ..config() }
}

pub(crate) fn launch(schedule: &str, ranks: u32, config: &PipelineConfig) -> Option<Pipeline> {
    let program = program(schedule, ranks, MICROBATCHES / config.data_parallel);
    let stages = program.placement().stages();
    let world = World::local(ranks * config.data_parallel);
    (stages as usize <= LAYERS).then(|| {
        Pipeline::launch(program, world, config, move |index| stage(index, stages)).expect("it starts")
    })
}

pub(crate) fn batch_of(step: u64) -> Batch {
    let parts = |seed| split(batch(seed, MICROBATCHES), MICROBATCHES);
    Batch::new(parts(step), parts(100 + step))
}

/// The figures of each step of a run, and its parameters at the end.
#[derive(Debug, PartialEq)]
pub(crate) struct Outcome {
    pub(crate) losses: Vec<Vec<f64>>,
    pub(crate) norms: Vec<f64>,
    pub(crate) scales: Vec<Option<f64>>,
    pub(crate) skipped: Vec<bool>,
    pub(crate) parameters: BTreeMap<String, TensorData>,
}

pub(crate) fn train(pipeline: &mut Pipeline, steps: Range<u64>) -> Outcome {
    let mut outcome = Outcome {
        losses: Vec::new(),
        norms: Vec::new(),
        scales: Vec::new(),
        skipped: Vec::new(),
        parameters: BTreeMap::new(),
    };
    for step in steps {
        let summary = pipeline.step_batch(batch_of(step), 1e-2).expect("a step");
        outcome.losses.push(summary.losses);
        outcome.norms.push(summary.gradient_norm);
        outcome.scales.push(summary.loss_scale);
        outcome.skipped.push(summary.skipped);
    }
    let parameters = pipeline.parameters().expect("they are there");
    let parameters = parameters.into_iter().map(|parameter| (parameter.path.to_string(), parameter.data));
    Outcome { parameters: parameters.collect(), ..outcome }
}

pub(crate) fn run(schedule: &str, ranks: u32, config: &PipelineConfig, steps: u64) -> Option<Outcome> {
    Some(train(&mut launch(schedule, ranks, config)?, 0..steps))
}

/// Saves the state of a pipeline after this step and reads it back.
pub(crate) fn saved(pipeline: &mut Pipeline, step: u64, folder: &Path) -> Arc<Checkpoint> {
    let (cursor, ranks) = (Cursor { epoch: 0, index: 0 }, pipeline.state().expect("a state"));
    let state = TrainingState { step, cursor, description: Default::default(), ranks };
    let owned = CheckpointFolder::own(folder).expect("an empty folder");
    let mut writer = CheckpointWriter::start(owned, 1, 1, Duration::from_secs(20)).expect("it starts");
    writer.save(state).and_then(|_| writer.wait()).expect("it is saved");
    Arc::new(CheckpointFolder::newest(folder).expect("a sound checkpoint"))
}
