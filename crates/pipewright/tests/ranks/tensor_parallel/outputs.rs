//! Outputs of the last stage and gradients of inputs in pipelines of tensor ranks equal the results of one
//! rank. Outputs may be whole on every rank, or split over the ranks.

use burn::module::{Module, Param};
use burn::tensor::{DType, Device, Int, Tensor, TensorData, Tolerance};
use pipewright::batch::{Batch, merge};
use pipewright::nn::{Linear, TensorParallel, split_cross_entropy};
use pipewright::pipeline::{Pipeline, PipelineError, StepSummary};
use pipewright::stage::{Stage, StageContext, StageModule};
use pipewright::tensor::{EdgePlacement, Placement, Values, unpack};
use pipewright::transport::World;
use pipewright_schedule::StageIndex;

use super::model::{MICROBATCHES, Sizes, Split, config_of, sizes};
use crate::support::{LAYERS, WIDTH, batch, loss, numbers, program};

/// The number of logits, which three tensor ranks share as 2, 2 and 1.
const VOCABULARY: usize = 5;

/// Layers with a head. Every tensor rank has the whole first output, and parts of the others. One of these has
/// integers.
#[derive(Module, Debug)]
struct WithHead {
    body: Split,
    head: Linear,
    #[module(skip)]
    tensor: TensorParallel,
    /// The dimension along which the module says that these outputs are split.
    #[module(skip)]
    dimension: usize,
}

impl WithHead {
    fn new(body: Split, tensor: &TensorParallel, dimension: usize) -> Self {
        let shape = [WIDTH, VOCABULARY];
        let shard = tensor.shard(Placement::split(1, tensor.ranks()));
        let values = shard.cut(numbers(70, shape).try_to_vec().expect("floats"), &shape);
        let data = TensorData::new(values, shard.shape(&shape));
        let weight = Param::from_data(data, &Device::flex().autodiff());
        Self { body, head: Linear { weight, bias: None }, tensor: tensor.clone(), dimension }
    }
}

impl StageModule for WithHead {
    type Input = Tensor<2>;
    type Output = (Tensor<2>, Tensor<2>, Tensor<2, Int>);

    fn forward(&self, input: Tensor<2>, context: &StageContext) -> Self::Output {
        let hidden = self.body.forward(input, context);
        let logits = self.head.forward(self.tensor.enter(hidden.clone()));
        let signs = logits.clone().sign().int();
        (hidden, logits, signs)
    }

    fn parameter_path(&self, local: &str) -> String {
        local.strip_prefix("body.").map_or_else(|| local.to_owned(), |local| self.body.parameter_path(local))
    }

    fn placement(&self, local: &str) -> Placement {
        let head = Placement::split(1, self.tensor.ranks());
        local.strip_prefix("body.").map_or(head, |local| self.body.placement(local))
    }

    fn output_placement(&self, output: usize) -> EdgePlacement {
        if output > 0 { EdgePlacement::split(self.dimension) } else { EdgePlacement::WHOLE }
    }
}

fn launch(sizes: Sizes, dimension: usize) -> Pipeline {
    let program = program("1f1b", sizes.pipeline, MICROBATCHES / sizes.data);
    let stages = program.placement().stages();
    let world = World::local(sizes.pipeline * sizes.data * sizes.tensor);
    let make = move |stage: StageIndex, tensor: &TensorParallel| {
        let count = LAYERS / stages as usize;
        let body = Split::new(stage.index() * count, count, tensor, None);
        if stage.get() + 1 < stages {
            return Ok::<_, std::convert::Infallible>(Stage::new(body));
        }
        let ranks = tensor.clone();
        let loss = move |(hidden, logits, _): <WithHead as StageModule>::Output, target: Tensor<2>| {
            let ids = target.clone().narrow(1, 0, VOCABULARY).argmax(1).flatten(0, 1);
            loss(hidden, target) + split_cross_entropy(logits, ids, VOCABULARY, &ranks)
        };
        Ok(Stage::with_loss(WithHead::new(body, tensor, dimension), loss))
    };
    Pipeline::launch_split(program, world, &config_of(sizes), make).expect("it starts")
}

fn step(pipeline: &mut Pipeline, last: u32) -> Result<StepSummary, PipelineError> {
    let batch = Batch::split(batch(3, MICROBATCHES), batch(103, MICROBATCHES), MICROBATCHES);
    let batch = batch.expect("it splits").keep_outputs().keep_outputs_of([StageIndex::new(last)]);
    pipeline.step_batch(batch, 0.0)
}

/// Returns all outputs of all rows: from a step, from the last stage of the step, and from an evaluation.
fn outputs(sizes: Sizes) -> Vec<TensorData> {
    let mut pipeline = launch(sizes, 1);
    let last = sizes.pipeline - 1;
    let mut summary = step(&mut pipeline, last).expect("a step");
    let kept = summary.stage_outputs.remove(&StageIndex::new(last)).expect("they were asked for");
    let evaluated = pipeline.eval(batch(3, MICROBATCHES), Some(batch(103, MICROBATCHES)));
    let whole = |microbatches: Vec<Values>| {
        assert_eq!(microbatches.len(), MICROBATCHES as usize, "{sizes:?}");
        let merged = merge(microbatches).expect("they join");
        let (hidden, logits, signs): (Tensor<2>, Tensor<2>, Tensor<2, Int>) =
            unpack(merged).expect("three outputs");
        [hidden.into_data(), logits.into_data(), signs.into_data()]
    };
    [summary.outputs, kept, evaluated.expect("an evaluation").outputs].into_iter().flat_map(whole).collect()
}

#[test]
fn outputs_of_the_last_stage_are_those_of_one_rank() {
    let expected = outputs(sizes(2, 1, 1));
    for sizes in [sizes(2, 1, 2), sizes(1, 1, 3), sizes(2, 2, 2)] {
        for (found, expected) in outputs(sizes).iter().zip(&expected) {
            assert_eq!(found.shape(), expected.shape(), "{sizes:?}");
            if expected.dtype() != DType::F32 {
                assert_eq!(found, expected, "{sizes:?}");
                continue;
            }
            found.assert_approx_eq::<f32>(expected, Tolerance::rel_abs(1e-5, 1e-6));
        }
    }
}

#[test]
fn an_output_that_lacks_the_dimension_is_an_error() {
    let error = step(&mut launch(sizes(1, 1, 2), 2), 0).expect_err("it has two dimensions").to_string();
    let expected =
        "and its module says that tensor ranks split it along dimension 2 (`StageModule::output_placement`)";
    assert!(error.contains(expected), "{error}");
}

#[test]
fn gradients_of_inputs_are_those_of_one_rank() {
    let gradient = |sizes| {
        let batch = Batch::split(batch(5, MICROBATCHES), batch(105, MICROBATCHES), MICROBATCHES);
        let batch = batch.expect("it splits").keep_input_gradients();
        let summary = super::model::launch("1f1b", sizes).step_batch(batch, 0.0).expect("a step");
        summary.input_gradient::<2>(0).expect("one input").into_data()
    };
    let expected = gradient(sizes(2, 1, 1));
    for sizes in [sizes(2, 1, 2), sizes(1, 1, 3), sizes(2, 2, 2)] {
        gradient(sizes).assert_approx_eq::<f32>(&expected, Tolerance::rel_abs(1e-4, 1e-8));
    }
}
