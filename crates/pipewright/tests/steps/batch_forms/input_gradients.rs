//! Gradients of a batch's inputs, compared with the gradients of plain Burn on the whole batch.

use burn::tensor::{DType, Tolerance};
use pipewright::loss_scale::LossScaling;
use pipewright::tensor::Precision;
use pipewright_schedule::Recompute;

use super::*;

/// Schedules of every kind of backward and placement.
pub(super) const SCHEDULES: [(&str, u32); 9] = [
    ("gpipe", 1),
    ("gpipe", 4),
    ("1f1b", 2),
    ("zb-h1", 4),
    ("zbvzerobubble", 2),
    ("dualpipev", 2),
    ("loopedbfs", 2),
    ("interleaved1f1b", 2),
    ("interleavedzerobubble", 2),
];

fn launch_mlp(program: ValidatedProgram, config: &PipelineConfig) -> Pipeline {
    let (stages, world) =
        (program.placement().stages(), World::local(program.ranks() * config.data_parallel));
    Pipeline::launch(program, world, config, move |index| crate::support::stage(index, stages))
        .expect("it starts")
}

/// Returns the gradient of a loss with respect to its argument.
pub(super) fn gradient_of<const D: usize>(
    input: Tensor<D>,
    loss: impl FnOnce(Tensor<D>) -> Tensor<1>,
) -> TensorData {
    let leaf = input.autodiff().require_grad();
    let gradients = loss(leaf.clone()).backward();
    leaf.grad(&gradients).expect("the loss depends on it").into_data()
}

pub(super) fn assert_near(found: TensorData, expected: &TensorData) {
    found.assert_approx_eq::<f32>(expected, Tolerance::rel_abs(1e-4, 1e-8));
}

/// Checks the gradients of nine rows for each replica, which make microbatches of different sizes.
fn check(schedule: &str, ranks: u32, config: &PipelineConfig) {
    let rows = 9 * config.data_parallel as usize;
    let (x, y) = (data(0, rows), data(9, rows));
    let mut pipeline = launch_mlp(program(schedule, ranks, 4), config);
    let batch = || {
        Batch::split(x.clone(), y.clone(), SplitRule::balanced(4 * config.data_parallel)).expect("it splits")
    };
    let module = Mlp::new(0, LAYERS);
    let expected = gradient_of(x.clone(), |x| loss(module.forward(x, &context()), y.clone().autodiff()));
    let summary = pipeline.step_batch(batch().keep_input_gradients(), RATE).expect("a step");
    let found = summary.input_gradient::<2>(0).unwrap_or_else(|error| panic!("{schedule}: {error}"));
    assert!(!found.is_tracked());
    assert_near(found.into_data(), &expected);
    let summary = pipeline.step_batch(batch(), RATE).expect("a step");
    assert!(summary.input_gradients.is_empty(), "nothing was asked for");
}

#[test]
fn gradients_of_inputs_are_those_of_one_tape_under_every_schedule() {
    for (schedule, ranks) in SCHEDULES {
        check(schedule, ranks, &sgd());
    }
}

#[test]
fn replicas_have_the_gradients_of_their_rows() {
    for mode in
        [DataParallelMode::Replicated, DataParallelMode::Sharded, DataParallelMode::Hybrid { shards: 2 }]
    {
        let config = PipelineConfig { data_parallel: 2, data_parallel_mode: mode, ..sgd() };
        check("1f1b", 2, &config);
        check("zbvzerobubble", 2, &config);
    }
}

#[test]
fn forwards_that_are_computed_again_keep_the_gradients() {
    for recompute in [Recompute::Stage, Recompute::Block] {
        check("1f1b", 2, &PipelineConfig { recompute: recompute.clone(), ..sgd() });
        check("zb-h1", 2, &PipelineConfig { recompute, ..sgd() });
    }
}

#[test]
fn accumulated_batches_have_the_gradients_of_their_own_loss() {
    let module = Mlp::new(0, LAYERS);
    let mut pipeline = launch_mlp(program("1f1b", 2, MICROBATCHES), &sgd());
    let batch = |rows| {
        Batch::split(data(1, rows), data(2, rows), SplitRule::balanced(MICROBATCHES)).expect("it splits")
    };
    let check = |summary: &pipewright::pipeline::StepSummary, rows, share: f64| {
        let y = || data(2, rows).autodiff();
        let own = gradient_of(data(1, rows), |x| loss(module.forward(x, &context()), y()));
        assert_near(summary.input_gradient::<2>(0).expect("one input").into_data(), &own);
        // The share of the batch makes them gradients of the mean over all rows.
        assert_eq!(summary.weight / 17.0, share);
    };
    let first = pipeline.accumulate(batch(13).keep_input_gradients()).expect("a batch");
    check(&first, 13, 13.0 / 17.0);
    let second = pipeline.step_batch(batch(4).keep_input_gradients(), RATE).expect("a step");
    check(&second, 4, 4.0 / 17.0);
}

#[test]
fn losses_that_are_added_or_weighted_scale_the_gradients() {
    let module = Mlp::new(0, LAYERS);
    let logits = |x: Tensor<2>| module.forward(x, &context());
    let step = |batch: Batch| {
        let mut pipeline = launch(program("1f1b", 2, MICROBATCHES), &sgd(), MEAN_OF_VALID);
        let summary = pipeline.step_batch(batch.keep_input_gradients(), RATE).expect("a step");
        summary.input_gradient::<2>(0).expect("one input").into_data()
    };
    let expected = gradient_of(data(0, 12), |x| mean_of_valid(logits(x), targets(0)));
    assert_near(step(tokens(0, MICROBATCHES).ignoring(IGNORED).expect("some count")), &expected);
    let summed = |x: Tensor<2>| {
        let logits = logits(x);
        let part = |place| mean_of_valid(logits.clone().narrow(0, place, 3), targets(0).narrow(0, place, 3));
        part(0) + part(3) + part(6) + part(9)
    };
    assert_near(step(tokens(0, MICROBATCHES).summed()), &gradient_of(data(0, 12), summed));
}

#[test]
fn the_loss_scale_of_f16_is_not_in_the_gradients() {
    let (x, y) = (data(0, 9), data(9, 9));
    let module = Mlp::new(0, LAYERS);
    let expected = gradient_of(x.clone(), |x| loss(module.forward(x, &context()), y.clone().autodiff()));
    let loss_scaling = LossScaling { initial: 1024.0, ..LossScaling::default() };
    let config = PipelineConfig { precision: Precision::F16, loss_scaling, ..sgd() };
    let mut pipeline = launch_mlp(program("zb-h1", 2, MICROBATCHES), &config);
    let batch = Batch::split(x, y, SplitRule::balanced(MICROBATCHES)).expect("it splits");
    let summary = pipeline.step_batch(batch.keep_input_gradients(), RATE).expect("a step");
    assert_eq!((summary.loss_scale, summary.skipped), (Some(1024.0), false));
    let found = summary.input_gradient::<2>(0).expect("one input").into_data();
    assert_eq!(found.dtype(), DType::F32, "the type of the input");
    found.assert_approx_eq::<f32>(&expected, Tolerance::rel_abs(5e-2, 5e-4));
}

/// A pipeline whose first stage takes a transposed tensor, a table for all rows, ids, and a tensor that it
/// does not use.
fn launch_several() -> Pipeline {
    let make = |stage: StageIndex| -> Result<Stage, std::convert::Infallible> {
        Ok(match stage.get() {
            0 => Stage::new(Several { layers: Mlp::of_stage(stage, 2) }),
            _ => Stage::with_loss(Mlp::of_stage(stage, 2), loss),
        })
    };
    Pipeline::launch(program("1f1b", 2, MICROBATCHES), World::local(2), &sgd(), make).expect("it starts")
}

type Inputs = (Tensor<2>, Tensor<1>, Tensor<1, Int>, Tensor<2>);

#[derive(Module, Debug)]
struct Several {
    layers: Mlp,
}

impl StageModule for Several {
    type Input = Inputs;
    type Output = Tensor<2>;

    fn forward(&self, (columns, table, _ids, _unused): Inputs, context: &StageContext) -> Tensor<2> {
        self.layers.forward(columns.transpose() * table.unsqueeze(), context)
    }

    fn parameter_path(&self, local: &str) -> String {
        self.layers.parameter_path(local.strip_prefix("layers.").unwrap_or(local))
    }
}

fn several(x: Tensor<2>, y: Tensor<2>) -> Batch {
    let rows = x.dims()[0];
    let ids = Tensor::<1, Int>::arange(0..rows as i64, &Device::flex());
    let inputs = (x.transpose(), table() + 1.0, ids, data(8, rows));
    let along = SplitSpec::Along;
    let specs = (along(1), SplitSpec::Replicate, along(0), along(0));
    Batch::split(inputs, y, SplitRule::balanced(MICROBATCHES).inputs(specs)).expect("it splits")
}

#[test]
fn each_input_is_joined_as_it_was_split() {
    let (module, y) = (Mlp::new(0, LAYERS), || data(9, 9));
    let of = |x: Tensor<2>, table: Tensor<1>| {
        loss(module.forward(x * table.unsqueeze(), &context()), y().autodiff())
    };
    let columns = gradient_of(data(0, 9), |x| of(x, table().autodiff() + 1.0));
    let columns = Tensor::<2>::from_data(columns, &Device::flex()).transpose().into_data();
    let shared = gradient_of(table() + 1.0, |table| of(data(0, 9).autodiff(), table));
    let mut pipeline = launch_several();
    let summary = pipeline.step_batch(several(data(0, 9), y()).keep_input_gradients(), 0.0).expect("a step");
    assert_near(summary.input_gradient::<2>(0).expect("a float").into_data(), &columns);
    assert_near(summary.input_gradient::<1>(1).expect("a float").into_data(), &shared);
    let is_there: Vec<bool> = summary.input_gradients.iter().map(Option::is_some).collect();
    assert_eq!(
        is_there,
        [true, true, false, false],
        "ids have no gradient, and the loss does not depend on the last input"
    );
    let summary =
        pipeline.step_batch(several(data(0, 9), y()).keep_input_gradients_of([1]), 0.0).expect("a step");
    let is_there: Vec<bool> = summary.input_gradients.iter().map(Option::is_some).collect();
    assert_eq!(is_there, [false, true, false, false]);
    assert_near(summary.input_gradient::<1>(1).expect("it was asked for").into_data(), &shared);
}

#[test]
fn an_input_on_a_tape_trains_the_model_before_it() {
    let (module, y) = (Mlp::new(0, LAYERS), || data(9, 12));
    let encoder = |weight: Tensor<2>| data(0, 12).autodiff().matmul(weight);
    let weight = || Tensor::<2>::from_data(numbers(30, [WIDTH, WIDTH]), &Device::flex());
    let expected =
        gradient_of(weight(), |weight| loss(module.forward(encoder(weight), &context()), y().autodiff()));
    let mut pipeline = launch_mlp(program("1f1b", 2, MICROBATCHES), &sgd());
    let found = gradient_of(weight(), |weight| {
        let hidden = encoder(weight);
        let batch = Batch::split(hidden.clone(), y(), MICROBATCHES).expect("it splits");
        let summary = pipeline.step_batch(batch.keep_input_gradients(), RATE).expect("a step");
        (hidden * summary.input_gradient::<2>(0).expect("one input").autodiff()).sum()
    });
    assert_near(found, &expected);
}

fn refusal(pipeline: &mut Pipeline, batch: Batch) -> String {
    pipeline.step_batch(batch, RATE).map(drop).expect_err("it is refused").to_string()
}

#[test]
fn gradients_that_would_be_lost_are_refused() {
    let mut pipeline = launch_mlp(program("1f1b", 2, MICROBATCHES), &sgd());
    let (x, y) = (|| data(0, 12), || data(9, 12));
    let leaf = || x().autodiff().require_grad();
    let split = |x, y| Batch::split(x, y, MICROBATCHES).expect("it splits");
    let expected =
        "input 0 requires a gradient, and the batch does not ask for it: add `Batch::keep_input_gradients`";
    for tracked in [leaf(), leaf() * 2.0] {
        let error = pipeline.step(tracked.clone(), y(), RATE).map(drop).expect_err("it is lost").to_string();
        assert!(error.starts_with(expected), "{error}");
        let error =
            pipeline.accumulate(split(tracked.clone(), y())).map(drop).expect_err("it is lost").to_string();
        assert!(error.starts_with(expected), "{error}");
        pipeline.eval(tracked.clone(), Some(y())).expect("an evaluation has no gradients");
        pipeline.step(tracked.inner(), y(), RATE).expect("it requires none any more");
    }
    let error = refusal(&mut pipeline, split(x(), leaf()));
    assert!(
        error.starts_with("a target requires a gradient, and a pipeline computes the gradients of"),
        "{error}"
    );
    assert_eq!(
        refusal(&mut pipeline, split(x(), y()).keep_input_gradients_of([1])),
        "the gradient of input 1 is asked for, and the batch has 1 input, counted from 0: ask for inputs that exist"
    );
    let error =
        pipeline.eval_batch(split(x(), y()).keep_input_gradients()).map(drop).expect_err("no gradients");
    assert!(error.to_string().contains("an evaluation computes none"), "{error}");
    let mut pipeline = launch_several();
    let batch = several(x(), y()).keep_input_gradients_of([2]);
    assert!(refusal(&mut pipeline, batch).starts_with("the gradient of input 2 is asked for, and it is int"));
}

#[test]
fn parts_that_do_not_join_are_refused_before_the_step() {
    let make = |_: StageIndex| -> Result<Stage, std::convert::Infallible> {
        Ok(Stage::with_loss(Mlp::new(0, LAYERS), |output: Tensor<2>, (): ()| output.square().mean()))
    };
    let mut pipeline =
        Pipeline::launch(program("gpipe", 1, 2), World::local(1), &sgd(), make).expect("it starts");
    let parts =
        |columns| [data(0, 2), data(0, 2).narrow(1, 0, columns)].map(pipewright::tensor::pack).to_vec();
    let batch = Batch::new(parts(WIDTH - 1), vec![Values::new(); 2]).keep_input_gradients();
    let error = refusal(&mut pipeline, batch);
    assert!(
        error.starts_with("the gradients of an input cannot be joined: output 0 of microbatch 1 is"),
        "{error}"
    );
    let batch = Batch::new(parts(WIDTH), vec![Values::new(); 2]).keep_input_gradients();
    let summary = pipeline.step_batch(batch, RATE).expect("a step");
    assert_eq!(summary.input_gradient::<2>(0).expect("one input").dims(), [4, WIDTH]);
}
