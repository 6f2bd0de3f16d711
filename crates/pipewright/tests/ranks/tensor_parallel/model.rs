//! A model whose layers are split over tensor ranks, of sizes that the ranks share unevenly.

use std::sync::Arc;

use burn::module::{Module, Param};
use burn::tensor::{Device, Tensor, activation};
use pipewright::nn::{Linear, RmsNorm, SplitBackward, TensorParallel};
use pipewright::pipeline::{Pipeline, PipelineConfig, PipelineError, StepSummary};
use pipewright::stage::{Stage, StageContext, StageModule};
use pipewright::tensor::Placement;
use pipewright::transport::World;
use pipewright_schedule::StageIndex;

use super::expert_overlaps::generated;
use crate::support::{self, LAYERS, Step, WIDTH, batch, config, loss, numbers, path_in_model, program};

/// The inner width of a layer, which three tensor ranks share as 3, 3 and 1.
const INNER: usize = 7;

pub(super) const MICROBATCHES: u32 = 8;

/// `x + down(tanh(up(norm(x))))`.
#[derive(Module, Debug)]
pub(super) struct Layer {
    norm: RmsNorm,
    pub(super) up: Linear,
    down: Linear,
}

/// A moment at which a stage calls its fault: before the forward of a microbatch, or within its backward,
/// between two exchanges.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Moment {
    pub(super) stage: u32,
    pub(super) microbatch: u32,
    /// The tensor rank.
    pub(super) rank: u32,
    pub(super) is_backward: bool,
}

/// A function that each stage calls at each moment. In a backward, what it returns is added to each element
/// of the gradient of the stage's first `up.bias`, which is split.
pub(super) type Fault = Arc<dyn Fn(Moment) -> f32 + Send + Sync>;

#[derive(Module, Debug)]
pub(super) struct Split {
    pub(super) layers: Vec<Layer>,
    #[module(skip)]
    first: usize,
    #[module(skip)]
    tensor: TensorParallel,
    /// The number of shards of the parameters that are split.
    #[module(skip)]
    shards: u32,
    #[module(skip)]
    fault: Faulty,
}

#[derive(Clone, Default)]
struct Faulty(Option<Fault>);

impl std::fmt::Debug for Faulty {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Faulty")
    }
}

/// Calls a function in the backward. Its result is added to the gradient of each element of the bias.
pub(super) struct Trap(pub(super) Box<dyn Fn() -> f32 + Send + Sync>);

impl SplitBackward<2, 2> for Trap {
    type Weights = Tensor<1>;
    type Saved = ();
    type Waiting = Tensor<1>;

    fn forward(&self, input: Tensor<2>, _bias: Tensor<1>) -> (Tensor<2>, ()) {
        (input, ())
    }

    fn backward_input(
        &self,
        (): &(),
        bias: Tensor<1>,
        gradient: Tensor<2>,
        wanted: bool,
    ) -> (Option<Tensor<2>>, Tensor<1>) {
        (wanted.then_some(gradient), bias.zeros_like().add_scalar((self.0)()))
    }

    fn backward_weights(&self, added: Tensor<1>) -> Tensor<1> {
        added
    }
}

impl Split {
    pub(super) fn new(first: usize, count: usize, tensor: &TensorParallel, fault: Option<Fault>) -> Self {
        let layers = (first..first + count).map(|layer| Layer::new(layer as u64, tensor)).collect();
        Self { layers, first, tensor: tensor.clone(), shards: tensor.ranks(), fault: Faulty(fault) }
    }

    /// Returns the module, which says that the parameters are cut into this many shards.
    pub(super) fn held_in_shards(self, shards: u32) -> Self {
        Self { shards, ..self }
    }
}

impl Layer {
    fn new(layer: u64, tensor: &TensorParallel) -> Self {
        let device = Device::flex().autodiff();
        let shard = |placement| tensor.shard(placement);
        let matrix = |seed, shape: [usize; 2], placement| {
            let shard = shard(placement);
            let values = numbers(seed, shape).try_to_vec().expect("floats");
            let data = burn::tensor::TensorData::new(shard.cut(values, &shape), shard.shape(&shape));
            Param::from_data(data, &device)
        };
        let vector = |seed, width: usize, placement| {
            let shard = shard(placement);
            let values = numbers(seed, [width]).try_to_vec().expect("floats");
            let data = burn::tensor::TensorData::new(shard.cut(values, &[width]), shard.shape(&[width]));
            Param::from_data(data, &device)
        };
        let split = |dimension| Placement::split(dimension, tensor.ranks());
        Self {
            norm: RmsNorm { weight: vector(2000 + layer, WIDTH, Placement::REPLICATED), epsilon: 1e-5 },
            up: Linear {
                weight: matrix(layer, [WIDTH, INNER], split(1)),
                bias: Some(vector(1000 + layer, INNER, split(0))),
            },
            down: Linear {
                weight: matrix(3000 + layer, [INNER, WIDTH], split(0)),
                bias: Some(vector(4000 + layer, WIDTH, Placement::REPLICATED)),
            },
        }
    }
}

impl StageModule for Split {
    type Input = Tensor<2>;
    type Output = Tensor<2>;

    fn forward(&self, input: Tensor<2>, context: &StageContext) -> Tensor<2> {
        let (stage, microbatch) = (context.stage().get(), context.microbatch().get());
        let moment = Moment { stage, microbatch, rank: self.tensor.rank().index, is_backward: false };
        if let Some(fault) = &self.fault.0 {
            fault(moment);
        }
        self.layers.iter().enumerate().fold(input, |x, (place, layer)| {
            let inner = layer.up.forward(self.tensor.enter(layer.norm.forward(x.clone())));
            let output = x + layer.down.forward_split_inputs(activation::tanh(inner), &self.tensor);
            match (&self.fault.0, &layer.up.bias) {
                (Some(fault), Some(bias)) if place == 0 => {
                    let moment = Moment { is_backward: true, ..moment };
                    let fault = fault.clone();
                    Trap(Box::new(move || fault(moment))).apply(output, bias)
                }
                _ => output,
            }
        })
    }

    fn parameter_path(&self, local: &str) -> String {
        path_in_model(local, self.first)
    }

    fn placement(&self, local: &str) -> Placement {
        match local.splitn(3, '.').nth(2) {
            Some("up.weight") => Placement::split(1, self.shards),
            Some("up.bias" | "down.weight") => Placement::split(0, self.shards),
            _ => Placement::REPLICATED,
        }
    }
}

/// The sizes of a mesh.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sizes {
    pub(super) pipeline: u32,
    pub(super) data: u32,
    pub(super) tensor: u32,
}

impl Sizes {
    pub(super) fn ranks(self) -> u32 {
        self.pipeline * self.data * self.tensor
    }
}

pub(super) fn sizes(pipeline: u32, data: u32, tensor: u32) -> Sizes {
    Sizes { pipeline, data, tensor }
}

pub(super) fn config_of(Sizes { data, tensor, .. }: Sizes) -> PipelineConfig {
    PipelineConfig { data_parallel: data, tensor_parallel: tensor, ..config() }
}

pub(super) fn try_launch(
    schedule: &str,
    sizes: Sizes,
    config: &PipelineConfig,
    fault: Option<Fault>,
) -> Result<Pipeline, PipelineError> {
    try_launch_in(World::local(sizes.ranks()), schedule, sizes, config, fault)
}

pub(super) fn try_launch_in(
    world: World,
    schedule: &str,
    sizes: Sizes,
    config: &PipelineConfig,
    fault: Option<Fault>,
) -> Result<Pipeline, PipelineError> {
    let program = if config.delayed {
        generated(schedule, sizes, config)
    } else {
        program(schedule, sizes.pipeline, MICROBATCHES / sizes.data)
    };
    let stages = program.placement().stages();
    Pipeline::launch_split(program, world, config, move |stage: StageIndex, tensor: &TensorParallel| {
        let count = LAYERS / stages as usize;
        let module = Split::new(stage.index() * count, count, tensor, fault.clone());
        Ok::<_, std::convert::Infallible>(if stage.get() + 1 == stages {
            Stage::with_loss(module, loss)
        } else {
            Stage::new(module)
        })
    })
}

pub(super) fn launch(schedule: &str, sizes: Sizes) -> Pipeline {
    try_launch(schedule, sizes, &config_of(sizes), None).expect("the pipeline starts")
}

pub(super) fn take_step(pipeline: &mut Pipeline, step: u64) -> Result<StepSummary, PipelineError> {
    pipeline.step(batch(step, MICROBATCHES), batch(100 + step, MICROBATCHES), 1e-2)
}

pub(super) fn take_steps(pipeline: &mut Pipeline, steps: std::ops::Range<u64>) -> Vec<Step> {
    support::take_steps(pipeline, steps, MICROBATCHES)
}

pub(super) fn assert_close(found: &[Step], expected: &[Step], what: &str) {
    assert_eq!(found.len(), expected.len());
    let close = |found: f64, expected: f64| (found - expected).abs() <= 2e-5 * expected.abs();
    for ((losses, norm), (expected, expected_norm)) in found.iter().zip(expected) {
        assert_eq!(losses.len(), expected.len(), "{what}");
        let are_close = losses.iter().zip(expected).all(|(found, expected)| close(*found, *expected));
        assert!(are_close, "{what}: {losses:?} {expected:?}");
        assert!(close(*norm, *expected_norm), "{what}: {norm} {expected_norm}");
    }
}
