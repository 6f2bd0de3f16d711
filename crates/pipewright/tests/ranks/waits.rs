//! Programs that wait for their sends: they have the bits of programs that do not, and a message that never
//! leaves is named.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use pipewright::pipeline::{Pipeline, PipelineConfig, SeededPipeline};
use pipewright::transport::World;
use pipewright_schedule::lower::Messages;
use pipewright_schedule::{Level, LowerConfig, ScheduleSpec, ValidatedProgram, generate, lower, validate};

use crate::support::{Step, batch, brought, config, program, seeds, stage};

/// Returns a program whose ranks have at most `budget` sends in flight.
fn waiting(schedule: &str, ranks: u32, microbatches: u32, budget: u32) -> ValidatedProgram {
    let spec = ScheduleSpec { ranks, microbatches, ..ScheduleSpec::default() };
    let communicate = Messages::Waited { defer_recv: false, budget: NonZeroU32::new(budget) };
    let config = LowerConfig { communicate: Some(communicate), ..LowerConfig::from(Level::Full) };
    let program = lower(&generate(schedule, &spec).expect("a schedule"), &config).expect("it lowers");
    validate(program, Level::Full).expect("it is sound")
}

fn seeded(program: ValidatedProgram, seed: u64) -> Vec<Step> {
    let (stages, microbatches) = (program.placement().stages(), program.microbatches());
    let mut pipeline =
        SeededPipeline::new(program, &config(), seed, |index| stage(index, stages)).expect("it starts");
    let step = |step| {
        let report = pipeline.step_batch(brought(step, microbatches), 1e-2).expect("a step");
        (report.losses, report.gradient_norm)
    };
    (0..2).map(step).collect()
}

#[test]
fn waits_for_sends_change_no_bit() {
    for (schedule, ranks) in [("1f1b", 4), ("interleaved1f1b", 2), ("zbvzerobubble", 2)] {
        let expected = seeded(program(schedule, ranks, 4), 0);
        for budget in [1, 2] {
            for seed in seeds(20) {
                let found = seeded(waiting(schedule, ranks, 4, budget), seed);
                assert_eq!(found, expected, "{schedule}, at most {budget} in flight, seed {seed}");
            }
        }
    }
}

#[test]
fn threads_do_not_wait_for_what_they_move() {
    let mut pipeline =
        Pipeline::launch(waiting("gpipe", 2, 4, 1), World::local(2), &config(), |index| stage(index, 2))
            .expect("it starts");
    let summary = pipeline.step(batch(0, 4), batch(100, 4), 1e-2).expect("a step");
    assert_eq!(summary.sends_in_flight, [0, 0]);
}

#[test]
fn a_report_names_the_send_that_a_rank_waits_for() {
    let (world, in_flight) = World::controlled(2);
    let delivers = Arc::new(AtomicBool::new(true));
    let goes_on = delivers.clone();
    let delivery = thread::spawn(move || {
        while goes_on.load(Ordering::Relaxed) {
            in_flight.release(0);
            thread::yield_now();
        }
    });
    let config = PipelineConfig { deadline: Duration::from_secs(3), ..config() };
    let mut pipeline = Pipeline::launch(waiting("gpipe", 2, 2, 1), world, &config, |index| stage(index, 2))
        .expect("it starts");
    delivers.store(false, Ordering::Relaxed);
    delivery.join().expect("it does not panic");
    let error = pipeline.step(batch(0, 2), batch(100, 2), 1e-2).expect_err("no message leaves").to_string();
    let expected = [
        "is at 0WAIT_SEND_F0, waits for rank 1 to take the activations of microbatch 0 for stage 1",
        "waits for the activations of microbatch 0 for stage 1 from rank 0",
    ];
    for line in expected {
        assert!(error.contains(line), "`{line}` in: {error}");
    }
}
