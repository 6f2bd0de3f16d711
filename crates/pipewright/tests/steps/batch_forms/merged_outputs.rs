//! Outputs of a step that are joined by a sum and by functions, compared with the outputs of the whole batch.

use super::*;

/// Joins the outputs of a step as a spec says, under every schedule, and compares them with `expected` of the
/// outputs of the whole batch.
fn check<const D: usize>(rule: SplitRule, rows: usize, merge: &Merge, expected: fn(Tensor<2>) -> Tensor<D>) {
    let whole = Mlp::new(0, LAYERS).forward(data(0, rows), &context()).inner();
    let expected = expected(whole).into_data();
    for (schedule, ranks) in CUTS {
        let program = program(schedule, ranks, MICROBATCHES);
        let (stages, world) = (program.placement().stages(), World::local(ranks));
        let make = move |index| crate::support::stage(index, stages);
        let mut pipeline = Pipeline::launch(program, world, &sgd(), make).expect("it starts");
        let batch = Batch::split(data(0, rows), data(1, rows), rule.clone()).expect("it splits");
        let outputs = pipeline.step_batch(batch.keep_outputs(), RATE).expect("a step").outputs;
        let merged = merge_by(outputs, merge.clone()).expect("they join").concat();
        let merged: Tensor<D> = unpack(merged).expect("one tensor");
        let tolerance = burn::tensor::Tolerance::rel_abs(1e-5, 1e-6);
        merged.into_data().assert_approx_eq::<f32>(&expected, tolerance);
    }
}

#[test]
fn a_sum_adds_the_outputs_of_the_microbatches() {
    check::<2>(SplitRule::equal(MICROBATCHES), 12, &Merge::Sum, |whole| {
        whole.reshape([MICROBATCHES as usize, 3, WIDTH]).sum_dim(0).squeeze_dim(0)
    });
}

#[test]
fn functions_join_outputs_of_different_sizes() {
    let sum = Merge::function(|parts: Vec<Tensor<2>>| {
        let first = Tensor::zeros([1, WIDTH], &Device::flex());
        parts.into_iter().fold(first, |sum, part| sum + part.sum_dim(0))
    });
    let rule = SplitRule::balanced(MICROBATCHES);
    check(rule.clone(), 11, &sum, |whole| whole.sum_dim(0));
    let largest = Merge::function(|parts: Vec<Tensor<2>>| Tensor::cat(parts, 0).max());
    check(rule, 11, &largest, Tensor::max);
}
