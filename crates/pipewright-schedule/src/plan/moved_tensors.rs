//! The effect of `OFFLOAD` and `RELOAD` on the peak memory of a predicted program.

use std::collections::HashMap;

use crate::action::ActionKind;
use crate::costs::StageSizes;
use crate::ids::{Rank, StageIndex};
use crate::simulate::{TimedRun, memory_curve};
use crate::timeline::Timeline;

/// Returns by how many bytes the peak of each rank in its actions falls because tensors leave memory: the
/// difference of the simulated peaks. It depends on the times of the transfers, so
/// [`peaks`](super::peaks::peaks), which counts an order, does not know it. It is exact for a rank with one
/// stage. The stages of a rank may differ in the bytes that their actions hold while they run, and the result
/// is off by at most this difference.
pub(super) fn less_by_offload(run: &TimedRun, sizes: &[StageSizes]) -> Vec<u64> {
    let all_stay: Vec<StageSizes> = sizes.iter().map(|&sizes| StageSizes { offload: 0, ..sizes }).collect();
    let peaks = |rank| [&all_stay[..], sizes].map(|sizes| simulated_peak(run.timeline(), rank, sizes));
    let ranks = (0..run.timeline().ranks()).map(Rank::new);
    ranks.map(peaks).map(|[whole, less]| whole.saturating_sub(less)).collect()
}

/// Returns the peak bytes of activations and gradients of a rank. Unlike in [`memory_curve`], and as in
/// [`peaks`](super::peaks::peaks), a stage has its gradients when its first weight gradient is complete.
fn simulated_peak(timeline: &Timeline, rank: Rank, sizes: &[StageSizes]) -> u64 {
    let activations: Vec<StageSizes> =
        sizes.iter().map(|&sizes| StageSizes { gradient: 0, ..sizes }).collect();
    let curve = memory_curve(timeline, rank, &activations);
    let mut made: HashMap<StageIndex, f64> = HashMap::new();
    for event in timeline.events_of(rank) {
        for part in event.action.parts() {
            if matches!(part.kind(), ActionKind::Backward | ActionKind::WeightBackward) {
                made.entry(part.stage()).or_insert(event.end);
            }
        }
    }
    let gradients = |time: f64| -> u64 {
        let stages = made.iter().filter(|&(_, &end)| end <= time).map(|(stage, _)| stage.index());
        stages.filter_map(|stage| sizes.get(stage)).map(|sizes| sizes.gradient).fold(0, u64::saturating_add)
    };
    let held = |time: f64| curve.iter().rfind(|step| step.time <= time).map_or(0, |step| step.held);
    let in_steps = curve.iter().map(|step| step.held.saturating_add(gradients(step.time)));
    let after_gradients = made.values().map(|&end| held(end).saturating_add(gradients(end)));
    in_steps.chain(after_gradients).max().unwrap_or(0)
}
