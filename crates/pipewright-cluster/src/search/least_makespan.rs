//! The seconds that no schedule of a pipeline is faster than, by what depends on what.
//!
//! A rank computes one stage of one microbatch at a time. The forward of a stage follows the forward of the stage
//! before it, and the backward of a stage follows its forward and the backward of the stage after it. So there are two
//! bounds for `m` microbatches:
//!
//! - One microbatch takes its way through all stages and back. If it is the last one that a stage starts, or the
//!   first one that a stage ends, the stage has computed the `m - 1` others before it, or computes them afterwards.
//! - A rank waits for the first microbatch. Until the first gradient reaches it, it only computes forwards. After its
//!   last gradient of an input, the stages before its first one have a backward to compute.
//!
//! A whole backward holds up the stage before it. If gradients of weights are computed apart, only gradients of inputs
//! do. If microbatches are cut into slices, only the work of a rank is a bound.

use pipewright_schedule::StageBackward;
use pipewright_schedule::costs::StageCosts;
use pipewright_schedule::ids::StageIndex;

use crate::layout::Layout;
use crate::pipeline::PipelineCosts;
use crate::search::backward_form::{BackwardForm, backward_form};

/// The seconds of a stage for one microbatch.
#[derive(Debug, Clone, Copy, Default)]
struct Stage {
    forward: f64,
    /// The backward that the stage before it waits for.
    chained: f64,
    /// The whole backward.
    backward: f64,
    /// From the start of the first stage's forward to the start of this stage's forward.
    reached: f64,
    /// From the end of this stage's backward to the end of the first stage's backward.
    left: f64,
    /// From the end of this stage's forward to the start of its backward.
    returned: f64,
}

/// Returns the seconds of one run of a layout's schedule that no order of its computations is faster than.
pub(super) fn least_makespan(layout: &Layout, costs: &PipelineCosts) -> f64 {
    let rank_of_stage = layout.rank_of_stage();
    let stages_of_rank = layout.stages_by_rank(&rank_of_stage);
    let form = backward_form(layout);
    let stages = stages(form, costs, &rank_of_stage);
    let microbatches = f64::from(layout.microbatches());
    if form == BackwardForm::Slices {
        return stages_of_rank.iter().map(|own| microbatches * work(&stages, own)).fold(0.0, f64::max);
    }
    let ranks = stages_of_rank.iter().map(|own| least_of_rank(&stages, own, microbatches));
    ranks.fold(least_of_way(&stages, microbatches), f64::max)
}

/// Returns the seconds of one microbatch in the stages of a rank.
fn work(stages: &[Stage], own: &[usize]) -> f64 {
    own.iter().map(|&stage| stages[stage].forward + stages[stage].backward).sum()
}

fn stages(form: BackwardForm, costs: &PipelineCosts, rank_of: &[usize]) -> Vec<Stage> {
    // Faster links than the slowest one may be between two ranks.
    let message = if costs.links.is_empty() {
        costs.sizes[0].output as f64 / costs.link.bandwidth + costs.link.latency
    } else {
        0.0
    };
    let stage = |(index, stage): (usize, &StageCosts)| {
        let apart = stage.input_backward + stage.weight_backward;
        let least = stage.input_backward.min(stage.backward);
        let [chained, backward] = match (costs.trained.backward_of(StageIndex::new(index as u32)), form) {
            (StageBackward::None, _) => [0.0; 2],
            (StageBackward::Inputs, _) => [least; 2],
            (StageBackward::Whole, BackwardForm::Split) => [stage.input_backward, apart],
            (StageBackward::Whole, BackwardForm::Whole) => [stage.backward; 2],
            (StageBackward::Whole, BackwardForm::Mixed | BackwardForm::Slices) => {
                [least, stage.backward.min(apart)]
            }
        };
        Stage { forward: stage.forward, chained, backward, ..Stage::default() }
    };
    let mut stages: Vec<Stage> = costs.stages.iter().enumerate().map(stage).collect();
    let hop = |from: usize, to: usize| if rank_of[from] == rank_of[to] { 0.0 } else { message };
    for index in 1..stages.len() {
        let (before, hop) = (stages[index - 1], hop(index - 1, index));
        stages[index].reached = before.reached + before.forward + hop;
        let is_returned = before.chained > 0.0;
        stages[index].left = before.left + before.chained + if is_returned { hop } else { 0.0 };
    }
    for index in (1..stages.len()).rev() {
        let (after, hop) = (stages[index], hop(index - 1, index));
        // Nothing returns to a stage without a backward.
        let back = if stages[index - 1].chained > 0.0 { hop } else { 0.0 };
        stages[index - 1].returned = hop + after.forward + after.returned + after.chained + back;
    }
    stages
}

/// Returns the seconds by the way of one microbatch.
fn least_of_way(stages: &[Stage], microbatches: f64) -> f64 {
    let Some((first, last)) = stages.first().zip(stages.last()) else { return 0.0 };
    let way = first.forward + first.returned + first.chained;
    let slowest = stages.iter().map(|stage| stage.forward.max(stage.chained)).fold(0.0, f64::max);
    way + (microbatches - 1.0) * slowest.max(last.forward + last.chained)
}

/// Returns the seconds by the work of one rank with these stages.
fn least_of_rank(stages: &[Stage], own: &[usize], microbatches: f64) -> f64 {
    let Some((first, last)) = own.iter().min().zip(own.iter().max()) else { return 0.0 };
    let (first, last) = (&stages[*first], &stages[*last]);
    let until_gradient = last.reached + last.forward + last.returned;
    let of_stage =
        |stage: &Stage| (microbatches * stage.forward).min((until_gradient - stage.reached).max(0.0));
    let forwards: f64 = own.iter().map(|&stage| of_stage(&stages[stage])).sum();
    let waits = (until_gradient - forwards).max(first.reached);
    let chained: f64 = own.iter().map(|&stage| stages[stage].forward + stages[stage].chained).sum();
    waits + (microbatches * work(stages, own)).max(microbatches * chained + first.left)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use pipewright_schedule::TrainedStages;
    use pipewright_schedule::costs::{Link, StageSizes};
    use pipewright_schedule::generate::catalogue;
    use pipewright_schedule::ids::Rank;

    use super::*;
    use crate::layout::Precision;
    use crate::pipeline::Programs;

    /// Costs of stages that differ by `spread` from 1, in a fixed order that looks random.
    fn costs(stages: usize, [inputs, weights]: [f64; 2], spread: f64, latency: f64) -> PipelineCosts {
        let factor = |index: usize| 1.0 + spread * ((index * 7 % 5) as f64 / 4.0 - 0.5);
        PipelineCosts {
            stages: (0..stages)
                .map(|index| {
                    StageCosts::new(factor(index), inputs * factor(index + 1), weights * factor(index + 3))
                })
                .collect(),
            sizes: vec![StageSizes::default(); stages],
            trained: TrainedStages::ALL,
            link: Link { latency, bandwidth: 1e12 },
            links: BTreeMap::new(),
        }
    }

    fn layout(schedule: &str, pipeline: u32, chunks: u32, microbatches: u32) -> Layout {
        Layout {
            gpus: pipeline,
            pipeline,
            chunks,
            batch: microbatches,
            schedule: Some(schedule.to_owned()),
            ..Layout::on_one_gpu(1, Precision::Half)
        }
    }

    /// Checks that no simulation of a schedule is faster than its bound, and returns the largest ratio of both and the
    /// number of simulations.
    fn check(name: &str, sizes: &[(u32, u32, u32)]) -> (f64, usize) {
        let (mut nearest, mut count) = (0.0_f64, 0);
        for &(pipeline, chunks, microbatches) in sizes {
            let layout = layout(name, pipeline, chunks, microbatches);
            for backward in [[1.0, 1.0], [1.5, 0.5], [0.5, 1.5], [2.0, 1.0]] {
                for (spread, latency) in [(0.0, 0.0), (0.8, 0.0), (0.4, 0.3)] {
                    let costs = costs((pipeline * chunks) as usize, backward, spread, latency);
                    let Ok(run) = Programs::default().run(&layout, &costs) else { continue };
                    let ratio = least_makespan(&layout, &costs) / run.makespan;
                    assert!(ratio <= 1.0 + 1e-9, "{name}, {pipeline} x {chunks}, {microbatches}: {ratio}");
                    nearest = nearest.max(ratio);
                    count += 1;
                }
            }
        }
        (nearest, count)
    }

    /// Checks the bounds of a schedule whose costs are changed: no simulation is faster.
    fn check_changed(change: impl Fn(&mut PipelineCosts)) -> usize {
        let mut count = 0;
        for name in ["1f1b", "interleaved1f1b", "zb-h1", "zbvzerobubble", "dualpipev", "gpipe"] {
            for (pipeline, chunks, microbatches) in [(4, 1, 1), (4, 1, 8), (4, 2, 4), (4, 2, 16)] {
                let layout = layout(name, pipeline, chunks, microbatches);
                let mut costs = costs((pipeline * chunks) as usize, [1.5, 0.5], 0.4, 0.3);
                change(&mut costs);
                let Ok(run) = Programs::default().run(&layout, &costs) else { continue };
                let ratio = least_makespan(&layout, &costs) / run.makespan;
                assert!(
                    ratio > 0.2 && ratio <= 1.0 + 1e-9,
                    "{name}, {pipeline} x {chunks}, {microbatches}: {ratio}"
                );
                count += 1;
            }
        }
        count
    }

    /// A stage without a backward holds up no other one, and sends nothing back.
    #[test]
    fn no_schedule_with_frozen_stages_is_faster_than_the_bound() {
        for trained in [[false, true], [true, false]] {
            let change = |costs: &mut PipelineCosts| {
                let stages = costs.stages.len();
                let is_trained = |stage: usize| trained[usize::from(stage >= stages / 2)];
                costs.trained = TrainedStages::of(&(0..stages).map(is_trained).collect::<Vec<_>>());
            };
            assert!(check_changed(change) > 0, "{trained:?}");
        }
    }

    /// Messages over links that are faster than the slowest one count as none.
    #[test]
    fn no_schedule_with_several_links_is_faster_than_the_bound() {
        let change = |costs: &mut PipelineCosts| {
            let fast = Link { latency: 0.0, bandwidth: 1e15 };
            costs.links =
                [(0, 1), (1, 0), (3, 0)].map(|(from, to)| ((Rank::new(from), Rank::new(to)), fast)).into();
        };
        assert!(check_changed(change) > 10);
    }

    #[test]
    fn no_schedule_is_faster_than_the_bound() {
        const SIZES: [(u32, u32, u32); 9] = [
            (1, 1, 4),
            (4, 1, 2),
            (4, 1, 16),
            (4, 2, 1),
            (4, 2, 4),
            (4, 2, 16),
            (3, 4, 12),
            (8, 4, 8),
            (8, 2, 16),
        ];
        for generator in catalogue().iter().filter(|generator| generator.has_backward()) {
            let (nearest, count) = check(generator.name, &SIZES);
            assert!(count > 0 && nearest > 0.85, "{}: {nearest} in {count} simulations", generator.name);
        }
    }

    /// One microbatch takes its way through all stages, which no other work hides.
    #[test]
    fn the_bound_of_few_microbatches_is_the_simulation() {
        for (name, sizes) in
            [("interleaved1f1b", (4, 4, 1)), ("1f1b", (8, 1, 8)), ("zb-h1", (8, 1, 1)), ("gpipe", (4, 1, 1))]
        {
            let (nearest, count) = check(name, &[sizes]);
            assert!(count > 0 && nearest > 0.999, "{name}: {nearest}");
        }
    }
}
