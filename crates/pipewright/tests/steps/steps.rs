//! Steps without an update, hooks around actions, and the state after a failure.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use burn::tensor::Tensor;
use pipewright::batch::Batch;
use pipewright::hook::ActionHook;
use pipewright::ids::WorldRank;
use pipewright::pipeline::{Pipeline, PipelineConfig};
use pipewright_schedule::{Action, Rank};

use crate::support::{self, batch, config, program, split};

fn launch(schedule: &str, ranks: u32, microbatches: u32, config: &PipelineConfig) -> Pipeline {
    support::launch(program(schedule, ranks, microbatches), config)
}

fn halves(seed: u64) -> [Batch; 2] {
    let part = |tensor: Tensor<2>, start: usize| split(tensor.narrow(0, start, 4 * support::ROWS), 4);
    [0, 4 * support::ROWS]
        .map(|start| Batch::new(part(batch(seed, 8), start), part(batch(100 + seed, 8), start)))
}

#[test]
fn two_accumulated_halves_equal_the_whole_batch() {
    let mut whole = launch("1f1b", 2, 8, &config());
    let mut in_parts = launch("zbvzerobubble", 2, 4, &config());
    for seed in 0..3 {
        let expected = whole.step(batch(seed, 8), batch(100 + seed, 8), 1e-2).expect("a step");
        let [first, second] = halves(seed);
        let first = in_parts.accumulate(first).expect("a step");
        let second = in_parts.step_batch(second, 1e-2).expect("a step");
        assert_eq!([first.losses, second.losses].concat(), expected.losses);
        assert_eq!(second.gradient_norm, expected.gradient_norm);
    }
}

#[test]
fn a_failed_part_drops_the_gradients_before_it() {
    let mut pipeline = launch("1f1b", 2, 4, &config());
    let mut fresh = launch("1f1b", 2, 4, &config());
    let [first, second] = halves(0);
    pipeline.accumulate(first).expect("a step");
    let wrong = Batch::new(split(batch(0, 4), 4), split(batch(1, 4).repeat_dim(1, 2), 4));
    pipeline.accumulate(wrong).expect_err("the targets do not fit");
    let found = pipeline.step_batch(second.clone(), 1e-2).expect("a step");
    let expected = fresh.step_batch(second, 1e-2).expect("a step");
    assert_eq!((found.losses, found.gradient_norm), (expected.losses, expected.gradient_norm));
}

#[test]
fn a_pipeline_that_trains_also_evaluates() {
    for (schedule, ranks) in [("1f1b", 4), ("zbvzerobubble", 2), ("dualpipev", 2), ("interleaved1f1b", 2)] {
        let mut pipeline = launch(schedule, ranks, 4, &config());
        let before = pipeline.eval(batch(0, 4), Some(batch(100, 4))).expect("an evaluation");
        let step = pipeline.step(batch(0, 4), batch(100, 4), 1e-2).expect("a step");
        let after = pipeline.eval(batch(0, 4), Some(batch(100, 4))).expect("an evaluation");
        assert_eq!(before.losses, step.losses, "{schedule}");
        assert!(after.losses.iter().sum::<f64>() < before.losses.iter().sum(), "{schedule}");
        assert_eq!(after.outputs.len(), 4);
    }
}

#[test]
fn an_evaluation_leaves_accumulated_gradients_alone() {
    let (mut with, mut without) = (launch("1f1b", 2, 4, &config()), launch("1f1b", 2, 4, &config()));
    let [first, second] = halves(0);
    with.accumulate(first.clone()).expect("a step");
    with.eval(batch(7, 4), Some(batch(8, 4))).expect("an evaluation");
    without.accumulate(first).expect("a step");
    let found = with.step_batch(second.clone(), 1e-2).expect("a step").gradient_norm;
    assert_eq!(found, without.step_batch(second, 1e-2).expect("a step").gradient_norm);
}

#[test]
fn an_evaluation_of_losses_keeps_no_outputs() {
    let mut pipeline = launch("1f1b", 2, 4, &config());
    let parts = || Batch::new(split(batch(0, 4), 4), split(batch(100, 4), 4));
    let expected = pipeline.eval_batch(parts()).expect("an evaluation");
    let found = pipeline.eval_losses(parts()).expect("an evaluation");
    assert_eq!((found.losses, found.outputs.len()), (expected.losses, 0));
    assert_eq!(pipeline.eval_losses(parts().keep_outputs()).expect("an evaluation").outputs.len(), 4);
}

#[test]
fn only_an_update_ends_a_step() {
    let mut pipeline = launch("1f1b", 2, 4, &config());
    let [first, second] = halves(0);
    pipeline.eval(batch(7, 4), Some(batch(8, 4))).expect("an evaluation");
    let numbers =
        [pipeline.accumulate(first).expect("a part"), pipeline.step_batch(second, 1e-2).expect("a step")];
    assert_eq!(numbers.map(|summary| summary.step.get()), [1, 1]);
    pipeline.eval(batch(7, 4), Some(batch(8, 4))).expect("an evaluation");
    assert_eq!(pipeline.step(batch(0, 4), batch(100, 4), 1e-2).expect("a step").step.get(), 2);
}

/// The gap before a step, with its parts, is within the time between the ends of the two steps.
#[test]
fn a_step_that_follows_another_one_has_the_gap_between_them() {
    for (schedule, ranks) in [("1f1b", 2), ("zb-h1", 4), ("zbvzerobubble", 2)] {
        let mut pipeline = launch(schedule, ranks, 4, &config());
        let mut step = || {
            let [first, second] = halves(0);
            let before = pipeline.accumulate(first).expect("a batch").gap;
            let between = Instant::now();
            let within = pipeline.step_batch(second, 1e-2).expect("a step").gap;
            (before, within, between)
        };
        let (none, within, from) = step();
        assert_eq!(none, None, "{schedule}: it is the first one");
        assert_eq!(within.map(|gap| gap.update), Some(Duration::ZERO), "{schedule}: no update is before it");
        let pause = Duration::from_millis(20);
        std::thread::sleep(pause);
        let (before, _, until) = step();
        let gap = before.expect("a step was before");
        assert_eq!(gap.critical, gap.sums + gap.update + gap.between, "{schedule}");
        assert!(gap.between >= pause && gap.update > Duration::ZERO, "{schedule}: {gap:?}");
        assert!(gap.critical < until - from, "{schedule}: {gap:?} of {:?}", until - from);
        assert_eq!(gap.per_rank.len(), ranks as usize);
        assert!(gap.per_rank.iter().all(|own| *own >= pause), "{schedule}: {gap:?}");
        pipeline.eval(batch(0, 4), Some(batch(100, 4))).expect("an evaluation");
        let [first, _] = halves(0);
        let after = pipeline.accumulate(first).expect("a step").gap;
        assert_eq!(after, None, "{schedule}: the ranks have computed in between");
    }
}

#[test]
fn hooks_see_every_action_before_and_after() {
    #[derive(Default)]
    struct Count {
        before: AtomicU32,
        after: AtomicU32,
    }
    impl ActionHook for Count {
        fn before(&self, _rank: WorldRank, _action: Action) {
            self.before.fetch_add(1, Ordering::Relaxed);
        }
        fn after(&self, _rank: WorldRank, _action: Action) {
            self.after.fetch_add(1, Ordering::Relaxed);
        }
    }
    let count = Arc::new(Count::default());
    let mut pipeline = launch("1f1b", 2, 4, &PipelineConfig { hook: Some(count.clone()), ..config() });
    let actions: usize = [0, 1].map(|rank| pipeline.program().row(Rank::new(rank)).len()).iter().sum();
    pipeline.step(batch(0, 4), batch(100, 4), 1e-2).expect("a step");
    assert_eq!(count.before.load(Ordering::Relaxed) as usize, actions);
    assert_eq!(count.after.load(Ordering::Relaxed) as usize, actions);
}

#[test]
fn a_panic_in_a_hook_is_a_failed_step() {
    struct Panics;
    impl ActionHook for Panics {
        fn after(&self, _rank: WorldRank, action: Action) {
            assert!(action.to_string() != "1B2", "no");
        }
    }
    let mut pipeline = launch("1f1b", 2, 4, &PipelineConfig { hook: Some(Arc::new(Panics)), ..config() });
    let error = pipeline.step(batch(0, 4), batch(100, 4), 1e-2).expect_err("it panics").to_string();
    assert!(error.contains("rank 1") && error.contains("1B2"), "{error}");
}
