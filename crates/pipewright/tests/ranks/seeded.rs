//! Many interleavings on one thread: the result never changes, and every failure is reported.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use pipewright::batch::Batch;
use pipewright::failure::{Cause, StepError};
use pipewright::hook::ActionHook;
use pipewright::ids::WorldRank;
use pipewright::mesh::DataParallelMode;
use pipewright::pipeline::{PipelineConfig, PipelineError, SeededPipeline, StepSummary};
use pipewright::stage::Stage;
use pipewright_schedule::generate::catalogue;
use pipewright_schedule::{Action, Rank, StageIndex, ValidatedProgram};

use crate::support::{
    LAYERS, Mlp, Step, batch, brought, config, ending_in_loss, lose_each, program, seeds, split, stage,
};

fn pipeline(program: ValidatedProgram, seed: u64) -> SeededPipeline {
    let stages = program.placement().stages();
    SeededPipeline::new(program, &config(), seed, |index| stage(index, stages)).expect("the pipeline starts")
}

fn step(pipeline: &mut SeededPipeline, step: u64, microbatches: u32) -> Result<Step, PipelineError> {
    let report = pipeline.step_batch(brought(step, microbatches), 1e-2)?;
    Ok((report.losses, report.gradient_norm))
}

fn check(schedule: &str, ranks: u32, microbatches: u32, interleavings: u64) {
    let program = program(schedule, ranks, microbatches);
    let run = |seed| {
        let mut pipeline = pipeline(program.clone(), seed);
        [0, 1].map(|number| step(&mut pipeline, number, microbatches).expect("a step"))
    };
    let expected = run(0);
    for seed in seeds(interleavings) {
        assert_eq!(run(seed), expected, "{schedule} on {ranks} ranks, seed {seed}");
    }
}

#[test]
fn every_interleaving_of_gpipe_gives_the_same_bits() {
    check("gpipe", 2, 3, 200);
    check("gpipe", 4, 4, 100);
}

#[test]
fn every_interleaving_of_1f1b_gives_the_same_bits() {
    check("1f1b", 2, 4, 200);
    check("1f1b", 4, 5, 200);
    check("1f1b", 8, 8, 20);
}

#[test]
fn every_interleaving_of_every_schedule_gives_the_same_bits() {
    for generator in catalogue().iter().filter(|generator| generator.trains) {
        check(generator.name, 2, 4, 50);
    }
    check("zbvzerobubble", 4, 8, 20);
    check("v-half", 4, 8, 20);
}

/// Panics before the given action, counted over both ranks in the order of execution.
struct PanicsAt {
    place: usize,
    seen: AtomicUsize,
}

impl ActionHook for PanicsAt {
    fn before(&self, _rank: WorldRank, action: Action) {
        let seen = self.seen.fetch_add(1, Ordering::Relaxed);
        assert!(seen != self.place, "injected before {action}");
    }
}

/// Skips the given action, which is an error but not a panic.
struct LeavesOut {
    place: usize,
    seen: AtomicUsize,
}

impl ActionHook for LeavesOut {
    fn around(&self, _rank: WorldRank, _action: Action, run: &mut dyn FnMut()) {
        if self.seen.fetch_add(1, Ordering::Relaxed) != self.place {
            run();
        }
    }
}

/// Checks that a fault at each action in turn is reported with its action and does not affect the next step.
fn check_faults(
    schedule: &str,
    fault: fn(usize) -> Arc<dyn ActionHook>,
    is_told: fn(&Cause, Action) -> bool,
) {
    let program = || program(schedule, 2, 4);
    let actions: usize = [0, 1].map(|rank| program().row(Rank::new(rank)).len()).iter().sum();
    let expected = step(&mut pipeline(program(), 0), 0, 4).expect("a step");
    for place in 0..actions {
        let config = PipelineConfig { hook: Some(fault(place)), ..config() };
        let stages = program().placement().stages();
        let mut pipeline =
            SeededPipeline::new(program(), &config, place as u64, |index| stage(index, stages))
                .expect("the pipeline starts");
        let error = step(&mut pipeline, 0, 4).expect_err("the fault strikes");
        let PipelineError::Step(StepError { cause, action: Some(action), .. }) = &error else {
            panic!("{error}")
        };
        assert!(is_told(cause, *action), "{schedule}, action {place}: {error}");
        assert_eq!(step(&mut pipeline, 0, 4).expect("it is over"), expected, "{schedule}, action {place}");
    }
}

#[test]
fn a_panic_at_any_action_is_reported_and_the_next_step_is_clean() {
    check_faults(
        "zbvzerobubble",
        |place| Arc::new(PanicsAt { place, seen: AtomicUsize::new(0) }),
        |cause, action| matches!(cause, Cause::Panic { message } if *message == format!("injected before {action}")),
    );
}

#[test]
fn an_error_at_any_action_is_reported_and_the_next_step_is_clean() {
    for schedule in ["1f1b", "zbvzerobubble", "dualpipev"] {
        check_faults(
            schedule,
            |place| Arc::new(LeavesOut { place, seen: AtomicUsize::new(0) }),
            |cause, at| cause.to_string().starts_with(&format!("the hook did not run {at}: ")),
        );
    }
}

#[test]
fn a_lost_message_is_reported_and_the_next_step_is_clean() {
    let expected = step(&mut pipeline(program("1f1b", 2, 4), 0), 0, 4).expect("a step");
    // 4 activations, 4 gradients, 2 parts of the norm.
    for lost in 0..10 {
        let mut pipeline = pipeline(program("1f1b", 2, 4), lost as u64);
        pipeline.lose_message(lost);
        let error = step(&mut pipeline, 0, 4).expect_err("a message is missing");
        let PipelineError::Step(StepError { cause: Cause::Deadline { report, .. }, .. }) = &error else {
            panic!("{error}")
        };
        assert!(report.contains("rank 0: ") && report.contains("rank 1: "), "{report}");
        match step(&mut pipeline, 0, 4) {
            Ok(found) => assert_eq!(found, expected, "message {lost}"),
            // A rank cannot update without the norm, which its peer already has.
            Err(PipelineError::Diverged { step, .. }) if step.get() == 1 => {
                assert!(lost >= 8, "message {lost}");
            }
            Err(error) => panic!("{error}"),
        }
    }
}

#[test]
fn a_report_names_what_every_rank_waits_for_after_any_loss() {
    let launch = || {
        let config = PipelineConfig { data_parallel: 2, ..config() };
        SeededPipeline::new(program("1f1b", 2, 2), &config, 0, |index| stage(index, 2)).expect("it starts")
    };
    let lost = lose_each(launch, || Batch::new(split(batch(0, 4), 4), split(batch(100, 4), 4)));
    for expected in [
        "the activations of microbatch 1 for stage 1",
        "the gradients of microbatch 1 for stage 0",
        "its part of the gradients of stage 1",
        "its sum of gradients of stage 0",
        "its squares of gradients",
        "whether its replica is ready to update",
    ] {
        assert!(lost.contains(expected), "{expected} in {lost}");
    }
}

#[test]
fn a_message_lost_in_any_phase_after_the_program_is_reported() {
    let lost_in = |mode, expected: &[&str]| {
        let launch = || {
            let config = PipelineConfig { data_parallel: 3, data_parallel_mode: mode, ..config() };
            let program = program("1f1b", 3, 3);
            SeededPipeline::new(program, &config, 0, |index| stage(index, 3)).expect("it starts")
        };
        let lost = lose_each(launch, || Batch::new(split(batch(0, 9), 9), split(batch(100, 9), 9)));
        for tag in expected {
            assert!(lost.contains(tag), "{tag} in {lost}");
        }
        // Trees have a message for each rank but the root: of 9 ranks in 3 pipelines, and of 3 pipelines on
        // their own.
        let count = |tag| lost.lines().filter(|&line| line == tag).count();
        // Parameters are compared at launch, so a step sends no lists of them.
        assert_eq!(count("the list of its parameters"), 0);
        assert_eq!(count("the shared parameters of all ranks"), 0);
        assert_eq!(count("its squares of gradients"), 2);
        assert_eq!(count("the gradient norm of all ranks"), 8);
    };
    lost_in(DataParallelMode::Replicated, &["whether its replica is ready to update"]);
    lost_in(DataParallelMode::Sharded, &["its part of the squares of gradients"]);
}

/// Returns the model cut as evenly as it goes; stages beyond the layers have no layers.
fn uneven(index: StageIndex, stages: u32) -> Result<Stage, std::convert::Infallible> {
    let first = |stage: u32| stage as usize * LAYERS / stages as usize;
    let module = Mlp::new(first(index.get()), first(index.get() + 1) - first(index.get()));
    ending_in_loss(index.get() + 1 == stages, module)
}

#[test]
fn any_number_of_ranks_adds_squares_in_the_order_of_their_paths() {
    let run = |ranks: u32| {
        let program = program("1f1b", ranks, 9);
        let mut pipeline =
            SeededPipeline::new(program, &config(), u64::from(ranks), |index| uneven(index, ranks))
                .expect("it starts");
        [0, 1].map(|number| step(&mut pipeline, number, 9).expect("a step"))
    };
    // One rank adds all squares itself.
    let expected = run(1);
    for ranks in 2..=9 {
        assert_eq!(run(ranks), expected, "{ranks} ranks");
    }
}

fn numbered(number: u64, microbatches: u32) -> Batch {
    let part = |seed| split(batch(seed, microbatches), microbatches);
    Batch::new(part(number), part(100 + number))
}

/// Takes two steps, the second one begun during the first. Returns the results until the first failure.
fn both(pipeline: &mut SeededPipeline) -> Vec<Result<Step, PipelineError>> {
    let results = pipeline.step_both([0, 1].map(|number| numbered(number, 4)), 1e-2).expect("they begin");
    let result = |result: Result<StepSummary, _>| result.map(|one| (one.losses, one.gradient_norm));
    results.into_iter().map(result).collect()
}

/// The bits of two steps that each begin after the one before.
fn one_by_one(schedule: &str, config: &PipelineConfig) -> [Step; 2] {
    let mut pipeline = seeded(schedule, config, 0);
    [0, 1].map(|number| step(&mut pipeline, number, 4).expect("a step"))
}

fn seeded(schedule: &str, config: &PipelineConfig, seed: u64) -> SeededPipeline {
    let program = program(schedule, 2, 4);
    let stages = program.placement().stages();
    SeededPipeline::new(program, config, seed, |index| stage(index, stages)).expect("it starts")
}

#[test]
fn every_interleaving_of_two_steps_gives_the_same_bits() {
    for schedule in ["gpipe", "1f1b", "zb-h1", "zbvzerobubble", "dualpipev"] {
        let expected = one_by_one(schedule, &config());
        for seed in seeds(50) {
            let results = both(&mut seeded(schedule, &config(), seed));
            let results: Vec<Step> = results.into_iter().map(|one| one.expect("a step")).collect();
            assert_eq!(results, expected, "{schedule}, seed {seed}");
        }
    }
}

/// A fault at any action of two steps, in any order of the ranks, belongs to the step of its action. The step
/// before it has its results, and the next step is clean.
#[test]
fn a_fault_in_either_of_two_steps_leaves_the_one_before() {
    for schedule in ["1f1b", "zbvzerobubble"] {
        let expected = one_by_one(schedule, &config());
        let program = program(schedule, 2, 4);
        let actions: usize = [0, 1].map(|rank| program.row(Rank::new(rank)).len()).iter().sum();
        let mut failed = [0, 0];
        for place in 0..2 * actions {
            let hook: Arc<dyn ActionHook> = Arc::new(PanicsAt { place, seen: AtomicUsize::new(0) });
            let mut pipeline =
                seeded(schedule, &PipelineConfig { hook: Some(hook), ..config() }, place as u64);
            let mut results = both(&mut pipeline);
            let error = results.pop().expect("a result").expect_err("the fault strikes").to_string();
            let done = results.len();
            failed[done] += 1;
            assert!(
                error.starts_with(&format!("step {}: ", done + 1)),
                "{schedule}, action {place}: {error}"
            );
            for (result, expected) in results.into_iter().zip(&expected) {
                assert_eq!(&result.expect("a step"), expected, "{schedule}, action {place}");
            }
            let again = step(&mut pipeline, done as u64, 4).expect("it is over");
            assert_eq!(again, expected[done], "{schedule}, action {place}");
        }
        assert!(failed.iter().all(|&count| count > 0), "{schedule}: {failed:?}");
    }
}

/// A message that is lost ends the step that it belongs to. A rank may have updated without its peer.
#[test]
fn a_message_that_is_lost_in_either_of_two_steps_ends_that_step() {
    let expected = one_by_one("1f1b", &config());
    let mut failed = [0, 0];
    for lost in 0..20 {
        for seed in seeds(10) {
            let mut pipeline = seeded("1f1b", &config(), seed);
            pipeline.lose_message(lost);
            let mut results = both(&mut pipeline);
            let error = results.pop().expect("a result").expect_err("a message is missing").to_string();
            let done = results.len();
            failed[done] += 1;
            assert!(error.starts_with(&format!("step {}: ", done + 1)), "message {lost}: {error}");
            match step(&mut pipeline, done as u64, 4) {
                Ok(result) => assert_eq!(result, expected[done], "message {lost}"),
                Err(PipelineError::Diverged { step, .. }) => assert_eq!(step.get(), done as u64 + 1),
                Err(error) => panic!("{error}"),
            }
        }
    }
    assert!(failed.iter().all(|&count| count > 0), "{failed:?}");
}
