//! The stage that limits a plan: the one with the most work on the busiest rank.

use serde::Serialize;

use crate::ids::{Rank, StageIndex};
use crate::plan::{PlanChoice, Prediction, with_head_parts};
use crate::profile::{LayerProfile, Profile};

/// The share by which a rank may compute longer than the mean without limiting the plan.
const BALANCED: f64 = 0.02;

/// The stage that limits a plan, and its rank.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Limit {
    /// The busiest rank.
    pub rank: Rank,
    /// The time that it computes in a step, in seconds.
    pub busy_s: f64,
    /// The mean of these times over the ranks.
    pub mean_s: f64,
    /// Its stage with the most work.
    pub stage: StageIndex,
    /// The kind of the layers that have most of the stage's work.
    pub kind: String,
}

impl Limit {
    /// Returns how much longer the busiest rank computes than the mean, as a share of the mean.
    pub fn excess(&self) -> f64 {
        if self.mean_s > 0.0 { self.busy_s / self.mean_s - 1.0 } else { 0.0 }
    }

    /// Returns whether all ranks compute about equally long, so that no stage limits the plan.
    pub fn is_balanced(&self) -> bool {
        self.excess() <= BALANCED
    }
}

/// Returns what limits a predicted plan, which `choice` cuts.
pub fn limit_of(profile: &Profile, choice: &PlanChoice, prediction: &Prediction) -> Limit {
    let profile = with_head_parts(profile, choice.head_parts);
    let layers: Vec<&LayerProfile> = profile.each_layer().collect();
    let placement = prediction.program.as_program().placement();
    let timeline = prediction.run.timeline();
    let busy: Vec<(Rank, f64)> = placement.all_ranks().map(|rank| (rank, timeline.busy(rank))).collect();
    let mean_s = busy.iter().map(|(_, time)| time).sum::<f64>() / busy.len().max(1) as f64;
    // If several ranks are equally busy, the first one wins.
    let busiest = busy.iter().rev().max_by(|one, other| one.1.total_cmp(&other.1));
    let &(rank, busy_s) = busiest.unwrap_or(&(Rank::new(0), 0.0));
    let layers_of = |stage: StageIndex| {
        let start = stage.index().checked_sub(1).and_then(|before| choice.boundaries.get(before));
        let end = choice.boundaries.get(stage.index()).copied().unwrap_or(layers.len());
        &layers[start.copied().unwrap_or(0).min(end)..end.min(layers.len())]
    };
    let work = |stage: &StageIndex| layers_of(*stage).iter().map(|layer| work_of(layer)).sum::<f64>();
    let own = placement.stages_of(rank).iter().rev();
    let stage = own.max_by(|one, other| work(one).total_cmp(&work(other))).copied();
    let stage = stage.unwrap_or(StageIndex::new(0));
    Limit { rank, busy_s, mean_s, stage, kind: heaviest_kind(layers_of(stage)) }
}

/// Returns the time of a layer's forward and backward.
fn work_of(layer: &LayerProfile) -> f64 {
    layer.forward_s + layer.whole_backward_s()
}

/// Returns the kind whose layers together take the longest. If several kinds are equal, the first one wins.
fn heaviest_kind(layers: &[&LayerProfile]) -> String {
    let mut kinds: Vec<(&str, f64)> = Vec::new();
    for layer in layers {
        match kinds.iter_mut().find(|(kind, _)| *kind == layer.kind) {
            Some((_, time)) => *time += work_of(layer),
            None => kinds.push((&layer.kind, work_of(layer))),
        }
    }
    let heaviest = kinds.iter().rev().max_by(|one, other| one.1.total_cmp(&other.1));
    heaviest.map(|(kind, _)| (*kind).to_owned()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_of_equal_kinds_is_the_heaviest() {
        let layer =
            |kind: &str| LayerProfile { kind: kind.to_owned(), forward_s: 1.0, ..LayerProfile::default() };
        let layers = [layer("attention"), layer("mlp")];
        assert_eq!(heaviest_kind(&[&layers[0], &layers[1]]), "attention");
        assert_eq!(heaviest_kind(&[&layers[0], &layers[1], &layers[1]]), "mlp");
    }
}
