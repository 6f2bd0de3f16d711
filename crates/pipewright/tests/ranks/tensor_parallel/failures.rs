//! Failures of a rank while others of its tensor group wait for it in the middle of a stage.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use pipewright::failure::Cause;
use pipewright::pipeline::{Pipeline, PipelineConfig, PipelineError};

use super::model::{Fault, Sizes, config_of, launch, sizes, take_step, take_steps, try_launch};

/// Launches a pipeline in which the second tensor rank of stage 1 calls `fault` once, at microbatch 3.
fn faulty(sizes: Sizes, deadline: Duration, fault: impl Fn() + Send + Sync + 'static) -> Pipeline {
    let armed = AtomicBool::new(true);
    let fault: Fault = Arc::new(move |context, rank| {
        let place = (context.stage().get(), context.microbatch().get(), rank);
        if place == (1, 3, 1) && armed.swap(false, Ordering::SeqCst) {
            fault();
        }
    });
    let config = PipelineConfig { deadline, ..config_of(sizes) };
    try_launch("1f1b", sizes, &config, Some(fault)).expect("the pipeline starts")
}

#[test]
fn a_rank_that_panics_is_reported_and_the_next_step_is_clean() {
    let sizes = sizes(2, 1, 2);
    let start = Instant::now();
    let mut pipeline = faulty(sizes, Duration::from_secs(60), || panic!("out of cheese"));
    let error = take_step(&mut pipeline, 0).expect_err("a rank panics").to_string();
    let expected = "rank 3, stage 1, microbatch 3, action 1F3: the stage panicked: out of cheese";
    assert!(error.ends_with(expected), "{error}");
    assert!(start.elapsed() < Duration::from_secs(50), "the other ranks are woken");
    let expected = take_steps(&mut launch("1f1b", sizes), 0..2);
    assert_eq!(take_steps(&mut pipeline, 0..2), expected, "as if nothing had failed");
}

#[test]
fn a_rank_that_is_stuck_ends_the_step_at_the_deadline() {
    let sizes = sizes(2, 1, 2);
    let stuck = || std::thread::sleep(Duration::from_secs(3));
    let mut pipeline = faulty(sizes, Duration::from_millis(500), stuck);
    let error = take_step(&mut pipeline, 0).expect_err("a rank is stuck");
    let PipelineError::Step(error) = error else { panic!("{error}") };
    let Cause::Deadline { report, .. } = &error.cause else { panic!("{error}") };
    let line = report.lines().find(|line| line.starts_with("  rank 2: ")).expect("a line for each rank");
    let waits = "is at 1F3, waits for its tensors for exchange ";
    assert!(line.contains(waits) && line.ends_with(" from rank 3"), "{report}");
}
