//! The closed forms of the papers for bubbles, peaks and makespans, and the summary that has these figures.

use pipewright_schedule::simulate::{logical, summarize, timed};
use pipewright_schedule::{Costs, Level, LowerConfig, ScheduleSpec, generate, lower};

use crate::{generated, with_hop};

/// Does the same as [`check_idle`] for the level `comms`, in which messages follow whole actions.
fn check_closed_form(name: &str, stages_per_rank: u32, bubble: f64, peak: u64) {
    check_idle(&LowerConfig::from(Level::Comms), name, stages_per_rank, bubble, peak);
}

/// Checks the bubble from barrier to barrier and the largest peak in activations, for 8 ranks and 32
/// microbatches.
fn check_idle(config: &LowerConfig, name: &str, stages_per_rank: u32, bubble: f64, peak: u64) {
    let stages_per_rank = Some(stages_per_rank);
    let spec = ScheduleSpec { ranks: 8, stages_per_rank, microbatches: 32, ..ScheduleSpec::default() };
    let schedule = generate(name, &spec).expect("a schedule");
    let program = lower(&schedule, config).expect("a program");
    let summary = summarize(&program, &Costs::default()).expect("it runs");
    assert!((summary.bubble_fraction - bubble).abs() < 1e-9, "{name}: {}", summary.bubble_fraction);
    assert_eq!(summary.peak_activations.iter().max(), Some(&peak), "{name}");
}

#[test]
fn closed_forms() {
    // A rank computes for 3 v m units; `idle` is the numerator.
    let bubble = |idle: f64, stages_per_rank: f64| idle / (3.0 * 32.0 * stages_per_rank + idle);
    // (p - 1) (F + B), as for all schedules that neither interleave nor split.
    check_closed_form("gpipe", 1, bubble(21.0, 1.0), 32);
    check_closed_form("1f1b", 1, bubble(21.0, 1.0), 8);
    // The same divided by v, through interleaving; the peak is 1.22 p stages of a quarter each.
    check_closed_form("interleaved1f1b", 4, bubble(21.0, 4.0), 39);
    // (p - 1) (F + I - W).
    check_closed_form("zb-h1", 1, bubble(7.0, 1.0), 8);
    check_closed_form("interleaved-zb-h1", 4, bubble(7.0, 4.0), 32);
    check_closed_form("zbvzerobubble", 2, bubble(7.0, 2.0), 16);
    // (p - 1) (FB + B - 3 W), as DualPipe's authors give it, where FB is the time that an overlap adds to the
    // critical path. They assume that F and B together take the time of B; here the next rank continues when
    // F ends. With both, the rank is idle for p - 1 units. The peak is one activation more than 2 p, because
    // the forward of an overlap starts before its backward ends.
    check_closed_form("dualpipev", 2, bubble(7.0, 2.0), 17);
    check_closed_form("v-half", 2, bubble(17.0, 2.0), 10);
}

#[test]
fn gradients_that_leave_early_save_the_weights_of_the_bubble() {
    let early = LowerConfig { send_early: true, ..LowerConfig::from(Level::Comms) };
    let check = |name, stages_per_rank: u32, idle: f64, peak| {
        let bubble = idle / (3.0 * 32.0 * f64::from(stages_per_rank) + idle);
        check_idle(&early, name, stages_per_rank, bubble, peak);
    };
    // (p - 1) (F + I), with the same peaks.
    check("gpipe", 1, 14.0, 32);
    check("1f1b", 1, 14.0, 8);
    check("interleaved1f1b", 4, 14.0, 39);
    // If the schedule already splits the backwards on its critical path, nothing changes.
    check("zb-h1", 1, 7.0, 8);
    check("zbvzerobubble", 2, 7.0, 16);
    check("dualpipev", 2, 7.0, 17);
}

#[test]
fn a_summary_is_json() {
    let summary = summarize(&generated("1f1b", 2, 2), &Costs::default()).expect("it runs");
    let json = serde_json::to_value(&summary).expect("JSON");
    assert_eq!(
        json,
        serde_json::json!({
            "makespan": 9.0,
            "steps": 10,
            "bubble_fraction": 1.0 - 6.0 / 9.0,
            "bubble_per_rank": [1.0 - 6.0 / 9.0, 1.0 - 6.0 / 9.0],
            // Rank 0 spans the whole step, and rank 1 computes without a gap.
            "span_bubble_fraction": (1.0 - 6.0 / 9.0) / 2.0,
            "exposed_comm_fraction": 0.0,
            "peak_activations": [2, 1],
        })
    );
}

/// Checks that a makespan is not below the critical path of one microbatch and the work of the others.
#[test]
fn makespans_are_bounded_below() {
    for hop in [0.0, 0.3] {
        for (ranks, microbatches) in [(1, 1), (2, 5), (4, 4), (5, 9)] {
            let program = generated("1f1b", ranks, microbatches);
            let run = timed(&program, &with_hop(hop)).expect("it runs");
            let (p, m) = (f64::from(ranks), f64::from(microbatches));
            let path = 3.0 * p + 2.0 * (p - 1.0) * hop + 3.0 * (m - 1.0);
            assert!(run.timeline().makespan() >= path - 1e-9, "{ranks} {microbatches} {hop}");
            assert!(logical(&program).is_ok());
        }
    }
}
