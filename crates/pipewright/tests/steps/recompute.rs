//! Stages that compute their forward again have the bits of stages that keep their activations.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use burn::module::{Module, Param};
use burn::nn::{BatchNorm, BatchNormConfig, LinearConfig};
use burn::tensor::{Device, Tensor, TensorData, activation};
use pipewright::batch::Batch;
use pipewright::mesh::DataParallelMode;
use pipewright::nn::{Dropout, Linear};
use pipewright::offload::OffloadTo;
use pipewright::pipeline::{Layers, Pipeline, PipelineConfig, PipelineError, StepSummary};
use pipewright::stage::{Stage, StageContext, StageModule};
use pipewright::tensor::{BoundaryError, Values, pack, unpack};
use pipewright::transport::World;
use pipewright_schedule::generate::catalogue;
use pipewright_schedule::{Action, Rank, Recompute, StageIndex};

use crate::support::{
    self, LAYERS, WIDTH, batch, biased, brought, config, ending_in_loss, loss, numbers, program, split,
};

const MICROBATCHES: u32 = 8;
const STEPS: u64 = 3;

/// A layer with everything that a second forward could change: random numbers, running statistics, an
/// auxiliary loss.
#[derive(Module, Debug)]
struct Block {
    linear: Linear,
    norm: BatchNorm,
    dropout: Dropout,
    #[module(skip)]
    layer: usize,
}

impl Block {
    fn new(layer: usize) -> Self {
        let device = Device::flex().autodiff();
        let norm = BatchNormConfig::new(WIDTH).init(&device);
        Self { linear: biased(layer as u64, &device), norm, dropout: Dropout::new(0.3), layer }
    }

    fn run(&self, input: Tensor<2>, context: &StageContext) -> Tensor<2> {
        let hidden = activation::tanh(self.linear.forward(input.clone()));
        let hidden = self.norm.forward(hidden.unsqueeze_dim::<3>(2)).squeeze_dim::<2>(2);
        context.auxiliary_loss("size", 0.1, hidden.clone().abs().mean());
        input + self.dropout.forward(hidden, context.random(&format!("blocks.{}.dropout", self.layer)))
    }
}

/// Blocks of the tests' model.
#[derive(Module, Debug)]
struct Blocks {
    blocks: Vec<Block>,
}

impl StageModule for Blocks {
    type Input = Tensor<2>;
    type Output = Tensor<2>;

    fn forward(&self, input: Tensor<2>, context: &StageContext) -> Tensor<2> {
        self.blocks.iter().fold(input, |x, block| block.run(x, context))
    }

    fn blocks(&self) -> usize {
        self.blocks.len()
    }

    fn forward_block(
        &self,
        block: usize,
        input: Values,
        context: &StageContext,
    ) -> Result<Values, BoundaryError> {
        Ok(pack(self.blocks[block].run(unpack(input)?, context)))
    }

    fn parameter_path(&self, local: &str) -> String {
        let mut parts = local.splitn(3, '.');
        let (Some("blocks"), Some(place), Some(rest)) = (parts.next(), parts.next(), parts.next()) else {
            panic!("unexpected parameter {local}");
        };
        let layer = self.blocks[place.parse::<usize>().expect("a place")].layer;
        format!("blocks.{layer}.{rest}")
    }
}

fn launch(schedule: &str, ranks: u32, config: &PipelineConfig) -> Pipeline {
    let program = program(schedule, ranks, MICROBATCHES / config.data_parallel);
    let program = support::offloaded(program, config);
    let stages = program.placement().stages();
    let make = move |stage: StageIndex| -> Result<Stage, std::convert::Infallible> {
        let count = LAYERS / stages as usize;
        let first = stage.index() * count;
        let module = Blocks { blocks: (first..first + count).map(Block::new).collect() };
        ending_in_loss(stage.get() + 1 == stages, module)
    };
    Pipeline::launch(program, World::local(ranks * config.data_parallel), config, make).expect("it starts")
}

fn step(pipeline: &mut Pipeline, number: u64) -> StepSummary {
    pipeline.step_batch(brought(number, MICROBATCHES), 1e-2).expect("a step")
}

/// The losses, auxiliary losses and gradient norms of a run, and its parameters and running statistics at the
/// end.
type Outcome = (Vec<(Vec<f64>, Vec<f64>, f64)>, Vec<(String, TensorData)>);

fn run(schedule: &str, ranks: u32, config: &PipelineConfig) -> Outcome {
    let mut pipeline = launch(schedule, ranks, config);
    let figures = |summary: StepSummary| {
        (summary.losses, summary.auxiliary.into_values().collect(), summary.gradient_norm)
    };
    let steps = (0..STEPS).map(|number| figures(step(&mut pipeline, number))).collect();
    let parameters = pipeline.parameters().expect("they are there");
    (steps, parameters.into_iter().map(|parameter| (parameter.path.to_string(), parameter.data)).collect())
}

/// Checks that recomputation of any kind changes no bit.
fn check(schedule: &str, ranks: u32, config: &PipelineConfig) {
    let expected = run(schedule, ranks, config);
    let layers = LAYERS as u32 / program(schedule, ranks, MICROBATCHES).placement().stages();
    let layers = layers.div_ceil(2);
    let lists =
        ["1".to_owned(), format!("0:layers={layers}:keep=1,1:layers=1"), "0:keep=2,1:keep=1".to_owned()];
    let lists = lists.map(|list| list.parse().expect("a choice"));
    for recompute in [Recompute::Stage, Recompute::Block].into_iter().chain(lists) {
        let found = run(schedule, ranks, &PipelineConfig { recompute: recompute.clone(), ..config.clone() });
        assert!(found == expected, "{schedule}, recompute {recompute}: {:?} {:?}", found.0, expected.0);
    }
    // The inputs of all blocks may also leave memory.
    let folder = tempfile::tempdir().expect("a folder");
    let offload = Some(OffloadTo::Folder(folder.path().to_owned()));
    let found =
        run(schedule, ranks, &PipelineConfig { recompute: Recompute::Block, offload, ..config.clone() });
    assert!(found == expected, "{schedule}, offload: {:?} {:?}", found.0, expected.0);
    assert_eq!(std::fs::read_dir(folder.path()).expect("a folder").count(), 0, "{schedule}");
}

#[test]
fn every_schedule_keeps_its_bits() {
    for generator in catalogue().iter().filter(|generator| generator.trains) {
        check(generator.name, 2, &config());
    }
}

#[test]
fn replicas_keep_their_bits_whole_and_sharded() {
    for data_parallel_mode in [DataParallelMode::Replicated, DataParallelMode::Sharded] {
        let config = PipelineConfig { data_parallel: 2, data_parallel_mode, ..config() };
        check("1f1b", 2, &config);
        check("zbvzerobubble", 2, &config);
    }
}

#[test]
fn outputs_come_back_in_a_later_step_too() {
    let outputs = |recompute: Recompute| {
        let mut pipeline = launch("gpipe", 2, &PipelineConfig { recompute, ..config() });
        step(&mut pipeline, 0);
        let inputs = split(batch(1, MICROBATCHES), MICROBATCHES);
        let batch = Batch::new(inputs.clone(), inputs).keep_outputs();
        let outputs = pipeline.step_batch(batch, 1e-2).expect("a step").outputs.concat().into_iter();
        let data = outputs.map(|output| unpack::<Tensor<2>>(vec![output]).expect("a matrix").into_data());
        data.collect::<Vec<_>>()
    };
    let expected = outputs(Recompute::None);
    assert_eq!(expected.len(), MICROBATCHES as usize);
    assert_eq!(outputs(Recompute::Stage), expected);
}

/// Returns the forwards of a rank in a measured step.
fn forwards(summary: &StepSummary, rank: u32) -> usize {
    let events = summary.timeline.events_of(Rank::new(rank));
    events.iter().filter(|event| matches!(event.action, Action::Forward { .. })).count()
}

#[test]
fn the_timeline_shows_the_second_forward_unless_the_backward_follows_at_once() {
    let config = PipelineConfig { recompute: Recompute::Stage, ..config() };
    let summary = step(&mut launch("1f1b", 2, &config), 0);
    assert_eq!([0, 1].map(|rank| forwards(&summary, rank)), [16, 8]);
    let summary = step(&mut launch("gpipe", 2, &config), 0);
    assert_eq!(forwards(&summary, 0), 16);
    assert!(forwards(&summary, 1) >= 15);
    let of_rank = summary.timeline.events_of(Rank::new(0));
    let compute: Vec<_> = of_rank.iter().filter(|event| event.action.is_compute()).collect();
    assert!(
        compute.windows(2).all(|pair| pair[0].end <= pair[1].start + 1e-6),
        "computations do not overlap"
    );
}

/// A layer that counts its forwards, or waits in its own until another one has counted that many.
#[derive(Module, Debug)]
struct Watched {
    linear: Linear,
    #[module(skip)]
    calls: Arc<AtomicUsize>,
    #[module(skip)]
    awaits: Option<usize>,
}

impl StageModule for Watched {
    type Input = Tensor<2>;
    type Output = Tensor<2>;

    fn forward(&self, input: Tensor<2>, _context: &StageContext) -> Tensor<2> {
        let deadline = Instant::now() + Duration::from_secs(20);
        match self.awaits {
            None => drop(self.calls.fetch_add(1, Ordering::Relaxed)),
            Some(count) => {
                while self.calls.load(Ordering::Relaxed) < count && Instant::now() < deadline {
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
        }
        self.linear.forward(input)
    }
}

#[test]
fn a_forward_runs_again_while_its_gradients_are_on_their_way() {
    let calls = Arc::new(AtomicUsize::new(0));
    // The other rank returns no gradient before a forward has run a second time.
    let once_more = MICROBATCHES as usize + 1;
    let of_stages = [None, Some(once_more)];
    let counted = calls.clone();
    let make = move |stage: StageIndex| -> Result<Stage, std::convert::Infallible> {
        let weight = Param::from_data(numbers(0, [WIDTH, WIDTH]), &Device::flex().autodiff());
        let linear = Linear { weight, bias: None };
        let module = Watched { linear, calls: counted.clone(), awaits: of_stages[stage.index()] };
        let stage_of = if stage.get() == 1 { Stage::with_loss(module, loss) } else { Stage::new(module) };
        Ok(stage_of.with_prefix(&format!("layers.{stage}")))
    };
    let recompute = Recompute::whole_stages([StageIndex::new(0)]);
    let config = PipelineConfig { recompute, ..config() };
    let program = program("gpipe", 2, MICROBATCHES);
    let mut pipeline = Pipeline::launch(program, World::local(2), &config, make).expect("it starts");
    let summary = step(&mut pipeline, 0);
    assert!(summary.wall < Duration::from_secs(20), "the forward ran again with its backward");
    assert_eq!(calls.load(Ordering::Relaxed), 2 * MICROBATCHES as usize);
    assert_eq!(forwards(&summary, 0), 2 * MICROBATCHES as usize);
}

#[test]
fn a_stage_that_does_not_exist_is_refused() {
    let config = PipelineConfig { recompute: Recompute::whole_stages([StageIndex::new(2)]), ..config() };
    let program = program("1f1b", 2, 4);
    let launched = Pipeline::launch(program, World::local(2), &config, |index| support::stage(index, 2));
    let Err(error) = launched else { panic!("there are two stages") };
    assert!(
        error.to_string().contains("stage 2 is to be recomputed, and the program has 2 stages"),
        "{error}"
    );
}

/// A module that depends on how often it was called.
#[derive(Module, Debug)]
struct Fickle {
    linear: Linear,
    #[module(skip)]
    calls: Arc<AtomicUsize>,
}

impl StageModule for Fickle {
    type Input = Tensor<2>;
    type Output = (Tensor<2>, Tensor<2>);

    fn forward(&self, input: Tensor<2>, _context: &StageContext) -> (Tensor<2>, Tensor<2>) {
        let output = self.linear.forward(input.clone());
        match self.calls.fetch_add(1, Ordering::Relaxed) {
            0 => (output, input),
            _ => (output.clone(), output),
        }
    }
}

#[derive(Module, Debug)]
struct Sum {
    linear: Linear,
}

impl StageModule for Sum {
    type Input = (Tensor<2>, Tensor<2>);
    type Output = Tensor<2>;

    fn forward(&self, (one, other): (Tensor<2>, Tensor<2>), _context: &StageContext) -> Tensor<2> {
        self.linear.forward(one + other)
    }
}

#[test]
fn a_forward_that_changes_is_refused() {
    let make = |stage: StageIndex| -> Result<Stage, std::convert::Infallible> {
        // Not drawn: the generator belongs to the whole process, and other tests compare what they draw from
        // it.
        let weight = Param::from_data(numbers(0, [WIDTH, WIDTH]), &Device::flex().autodiff());
        let linear = Linear { weight, bias: None };
        Ok(match stage.get() {
            0 => Stage::new(Fickle { linear, calls: Arc::default() }),
            _ => Stage::with_loss(Sum { linear }, loss),
        }
        .with_prefix(&format!("layers.{stage}")))
    };
    let config = PipelineConfig { recompute: Recompute::Stage, ..config() };
    let mut pipeline =
        Pipeline::launch(program("1f1b", 2, 2), World::local(2), &config, make).expect("it starts");
    let error = pipeline.step(batch(0, 2), batch(1, 2), 1e-2).expect_err("the outputs differ");
    let PipelineError::Step(error) = &error else { panic!("{error}") };
    assert!(error.cause.to_string().starts_with("output 1 of a forward needs a gradient"), "{error}");
}

/// A layer of Burn's own operations, on a given device.
#[derive(Module, Debug)]
struct Plain {
    linear: burn::nn::Linear,
}

impl StageModule for Plain {
    type Input = Tensor<2>;
    type Output = Tensor<2>;

    fn forward(&self, input: Tensor<2>, _context: &StageContext) -> Tensor<2> {
        activation::gelu(self.linear.forward(input)) * 0.5
    }
}

fn losses_on(device: &Device, ranks: u32, config: PipelineConfig) -> Vec<Vec<f64>> {
    let device = device.clone();
    let layer = move |_| Plain { linear: LinearConfig::new(WIDTH, WIDTH).init(&device) };
    let built =
        Pipeline::builder(Layers::new(4, layer)).config(config).ranks(ranks).microbatches(MICROBATCHES);
    let mut pipeline = built.loss(loss).launch().expect("it starts");
    let mut losses = |number| {
        let summary = pipeline.step(batch(number, MICROBATCHES), batch(100 + number, MICROBATCHES), 1e-2);
        summary.expect("a step").losses
    };
    (0..STEPS).map(&mut losses).collect()
}

#[test]
fn layers_on_a_device_with_gradient_checkpointing_train() {
    let plain = Device::flex().autodiff();
    let checkpointing = plain.clone().gradient_checkpointing();
    let expected = losses_on(&plain, 1, config());
    for ranks in [1, 2, 4] {
        assert_eq!(losses_on(&checkpointing, ranks, config()), expected, "{ranks} ranks");
    }
    let recompute = PipelineConfig { recompute: Recompute::Block, ..config() };
    assert_eq!(losses_on(&checkpointing, 2, recompute), expected);
    let sharded = PipelineConfig {
        data_parallel: 2,
        data_parallel_mode: DataParallelMode::Sharded,
        recompute: Recompute::Stage,
        ..config()
    };
    assert_eq!(losses_on(&checkpointing, 2, sharded.clone()), losses_on(&plain, 2, sharded));
}
