//! Decides from measured timelines whether layers should move to other ranks, because ranks have become slower or
//! faster while they run.
//!
//! **The usual times.** The first step is left out, because caches are cold. In the median of the next [`WINDOW`] steps,
//! a layer has its share of the times of its stage, in proportion to its weight.
//!
//! **The speeds.** The slowdown of a rank is the time of the actions of its stages, in the median of the latest
//! [`WINDOW`] steps, over the usual times of their layers. Replicas count by the slowest one. Ranks whose slowdowns
//! differ from the slowdown of most ranks by less than [`NOISE`], or by less than they differ from step to step, count
//! as equally fast.
//!
//! **The cut.** Layers move between neighbouring stages as long as that makes the busiest rank less busy. The
//! program is simulated for each of these cuts, with the usual times of the layers times the slowdowns of their
//! ranks, and the fastest one counts. The schedule and the ranks of the stages stay as they are.
//!
//! **The decision.** Moving is right if the step becomes shorter by at least [`LEAST_GAIN`], and if the time that this
//! saves in the steps that are left, or in [`HORIZON`] steps if more are left, is more than the time of the move. One of
//! two cuts cannot be better than the other one and worse by so much at the same speeds, so a run does not move back and
//! forth while its ranks keep their speed.
//!
//! **Cost.** The time of an observation is linear in the timeline. A decision simulates a step for each layer that moves.

use std::ops::Range;

use crate::costs::{Costs, StageCosts};
use crate::ids::{Rank, StageIndex};
use crate::measured::{costs_of, program_of, replicas};
use crate::partition::Partition;
use crate::placement::Placement;
use crate::schedule::Program;
use crate::simulate::timed;
use crate::timeline::Timeline;

/// The number of steps from which the usual times, and later the speeds follow.
pub const WINDOW: usize = 10;
/// The number of steps from one decision of a run to the next.
pub const EVERY: u64 = 5;
/// The least difference of two slowdowns that counts, as a share.
pub const NOISE: f64 = 0.1;
/// The least share of a step that a move saves.
pub const LEAST_GAIN: f64 = 0.05;
/// The most steps over which the time of a move has to pay off.
pub const HORIZON: u64 = 100;

/// The largest number of events of a step that is observed. Decisions about larger steps would delay the training.
const MOST_EVENTS: usize = 200_000;

/// The largest number of stages for which several boundaries move at once.
const MOST_SHIFTED: usize = 128;

/// The times of the stages of a run in its latest steps.
#[derive(Debug)]
pub struct Rebalancer {
    /// The relative cost of each layer.
    weights: Vec<u64>,
    /// The usual times of each layer; `None` before they are measured.
    layers: Option<Vec<Times>>,
    /// The times of each stage in the latest steps.
    window: Vec<Vec<Times>>,
    /// The first replica of the latest step.
    latest: Option<Timeline>,
    /// Whether the next step is left out.
    is_cold: bool,
}

/// The seconds of `F`, `I`, `W` and `B` for one microbatch.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct Times([f64; 4]);

/// The costs of a move, and how long it may pay off.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MoveCosts<'a> {
    /// The bytes of each layer that a move sends: parameters and optimizer state.
    pub layer_bytes: &'a [u64],
    /// The seconds that a byte takes.
    pub seconds_per_byte: f64,
    /// The steps that are left.
    pub steps_left: u64,
}

/// The outcome of a decision.
#[derive(Debug, Clone, PartialEq)]
pub enum Decision {
    /// The steps are too few, or cannot be simulated.
    Unknown,
    /// The cut stays.
    Stay,
    /// Another cut is better.
    Move(Box<Proposal>),
}

/// A cut that is better than the present one.
#[derive(Debug, Clone, PartialEq)]
pub struct Proposal {
    /// The layers of each stage.
    pub cut: Partition,
    /// The time of each rank's actions over their usual time.
    pub slowdowns: Vec<f64>,
    /// The seconds of a step with the present cut, as predicted.
    pub before: f64,
    /// The seconds of a step with the other cut, as predicted.
    pub after: f64,
    /// The predicted seconds of the move.
    pub moving: f64,
    /// The bytes that ranks send.
    pub bytes: u64,
}

/// Layers that go from one stage to another.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MovedRange {
    /// The layers.
    pub layers: Range<usize>,
    /// The stage that has them.
    pub from: StageIndex,
    /// The stage that gets them.
    pub to: StageIndex,
}

impl Rebalancer {
    /// Makes the observer of a run whose layers have these relative costs.
    pub fn new(weights: Vec<u64>) -> Self {
        Self { weights, layers: None, window: Vec::new(), latest: None, is_cold: true }
    }

    /// Adds the timeline of the next step, in which the stages had the layers of `cut`. Timelines without some stages
    /// are left out, and so are timelines with more than 200,000 events.
    pub fn observe(&mut self, timeline: &Timeline, cut: &Partition) {
        if std::mem::take(&mut self.is_cold) || timeline.events().len() > MOST_EVENTS {
            return;
        }
        let Ok(replicas) = replicas(timeline) else { return };
        let of_replica = |replica: &Timeline| -> Vec<Times> {
            costs_of(std::slice::from_ref(replica)).stages.iter().map(Times::of).collect()
        };
        let slower = |one: Vec<Times>, other: Vec<Times>| {
            one.into_iter().zip(other).map(|(one, other)| one.slower(other)).collect()
        };
        let Some(stages) = replicas.iter().map(of_replica).reduce(slower) else { return };
        if stages.len() != cut.stages() as usize {
            return;
        }
        self.latest = replicas.into_iter().next();
        if self.window.len() == WINDOW {
            self.window.remove(0);
        }
        self.window.push(stages);
        if self.layers.is_none() && self.window.len() == WINDOW {
            self.layers = Some(shared(&medians(&self.window), cut, &self.weights));
            self.window.clear();
        }
    }

    /// Forgets the latest steps, because the layers of the stages have changed.
    pub fn restart(&mut self) {
        self.window.clear();
        self.is_cold = true;
    }

    /// Decides after a step whether layers of the present `cut` should move.
    pub fn decide(&self, cut: &Partition, costs: MoveCosts<'_>) -> Decision {
        let (Some(layers), Some(latest)) = (&self.layers, &self.latest) else { return Decision::Unknown };
        if self.window.len() < WINDOW {
            return Decision::Unknown;
        }
        let measured = medians(&self.window);
        let Ok(program) = program_of(latest) else { return Decision::Unknown };
        let placement = program.placement().clone();
        let slowdowns = slowdowns(&self.window, &measured, layers, cut, &placement);
        let run = Run {
            program,
            placement,
            layers,
            slowdowns,
            latency: costs_of(std::slice::from_ref(latest)).link.latency,
        };
        run.decide(cut, costs)
    }
}

/// The run at the present speeds.
struct Run<'a> {
    program: Program,
    placement: Placement,
    layers: &'a [Times],
    slowdowns: Vec<f64>,
    latency: f64,
}

impl Run<'_> {
    fn decide(self, cut: &Partition, costs: MoveCosts<'_>) -> Decision {
        let present = starts_of(cut);
        let Some(before) = self.step(&present) else { return Decision::Unknown };
        let (mut best, mut starts) = ((before, present.clone()), present);
        while let Some(next) = self.lighter(&starts) {
            starts = next;
            if let Some(time) = self.step(&starts).filter(|time| *time < best.0) {
                best = (time, starts.clone());
            }
        }
        let (after, starts) = best;
        let layers = starts[starts.len() - 1];
        let found = Partition::from_starts(starts[..starts.len() - 1].to_vec(), layers);
        let bytes = layer_moves(cut, &found)
            .into_iter()
            .filter(|moved| self.placement.rank_of(moved.from) != self.placement.rank_of(moved.to))
            .flat_map(|moved| moved.layers)
            .map(|layer| costs.layer_bytes.get(layer).copied().unwrap_or_default())
            .sum::<u64>();
        let moving = bytes as f64 * costs.seconds_per_byte;
        let saved = (before - after) * costs.steps_left.min(HORIZON) as f64;
        if before - after < LEAST_GAIN * before || saved <= moving {
            return Decision::Stay;
        }
        let slowdowns = self.slowdowns;
        Decision::Move(Box::new(Proposal { cut: found, slowdowns, before, after, moving, bytes }))
    }

    fn times(&self, stage: usize, range: Range<usize>) -> Times {
        let rank = self.placement.rank_of(StageIndex::new(stage as u32));
        let slowdown = self.slowdowns.get(rank.index()).copied().unwrap_or(1.0);
        self.layers[range].iter().fold(Times::default(), |sum, layer| sum.plus(*layer)).times(slowdown)
    }

    /// Returns the predicted seconds of a step.
    fn step(&self, starts: &[usize]) -> Option<f64> {
        let stages = starts.windows(2).enumerate();
        let stages = stages.map(|(stage, ends)| self.times(stage, ends[0]..ends[1]).costs()).collect();
        let mut costs = Costs { stages, ..Costs::default() };
        costs.link.latency = self.latency;
        Some(timed(&self.program, &costs).ok()?.timeline().makespan())
    }

    /// Returns the time of the busiest rank, and the sum of the squares of the times of all ranks.
    fn load(&self, starts: &[usize]) -> (f64, f64) {
        let mut loads = vec![0.0; self.program.ranks() as usize];
        for (stage, ends) in starts.windows(2).enumerate() {
            let rank = self.placement.rank_of(StageIndex::new(stage as u32));
            loads[rank.index()] += self.times(stage, ends[0]..ends[1]).work();
        }
        (loads.iter().copied().fold(0.0, f64::max), loads.iter().map(|load| load * load).sum())
    }

    /// Returns the cut with the least load among those in which one layer has moved; `None` if none is better
    /// than this one. A layer may go to a stage far away, by way of layers of the stages between.
    fn lighter(&self, starts: &[usize]) -> Option<Vec<usize>> {
        let stages = starts.len() - 1;
        let mut best = (self.load(starts), None);
        for first in 1..stages {
            let end = if stages > MOST_SHIFTED { first + 1 } else { stages };
            for last in first..end {
                for is_up in [true, false] {
                    let Some(cut) = shifted(starts, first..last + 1, is_up) else { continue };
                    let load = self.load(&cut);
                    // Rounding must not make one of two equal cuts the better one.
                    let is_less = |one: f64, other: f64| one < other * (1.0 - 1e-9);
                    let (busiest, all) = best.0;
                    if is_less(load.0, busiest) || !is_less(busiest, load.0) && is_less(load.1, all) {
                        best = (load, Some(cut));
                    }
                }
            }
        }
        best.1
    }
}

impl Times {
    fn of(costs: &StageCosts) -> Self {
        Self([costs.forward, costs.input_backward, costs.weight_backward, costs.backward])
    }

    fn costs(self) -> StageCosts {
        let [forward, input, weight, backward] = self.0;
        StageCosts { backward, ..StageCosts::new(forward, input, weight) }
    }

    /// Returns the time that a microbatch takes in all.
    fn work(self) -> f64 {
        let [forward, input, weight, backward] = self.0;
        forward + backward.max(input + weight)
    }

    fn with(self, other: Self, combine: impl Fn(f64, f64) -> f64) -> Self {
        Self(std::array::from_fn(|index| combine(self.0[index], other.0[index])))
    }

    fn plus(self, other: Self) -> Self {
        self.with(other, |one, other| one + other)
    }

    fn slower(self, other: Self) -> Self {
        self.with(other, f64::max)
    }

    fn times(self, factor: f64) -> Self {
        Self(self.0.map(|time| time * factor))
    }
}

/// Returns the layers that go from stage to stage between two cuts into as many stages, in their order.
pub fn layer_moves(before: &Partition, after: &Partition) -> Vec<MovedRange> {
    let mut moves: Vec<MovedRange> = Vec::new();
    let stage_of = |cut: &Partition| -> Vec<StageIndex> {
        let stages = (0..).map(StageIndex::new).zip(cut.ranges());
        stages.flat_map(|(stage, range)| range.map(move |_| stage)).collect()
    };
    for (layer, (from, to)) in stage_of(before).into_iter().zip(stage_of(after)).enumerate() {
        match moves.last_mut() {
            _ if from == to => {}
            Some(last) if (last.from, last.to, last.layers.end) == (from, to, layer) => last.layers.end += 1,
            _ => moves.push(MovedRange { layers: layer..layer + 1, from, to }),
        }
    }
    moves
}

fn starts_of(cut: &Partition) -> Vec<usize> {
    cut.ranges().map(|range| range.start).chain([cut.layers()]).collect()
}

/// Returns the cut with some boundaries one layer later or earlier, unless a stage would be empty.
fn shifted(starts: &[usize], boundaries: Range<usize>, is_up: bool) -> Option<Vec<usize>> {
    let mut cut = starts.to_vec();
    for start in &mut cut[boundaries.clone()] {
        *start = if is_up { *start + 1 } else { start.checked_sub(1)? };
    }
    let is_full =
        cut[boundaries.start - 1] < cut[boundaries.start] && cut[boundaries.end - 1] < cut[boundaries.end];
    is_full.then_some(cut)
}

/// Returns the usual times of each layer: its share of the times of its stage.
fn shared(stages: &[Times], cut: &Partition, weights: &[u64]) -> Vec<Times> {
    let mut layers = Vec::with_capacity(cut.layers());
    for (times, range) in stages.iter().zip(cut.ranges()) {
        let weight = |layer: usize| weights.get(layer).copied().unwrap_or_default() as f64;
        let (count, all) = (range.len() as f64, range.clone().map(weight).sum::<f64>());
        let share = |layer| if all > 0.0 { weight(layer) / all } else { count.recip() };
        layers.extend(range.map(|layer| times.times(share(layer))));
    }
    layers
}

/// Returns the medians of the times of each stage.
fn medians(window: &[Vec<Times>]) -> Vec<Times> {
    let stages = window.first().map_or(0, Vec::len);
    let median_of =
        |stage: usize, kind: usize| median(window.iter().map(|step| step[stage].0[kind]).collect());
    (0..stages).map(|stage| Times(std::array::from_fn(|kind| median_of(stage, kind)))).collect()
}

/// Returns the slowdown of each rank.
fn slowdowns(
    window: &[Vec<Times>],
    measured: &[Times],
    layers: &[Times],
    cut: &Partition,
    placement: &Placement,
) -> Vec<f64> {
    let usual: Vec<Times> = cut
        .ranges()
        .map(|range| layers[range].iter().fold(Times::default(), |sum, layer| sum.plus(*layer)))
        .collect();
    let work_of = |stages: &[Times], rank: Rank| -> f64 {
        placement.stages_of(rank).iter().map(|stage| stages[stage.index()].work()).sum()
    };
    let ratio = |stages: &[Times], rank| {
        let usual = work_of(&usual, rank);
        if usual > 0.0 { work_of(stages, rank) / usual } else { 1.0 }
    };
    let all: Vec<f64> = placement.all_ranks().map(|rank| ratio(measured, rank)).collect();
    let most = median(all.clone());
    let spread = |rank| {
        let mut steps: Vec<f64> = window.iter().map(|stages| ratio(stages, rank)).collect();
        steps.sort_unstable_by(f64::total_cmp);
        (steps[steps.len() * 3 / 4] - steps[steps.len() / 4]) / most
    };
    let ranks = placement.all_ranks().zip(all);
    let counted = |(rank, slowdown): (Rank, f64)| {
        let is_noise = (slowdown / most - 1.0).abs() < NOISE.max(spread(rank));
        if is_noise { most } else { slowdown }
    };
    ranks.map(counted).collect()
}

/// Returns the median, the lower of two; 1 for no values.
fn median(mut values: Vec<f64>) -> f64 {
    let Some(middle) = values.len().checked_sub(1).map(|last| last / 2) else { return 1.0 };
    *values.select_nth_unstable_by(middle, f64::total_cmp).1
}

#[cfg(test)]
mod tests;
