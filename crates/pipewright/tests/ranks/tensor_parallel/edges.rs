//! Stages whose tensor ranks hold the tensors between them in any way: parts along the tokens or the features, partial
//! sums, or whole tensors, and their gradients in other ways. The results equal the results of one rank.

use burn::module::{Module, Param};
use burn::tensor::{Device, Tensor, TensorData, Tolerance};
use pipewright::batch::{Batch, merge};
use pipewright::nn::TensorParallel;
use pipewright::pipeline::{Pipeline, PipelineError};
use pipewright::stage::{Stage, StageContext, StageModule};
use pipewright::tensor::{EdgePlacement, Placement, Spread, unpack};
use pipewright::transport::World;
use pipewright_schedule::StageIndex;

use super::model::{assert_close, config_of, sizes};
use crate::support::{Step, numbers, program};

const MICROBATCHES: u32 = 4;
const TOKENS: usize = 4;
const FEATURES: usize = 8;

/// The work of a stage: it computes `tanh(x w)` with a factor for each feature, and its ranks share the work.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Work {
    /// Every rank computes everything.
    Whole,
    /// Each rank has its share of the tokens.
    Tokens,
    /// Each rank has its share of the features.
    Features,
    /// Each rank takes all tokens and computes its share of them.
    OwnTokens,
    /// The results of all ranks add up to the output.
    Summands,
    /// The inputs of all ranks add up to the input.
    OfSummands,
    /// The same, and each rank computes its share of the tokens.
    OwnOfSummands,
    /// The first rank computes everything, and the others add zeros, without parameters.
    First,
}

const ALL: [Work; 8] = [
    Work::Whole,
    Work::Tokens,
    Work::Features,
    Work::OwnTokens,
    Work::Summands,
    Work::OfSummands,
    Work::OwnOfSummands,
    Work::First,
];

impl Work {
    fn input(self) -> EdgePlacement {
        match self {
            Self::Whole => EdgePlacement::WHOLE,
            Self::Tokens => EdgePlacement::split(1),
            Self::Features => EdgePlacement::split(2),
            Self::OwnTokens | Self::Summands | Self::First => {
                EdgePlacement::WHOLE.with_gradient(Spread::Partial)
            }
            Self::OfSummands => EdgePlacement { tensor: Spread::Partial, gradient: Spread::Whole },
            Self::OwnOfSummands => EdgePlacement { tensor: Spread::Partial, gradient: Spread::Partial },
        }
    }

    fn output(self) -> EdgePlacement {
        match self {
            Self::Whole | Self::OfSummands => EdgePlacement::WHOLE,
            Self::Tokens | Self::OwnTokens | Self::OwnOfSummands => EdgePlacement::split(1),
            Self::Features => EdgePlacement::split(2),
            Self::Summands | Self::First => {
                EdgePlacement { tensor: Spread::Partial, gradient: Spread::Whole }
            }
        }
    }

    fn factors(self, ranks: u32) -> Placement {
        match self {
            Self::Whole | Self::OfSummands => Placement::REPLICATED,
            Self::Features => Placement::split(0, ranks),
            Self::Tokens | Self::OwnTokens | Self::Summands | Self::OwnOfSummands | Self::First => {
                Placement::REPLICATED_PARTIAL
            }
        }
    }
}

#[derive(Module, Debug)]
struct Placed {
    factors: Param<Tensor<1>>,
    #[module(skip)]
    work: Work,
    #[module(skip)]
    stage: usize,
    #[module(skip)]
    tensor: TensorParallel,
}

impl Placed {
    fn new(work: Work, stage: usize, tensor: &TensorParallel) -> Self {
        let shard = tensor.shard(work.factors(tensor.ranks()));
        let values = numbers(10 + stage as u64, [FEATURES]).try_to_vec().expect("floats");
        let data = TensorData::new(shard.cut(values, &[FEATURES]), shard.shape(&[FEATURES]));
        let factors = Param::from_data(data, &Device::flex().autodiff());
        Self { factors, work, stage, tensor: tensor.clone() }
    }
}

impl StageModule for Placed {
    type Input = Tensor<3>;
    type Output = Tensor<3>;

    fn forward(&self, x: Tensor<3>, _context: &StageContext) -> Tensor<3> {
        let [rows, tokens, features] = x.dims();
        let x = match self.work {
            Work::OfSummands | Work::OwnOfSummands => {
                self.tensor.sum(x.reshape([rows * tokens, features])).reshape([rows, tokens, features])
            }
            _ => x,
        };
        if self.work == Work::First && self.tensor.rank().index > 0 {
            return x * 0.0;
        }
        let y = (x * self.factors.val().unsqueeze() * 3.0).tanh();
        match self.work {
            Work::OwnTokens | Work::OwnOfSummands => {
                let own = self.tensor.range(tokens);
                y.narrow(1, own.start, own.len())
            }
            Work::Summands => {
                let ranks = f64::from(self.tensor.ranks());
                y * (f64::from(self.tensor.rank().index + 1) * 2.0 / (ranks * (ranks + 1.0)))
            }
            _ => y,
        }
    }

    fn parameter_path(&self, local: &str) -> String {
        format!("{}.{local}", self.stage)
    }

    fn placement(&self, _local: &str) -> Placement {
        self.work.factors(self.tensor.ranks())
    }

    fn input_placement(&self, _input: usize) -> EdgePlacement {
        self.work.input()
    }

    fn output_placement(&self, _output: usize) -> EdgePlacement {
        self.work.output()
    }
}

fn launch(schedule: &str, ranks: [u32; 2], works: &[Work]) -> Pipeline {
    let program = program(schedule, ranks[0], MICROBATCHES);
    assert_eq!(program.placement().stages() as usize, works.len());
    let config = config_of(sizes(ranks[0], 1, ranks[1]));
    let works = works.to_vec();
    let make = move |stage: StageIndex, tensor: &TensorParallel| {
        let module = Placed::new(works[stage.index()], stage.index(), tensor);
        let loss = |output: Tensor<3>, target: Tensor<3>| (output - target).square().mean();
        Ok::<_, std::convert::Infallible>(if stage.index() + 1 == works.len() {
            Stage::with_loss(module, loss)
        } else {
            Stage::new(module)
        })
    };
    Pipeline::launch_split(program, World::local(ranks[0] * ranks[1]), &config, make).expect("it starts")
}

fn batch(step: u64) -> Batch {
    let rows = |seed| {
        let shape = [2 * MICROBATCHES as usize, TOKENS, FEATURES];
        Tensor::<3>::from_data(numbers(seed, shape), &Device::flex())
    };
    Batch::split(rows(step), rows(100 + step), MICROBATCHES).expect("it splits")
}

/// Losses and gradient norms of two steps, and the outputs of each stage and the gradient of the input in the second.
type Results = (Vec<Step>, Vec<TensorData>);

fn results(schedule: &str, ranks: [u32; 2], works: &[Work]) -> Result<Results, PipelineError> {
    let mut pipeline = launch(schedule, ranks, works);
    let first = pipeline.step_batch(batch(0), 1e-2)?;
    let stages = || (0..works.len() as u32).map(StageIndex::new);
    let mut second = pipeline.step_batch(batch(1).keep_outputs_of(stages()).keep_input_gradients(), 1e-2)?;
    let steps = [&first, &second].map(|step| (step.losses.clone(), step.gradient_norm));
    let outputs = stages().map(|stage| {
        let outputs = second.stage_outputs.remove(&stage).expect("they were asked for");
        let output: Tensor<3> = unpack(merge(outputs).expect("they join")).expect("an output");
        output.into_data()
    });
    let mut tensors: Vec<TensorData> = outputs.collect();
    tensors.push(second.input_gradient::<3>(0).expect("one input").into_data());
    Ok((steps.to_vec(), tensors))
}

/// Checks that a pipeline has the results of one rank for each stage.
fn check(schedule: &str, ranks: [u32; 2], works: &[Work]) {
    let what = format!("{schedule}, {works:?} on {ranks:?}");
    let whole = vec![Work::Whole; works.len()];
    let (expected, expected_tensors) = results(schedule, [ranks[0], 1], &whole).expect("a step");
    let (found, tensors) = results(schedule, ranks, works).unwrap_or_else(|error| panic!("{what}: {error}"));
    assert_close(&found, &expected, &what);
    for (found, expected) in tensors.iter().zip(&expected_tensors) {
        assert_eq!(found.shape(), expected.shape(), "{what}");
        found.assert_approx_eq::<f32>(expected, Tolerance::rel_abs(2e-5, 1e-6));
    }
}

#[test]
fn any_two_placements_meet_between_ranks() {
    for first in ALL {
        for second in ALL {
            check("1f1b", [3, 2], &[first, second, Work::Whole]);
        }
    }
}

#[test]
fn any_two_placements_meet_on_one_rank() {
    for second in ALL {
        for third in ALL {
            check("zbvzerobubble", [2, 2], &[Work::Tokens, second, third, Work::Whole]);
        }
    }
}

#[test]
fn four_ranks_exchange_parts() {
    check("1f1b", [3, 4], &[Work::Tokens, Work::Features, Work::Whole]);
    check("zb-h1", [3, 4], &[Work::Summands, Work::OwnTokens, Work::OfSummands]);
}

#[test]
fn a_message_has_a_part_whatever_the_placements() {
    let bytes = |ranks, works: &[Work]| {
        launch("1f1b", ranks, works).step_batch(batch(0), 0.0).expect("a step").boundary_bytes
    };
    let whole = bytes([3, 1], &[Work::Whole; 3]);
    let expected: Vec<u64> = whole.iter().flat_map(|bytes| [bytes / 2; 2]).collect();
    for work in ALL {
        assert_eq!(bytes([3, 2], &[work, Work::Whole, Work::Whole]), expected, "{work:?}");
        assert_eq!(bytes([3, 2], &[Work::Whole, work, Work::Whole]), expected, "{work:?}");
    }
}

#[test]
fn parts_that_ranks_cannot_share_are_refused() {
    let refused = |works: &[Work], expected: &str| {
        let error = results("1f1b", [2, 3], works).expect_err("three ranks").to_string();
        assert!(error.contains(expected), "{error}");
    };
    let placements = "(`StageModule::input_placement`, `StageModule::output_placement`)";
    refused(
        &[Work::Whole, Work::Tokens],
        &format!(
            "input 0 of stage 1 has the shape [2, 4, 8], and 3 tensor ranks cannot have equal parts of 4 along dimension 1 \
             {placements}"
        ),
    );
}
