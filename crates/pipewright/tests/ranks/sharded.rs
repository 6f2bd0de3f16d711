//! Sharded data parallelism: replicas that hold shards train to the same bits as replicas that hold whole parameters.

use std::convert::Infallible;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use burn::module::{Module, Param, ParamGroup};
use burn::nn::{BatchNorm, BatchNormConfig, LayerNorm, LayerNormConfig, Linear as PlainLinear};
use burn::optim::MuonConfig;
use burn::tensor::{Device, Tensor};
use pipewright::batch::Batch;
use pipewright::checkpoint::{Checkpoint, CheckpointFolder, CheckpointWriter, TrainingState};
use pipewright::mesh::DataParallelMode::{self, Replicated, Sharded};
use pipewright::nn::{Embedding, Linear, RmsNorm, TiedHead};
use pipewright::pipeline::{Pipeline, PipelineConfig, PipelineError, SeededPipeline};
use pipewright::stage::{Stage, StageContext, StageModule};
use pipewright::train::data::Cursor;
use pipewright::transport::World;
use pipewright_schedule::generate::catalogue;
use pipewright_schedule::lower::UnshardConfig;
use pipewright_schedule::{
    Level, LowerConfig, ScheduleSpec, StageIndex, ValidatedProgram, generate, lower, validate,
};
use tempfile::TempDir;

use crate::support::{self, Step, WIDTH, batch, config, loss, numbers, split, stage};

fn config_of(replicas: u32, mode: DataParallelMode) -> PipelineConfig {
    PipelineConfig { data_parallel: replicas, data_parallel_mode: mode, ..config() }
}

/// Returns a program that gathers the parameters of at most `window` stages of a rank at once.
fn program(
    schedule: &str,
    ranks: u32,
    per_rank: Option<u32>,
    microbatches: u32,
    window: u32,
) -> ValidatedProgram {
    let spec = ScheduleSpec { ranks, stages_per_rank: per_rank, microbatches, ..ScheduleSpec::default() };
    let schedule = generate(schedule, &spec).expect("a schedule");
    let window = NonZeroU32::new(window).expect("a window");
    let unshard = Some(UnshardConfig { window, lookahead: None });
    // With a narrow window, messages follow whole actions; with a wide one, they are sent early.
    let send_early = window.get() > 1;
    let config = LowerConfig { send_early, unshard, ..LowerConfig::from(Level::Full) };
    validate(lower(&schedule, &config).expect("it lowers"), Level::Full).expect("it is sound")
}

type Make = fn(StageIndex, u32) -> Result<Stage, Infallible>;

fn launch_with(program: ValidatedProgram, replicas: u32, mode: DataParallelMode, make: Make) -> Pipeline {
    let (stages, world) = (program.placement().stages(), World::local(program.ranks() * replicas));
    Pipeline::launch(program, world, &config_of(replicas, mode), move |index| make(index, stages))
        .expect("the pipeline starts")
}

/// Returns the inputs and targets of a step, cut into microbatches.
fn batch_of(step: u64, microbatches: u32) -> Batch {
    let cut = |step| split(batch(step, microbatches), microbatches);
    Batch::new(cut(step), cut(100 + step))
}

/// By path, to the bit.
type Parameters = Vec<(Arc<str>, Vec<u32>)>;

/// Returns the results of steps, and one replica's parameters after them.
fn train(pipeline: &mut Pipeline, steps: std::ops::Range<u64>, microbatches: u32) -> (Vec<Step>, Parameters) {
    let step = |step| {
        let (inputs, targets) = (batch(step, microbatches), batch(100 + step, microbatches));
        let report = pipeline.step(inputs, targets, 1e-2).expect("a step");
        (report.losses, report.gradient_norm)
    };
    let steps = steps.map(step).collect();
    (steps, parameters(pipeline))
}

fn parameters(pipeline: &mut Pipeline) -> Parameters {
    let named = pipeline.parameters().expect("every rank answers");
    let bits = named.into_iter().map(|parameter| {
        (parameter.path, parameter.data.iter::<f32>().map(f32::to_bits).collect::<Vec<_>>())
    });
    let mut all: Vec<_> = bits.collect();
    all.sort_unstable();
    all.dedup();
    all
}

fn check_with(make: Make, program: impl Fn() -> ValidatedProgram, replicas: u32, what: &str) {
    let microbatches = program().microbatches() * replicas;
    let run = |mode| train(&mut launch_with(program(), replicas, mode, make), 0..4, microbatches);
    let (expected, expected_parameters) = run(Replicated);
    let (found, parameters) = run(Sharded);
    assert_eq!(found, expected, "{what}: losses and norms");
    assert!(parameters == expected_parameters, "{what}: parameters");
}

fn check(schedule: &str, ranks: u32, microbatches: u32, replicas: u32, window: u32) {
    let what = format!("{schedule}, {ranks} ranks, {replicas} replicas, window {window}");
    check_with(stage, || program(schedule, ranks, None, microbatches, window), replicas, &what);
}

#[test]
fn sharded_replicas_train_to_the_bits_of_whole_ones() {
    check("1f1b", 1, 4, 2, 3);
    check("1f1b", 2, 4, 2, 3);
    check("gpipe", 2, 2, 4, 3);
    check("1f1b", 4, 4, 3, 3);
    // More replicas than rows of any parameter.
    check("1f1b", 1, 1, 8, 3);
}

#[test]
fn every_schedule_takes_parts() {
    for generator in catalogue().iter().filter(|generator| generator.name != "forwardonly") {
        for window in [1, 3] {
            check(generator.name, 2, 4, 2, window);
        }
    }
}

#[test]
fn parameters_come_and_go_while_microbatches_are_in_flight() {
    // With four stages per rank and a window of one, every change of stage gathers again.
    for schedule in ["interleaved1f1b", "loopedbfs", "interleavedzerobubble"] {
        let program = || program(schedule, 2, Some(4), 4, 1);
        check_with(stage, program, 2, schedule);
    }
}

/// Layers of every kind: Burn's, whose gradients come from the tape, and ours, whose gradients are deferred.
#[derive(Module, Debug)]
struct Mixed {
    norm: LayerNorm,
    plain: PlainLinear,
    scale: RmsNorm,
    deferred: Linear,
    batch_norm: BatchNorm,
    /// Not trained.
    frozen: Linear,
    #[module(skip)]
    stage: StageIndex,
}

impl StageModule for Mixed {
    type Input = Tensor<2>;
    type Output = Tensor<2>;

    fn forward(&self, input: Tensor<2>, context: &StageContext) -> Tensor<2> {
        let hidden = self.frozen.forward(self.plain.forward(self.norm.forward(input.clone())));
        let hidden = self.batch_norm.forward::<2>(hidden);
        let hidden = self.deferred.forward(self.scale.forward(hidden).tanh());
        let squares = |weight: &Param<Tensor<2>>| weight.val().powf_scalar(2.0).mean();
        context.auxiliary_loss("weights", 1e-2, squares(&self.plain.weight));
        // A weight whose gradient is deferred in one use and comes from the tape in another.
        context.auxiliary_loss("weights", 1e-2, squares(&self.deferred.weight));
        input + hidden
    }

    fn parameter_path(&self, local: &str) -> String {
        format!("stages.{}.{local}", self.stage)
    }
}

fn mixed(stage: StageIndex, stages: u32) -> Result<Stage, Infallible> {
    let device = Device::flex().autodiff();
    let seed = u64::from(stage.get());
    let matrix = |seed| Param::from_data(numbers(seed, [WIDTH, WIDTH]), &device);
    let vector = |seed| Param::from_data(numbers(seed, [WIDTH]), &device);
    let mut plain = burn::nn::LinearConfig::new(WIDTH, WIDTH).init(&device);
    (plain.weight, plain.bias) = (matrix(seed), Some(vector(50 + seed)));
    let module = Mixed {
        norm: LayerNormConfig::new(WIDTH).init(&device),
        plain,
        scale: RmsNorm { weight: vector(60 + seed), epsilon: 1e-5 },
        deferred: Linear { weight: matrix(70 + seed), bias: None },
        batch_norm: BatchNormConfig::new(WIDTH).init(&device),
        frozen: Linear { weight: matrix(80 + seed).set_require_grad(false), bias: None },
        stage,
    };
    Ok(if stage.get() + 1 == stages { Stage::with_loss(module, loss) } else { Stage::new(module) })
}

#[test]
fn layers_of_every_kind_are_sharded() {
    check_with(mixed, || program("1f1b", 2, None, 4, 3), 2, "mixed layers");
    check_with(mixed, || program("interleaved1f1b", 2, Some(4), 4, 1), 2, "mixed layers that come and go");
    check_with(mixed, || program("zbvzerobubble", 2, None, 4, 1), 3, "mixed layers, split backward");
}

/// A table that the first and the last stage share.
#[derive(Module, Debug)]
struct Ends {
    embedding: Option<Embedding>,
    head: Option<TiedHead>,
}

impl StageModule for Ends {
    type Input = Tensor<2>;
    type Output = Tensor<2>;

    fn forward(&self, input: Tensor<2>, _context: &StageContext) -> Tensor<2> {
        let hidden = match &self.embedding {
            Some(embedding) => {
                let ids = input.clone().slice(burn::tensor::s![.., 0..1]).abs().mul_scalar(10.0).int() % 5;
                input + embedding.forward(ids).squeeze_dim::<2>(1)
            }
            None => input,
        };
        match &self.head {
            Some(head) => head.forward(hidden.clone()).slice(burn::tensor::s![.., 0..1]) + hidden,
            None => hidden.tanh(),
        }
    }

    fn parameter_path(&self, _local: &str) -> String {
        "table".to_owned()
    }

    fn shared_parameters(&self) -> Vec<String> {
        vec!["table".to_owned()]
    }
}

fn ends(stage: StageIndex, stages: u32) -> Result<Stage, Infallible> {
    let table = || Param::from_data(numbers(3, [5, WIDTH]), &Device::flex().autodiff());
    let is_last = stage.get() + 1 == stages;
    let embedding = (stage.get() == 0).then(|| Embedding { weight: table() });
    let module = Ends { embedding, head: is_last.then(|| TiedHead { weight: table() }) };
    Ok(if is_last { Stage::with_loss(module, loss) } else { Stage::new(module) })
}

#[test]
fn tied_parameters_are_sharded() {
    check_with(ends, || program("1f1b", 2, None, 4, 3), 2, "tied");
    check_with(ends, || program("1f1b", 3, None, 4, 3), 3, "tied, a stage between");
    check_with(ends, || program("zbvzerobubble", 2, None, 4, 1), 2, "tied on one rank");
}

#[test]
fn every_interleaving_gives_the_same_bits() {
    let run = |seed| {
        let program = program("interleavedzerobubble", 2, Some(3), 4, 1);
        let stages = program.placement().stages();
        let make = move |index| mixed(index, stages);
        let mut pipeline =
            SeededPipeline::new(program, &config_of(2, Sharded), seed, make).expect("it starts");
        [0, 1].map(|step| {
            let report = pipeline.step_batch(batch_of(step, 8), 1e-2).expect("a step");
            (report.losses, report.gradient_norm)
        })
    };
    let expected = run(0);
    for seed in 1..100 {
        assert_eq!(run(seed), expected, "seed {seed}");
    }
}

#[test]
fn a_lost_message_is_reported_and_the_next_step_is_clean() {
    let mut lost = 0;
    let microbatches = 4;
    for nth in 0.. {
        let program = program("1f1b", 2, None, microbatches / 2, 1);
        let mut pipeline = SeededPipeline::new(program, &config_of(2, Sharded), nth, |index| stage(index, 2))
            .expect("it starts");
        let expected = pipeline.step_batch(batch_of(0, microbatches), 0.0).expect("a step").losses;
        pipeline.lose_message(nth as usize);
        if pipeline.step_batch(batch_of(1, microbatches), 0.0).is_ok() {
            break;
        }
        lost += 1;
        let found = pipeline.step_batch(batch_of(0, microbatches), 0.0);
        assert!(
            matches!(&found, Err(PipelineError::Diverged { .. }))
                || found.expect("a clean step").losses == expected
        );
    }
    assert!(lost > 20, "{lost} messages were lost");
}

#[test]
fn several_steps_evaluation_and_a_bad_loss() {
    let run = |mode| {
        let mut pipeline = launch_with(program("interleaved1f1b", 2, Some(2), 4, 1), 2, mode, stage);
        for step in 0..2 {
            pipeline.accumulate(batch_of(step, 8)).expect("a step");
        }
        let report = pipeline.step(batch(2, 8), batch(102, 8), 1e-2).expect("a step");
        let evaluated = pipeline.eval(batch(3, 8), Some(batch(103, 8))).expect("an evaluation");
        let before = parameters(&mut pipeline);
        let nan = Tensor::<2>::full([8 * support::ROWS, WIDTH], f32::NAN, &Device::flex());
        pipeline.step(batch(3, 8), nan, 1e-2).expect_err("a loss is not a number");
        assert!(before == parameters(&mut pipeline), "a step that failed changes nothing");
        let next = pipeline.step(batch(4, 8), batch(104, 8), 1e-2).expect("the next step is clean");
        (report.losses, report.gradient_norm, evaluated.losses, next.losses, next.gradient_norm)
    };
    assert_eq!(run(Sharded), run(Replicated));
}

#[test]
fn running_statistics_are_kept_through_evaluation_and_checkpoints() {
    let run = |mode| {
        let mut pipeline = launch_with(program("1f1b", 2, None, 4, 1), 2, mode, mixed);
        train(&mut pipeline, 0..2, 8);
        let evaluated = pipeline.eval(batch(9, 8), Some(batch(109, 8))).expect("an evaluation").losses;
        let (steps, _) = train(&mut pipeline, 2..4, 8);
        let again = pipeline.eval(batch(9, 8), Some(batch(109, 8))).expect("an evaluation").losses;
        let (_folder, checkpoint) = saved(&mut pipeline, 4);
        let mut resumed = launch_with(program("1f1b", 2, None, 8, 1), 1, Replicated, mixed);
        resumed.restore(&checkpoint).expect("it is restored");
        let after = resumed.eval(batch(9, 8), Some(batch(109, 8))).expect("an evaluation").losses;
        (evaluated, steps, again, after)
    };
    assert_eq!(run(Sharded), run(Replicated));
}

#[test]
fn parameters_may_be_looked_at_while_gradients_wait() {
    let run = |looks: bool| {
        let mut pipeline = launch_with(program("1f1b", 2, None, 4, 1), 2, Sharded, stage);
        pipeline.accumulate(batch_of(0, 8)).expect("a step");
        if looks {
            parameters(&mut pipeline);
        }
        let report = pipeline.step_batch(batch_of(1, 8), 1e-2).expect("a step");
        (report.losses, report.gradient_norm, parameters(&mut pipeline))
    };
    assert!(run(true) == run(false));
}

/// Returns the pipeline's state after `step`, written and read again. Tensors are read from the folder on demand.
fn saved(pipeline: &mut Pipeline, step: u64) -> (TempDir, Arc<Checkpoint>) {
    let scratch = tempfile::tempdir().expect("a scratch folder");
    let ranks = pipeline.state().expect("a state");
    let (folder, parts) = (CheckpointFolder::own(scratch.path()).expect("a folder"), ranks.len() as u32);
    let mut writer = CheckpointWriter::start(folder, 1, parts, Duration::from_secs(20)).expect("a writer");
    let cursor = Cursor { epoch: 0, index: step };
    let state = TrainingState { step, cursor, description: Default::default(), ranks };
    writer.save(state).expect("it is saved");
    writer.wait().expect("it is written");
    let checkpoint = CheckpointFolder::newest(scratch.path()).expect("a checkpoint");
    (scratch, Arc::new(checkpoint))
}

/// Compares a run that is saved after three steps of `first` and resumed as `second` with an undisturbed run.
fn check_resume(first: (DataParallelMode, u32), second: (DataParallelMode, u32)) {
    const MICROBATCHES: u32 = 12;
    let launch = |(mode, replicas): (DataParallelMode, u32), schedule| {
        launch_with(program(schedule, 2, None, MICROBATCHES / replicas, 3), replicas, mode, stage)
    };
    let mut before = launch(first, "1f1b");
    train(&mut before, 0..3, MICROBATCHES);
    let (_folder, checkpoint) = saved(&mut before, 3);
    let shapes: Vec<Vec<usize>> = checkpoint.parameters().map(|stored| stored.shape.to_vec()).collect();
    assert!(shapes.iter().all(|shape| shape[0] == WIDTH), "a reader sees whole parameters: {shapes:?}");
    let resumed = |cut| {
        let mut after = launch(cut, "interleaved1f1b");
        after.restore(&checkpoint).expect("it is restored");
        let taken = parameters(&mut after);
        (taken, train(&mut after, 3..5, MICROBATCHES))
    };
    let (expected_start, expected) = resumed((Replicated, second.1));
    let (start, found) = resumed(second);
    assert!(start == parameters(&mut before), "{first:?} to {second:?}: what was saved is what goes on");
    assert!(start == expected_start && found == expected, "{first:?} to {second:?}: the next steps");
}

#[test]
fn a_sharded_checkpoint_resumes_under_any_mesh() {
    check_resume((Sharded, 2), (Sharded, 2));
    check_resume((Sharded, 2), (Replicated, 1));
    check_resume((Replicated, 2), (Sharded, 3));
    check_resume((Sharded, 4), (Sharded, 3));
    check_resume((Sharded, 6), (Sharded, 2));
}

fn refusal(program: ValidatedProgram, config: &PipelineConfig) -> PipelineError {
    let launched = Pipeline::launch(program, World::local(4), config, |index| stage(index, 2));
    launched.err().expect("it is refused")
}

#[test]
fn optimizers_that_cannot_be_sharded_are_refused() {
    let spec = ScheduleSpec { ranks: 2, microbatches: 4, ..ScheduleSpec::default() };
    let lowered = lower(&generate("1f1b", &spec).expect("a schedule"), &LowerConfig::from(Level::Comms));
    let never = validate(lowered.expect("it lowers"), Level::Comms).expect("it is sound");
    let error = refusal(never, &config_of(2, Sharded));
    assert!(matches!(error, PipelineError::NeverGathers { level: Level::Comms }), "{error}");
    // The optimizer of a single parameter group is enough.
    let matrices = ParamGroup::from_predicate("weight");
    let optimizer = support::optimizer().with_group(matrices, MuonConfig::new().build(), None);
    let config = PipelineConfig { optimizer: Some(optimizer), ..config_of(2, Sharded) };
    let error = refusal(program("1f1b", 2, None, 4, 3), &config).to_string();
    assert!(error.contains("of `layers.") && error.contains("weight` depends on other elements"), "{error}");
}
