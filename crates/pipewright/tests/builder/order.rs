//! Gradients of values with several uses are added in an order that does not depend on the cut.

use burn::module::{Module, ModuleDisplay, Param};
use burn::optim::SgdConfig;
use burn::tensor::{Device, Tensor, activation};
use pipewright::graph::{Graph, GraphLayer};
use pipewright::nn::Linear;
use pipewright::pipeline::{Layers, Pipeline, PipelineBuilder, PipelineConfig};
use pipewright::stage::{StageContext, StageModule};
use pipewright::tensor::{BoundaryError, Precision, Values, pack, unpack};
use pipewright_schedule::Recompute;

use crate::support::{WIDTH, config, linear, loss, numbers};
use crate::{MICROBATCHES, Run, train_for};

/// Layers of each model, which are cut for at most six ranks with two stages each.
const LAYERS: usize = 12;
/// A sum in another order shows in the losses after a few steps.
const STEPS: u64 = 10;

const CUTS: [(&str, u32); 5] =
    [("1f1b", 3), ("zb-h1", 5), ("interleaved1f1b", 2), ("zbvzerobubble", 2), ("zbvzerobubble", 6)];

/// Trains a model under every cut, and with recomputed stages.
fn check(layers: impl Fn() -> Layers, config: &PipelineConfig) {
    let builder = |schedule, ranks| {
        let builder = Pipeline::builder(layers()).config(config.clone()).ranks(ranks).schedule(schedule);
        builder.microbatches(MICROBATCHES).loss(loss)
    };
    let run = |builder: PipelineBuilder| train_for(STEPS, builder.launch().expect("it starts"));
    let expected: Run = run(builder("1f1b", 1));
    assert_ne!(expected.0[0].0, expected.0[STEPS as usize - 1].0, "it learns");
    for (schedule, ranks) in CUTS {
        assert_eq!(run(builder(schedule, ranks)), expected, "{schedule} on {ranks}");
    }
    for recompute in [Recompute::Stage, Recompute::Block] {
        let found = run(builder("1f1b", 3).recompute(recompute.clone()));
        assert_eq!(found, expected, "{recompute:?}");
    }
    let uneven = run(builder("1f1b", 4).boundaries([1, 2, 7]));
    assert_eq!(uneven, expected, "an uneven cut");
}

fn check_layers<L: StageModule + ModuleDisplay>(make: impl Fn(usize) -> L + Clone + Send + Sync + 'static) {
    check(|| Layers::new(LAYERS, make.clone()), &config());
}

/// A layer whose gate is used by its auxiliary loss and by its output.
#[derive(Module, Debug)]
struct Gate {
    linear: Linear,
}

impl Gate {
    fn new(index: usize) -> Self {
        Self { linear: linear(index as u64, [WIDTH, WIDTH]) }
    }
}

impl StageModule for Gate {
    type Input = Tensor<2>;
    type Output = Tensor<2>;

    fn forward(&self, x: Tensor<2>, context: &StageContext) -> Tensor<2> {
        let gate = activation::softmax(self.linear.forward(x.clone()), 1);
        context.auxiliary_loss("balance", 0.05, (gate.clone() * gate.clone()).mean());
        x + gate
    }
}

#[test]
fn a_value_of_an_auxiliary_loss_and_a_residual() {
    check_layers(Gate::new);
}

/// A layer with several residuals and auxiliary losses on its input, inside, and on its output. One use of the
/// input depends on a longer path from a parameter than the others.
#[derive(Module, Debug)]
struct Many {
    first: Linear,
    second: Linear,
    scale: Param<Tensor<1>>,
}

impl Many {
    fn new(index: usize) -> Self {
        let index = index as u64;
        let scale = Param::from_data(numbers(300 + index, [WIDTH]), &Device::flex().autodiff());
        Self {
            first: linear(100 + index, [WIDTH, WIDTH]),
            second: linear(200 + index, [WIDTH, WIDTH]),
            scale,
        }
    }
}

impl StageModule for Many {
    type Input = Tensor<2>;
    type Output = Tensor<2>;

    fn forward(&self, x: Tensor<2>, context: &StageContext) -> Tensor<2> {
        let scale = self.scale.val().tanh().exp().tanh().unsqueeze::<2>();
        let first = self.first.forward(x.clone()).tanh();
        let second = activation::sigmoid(self.second.forward(x.clone() + first.clone()));
        context.auxiliary_loss("input", 0.1, (x.clone() * x.clone() * x.clone()).mean());
        context.auxiliary_loss("inside", 0.2, (first.clone() * second.clone()).mean());
        let output =
            x.clone() * scale + first.clone() * second.clone() + x.clone() * 0.5 + first * 0.25 + second;
        context.auxiliary_loss("output", 0.02, (output.clone() * output.clone() - x).square().mean());
        output * 0.5
    }
}

#[test]
fn several_residuals_and_auxiliary_losses() {
    check_layers(Many::new);
}

#[test]
fn values_between_layers_are_rounded_alike_in_half_precision() {
    let config = PipelineConfig { precision: Precision::Bf16, ..config() };
    check(|| Layers::new(LAYERS, Many::new), &config);
}

/// Layers with several inputs and outputs. Some of them are the same value.
#[derive(Module, Debug)]
struct Pair {
    many: Many,
    #[module(skip)]
    place: usize,
}

impl GraphLayer for Pair {
    fn forward(&self, inputs: Values, context: &StageContext) -> Result<Values, BoundaryError> {
        if self.place == 0 {
            let x: Tensor<2> = unpack(inputs)?;
            return Ok(pack((self.many.forward(x.clone(), context), x)));
        }
        let (a, b): (Tensor<2>, Tensor<2>) = unpack(inputs)?;
        let both = self.many.forward(a.clone() * 0.5 + b.clone(), context);
        if self.place + 1 == LAYERS {
            return Ok(pack(both + a * b));
        }
        let passed = both.clone() + b;
        Ok(if self.place.is_multiple_of(3) {
            pack((both.clone(), both))
        } else {
            pack((passed, both + a * 0.1))
        })
    }
}

#[test]
fn several_inputs_and_outputs() {
    let make = |place| Ok::<_, std::convert::Infallible>(Pair { many: Many::new(place), place });
    check(|| Layers::mixed(LAYERS, make), &config());
}

/// A node, which adds up its inputs. Each input has several uses.
#[derive(Module, Debug)]
struct Node {
    many: Many,
}

impl GraphLayer for Node {
    fn forward(&self, inputs: Values, context: &StageContext) -> Result<Values, BoundaryError> {
        let inputs = inputs.into_iter().map(|input| unpack::<Tensor<2>>(vec![input]));
        let inputs = inputs.collect::<Result<Vec<_>, _>>()?;
        let squares = inputs.iter().map(|x| (x.clone() * x.clone()).mean()).reduce(|sum, x| sum + x);
        context.auxiliary_loss("squares", 0.01, squares.ok_or(BoundaryError::Missing { index: 0 })?);
        let sum = inputs.into_iter().reduce(|sum, x| sum * 0.5 + x);
        let sum = sum.ok_or(BoundaryError::Missing { index: 0 })?;
        Ok(pack(self.many.forward(sum, context)))
    }
}

/// Returns nodes in a row, with skip connections across up to eleven of them, also of one value to several.
fn graph() -> Graph<usize> {
    let name = |index: usize| format!("n{index:02}");
    let takes = |index: usize| -> Vec<String> {
        match index {
            0 => vec!["x".to_owned()],
            2 | 5 | 9 => vec![name(index - 1), name(0)],
            7 => vec![name(6), name(3), name(6)],
            11 => vec![name(10), name(0), name(3), "x".to_owned()],
            _ => vec![name(index - 1)],
        }
    };
    let add = |graph: pipewright::graph::GraphBuilder<usize>, index| {
        graph.node(&name(index), index, takes(index).iter().map(String::as_str))
    };
    (0..LAYERS).fold(Graph::builder().input("x"), add).output(&name(11)).build().expect("it is a graph")
}

#[test]
fn skip_connections_of_a_graph() {
    check(|| Layers::graph(graph(), |_, index| Node { many: Many::new(*index) }), &config());
}

#[test]
fn a_module_without_gradients_of_its_own_passes_them_on() {
    // The optimizer has no state, so a difference shows in the parameters at once.
    let config = PipelineConfig { optimizer: Some(SgdConfig::new().init()), clip_norm: None, ..config() };
    check(
        || Layers::new(LAYERS, |index| if index % 2 == 0 { Gate::new(index) } else { frozen(index) }),
        &config,
    );
}

/// Returns a layer whose parameters are not trained.
fn frozen(index: usize) -> Gate {
    Gate::new(index).no_grad()
}
