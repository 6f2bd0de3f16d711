//! Trains a reference model with the pipeline. The results must be within tolerance of PyTorch, and
//! bit-identical to the losses of one rank with as many microbatches.

use std::env::var_os;
use std::num::NonZeroU32;
use std::sync::OnceLock;

use burn::tensor::{Device, Int, Tensor, TensorData};
use pipewright::loss_scale::LossScaling;
use pipewright::mesh::DataParallelMode;
use pipewright::nn::TensorParallel;
use pipewright::optimizer::AdamW;
use pipewright::pipeline::{Pipeline, PipelineConfig};
use pipewright::tensor::{Precision, unpack};
use pipewright::train::Trainer;
use pipewright::train::data::{Cursor, DataConfig, Tokenizer};
use pipewright::train::{ExpertBalance, LearningRate};
use pipewright::transport::World;
use pipewright_models::{CutModel, InitialParameters, ModelConfig, Place, ROUTER_CORRECTION, hf};
use pipewright_schedule::generate::catalogue;
use pipewright_schedule::lower::{TrainingLowering, for_training};
use pipewright_schedule::{Recompute, ScheduleSpec, StageIndex, ValidatedProgram, generate, partition};

use crate::reference::{Balance, Reference, Step};

/// The steps that are compared where many cuts and schedules are, or in half precision, which is slow on a
/// processor.
/// They have the bits of one rank, whose run is compared with PyTorch to its end: a sum in another order
/// changes the gradient norm of the first step, and its update changes all losses after it.
pub(crate) const FIRST_STEPS: usize = 3;

/// The variable with which all steps are compared, as `.ci/run nightly` does.
const ALL_STEPS: &str = "PIPEWRIGHT_LONG_TESTS";

/// The schedule whose stages do not visit the microbatches in ascending order.
const OUT_OF_ORDER: &str = "loopedbfs";

/// Returns a choice in which the first two stages recompute a part of their layers and of their microbatches.
pub(crate) fn in_part() -> Recompute {
    "0:layers=1,1:layers=1:keep=1".parse().expect("a choice")
}

/// Returns a choice of parts of layers, with and without second forwards.
pub(crate) fn parts() -> Recompute {
    "0:layers=1:keep=1:parts=norms,1:parts=norms+feed-forward".parse().expect("a choice")
}

/// A reference model, and its runs on one rank.
pub(crate) struct Model {
    name: &'static str,
    /// Whether the balance loss of routers is part of the loss, as the reference's `config.json` says.
    is_balanced: bool,
    /// By the logarithm of the number of microbatches.
    one_rank: [OnceLock<Vec<Step>>; 4],
}

impl Model {
    pub(crate) const fn new(name: &'static str) -> Self {
        Self::with_balance(name, true)
    }

    /// The same model without the balance loss of its routers.
    pub(crate) const fn unbalanced(name: &'static str) -> Self {
        Self::with_balance(name, false)
    }

    const fn with_balance(name: &'static str, is_balanced: bool) -> Self {
        Self { name, is_balanced, one_rank: [const { OnceLock::new() }; 4] }
    }

    /// Checks the first steps of a run.
    pub(crate) fn check(&self, schedule: &str, ranks: u32, microbatches: u32) {
        let (run, one_rank) = self.runs(schedule, ranks, microbatches, first_steps);
        assert_eq!(run, one_rank, "{schedule}: the bits of one rank");
    }

    /// Checks all steps of a run, and the logits of the model that it has trained.
    pub(crate) fn check_to_the_end(&self, schedule: &str, ranks: u32, microbatches: u32) {
        let (run, one_rank) = self.runs(schedule, ranks, microbatches, all_steps);
        assert_eq!(run, one_rank, "{schedule}: the bits of one rank");
    }

    /// Does the same as [`Model::check_to_the_end`], within a tolerance, for a schedule whose stages do not visit
    /// the microbatches in ascending order.
    fn check_out_of_order(&self, schedule: &str, ranks: u32, microbatches: u32) {
        let (run, one_rank) = self.runs(schedule, ranks, microbatches, all_steps);
        for (Step { loss, .. }, Step { loss: expected, .. }) in run.iter().zip(one_rank) {
            assert!((loss - expected).abs() <= 1e-6 * expected, "{schedule}: {loss} {expected}");
        }
    }

    /// Checks every schedule of the catalogue that trains, so that new ones are tested too.
    pub(crate) fn check_every_schedule(&self, ranks: u32, microbatches: u32) {
        for generator in catalogue().iter().filter(|generator| generator.trains) {
            match generator.name {
                OUT_OF_ORDER => self.check_out_of_order(OUT_OF_ORDER, ranks, microbatches),
                name => self.check(name, ranks, microbatches),
            }
        }
    }

    /// Checks that stages, blocks and parts of stages that compute their forward again have the bits of one
    /// rank.
    pub(crate) fn check_recomputed(&self, schedule: &str, ranks: u32, microbatches: u32) {
        let reference = self.reference();
        let steps = first_steps(&reference);
        let one_rank = &self.one_rank(&reference, microbatches)[..steps];
        for recompute in [Recompute::Stage, Recompute::Block, in_part(), Recompute::Parts, parts()] {
            let config = PipelineConfig { recompute: recompute.clone(), ..PipelineConfig::default() };
            let run = train_steps(&reference, schedule, ranks, microbatches, &config, steps);
            assert_eq!(run, one_rank, "{schedule}, recompute {recompute}");
        }
    }

    /// Checks that a training in half precision has the same bits for every schedule on so many ranks as on
    /// one rank, and losses within `tolerance` of single precision.
    pub(crate) fn check_in(&self, precision: Precision, ranks: u32, microbatches: u32, tolerance: f64) {
        let reference = self.reference();
        // In f16, with a scale that needs no skipped update to become small enough.
        let loss_scaling = LossScaling { initial: 256.0, ..LossScaling::default() };
        let config = PipelineConfig { precision, loss_scaling, ..PipelineConfig::default() };
        let one_rank = train(&reference, "gpipe", 1, microbatches, &config);
        let single = self.one_rank(&reference, microbatches);
        let error = |(found, expected): (&Step, &Step)| (found.loss - expected.loss).abs() / expected.loss;
        let largest = one_rank.iter().zip(single).map(error).fold(0.0, f64::max);
        assert!(largest <= tolerance, "{largest:.1e}: {one_rank:?} {single:?}");
        assert_ne!(one_rank, single, "nothing is rounded");
        let schedules =
            catalogue().iter().filter(|generator| generator.trains).map(|generator| generator.name);
        for schedule in schedules.filter(|name| *name != OUT_OF_ORDER) {
            let run = train_steps(&reference, schedule, ranks, microbatches, &config, FIRST_STEPS);
            assert_eq!(run, one_rank[..FIRST_STEPS], "{schedule} on {ranks} ranks");
        }
    }

    /// Returns a run of so many steps, which it compares with PyTorch's, and as many steps of the run of one
    /// rank.
    fn runs(
        &self,
        schedule: &str,
        ranks: u32,
        microbatches: u32,
        steps: fn(&Reference) -> usize,
    ) -> (Vec<Step>, &[Step]) {
        let reference = self.reference();
        let steps = steps(&reference);
        let run = train_steps(&reference, schedule, ranks, microbatches, &PipelineConfig::default(), steps);
        reference.assert_close(&run, &reference.steps(microbatches)[..steps]);
        (run, &self.one_rank(&reference, microbatches)[..steps])
    }

    /// Returns the run of one rank, which the first test that needs it makes.
    fn one_rank(&self, reference: &Reference, microbatches: u32) -> &[Step] {
        self.one_rank[microbatches.ilog2() as usize].get_or_init(|| {
            let run = train(reference, "gpipe", 1, microbatches, &PipelineConfig::default());
            reference.assert_close(&run, &reference.steps(microbatches));
            run
        })
    }

    fn reference(&self) -> Reference {
        let mut reference = Reference::load(self.name);
        if !self.is_balanced {
            let ModelConfig::Qwen3Moe(config) = &mut reference.config else { panic!("it has no router") };
            config.mixture.output_router_logits = false;
            reference.expected.expected_aux.clear();
        }
        reference
    }
}

/// Trains the reference's model for as many steps as the reference has.
pub(crate) fn train(
    reference: &Reference,
    schedule: &str,
    ranks: u32,
    microbatches: u32,
    config: &PipelineConfig,
) -> Vec<Step> {
    train_steps(reference, schedule, ranks, microbatches, config, all_steps(reference))
}

/// Trains the reference's model for the first steps, or for all if [`ALL_STEPS`] is set.
pub(crate) fn train_first(
    reference: &Reference,
    schedule: &str,
    ranks: u32,
    microbatches: u32,
    config: &PipelineConfig,
) -> Vec<Step> {
    train_steps(reference, schedule, ranks, microbatches, config, first_steps(reference))
}

fn all_steps(reference: &Reference) -> usize {
    reference.expected.steps.len()
}

/// Returns how many steps [`train_first`] takes.
pub(crate) fn first_steps(reference: &Reference) -> usize {
    let all = all_steps(reference);
    if var_os(ALL_STEPS).is_some() { all } else { all.min(FIRST_STEPS) }
}

/// Trains the reference's model for so many steps.
pub(crate) fn train_steps(
    reference: &Reference,
    schedule: &str,
    ranks: u32,
    microbatches: u32,
    config: &PipelineConfig,
    steps: usize,
) -> Vec<Step> {
    let spec = ScheduleSpec { ranks, microbatches, ..ScheduleSpec::default() };
    train_spec(reference, schedule, spec, config, steps)
}

/// Like [`train_steps`], but with all settings of the schedule. The replicas share the microbatches of
/// `spec`.
pub(crate) fn train_spec(
    reference: &Reference,
    schedule: &str,
    spec: ScheduleSpec,
    config: &PipelineConfig,
    steps: usize,
) -> Vec<Step> {
    let (mut trainer, first) = trainer(reference, schedule, spec, config);
    let step = |_| {
        let (metrics, _) = trainer.step().expect("a step");
        let balance = metrics.auxiliary.get("moe_aux");
        let balance = balance.map(|&loss| Balance { loss, total: metrics.total.expect("the sum") });
        Step { loss: metrics.loss, grad_norm: metrics.grad_norm, balance }
    };
    let run = (0..steps).map(step).collect();
    // The final logits of the reference come from a training without a balance loss, in single precision.
    let is_whole = config.precision == Precision::F32
        && !config.delayed
        && reference.cut.head_parts == 1
        && steps == reference.expected.steps.len();
    if is_whole && reference.expected.expected_aux.is_empty() && reference.balance_speed.is_none() {
        let (seq_len, batch) = (reference.expected.seq_len, reference.expected.batch);
        let tokens = TensorData::new::<i32, _>(first, [batch, seq_len]);
        let tokens = Tensor::<2, Int>::from_data(tokens, &Device::flex());
        let outputs = trainer.pipeline().eval(tokens, None::<Tensor<2, Int>>).expect("an evaluation").outputs;
        let logits = outputs.into_iter().next().expect("the first microbatch has the first row");
        reference.assert_final_logits(unpack(logits).expect("logits"));
    }
    run
}

/// Makes the program of `train`. The replicas share the microbatches.
fn program(
    reference: &Reference,
    schedule: &str,
    spec: ScheduleSpec,
    config: &PipelineConfig,
) -> ValidatedProgram {
    let replicas = config.data_parallel;
    let spec = ScheduleSpec { microbatches: spec.microbatches / replicas, ..spec };
    let schedule = generate(schedule, &spec).expect("a schedule");
    let is_sharded = config.data_parallel_mode != DataParallelMode::Replicated;
    let unshard_window = NonZeroU32::new(1).filter(|_| is_sharded);
    let keep_overlaps = config.runs_overlaps();
    let stream_window = reference.stream_window;
    let lowering = TrainingLowering {
        replicas,
        unshard_window,
        stream_window,
        keep_overlaps,
        ..TrainingLowering::default()
    };
    for_training(&schedule, &lowering).expect("it is sound")
}

/// Returns the trainer of a run, and the ids of its first batch.
pub(crate) fn trainer(
    reference: &Reference,
    schedule: &str,
    spec: ScheduleSpec,
    config: &PipelineConfig,
) -> (Trainer, Vec<i32>) {
    let program = program(reference, schedule, spec, config);
    let (seq_len, batch) = (reference.expected.seq_len, reference.expected.batch);
    let rows = DataConfig {
        path: vec![reference.tokens().display().to_string()],
        tokenizer: Tokenizer::Bytes,
        seq_len,
        shuffle: false,
        seed: 0,
        ..DataConfig::default()
    };
    let mut rows = rows.open(reference.config.vocab_size(), batch).expect("the data can be read");
    let first = rows.next_batch(batch).expect("it is in memory").inputs;
    rows.seek(Cursor { epoch: 0, index: 0 }).expect("the first row");
    let rate = LearningRate::constant(reference.expected.lr);
    let mut trainer = Trainer::new(launch(reference, program, config), rows, batch, rate);
    if let Some(speed) = reference.balance_speed {
        let correction = ROUTER_CORRECTION.to_owned();
        trainer = trainer.with_expert_balance(ExpertBalance { speed, correction });
    }
    (trainer, first)
}

fn launch(reference: &Reference, program: ValidatedProgram, config: &PipelineConfig) -> Pipeline {
    let count = program.placement().stages();
    let model = CutModel::new(reference.config.clone(), reference.cut.head_parts).expect("it can be cut");
    let model = model.with_embedding_parts(reference.cut.embedding_parts).expect("it can be cut");
    let model = model.with_form(reference.form);
    let model = match reference.adapter.clone() {
        Some(adapter) => model.with_adapter(adapter).expect("it has these layers"),
        None => model,
    };
    let model = match reference.stream_window {
        Some(_) => {
            let specs = model.model().parameters().expect("its parameters");
            model.with_streamed(&hf::streamed_sizes(&reference.dir, &specs).expect("its files"))
        }
        None => model,
    };
    let weights = model.describe(reference.expected.seq_len).weights();
    let stages = partition(&weights, count, &reference.cut.method).expect("it divides");
    let initial = InitialParameters::Directory { path: reference.dir.clone(), seed: 0 };
    let targets_for_all = model.needs_targets();
    let precision = config.precision;
    let make = move |stage: StageIndex, tensor: &TensorParallel| {
        let place = Place { tensor: tensor.clone(), precision, ..Device::flex().autodiff().into() };
        model.training_stage(stages.range(stage), &initial, place)
    };
    let adam = AdamW { betas: (0.9, 0.95), epsilon: 1e-8, weight_decay: reference.expected.weight_decay };
    let config = PipelineConfig {
        optimizer: config.optimizer.clone().or_else(|| Some(adam.init())),
        clip_norm: Some(1.0),
        targets_for_all,
        ..config.clone()
    };
    let world = World::local(program.ranks() * config.data_parallel * config.tensor_parallel);
    Pipeline::launch_split(program, world, &config, make).expect("it starts")
}
