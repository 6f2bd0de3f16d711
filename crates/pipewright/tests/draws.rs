//! Layers that draw from the generator of their device, such as Burn's own dropout, draw the same numbers
//! under every cut, in every run, and in the second forward of a recomputed stage. The tests take turns,
//! because the generator belongs to the whole process.

use std::convert::Infallible;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use burn::module::Module;
use burn::nn::{Dropout, DropoutConfig, Initializer, Linear, LinearConfig};
use burn::optim::SgdConfig;
use burn::tensor::{Device, Distribution, Tensor};
use pipewright::failure::Cause;
use pipewright::nn::TensorParallel;
use pipewright::pipeline::{Layers, Pipeline, PipelineBuilder, PipelineConfig, PipelineError};
use pipewright::stage::{Stage, StageContext, StageError, StageModule};
use pipewright::transport::World;
use pipewright_schedule::{
    Level, LowerConfig, Recompute, ScheduleSpec, StageIndex, generate, lower, validate,
};

const WIDTH: usize = 8;
const MICROBATCHES: u32 = 4;
const ROWS: usize = 8;

static ALONE: Mutex<()> = Mutex::new(());

/// A layer of Burn's own parts.
#[derive(Module, Debug)]
struct Block {
    linear: Linear,
    dropout: Dropout,
}

impl Block {
    fn new(_layer: usize) -> Self {
        let linear = LinearConfig::new(WIDTH, WIDTH).init(&Device::flex().autodiff());
        Self { linear, dropout: DropoutConfig::new(0.3).init() }
    }
}

impl StageModule for Block {
    type Input = Tensor<2>;
    type Output = Tensor<2>;

    fn forward(&self, input: Tensor<2>, _context: &StageContext) -> Tensor<2> {
        input.clone() + self.dropout.forward(self.linear.forward(input).tanh())
    }

    fn refuses_slices(&self) -> Option<String> {
        None
    }
}

fn builder(schedule: &str, ranks: u32) -> PipelineBuilder {
    Pipeline::builder(Layers::new(8, Block::new))
        .ranks(ranks)
        .schedule(schedule)
        .microbatches(MICROBATCHES)
        .loss(|output: Tensor<2>, target: Tensor<2>| (output - target).square().mean())
        .optimizer(SgdConfig::new().init())
}

fn rows() -> Tensor<2> {
    Tensor::<1>::from_floats([0.1, -0.2, 0.3, 0.5, -0.4, 0.2, 0.7, -0.1], &Device::flex())
        .repeat_dim(0, ROWS)
        .reshape([ROWS, WIDTH])
}

/// Returns the losses and gradient norms of three steps, with an evaluation in between.
fn train(builder: PipelineBuilder) -> Vec<(Vec<f64>, f64)> {
    let mut pipeline = builder.launch().expect("it starts");
    let step = |_| {
        let summary = pipeline.step(rows(), rows(), 0.1).expect("a step");
        pipeline.eval(rows(), Some(rows())).expect("an evaluation");
        (summary.losses, summary.gradient_norm)
    };
    (0..3).map(step).collect()
}

#[test]
fn burns_dropout_has_the_same_masks_under_every_cut() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let expected = train(builder("1f1b", 1));
    assert_ne!(expected[0].0[0], expected[0].0[1], "microbatches of equal rows have masks of their own");
    for (name, builder) in [
        ("again", builder("1f1b", 1)),
        ("two ranks", builder("1f1b", 2)),
        ("four ranks", builder("gpipe", 4)),
        ("zero bubble", builder("zbvzerobubble", 2)),
        ("by stage", builder("1f1b", 2).recompute(Recompute::Stage)),
        ("by block", builder("gpipe", 2).recompute(Recompute::Block)),
    ] {
        assert_eq!(train(builder), expected, "{name}");
    }
    let replicas = train(builder("1f1b", 2).data_parallel(2));
    assert_eq!(replicas[0].0, expected[0].0, "the losses of the first step on two replicas");
}

/// A module that is a stage by itself, with two blocks.
#[derive(Module, Debug)]
struct Own {
    blocks: Vec<Block>,
}

impl StageModule for Own {
    type Input = Tensor<2>;
    type Output = Tensor<2>;

    fn forward(&self, input: Tensor<2>, context: &StageContext) -> Tensor<2> {
        self.blocks.iter().fold(input, |x, block| block.forward(x, context))
    }
}

#[test]
fn a_stage_of_burns_layers_is_recomputed_with_its_masks() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let train = |recompute| {
        let spec = ScheduleSpec { ranks: 2, microbatches: MICROBATCHES, ..ScheduleSpec::default() };
        let program = lower(&generate("1f1b", &spec).expect("a schedule"), &LowerConfig::from(Level::Comms));
        let program = validate(program.expect("it lowers"), Level::Comms).expect("it is sound");
        let make = |stage: StageIndex| -> Result<Stage, Infallible> {
            let own = Own { blocks: (0..2).map(Block::new).collect() };
            let loss = |output: Tensor<2>, target: Tensor<2>| (output - target).square().mean();
            Ok(if stage.get() == 1 {
                Stage::with_loss(own, loss)
            } else {
                Stage::new(own).with_prefix("first")
            })
        };
        let config = PipelineConfig {
            recompute,
            optimizer: Some(SgdConfig::new().init()),
            ..PipelineConfig::default()
        };
        let mut pipeline = Pipeline::launch(program, World::local(2), &config, make).expect("it starts");
        let mut step = || pipeline.step(rows(), rows(), 0.0).expect("a step").losses;
        assert_ne!(step(), step(), "steps have masks of their own");
    };
    // A second forward with other masks would fail the step.
    for recompute in [Recompute::None, Recompute::Stage, Recompute::Block] {
        train(recompute);
    }
}

#[test]
fn the_loss_of_a_linear_model_is_its_gradient() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    // The output is the sum over kept elements times a factor, so the gradient of the factor is the loss.
    #[derive(Module, Debug)]
    struct Scale {
        factor: burn::module::Param<Tensor<1>>,
        dropout: Dropout,
    }
    impl StageModule for Scale {
        type Input = Tensor<2>;
        type Output = Tensor<2>;

        fn forward(&self, input: Tensor<2>, _context: &StageContext) -> Tensor<2> {
            self.dropout.forward(input) * self.factor.val().unsqueeze()
        }
    }
    let scale = |_| {
        let factor = burn::module::Param::from_tensor(Tensor::ones([1], &Device::flex().autodiff()));
        Scale { factor, dropout: DropoutConfig::new(0.5).init() }
    };
    for recompute in [Recompute::None, Recompute::Stage, Recompute::Block] {
        let mut pipeline = Pipeline::builder(Layers::new(1, scale))
            .schedule("gpipe")
            .microbatches(MICROBATCHES)
            .recompute(recompute.clone())
            .loss(|output: Tensor<2>, _: Tensor<2>| output.mean())
            .optimizer(SgdConfig::new().init())
            .launch()
            .expect("it starts");
        let ones = Tensor::<2>::ones([ROWS, WIDTH], &Device::flex());
        let summary = pipeline.step(ones.clone(), ones, 0.0).expect("a step");
        let difference = (summary.loss() - summary.gradient_norm).abs();
        assert!(difference < 1e-6, "{recompute:?}: {} and {}", summary.loss(), summary.gradient_norm);
    }
}

/// A layer that draws in its forward from a certain call on.
#[derive(Module, Debug)]
struct Late {
    linear: Linear,
    #[module(skip)]
    calls: Arc<AtomicUsize>,
    #[module(skip)]
    quiet: usize,
}

impl StageModule for Late {
    type Input = Tensor<2>;
    type Output = Tensor<2>;

    fn forward(&self, input: Tensor<2>, _context: &StageContext) -> Tensor<2> {
        let output = self.linear.forward(input);
        if self.calls.fetch_add(1, Ordering::Relaxed) < self.quiet {
            return output;
        }
        let noise = output.random_like(Distribution::Default);
        output + noise
    }
}

/// Returns the losses of three steps that change nothing.
fn late(quiet: usize, recompute: Recompute) -> Result<Vec<f64>, PipelineError> {
    let calls = Arc::new(AtomicUsize::new(0));
    let make = move |_| {
        let linear = LinearConfig::new(WIDTH, WIDTH).init(&Device::flex().autodiff());
        Late { linear, calls: calls.clone(), quiet }
    };
    let mut pipeline = Pipeline::builder(Layers::new(1, make))
        .schedule("gpipe")
        .microbatches(MICROBATCHES)
        .recompute(recompute)
        .loss(|output: Tensor<2>, target: Tensor<2>| (output - target).square().mean())
        .optimizer(SgdConfig::new().init())
        .launch()
        .expect("it starts");
    let mut losses = Vec::new();
    for _ in 0..3 {
        losses.push(pipeline.step(rows(), rows(), 0.0)?.loss());
    }
    Ok(losses)
}

#[test]
fn a_forward_that_draws_only_the_second_time_is_found() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    late(0, Recompute::Stage).expect("it draws each time");
    let error = late(MICROBATCHES as usize, Recompute::Stage).expect_err("the second forward draws");
    let PipelineError::Step(error) = error else { panic!("{error}") };
    let Cause::Stage(StageError::RecomputedResult) = &error.cause else { panic!("{error}") };
    assert!(error.to_string().contains("nn::Dropout"), "{error}");
}

#[test]
fn a_layer_that_begins_to_draw_is_seeded_from_its_next_forward_on() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let losses = |seed| {
        Device::flex().seed(seed);
        late(MICROBATCHES as usize, Recompute::None).expect("three steps")
    };
    let [first, second] = [losses(1), losses(2)];
    assert_ne!(first[1], second[1], "the first forward that draws has numbers of the program's seed");
    assert_eq!([first[0], first[2]], [second[0], second[2]]);
}

#[test]
fn ranks_that_compute_together_refuse_a_layer_that_draws_before_their_first_update() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let refused = |probability| {
        let spec = ScheduleSpec { ranks: 1, microbatches: 1, ..ScheduleSpec::default() };
        let program = lower(&generate("gpipe", &spec).expect("a schedule"), &LowerConfig::from(Level::Comms));
        let program = validate(program.expect("it lowers"), Level::Comms).expect("it is sound");
        let make = move |_: StageIndex, _: &TensorParallel| -> Result<Stage, Infallible> {
            let linear =
                LinearConfig::new(WIDTH, WIDTH).with_initializer(Initializer::Constant { value: 0.1 });
            let linear = linear.init(&Device::flex().autodiff());
            let block = Block { linear, dropout: DropoutConfig::new(probability).init() };
            Ok(Stage::with_loss(block, |output: Tensor<2>, target: Tensor<2>| {
                (output - target).square().mean()
            }))
        };
        let optimizer = Some(SgdConfig::new().init());
        let config = PipelineConfig { tensor_parallel: 2, optimizer, ..PipelineConfig::default() };
        let mut pipeline =
            Pipeline::launch_split(program, World::local(2), &config, make).expect("it starts");
        pipeline.step(rows(), rows(), 0.1)
    };
    refused(0.0).expect("it draws nothing");
    let Err(PipelineError::Step(error)) = refused(0.3) else { panic!("the masks of the ranks differ") };
    let Cause::Stage(StageError::DrawsTogether { layer }) = &error.cause else { panic!("{error}") };
    assert_eq!(&**layer, "stage 0");
}

#[test]
fn a_loss_that_calls_another_pipeline_gets_an_error_at_once() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let teacher = Arc::new(Mutex::new(builder("1f1b", 1).launch().expect("it starts")));
    let answers = Arc::new(Mutex::new(Vec::new()));
    let (of_loss, of_teacher) = (answers.clone(), teacher.clone());
    let loss = move |output: Tensor<2>, target: Tensor<2>| {
        let mut teacher = of_teacher.lock().expect("no panic");
        let answer = teacher.eval(rows(), Some(rows())).map(drop);
        // A refused call changes nothing.
        if answer.is_err() {
            assert!(matches!(teacher.freeze(|_| true), Err(PipelineError::InsideLayer)));
            assert!(matches!(teacher.step(rows(), rows(), 0.1), Err(PipelineError::InsideLayer)));
        }
        of_loss.lock().expect("no panic").push(answer);
        (output - target).square().mean()
    };
    let mut pipeline = builder("1f1b", 1).loss(loss).launch().expect("it starts");
    pipeline.step(rows(), rows(), 0.1).expect("a step");
    let answers = answers.lock().expect("no panic");
    assert!(matches!(answers[0], Err(PipelineError::InsideLayer)), "{answers:?}");
    assert!(answers[1..].iter().all(Result::is_ok), "later calls of the loss run with others: {answers:?}");
    let summary = teacher.lock().expect("no panic").step(rows(), rows(), 0.1).expect("a step");
    assert_eq!(summary.step.get(), 1, "no refused call was a step");
}

#[test]
fn evaluations_that_draw_repeat() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let make = |_| {
        let linear = LinearConfig::new(WIDTH, WIDTH).init(&Device::flex().autodiff());
        Late { linear, calls: Arc::default(), quiet: 0 }
    };
    let mut pipeline = Pipeline::builder(Layers::new(4, make))
        .ranks(2)
        .microbatches(MICROBATCHES)
        .loss(|output: Tensor<2>, target: Tensor<2>| (output - target).square().mean())
        .optimizer(SgdConfig::new().init())
        .launch()
        .expect("it starts");
    let mut losses = || pipeline.eval(rows(), Some(rows())).expect("an evaluation").losses;
    assert_eq!(losses(), losses());
}

#[test]
fn the_callers_own_draws_follow_from_its_seed() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let drawn = |seed| -> Vec<f32> {
        let mut pipeline = builder("1f1b", 2).launch().expect("it starts");
        Device::flex().seed(seed);
        let mut draw = || {
            pipeline.step(rows(), rows(), 0.1).expect("a step");
            Tensor::<1>::random([1], Distribution::Default, &Device::flex()).into_scalar()
        };
        (0..3).map(|_| draw()).collect()
    };
    let first = drawn(1);
    assert_eq!(drawn(1), first);
    assert_ne!(drawn(2), first);
    assert!(first[0] != first[1] && first[1] != first[2], "{first:?}");
}
