//! The share of a run's time that was spent on steps that count.
//!
//! The time is that of the run's processes, with checkpoints and evaluations, and the time that each restart
//! took: from the end of the last step that counts to the beginning of the next one, which includes the steps
//! that were computed in vain. The time between a stop by a person and the resumption is not the run's.

use serde::Serialize;

use crate::run_record::{RunEvent, StepMetrics};

/// The uses of a run's time.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct Goodput {
    /// The share of the time that was spent on steps that count, from 0 to 1.
    pub(super) share: f64,
    /// The seconds that restarts took.
    pub(super) restarts_s: f64,
    /// The number of restarts after a fault.
    pub(super) restarts: usize,
}

impl Goodput {
    /// Returns the goodput of a run; `None` if its metrics lack times.
    pub(super) fn of(steps: &[StepMetrics], events: &[RunEvent]) -> Option<Self> {
        let elapsed = steps.last()?.elapsed_s?;
        let useful = steps.iter().map(|step| step.step_ms).sum::<Option<f64>>()? / 1e3;
        let mut lost = 0.0;
        let mut restarts = 0;
        let mut counted = None;
        for event in events {
            let RunEvent::Restart(restart) = event else { continue };
            restarts += usize::from(restart.failed_step.is_some());
            // Several restarts after the same step are one pause.
            if counted.replace(restart.step) == Some(restart.step) {
                continue;
            }
            lost += pause_after(steps, restart.step).unwrap_or(0.0);
        }
        let all = elapsed + lost;
        (all > 0.0).then(|| Self { share: (useful / all).min(1.0), restarts_s: lost, restarts })
    }
}

/// Returns the seconds between the end of a step and the beginning of the next one; `None` if one of them is
/// not in the metrics, or has no time.
fn pause_after(steps: &[StepMetrics], step: u64) -> Option<f64> {
    let next = steps.iter().position(|metrics| metrics.step > step)?;
    let (before, after) = (&steps[next.checked_sub(1)?], &steps[next]);
    let pause = after.unix_s? - after.step_ms? / 1e3 - before.unix_s?;
    // Clocks of two machines may differ.
    Some(pause.max(0.0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fault::Fault;
    use crate::recovery::Restart;

    /// A step of one second that ends at a time.
    fn step(number: u64, elapsed_s: f64, unix_s: f64) -> StepMetrics {
        let line =
            format!("{{\"step\":{number},\"step_ms\":1000,\"elapsed_s\":{elapsed_s},\"unix_s\":{unix_s}}}");
        serde_json::from_str(&line).expect("metrics")
    }

    fn restart_after(step: u64) -> RunEvent {
        let fault = Fault {
            step: step + 1,
            rank: Some(1),
            cause: "lost".to_owned(),
            summary: "lost".to_owned(),
            space: None,
            is_final: false,
        };
        RunEvent::Restart(Restart { step, ..Restart::after(&fault, 1, 3) })
    }

    fn check(steps: &[StepMetrics], events: &[RunEvent], expected: Option<(f64, f64, usize)>) {
        let found = Goodput::of(steps, events).map(|it| (it.share, it.restarts_s, it.restarts));
        assert_eq!(found, expected);
    }

    #[test]
    fn steps_that_count_are_useful() {
        // A checkpoint of two seconds.
        let steps = [step(1, 1.0, 101.0), step(2, 4.0, 104.0)];
        check(&steps, &[], Some((0.5, 0.0, 0)));
        // After the first step, a pause of six seconds until the second one begins.
        let steps = [step(1, 1.0, 101.0), step(2, 2.0, 108.0)];
        check(&steps, &[restart_after(1)], Some((0.25, 6.0, 1)));
        check(&steps, &[restart_after(1), restart_after(1)], Some((0.25, 6.0, 2)));
        // A stop by a person is no restart.
        check(&steps, &[], Some((1.0, 0.0, 0)));
    }

    #[test]
    fn times_may_be_missing() {
        check(&[], &[], None);
        let first = [step(1, 1.0, 101.0)];
        check(&first, &[restart_after(0)], Some((1.0, 0.0, 1)));
        // Nothing follows yet.
        check(&first, &[restart_after(1)], Some((1.0, 0.0, 1)));
        let without: StepMetrics = serde_json::from_str("{\"step\":1}").expect("metrics");
        check(&[without], &[], None);
    }
}
