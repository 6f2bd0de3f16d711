//! Failures of a rank while others of its tensor group wait for it in the middle of a stage.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use pipewright::failure::Cause;
use pipewright::pipeline::{Pipeline, PipelineConfig, PipelineError};

use super::model::{Fault, Moment, Sizes, config_of, launch, sizes, take_step, take_steps, try_launch};

/// The moment of the fault: on the second tensor rank of stage 1, at microbatch 3.
fn moment(is_backward: bool) -> Moment {
    Moment { stage: 1, microbatch: 3, rank: 1, is_backward }
}

/// Launches a pipeline that calls `fault` once, at this moment.
fn faulty(
    schedule: &str,
    sizes: Sizes,
    (deadline, at): (Duration, Moment),
    fault: impl Fn() + Send + Sync + 'static,
) -> Pipeline {
    let armed = AtomicBool::new(true);
    let fault: Fault = Arc::new(move |moment| {
        if moment == at && armed.swap(false, Ordering::SeqCst) {
            fault();
        }
        0.0
    });
    let config = PipelineConfig { deadline, ..config_of(sizes) };
    try_launch(schedule, sizes, &config, Some(fault)).expect("the pipeline starts")
}

fn check_panic(schedule: &str, is_backward: bool, action: &str) {
    let sizes = sizes(2, 1, 2);
    let start = Instant::now();
    let place = (Duration::from_secs(60), moment(is_backward));
    let mut pipeline = faulty(schedule, sizes, place, || panic!("out of cheese"));
    let error = take_step(&mut pipeline, 0).expect_err("a rank panics").to_string();
    let expected =
        format!("rank 3, stage 1, microbatch 3, action {action}: the stage panicked: out of cheese");
    assert!(error.ends_with(&expected), "{error}");
    assert!(start.elapsed() < Duration::from_secs(50), "the other ranks are woken");
    let expected = take_steps(&mut launch(schedule, sizes), 0..2);
    assert_eq!(take_steps(&mut pipeline, 0..2), expected, "as if nothing had failed");
}

#[test]
fn a_rank_that_panics_is_reported_and_the_next_step_is_clean() {
    check_panic("1f1b", false, "1F3");
}

#[test]
fn a_rank_that_panics_in_a_backward_is_reported_and_the_next_step_is_clean() {
    check_panic("1f1b", true, "1B3");
    check_panic("zb-h1", true, "1I3");
}

fn check_stuck(is_backward: bool, action: &str) {
    let (stays, stayed) = channel::<()>();
    let stayed = Mutex::new(stayed);
    // The rank is stuck until the test drops the sender.
    let stuck = move || {
        let _ = stayed.lock().expect("no panic").recv_timeout(Duration::from_secs(60));
    };
    let place = (Duration::from_secs(2), moment(is_backward));
    let mut pipeline = faulty("1f1b", sizes(2, 1, 2), place, stuck);
    let error = take_step(&mut pipeline, 0).expect_err("a rank is stuck");
    let PipelineError::Step(error) = error else { panic!("{error}") };
    let Cause::Deadline { report, .. } = &error.cause else { panic!("{error}") };
    let line = report.lines().find(|line| line.starts_with("  rank 2: ")).expect("a line for each rank");
    let waits = format!("is at {action}, waits for its tensors for exchange ");
    assert!(line.contains(&waits) && line.ends_with(" from rank 3"), "{report}");
    drop(stays);
}

#[test]
fn a_rank_that_is_stuck_ends_the_step_at_the_deadline() {
    check_stuck(false, "1F3");
}

#[test]
fn a_rank_that_is_stuck_in_a_backward_ends_the_step_at_the_deadline() {
    check_stuck(true, "1B3");
}
