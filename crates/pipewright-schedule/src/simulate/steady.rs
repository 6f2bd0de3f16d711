//! The steady state of a program whose batches overlap ([`crate::delay`]): what a long run repeats.

use serde::Serialize;

use crate::action::Action;
use crate::costs::Costs;
use crate::ids::Rank;
use crate::schedule::Program;
use crate::simulate::error::SimulateError;
use crate::simulate::memory::{UNIT, peak_memory};
use crate::simulate::timed::timed;
use crate::timeline::Timeline;

/// The figures of a repetition, after the pipeline has filled.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Steady {
    /// The time from the end of a batch to the end of the next one, in seconds.
    pub period: f64,
    /// The mean share of the period in which a rank does not compute.
    pub bubble_fraction: f64,
    /// The same for each rank.
    pub bubble_per_rank: Vec<f64>,
    /// The peak number of stage activations of one microbatch, or of one slice, for each rank.
    pub peak_activations: Vec<u64>,
    /// The peak bytes of each rank without a second version of the parameters, if the costs give sizes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peak_bytes: Option<Vec<u64>>,
}

/// Simulates `program`, whose batches overlap, at `costs`, and returns its steady state: the mean over the second half
/// of its batches without the last one, which no batch follows. The mean matters only if batches alternate between
/// several patterns. A program of a single batch repeats with a drain in between.
///
/// # Errors
/// When [`timed`] fails.
pub fn steady(program: &Program, costs: &Costs) -> Result<Steady, SimulateError> {
    let run = timed(program, costs)?;
    let timeline = run.timeline();
    let batches = program.batches();
    let ends = ends(program, timeline);
    let last = ends.len().saturating_sub(2);
    let period = match last / 2 {
        0 => timeline.makespan() / f64::from(batches),
        first => (ends[last] - ends[first]) / (last - first) as f64,
    };
    let work = |rank| timeline.busy(rank) / f64::from(batches);
    let bubble = |rank| if period > 0.0 { (1.0 - work(rank) / period).max(0.0) } else { 0.0 };
    let bubble_per_rank: Vec<f64> = (0..program.ranks()).map(|rank| bubble(Rank::new(rank))).collect();
    Ok(Steady {
        period,
        bubble_fraction: bubble_per_rank.iter().sum::<f64>() / f64::from(program.ranks().max(1)),
        bubble_per_rank,
        peak_activations: peak_memory(timeline, &[UNIT]),
        peak_bytes: (!costs.sizes.is_empty()).then(|| peak_memory(timeline, &costs.sizes)),
    })
}

/// Returns when each batch ends, in seconds.
fn ends(program: &Program, timeline: &Timeline) -> Vec<f64> {
    let mut ends = vec![0.0_f64; program.batches() as usize];
    for event in timeline.events().iter().filter(|event| event.action.is_compute()) {
        for microbatch in event.action.parts().filter_map(Action::microbatch) {
            if let Some(end) = ends.get_mut(program.batch_of(microbatch) as usize) {
                *end = end.max(event.end);
            }
        }
    }
    ends
}
