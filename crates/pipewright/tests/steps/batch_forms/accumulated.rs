//! Batches of different sizes whose gradients are accumulated: every row of the step counts the same.

use super::*;

/// The rows of the batches of a step.
const SIZES: [usize; 3] = [8, 4, 13];

fn all(seed: u64) -> Tensor<2> {
    Tensor::cat((0..).zip(SIZES).map(|(number, rows)| data(seed + number, rows)).collect(), 0)
}

/// Takes a step of these batches under every schedule, with whole and with sharded replicas.
fn check(batch: impl Fn(Tensor<2>, Tensor<2>) -> Batch, what: &str) {
    let (expected, value) =
        descended(|module| loss(module.forward(all(50).autodiff(), &context()), all(60).autodiff()));
    let cuts = CUTS.into_iter().map(|cut| (cut, 1, DataParallelMode::Replicated));
    let replicas =
        [DataParallelMode::Replicated, DataParallelMode::Sharded].map(|mode| (("1f1b", 2), 2, mode));
    for ((schedule, ranks), replicas, mode) in cuts.chain(replicas) {
        let config = PipelineConfig { data_parallel: replicas, data_parallel_mode: mode, ..sgd() };
        let program = program(schedule, ranks, MICROBATCHES / replicas);
        let (stages, world) = (program.placement().stages(), World::local(ranks * replicas));
        let make = move |index| crate::support::stage(index, stages);
        let mut pipeline = Pipeline::launch(program, world, &config, make).expect("it starts");
        let mut batches: Vec<Batch> = (0..)
            .zip(SIZES)
            .map(|(number, rows)| batch(data(50 + number, rows), data(60 + number, rows)))
            .collect();
        let last = batches.pop().expect("three batches");
        let earlier = batches.into_iter().map(|batch| pipeline.accumulate(batch).expect("a batch"));
        let mut summaries: Vec<_> = earlier.collect();
        summaries.push(pipeline.step_batch(last, RATE).expect("a step"));
        assert_close(&parameters(&mut pipeline), &expected, 2e-6, &format!("{what}, {schedule}"));
        assert_eq!(
            summaries.iter().map(|summary| summary.weight).collect::<Vec<_>>(),
            SIZES.map(|size| size as f64)
        );
        let sum: f64 = summaries.iter().map(|summary| summary.loss() * summary.weight).sum();
        let mean = sum / SIZES.iter().sum::<usize>() as f64;
        assert!((mean - value).abs() < 2e-6 * value, "{what}, {schedule}: {mean} {value}");
    }
}

#[test]
fn every_row_of_batches_of_different_sizes_counts_the_same() {
    check(|x, y| Batch::split(x, y, SplitRule::balanced(MICROBATCHES)).expect("it splits"), "balanced");
    check(|x, y| Batch::split(x, y, SplitRule::uneven(MICROBATCHES)).expect("it splits"), "uneven");
    let rows = SplitSpec::Along(0);
    check(
        |x, y| {
            Batch::split(x, y, SplitRule::balanced(MICROBATCHES).inputs(rows).targets(rows))
                .expect("it splits")
        },
        "balanced, with specifications",
    );
}

#[test]
fn weights_may_be_the_rows() {
    let weighted = |x: Tensor<2>, y| {
        let rows = x.dims()[0];
        let batch = Batch::split(x, y, SplitRule::balanced(MICROBATCHES)).expect("it splits");
        let sizes = (0..4).map(|place| (rows / 4 + usize::from(place < rows % 4)) as f64);
        batch.weighted(sizes.collect::<Vec<_>>()).expect("four weights")
    };
    check(weighted, "weighted");
}

#[test]
fn equal_batches_have_the_bits_of_one_batch() {
    let (x, y) = (|| data(70, 24), || data(71, 24));
    let halves = |half: usize| {
        let part = |tensor: Tensor<2>| tensor.narrow(0, 12 * half, 12);
        Batch::split(part(x()), part(y()), MICROBATCHES).expect("it splits")
    };
    let launch = |microbatches| {
        let make = |index| crate::support::stage(index, 2);
        Pipeline::launch(program("gpipe", 2, microbatches), World::local(2), &sgd(), make).expect("it starts")
    };
    let mut once = launch(2 * MICROBATCHES);
    once.step(x(), y(), RATE).expect("a step");
    let mut twice = launch(MICROBATCHES);
    twice.accumulate(halves(0)).expect("a batch");
    twice.step_batch(halves(1), RATE).expect("a step");
    assert_eq!(parameters(&mut twice), parameters(&mut once));
}
