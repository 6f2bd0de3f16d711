//! The bound for several stages a rank from the time in which ranks are idle, over all cuts and all orders of the later
//! rounds.
//!
//! **Idle time of a rank.** Let no backward of a rank begin before `t`. Until `t`, the rank computes forwards only, so
//! it is idle for at least `t` less the time that its stages can compute forwards until then. Forward `n` (from 0) of
//! a stage starts no earlier than `F` of the layers before the stage plus `n slowest`, where `slowest` is the largest `F`
//! of the stage and of any layer before its end ([`Arrivals::computed`]). Three such bounds hold for every rank:
//!
//! 1. the start of its first stage;
//! 2. with the earliest `t` at which any backward can begin: `F` of all layers, and the messages;
//! 3. with the earliest `t` at which the backward of its last stage can begin: also `I` of the layers after that stage.
//!    All other backwards of the rank follow that one. The forwards of its other stages count as computed by then.
//!
//! **All ranks.** A mean of the three with any weights is a bound as well, and its sum over all ranks is a sum over stages:
//! each term depends on the number of a stage and its layers alone. So a table over stages and layers finds the cut with the
//! smallest sum. The ranks together have `p T`, which is at least their work and their idle time. Cuts in which the work
//! of one stage exceeds `T` do not count.

use std::ops::Range;

use crate::plan::bound::bisect;
use crate::plan::class::Class;
use crate::plan::rank_times::Step;

/// The weights of the three bounds are multiples of one over this number.
const PARTS: u32 = 4;

/// Returns a time that no step with the rounds of `class` is below. `low` is a bound already.
pub(super) fn bound(step: Step<'_>, class: Class, low: f64) -> f64 {
    let arrivals = Arrivals::of(step);
    let ranks = f64::from(step.ranks);
    let work = step.microbatches * step.layers.work(0..step.layers.count());
    let weights = weights();
    bisect(low, |time| {
        // A cut that is short enough for one mean is often short enough for others.
        let mut known: Vec<Vec<usize>> = Vec::new();
        weights.iter().all(|&weights| {
            let rounds = Rounds { step, class, arrivals: &arrivals, weights };
            let is_enough = |idle: f64| work + idle <= ranks * time;
            if known.iter().any(|starts| is_enough(rounds.of_cut(starts))) {
                return true;
            }
            let Some((idle, starts)) = rounds.least(time) else { return false };
            known.push(starts);
            is_enough(idle)
        })
    })
}

/// Returns all weights of the three bounds.
fn weights() -> Vec<[f64; 3]> {
    let share = |parts: u32| f64::from(parts) / f64::from(PARTS);
    let with = |one: u32| (0..=PARTS - one).map(move |two| [one, two, PARTS - one - two].map(share));
    (0..=PARTS).flat_map(with).collect()
}

/// The times at which forwards can start.
struct Arrivals<'a> {
    step: Step<'a>,
    /// For each layer, the largest `F` of the layers before it.
    slowest: Vec<f64>,
}

impl<'a> Arrivals<'a> {
    fn of(step: Step<'a>) -> Self {
        let mut slowest = vec![0.0f64];
        for layer in &step.layers.list {
            slowest.push(slowest[slowest.len() - 1].max(layer.forward));
        }
        Self { step, slowest }
    }

    /// Returns the most time that a stage of these layers, which starts at `start` at the earliest, computes forwards
    /// until `until`.
    fn computed(&self, layers: &Range<usize>, start: f64, until: f64) -> f64 {
        let forward = self.step.layers.forward(layers.clone());
        let slowest = self.slowest[layers.end].max(forward);
        let since = (until - start).max(0.0);
        let all = self.step.microbatches * forward;
        if since >= self.step.microbatches * slowest {
            return all;
        }
        let whole = (since / slowest).floor();
        (whole * forward + (since - whole * slowest).min(forward)).min(all)
    }
}

/// The cuts of a class with weights of the three bounds.
struct Rounds<'a> {
    step: Step<'a>,
    class: Class,
    arrivals: &'a Arrivals<'a>,
    weights: [f64; 3],
}

impl Rounds<'_> {
    /// Returns the smallest idle time of all ranks together, and its cut; `None` if every cut has a stage with more work
    /// than `time`.
    fn least(&self, time: f64) -> Option<(f64, Vec<usize>)> {
        let (layers, stages) = (self.step.layers.count(), self.class.stages());
        let mut before = vec![f64::INFINITY; layers + 1];
        before[0] = 0.0;
        // For each stage and each end of it, its best first layer.
        let mut firsts = vec![0; stages * (layers + 1)];
        for stage in 0..stages {
            let mut after = vec![f64::INFINITY; layers + 1];
            let last = layers - (stages - stage - 1);
            for first in (stage..last).filter(|&first| before[first].is_finite()) {
                let start = self.start(stage, first);
                for end in first + 1..=last {
                    if start + self.step.microbatches * self.step.layers.work(first..end) > time {
                        break;
                    }
                    let sum = before[first] + self.idle(stage, first..end);
                    if sum < after[end] {
                        after[end] = sum;
                        firsts[stage * (layers + 1) + end] = first;
                    }
                }
            }
            before = after;
        }
        let mut starts = vec![layers; stages + 1];
        for stage in (0..stages).rev() {
            starts[stage] = firsts[stage * (layers + 1) + starts[stage + 1]];
        }
        before[layers].is_finite().then_some((before[layers], starts))
    }

    /// Returns the idle time of all ranks together for a cut.
    fn of_cut(&self, starts: &[usize]) -> f64 {
        starts.windows(2).enumerate().map(|(stage, range)| self.idle(stage, range[0]..range[1])).sum()
    }

    /// Returns the earliest start of a stage.
    fn start(&self, stage: usize, first: usize) -> f64 {
        self.step.fill(if stage < self.class.ranks as usize { stage } else { 0 }, first)
    }

    /// Returns the term of a stage in the sum of idle times.
    fn idle(&self, stage: usize, layers: Range<usize>) -> f64 {
        let (ranks, stages) = (self.class.ranks as usize, self.class.stages());
        let start = self.start(stage, layers.start);
        let [filled, turned, reached] = self.weights;
        let turn = self.step.first_backward(self.step.layers.count(), 0);
        let mut idle = -turned * self.arrivals.computed(&layers, start, turn);
        if stage < ranks {
            idle += filled * start + turned * turn;
        }
        if stage >= stages - ranks {
            let backward = self.step.first_backward(layers.end, stages - 1 - stage);
            idle + reached * (backward - self.arrivals.computed(&layers, start, backward))
        } else {
            idle - reached * self.step.microbatches * self.step.layers.forward(layers)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::bound::equal_layers;
    use crate::plan::class::Path;

    /// Checks the bound for two stages a rank of one layer each, whose three times are 1. No order and no placement is
    /// faster than `optimum`.
    fn check(ranks: u32, microbatches: u32, expected: f64, optimum: f64) {
        let layers = equal_layers(2 * ranks as usize, ranks);
        let step = Step::of(&layers, ranks, microbatches);
        let found = bound(step, Class { ranks, chunks: 2, path: Path::Loop }, 0.0);
        // The bisection ends below the bound.
        assert!((expected * 0.999..=expected).contains(&found) && found <= optimum, "{found} {expected}");
    }

    /// The last stage of each rank receives few forwards before its first backward. An enumeration of all orders gave
    /// the optima.
    #[test]
    fn ranks_are_idle_before_their_first_backwards() {
        // Work of 12 a rank. Before its first backward, one rank is idle for 1 of 4, and the other one for 1 of 5.
        check(2, 2, 13.0, 13.0);
        check(2, 1, 8.5, 9.0);
        check(2, 3, 18.5, 19.0);
        check(3, 1, 11.0, 13.0);
        check(3, 2, 46.0 / 3.0, 16.0);
        check(3, 3, 59.0 / 3.0, 20.0);
        // Work of 24 a rank. The ranks are idle for 3 of 8, 2 of 9, 2 of 10 and 3 of 11.
        check(4, 4, 26.5, f64::INFINITY);
    }

    /// With many microbatches, only the fill is left.
    #[test]
    fn enough_microbatches_keep_ranks_busy() {
        check(4, 40, 240.0 + 1.5, f64::INFINITY);
    }
}
