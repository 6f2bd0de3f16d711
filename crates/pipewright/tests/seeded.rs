//! A thousand interleavings on one thread: the result never changes, and what goes wrong is always told.

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use pipewright::batch::Batch;
use pipewright::driver::SeededPipeline;
use pipewright::failure::{Cause, StepError};
use pipewright::hook::ActionHook;
use pipewright::pipeline::{PipelineConfig, PipelineError};
use pipewright_schedule::generate::catalogue;
use pipewright_schedule::{Action, Rank, ValidatedProgram};
use support::{Step, batch, config, program, split, stage};

fn pipeline(program: ValidatedProgram, seed: u64) -> SeededPipeline {
    let stages = program.placement().stages();
    SeededPipeline::new(program, &config(), seed, |index| stage(index, stages)).expect("the pipeline starts")
}

fn step(pipeline: &mut SeededPipeline, step: u64, microbatches: u32) -> Result<Step, PipelineError> {
    let inputs = split(batch(step, microbatches), microbatches);
    let targets = split(batch(100 + step, microbatches), microbatches);
    let report = pipeline.step_batch(Batch::new(inputs, targets), 1e-2)?;
    Ok((report.losses, report.gradient_norm))
}

fn check(schedule: &str, ranks: u32, microbatches: u32, seeds: std::ops::Range<u64>) {
    let run = |seed| {
        let mut pipeline = pipeline(program(schedule, ranks, microbatches), seed);
        [0, 1].map(|number| step(&mut pipeline, number, microbatches).expect("a step"))
    };
    let expected = run(seeds.start);
    for seed in seeds {
        assert_eq!(run(seed), expected, "{schedule} on {ranks} ranks, seed {seed}");
    }
}

#[test]
fn every_interleaving_of_gpipe_gives_the_same_bits() {
    check("gpipe", 2, 3, 0..200);
    check("gpipe", 4, 4, 0..100);
}

#[test]
fn every_interleaving_of_1f1b_gives_the_same_bits() {
    check("1f1b", 2, 4, 0..200);
    check("1f1b", 4, 5, 0..200);
    check("1f1b", 8, 8, 0..20);
}

#[test]
fn every_interleaving_of_every_schedule_gives_the_same_bits() {
    for generator in catalogue().iter().filter(|generator| generator.name != "forwardonly") {
        check(generator.name, 2, 4, 0..100);
    }
    check("zbvzerobubble", 4, 8, 0..20);
    check("v-half", 4, 8, 0..20);
}

/// Panics before its rank does the given one of all actions, counted over both ranks as they come.
struct PanicsAt {
    place: usize,
    seen: AtomicUsize,
}

impl ActionHook for PanicsAt {
    fn before(&self, _rank: Rank, action: Action) {
        let seen = self.seen.fetch_add(1, Ordering::Relaxed);
        assert!(seen != self.place, "injected before {action}");
    }
}

#[test]
fn a_panic_at_any_action_is_told_and_the_next_step_is_clean() {
    let program = || program("zbvzerobubble", 2, 4);
    let actions: usize = [0, 1].map(|rank| program().row(Rank::new(rank)).len()).iter().sum();
    let expected = step(&mut pipeline(program(), 0), 0, 4).expect("a step");
    for place in 0..actions {
        let hook: Arc<dyn ActionHook> = Arc::new(PanicsAt { place, seen: AtomicUsize::new(0) });
        let config = PipelineConfig { hook: Some(hook), ..config() };
        let stages = program().placement().stages();
        let mut pipeline =
            SeededPipeline::new(program(), &config, place as u64, |index| stage(index, stages))
                .expect("the pipeline starts");
        let error = step(&mut pipeline, 0, 4).expect_err("it panics");
        let PipelineError::Step(StepError { cause: Cause::Panic { message }, action: Some(action), .. }) =
            &error
        else {
            panic!("{error}")
        };
        assert_eq!(*message, format!("injected before {action}"));
        assert_eq!(step(&mut pipeline, 0, 4).expect("the panic is over"), expected, "action {place}");
    }
}

#[test]
fn a_lost_message_is_told_and_the_next_step_is_clean() {
    let expected = step(&mut pipeline(program("1f1b", 2, 4), 0), 0, 4).expect("a step");
    // 4 activations, 4 gradients, 2 lists of shared parameters, 2 parts of the norm.
    for lost in 0..12 {
        let mut pipeline = pipeline(program("1f1b", 2, 4), lost as u64);
        pipeline.lose_message(lost);
        let error = step(&mut pipeline, 0, 4).expect_err("a message is missing");
        let PipelineError::Step(StepError { cause: Cause::Deadline { report, .. }, .. }) = &error else {
            panic!("{error}")
        };
        assert!(report.contains("rank 0: ") && report.contains("rank 1: "), "{report}");
        match step(&mut pipeline, 0, 4) {
            Ok(found) => assert_eq!(found, expected, "message {lost}"),
            // Without its peer's part of the norm a rank cannot update, and the peer has.
            Err(PipelineError::Diverged { step: 1 }) => assert!(lost >= 10, "message {lost}"),
            Err(error) => panic!("{error}"),
        }
    }
}
