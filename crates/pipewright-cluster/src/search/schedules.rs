//! The schedules that the search tries, and their runs without a simulation.
//!
//! A schedule that defers gradients of weights fills the time in which 1F1B waits for gradients. Its estimate
//! is the work of the busiest rank and the way of the first microbatch to the last rank, which no schedule
//! avoids; ZB-H1 also waits `(p - 1) (I - W)` if gradients of inputs take longer than gradients of weights
//! (arXiv 2401.10241, table 2). This is at most the simulated time, so that a good candidate is not missed. The
//! simulation decides.

use pipewright_schedule::costs::StageCosts;
use pipewright_schedule::generate::{StageRule, find};

use crate::layout::Layout;
use crate::pipeline::{PipelineCosts, PipelineRun, closed_form};

/// The schedules besides 1F1B and interleaved 1F1B. All of them compute gradients of weights apart.
const SPLIT: [&str; 4] = ["zb-h1", "interleaved-zb-h1", "zbvzerobubble", "v-half"];

/// A schedule with the chunks of a rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Choice {
    /// The name; `None` for 1F1B, interleaved if there are several chunks.
    pub(super) schedule: Option<String>,
    pub(super) chunks: u32,
}

/// Returns the schedules for a pipeline of `ranks` ranks and a model of `blocks` blocks.
pub(super) fn choices(ranks: u32, blocks: u32, schedule: Option<&str>, chunks: Option<u32>) -> Vec<Choice> {
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
    let named = |name: &str| {
        let counts = chunk_counts(name).into_iter().filter(|&count| is_possible(count));
        counts.map(|chunks| Choice { schedule: Some(name.to_owned()), chunks }).collect::<Vec<_>>()
    };
    match schedule {
        Some(name) => named(name),
        None if ranks == 1 => vec![Choice { schedule: None, chunks: chunks.unwrap_or(1) }],
        None => {
            let mut counts = loops(ranks, blocks, chunks);
            counts.push(1);
            counts.dedup();
            let usual = counts.into_iter().filter(|&count| is_possible(count));
            let mut all: Vec<Choice> = usual.map(|chunks| Choice { schedule: None, chunks }).collect();
            all.extend(SPLIT.into_iter().flat_map(named));
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

/// Returns the microbatches whose activations a rank holds at least, on average over its chunks: as many as the
/// first rank of 1F1B, half of them for V-Half, and none for schedules that are not known here.
pub(super) fn held(layout: &Layout) -> f64 {
    let of_1f1b = f64::from(layout.pipeline.min(layout.microbatches()));
    match layout.schedule.as_deref() {
        None => of_1f1b,
        Some("v-half") => of_1f1b / 2.0,
        Some(name) if SPLIT.contains(&name) => of_1f1b,
        Some(_) => 0.0,
    }
}

/// Returns the run of a layout's schedule without a simulation. [`held`] gives its activations, unless the
/// schedule has a closed form.
pub(super) fn estimate(layout: &Layout, costs: &PipelineCosts) -> PipelineRun {
    let mut run = closed_form(layout, costs);
    if layout.schedule.is_none() {
        return run;
    }
    let is_v = find(layout.schedule_name())
        .is_ok_and(|generator| matches!(generator.stages, StageRule::V | StageRule::Vs));
    let (ranks, chunks) = (layout.pipeline as usize, layout.chunks as usize);
    if is_v {
        let stage = |rank: usize, chunk: usize| {
            chunk * ranks + if chunk.is_multiple_of(2) { rank } else { ranks - 1 - rank }
        };
        run.stages_of_rank =
            (0..ranks).map(|rank| (0..chunks).map(|chunk| stage(rank, chunk)).collect()).collect();
    }
    let microbatches = f64::from(layout.microbatches());
    let seconds = |stage: &usize| {
        let stage = &costs.stages[*stage];
        stage.forward + stage.input_backward + stage.weight_backward
    };
    let busiest = run.stages_of_rank.iter().map(|stages| stages.iter().map(seconds).sum::<f64>());
    let is_h1 = matches!(layout.schedule_name(), "zb-h1" | "interleaved-zb-h1");
    let waits = |stage: &StageCosts| {
        let gradients = if is_h1 { stage.input_backward - stage.weight_backward } else { 0.0 };
        stage.forward + gradients.max(0.0)
    };
    let fill: f64 = costs.stages.iter().take(ranks - 1).map(waits).sum();
    run.makespan = microbatches * busiest.fold(0.0, f64::max) + fill;
    for (bytes, stages) in run.activations.iter_mut().zip(&run.stages_of_rank) {
        let all: f64 = stages.iter().map(|&stage| costs.sizes[stage].activation as f64).sum();
        *bytes = (all * held(layout)) as u64;
    }
    run
}
