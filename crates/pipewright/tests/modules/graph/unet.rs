//! A small U-Net as a graph, its data, and the results of training it.

use burn::module::{Module, Param};
use burn::nn::LinearConfig;
use burn::tensor::{Device, Int, Tensor, TensorData};
use pipewright::batch::Batch;
use pipewright::graph::{Graph, GraphBuilder, GraphError, GraphLayer};
use pipewright::nn::Linear;
use pipewright::pipeline::{NamedParameter, Pipeline, PipelineConfig};
use pipewright::stage::{Stage, StageContext};
use pipewright::tensor::{BoundaryError, Values, pack, unpack};
use pipewright::transport::World;
use pipewright_schedule::{Placement, Recompute, StageIndex, ValidatedProgram};

use crate::support::{ROWS, Step, WIDTH, batch, config, numbers};

pub(crate) const MICROBATCHES: u32 = 12;
pub(crate) const STEPS: u64 = 3;

/// The configuration of a layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Kind {
    Mix,
    Halves,
    Pick,
}

#[derive(Module, Debug)]
pub(crate) enum Layer {
    Mix(Mix),
    Halves(Halves),
    Pick(Pick),
}

/// `tanh` of a linear map of the sum of the inputs, each scaled by its index.
#[derive(Module, Debug)]
pub(crate) struct Mix {
    linear: Linear,
}

/// Two outputs: one half of the features changed, and the other half unchanged.
#[derive(Module, Debug)]
pub(crate) struct Halves {
    pub(crate) linear: Linear,
}

/// The first input, scaled by the ids that come with it.
#[derive(Module, Debug)]
pub(crate) struct Pick {
    scale: Param<Tensor<1>>,
}

impl Mix {
    pub(crate) fn of(&self, inputs: impl IntoIterator<Item = Tensor<2>>) -> Tensor<2> {
        let scaled = (1u8..).zip(inputs).map(|(place, input)| input * (1.0 / f32::from(place)));
        let sum = scaled.reduce(|sum, input| sum + input).expect("an input");
        self.linear.forward(sum).tanh()
    }
}

impl Pick {
    pub(crate) fn of(&self, input: Tensor<2>, ids: Tensor<1, Int>) -> Tensor<2> {
        input * self.scale.val().unsqueeze() * (ids.float() * 0.1 + 1.0).unsqueeze_dim::<2>(1)
    }
}

impl GraphLayer for Layer {
    fn forward(&self, inputs: Values, _context: &StageContext) -> Result<Values, BoundaryError> {
        Ok(match self {
            Self::Mix(mix) => {
                let inputs = inputs.into_iter().map(|input| unpack::<Tensor<2>>(vec![input]));
                pack(mix.of(inputs.collect::<Result<Vec<_>, _>>()?))
            }
            Self::Halves(halves) => {
                let input: Tensor<2> = unpack(inputs)?;
                pack((halves.linear.forward(input.clone()).tanh(), input * 0.5))
            }
            Self::Pick(pick) => {
                let (input, ids): (Tensor<2>, Tensor<1, Int>) = unpack(inputs)?;
                pack(pick.of(input, ids))
            }
        })
    }
}

/// Returns a layer whose values depend on its node's name only.
pub(crate) fn make(name: &str, kind: &Kind) -> Layer {
    let device = Device::flex().autodiff();
    let seed = name.bytes().fold(7u64, |seed, byte| seed * 31 + u64::from(byte));
    let mut linear = LinearConfig::new(WIDTH, WIDTH).init(&device);
    linear.weight = Param::from_data(numbers(seed, [WIDTH, WIDTH]), &device);
    linear.bias = Some(Param::from_data(numbers(seed + 1, [WIDTH]), &device));
    match kind {
        Kind::Mix => Layer::Mix(Mix { linear: linear.into() }),
        Kind::Halves => Layer::Halves(Halves { linear: linear.into() }),
        Kind::Pick => Layer::Pick(Pick { scale: Param::from_data(numbers(seed, [WIDTH]), &device) }),
    }
}

const NODES: [&str; 12] = ["d0", "d1", "d2", "d3", "m0", "m1", "u3", "u2", "u1", "u0", "end", "out"];

/// Returns a U-Net: skip connections of every length, `d0` with five uses, ids that only the last node reads.
fn unet(splits: &[&str]) -> Graph<Kind> {
    let named: GraphBuilder<Kind> = Graph::builder()
        .input("image")
        .input("ids")
        .node("d0", Kind::Mix, ["image"])
        .node("d1", Kind::Mix, ["d0"])
        .node_with_outputs("d2", Kind::Halves, ["d1"], 2)
        .node("d3", Kind::Mix, ["d2"])
        .node("m0", Kind::Mix, ["d3", "d0"])
        .node("m1", Kind::Mix, ["m0"])
        .node("u3", Kind::Mix, ["m1", "d3"])
        .node("u2", Kind::Mix, ["u3", "d2:1", "d0"])
        .node("u1", Kind::Mix, ["u2", "d1", "d0"])
        .node("u0", Kind::Mix, ["u1", "d0", "image"])
        .node("end", Kind::Mix, ["u0", "u1", "m0"])
        .node("out", Kind::Pick, ["end", "ids"])
        .output("out")
        .output("d2:0");
    let named = splits.iter().fold(named, |named, split| named.split_before(split));
    named.build().expect("it is a graph")
}

/// Returns the U-Net in stages of nearly equal length.
pub(crate) fn in_stages(stages: u32) -> Graph<Kind> {
    let splits = (1..stages as usize).map(|stage| NODES[stage * NODES.len() / stages as usize]);
    unet(&splits.collect::<Vec<_>>())
}

pub(crate) fn loss((output, side): (Tensor<2>, Tensor<2>), target: Tensor<2>) -> Tensor<1> {
    (output - target).square().mean() + side.square().mean() * 0.1
}

pub(crate) fn ids() -> Tensor<1, Int> {
    Tensor::arange(0..(ROWS as i64 * i64::from(MICROBATCHES)), &Device::flex())
}

pub(crate) fn brought(step: u64) -> Batch {
    Batch::split((batch(step, MICROBATCHES), ids()), batch(100 + step, MICROBATCHES), MICROBATCHES)
        .expect("it divides")
}

pub(crate) fn stage(
    graph: &Graph<Kind>,
    placement: &Placement,
    stage: StageIndex,
) -> Result<Stage, GraphError> {
    let part = graph.place(placement)?.stage(stage, make);
    Ok(if stage == placement.last_stage() {
        Stage::of_graph_with_loss(part, loss)
    } else {
        Stage::of_graph(part)
    })
}

/// Returns the U-Net in the program's stages, with as many replicas as the world has room for.
pub(crate) fn launch(program: ValidatedProgram, world: World) -> Pipeline {
    launch_with(program, world, Recompute::None)
}

/// Like [`launch`], but with stages that compute their forward again.
pub(crate) fn launch_with(program: ValidatedProgram, world: World, recompute: Recompute) -> Pipeline {
    let placement = program.placement().clone();
    let graph = in_stages(placement.stages());
    let data_parallel = world.ranks() / program.ranks();
    let config = PipelineConfig { data_parallel, recompute, ..config() };
    Pipeline::launch(program, world, &config, move |index| stage(&graph, &placement, index))
        .expect("it starts")
}

/// The results of a run's steps, and the parameters of this process's ranks after them.
pub(crate) type Outcome = (Vec<Step>, Vec<(String, TensorData)>);

pub(crate) fn train(program: ValidatedProgram, world: World) -> Outcome {
    train_on(launch(program, world))
}

pub(crate) fn train_on(mut pipeline: Pipeline) -> Outcome {
    let step = |step| {
        let report = pipeline.step_batch(brought(step), 1e-2).expect("a step");
        (report.losses, report.gradient_norm)
    };
    let steps = (0..STEPS).map(step).collect();
    (steps, sorted(pipeline.parameters().expect("they are there")))
}

/// Parameters by path; copies of one in the order of their stages.
pub(crate) fn sorted(parameters: Vec<NamedParameter>) -> Vec<(String, TensorData)> {
    let mut parameters: Vec<_> =
        parameters.into_iter().map(|parameter| (parameter.path.to_string(), parameter.data)).collect();
    parameters.sort_by(|(a, _), (b, _)| a.cmp(b));
    parameters
}
