//! The figures of a predicted run, as the command line prints them.

use serde::Serialize;

use crate::costs::Costs;
use crate::schedule::Program;
use crate::simulate::error::SimulateError;
use crate::simulate::logical::{LogicalRun, logical};
use crate::simulate::memory::{UNIT, peak_memory};
use crate::simulate::timed::timed;
use crate::simulate::timed_run::{PredictedExchange, TimedRun};
use crate::slices::Slices;
use crate::timeline::Timeline;

/// The figures of a run.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Summary {
    /// The time from the start of the first action to the end of the last, in seconds.
    pub makespan: f64,
    /// The number of ticks of the logical simulation; 0 if that has no end, because a receive holds its rank
    /// there, and the program is only sound on a communicator on which it does not.
    pub steps: u32,
    /// The mean share of the makespan in which a rank does not compute, from barrier to barrier.
    pub bubble_fraction: f64,
    /// The same for each rank.
    pub bubble_per_rank: Vec<f64>,
    /// The same as `bubble_fraction`, but each rank counts from its first to its last action.
    pub span_bubble_fraction: f64,
    /// The mean share of the makespan in which ranks wait for messages in flight.
    pub exposed_comm_fraction: f64,
    /// How long each rank exchanges the tokens of experts, and waits for that, if the costs have exchanges.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exchanges: Option<Vec<PredictedExchange>>,
    /// The peak number of stage activations of one microbatch, or of one slice, for each rank.
    pub peak_activations: Vec<u64>,
    /// The number of slices of each microbatch, if microbatches are cut.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub slices: Option<u32>,
    /// The peak bytes of each rank, if the costs give sizes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peak_bytes: Option<Vec<u64>>,
}

/// Simulates `program` at `costs` and tick by tick, and summarizes both.
///
/// # Errors
/// When [`timed`] or [`logical`] fails.
pub fn summarize(program: &Program, costs: &Costs) -> Result<Summary, SimulateError> {
    let run = timed(program, costs)?;
    Ok(Summary::of(&run, logical(program)?.steps(), costs))
}

impl Summary {
    /// Returns the figures of a logical run, with a tick as a second. Messages take time of their rank there,
    /// so all communication is exposed.
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
            exchanges: None,
            peak_activations: peak_memory(&timeline, &[UNIT]),
            slices: cut_into(&timeline),
            peak_bytes: None,
        }
    }

    /// Returns the share of the exchanges in which ranks wait, over all ranks; `None` without exchanges.
    pub fn exposed_exchange_fraction(&self) -> Option<f64> {
        let exchanges = self.exchanges.as_ref()?;
        let all: f64 = exchanges.iter().map(|rank| rank.seconds).sum();
        let exposed: f64 = exchanges.iter().map(|rank| rank.exposed).sum();
        (all > 0.0).then(|| exposed / all)
    }

    /// Returns the figures of `run`, which was made at `costs`. `steps` is the number of ticks of the logical
    /// simulation.
    pub fn of(run: &TimedRun, steps: u32, costs: &Costs) -> Self {
        let timeline = run.timeline();
        Self {
            makespan: timeline.makespan(),
            steps,
            bubble_fraction: timeline.bubble_fraction(),
            bubble_per_rank: timeline.bubble_per_rank(),
            span_bubble_fraction: timeline.span_bubble_fraction(),
            exposed_comm_fraction: run.exposed_fraction(),
            exchanges: costs.has_exchanges().then(|| run.exchanges().to_vec()),
            peak_activations: peak_memory(timeline, &[UNIT]),
            slices: cut_into(timeline),
            peak_bytes: (!costs.sizes.is_empty()).then(|| peak_memory(timeline, &costs.sizes)),
        }
    }
}

/// Returns the number of slices of each microbatch; `None` if microbatches are not cut.
fn cut_into(timeline: &Timeline) -> Option<u32> {
    Some(timeline.slices()).filter(|slices| !slices.is_one()).map(Slices::get)
}
