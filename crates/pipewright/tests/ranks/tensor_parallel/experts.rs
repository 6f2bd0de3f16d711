//! Mixtures whose experts are whole on one rank of a tensor group: the results of one rank, checkpoints, and
//! modules that name another placement.

use std::time::Duration;

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{Device, Tensor};
use pipewright::mesh::DataParallelMode;
use pipewright::nn::{Expert, Linear, Routing, TensorParallel, mix_held};
use pipewright::pipeline::{Pipeline, PipelineConfig, PipelineError};
use pipewright::stage::{Stage, StageContext, StageModule};
use pipewright::tensor::Placement;
use pipewright::transport::World;
use pipewright_schedule::{Recompute, StageIndex};

use super::checkpoints::{save, stored};
use super::model::{MICROBATCHES, Sizes, assert_close, config_of, sizes, take_steps};
use crate::support::{LAYERS, WIDTH, loss, numbers, path_in_model, program};

/// The experts of a layer, which three tensor ranks share as 2, 2 and 1.
const EXPERTS: usize = 5;
pub(super) const INNER: usize = 4;

/// `x + mixture(x)`.
#[derive(Module, Debug)]
pub(super) struct Layer {
    router: Linear,
    experts: Vec<Option<Expert>>,
}

/// Multiplies parameters.
struct Times(f64);

impl ModuleMapper for Times {
    fn map_float<const D: usize>(&mut self, parameter: Param<Tensor<D>>) -> Param<Tensor<D>> {
        parameter.map(|tensor| {
            let device = tensor.device();
            Tensor::from_data(tensor.mul_scalar(self.0).into_data(), &device).require_grad()
        })
    }
}

#[derive(Module, Debug)]
pub(super) struct Mixtures {
    pub(super) layers: Vec<Layer>,
    #[module(skip)]
    pub(super) first: usize,
    #[module(skip)]
    pub(super) tensor: TensorParallel,
    /// How the ranks hold the experts, as the module says.
    #[module(skip)]
    pub(super) placement: Placement,
}

impl Layer {
    /// Makes a layer of `count` experts that has the experts of a range. The parameters of an expert depend on
    /// its place alone.
    pub(super) fn new(layer: usize, count: usize, experts: std::ops::Range<usize>) -> Self {
        let device = Device::flex().autodiff();
        let linear = |seed: usize, shape: [usize; 2]| Linear {
            weight: Param::from_data(numbers((100 * layer + seed) as u64, shape), &device),
            bias: None,
        };
        let expert = |index: usize| Expert {
            adapter: None,
            gate_proj: Some(linear(3 * index, [WIDTH, INNER]).into()),
            up_proj: linear(3 * index + 1, [WIDTH, INNER]).into(),
            down_proj: linear(3 * index + 2, [INNER, WIDTH]).into(),
            form: pipewright::nn::ExpertForm::default(),
        };
        let experts = (0..count).map(|index| experts.contains(&index).then(|| expert(index)));
        Self { router: linear(99, [WIDTH, count]), experts: experts.collect() }
    }

    /// Returns the layer with all parameters of its experts times a factor, as new leaves of the tape.
    pub(super) fn with_experts_times(mut self, factor: f64) -> Self {
        self.experts = self.experts.into_iter().map(|expert| Some(expert?.map(&mut Times(factor)))).collect();
        self
    }

    /// Returns the layer with one of its experts frozen, if it has this expert.
    pub(super) fn with_frozen(mut self, expert: usize) -> Self {
        self.experts[expert] = self.experts[expert].take().map(Module::no_grad);
        self
    }
}

impl StageModule for Mixtures {
    type Input = Tensor<2>;
    type Output = Tensor<2>;

    fn forward(&self, input: Tensor<2>, _context: &StageContext) -> Tensor<2> {
        self.layers.iter().fold(input, |x, layer| {
            let routing = Routing::new(layer.router.forward(x.clone()), 2, true);
            let weights = self.tensor.enter(routing.weights());
            let mixed = mix_held(
                self.tensor.enter(x.clone()),
                weights,
                routing.chosen(),
                &layer.experts,
                self.tensor.expert_parallel(),
            );
            x + self.tensor.sum(mixed)
        })
    }

    fn parameter_path(&self, local: &str) -> String {
        path_in_model(local, self.first)
    }

    fn placement(&self, local: &str) -> Placement {
        if local.contains(".experts.") { self.placement } else { Placement::REPLICATED }
    }
}

/// Launches a pipeline with whole experts, each on the ranks that `held` says.
fn launch_with(
    schedule: &str,
    sizes: Sizes,
    config: &PipelineConfig,
    held: impl Fn(&TensorParallel) -> (std::ops::Range<usize>, Placement) + Send + Sync + 'static,
) -> Result<Pipeline, PipelineError> {
    let program = program(schedule, sizes.pipeline, MICROBATCHES / sizes.data);
    let stages = program.placement().stages();
    let world = World::local(sizes.pipeline * sizes.data * sizes.tensor);
    let config = PipelineConfig { whole_experts: true, ..config.clone() };
    Pipeline::launch_split(program, world, &config, move |stage: StageIndex, tensor: &TensorParallel| {
        let count = LAYERS / stages as usize;
        let first = stage.index() * count;
        let (experts, placement) = held(tensor);
        let layers =
            (first..first + count).map(|layer| Layer::new(layer, EXPERTS, experts.clone())).collect();
        let module = Mixtures { layers, first, tensor: tensor.clone(), placement };
        Ok::<_, std::convert::Infallible>(if stage.get() + 1 == stages {
            Stage::with_loss(module, loss)
        } else {
            Stage::new(module)
        })
    })
}

fn launch_in(schedule: &str, sizes: Sizes, mode: DataParallelMode) -> Pipeline {
    launch_as(schedule, sizes, &PipelineConfig { data_parallel_mode: mode, ..config_of(sizes) })
}

fn launch_as(schedule: &str, sizes: Sizes, config: &PipelineConfig) -> Pipeline {
    let own = |tensor: &TensorParallel| {
        assert_eq!(tensor.holds_whole_experts(), tensor.ranks() > 1);
        (tensor.experts(EXPERTS), Placement::ON_ONE_RANK)
    };
    launch_with(schedule, sizes, config, own).expect("it starts")
}

fn launch(schedule: &str, sizes: Sizes) -> Pipeline {
    launch_in(schedule, sizes, DataParallelMode::Replicated)
}

#[test]
fn every_mesh_has_the_results_of_one_rank() {
    let expected = take_steps(&mut launch("1f1b", sizes(1, 1, 1)), 0..4);
    for sizes in [sizes(1, 1, 2), sizes(1, 1, 3), sizes(2, 1, 4), sizes(2, 2, 2)] {
        for schedule in ["1f1b", "zb-h1"] {
            let found = take_steps(&mut launch(schedule, sizes), 0..4);
            assert_close(&found, &expected, &format!("{schedule}, {sizes:?}"));
            let again = take_steps(&mut launch(schedule, sizes), 0..4);
            assert_eq!(found, again, "{schedule}, {sizes:?} has the same bits again");
        }
    }
}

#[test]
fn replicas_may_hold_rows_of_the_experts() {
    let sizes = sizes(2, 2, 2);
    let mut sharded = launch_in("zb-h1", sizes, DataParallelMode::Sharded);
    let replicated = take_steps(&mut launch("zb-h1", sizes), 0..3);
    assert_eq!(take_steps(&mut sharded, 0..3), replicated, "the same bits");
}

/// The trained expert is on the last rank of the group. All layers between it and the last one are frozen,
/// and the ranks exchange their gradients all the same.
#[test]
fn one_expert_may_be_trained_while_all_others_are_frozen() {
    let steps = |sizes, config: &PipelineConfig| {
        let config = PipelineConfig { deadline: Duration::from_secs(20), ..config.clone() };
        let mut pipeline = launch_as("1f1b", sizes, &config);
        let is_trained =
            |path: &str| path.starts_with("layers.1.experts.4.") || path.starts_with("layers.7.");
        pipeline.freeze(move |path| !is_trained(path)).expect("they are frozen");
        let mut steps = take_steps(&mut pipeline, 0..2);
        pipeline.unfreeze(|path| path.starts_with("layers.1.experts.0.")).expect("they are trained again");
        steps.extend(take_steps(&mut pipeline, 2..3));
        steps
    };
    let expected = steps(sizes(1, 1, 1), &config_of(sizes(1, 1, 1)));
    let whole = DataParallelMode::Replicated;
    for (sizes, data_parallel_mode, recompute) in [
        (sizes(1, 1, 3), whole, Recompute::None),
        (sizes(2, 1, 2), whole, Recompute::Stage),
        (sizes(1, 2, 2), DataParallelMode::Sharded, Recompute::None),
    ] {
        let config = PipelineConfig { recompute, data_parallel_mode, ..config_of(sizes) };
        assert_close(&steps(sizes, &config), &expected, &format!("{sizes:?}"));
    }
}

#[test]
fn a_run_resumes_with_its_experts_on_other_ranks() {
    let expected = take_steps(&mut launch("1f1b", sizes(1, 1, 1)), 0..6);
    for before in [sizes(1, 1, 4), sizes(2, 1, 2), sizes(1, 1, 1)] {
        let scratch = tempfile::tempdir().expect("a scratch folder");
        let mut first = launch("1f1b", before);
        take_steps(&mut first, 0..3);
        let checkpoint = save(&mut first, before.pipeline * before.tensor, scratch.path());
        let parameters = stored(&checkpoint);
        assert_eq!(parameters.len(), LAYERS * (1 + 3 * EXPERTS), "each parameter is stored once");
        for after in [sizes(2, 1, 2), sizes(1, 1, 3), sizes(4, 1, 1)] {
            let what = format!("{before:?} to {after:?}");
            let mut resumed = launch("1f1b", after);
            resumed.restore(&checkpoint).expect("it is restored");
            let scratch = tempfile::tempdir().expect("a scratch folder");
            let again = save(&mut resumed, after.pipeline * after.tensor, scratch.path());
            assert_eq!(stored(&again), parameters, "{what}: nothing is lost or reordered");
            assert_close(&take_steps(&mut resumed, 3..6), &expected[3..], &what);
        }
    }
}

#[test]
fn a_module_that_names_another_placement_is_refused() {
    let refused = |held: fn(&TensorParallel) -> (std::ops::Range<usize>, Placement), expected: &str| {
        let sizes = sizes(2, 1, 2);
        let outcome = launch_with("1f1b", sizes, &config_of(sizes), held);
        let error = outcome.err().expect("the ranks hold other experts").to_string();
        assert!(error.contains(expected), "{error}");
    };
    refused(
        |tensor| (tensor.experts(EXPERTS), Placement::REPLICATED),
        "`layers.0.experts.0.down_proj.weight` is on 1 tensor rank of stage 0, and should be on 2",
    );
    refused(
        |_| (0..EXPERTS, Placement::ON_ONE_RANK),
        "`layers.0.experts.0.down_proj.weight` is on 2 tensor ranks of stage 0, and should be on 1",
    );
}
