//! Failures while two steps have begun.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use burn::tensor::Tensor;
use pipewright::batch::Batch;
use pipewright::hook::{ActionHook, ForwardRun};
use pipewright::pipeline::{Pipeline, PipelineConfig, PipelineError};
use pipewright::stage::StageError;
use pipewright::tensor::{pack, unpack};
use pipewright::transport::World;
use pipewright::verification::Verify;

use super::batches::{MICROBATCHES, RATE, StepResult, begin, numbered, parameters, result_of};
use super::watch::{Watch, actions, wait_until};
use super::{launch, launch_in};
use crate::support::{batch, config, descent, split};

/// Lets a rank panic in an action, counted over two batches that are begun together, which do not update.
/// `waits` is an action of rank 0 that waits until rank 1 has begun the second batch. Returns the results of
/// both, and checks that the pipeline then trains like one that has not taken these batches.
fn failed(panics: (u32, u32), waits: Option<(u32, u32)>) -> [Result<StepResult, String>; 2] {
    let own = actions(&launch("1f1b", 2, &config()));
    let (watch, mut pipeline, with_hook) = Watch { panics: Some(panics), waits, ..Watch::default() }.launch();
    (0..2).for_each(|number| begin(&mut pipeline, number, 4, &with_hook));
    if waits.is_some() {
        watch.wait_for(1, own[1]);
        watch.release();
    }
    let results = [(); 2].map(|()| {
        let result = pipeline.finish();
        result.map(|summary| result_of(&summary)).map_err(|error| error.to_string())
    });
    assert!(!pipeline.has_begun());
    let mut fresh = launch("1f1b", 2, &config());
    let after = |pipeline: &mut Pipeline| {
        let summary = pipeline.step_batch(numbered(7, &config()), RATE).expect("a step");
        (result_of(&summary), parameters(pipeline))
    };
    assert_eq!(after(&mut pipeline), after(&mut fresh), "no gradient is left");
    results
}

#[test]
fn a_failure_of_the_next_batch_leaves_the_one_before() {
    let own = actions(&launch("1f1b", 2, &config()));
    // Rank 1 fails in the second batch while rank 0 is in the first.
    let [first, second] = failed((1, own[1]), Some((0, own[0] - 1)));
    assert_eq!(first.expect("it has not failed").0, 1);
    let error = second.expect_err("it panics");
    assert!(error.starts_with("step 1: rank 1") && error.contains("it has to fail"), "{error}");
}

#[test]
fn a_failure_drops_the_next_batch() {
    let own = actions(&launch("1f1b", 2, &config()));
    // Rank 0 fails in the first batch while rank 1 is in the second.
    let [first, second] = failed((0, own[0] - 1), Some((0, own[0] - 1)));
    let error = first.expect_err("it panics");
    assert!(error.starts_with("step 1: rank 0") && error.contains("it has to fail"), "{error}");
    assert_eq!(second.expect_err("it is dropped"), PipelineError::NoStepBegun.to_string());
    // It fails at once, before any rank begins the second one.
    let [first, second] = failed((0, 0), None);
    assert!(first.expect_err("it panics").contains("it has to fail"));
    assert_eq!(second.expect_err("it is dropped"), PipelineError::NoStepBegun.to_string());
}

#[test]
fn a_failed_step_has_its_own_number() {
    let own = actions(&launch("1f1b", 2, &config()));
    let (_, mut pipeline, with_hook) = Watch { panics: Some((1, own[1] + 1)), ..Watch::default() }.launch();
    (0..2).for_each(|number| begin(&mut pipeline, number, 1, &with_hook));
    assert_eq!(pipeline.finish().expect("a step").step.get(), 1);
    begin(&mut pipeline, 2, 1, &with_hook);
    let error = pipeline.finish().expect_err("it panics").to_string();
    assert!(error.starts_with("step 2: rank 1"), "{error}");
    assert!(pipeline.step_failure().is_some() && !pipeline.has_begun(), "the third is dropped");
    let mut alone = launch("1f1b", 2, &config());
    alone.step_batch(numbered(0, &with_hook), RATE).expect("a step");
    assert_eq!(parameters(&mut pipeline), parameters(&mut alone));
}

/// A rank that has begun the next step has done none of its actions. The failure shows the position in the step
/// that failed.
#[test]
fn a_failed_step_shows_its_own_position() {
    let grid = |begins_next: bool| {
        let mut pipeline = launch("1f1b", 2, &config());
        let inputs = split(batch(0, MICROBATCHES).mul_scalar(f32::NAN), MICROBATCHES);
        let not_finite = Batch::new(inputs, split(batch(100, MICROBATCHES), MICROBATCHES));
        pipeline.begin(not_finite, RATE).expect("none has begun");
        if begins_next {
            begin(&mut pipeline, 1, 1, &config());
        }
        pipeline.finish().expect_err("the loss is not a number");
        pipeline.step_failure().expect("the step failed").grid.clone()
    };
    assert!(grid(false).contains('!'), "{}", grid(false));
    assert_eq!(grid(true), grid(false));
}

/// Rank 0 hangs in the first batch. Rank 1 begins the second one, and its failure there is not the reason.
#[test]
fn a_rank_that_hangs_is_reported_although_another_one_fails_in_the_next_batch() {
    let own = actions(&launch("1f1b", 2, &config()));
    let watch = Watch { panics: Some((1, own[1])), waits: Some((0, own[0] - 1)), ..Watch::default() };
    let config = PipelineConfig { deadline: Duration::from_secs(3), ..config() };
    let (watch, mut pipeline, config) = watch.launch_with(config);
    (0..2).for_each(|number| begin(&mut pipeline, number, 4, &config));
    watch.wait_for(1, own[1]);
    let error = pipeline.finish().expect_err("a rank hangs").to_string();
    assert!(error.starts_with("step 1: rank 0: no rank has moved for 3.0 s"), "{error}");
    let lost = pipeline.step_batch(numbered(2, &config), RATE).expect_err("a rank is lost").to_string();
    assert!(lost.contains("rank 0 is lost"), "{lost}");
    watch.release();
}

/// Rank 0 fails in the first batch, and rank 1 hangs in the second one, which it has begun.
#[test]
fn a_rank_that_hangs_in_the_next_batch_is_reported_with_the_failure() {
    let own = actions(&launch("1f1b", 2, &config()));
    let watch = Watch { panics: Some((0, own[0] - 1)), waits: Some((1, own[1])), ..Watch::default() };
    let config = PipelineConfig { deadline: Duration::from_secs(3), ..config() };
    let (watch, mut pipeline, config) = watch.launch_with(config);
    (0..2).for_each(|number| begin(&mut pipeline, number, 4, &config));
    let error = pipeline.finish().expect_err("a rank panics").to_string();
    assert!(error.contains("it has to fail"), "{error}");
    let failure = pipeline.step_failure().expect("the step failed");
    let lost = failure.lost.as_ref().expect("rank 1 does not stop");
    assert_eq!((lost.rank.get(), failure.error.rank.get()), (1, 0));
    assert!(failure.to_string().contains("a rank did not stop in the next step"), "{failure}");
    let next = pipeline.step_batch(numbered(2, &config), RATE).expect_err("a rank is lost").to_string();
    assert!(next.contains("rank 1 is lost"), "{next}");
    watch.release();
}

#[test]
fn a_pipeline_that_is_dropped_stops_its_ranks() {
    let own = actions(&launch("1f1b", 2, &config()));
    for (begun, waits) in [(1, None), (2, None), (2, Some((0, 0))), (2, Some((1, own[1])))] {
        let config = PipelineConfig { deadline: Duration::from_secs(3), ..config() };
        let (watch, mut pipeline, config) = Watch { waits, ..Watch::default() }.launch_with(config);
        (0..begun).for_each(|number| begin(&mut pipeline, number, 4, &config));
        if let Some((rank, action)) = waits {
            watch.wait_for(rank as usize, action);
        }
        let start = Instant::now();
        drop(pipeline);
        let took = start.elapsed();
        assert!(took < Duration::from_secs(8), "{took:?}: {begun} batches, {waits:?}");
        watch.release();
    }
}

/// Each rank is as if it were a process. The rank of the process that drops its pipeline waits for a message, and
/// no other rank wakes it.
#[test]
fn a_process_that_drops_its_pipeline_does_not_wait_for_the_deadline() {
    let watch = Arc::new(Watch { waits: Some((0, 0)), ..Watch::default() });
    let config = PipelineConfig { hook: Some(watch.clone()), deadline: Duration::from_secs(60), ..config() };
    let [first, second] = <[World; 2]>::try_from(World::local(2).apart()).ok().expect("two ranks");
    std::thread::scope(|scope| {
        let other = scope.spawn(|| {
            let mut pipeline = launch_in(first, "1f1b", &config);
            begin(&mut pipeline, 0, 1, &config);
            pipeline.finish().expect_err("the other process does not continue").to_string()
        });
        let mut pipeline = launch_in(second, "1f1b", &config);
        begin(&mut pipeline, 0, 1, &config);
        watch.wait_for(1, 0);
        // The rank sleeps by then.
        std::thread::sleep(Duration::from_millis(200));
        let start = Instant::now();
        drop(pipeline);
        let elapsed = start.elapsed();
        watch.release();
        assert!(elapsed < Duration::from_secs(8), "{elapsed:?}");
        let error = other.join().expect("no panic");
        assert!(error.contains("its pipeline was dropped"), "{error}");
    });
}

#[test]
fn an_update_that_fails_while_another_rank_is_in_the_next_step_ends_the_training() {
    let own = actions(&launch("1f1b", 2, &config()));
    let (updated, next_has_begun) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicBool::new(false)));
    let (updates, begun) = (updated.clone(), next_has_begun.clone());
    let optimizer = descent(move || {
        if std::thread::current().name() == Some("rank-0") {
            wait_until(|| begun.load(Ordering::SeqCst));
            panic!("out of cheese");
        }
        updates.fetch_add(1, Ordering::SeqCst);
    });
    let config = PipelineConfig { optimizer: Some(optimizer), ..config() };
    let (watch, mut pipeline, config) = Watch::default().launch_with(config);
    (0..2).for_each(|number| begin(&mut pipeline, number, 1, &config));
    watch.wait_for(1, own[1]);
    next_has_begun.store(true, Ordering::SeqCst);
    let error = pipeline.finish().expect_err("the optimizer panics").to_string();
    assert!(error.starts_with("step 1: rank 0, stage 0, update"), "{error}");
    let next = pipeline.step_batch(numbered(2, &config), RATE).expect_err("rank 1 has updated");
    let PipelineError::Diverged { step, first } = next else { panic!("{next}") };
    assert_eq!((step.get(), first.to_string()), (1, error), "the first failure is named");
    drop(pipeline);
    // The stage has four layers with two parameters each.
    assert_eq!(updated.load(Ordering::SeqCst), 8, "only the first step has updated");
}

/// Rank 0 sends numbers that are not finite in the first computation of one batch.
struct Flip {
    forwards: AtomicU32,
    at: u32,
}

impl ActionHook for Flip {
    fn forward(&self, run: &mut ForwardRun<'_>) -> Result<(), StageError> {
        run.run_all()?;
        if run.rank().get() == 0 && self.forwards.fetch_add(1, Ordering::SeqCst) == self.at {
            let values = unpack::<Tensor<2>>(run.values().clone()).expect("one output");
            run.set_values(&pack(values.mul_scalar(f32::NAN)));
        }
        Ok(())
    }
}

#[test]
fn a_batch_that_waits_follows_a_step_that_is_repeated() {
    let run = |at: u32| {
        let flip = Arc::new(Flip { forwards: AtomicU32::new(0), at });
        let config = PipelineConfig { verify: Verify::OnSuspicion, hook: Some(flip), ..config() };
        let mut pipeline = launch("1f1b", 2, &config);
        begin(&mut pipeline, 0, 1, &config);
        let mut repeated = Vec::new();
        let mut results = Vec::new();
        for number in 1..=4 {
            if number < 4 {
                begin(&mut pipeline, number, 1, &config);
            }
            let summary = pipeline.finish().expect("a step");
            if summary.verification.is_some() {
                repeated.push(summary.step.get());
            }
            results.push(result_of(&summary));
        }
        (repeated, results, parameters(&mut pipeline))
    };
    let (none, results, expected) = run(u32::MAX);
    assert!(none.is_empty());
    // The second step.
    assert_eq!(run(MICROBATCHES + 1), (vec![2], results, expected));
}
