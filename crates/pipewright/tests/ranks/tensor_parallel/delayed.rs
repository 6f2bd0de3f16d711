//! Parameters that are delayed by one update: the batches of tensor ranks, and of replicas that hold experts together, overlap
//! with the bits of batches that do not.

use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use pipewright::pipeline::{Pipeline, PipelineConfig};

use super::expert_groups;
use super::model::{Fault, MICROBATCHES, Moment, Sizes, config_of, sizes, take_step, take_steps, try_launch};
use crate::support::{Step, brought};

const BATCHES: u64 = 5;

/// The number of batches that the test has begun.
type Begun = Arc<(Mutex<u64>, Condvar)>;

fn delayed(sizes: Sizes) -> PipelineConfig {
    PipelineConfig { delayed: true, deadline: Duration::from_secs(120), ..config_of(sizes) }
}

/// Launches a pipeline whose last stage waits in its first forward until the test has begun two batches, and calls `fault` at
/// each moment, with the number of its earlier forwards on its tensor rank.
fn waiting(
    schedule: &str,
    sizes: Sizes,
    begun: Begun,
    fault: impl Fn(Moment, usize) + Send + Sync + 'static,
) -> Pipeline {
    let forwards = Mutex::new(vec![0; sizes.tensor as usize]);
    let fault: Fault = Arc::new(move |moment| {
        if moment.stage == 1 && !moment.is_backward {
            let count = {
                let count = &mut forwards.lock().expect("no panic")[moment.rank as usize];
                *count += 1;
                *count - 1
            };
            if count == 0 {
                let (number, changed) = &*begun;
                let number = number.lock().expect("no panic");
                drop(changed.wait_while(number, |number| *number < 2).expect("no panic"));
            }
            fault(moment, count);
        }
        0.0
    });
    try_launch(schedule, sizes, &delayed(sizes), Some(fault)).expect("it starts")
}

/// Begins the batches, each during the one before. Returns their results, and which overlap.
fn overlapping(pipeline: &mut Pipeline, begun: &Begun) -> (Vec<Step>, Vec<bool>) {
    let begin = |pipeline: &mut Pipeline, number: u64| {
        pipeline.begin(brought(number, MICROBATCHES), 1e-2).expect("it begins");
        *begun.0.lock().expect("no panic") += 1;
        begun.1.notify_all();
    };
    begin(pipeline, 0);
    let results = (0..BATCHES).map(|number| {
        if number + 1 < BATCHES {
            begin(pipeline, number + 1);
        }
        let summary = pipeline.finish().expect("a batch");
        ((summary.losses, summary.gradient_norm), summary.overlaps)
    });
    results.unzip()
}

#[test]
fn overlapping_batches_of_tensor_ranks_keep_their_bits() {
    for (schedule, sizes) in [
        ("1f1b", sizes(2, 1, 2)),
        ("1f1b", sizes(2, 1, 3)),
        ("zb-h1", sizes(2, 2, 2)),
        ("v-min", sizes(2, 1, 2)),
    ] {
        let mut drained = try_launch(schedule, sizes, &delayed(sizes), None).expect("it starts");
        let expected = take_steps(&mut drained, 0..BATCHES);
        let begun = Begun::default();
        let (found, overlaps) = overlapping(&mut waiting(schedule, sizes, begun.clone(), |_, _| {}), &begun);
        assert_eq!(found, expected, "{schedule} {sizes:?}");
        assert!(overlaps[1], "{schedule} {sizes:?}: {overlaps:?}");
    }
}

/// The second batch fails on one tensor rank, in the middle of its forwards. The first batch counts.
#[test]
fn a_batch_that_fails_on_a_tensor_rank_leaves_the_batch_before_as_it_is() {
    let sizes = sizes(2, 1, 2);
    let begun = Begun::default();
    let mut pipeline = waiting("1f1b", sizes, begun.clone(), |moment, count| {
        assert!(moment.rank != 1 || count != MICROBATCHES as usize + 2, "out of cheese");
    });
    let mut plain = try_launch("1f1b", sizes, &delayed(sizes), None).expect("it starts");
    for number in 0..2 {
        pipeline.begin(brought(number, MICROBATCHES), 1e-2).expect("it begins");
    }
    *begun.0.lock().expect("no panic") = 2;
    begun.1.notify_all();
    let expected = take_step(&mut plain, 0).expect("a step");
    assert_eq!(pipeline.finish().expect("the first batch").losses, expected.losses);
    let error = pipeline.finish().expect_err("its forward panics").to_string();
    assert!(
        error.contains("stage 1, microbatch 2, action 1F2") && error.ends_with("out of cheese"),
        "{error}"
    );
    assert_eq!(take_steps(&mut pipeline, 5..8), take_steps(&mut plain, 5..8));
}

#[test]
fn overlapping_batches_with_experts_keep_their_bits() {
    let config = |experts| PipelineConfig { delayed: true, ..expert_groups::config(experts) };
    for schedule in ["1f1b", "zb-h1"] {
        let expected = take_steps(&mut expert_groups::launch(schedule, &config(1)), 0..BATCHES);
        for experts in [2, 4] {
            let mut pipeline = expert_groups::launch(schedule, &config(experts));
            let (found, _) = overlapping(&mut pipeline, &Begun::default());
            assert_eq!(found, expected, "{schedule}, {experts}");
        }
    }
}
