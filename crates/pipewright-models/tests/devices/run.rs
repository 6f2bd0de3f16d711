//! A training run of a reference model on given devices.

use burn::tensor::Device;
use pipewright::device::Devices;
use pipewright::mesh::DataParallelMode;
use pipewright::offload::OffloadTo;
use pipewright::optimizer::AdamW;
use pipewright::pipeline::{Pipeline, PipelineConfig};
use pipewright::stage::Stage;
use pipewright::train::data::{DataConfig, Tokenizer};
use pipewright::train::{LearningRate, Metrics, Trainer};
use pipewright::transport::World;
use pipewright_models::{ModelConfig, ModelError, ModelFamily, hf};
use pipewright_schedule::lower::{OffloadConfig, TrainingLowering, for_training};
use pipewright_schedule::{
    Method, Recompute, ScheduleSpec, StageIndex, ValidatedProgram, generate, partition,
};

use crate::reference::{Reference, Step, Within};
use crate::take_lowest_priority;

/// A run of a reference model with PyTorch's batches.
#[derive(Clone, Copy)]
pub(crate) struct Run<'a> {
    pub(crate) model: &'static str,
    pub(crate) schedule: &'a str,
    pub(crate) ranks: u32,
    /// Of each replica.
    pub(crate) microbatches: u32,
    pub(crate) replicas: u32,
    pub(crate) is_sharded: bool,
    pub(crate) recompute: &'a str,
    /// Whether the inputs that recomputed forwards keep go to the host's memory.
    pub(crate) offloads: bool,
    pub(crate) steps: usize,
}

impl Default for Run<'_> {
    fn default() -> Self {
        Self {
            model: "llama-tiny",
            schedule: "1f1b",
            ranks: 1,
            microbatches: 4,
            replicas: 1,
            is_sharded: false,
            recompute: "none",
            offloads: false,
            steps: 3,
        }
    }
}

impl Run<'_> {
    /// Trains and compares losses and gradient norms with PyTorch's.
    pub(crate) fn check(self, devices: &Devices) -> Vec<Step> {
        let metrics = self.train(devices);
        let steps: Vec<Step> = metrics
            .iter()
            .map(|step| Step { loss: step.loss, grad_norm: step.grad_norm, balance: None })
            .collect();
        let expected = Reference::load(self.model).expected.steps;
        Reference::assert_within(&steps, &expected, Within { loss: 2e-5, grad_norm: 2e-4 });
        steps
    }

    /// Trains.
    pub(crate) fn train(self, devices: &Devices) -> Vec<Metrics> {
        let reference = Reference::load(self.model);
        match reference.config.clone() {
            ModelConfig::Llama(config) => self.train_family(&reference, config, devices),
            ModelConfig::Qwen2(config) => self.train_family(&reference, config, devices),
            other => panic!("no reference is of {other:?}"),
        }
    }

    fn train_family<F>(self, reference: &Reference, model: F, devices: &Devices) -> Vec<Metrics>
    where
        F: ModelFamily + 'static,
    {
        let batch = reference.expected.batch;
        let rows = DataConfig {
            path: vec![reference.tokens().display().to_string()],
            tokenizer: Tokenizer::Bytes,
            seq_len: reference.expected.seq_len,
            shuffle: false,
            seed: 0,
            ..DataConfig::default()
        };
        let rows = rows.open(model.vocab_size(), batch).expect("the data can be read");
        let rate = LearningRate::constant(2e-3);
        let mut trainer = Trainer::new(self.launch(reference, model, devices), rows, batch, rate);
        (0..self.steps).map(|_| trainer.step().expect("a step").0).collect()
    }

    fn recompute(self) -> Recompute {
        self.recompute.parse().expect("a choice")
    }

    fn program(self) -> ValidatedProgram {
        let spec =
            ScheduleSpec { ranks: self.ranks, microbatches: self.microbatches, ..ScheduleSpec::default() };
        let schedule = generate(self.schedule, &spec).expect("a schedule");
        let lowering = TrainingLowering {
            replicas: self.replicas,
            unshard_window: if self.is_sharded { 1.try_into().ok() } else { None },
            offload: self.offloads.then(|| OffloadConfig::all(self.recompute())),
            ..TrainingLowering::default()
        };
        for_training(&schedule, &lowering).expect("it is sound")
    }

    fn launch<F>(self, reference: &Reference, model: F, devices: &Devices) -> Pipeline
    where
        F: ModelFamily + 'static,
    {
        let program = self.program();
        let count = program.placement().stages();
        let weights = model.describe(reference.expected.seq_len).weights();
        let stages = partition(&weights, count, &Method::Optimal).expect("it divides");
        let dir = reference.dir.clone();
        let make = move |stage: StageIndex| -> Result<Stage, ModelError> {
            take_lowest_priority();
            let module = hf::load_stage(&dir, &model, stages.range(stage), Device::flex().autodiff())?;
            let is_last = stage.get() + 1 == count;
            Ok(module.into_stage(is_last))
        };
        let adam = AdamW { betas: (0.9, 0.95), epsilon: 1e-8, weight_decay: 0.1 };
        let config = PipelineConfig {
            optimizer: Some(adam.init()),
            clip_norm: Some(1.0),
            devices: devices.clone(),
            recompute: self.recompute(),
            offload: self.offloads.then_some(OffloadTo::Host),
            data_parallel: self.replicas,
            data_parallel_mode: if self.is_sharded {
                DataParallelMode::Sharded
            } else {
                DataParallelMode::Replicated
            },
            ..PipelineConfig::default()
        };
        let world = World::local(program.ranks() * self.replicas);
        Pipeline::launch(program, world, &config, make).expect("it starts")
    }
}
