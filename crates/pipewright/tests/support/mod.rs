//! A small model and its unpipelined reference run, for the tests of this crate.

#![expect(dead_code, reason = "each test file uses its own part")]

use std::collections::BTreeMap;
use std::env::var_os;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::nn::LinearConfig;
use burn::optim::{AdamWConfig, GradientsParams, LearningRate, LionState, ModuleOptimizer, Optimizer};
use burn::tensor::{Device, Gradients, Tensor, TensorData, activation};
use pipewright::batch::Batch;
use pipewright::failure::{Cause, StepError};
use pipewright::hook::ActionHook;
use pipewright::ids::{StepNumber, WorldRank};
use pipewright::nn::Linear;
use pipewright::pipeline::{Pipeline, PipelineConfig, PipelineError, SeededPipeline};
use pipewright::stage::{Stage, StageContext, StageModule};
use pipewright::tensor::Values;
use pipewright::transport::World;
use pipewright_schedule::lower::{OffloadConfig, TrainingLowering, for_training, offload};
use pipewright_schedule::{
    Action, Level, LowerConfig, Rank, ScheduleSpec, StageIndex, TrainedStages, ValidatedProgram, generate,
    lower, validate,
};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

pub(crate) mod count;

/// Layers of the model; every cut into 1, 2, 4 or 8 stages is even.
pub(crate) const LAYERS: usize = 8;
/// Features of every layer.
pub(crate) const WIDTH: usize = 6;
/// Rows of a microbatch.
pub(crate) const ROWS: usize = 3;

/// Returns the seeds of the interleavings that a test compares: a fifth of `all`, or with `PIPEWRIGHT_LONG_TESTS`, as in
/// `.ci/run nightly`, all.
pub(crate) fn seeds(all: u64) -> Range<u64> {
    0..if var_os("PIPEWRIGHT_LONG_TESTS").is_some() { all } else { all / 5 }
}

/// `x + tanh(linear(x))`.
#[derive(Module, Debug)]
pub(crate) struct Block {
    pub(crate) linear: Linear,
}

impl Block {
    /// The parameters depend on `place` alone.
    pub(crate) fn new(place: usize) -> Self {
        Self::on(place, &Device::flex().autodiff())
    }

    pub(crate) fn on(place: usize, device: &Device) -> Self {
        Self { linear: biased(place as u64, device) }
    }
}

impl StageModule for Block {
    type Input = Tensor<2>;
    type Output = Tensor<2>;

    fn forward(&self, input: Tensor<2>, _context: &StageContext) -> Tensor<2> {
        input.clone() + activation::tanh(self.linear.forward(input))
    }
}

/// `x + tanh(linear(x))` for each of a run of layers.
#[derive(Module, Debug)]
pub(crate) struct Mlp {
    layers: Vec<Linear>,
    #[module(skip)]
    first: usize,
}

impl Mlp {
    /// Layers `first..first + count`; a layer's parameters depend on its place alone.
    pub(crate) fn new(first: usize, count: usize) -> Self {
        let device = Device::flex().autodiff();
        let layers = (first..first + count).map(|layer| biased(layer as u64, &device));
        Self { layers: layers.collect(), first }
    }

    /// Returns a part of this model, with its parameters.
    pub(crate) fn part(&self, stage: u32, stages: u32) -> Self {
        let count = LAYERS / stages as usize;
        let first = stage as usize * count;
        Self { layers: self.layers[first..first + count].to_vec(), first }
    }

    /// Returns the layers that `stage` of `stages` holds.
    pub(crate) fn of_stage(stage: StageIndex, stages: u32) -> Self {
        let count = LAYERS / stages as usize;
        Self::new(stage.index() * count, count)
    }
}

impl StageModule for Mlp {
    type Input = Tensor<2>;
    type Output = Tensor<2>;

    fn forward(&self, input: Tensor<2>, _context: &StageContext) -> Tensor<2> {
        self.layers.iter().fold(input, |x, layer| x.clone() + activation::tanh(layer.forward(x)))
    }

    fn parameter_path(&self, local: &str) -> String {
        path_in_model(local, self.first)
    }
}

/// Returns the mean squared error.
pub(crate) fn loss(output: Tensor<2>, target: Tensor<2>) -> Tensor<1> {
    (output - target).powf_scalar(2.0).mean()
}

/// Returns the stage as the pipeline takes it.
pub(crate) fn stage(stage: StageIndex, stages: u32) -> Result<Stage, std::convert::Infallible> {
    ending_in_loss(stage.get() + 1 == stages, Mlp::of_stage(stage, stages))
}

/// Returns a stage that ends in the loss if it is the last one.
pub(crate) fn ending_in_loss<M: StageModule<Output = Tensor<2>>>(
    is_last: bool,
    module: M,
) -> Result<Stage, std::convert::Infallible> {
    Ok(if is_last { Stage::with_loss(module, loss) } else { Stage::new(module) })
}

/// Launches the model under a program.
pub(crate) fn launch_in(world: World, program: ValidatedProgram, config: &PipelineConfig) -> Pipeline {
    let stages = program.placement().stages();
    Pipeline::launch(program, world, config, move |index| stage(index, stages)).expect("it starts")
}

/// Launches the model under a program, on threads of this process.
pub(crate) fn launch(program: ValidatedProgram, config: &PipelineConfig) -> Pipeline {
    launch_in(World::local(program.ranks() * config.data_parallel), program, config)
}

/// Takes steps, and returns their results.
pub(crate) fn take_steps(pipeline: &mut Pipeline, steps: Range<u64>, microbatches: u32) -> Vec<Step> {
    let step = |step| {
        let (inputs, targets) = (batch(step, microbatches), batch(100 + step, microbatches));
        let summary = pipeline.step(inputs, targets, 1e-2).expect("a step");
        (summary.losses, summary.gradient_norm)
    };
    steps.map(step).collect()
}

/// Returns the path in the model of the parameter `layers.INDEX.REST` of a stage whose first layer is `first`.
pub(crate) fn path_in_model(local: &str, first: usize) -> String {
    let mut parts = local.splitn(3, '.');
    let (Some(list), Some(place), Some(rest)) = (parts.next(), parts.next(), parts.next()) else {
        panic!("unexpected parameter {local}");
    };
    format!("{list}.{}.{rest}", place.parse::<usize>().expect("a place") + first)
}

/// Values by the path of their parameter.
pub(crate) type Parameters = BTreeMap<String, Vec<f32>>;

/// Returns the parameters of a pipeline.
pub(crate) fn parameters(pipeline: &mut Pipeline) -> Parameters {
    let all = pipeline.parameters().expect("every rank answers");
    all.into_iter().map(|found| (found.path.to_string(), found.data.iter().collect())).collect()
}

/// A float parameter of a module.
pub(crate) struct Float {
    pub(crate) id: ParamId,
    pub(crate) values: Vec<f32>,
    /// Empty without gradients.
    pub(crate) gradient: Vec<f32>,
}

/// Returns the float parameters of a module by their path, with their gradients.
pub(crate) fn floats<M: Module>(module: &M, gradients: Option<&Gradients>) -> BTreeMap<String, Float> {
    struct Reader<'a> {
        path: Vec<String>,
        gradients: Option<&'a Gradients>,
        found: BTreeMap<String, Float>,
    }
    impl ModuleVisitor for Reader<'_> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let gradient = self.gradients.map(|gradients| param.val().grad(gradients).expect("a gradient"));
            let gradient = gradient.map(|gradient| gradient.into_data().iter().collect());
            let (id, values) = (param.id, param.val().into_data().iter().collect());
            let float = Float { id, values, gradient: gradient.unwrap_or_default() };
            self.found.insert(self.path.join("."), float);
        }

        fn enter_module(&mut self, name: &str, _container_type: &str) {
            self.path.push(name.to_owned());
        }

        fn exit_module(&mut self, _name: &str, _container_type: &str) {
            self.path.pop();
        }
    }
    let mut reader = Reader { path: Vec::new(), gradients, found: BTreeMap::new() };
    module.visit(&mut reader);
    reader.found
}

/// Compares parameters; `most` is the largest difference of two values.
pub(crate) fn assert_close(found: &Parameters, expected: &Parameters, most: f32, what: &str) {
    assert_eq!(found.keys().collect::<Vec<_>>(), expected.keys().collect::<Vec<_>>(), "{what}");
    for (path, values) in found {
        for (found, expected) in values.iter().zip(&expected[path]) {
            assert!((found - expected).abs() < most, "{what}: {path}: {found}, not {expected}");
        }
    }
}

/// Returns small numbers that depend on `seed` alone.
pub(crate) fn numbers<const D: usize>(seed: u64, shape: [usize; D]) -> TensorData {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let count = shape.iter().product::<usize>();
    TensorData::new((0..count).map(|_| rng.random_range(-0.5f32..0.5)).collect::<Vec<_>>(), shape)
}

/// Returns a layer of the model, whose parameters depend on `seed` alone.
pub(crate) fn biased(seed: u64, device: &Device) -> Linear {
    let mut linear = LinearConfig::new(WIDTH, WIDTH).init(device);
    linear.weight = Param::from_data(numbers(seed, [WIDTH, WIDTH]), device);
    linear.bias = Some(Param::from_data(numbers(1000 + seed, [WIDTH]), device));
    linear.into()
}

/// Returns a linear layer without a bias, whose weight depends on `seed` alone. `sizes` are its inputs and outputs.
pub(crate) fn linear(seed: u64, sizes: [usize; 2]) -> Linear {
    Linear { weight: Param::from_data(numbers(seed, sizes), &Device::flex().autodiff()), bias: None }
}

/// Inputs or targets of a step with `microbatches` microbatches.
pub(crate) fn batch(seed: u64, microbatches: u32) -> Tensor<2> {
    Tensor::from_data(numbers(seed, [ROWS * microbatches as usize, WIDTH]), &Device::flex())
}

/// Returns a tensor, split into microbatches.
pub(crate) fn split(tensor: Tensor<2>, microbatches: u32) -> Vec<Values> {
    pipewright::batch::split(&pipewright::tensor::pack(tensor), microbatches).expect("it divides")
}

/// Returns a batch of the model, by microbatches.
pub(crate) fn brought(step: u64, microbatches: u32) -> Batch {
    let parts = |seed| split(batch(seed, microbatches), microbatches);
    Batch::new(parts(step), parts(100 + step))
}

pub(crate) fn program(schedule: &str, ranks: u32, microbatches: u32) -> ValidatedProgram {
    let spec = ScheduleSpec { ranks, microbatches, ..ScheduleSpec::default() };
    let schedule = generate(schedule, &spec).expect("a schedule");
    let program = lower(&schedule, &LowerConfig::from(Level::Full)).expect("it lowers");
    validate(program, Level::Full).expect("it is sound")
}

/// Returns the program with all that recomputed forwards keep out of memory, if `config` has a place for it.
pub(crate) fn offloaded(program: ValidatedProgram, config: &PipelineConfig) -> ValidatedProgram {
    if config.offload.is_none() {
        return program;
    }
    let level = program.level();
    let program = offload(program.into_program(), &OffloadConfig::all(config.recompute.clone()));
    validate(program, level).expect("it is sound")
}

/// Returns a program that trains the stages whose flag is true.
pub(crate) fn program_of_trained(schedule: &str, microbatches: u32, trained: &[bool]) -> ValidatedProgram {
    let spec = ScheduleSpec { ranks: trained.len() as u32, microbatches, ..ScheduleSpec::default() };
    let lowering = TrainingLowering { trained: TrainedStages::of(trained), ..TrainingLowering::default() };
    for_training(&generate(schedule, &spec).expect("a schedule"), &lowering).expect("it is sound")
}

/// Returns a program from its text, one rank a line.
pub(crate) fn program_of(text: &str) -> ValidatedProgram {
    let schedule = pipewright_schedule::csv::parse_schedule(text).expect("a schedule");
    let program = lower(&schedule, &LowerConfig::from(Level::Full)).expect("it lowers");
    validate(program, Level::Full).expect("it is sound")
}

pub(crate) fn optimizer() -> ModuleOptimizer {
    AdamWConfig::new().with_weight_decay(0.1).init()
}

/// Plain gradient descent, which calls a function before it updates a parameter.
#[derive(Clone)]
struct Descent(Arc<dyn Fn() + Send + Sync>);

impl Optimizer for Descent {
    type State<const D: usize> = LionState<D>;

    fn step<const D: usize>(
        &self,
        rate: LearningRate,
        parameter: Tensor<D>,
        gradient: Tensor<D>,
        state: Option<LionState<D>>,
    ) -> (Tensor<D>, Option<LionState<D>>) {
        self.0();
        (parameter - gradient * rate, state)
    }

    fn to_device<const D: usize>(state: LionState<D>, _device: &Device) -> LionState<D> {
        state
    }
}

/// Returns plain gradient descent, which calls `before` before it updates a parameter.
pub(crate) fn descent(before: impl Fn() + Send + Sync + 'static) -> ModuleOptimizer {
    ModuleOptimizer::from(Descent(Arc::new(before)))
}

pub(crate) fn config() -> PipelineConfig {
    let deadline = Duration::from_secs(20);
    PipelineConfig {
        optimizer: Some(optimizer()),
        clip_norm: Some(0.05),
        deadline,
        ..PipelineConfig::default()
    }
}

/// The results of a step: its losses and its gradient norm, to the bit.
pub(crate) type Step = (Vec<f64>, f64);

/// Loses each message of a step in turn, launched with the same seed. The report says of every rank what it
/// waits for, if it is not done; one waits for the lost message. Returns the reports on all messages.
pub(crate) fn lose_each(launch: impl Fn() -> SeededPipeline, batch: impl Fn() -> Batch) -> String {
    let mut all = String::new();
    for lost in 0.. {
        let mut pipeline = launch();
        pipeline.lose_message(lost);
        let outcome = pipeline.step_batch(batch(), 1e-2);
        let Some(tag) = pipeline.lost() else {
            outcome.expect("a step that loses nothing");
            break;
        };
        let error = outcome.expect_err("a message is missing");
        let PipelineError::Step(StepError { cause: Cause::Deadline { report, .. }, .. }) = &error else {
            panic!("{error}")
        };
        for (rank, line) in report.lines().enumerate() {
            assert!(line.starts_with(&format!("  rank {rank}: ")), "{report}");
            assert!(line.contains(", waits for ") || line.ends_with("), is in no step"), "{report}");
        }
        assert!(report.contains(&format!(", waits for {tag} from rank ")), "{tag} is lost:\n{report}");
        all.push_str(&format!("{tag}\n"));
    }
    all
}

/// Plain Burn, no pipeline: the same microbatches one after another, their gradients summed by Burn's own
/// tape. Returns each step's losses.
pub(crate) fn unpipelined(steps: u64, microbatches: u32) -> Vec<Vec<f64>> {
    let mut module = Mlp::new(0, LAYERS);
    let mut optimizer = optimizer();
    let context = StageContext::new(StageIndex::new(0), 0.into());
    let mut all = Vec::new();
    for step in 0..steps {
        let inputs = batch(step, microbatches).chunk(microbatches as usize, 0);
        let targets = batch(100 + step, microbatches).chunk(microbatches as usize, 0);
        let mut losses = Vec::new();
        let mut total: Option<Tensor<1>> = None;
        for (input, target) in inputs.into_iter().zip(targets) {
            let loss = loss(module.forward(input.autodiff(), &context), target.autodiff());
            losses.push(f64::from(loss.clone().into_scalar::<f32>()));
            let loss = loss / microbatches as f32;
            total = Some(match total {
                Some(total) => total + loss,
                None => loss,
            });
        }
        let gradients = total.expect("a microbatch").backward();
        module = optimizer.step(1e-2, module.clone(), GradientsParams::from_grads(gradients, &module));
        all.push(losses);
    }
    all
}

/// The log of the pipelines of a test program.
static LOG: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// Collects warnings and notes of all threads, and their messages.
struct Collects;

impl tracing::Subscriber for Collects {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        *metadata.level() <= tracing::Level::INFO || metadata.target() == "pipewright::messages"
    }
    fn new_span(&self, _span: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }
    fn record(&self, _span: &tracing::span::Id, _values: &tracing::span::Record<'_>) {}
    fn record_follows_from(&self, _span: &tracing::span::Id, _follows: &tracing::span::Id) {}
    fn event(&self, event: &tracing::Event<'_>) {
        struct Message<'a>(&'a mut String);
        impl tracing::field::Visit for Message<'_> {
            fn record_debug(&mut self, _field: &tracing::field::Field, value: &dyn std::fmt::Debug) {
                self.0.push_str(&format!("{value:?}"));
            }
        }
        let mut text = String::new();
        event.record(&mut Message(&mut text));
        LOG.lock().expect("no panic").push(text);
    }
    fn enter(&self, _span: &tracing::span::Id) {}
    fn exit(&self, _span: &tracing::span::Id) {}
}

/// Collects what pipelines log from this call on. One test of a program calls it.
pub(crate) fn collect_log() {
    tracing::subscriber::set_global_default(Collects).expect("no other test sets it");
}

/// Returns the collected messages that `is_meant` chooses.
pub(crate) fn logged(is_meant: fn(&str) -> bool) -> Vec<String> {
    let all = LOG.lock().expect("no panic");
    all.iter().filter(|text| is_meant(text)).cloned().collect()
}

/// Lets a rank wait before its last action of each batch, so that other ranks get to the gradient norm first.
pub(crate) struct Late {
    rank: u32,
    /// The number of actions of each rank of the world.
    rows: Vec<usize>,
    begun: Vec<AtomicUsize>,
}

impl Late {
    /// Makes the hook of a program whose stages are computed by `tensor` ranks together, in `replicas`
    /// replicas.
    pub(crate) fn new(program: &ValidatedProgram, [replicas, tensor]: [u32; 2], rank: u32) -> Self {
        let row = |world: u32| program.row(Rank::new(world / tensor % program.ranks())).len();
        let rows: Vec<usize> = (0..program.ranks() * replicas * tensor).map(row).collect();
        Self { rank, begun: rows.iter().map(|_| AtomicUsize::new(0)).collect(), rows }
    }
}

impl ActionHook for Late {
    fn begin_step(&self, rank: WorldRank, _step: StepNumber) {
        self.begun[rank.index()].store(0, Ordering::SeqCst);
    }

    fn before(&self, rank: WorldRank, _action: Action) {
        let begun = self.begun[rank.index()].fetch_add(1, Ordering::SeqCst) + 1;
        if rank.get() == self.rank && begun == self.rows[rank.index()] {
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}
