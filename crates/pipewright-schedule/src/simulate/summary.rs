//! The numbers of a predicted run, in the form in which the command line prints them.

use serde::Serialize;

use crate::costs::Costs;
use crate::schedule::Program;
use crate::simulate::error::SimulateError;
use crate::simulate::logical::{LogicalRun, logical};
use crate::simulate::memory::{UNIT, peak_memory};
use crate::simulate::timed::{TimedRun, timed};

/// What a run takes and holds.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Summary {
    /// From the first action to the end of the last, in seconds.
    pub makespan: f64,
    /// The ticks of the logical simulation, in which every action takes one.
    pub steps: u32,
    /// The mean share of the makespan in which a rank does not compute, from barrier to barrier.
    pub bubble_fraction: f64,
    /// The same for each rank.
    pub bubble_per_rank: Vec<f64>,
    /// As `bubble_fraction`, with each rank from its first to its last action.
    pub span_bubble_fraction: f64,
    /// The mean share of the makespan that ranks wait for messages on their way.
    pub exposed_comm_fraction: f64,
    /// For each rank, the most stage activations of one microbatch held at once.
    pub peak_activations: Vec<u64>,
    /// For each rank, the most bytes held at once, where the costs give sizes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peak_bytes: Option<Vec<u64>>,
}

/// Runs `program` at `costs`, and tick by tick.
///
/// # Errors
/// As [`timed`] and [`logical`].
pub fn summarize(program: &Program, costs: &Costs) -> Result<Summary, SimulateError> {
    let run = timed(program, costs)?;
    Ok(Summary::of(&run, logical(program)?.steps(), costs))
}

impl Summary {
    /// The numbers of a run that counts ticks, as seconds. Messages take their rank's time there, so all of it is
    /// exposed.
    pub fn of_logical(run: &LogicalRun<'_>) -> Self {
        let timeline = run.timeline(1.0);
        let ticks = f64::from(run.steps()) * f64::from(timeline.ranks());
        let messages = timeline.events().iter().filter(|event| event.action.is_communication()).count();
        Self {
            makespan: timeline.makespan(),
            steps: run.steps(),
            bubble_fraction: timeline.bubble_fraction(),
            bubble_per_rank: timeline.bubble_per_rank(),
            span_bubble_fraction: timeline.span_bubble_fraction(),
            exposed_comm_fraction: if ticks > 0.0 { messages as f64 / ticks } else { 0.0 },
            peak_activations: peak_memory(&timeline, &[UNIT]),
            peak_bytes: None,
        }
    }

    /// The numbers of `run`, which was made at `costs`; `steps` are those of the logical simulation.
    pub fn of(run: &TimedRun, steps: u32, costs: &Costs) -> Self {
        let timeline = run.timeline();
        Self {
            makespan: timeline.makespan(),
            steps,
            bubble_fraction: timeline.bubble_fraction(),
            bubble_per_rank: timeline.bubble_per_rank(),
            span_bubble_fraction: timeline.span_bubble_fraction(),
            exposed_comm_fraction: run.exposed_fraction(),
            peak_activations: peak_memory(timeline, &[UNIT]),
            peak_bytes: (!costs.sizes.is_empty()).then(|| peak_memory(timeline, &costs.sizes)),
        }
    }
}
