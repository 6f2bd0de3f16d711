//! Layers of the user's that defer their weight gradients: the results of plain autodiff, computed in `W`.

#[expect(dead_code, reason = "the tests use the example's layer, not its `main`")]
#[path = "../../examples/own_weight_gradients.rs"]
mod own_weight_gradients;

use std::cell::RefCell;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use burn::module::{Initializer, Module, Param};
use burn::optim::{GradientsParams, SgdConfig};
use burn::tensor::module::{conv_transpose1d, conv1d};
use burn::tensor::ops::{ConvOptions, ConvTransposeOptions};
use burn::tensor::{Device, Tensor, TensorData, Tolerance};
use own_weight_gradients::Adapted;
use pipewright::batch::Batch;
use pipewright::hook::ActionHook;
use pipewright::ids::WorldRank;
use pipewright::mesh::DataParallelMode::{Replicated, Sharded};
use pipewright::nn::SplitBackward;
use pipewright::pipeline::{Layers, Pipeline, PipelineBuilder, PipelineError};
use pipewright::stage::{StageContext, StageModule};
use pipewright::tensor::pack;
use pipewright::transport::World;
use pipewright_schedule::{Action, Level, LowerConfig, Recompute, StageIndex};

use crate::support::{loss, numbers};

const CHANNELS: usize = 3;
const LENGTH: usize = 5;
/// Elements of a row: the adapter's features, and the convolution's channels times its length.
const WIDTH: usize = CHANNELS * LENGTH;
const LAYERS: usize = 4;
const MICROBATCHES: u32 = 4;
const ROWS: usize = 8;

thread_local! {
    /// The action that this thread runs.
    static ACTION: RefCell<Option<Action>> = const { RefCell::new(None) };
}

/// The actions in which the convolutions computed their weight gradients.
type Log = Arc<Mutex<Vec<Action>>>;

/// An adapter, and a convolution whose weights have three and one dimensions. `split` chooses between layers
/// that defer and plain Burn.
#[derive(Module, Debug)]
struct Block {
    adapted: Adapted,
    kernel: Param<Tensor<3>>,
    bias: Param<Tensor<1>>,
    shift: Param<Tensor<1>>,
    #[module(skip)]
    split: Option<Log>,
}

#[derive(Debug)]
struct Convolution {
    log: Log,
}

impl SplitBackward<3, 3> for Convolution {
    type Weights = (Tensor<3>, Tensor<1>);
    type Saved = Tensor<3>;
    type Waiting = (Tensor<3>, Tensor<3>);

    fn forward(&self, x: Tensor<3>, (kernel, bias): Self::Weights) -> (Tensor<3>, Tensor<3>) {
        (convolved(x.clone(), kernel, Some(bias)), x)
    }

    fn backward_input(
        &self,
        x: &Tensor<3>,
        (kernel, _): Self::Weights,
        gradient: Tensor<3>,
        wanted: bool,
    ) -> (Option<Tensor<3>>, Self::Waiting) {
        let options = ConvTransposeOptions::new([1], [1], [0], [1], 1);
        let d_x = wanted.then(|| conv_transpose1d(gradient.clone(), kernel, None, options));
        (d_x, (x.clone(), gradient))
    }

    fn backward_weights(&self, (x, gradient): Self::Waiting) -> Self::Weights {
        let action = ACTION.with_borrow(|action| action.expect("the hook knows the action"));
        self.log.lock().expect("no panic").push(action);
        let bias = gradient.clone().sum_dim(0).sum_dim(2).reshape([CHANNELS]);
        (convolved(x.swap_dims(0, 1), gradient.swap_dims(0, 1), None).swap_dims(0, 1), bias)
    }
}

fn convolved(x: Tensor<3>, kernel: Tensor<3>, bias: Option<Tensor<1>>) -> Tensor<3> {
    conv1d(x, kernel, bias, ConvOptions::new([1], [1], [1], 1))
}

impl Block {
    fn new(layer: usize, split: Option<Log>) -> Self {
        let device = Device::flex().autodiff();
        let seed = |part: u64| 10 * layer as u64 + part;
        let mut adapted = Adapted::new(WIDTH, 2);
        adapted.base.weight = Param::from_data(numbers(seed(0), [WIDTH, WIDTH]), &device);
        adapted.base = adapted.base.no_grad();
        adapted.down = Param::from_data(numbers(seed(1), [WIDTH, 2]), &device);
        adapted.up = Param::from_data(numbers(seed(2), [2, WIDTH]), &device);
        Self {
            adapted,
            kernel: Param::from_data(numbers(seed(3), [CHANNELS, CHANNELS, 3]), &device),
            bias: Param::from_data(numbers(seed(4), [CHANNELS]), &device),
            shift: Initializer::Zeros.init([WIDTH], &device),
            split,
        }
    }
}

impl StageModule for Block {
    type Input = Tensor<2>;
    type Output = Tensor<2>;

    fn forward(&self, input: Tensor<2>, context: &StageContext) -> Tensor<2> {
        let [rows, _] = input.dims();
        let channels = input.clone().reshape([rows, CHANNELS, LENGTH]);
        let (convolution, x) = match &self.split {
            Some(log) => {
                let layer = Convolution { log: log.clone() };
                let convolution = layer.apply(channels, (&self.kernel, &self.bias));
                let x = input + convolution.tanh().reshape([rows, WIDTH]);
                return self.adapted.forward(x, context) + self.shift.val().unsqueeze();
            }
            None => (convolved(channels, self.kernel.val(), Some(self.bias.val())), input),
        };
        let x = x + convolution.tanh().reshape([rows, WIDTH]);
        let Adapted { base, down, up } = &self.adapted;
        let low = x.clone().matmul(down.val()).matmul(up.val());
        x.clone() + (x.matmul(base.weight.val()) + low * 2.0).tanh() + self.shift.val().unsqueeze()
    }
}

/// Tells the layers which action runs.
struct Names;

impl ActionHook for Names {
    fn around(&self, _rank: WorldRank, action: Action, run: &mut dyn FnMut()) {
        ACTION.set(Some(action));
        run();
        ACTION.set(None);
    }
}

fn rows(seed: u64) -> Tensor<2> {
    Tensor::from_data(numbers(seed, [ROWS, WIDTH]), &Device::flex())
}

fn builder(schedule: &str, log: Option<Log>) -> PipelineBuilder {
    let layers = Layers::new(LAYERS, move |layer| Block::new(layer, log.clone()));
    Pipeline::builder(layers)
        .ranks(2)
        .schedule(schedule)
        .microbatches(MICROBATCHES)
        .loss(loss)
        // With a rate of 1, a parameter changes by its gradient.
        .optimizer(SgdConfig::new().init())
        .hook(Arc::new(Names))
}

/// The losses of two steps, and each trained parameter after them.
type Trained = (Vec<f64>, Vec<(String, TensorData)>);

fn train(builder: PipelineBuilder) -> Trained {
    let mut pipeline = builder.launch().expect("it starts");
    let mut step = |step: u64| pipeline.step(rows(100 + step), rows(200 + step), 1.0).expect("a step").loss();
    let losses = vec![step(0), step(1)];
    let mut all: Vec<_> = pipeline.parameters().expect("every rank answers").into_iter().collect();
    all.sort_by(|a, b| a.path.cmp(&b.path));
    all.dedup_by(|a, b| a.path == b.path);
    (losses, all.into_iter().map(|parameter| (parameter.path.to_string(), parameter.data)).collect())
}

/// The same with Burn alone: no pipeline and no microbatches.
fn plain() -> (Vec<f64>, Vec<Block>) {
    let mut blocks: Vec<Block> = (0..LAYERS).map(|layer| Block::new(layer, None)).collect();
    let context = StageContext::new(StageIndex::new(0), 0.into());
    let mut optimizer = SgdConfig::new().init();
    let mut losses = Vec::new();
    for step in 0..2 {
        let input = rows(100 + step).autodiff();
        let output = blocks.iter().fold(input, |x, block| block.forward(x, &context));
        let loss = loss(output, rows(200 + step).autodiff());
        losses.push(f64::from(loss.clone().into_scalar::<f32>()));
        let gradients = GradientsParams::from_grads(loss.backward(), &blocks);
        blocks = optimizer.step(1.0, blocks, gradients);
    }
    (losses, blocks)
}

fn equal((losses, parameters): &Trained, (expected, blocks): &(Vec<f64>, Vec<Block>), what: &str) {
    for (found, expected) in losses.iter().zip(expected) {
        assert!((found - expected).abs() < 1e-5 * expected.abs(), "{what}: {found} {expected}");
    }
    let mut compared = 0;
    for (layer, block) in blocks.iter().enumerate() {
        let Adapted { base, down, up } = &block.adapted;
        for (name, expected) in [
            ("adapted.base.weight", base.weight.val().into_data()),
            ("adapted.down", down.val().into_data()),
            ("adapted.up", up.val().into_data()),
            ("kernel", block.kernel.val().into_data()),
            ("bias", block.bias.val().into_data()),
            ("shift", block.shift.val().into_data()),
        ] {
            let path = format!("layers.{layer}.{name}");
            let found = parameters.iter().find(|(found, _)| *found == path);
            let (_, found) = found.unwrap_or_else(|| panic!("{what}: {path} is missing: {parameters:?}"));
            found.assert_approx_eq::<f32>(&expected, Tolerance::rel_abs(1e-4, 1e-5));
            compared += 1;
        }
    }
    assert_eq!(compared, parameters.len());
}

#[test]
fn losses_and_gradients_are_those_of_plain_autodiff() {
    let expected = plain();
    for schedule in ["zbvzerobubble", "zb-h1", "dualpipev", "1f1b"] {
        equal(&train(builder(schedule, Some(Log::default()))), &expected, schedule);
    }
}

#[test]
fn weight_gradients_are_computed_in_w() {
    for schedule in ["zbvzerobubble", "zb-h1"] {
        let log = Log::default();
        let mut pipeline = builder(schedule, Some(log.clone())).launch().expect("it starts");
        pipeline.step(rows(0), rows(1), 1.0).expect("a step");
        let found = log.lock().expect("no panic");
        // `B` runs both parts: some schedules mix it with `I` and `W`.
        let wrong = found.iter().find(|action| matches!(action, Action::InputBackward { .. }));
        assert_eq!(wrong, None, "{schedule}");
        assert!(
            found.iter().any(|action| matches!(action, Action::WeightBackward { .. })),
            "{schedule}: {found:?}"
        );
        assert_eq!(found.len(), LAYERS * MICROBATCHES as usize, "{schedule}");
    }
}

#[test]
fn the_first_step_names_parameters_that_cannot_be_deferred() {
    let names = |builder: PipelineBuilder| {
        let mut pipeline = builder.launch().expect("it starts");
        let mut step = || pipeline.step(rows(0), rows(1), 1.0).expect("a step").undeferred;
        let first = step();
        assert!(step().is_empty(), "only the first step lists them");
        first.into_iter().map(|found| format!("{} {}", found.path, found.elements)).collect::<Vec<_>>()
    };
    let expected: Vec<_> = (0..LAYERS).map(|layer| format!("layers.{layer}.shift {WIDTH}")).collect();
    assert_eq!(names(builder("zbvzerobubble", Some(Log::default()))), expected);
    let plain = names(builder("zbvzerobubble", None));
    assert_eq!(plain.len(), 5 * LAYERS, "all but the frozen matrix: {plain:?}");
    assert!(plain.contains(&"layers.2.kernel 27".to_owned()), "{plain:?}");
    let whole = builder("1f1b", None).lower(LowerConfig::from(Level::Comms));
    assert_eq!(names(whole), Vec::<String>::new(), "it has no `W`");
}

fn split_rows() -> Batch {
    let part = |seed| rows(seed).chunk(MICROBATCHES as usize, 0).into_iter().map(pack).collect();
    Batch::new(part(0), part(1))
}

#[test]
fn a_step_that_fails_is_not_the_first_one_that_names_them() {
    let mut pipeline = builder("zb-h1", None).launch().expect("it starts");
    let taken = |pipeline: &mut Pipeline| {
        let accumulated = [(); 2].map(|()| pipeline.accumulate(split_rows()).expect("a batch").undeferred);
        let step = pipeline.step_batch(split_rows(), 1.0).expect("a step").undeferred;
        (accumulated, step)
    };
    // The ranks have reported the batch before the one that fails, and its gradients are dropped.
    let reported = pipeline.accumulate(split_rows()).expect("a batch").undeferred;
    assert!(!reported.is_empty());
    pipeline.step(rows(0).mul_scalar(f32::NAN), rows(1), 1.0).expect_err("the loss is not a number");
    assert_eq!(taken(&mut pipeline), ([(); 2].map(|()| reported.clone()), reported));
    assert_eq!(taken(&mut pipeline), ([Vec::new(), Vec::new()], Vec::new()));
}

/// Each rank is as if it were a process. One of them does not continue while the other one waits to compare its
/// next batch, so the gradients of the batch that has ended are dropped. The next step names the parameters once.
#[test]
fn a_step_after_a_batch_whose_gradients_are_dropped_names_them_once() {
    let [first, second] = <[World; 2]>::try_from(World::local(2).apart()).ok().expect("two ranks");
    let launch = |world| builder("zb-h1", None).world(world).launch().expect("it starts");
    // The number of calls of each process that have returned.
    let calls = [AtomicU32::new(0), AtomicU32::new(0)];
    let wait_for = |process: usize, count| {
        let until = Instant::now() + Duration::from_secs(60);
        while calls[process].load(Ordering::SeqCst) < count {
            assert!(Instant::now() < until, "process {process} does not get there");
            std::thread::sleep(Duration::from_millis(1));
        }
    };
    let returned = |process: usize| calls[process].fetch_add(1, Ordering::SeqCst);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut pipeline = launch(second);
            pipeline.accumulate(split_rows()).expect("a batch");
            wait_for(0, 1);
            // The other process compares its next batch by then.
            std::thread::sleep(Duration::from_secs(1));
            pipeline.abandon("it has lost its data");
            wait_for(0, 2);
            // Its own next call fails too, and both processes have counted it.
            pipeline.abandon("it has lost its data");
            pipeline.step_batch(split_rows(), 1.0).expect_err("it does not continue");
            returned(1);
            pipeline.step_batch(split_rows(), 1.0).expect("a step");
        });
        let mut pipeline = launch(first);
        pipeline.begin_accumulating(split_rows()).expect("none has begun");
        pipeline.begin(split_rows(), 1.0).expect("one has begun");
        returned(0);
        let reported = pipeline.finish().expect("it has ended").undeferred;
        assert!(!reported.is_empty());
        let error = pipeline.finish().expect_err("the other process does not continue").to_string();
        assert!(error.contains("it has lost its data"), "{error}");
        returned(0);
        wait_for(1, 1);
        let step = pipeline.step_batch(split_rows(), 1.0).expect("a step");
        assert_eq!(step.undeferred, reported);
    });
}

#[test]
fn sharded_and_recomputed_stages_have_the_same_bits() {
    for schedule in ["zbvzerobubble", "zb-h1"] {
        let replicas =
            || builder(schedule, Some(Log::default())).data_parallel(2).lower(LowerConfig::from(Level::Full));
        let whole = train(replicas().data_parallel_mode(Replicated));
        assert_eq!(train(replicas().data_parallel_mode(Sharded)), whole, "{schedule}, sharded");
        assert_eq!(train(replicas().recompute(Recompute::Stage)), whole, "{schedule}, recomputed");
        equal(&whole, &plain(), schedule);
    }
}

/// A layer that returns the gradients of its weights in the wrong order.
#[derive(Module, Debug)]
struct Wrong {
    row: Param<Tensor<1>>,
    column: Param<Tensor<1>>,
}

struct WrongProduct;

impl SplitBackward<2, 2> for WrongProduct {
    type Weights = (Tensor<1>, Tensor<1>);
    type Saved = Tensor<2>;
    type Waiting = Tensor<2>;

    fn forward(&self, x: Tensor<2>, (row, _): Self::Weights) -> (Tensor<2>, Tensor<2>) {
        (x.clone() * row.unsqueeze(), x)
    }

    fn backward_input(
        &self,
        _: &Tensor<2>,
        (row, _): Self::Weights,
        gradient: Tensor<2>,
        wanted: bool,
    ) -> (Option<Tensor<2>>, Tensor<2>) {
        (wanted.then(|| gradient.clone() * row.unsqueeze()), gradient)
    }

    fn backward_weights(&self, waiting: Tensor<2>) -> Self::Weights {
        let row = waiting.sum_dim(0).squeeze_dim(0);
        (Tensor::zeros([1], &row.device()), row)
    }
}

impl StageModule for Wrong {
    type Input = Tensor<2>;
    type Output = Tensor<2>;

    fn forward(&self, input: Tensor<2>, _context: &StageContext) -> Tensor<2> {
        WrongProduct.apply(input, (&self.row, &self.column))
    }
}

#[test]
fn a_gradient_of_a_wrong_shape_is_an_error_that_names_layer_and_parameter() {
    let device = Device::flex().autodiff();
    let make = move |_| Wrong {
        row: Initializer::Ones.init([WIDTH], &device),
        column: Initializer::Ones.init([1], &device),
    };
    let builder = Pipeline::builder(Layers::new(2, make)).ranks(2).schedule("zb-h1").microbatches(2);
    let mut pipeline =
        builder.loss(loss).optimizer(SgdConfig::new().init()).launch().expect("the pipeline starts");
    let error = pipeline.step(rows(0), rows(1), 1.0).expect_err("the shapes are wrong");
    assert!(matches!(error, PipelineError::Step(_)), "{error}");
    let text = error.to_string();
    for part in ["WrongProduct", ".row` of shape [15]", "gradient of shape [1]", "microbatch 0", ", action "]
    {
        assert!(text.contains(part), "{part}: {text}");
    }
}
