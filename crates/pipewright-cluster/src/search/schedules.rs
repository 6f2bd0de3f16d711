//! The schedules that the search tries, and their runs without a simulation.
//!
//! A schedule that defers gradients of weights fills the time in which 1F1B waits for gradients. Its estimate
//! is the work of the busiest rank and the time in which it waits. No schedule avoids the way of the first microbatch
//! to the last rank. ZB-H1 also waits `(p - 1) (I - W)` if gradients of inputs take longer than gradients of weights
//! (arXiv 2401.10241, table 2), ZB-V waits `(p - 1) (I - F)` if they take longer than forwards, and V-Half waits
//! `p (F + 3 I - W) - (3 F + 3 I + W)`, which are the waits of our generators with equal stages. With
//! fewer than `2 p` microbatches, no estimate is below the bound of [`least_makespan`]. The simulation decides.

use pipewright_schedule::costs::StageCosts;
use pipewright_schedule::generate::{StageRule, find};

use crate::layout::Layout;
use crate::pipeline::{PipelineCosts, PipelineRun, closed_form};
use crate::search::backward_form::SPLIT;
use crate::search::least_makespan::least_makespan;

/// A schedule with the chunks of a rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Choice {
    /// The name; `None` for 1F1B, interleaved if there are several chunks.
    pub(super) schedule: Option<String>,
    pub(super) chunks: u32,
}

/// Returns the schedules for a pipeline of `ranks` ranks and a model of `blocks` blocks. `schedule` is the
/// name of a generator, and `further` are schedules that the stack has in addition.
pub(super) fn choices(
    ranks: u32,
    blocks: u32,
    schedule: Option<&str>,
    chunks: Option<u32>,
    further: &[&'static str],
) -> Vec<Choice> {
    let most = blocks / ranks.max(1);
    let is_possible = |count: u32| chunks.is_none_or(|fixed| fixed == count) && count <= most.max(1);
    let chunk_counts = |name: &str| match find(name).map(|generator| generator.stages) {
        Ok(StageRule::One) => vec![1],
        Ok(StageRule::TwoLoops | StageRule::V) => vec![2],
        Ok(StageRule::Vs) => {
            loops(ranks, blocks, chunks).into_iter().filter(|count| count % 2 == 0).collect()
        }
        Ok(StageRule::Loops) => loops(ranks, blocks, chunks),
        Err(_) => Vec::new(),
    };
    let with_counts = |schedule: Option<&str>, counts: Vec<u32>| {
        let possible = counts.into_iter().filter(|&count| is_possible(count));
        let choice = |chunks| Choice { schedule: schedule.map(str::to_owned), chunks };
        possible.map(choice).collect::<Vec<Choice>>()
    };
    let named = |name: &str| with_counts(Some(name), chunk_counts(name));
    match schedule {
        Some("1f1b") => with_counts(None, vec![1]),
        Some("interleaved1f1b") => {
            with_counts(None, loops(ranks, blocks, chunks).into_iter().filter(|&count| count > 1).collect())
        }
        Some(name) => named(name),
        None if ranks == 1 => vec![Choice { schedule: None, chunks: chunks.unwrap_or(1) }],
        None => {
            let mut counts = loops(ranks, blocks, chunks);
            counts.push(1);
            counts.dedup();
            let mut all = with_counts(None, counts);
            all.extend(SPLIT.into_iter().chain(further.iter().copied()).flat_map(named));
            all
        }
    }
}

/// Returns the stages of a rank that a schedule allows, for messages.
pub(super) fn chunks_text(schedule: &str) -> &'static str {
    match find(schedule).map(|generator| generator.stages) {
        Ok(StageRule::One) => "1 stage",
        Ok(StageRule::TwoLoops | StageRule::V) => "2 stages",
        Ok(StageRule::Vs) => "an even number of stages",
        Ok(StageRule::Loops) | Err(_) => "2 or more stages",
    }
}

/// Returns the numbers of chunks with which stages have nearly equal numbers of blocks, from 2, or the given
/// one.
fn loops(ranks: u32, blocks: u32, chunks: Option<u32>) -> Vec<u32> {
    let most = (blocks / ranks.max(1)).max(1);
    let stages = |count: u32| ranks.saturating_mul(count);
    // The embedding and the head may count as a block each.
    let is_even = |count: u32| {
        blocks.is_multiple_of(stages(count)) || (blocks + 2).is_multiple_of(stages(count)) || count <= 4
    };
    match chunks {
        Some(given) => vec![given],
        None => (2..=most).filter(|&count| is_even(count)).collect(),
    }
}

/// Returns whether a number of microbatches is possible, as far as it is known without making the schedule.
pub(super) fn has_size(layout: &Layout) -> bool {
    let (ranks, microbatches) = (layout.pipeline, layout.microbatches());
    let in_rounds =
        layout.chunks > 1 && matches!(layout.schedule_name(), "interleaved1f1b" | "interleaved-zb-h1");
    // Rounds of equal size, each of at least as many microbatches as ranks.
    !in_rounds || microbatches.is_multiple_of((microbatches / ranks.max(1)).max(1))
}

/// Returns whether there are so many microbatches that a schedule repeats itself between its start and its end.
fn is_steady(layout: &Layout) -> bool {
    layout.microbatches() >= layout.pipeline.saturating_mul(2)
}

/// Returns the microbatches whose activations a rank holds at its peak at least, on average over its chunks
/// if these have as many bytes, by the formulas of the generators' guides. With ZB-H1, each rank holds one
/// activation less than the one before it. A rank of a schedule that is not listed holds at least one
/// microbatch of one chunk.
pub(super) fn held(layout: &Layout, rank: u32) -> f64 {
    let (ranks, microbatches, chunks) = (layout.pipeline, layout.microbatches(), f64::from(layout.chunks));
    let of_1f1b = f64::from(ranks.min(microbatches));
    let is_steady = is_steady(layout);
    match layout.schedule_name() {
        "gpipe" | "loopedbfs" => f64::from(microbatches),
        "1f1b" | "zb-h1" => f64::from(microbatches.min(ranks - rank)),
        "interleaved1f1b" | "interleaved-zb-h1" => of_1f1b - f64::from(rank) / chunks,
        "zbvzerobubble" if is_steady => of_1f1b,
        "dualpipev" if ranks > 1 => of_1f1b + 0.5,
        "v-half" if is_steady && ranks > 2 => f64::from(ranks + 2 - ranks % 2) / 2.0,
        "zbvzerobubble" | "v-half" => of_1f1b / 2.0,
        _ => 1.0 / chunks,
    }
}

/// Returns the bytes of activations that a rank holds at its peak at least. `chunks` are the bytes of a
/// microbatch in each of its chunks. If only a mean is known, each chunk counts as the smallest one.
fn least_held(layout: &Layout, rank: u32, chunks: &[u64]) -> u64 {
    let all = match layout.schedule_name() {
        "interleaved-zb-h1" => return layout.closed_form().least_activations_of_zb_h1(rank, chunks),
        "gpipe" | "loopedbfs" => chunks.iter().map(|&bytes| bytes as f64).sum(),
        _ => chunks.iter().min().map_or(0.0, |&smallest| smallest as f64 * chunks.len() as f64),
    };
    (all * held(layout, rank)) as u64
}

/// Returns whether an estimate has the same memory as the simulation. Other estimates are at most as large:
/// they lack the tensors that are kept for gradients of weights, and [`least_held`] is a lower bound.
pub(super) fn is_exact(layout: &Layout) -> bool {
    layout.schedule.is_none()
}

/// Returns the run of a layout's schedule without a simulation. [`least_held`] gives its activations, unless
/// the schedule has a closed form.
pub(super) fn estimate(layout: &Layout, costs: &PipelineCosts) -> PipelineRun {
    let mut run = closed_form(layout, costs);
    // With more microbatches, the work of the busiest rank is longer than the way of one microbatch.
    let least = if is_steady(layout) { 0.0 } else { least_makespan(layout, costs) };
    if layout.schedule.is_none() {
        run.makespan = run.makespan.max(least);
        return run;
    }
    let ranks = layout.pipeline as usize;
    run.stages_of_rank = layout.stages_of_rank();
    let microbatches = f64::from(layout.microbatches());
    let seconds = |stage: &usize| {
        let stage = &costs.stages[*stage];
        stage.forward + stage.input_backward + stage.weight_backward
    };
    let busiest = run.stages_of_rank.iter().map(|stages| stages.iter().map(seconds).sum::<f64>());
    let (name, is_steady) = (layout.schedule_name(), is_steady(layout));
    let waits = |stage: &StageCosts| match name {
        "zb-h1" | "interleaved-zb-h1" => {
            stage.forward + (stage.input_backward - stage.weight_backward).max(0.0)
        }
        "zbvzerobubble" | "dualpipev" => stage.forward.max(stage.input_backward),
        _ => stage.forward,
    };
    let mut fill: f64 = costs.stages.iter().take(ranks - 1).map(waits).sum();
    if name == "v-half" && is_steady && ranks > 2 {
        let count = costs.stages.len() as f64;
        let mean = |seconds: fn(&StageCosts) -> f64| costs.stages.iter().map(seconds).sum::<f64>() / count;
        let forward = mean(|stage| stage.forward);
        let [inputs, weights] = [mean(|stage| stage.input_backward), mean(|stage| stage.weight_backward)];
        let of_rank = forward + 3.0 * inputs - weights;
        fill = fill.max(ranks as f64 * of_rank - (3.0 * (forward + inputs) + weights));
    }
    run.makespan = (microbatches * busiest.fold(0.0, f64::max) + fill).max(least);
    for (rank, (bytes, stages)) in
        (0..layout.pipeline).zip(run.activations.iter_mut().zip(&run.stages_of_rank))
    {
        let chunks: Vec<u64> = stages.iter().map(|&stage| costs.sizes[stage].activation).collect();
        *bytes = least_held(layout, rank, &chunks);
    }
    run
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use pipewright_schedule::costs::{Link, StageSizes};
    use pipewright_schedule::generate::catalogue;

    use super::*;
    use crate::catalogue::by_name;
    use crate::layout::Precision;
    use crate::pipeline::Programs;
    use crate::search::Request;
    use pipewright_shapes::reader;

    /// A layout of one replica.
    fn layout(choice: Choice, pipeline: u32, microbatches: u32) -> Layout {
        let model = reader::read(include_str!("../../tests/cluster/llama_405b.json")).expect("a model").model;
        let machine = by_name("h100").expect("a machine");
        let request = Request::new(model, machine, pipeline, microbatches, 8192, Precision::Half);
        let Choice { schedule, chunks } = choice;
        Layout { pipeline, chunks, schedule, ..request.smallest_layout() }
    }

    /// Estimates the activations of each rank and simulates them, if the schedule exists in this size.
    /// `activation` returns the bytes of a stage.
    fn activations(layout: &Layout, activation: fn(u64) -> u64) -> Option<(Vec<u64>, Vec<u64>)> {
        let stages = layout.stages() as usize;
        let costs = PipelineCosts {
            stages: vec![StageCosts::new(1.0, 1.0, 1.0); stages],
            sizes: (0..stages as u64)
                .map(|stage| StageSizes { activation: activation(stage), ..StageSizes::default() })
                .collect(),
            trained: pipewright_schedule::TrainedStages::ALL,
            link: Link { latency: 0.0, bandwidth: 1e12 },
            links: BTreeMap::new(),
        };
        let simulated = Programs::default().run(layout, &costs).ok()?;
        Some((estimate(layout, &costs).activations, simulated.activations))
    }

    fn equal(_: u64) -> u64 {
        1_000_000
    }

    fn grows(stage: u64) -> u64 {
        (stage + 1) * 100_000
    }

    fn falls(stage: u64) -> u64 {
        1_000_000 / (stage + 1)
    }

    #[test]
    fn no_estimate_needs_more_memory_than_the_simulation() {
        const SIZES: [(u32, u32); 8] = [(2, 2), (2, 8), (3, 12), (4, 4), (4, 6), (4, 7), (5, 20), (8, 40)];
        let mut compared = 0;
        for generator in catalogue().iter().filter(|generator| generator.has_backward()) {
            for (ranks, microbatches) in SIZES {
                for choice in choices(ranks, 4 * ranks, Some(generator.name), None, &[]) {
                    let layout = layout(choice, ranks, microbatches);
                    for activation in [equal, grows, falls] {
                        let Some((estimated, simulated)) = activations(&layout, activation) else { continue };
                        compared += 1;
                        let fits = |(estimate, run): (&u64, &u64)| estimate <= run;
                        let is_least = estimated.iter().zip(&simulated).all(fits);
                        assert!(is_least, "{layout:?}: {estimated:?} and {simulated:?}");
                        assert!(!is_exact(&layout) || estimated == simulated, "{layout:?}");
                    }
                }
            }
        }
        assert!(compared > 300, "{compared}");
    }

    /// Stages of equal costs.
    #[test]
    fn estimates_of_split_schedules_are_near_the_simulation() {
        for name in SPLIT {
            let chunks = if name == "zb-h1" { 1 } else { 2 };
            for (ranks, [inputs, weights]) in [4, 8, 16]
                .into_iter()
                .flat_map(|ranks| [[1.0, 1.0], [1.1, 0.9], [2.0, 1.0]].map(|it| (ranks, it)))
            {
                let layout = layout(
                    Choice { schedule: Some(name.to_owned()), chunks },
                    ranks,
                    ranks.saturating_mul(4),
                );
                let stages = layout.stages() as usize;
                let costs = PipelineCosts {
                    stages: vec![StageCosts::new(1.0, inputs, weights); stages],
                    sizes: vec![StageSizes::default(); stages],
                    trained: pipewright_schedule::TrainedStages::ALL,
                    link: Link { latency: 0.0, bandwidth: 1e12 },
                    links: BTreeMap::new(),
                };
                let simulated = Programs::default().run(&layout, &costs).expect("a run").makespan;
                let ratio = estimate(&layout, &costs).makespan / simulated;
                assert!((ratio - 1.0).abs() < 1e-9, "{name}, {ranks} ranks, {inputs}, {weights}: {ratio}");
            }
        }
    }

    #[test]
    fn the_memory_of_v_half_is_near_the_simulated_one() {
        let v_half = || Choice { schedule: Some("v-half".to_owned()), chunks: 2 };
        for (ranks, microbatches) in [(3, 12), (4, 16), (8, 40)] {
            let (estimated, simulated) =
                activations(&layout(v_half(), ranks, microbatches), equal).expect("a run");
            assert_eq!(estimated.iter().max(), simulated.iter().max(), "{ranks} ranks");
        }
    }
}
