//! The forms of a batch: splits that do not divide, side inputs along any dimension or already split, losses
//! that are sums or means over tokens, and the outputs of any stage. Results are compared with plain Burn on
//! the whole batch.

mod accumulated;
mod input_gradients;
mod merged_outputs;
mod side_gradients;

use std::collections::BTreeMap;

use burn::module::Module;
use burn::optim::SgdConfig;
use burn::tensor::{Device, Int, Tensor, TensorData};
use pipewright::batch::{Batch, Merge, SplitError, SplitRule, SplitSpec, merge_by};
use pipewright::mesh::DataParallelMode;
use pipewright::nn::{weighted_cross_entropy, weights_of_valid};
use pipewright::pipeline::{Pipeline, PipelineConfig};
use pipewright::stage::{Stage, StageContext, StageModule};
use pipewright::tensor::{Metadata, Values, unpack};
use pipewright::transport::World;
use pipewright_schedule::{StageIndex, ValidatedProgram};

use crate::support::{
    LAYERS, Mlp, Parameters, WIDTH, assert_close, config, ending_in_loss, floats, loss, numbers, parameters,
    program,
};

const MICROBATCHES: u32 = 4;
const RATE: f64 = 0.1;
const CUTS: [(&str, u32); 4] = [("gpipe", 1), ("1f1b", 4), ("zbvzerobubble", 2), ("loopedbfs", 2)];
const IGNORED: i64 = -100;

fn data(seed: u64, rows: usize) -> Tensor<2> {
    Tensor::from_data(numbers(seed, [rows, WIDTH]), &Device::flex())
}

fn sgd() -> PipelineConfig {
    // The last microbatches may be shorter.
    let metadata = Metadata::Dynamic { free: vec![0] };
    PipelineConfig { optimizer: Some(SgdConfig::new().init()), clip_norm: None, metadata, ..config() }
}

/// Returns the parameters after one step of gradient descent on one tape, and the loss.
fn descended(loss: impl FnOnce(&Mlp) -> Tensor<1>) -> (Parameters, f64) {
    let module = Mlp::new(0, LAYERS);
    let loss = loss(&module);
    let value = f64::from(loss.clone().into_scalar::<f32>());
    let descend = |(value, gradient): (&f32, &f32)| value - gradient * RATE as f32;
    let descended = floats(&module, Some(&loss.backward()))
        .into_iter()
        .map(|(path, float)| (path, float.values.iter().zip(&float.gradient).map(descend).collect()));
    (descended.collect(), value)
}

fn context() -> StageContext {
    StageContext::new(StageIndex::new(0), 0.into())
}

/// The layers, to which a side input with one row for each of the batch is added, in any of three forms.
#[derive(Module, Debug)]
struct WithSides {
    layers: Mlp,
}

impl StageModule for WithSides {
    type Input = Tensor<2>;
    type Output = Tensor<2>;

    fn forward(&self, input: Tensor<2>, context: &StageContext) -> Tensor<2> {
        let (columns, table): (Tensor<2>, Tensor<1>) = context.side("columns").expect("the step brings it");
        let parts: Tensor<2> = context.side("parts").expect("the step brings it");
        self.layers.forward(input + columns.transpose() + table.unsqueeze() + parts, context)
    }

    fn parameter_path(&self, local: &str) -> String {
        self.layers.parameter_path(local.strip_prefix("layers.").unwrap_or(local))
    }
}

fn launch_with_sides(program: ValidatedProgram) -> Pipeline {
    launch_with_sides_as(program, &sgd())
}

fn launch_with_sides_as(program: ValidatedProgram, config: &PipelineConfig) -> Pipeline {
    let (stages, world) =
        (program.placement().stages(), World::local(program.ranks() * config.data_parallel));
    let make = move |stage: StageIndex| -> Result<Stage, std::convert::Infallible> {
        let module = WithSides { layers: Mlp::of_stage(stage, stages) };
        ending_in_loss(stage.get() + 1 == stages, module)
    };
    Pipeline::launch(program, world, config, make).expect("it starts")
}

fn table() -> Tensor<1> {
    Tensor::from_data(numbers(9, [WIDTH]), &Device::flex())
}

#[test]
fn rows_that_do_not_divide_are_split_as_in_pytorch() {
    for rows in [5usize, 9] {
        let sizes = match rows {
            5 => [2usize, 1, 1, 1],
            _ => [3, 2, 2, 2],
        };
        for (schedule, ranks) in CUTS {
            let mut pipeline = launch_with_sides(program(schedule, ranks, MICROBATCHES));
            let stages = pipeline.program().placement().stages();
            let mut start = 0;
            let parts = sizes.map(|size| {
                start += size;
                data(3, rows).narrow(0, start - size, size)
            });
            let specs = (SplitSpec::Along(1), SplitSpec::Replicate);
            let batch = Batch::split(data(0, rows), data(1, rows), SplitRule::balanced(MICROBATCHES))
                .expect("it splits");
            let batch = batch.with_split_by("columns", (data(2, rows).transpose(), table()), specs);
            let batch = batch.and_then(|batch| batch.with_parts("parts", parts)).expect("they fit");
            let summary = pipeline.step_batch(batch.keep_outputs(), RATE).expect("a step");
            let found: Vec<usize> = summary.outputs.iter().map(|part| part[0].shape()[0]).collect();
            assert_eq!(found, sizes, "{schedule}");
            let mean = rows as f64 / f64::from(MICROBATCHES);
            assert_eq!(
                summary.loss_weights,
                sizes.map(|size| size as f64 / mean),
                "each row counts the same"
            );

            let (expected, value) = descended(|module| {
                let side = (data(2, rows) + table().unsqueeze() + data(3, rows)).autodiff();
                let forward = |hidden: Tensor<2>, stage| {
                    module.part(stage, stages).forward(hidden + side.clone(), &context())
                };
                loss((0..stages).fold(data(0, rows).autodiff(), forward), data(1, rows).autodiff())
            });
            assert!((summary.loss() - value).abs() < 2e-6 * value, "{schedule}: {} {value}", summary.loss());
            assert_close(&parameters(&mut pipeline), &expected, 2e-6, schedule);
        }
    }
}

#[test]
fn inputs_may_be_split_along_another_dimension_and_unevenly() {
    let specs = (SplitSpec::Along(1), SplitSpec::Replicate);
    let inputs = (data(0, 9).transpose(), table());
    let batch =
        Batch::split(inputs, data(1, 9), SplitRule::balanced(MICROBATCHES).inputs(specs)).expect("it splits");
    let batch = batch.with_split("rows", data(2, 9)).expect("nine rows, as the inputs have columns");
    let refused = batch.with_split("rows", data(2, 8)).expect_err("eight rows");
    let expected = "has 8 rows in dimension 0, and the inputs have 9";
    assert!(refused.to_string().contains(expected), "{refused}");
}

#[test]
fn a_batch_without_targets_is_evaluated_and_trains_a_loss_that_takes_none() {
    let rows = SplitSpec::Along(0);
    let batches = || {
        let inputs = || data(0, 9);
        [
            Batch::split(inputs(), (), SplitRule::uneven(MICROBATCHES - 1).inputs(rows).targets(()))
                .expect("it splits"),
            Batch::split(inputs(), (), SplitRule::balanced(MICROBATCHES - 1)).expect("it splits"),
            Batch::split(inputs(), (), SplitRule::balanced(MICROBATCHES - 1).inputs(rows).targets(()))
                .expect("it splits"),
        ]
    };
    let program = || program("gpipe", 2, MICROBATCHES - 1);
    let launch = |last: fn(Mlp) -> Stage| {
        let make = move |index: StageIndex| -> Result<Stage, std::convert::Infallible> {
            let module = Mlp::of_stage(index, 2);
            Ok(if index.get() == 1 { last(module) } else { Stage::new(module) })
        };
        Pipeline::launch(program(), World::local(2), &sgd(), make).expect("it starts")
    };
    let mut takes_targets = launch(|module| Stage::with_loss(module, loss));
    let mut takes_none =
        launch(|module| Stage::with_loss(module, |output: Tensor<2>, (): ()| output.square().mean()));
    for batch in batches() {
        let found = takes_targets.eval_batch(batch.clone()).expect("an evaluation without losses");
        assert_eq!((found.losses.len(), found.outputs.len()), (0, MICROBATCHES as usize - 1));
        let error = takes_targets.step_batch(batch.clone(), RATE).map(drop).expect_err("it needs targets");
        assert!(error.to_string().contains("the loss cannot take its targets"), "{error}");
        let losses = takes_none.eval_batch(batch.clone()).expect("an evaluation").losses;
        assert_eq!(losses.len(), MICROBATCHES as usize - 1);
        assert_eq!(takes_none.step_batch(batch, RATE).expect("a step").losses, losses);
    }
}

#[test]
fn side_inputs_that_do_not_fit_are_named() {
    let batch =
        || Batch::split(data(0, 9), data(1, 9), SplitRule::balanced(MICROBATCHES)).expect("it splits");
    let check = |outcome: Result<Batch, SplitError>, words: &str| {
        let error = outcome.expect_err(words).to_string();
        assert!(error.starts_with(words), "{error}");
    };
    check(
        batch().with_split("mask", data(2, 10)),
        "side input `mask`: tensor 0 of shape [10, 6] has 10 rows in dimension 0, and the inputs have 9: give",
    );
    let pair = || (data(2, 9), data(2, 9).transpose());
    let (rows, columns) = (SplitSpec::Along(0), SplitSpec::Along(1));
    assert!(batch().with_split_by("mask", pair(), (rows, columns)).is_ok());
    check(
        batch().with_split_by("mask", pair(), (rows, rows)),
        "side input `mask`: tensor 1 of shape [6, 9] has 6 rows in dimension 0, and the inputs have 9",
    );
    check(batch().with_split_by("mask", pair(), rows), "1 spec for 2 tensors");
    check(
        batch().with_split_by("mask", data(2, 9), SplitSpec::Along(2)),
        "tensor 0 of shape [9, 6] has no dimension 2",
    );
    check(
        batch().with_parts("mask", [data(2, 3), data(2, 2)]),
        "side input `mask` has 2 parts, and the batch has 4 microbatches: give one for each",
    );
    check(Batch::split(data(0, 3), data(1, 3), SplitRule::balanced(4)), "3 rows make runs of 1");
}

/// Ids of rows; some are ignored. Microbatches of three rows have 3, 1, 0 and 2 valid ones.
fn targets(seed: u64) -> Tensor<1, Int> {
    let valid = [true, true, true, false, true, false, false, false, false, true, false, true];
    let id = |(row, valid): (usize, bool)| {
        if valid { ((row as u64 + seed) % WIDTH as u64) as i64 } else { IGNORED }
    };
    let ids: Vec<i64> = valid.into_iter().enumerate().map(id).collect();
    Tensor::from_data(TensorData::new(ids, [12]), &Device::flex())
}

/// The mean cross entropy of the valid rows.
fn mean_of_valid(logits: Tensor<2>, targets: Tensor<1, Int>) -> Tensor<1> {
    weighted_cross_entropy(logits, targets.clone(), weights_of_valid(targets, IGNORED))
}

type TokenLoss = fn(Tensor<2>, Tensor<1, Int>, &StageContext) -> Tensor<1>;

fn launch(program: ValidatedProgram, config: &PipelineConfig, token_loss: TokenLoss) -> Pipeline {
    let (stages, world) =
        (program.placement().stages(), World::local(program.ranks() * config.data_parallel));
    let make = move |stage: StageIndex| -> Result<Stage, std::convert::Infallible> {
        let module = Mlp::of_stage(stage, stages);
        Ok(if stage.get() + 1 == stages {
            Stage::with_context_loss(module, token_loss)
        } else {
            Stage::new(module)
        })
    };
    Pipeline::launch(program, world, config, make).expect("it starts")
}

const MEAN_OF_VALID: TokenLoss = |logits, targets, _| mean_of_valid(logits, targets);

fn tokens(seed: u64, microbatches: u32) -> Batch {
    Batch::split(data(seed, 12), targets(seed), microbatches).expect("it splits")
}

#[test]
fn every_valid_token_of_the_batch_counts_the_same() {
    let (expected, value) =
        descended(|module| mean_of_valid(module.forward(data(0, 12).autodiff(), &context()), targets(0)));
    for (schedule, ranks) in CUTS {
        let mut pipeline = launch(program(schedule, ranks, MICROBATCHES), &sgd(), MEAN_OF_VALID);
        let batch = tokens(0, MICROBATCHES).ignoring(IGNORED).expect("some count");
        let summary = pipeline.step_batch(batch, RATE).expect("a step");
        assert_eq!(summary.loss_weights, [2.0, 2.0 / 3.0, 0.0, 4.0 / 3.0]);
        assert!((summary.loss() - value).abs() < 2e-6 * value, "{} {value}", summary.loss());
        assert_close(&parameters(&mut pipeline), &expected, 2e-6, schedule);
    }
    // Microbatches that count by their rows give other gradients: this is the mistake that the weights avoid.
    let mut pipeline = launch(program("gpipe", 1, MICROBATCHES), &sgd(), MEAN_OF_VALID);
    pipeline.step_batch(tokens(0, MICROBATCHES), RATE).expect("a step");
    let found = parameters(&mut pipeline);
    let bias = "layers.7.bias";
    let largest = found[bias].iter().zip(&expected[bias]).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(largest > 1e-3, "{largest}");
}

#[test]
fn tokens_count_the_same_over_replicas_and_accumulated_batches() {
    let logits = |module: &Mlp, seed| module.forward(data(seed, 12).autodiff(), &context());
    let (expected, _) = descended(|module| {
        let all = Tensor::cat((0..3).map(|seed| logits(module, seed)).collect(), 0);
        // The second batch has fewer valid tokens.
        let few = targets(1).slice_fill(0..3, IGNORED);
        mean_of_valid(all, Tensor::cat(vec![targets(0), few, targets(2)], 0))
    });
    let batch = |seed: u64, microbatches| {
        let targets = if seed == 1 { targets(1).slice_fill(0..3, IGNORED) } else { targets(seed) };
        let batch = Batch::split(data(seed, 12), targets, microbatches).expect("it splits");
        batch.ignoring(IGNORED).expect("some count")
    };
    for mode in [DataParallelMode::Replicated, DataParallelMode::Sharded] {
        for replicas in [1, 2] {
            let config = PipelineConfig { data_parallel: replicas, data_parallel_mode: mode, ..sgd() };
            let mut pipeline = launch(program("1f1b", 2, MICROBATCHES / replicas), &config, MEAN_OF_VALID);
            pipeline.accumulate(batch(0, MICROBATCHES)).expect("a batch");
            pipeline.accumulate(batch(1, MICROBATCHES)).expect("a batch");
            pipeline.step_batch(batch(2, MICROBATCHES), RATE).expect("a step");
            assert_close(&parameters(&mut pipeline), &expected, 2e-6, "three batches");
        }
    }
}

#[test]
fn tokens_may_have_weights() {
    let weights = || Tensor::<1>::from_data(numbers(40, [12]), &Device::flex()).abs();
    let weighted: TokenLoss = |logits, targets, context| {
        let weights: Tensor<1> = context.side("weights").expect("the step brings it");
        weighted_cross_entropy(logits, targets.clamp(0, WIDTH as i64 - 1), weights)
    };
    let (expected, value) = descended(|module| {
        let logits = module.forward(data(0, 12).autodiff(), &context());
        weighted_cross_entropy(logits, targets(0).clamp(0, WIDTH as i64 - 1), weights().autodiff())
    });
    for (schedule, ranks) in CUTS {
        let mut pipeline = launch(program(schedule, ranks, MICROBATCHES), &sgd(), weighted);
        let batch = tokens(0, MICROBATCHES).with_token_weights("weights", weights()).expect("twelve weights");
        let summary = pipeline.step_batch(batch, RATE).expect("a step");
        assert!((summary.loss() - value).abs() < 2e-6 * value, "{} {value}", summary.loss());
        assert_close(&parameters(&mut pipeline), &expected, 2e-6, schedule);
    }
}

#[test]
fn losses_may_be_added() {
    let sum: TokenLoss = |logits, targets, context| {
        context.auxiliary_loss("square", 0.5, logits.clone().square().sum());
        mean_of_valid(logits, targets)
    };
    let parts = |module: &Mlp, seed| {
        let whole = module.forward(data(seed, 12).autodiff(), &context());
        let part = |place: usize| {
            let logits = whole.clone().narrow(0, 3 * place, 3);
            mean_of_valid(logits.clone(), targets(seed).narrow(0, 3 * place, 3)) + logits.square().sum() * 0.5
        };
        part(0) + part(1) + part(2) + part(3)
    };
    let (once, value) = descended(|module| parts(module, 0));
    let (twice, _) = descended(|module| parts(module, 0) + parts(module, 1));
    for (schedule, ranks) in CUTS {
        let mut pipeline = launch(program(schedule, ranks, MICROBATCHES), &sgd(), sum);
        let summary = pipeline.step_batch(tokens(0, MICROBATCHES).summed(), RATE).expect("a step");
        assert!((summary.total() - value).abs() < 1e-5 * value, "{} {value}", summary.total());
        assert_close(&parameters(&mut pipeline), &once, 2e-6, schedule);

        let mut pipeline = launch(program(schedule, ranks, MICROBATCHES), &sgd(), sum);
        pipeline.accumulate(tokens(0, MICROBATCHES).summed()).expect("a batch");
        pipeline.step_batch(tokens(1, MICROBATCHES).summed(), RATE).expect("a step");
        assert_close(&parameters(&mut pipeline), &twice, 2e-6, schedule);
    }
}

#[test]
fn weights_that_cannot_be_are_refused() {
    let batch = || tokens(0, MICROBATCHES);
    let floats = Batch::split(data(0, 12), data(1, 12), MICROBATCHES).expect("it splits");
    for (refused, expected) in [
        (batch().weighted([1.0]), "1 weight, and the batch has 4 microbatches"),
        (batch().weighted([1.0, -1.0, 1.0, 1.0]), "the weight of microbatch 1 is -1"),
        (batch().weighted([0.0; 4]), "no token of the batch counts"),
        (floats.ignoring(IGNORED), "the targets of microbatch 0 have no integer tensor"),
    ] {
        let message = refused.expect_err(expected).to_string();
        assert!(message.starts_with(expected), "{message}");
    }
    let mut pipeline = launch(program("gpipe", 1, MICROBATCHES), &sgd(), MEAN_OF_VALID);
    pipeline.accumulate(batch().summed()).expect("a batch");
    let mixed = pipeline.step_batch(batch(), RATE);
    let mixed = mixed.expect_err("two ways to reduce losses").to_string();
    assert!(mixed.contains("reduce their losses in different ways"), "{mixed}");
    pipeline.step_batch(batch().summed(), RATE).expect("a step");
    pipeline.step_batch(batch(), RATE).expect("a step of another kind");
}

#[test]
fn outputs_of_chosen_stages_come_back() {
    for (schedule, ranks) in CUTS {
        // A pipeline needs as many microbatches as it has stages.
        for replicas in if ranks == 4 { 1..=1 } else { 1..=2 } {
            let config = PipelineConfig { data_parallel: replicas, ..sgd() };
            let mut pipeline =
                launch(program(schedule, ranks, MICROBATCHES / replicas), &config, MEAN_OF_VALID);
            let stages = pipeline.program().placement().stages();
            let expected = |stage: u32| {
                let module = Mlp::new(0, LAYERS);
                let forward = |hidden, stage| module.part(stage, stages).forward(hidden, &context());
                (0..=stage).fold(data(0, 12), forward).inner()
            };
            let asked = [0, stages / 2, stages - 1].map(StageIndex::new);
            let check = |found: BTreeMap<StageIndex, Vec<Values>>| {
                assert!(asked.iter().all(|stage| found.contains_key(stage)), "{schedule}");
                for (stage, outputs) in found {
                    let merged = merge_by(outputs, Merge::Along(0)).expect("they join").concat();
                    let merged: Tensor<2> = unpack(merged).expect("one tensor");
                    let (merged, expected) = (merged.into_data(), expected(stage.get()).into_data());
                    merged.assert_approx_eq::<f32>(&expected, burn::tensor::Tolerance::rel_abs(1e-5, 1e-6));
                }
            };
            let batch = || tokens(0, MICROBATCHES).keep_outputs_of(asked);
            check(pipeline.eval_batch(batch()).expect("an evaluation").stage_outputs);
            let summary = pipeline.step_batch(batch(), RATE).expect("a step");
            assert!(summary.outputs.is_empty(), "they are asked for by stage");
            check(summary.stage_outputs);
            let summary = pipeline.step_batch(tokens(0, MICROBATCHES), RATE).expect("a step");
            assert!(summary.stage_outputs.is_empty(), "nothing is left over");
            let error =
                pipeline.step_batch(tokens(0, MICROBATCHES).keep_outputs_of([StageIndex::new(99)]), RATE);
            let error = error.expect_err("no such stage").to_string();
            assert!(
                error.starts_with("the outputs of stage 99 are to be kept, and the program has"),
                "{error}"
            );
        }
    }
}
