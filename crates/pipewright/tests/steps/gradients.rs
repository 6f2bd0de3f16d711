//! Gradients of boundary tensors: a missing gradient is zero, never the gradient of another microbatch.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use burn::module::{Module, Param};
use burn::tensor::{Device, Tensor};
use pipewright::nn::Linear;
use pipewright::pipeline::Pipeline;
use pipewright::stage::{Stage, StageContext, StageModule};
use pipewright::transport::World;
use pipewright_schedule::{StageIndex, ValidatedProgram};

use crate::support::{Step, WIDTH, batch, config, numbers, program};

const PARTS: usize = 4;
const MICROBATCHES: u32 = 4;

fn linear(seed: u64) -> Linear {
    let device = Device::flex().autodiff();
    Linear {
        weight: Param::from_data(numbers(seed, [WIDTH, WIDTH]), &device),
        bias: Some(Param::from_data(numbers(seed + 1, [WIDTH]), &device)),
    }
}

/// Two outputs; the next part uses the second one for even microbatches only.
#[derive(Module, Debug)]
struct RowShard {
    left: Linear,
    right: Linear,
}

/// Consecutive parts.
#[derive(Module, Debug)]
struct Parts {
    parts: Vec<RowShard>,
    #[module(skip)]
    first: usize,
}

type Pair = (Tensor<2>, Tensor<2>);

impl StageModule for Parts {
    type Input = Pair;
    type Output = Pair;

    fn forward(&self, input: Pair, context: &StageContext) -> Pair {
        let is_even = context.microbatch().get().is_multiple_of(2);
        self.parts.iter().fold(input, |(a, b), part| {
            let x = a + if is_even { b } else { b.detach() };
            (part.left.forward(x.clone()).tanh(), part.right.forward(x))
        })
    }

    fn parameter_path(&self, local: &str) -> String {
        let mut pieces = local.splitn(3, '.').skip(1);
        let place: usize = pieces.next().and_then(|place| place.parse().ok()).expect("a part's place");
        format!("parts.{}.{}", self.first + place, pieces.next().expect("a parameter"))
    }
}

fn pair_loss((a, b): Pair, target: Tensor<2>) -> Tensor<1> {
    (a - target).square().mean() + b.square().mean()
}

fn train(program: ValidatedProgram) -> Vec<Step> {
    let placement = program.placement().clone();
    let count = PARTS / placement.stages() as usize;
    let make = move |stage: StageIndex| -> Result<Stage, std::convert::Infallible> {
        let first = stage.index() * count;
        let part =
            |place: usize| RowShard { left: linear(place as u64 * 10), right: linear(place as u64 * 10 + 5) };
        let module = Parts { parts: (first..first + count).map(part).collect(), first };
        Ok(if stage == placement.last_stage() {
            Stage::with_loss(module, pair_loss)
        } else {
            Stage::new(module)
        })
    };
    let world = World::local(program.ranks());
    let mut pipeline = Pipeline::launch(program, world, &config(), make).expect("it starts");
    let step = |step| {
        let inputs = (batch(step, MICROBATCHES), batch(50 + step, MICROBATCHES));
        let report = pipeline.step(inputs, batch(100 + step, MICROBATCHES), 1e-2).expect("a step");
        (report.losses, report.gradient_norm)
    };
    (0..4).map(step).collect()
}

#[test]
fn a_missing_gradient_is_nothing_and_never_another_microbatchs() {
    let expected = train(program("gpipe", 1, MICROBATCHES));
    // Between ranks, within a rank of a V placement, and with input gradients before weight gradients.
    for (schedule, ranks) in [("gpipe", 2), ("1f1b", 4), ("zbvzerobubble", 2), ("dualpipev", 2), ("zb-h1", 4)]
    {
        assert_eq!(train(program(schedule, ranks, MICROBATCHES)), expected, "{schedule}");
    }
}

/// The stages whose forward got a float input that requires a gradient.
#[derive(Debug, Default)]
struct Seen {
    data: AtomicUsize,
    constant: AtomicUsize,
    hidden: AtomicUsize,
}

/// Returns changed hidden rows and the unchanged data, which depends on no parameter.
#[derive(Module, Debug)]
struct Watching {
    linear: Linear,
    #[module(skip)]
    seen: Arc<Seen>,
}

impl StageModule for Watching {
    type Input = Pair;
    type Output = Pair;

    fn forward(&self, (hidden, data): Pair, context: &StageContext) -> Pair {
        let note = |counter: &AtomicUsize, tensor: &Tensor<2>| {
            counter.fetch_add(usize::from(tensor.is_tracked()), Ordering::Relaxed);
        };
        match context.stage().get() {
            0 => note(&self.seen.data, &hidden),
            _ => note(&self.seen.hidden, &hidden),
        }
        note(&self.seen.constant, &data);
        (self.linear.forward(hidden).tanh() + data.clone(), data * 2.0)
    }
}

#[test]
fn inputs_that_require_no_gradient_get_none() {
    // Four stages on four ranks, and on two ranks in a V placement.
    for (schedule, ranks) in [("1f1b", 4), ("zbvzerobubble", 2)] {
        let seen = Arc::new(Seen::default());
        let of_stages = seen.clone();
        let make = move |stage: StageIndex| -> Result<Stage, std::convert::Infallible> {
            let module = Watching { linear: linear(u64::from(stage.get())), seen: of_stages.clone() };
            let made =
                if stage.get() == 3 { Stage::with_loss(module, pair_loss) } else { Stage::new(module) };
            Ok(made.with_prefix(&format!("layers.{stage}")))
        };
        let program = program(schedule, ranks, MICROBATCHES);
        let mut pipeline =
            Pipeline::launch(program, World::local(ranks), &config(), make).expect("it starts");
        let inputs = (batch(0, MICROBATCHES), batch(1, MICROBATCHES));
        pipeline.step(inputs, batch(2, MICROBATCHES), 1e-2).expect("a step");
        assert_eq!(seen.data.load(Ordering::Relaxed), 0, "{schedule}: the data");
        assert_eq!(seen.constant.load(Ordering::Relaxed), 0, "{schedule}: what hands the data on");
        assert_eq!(seen.hidden.load(Ordering::Relaxed), 3 * MICROBATCHES as usize, "{schedule}: the others");
    }
}
