//! The trainer's batches: the last rows of an epoch, which do not fill a batch, are followed by rows of the
//! next epoch.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use burn::module::Module;
use burn::nn::{EmbeddingConfig, LinearConfig};
use burn::optim::AdamWConfig;
use burn::tensor::{Device, Int, Tensor, TensorData};
use pipewright::batch::Batch;
use pipewright::checkpoint::{CheckpointFolder, CheckpointWriter};
use pipewright::hook::ActionHook;
use pipewright::ids::{StepNumber, WorldRank};
use pipewright::nn::{Embedding, Linear, cross_entropy};
use pipewright::optimizer::{GradientHook, ParameterGradient};
use pipewright::pipeline::{Layers, Pipeline, PipelineBuilder, PipelineConfig, PipelineError};
use pipewright::stage::{StageContext, StageModule};
use pipewright::train::data::{DataConfig, TokenRows, Tokenizer};
use pipewright::train::{LearningRate, Metrics, ResumeError, Trainer, Validation};
use serde_json::Map;

const VOCABULARY: usize = 128;
const SEQUENCE: usize = 4;
const BATCH_ROWS: usize = 4;
const RATE: f64 = 1e-2;
/// Six rows, which do not fill two batches. Each row's last token is the target of its last position.
const TEXT: &str = "pipeline parallel trains!";

/// Predicts a token from the one before it.
#[derive(Module, Debug)]
struct Bigrams {
    table: Embedding,
    head: Linear,
}

impl StageModule for Bigrams {
    type Input = Tensor<2, Int>;
    type Output = Tensor<3>;

    fn forward(&self, ids: Tensor<2, Int>, _context: &StageContext) -> Tensor<3> {
        self.head.forward(self.table.forward(ids))
    }
}

fn launch() -> Pipeline {
    launch_with(|_: &mut ParameterGradient<'_>| {})
}

fn launch_with(hook: impl GradientHook + 'static) -> Pipeline {
    builder(PipelineConfig::default()).gradient_hook(hook).launch().expect("it starts")
}

fn builder(config: PipelineConfig) -> PipelineBuilder {
    let layers = Layers::new(1, |_| {
        let device = Device::flex().autodiff();
        Bigrams {
            table: EmbeddingConfig::new(VOCABULARY, 8).init(&device).into(),
            head: LinearConfig::new(8, VOCABULARY).init(&device).into(),
        }
    });
    Pipeline::builder(layers)
        .config(config)
        .microbatches(2)
        .loss(|logits: Tensor<3>, next: Tensor<2, Int>| {
            cross_entropy(logits.flatten(0, 1), next.flatten(0, 1))
        })
        .optimizer(AdamWConfig::new().init())
}

fn rows() -> TokenRows {
    rows_of(TEXT)
}

fn rows_of(text: &str) -> TokenRows {
    let config = DataConfig {
        path: Vec::new(),
        tokenizer: Tokenizer::Bytes,
        seq_len: SEQUENCE,
        shuffle: false,
        seed: 0,
        ..DataConfig::default()
    };
    config.open_text(text, VOCABULARY, BATCH_ROWS).expect("the text has enough rows")
}

fn trainer() -> Trainer {
    let rate = LearningRate::constant(RATE);
    Trainer::new(launch(), rows(), BATCH_ROWS, rate)
}

/// Returns rows of the text, counted from 0, and the tokens that follow.
fn batch(rows: [usize; BATCH_ROWS]) -> [Tensor<2, Int>; 2] {
    let ids = |shift: usize| {
        let rows = rows.iter().flat_map(|row| &TEXT.as_bytes()[row * SEQUENCE + shift..][..SEQUENCE]);
        let ids: Vec<i32> = rows.map(|&byte| i32::from(byte)).collect();
        Tensor::from_data(TensorData::new(ids, [BATCH_ROWS, SEQUENCE]), &Device::flex())
    };
    [ids(0), ids(1)]
}

#[test]
fn a_batch_at_the_end_of_an_epoch_continues_with_the_next_one() {
    let (mut trainer, mut pipeline) = (trainer(), launch());
    assert_eq!(rows().rows(), 6);
    let batches = [[0, 1, 2, 3], [4, 5, 0, 1], [2, 3, 4, 5]];
    for (rows, epoch) in batches.into_iter().zip([4.0 / 6.0, 8.0 / 6.0, 2.0]) {
        let [inputs, next] = batch(rows);
        let expected = pipeline.step(inputs, next, RATE).expect("a step");
        let (metrics, summary) = trainer.step().expect("a step");
        assert_eq!((metrics.epoch, metrics.loss), (Some(epoch), expected.loss()));
        assert_eq!((summary.losses, metrics.grad_norm), (expected.losses, expected.gradient_norm));
    }
}

#[test]
fn accumulated_batches_at_the_end_of_an_epoch_are_one_step() {
    let mut trainer = trainer().accumulating(NonZeroU32::new(3).expect("not 0"));
    let mut pipeline = launch();
    let whole = [[0, 1, 2, 3], [4, 5, 0, 1], [2, 3, 4, 5]].map(batch);
    let [inputs, next] =
        [0, 1].map(|part| Tensor::cat(whole.iter().map(|batch| batch[part].clone()).collect(), 0));
    let expected = pipeline.step(inputs, next, RATE).expect("a step");
    let (metrics, summary) = trainer.step().expect("a step");
    assert_eq!((metrics.epoch, metrics.tokens), (Some(2.0), 48));
    assert_eq!(summary.losses.len(), 6);
    assert!((metrics.loss - expected.loss()).abs() < 1e-6, "{} {}", metrics.loss, expected.loss());
}

/// The steps of a trainer, each begun during the one before or alone. Both have the same metrics, and the
/// same state after the last step.
fn check_ahead(configured: impl Fn(Trainer) -> Trainer) {
    const STEPS: usize = 7;
    let run = |ahead: bool| {
        let mut trainer = configured(trainer());
        let mut steps = Vec::new();
        for step in 1..=STEPS {
            let continues = ahead && step < STEPS;
            let taken = if continues { trainer.step_ahead() } else { trainer.step() };
            let (Metrics { step, loss, grad_norm, learning_rate, tokens, epoch, .. }, summary) =
                taken.expect("a step");
            steps.push((step, loss, grad_norm, learning_rate, tokens, epoch, summary.losses));
            if continues {
                let error = trainer.state(Map::new()).expect_err("the next step has begun");
                assert!(matches!(error, PipelineError::StepBegun), "{error}");
            }
        }
        let state = trainer.state(Map::new()).expect("no step has begun");
        let parameters = trainer.pipeline().parameters().expect("every rank answers").into_iter();
        let parameters: Vec<_> =
            parameters.map(|found| (found.path, found.data.iter().collect::<Vec<f32>>())).collect();
        (steps, (state.step, state.cursor), parameters)
    };
    assert_eq!(run(true), run(false));
}

#[test]
fn steps_that_begin_during_the_one_before_are_the_same() {
    check_ahead(|trainer| trainer);
    let batches = NonZeroU32::new(3).expect("not 0");
    check_ahead(|trainer| trainer.accumulating(batches));
    check_ahead(|trainer| trainer.accumulating(batches).with_rampup(4));
}

/// A step that fails drops the one after it, whose rows are read again.
#[test]
fn a_failed_step_drops_the_rows_of_the_next_one() {
    let run = |ahead: bool| {
        // The model has three parameters, so the hook fails in the second step.
        let calls = AtomicU32::new(0);
        let hook = move |_: &mut ParameterGradient<'_>| {
            assert!(calls.fetch_add(1, Ordering::SeqCst) != 3, "it has to fail");
        };
        let rate = LearningRate::constant(RATE);
        let mut trainer = Trainer::new(launch_with(hook), rows(), BATCH_ROWS, rate);
        let mut steps = Vec::new();
        for _ in 0..4 {
            let taken = if ahead { trainer.step_ahead() } else { trainer.step() };
            let taken = taken.map(|(metrics, _)| (metrics.loss, metrics.epoch));
            steps.push(taken.map_err(|error| error.to_string()));
        }
        steps
    };
    let alone = run(false);
    assert_eq!(alone.iter().filter(|step| step.is_err()).count(), 1, "{alone:?}");
    assert_eq!(run(true), alone);
}

/// Only the trainer knows the metrics of the step that it has begun.
#[test]
fn a_step_that_was_finished_without_the_trainer_is_an_error() {
    let mut trainer = trainer();
    trainer.step_ahead().expect("a step");
    let restored = |trainer: &mut Trainer| {
        let scratch = tempfile::tempdir().expect("a scratch folder");
        let own = CheckpointFolder::own(scratch.path()).expect("no other process owns it");
        let mut writer = CheckpointWriter::start(own, 1, 1, Duration::from_secs(20)).expect("a thread");
        let mut other = self::trainer();
        writer.save(other.state(Map::new()).expect("a state")).expect("it is saved");
        writer.wait().expect("it is complete");
        trainer.resume(&Arc::new(CheckpointFolder::newest(scratch.path()).expect("a checkpoint")))
    };
    let error = restored(&mut trainer).expect_err("a step has begun");
    assert!(matches!(error, ResumeError::Pipeline(PipelineError::StepBegun)), "{error}");
    trainer.pipeline().finish().expect("it has begun");
    let error = trainer.step().expect_err("its results are gone");
    assert!(matches!(error, PipelineError::FinishedElsewhere), "{error}");
    restored(&mut trainer).expect("no step has begun");
    assert_eq!(trainer.step().expect("a step").0.step, 1);
}

#[test]
fn a_step_that_was_begun_without_the_trainer_is_an_error() {
    let mut trainer = trainer();
    let refused = Batch::new(Vec::new(), Vec::new());
    trainer.pipeline().begin(refused, RATE).expect("none has begun");
    let error = trainer.step().expect_err("another batch has begun");
    assert!(matches!(error, PipelineError::StepBegun), "{error}");
    trainer.pipeline().finish().expect_err("it has no microbatches");
    let metrics = trainer.step().expect("a step").0;
    assert_eq!((metrics.step, metrics.tokens), (1, (BATCH_ROWS * SEQUENCE) as u64), "no row was read before");
}

/// Raises the flag when rank 1 begins step 2.
struct RaisedInStep2(Arc<AtomicBool>);

impl ActionHook for RaisedInStep2 {
    fn begin_step(&self, rank: WorldRank, step: StepNumber) {
        if (rank.get(), step.get()) == (1, 2) {
            self.0.store(true, Ordering::SeqCst);
        }
    }
}

/// Trains two replicas until the interrupt flag ends the steps. Returns the number of these steps, and with the flag
/// lowered, the validation loss and the loss of the next step. Until then, an evaluation has no result.
fn stopped() -> (u64, Option<f64>, f64) {
    let flag = Arc::new(AtomicBool::new(false));
    let hook: Arc<dyn ActionHook> = Arc::new(RaisedInStep2(flag.clone()));
    let (interrupt, hook) = (Some(flag.clone()), Some(hook));
    let config = PipelineConfig { interrupt, hook, data_parallel: 2, ..PipelineConfig::default() };
    let mut trainer = with_validation(builder(config).launch().expect("it starts"));
    // Rank 1 may begin step 2 before rank 0 has reported step 1. Step 2 is then under way, and is finished too.
    while !trainer.step_ahead().expect("a step").1.interrupted || trainer.has_begun_next() {}
    let done = trainer.steps_done();
    let error = trainer.evaluate().expect_err("the flag is raised");
    assert!(matches!(error, PipelineError::Interrupted), "{error}");
    flag.store(false, Ordering::SeqCst);
    let loss = trainer.evaluate().expect("the flag is lowered");
    (done, loss, trainer.step().expect("a step").0.loss)
}

/// Returns a trainer whose evaluations have three batches.
fn with_validation(pipeline: Pipeline) -> Trainer {
    let held = Validation::new(rows_of(&TEXT.repeat(2)), BATCH_ROWS, None).expect("whole batches");
    assert_eq!(held.batches(), 3);
    Trainer::new(pipeline, rows(), BATCH_ROWS, LearningRate::constant(RATE)).with_validation(held)
}

#[test]
fn a_raised_flag_ends_the_steps_with_the_one_that_is_under_way() {
    let config = PipelineConfig { data_parallel: 2, ..PipelineConfig::default() };
    let mut whole = with_validation(builder(config).launch().expect("it starts"));
    (0..2).for_each(|_| drop(whole.step().expect("a step")));
    let loss = whole.evaluate().expect("an evaluation");
    let expected = (2, loss, whole.step().expect("a step").0.loss);
    assert_eq!(stopped(), expected);
}

/// Takes eight steps with delayed weights, up to two ahead. If `is_raised`, a flag is raised in the fourth one, and
/// lowered when the steps have ended. Returns the losses.
fn delayed_losses(is_raised: bool) -> Vec<f64> {
    let flag = Arc::new(AtomicBool::new(false));
    let (raised, updates) = (flag.clone(), AtomicU32::new(0));
    // The model has three parameters.
    let hook = move |_: &mut ParameterGradient<'_>| {
        if updates.fetch_add(1, Ordering::SeqCst) == 9 {
            raised.store(is_raised, Ordering::SeqCst);
        }
    };
    let config = PipelineConfig { interrupt: Some(flag.clone()), delayed: true, ..PipelineConfig::default() };
    let pipeline = builder(config).gradient_hook(hook).launch().expect("it starts");
    let mut trainer = Trainer::new(pipeline, rows(), BATCH_ROWS, LearningRate::constant(RATE));
    let (mut losses, mut interrupted) = (Vec::new(), false);
    for step in 0..8 {
        if interrupted && !trainer.has_begun_next() {
            assert!(step < 7, "steps that had not begun are withdrawn");
            flag.store(false, Ordering::SeqCst);
            trainer.state(Map::new()).expect("no step has begun");
            interrupted = false;
        }
        let ahead = if interrupted { 0 } else { 2.min(7 - step) };
        let (metrics, summary) = trainer.step_ahead_by(ahead).expect("a step");
        losses.push(metrics.loss);
        interrupted |= summary.interrupted;
    }
    losses
}

/// Steps that were begun two ahead and withdrawn are taken later, with the same rows.
#[test]
fn delayed_steps_that_a_flag_withdraws_are_taken_later() {
    assert_eq!(delayed_losses(true), delayed_losses(false));
}
