//! Failures after an update and before the gradient norm: the update is undone.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use burn::tensor::Tensor;
use pipewright::hook::{ActionHook, ForwardRun};
use pipewright::ids::{StepNumber, WorldRank};
use pipewright::optimizer::ParameterGradient;
use pipewright::pipeline::{Pipeline, PipelineConfig, SeededPipeline};
use pipewright::stage::StageError;
use pipewright::tensor::{pack, unpack};
use pipewright::verification::Verify;
use pipewright_schedule::{Action, Rank, StageIndex};

use super::{is_early, launch};
use crate::ahead::batches::{MICROBATCHES, RATE, StepResult, numbered, parameters, result_of};
use crate::ahead::watch::wait_until;
use crate::support::{Late, config, descent, program, stage};

/// Lets rank 0 wait in the last action of its first step until rank 1 has updated, and then fail or hang.
struct Waits {
    row: u32,
    begun: AtomicU32,
    updated: Arc<AtomicBool>,
    then: Then,
    released: AtomicBool,
}

#[derive(Clone, Copy, PartialEq)]
enum Then {
    Panics,
    Hangs,
}

impl ActionHook for Waits {
    fn begin_step(&self, _rank: WorldRank, _step: StepNumber) {}

    fn before(&self, rank: WorldRank, _action: Action) {
        if rank.get() != 0 || self.begun.fetch_add(1, Ordering::SeqCst) + 1 != self.row {
            return;
        }
        wait_until(|| self.updated.load(Ordering::SeqCst));
        match self.then {
            Then::Panics => panic!("it has to fail"),
            Then::Hangs => wait_until(|| self.released.load(Ordering::SeqCst)),
        }
    }
}

/// Launches two ranks whose first step fails after rank 1 has updated early.
fn launch_that(then: Then, deadline: Duration) -> (Arc<Waits>, Pipeline, PipelineConfig) {
    let program = program("1f1b", 2, MICROBATCHES);
    let updated = Arc::new(AtomicBool::new(false));
    let updates = updated.clone();
    let optimizer = descent(move || {
        if std::thread::current().name() == Some("rank-1") {
            updates.store(true, Ordering::SeqCst);
        }
    });
    let hook = Arc::new(Waits {
        row: program.row(Rank::new(0)).len() as u32,
        begun: AtomicU32::new(0),
        updated,
        then,
        released: AtomicBool::new(false),
    });
    let config = PipelineConfig { optimizer: Some(optimizer), post_validation: true, deadline, ..config() };
    let pipeline = launch(program, &PipelineConfig { hook: Some(hook.clone()), ..config.clone() });
    (hook, pipeline, config)
}

fn step(pipeline: &mut Pipeline, number: u64) -> StepResult {
    result_of(&pipeline.step_batch(numbered(number, &config()), RATE).expect("a step"))
}

#[test]
fn a_failure_between_an_update_and_the_norm_undoes_the_update() {
    let (_, mut pipeline, early) = launch_that(Then::Panics, Duration::from_secs(20));
    let mut fresh =
        launch(program("1f1b", 2, MICROBATCHES), &PipelineConfig { post_validation: false, ..early });
    let error = pipeline.step_batch(numbered(9, &config()), RATE).expect_err("rank 0 panics").to_string();
    assert!(error.starts_with("step 1: rank 0") && error.contains("it has to fail"), "{error}");
    assert_eq!(parameters(&mut pipeline), parameters(&mut fresh), "the parameters from before");
    for number in 0..3 {
        let (count, losses, norm, scale, skipped) = step(&mut pipeline, number);
        // The step that failed counts.
        assert_eq!((count - 1, losses, norm, scale, skipped), step(&mut fresh, number));
    }
    assert_eq!(parameters(&mut pipeline), parameters(&mut fresh));
}

#[test]
fn a_rank_that_has_updated_waits_no_longer_than_the_deadline() {
    let (waits, mut pipeline, _) = launch_that(Then::Hangs, Duration::from_secs(3));
    let start = Instant::now();
    let error = pipeline.step_batch(numbered(0, &config()), RATE).expect_err("rank 0 hangs").to_string();
    assert!(error.contains("no rank has moved for 3.0 s"), "{error}");
    let took = start.elapsed();
    assert!(took < Duration::from_secs(8), "{took:?}");
    waits.released.store(true, Ordering::SeqCst);
}

/// A gradient of a step is not a number on the rank that ends last, or on the other one, which has updated.
/// The error and all later bits are those without early updates.
#[test]
fn a_gradient_that_is_not_finite_undoes_the_update() {
    let run = |post_validation, late, of_stage| {
        let calls = Arc::new(AtomicBool::new(true));
        let (ruins, stage) = (calls.clone(), StageIndex::new(of_stage));
        let gradient_hook = move |gradient: &mut ParameterGradient<'_>| {
            if ruins.load(Ordering::SeqCst) && gradient.stage() == stage {
                gradient.map(|flat: Tensor<1>| flat.mul_scalar(f32::NAN));
            }
        };
        let program = program("zb-h1", 2, MICROBATCHES);
        let hook = Arc::new(Late::new(&program, [1, 1], late));
        let config = PipelineConfig {
            post_validation,
            gradient_hook: Some(Arc::new(gradient_hook)),
            hook: Some(hook),
            ..config()
        };
        let mut pipeline = launch(program, &config);
        let error = pipeline.step_batch(numbered(9, &config), RATE).expect_err("not a number").to_string();
        calls.store(false, Ordering::SeqCst);
        let results: Vec<StepResult> = (0..3).map(|number| step(&mut pipeline, number)).collect();
        (error, results, parameters(&mut pipeline))
    };
    for (late, of_stage) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
        let expected = run(false, late, of_stage);
        assert!(expected.0.contains("gradient"), "{}", expected.0);
        assert_eq!(run(true, late, of_stage), expected, "rank {late} is late, stage {of_stage} is ruined");
    }
}

/// An early update whose optimizer panics is tried again after the norm, so the error is the same.
#[test]
fn an_optimizer_that_panics_is_reported_as_one_after_the_norm() {
    let run = |post_validation| {
        let optimizer = descent(|| {
            assert!(std::thread::current().name() != Some("rank-1"), "out of cheese");
        });
        let program = program("1f1b", 2, MICROBATCHES);
        let hook = Arc::new(Late::new(&program, [1, 1], 0));
        let config =
            PipelineConfig { optimizer: Some(optimizer), post_validation, hook: Some(hook), ..config() };
        let mut pipeline = launch(program, &config);
        let error = pipeline.step_batch(numbered(0, &config), RATE).expect_err("it panics").to_string();
        assert!(error.starts_with("step 1: rank 1, stage 1, update"), "{error}");
        error
    };
    assert_eq!(run(true), run(false));
}

/// Rank 0 sends numbers that are not finite in the first computation of one batch.
struct Flip {
    late: Late,
    forwards: AtomicU32,
    at: u32,
}

impl ActionHook for Flip {
    fn begin_step(&self, rank: WorldRank, step: StepNumber) {
        self.late.begin_step(rank, step);
    }

    fn before(&self, rank: WorldRank, action: Action) {
        self.late.before(rank, action);
    }

    fn forward(&self, run: &mut ForwardRun<'_>) -> Result<(), StageError> {
        run.run_all()?;
        if run.rank().get() == 0 && self.forwards.fetch_add(1, Ordering::SeqCst) == self.at {
            // So large that the gradient norm is a jump, and all numbers are finite.
            let values = unpack::<Tensor<2>>(run.values().clone()).expect("one output");
            run.set_values(&pack(values.mul_scalar(1e4)));
        }
        Ok(())
    }
}

#[test]
fn a_suspicious_step_is_computed_again_with_the_parameters_from_before() {
    let run = |post_validation, at| {
        let program = program("zb-h1", 2, MICROBATCHES);
        let late = Late::new(&program, [1, 1], 1);
        let hook = Arc::new(Flip { late, forwards: AtomicU32::new(0), at });
        let verify = Verify::OnSuspicion;
        let config =
            PipelineConfig { post_validation, verify, hook: Some(hook), clip_norm: None, ..config() };
        let mut pipeline = launch(program, &config);
        let mut repeated = Vec::new();
        let mut early = 0;
        let results: Vec<StepResult> = (0..24)
            .map(|number| {
                let summary = pipeline.step_batch(numbered(number, &config), RATE).expect("a step");
                repeated.extend(summary.verification.is_some().then_some(number));
                early += u32::from(is_early(&summary));
                result_of(&summary)
            })
            .collect();
        (repeated, results, parameters(&mut pipeline), early)
    };
    let (none, results, expected, _) = run(false, u32::MAX);
    assert!(none.is_empty());
    let (repeated, found, after, early) = run(true, MICROBATCHES * 20 + 1);
    assert_eq!((repeated, early > 0), (vec![20], true));
    assert_eq!((found, after), (results, expected));
}

/// A step that loses a message fails, and leaves the parameters and the state from before.
#[test]
fn a_message_that_is_lost_undoes_early_updates() {
    let launch = |post_validation, seed| {
        let config = PipelineConfig { post_validation, clip_norm: None, ..config() };
        SeededPipeline::new(program("1f1b", 2, MICROBATCHES), &config, seed, |index| stage(index, 2))
            .expect("it starts")
    };
    let take = |pipeline: &mut SeededPipeline, number| {
        pipeline.step_batch(numbered(number, &config()), RATE).map(|summary| result_of(&summary))
    };
    let mut whole = launch(false, 0);
    let expected: Vec<StepResult> = (0..2).map(|number| take(&mut whole, number).expect("a step")).collect();
    // Activations, gradients, and two parts of the norm. If the last one is lost, a rank has updated.
    let messages = 2 * MICROBATCHES + 2;
    for seed in 0..20 {
        for lost in 0..messages as usize - 1 {
            let mut pipeline = launch(true, seed);
            pipeline.lose_message(lost);
            take(&mut pipeline, 9).expect_err("a message is missing");
            let found = (0..2).map(|number| take(&mut pipeline, number).expect("a step"));
            let without_number = |(_, losses, norm, scale, skipped)| (losses, norm, scale, skipped);
            let found: Vec<_> = found.map(without_number).collect();
            let expected: Vec<_> = expected.iter().cloned().map(without_number).collect();
            assert_eq!(found, expected, "seed {seed}, message {lost}");
        }
    }
}
