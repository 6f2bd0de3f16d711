//! Access to the modules of running pipelines of tensor ranks.

use burn::tensor::{Device, Tensor};
use pipewright::pipeline::Pipeline;
use pipewright::stage::{StageContext, StageModule};
use pipewright_schedule::{Microbatch, StageIndex};

use super::model::{Sizes, Split, assert_close, launch, sizes, take_steps};
use crate::support::{Step, WIDTH};

const STAGE: StageIndex = StageIndex::new(1);

#[test]
fn the_first_rank_reads_and_all_run_the_module() {
    let read = |sizes: Sizes| {
        let mut pipeline = launch("1f1b", sizes);
        let run = |module: &Split| {
            let context = StageContext::new(STAGE, Microbatch::new(0));
            let input = Tensor::ones([2, WIDTH], &Device::flex().autodiff());
            (module.layers[0].up.weight.dims(), module.forward(input, &context).inner().into_data())
        };
        pipeline.module(STAGE, run).expect("it is there").expect("in this process")
    };
    let (whole, expected) = read(sizes(2, 1, 1));
    assert_eq!(whole, [WIDTH, 7]);
    for _ in 0..5 {
        let (shard, output) = read(sizes(2, 1, 3));
        assert_eq!(shard, [WIDTH, 3], "the shard of the first of three ranks");
        output.assert_approx_eq::<f32>(&expected, burn::tensor::Tolerance::relative(1e-5));
    }
}

/// Takes a step, changes the modules, and takes two more.
fn steps(sizes: Sizes, change: impl Fn(&mut Pipeline)) -> Vec<Step> {
    let mut pipeline = launch("1f1b", sizes);
    let mut steps = take_steps(&mut pipeline, 0..1);
    change(&mut pipeline);
    steps.extend(take_steps(&mut pipeline, 1..3));
    steps
}

#[test]
fn a_change_applies_to_every_shard() {
    let change = |pipeline: &mut Pipeline| {
        let halved = |mut module: Split| {
            let up = &mut module.layers[2].up;
            up.weight = up.weight.clone().map(|weight| (weight * 0.5).detach().require_grad());
            module
        };
        pipeline.change_module(STAGE, halved).expect("it is changed");
    };
    let expected = steps(sizes(2, 1, 1), change);
    assert_ne!(expected, steps(sizes(2, 1, 1), |_| ()), "the change makes a difference");
    assert_close(&steps(sizes(2, 1, 3), change), &expected, "changed");
}

#[test]
fn frozen_shards_keep_their_values() {
    let freeze = |pipeline: &mut Pipeline| {
        pipeline.freeze(|path| path.contains("layers.6.") || path.contains("layers.7.up")).expect("frozen");
    };
    let expected = steps(sizes(2, 1, 1), freeze);
    assert_close(&steps(sizes(2, 2, 2), freeze), &expected, "frozen");
    let mut pipeline = launch("1f1b", sizes(2, 2, 2));
    let frozen = pipeline.freeze(|path| path.contains("layers.6.up.weight")).expect("frozen");
    assert_eq!(frozen, 4, "on two tensor ranks of two replicas");
}

#[test]
fn a_module_whose_shards_do_not_fit_is_refused_and_nothing_is_changed() {
    let mut pipeline = launch("1f1b", sizes(2, 1, 2));
    let expected = take_steps(&mut launch("1f1b", sizes(2, 1, 2)), 0..2);
    let error = pipeline.change_module(STAGE, |module: Split| module.held_in_shards(3));
    let error = error.expect_err("three shards on two ranks").to_string();
    assert!(error.contains("layers.4.up.weight"), "{error}");
    assert!(error.contains("3 shards") && error.contains("2 tensor ranks"), "{error}");
    assert_eq!(take_steps(&mut pipeline, 0..2), expected);
}
