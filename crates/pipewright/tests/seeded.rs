//! A thousand interleavings on one thread: the result never changes, and what goes wrong is always told.

mod support;

use pipewright::batch::Batch;
use pipewright::driver::SeededPipeline;
use pipewright::failure::{Cause, StepError};
use pipewright::pipeline::PipelineError;
use pipewright_schedule::ValidatedProgram;
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
fn a_lost_message_is_told_and_the_next_step_is_clean() {
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
            // Without its peer's part of the norm a rank cannot update, and the peer has.
            Err(PipelineError::Diverged { step: 1 }) => assert!(lost >= 8, "message {lost}"),
            Err(error) => panic!("{error}"),
        }
    }
}
