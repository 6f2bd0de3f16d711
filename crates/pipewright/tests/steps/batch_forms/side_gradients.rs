//! Gradients of side inputs that every stage reads, compared with the gradients of plain Burn on the whole batch.

use pipewright_schedule::Recompute;

use super::input_gradients::{SCHEDULES, assert_near, gradient_of};
use super::*;

/// The rows of each of `count` microbatches.
fn sizes(rows: usize, count: usize) -> Vec<usize> {
    (0..count).map(|index| rows / count + usize::from(index < rows % count)).collect()
}

/// Checks the gradients of the side inputs of [`WithSides`] in a step in which all three require one.
fn check(schedule: &str, ranks: u32, config: &PipelineConfig) {
    let (rows, count) = (9 * config.data_parallel as usize, MICROBATCHES * config.data_parallel);
    let mut pipeline = launch_with_sides_as(program(schedule, ranks, MICROBATCHES), config);
    let stages = pipeline.program().placement().stages();
    let batch = |is_tracked: bool| {
        let leaf = |tensor: Tensor<2>| if is_tracked { tensor.autodiff().require_grad() } else { tensor };
        let whole = leaf(data(3, rows));
        let mut start = 0;
        let parts = sizes(rows, count as usize).into_iter().map(|size| {
            start += size;
            whole.clone().narrow(0, start - size, size)
        });
        let table = table();
        let table = if is_tracked { table.autodiff().require_grad() } else { table };
        let specs = (SplitSpec::Along(1), SplitSpec::Replicate);
        let batch =
            Batch::split(data(0, rows), data(1, rows), SplitRule::balanced(count)).expect("it splits");
        let batch = batch.with_split_by("columns", (leaf(data(2, rows).transpose()), table), specs);
        batch.and_then(|batch| batch.with_parts("parts", parts.collect::<Vec<_>>())).expect("they fit")
    };
    let module = Mlp::new(0, LAYERS);
    let on_one_tape = |columns: Tensor<2>, table: Tensor<1>, parts: Tensor<2>| {
        let side = columns.transpose() + table.unsqueeze() + parts;
        let forward =
            |hidden: Tensor<2>, stage| module.part(stage, stages).forward(hidden + side.clone(), &context());
        loss((0..stages).fold(data(0, rows).autodiff(), forward), data(1, rows).autodiff())
    };
    let columns = || data(2, rows).transpose();
    let (others, fixed) = (|| data(3, rows).autodiff(), || table().autodiff());
    let expected = [
        gradient_of(columns(), |columns| on_one_tape(columns, fixed(), others())),
        gradient_of(table(), |table| on_one_tape(columns().autodiff(), table, others())),
        gradient_of(data(3, rows), |parts| on_one_tape(columns().autodiff(), fixed(), parts)),
    ];
    let without = pipeline.step_batch(batch(false), 0.0).expect("a step");
    assert!(without.side_gradients.is_empty());
    let summary = pipeline.step_batch(batch(true), 0.0).expect("a step");
    assert_eq!(summary.losses, without.losses, "{schedule}: a gradient changes no loss");
    assert_eq!(summary.gradient_norm, without.gradient_norm, "{schedule}");
    let found = [
        summary.side_gradient::<2>("columns", 0).expect("it is read").into_data(),
        summary.side_gradient::<1>("columns", 1).expect("it is read").into_data(),
        summary.side_gradient::<2>("parts", 0).expect("it is read").into_data(),
    ];
    for (found, expected) in found.into_iter().zip(&expected) {
        assert_near(found, expected);
    }
    pipeline.eval_batch(batch(true)).expect("an evaluation has no gradients");
}

#[test]
fn gradients_of_side_inputs_are_those_of_one_tape_under_every_schedule() {
    for (schedule, ranks) in SCHEDULES {
        check(schedule, ranks, &sgd());
    }
}

#[test]
fn replicas_and_shards_add_their_gradients() {
    for mode in [DataParallelMode::Replicated, DataParallelMode::Sharded] {
        let config = PipelineConfig { data_parallel: 2, data_parallel_mode: mode, ..sgd() };
        check("1f1b", 2, &config);
        check("zbvzerobubble", 2, &config);
    }
}

#[test]
fn forwards_that_are_computed_again_read_them_again() {
    for schedule in ["1f1b", "zb-h1"] {
        check(schedule, 2, &PipelineConfig { recompute: Recompute::Stage, ..sgd() });
    }
}

#[test]
fn a_loss_has_a_gradient_of_what_it_reads_and_an_unused_tensor_has_none() {
    let make = |stage: StageIndex| -> Result<Stage, std::convert::Infallible> {
        let weighted = |output: Tensor<2>, target: Tensor<2>, context: &StageContext| {
            let weights: Tensor<1> = context.side("weights").expect("the step brings it");
            ((output - target).square() * weights.unsqueeze()).mean()
        };
        let module = Mlp::of_stage(stage, 2);
        Ok(if stage.get() == 1 { Stage::with_context_loss(module, weighted) } else { Stage::new(module) })
    };
    let program = program("1f1b", 2, MICROBATCHES);
    let mut pipeline = Pipeline::launch(program, World::local(2), &sgd(), make).expect("it starts");
    let leaf = |tensor: Tensor<1>| tensor.autodiff().require_grad();
    let batch = Batch::split(data(0, 12), data(1, 12), MICROBATCHES).expect("it splits");
    let batch = batch.with_replicated("weights", leaf(table())).with_replicated("unused", leaf(table()));
    let summary = pipeline.step_batch(batch, RATE).expect("a step");
    let module = Mlp::new(0, LAYERS);
    let expected = gradient_of(table(), |weights| {
        let output = module.forward(data(0, 12).autodiff(), &context());
        ((output - data(1, 12).autodiff()).square() * weights.unsqueeze()).mean()
    });
    assert_near(summary.side_gradient::<1>("weights", 0).expect("the loss reads it").into_data(), &expected);
    let error = summary.side_gradient::<1>("unused", 0).map(drop).expect_err("nothing reads it");
    assert_eq!((summary.side_gradients["unused"].len(), error.to_string().is_empty()), (1, false));
}
