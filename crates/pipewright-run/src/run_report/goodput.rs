//! The share of a run's time that was spent on steps that count.
//!
//! The time is that of the run's processes, with checkpoints and evaluations, and the time that restarts and
//! growths took: from the end of the last step that counts to the beginning of the next one, with the steps
//! that were computed in vain. The time between a stop by a person and the resumption does not count, unless
//! the stop comes between a restart and its first step.

use serde::Serialize;

use crate::run_record::{RunEvent, StepMetrics};

/// The parts of a run's time.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct Goodput {
    /// The share of the time that was spent on steps that count, from 0 to 1; `None` if the time of a restart
    /// or a growth is not known.
    pub(super) share: Option<f64>,
    /// The seconds that restarts and growths took; `None` if that is not known.
    pub(super) paused_s: Option<f64>,
    /// The number of restarts after a fault.
    pub(super) restarts: usize,
    /// The number of continuations on more processes.
    pub(super) growths: usize,
}

impl Goodput {
    /// Returns the goodput of a run; `None` if its metrics lack times.
    pub(super) fn of(steps: &[StepMetrics], events: &[RunEvent]) -> Option<Self> {
        let elapsed = steps.last()?.elapsed_s?;
        let useful = steps.iter().map(|step| step.step_ms).sum::<Option<f64>>()? / 1e3;
        let restarts = events.iter().filter_map(|event| match event {
            RunEvent::Restart(restart) => Some(restart),
            _ => None,
        });
        let (faults, growths): (Vec<_>, Vec<_>) =
            restarts.clone().partition(|restart| restart.failed_step.is_some());
        // Several restarts after the same step are one pause.
        let mut last_steps: Vec<u64> = restarts.map(|restart| restart.step).collect();
        last_steps.dedup();
        let paused_s = last_steps.into_iter().map(|step| pause_after(steps, step)).sum::<Option<f64>>();
        let share = paused_s.map(|paused| elapsed + paused).filter(|&all| all > 0.0);
        let share = share.map(|all| (useful / all).min(1.0));
        Some(Self { share, paused_s, restarts: faults.len(), growths: growths.len() })
    }
}

/// Returns the seconds between a step and the next one that are not in the run's elapsed time; `None` if one
/// of them is not in the metrics, or has no time.
fn pause_after(steps: &[StepMetrics], step: u64) -> Option<f64> {
    let next = steps.iter().position(|metrics| metrics.step > step)?;
    let (before, after) = (&steps[next.checked_sub(1)?], &steps[next]);
    let between = |time: fn(&StepMetrics) -> Option<f64>| Some(time(after)? - time(before)?);
    let pause = between(|step| step.unix_s)? - between(|step| step.elapsed_s)?;
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
            ..Fault::default()
        };
        RunEvent::Restart(Restart { step, ..Restart::after(&fault, 1, 3) })
    }

    fn growth_after(step: u64) -> RunEvent {
        RunEvent::Restart(Restart { step, ..Restart::growth("b answers again".to_owned(), 0, 1) })
    }

    /// Checks the share and the seconds of pauses, if they are known, and the numbers of restarts and
    /// growths.
    fn check(steps: &[StepMetrics], events: &[RunEvent], expected: Option<(f64, f64)>, counts: [usize; 2]) {
        let found = Goodput::of(steps, events).expect("the steps have times");
        assert_eq!((found.share.zip(found.paused_s), [found.restarts, found.growths]), (expected, counts));
    }

    #[test]
    fn steps_that_count_are_useful() {
        // A checkpoint of two seconds.
        check(&[step(1, 1.0, 101.0), step(2, 4.0, 104.0)], &[], Some((0.5, 0.0)), [0, 0]);
        // After the first step, a pause of six seconds until the second one begins.
        let steps = [step(1, 1.0, 101.0), step(2, 2.0, 108.0)];
        check(&steps, &[restart_after(1)], Some((0.25, 6.0)), [1, 0]);
        check(&steps, &[restart_after(1), restart_after(1)], Some((0.25, 6.0)), [2, 0]);
        check(&steps, &[growth_after(1)], Some((0.25, 6.0)), [0, 1]);
        // A person has stopped the run.
        check(&steps, &[], Some((1.0, 0.0)), [0, 0]);
        // An evaluation of two seconds before the checkpoint of the first step is in the elapsed time.
        let steps = [step(1, 1.0, 101.0), step(2, 4.0, 110.0)];
        check(&steps, &[restart_after(1)], Some((0.2, 6.0)), [1, 0]);
    }

    #[test]
    fn times_may_be_unknown() {
        assert_eq!(Goodput::of(&[], &[]), None);
        let without: StepMetrics = serde_json::from_str("{\"step\":1}").expect("metrics");
        assert_eq!(Goodput::of(&[without], &[]), None);
        let first = [step(1, 1.0, 101.0)];
        // The first attempt is not in the metrics.
        check(&first, &[restart_after(0)], None, [1, 0]);
        // Nothing follows yet.
        check(&first, &[restart_after(1)], None, [1, 0]);
    }
}
