//! Predicts the time of a step from the run's own first steps: the program is simulated at the median costs
//! of a few steps, and the median time of everything outside the program, such as the optimizer, is added.
//!
//! Steps that take longer than the prediction lose time to something that the schedule does not explain.

use pipewright_schedule::Timeline;
use pipewright_schedule::measured::{costs_of, on_one_clock, program_of, replicas};
use pipewright_schedule::simulate::timed;

use crate::pipeline::{StepSummary, first_action};
use crate::train::metrics::Metrics;

/// The number of a process's first steps that are not used: caches and memory are still cold.
const WARM_UP: usize = 1;
/// The number of steps whose costs are measured.
const MEASURED: usize = 5;
/// The largest number of events and exchanges of a step that is predicted. Larger steps would delay the
/// training noticeably.
const MOST_EVENTS: usize = 200_000;

/// The prediction of the steps that this process takes.
#[derive(Debug, Default)]
pub struct StepPrediction {
    steps: usize,
    /// One replica of each measured step.
    timelines: Vec<Timeline>,
    /// The milliseconds of each measured step outside its program.
    outside: Vec<f64>,
    milliseconds: Option<f64>,
}

impl StepPrediction {
    /// Adds the prediction to the metrics of a step if there is one, and learns from the step otherwise.
    pub fn observe(&mut self, metrics: &mut Metrics, report: &StepSummary) {
        self.observe_timeline(metrics, &report.timeline);
    }

    fn observe_timeline(&mut self, metrics: &mut Metrics, timeline: &Timeline) {
        if self.steps < WARM_UP + MEASURED {
            self.steps += 1;
            let size = timeline.events().len() + timeline.scopes().len();
            if self.steps > WARM_UP && size <= MOST_EVENTS {
                // Ranks that only wait may begin the step earlier, while others still update.
                let waits = first_action(timeline).map_or(0.0, |first| first.start - timeline.start());
                self.outside.push(metrics.step_ms - (timeline.makespan() - waits) * 1e3);
                let replica = replicas(timeline).ok().and_then(|replicas| replicas.into_iter().next());
                self.timelines.extend(replica.map(|replica| on_one_clock(&replica)));
            }
            if self.steps == WARM_UP + MEASURED {
                self.milliseconds = self.predict();
                self.timelines.clear();
            }
            return;
        }
        metrics.predicted_step_ms = self.milliseconds;
    }

    fn predict(&mut self) -> Option<f64> {
        let program = program_of(self.timelines.first()?).ok()?;
        let run = timed(&program, &costs_of(&self.timelines)).ok()?;
        self.outside.sort_by(f64::total_cmp);
        Some(run.timeline().makespan() * 1e3 + self.outside[self.outside.len() / 2].max(0.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pipewright_schedule::csv::parse_program;
    use pipewright_schedule::{Costs, Event};

    /// The steps take 60 ms, and 5 ms more outside their program. Checks the prediction from timelines that
    /// `change` makes of theirs.
    fn check(change: impl Fn(&Event) -> Event) {
        let program =
            parse_program("0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n").expect("a program");
        let costs: Costs = "F=0.01,B=0.02".parse().expect("costs");
        let timeline = timed(&program, &costs).expect("no deadlock").timeline().clone();
        let slower = |event: &Event| Event { start: event.start * 3.0, end: event.end * 3.0, ..*event };
        let changed = |change: &dyn Fn(&Event) -> Event| {
            Timeline::new(2, timeline.events().iter().map(change).collect())
        };
        let cold = changed(&slower);
        let mut prediction = StepPrediction::default();
        let mut predicted = |timeline: &Timeline, step_ms| {
            let mut metrics = Metrics { step_ms, ..Metrics::default() };
            prediction.observe_timeline(&mut metrics, timeline);
            metrics.predicted_step_ms
        };
        assert_eq!(predicted(&cold, 185.0), None);
        for _ in 0..MEASURED {
            assert_eq!(predicted(&changed(&change), 65.0), None);
        }
        let found = predicted(&cold, 185.0).expect("a prediction");
        assert!((found - 65.0).abs() < 1e-6, "{found}");
    }

    #[test]
    fn later_steps_are_predicted_from_the_first_ones() {
        check(Event::clone);
    }

    /// Rank 1 begins the step 10 s before rank 0, which still updates.
    #[test]
    fn a_rank_that_waits_for_the_first_message_does_not_change_the_prediction() {
        check(|event| {
            let waits = event.action.to_string() == "1RECV_F0";
            Event { start: if waits { event.start - 10.0 } else { event.start }, ..*event }
        });
    }
}
