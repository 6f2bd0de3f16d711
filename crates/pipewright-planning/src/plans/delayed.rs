//! The plans of a search with weights that are delayed by one update, for `plan --allow-delay`.

use pipewright_schedule::plan::{DelayedPrograms, DelayedStep, Plan, PlanReport, PlanRequest};
use pipewright_schedule::profile::Profile;
use serde::Serialize;

use crate::plans::print::{time, title_of};

/// The assumptions of a prediction with delayed weights.
const ASSUMED: [&str; 3] = [
    "the losses with delayed weights are as good as without, which depends on the optimizer (docs/delayed-weights.md)",
    "each rank computes alone, with whole parameters in memory, so that batches overlap, in the order \
     for stages of equal cost with which `train` repeats",
    "the update overlaps with nothing, and evaluations and checkpoints, before which the pipeline drains, are rare",
];

/// The plans of a report with delayed weights.
#[derive(Serialize)]
pub(crate) struct DelayedPlans {
    /// The plan that is the fastest with them; `None` if none fits.
    best: Option<BestDelayed>,
    /// Whether it is faster than the best plan without.
    is_faster: bool,
    assumed: [&'static str; 3],
}

#[derive(Serialize)]
struct BestDelayed {
    /// The index of the plan in the report.
    plan: usize,
    predicted_step_s: f64,
    bubble_fraction: f64,
    peak_bytes: Vec<u64>,
}

impl DelayedPlans {
    /// Predicts the plans of a report with delayed weights.
    pub(crate) fn of(report: &PlanReport, profile: &Profile, request: &PlanRequest) -> Self {
        let fits = |step: &DelayedStep| {
            request.memory.is_none_or(|memory| step.peak_bytes.iter().all(|peak| *peak <= memory))
        };
        let mut searched = DelayedPrograms::default();
        let predicted = |(index, plan): (usize, &Plan)| {
            let step = plan.delayed_step(profile, request.state, &mut searched).ok().filter(fits)?;
            let DelayedStep { step_s, bubble_fraction, peak_bytes } = step;
            Some(BestDelayed { plan: index, predicted_step_s: step_s, bubble_fraction, peak_bytes })
        };
        let steps = report.plans.iter().enumerate().filter_map(predicted);
        let best = steps.min_by(|one, other| one.predicted_step_s.total_cmp(&other.predicted_step_s));
        let alone = report.plans.first().map_or(f64::INFINITY, |plan| plan.step_s);
        let is_faster = best.as_ref().is_some_and(|best| best.predicted_step_s < alone);
        Self { best, is_faster, assumed: ASSUMED }
    }

    /// Returns the lines about the best plan with delayed weights.
    pub(crate) fn text(&self, report: &PlanReport) -> String {
        let plan = self.best.as_ref().and_then(|best| Some((best, report.plans.get(best.plan)?)));
        let Some((best, plan)) = plan else {
            return "with delayed weights: no plan fits\n".to_owned();
        };
        let (step, bubble) = (time(best.predicted_step_s), best.bubble_fraction * 100.0);
        let verdict = if self.is_faster { "faster: set optimizer.delay = 1" } else { "not faster" };
        let title = title_of(plan);
        format!(
            "with delayed weights: {title}  {step} per step, bubble {bubble:.1}%; {verdict}\nassumed: {}\n",
            self.assumed.join("; ")
        )
    }
}
