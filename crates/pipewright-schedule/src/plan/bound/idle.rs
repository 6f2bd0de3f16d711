//! The bound for several stages per rank from the time in which ranks are idle, over all cuts and all orders
//! of the later rounds.
//!
//! Until any time `t`, a rank computes no more than what has arrived, so a step takes at least `t` and the
//! rest of the work of the rank (bound 4 of `rank_times.rs`). For a suitable `t` this is a sum over the
//! stages of the rank (`sizes.rs`), and summed over all ranks it is a sum over the stages of the cut, at most
//! `p T`. The means of several such sums, with any weights, are at most `p T` too. A table over stages and
//! layers finds the cut with the smallest mean, and the weights are changed until it hardly grows
//! ([`Cuts::bound`]).
//!
//! The slowest stage sets the pace at which microbatches arrive. So cuts are divided by the longest forward
//! of their stages, each part has its own bound, and the smallest one counts. In the table, a cut also has a
//! level: the longest forward of its stages so far, rounded down to one of a few times.

use std::ops::Range;

use crate::plan::bound::sizes::{SizeTerms, Sizes, TERMS};
use crate::plan::class::Class;
use crate::plan::rank_times::Step;
use crate::plan::tuning::{ROUNDING, idle};

/// Returns a time that no step with the rounds of `class` is below; `low`, which is a bound already, if the
/// model has so many layers that this takes too long, or if no layer takes any time.
pub(super) fn bound(step: Step<'_>, class: Class, low: f64) -> f64 {
    if low <= 0.0 {
        return low;
    }
    let mut low = low;
    loop {
        let target = low * (1.0 + idle::RAISE);
        let Some(found) = least(step, class, low, target) else { return low };
        if found < target || !target.is_finite() {
            return low.max(found);
        }
        low = target;
    }
}

/// Returns a time that no step is below; at most `target`. If it is not above `low`, it may be lower than
/// necessary. `None` if there are too many pieces.
fn least(step: Step<'_>, class: Class, low: f64, target: f64) -> Option<f64> {
    let all = step.layers.forward(0..step.layers.count());
    // The microbatches pass the slowest stage one after another.
    let longest = all.min((target - step.path()) / (step.microbatches - 1.0));
    let mut shortest = shortest(step, class.stages());
    let mut least = target;
    while shortest <= longest && least > low {
        let next = (shortest * idle::PART).max(all * idle::SHORTEST);
        least = Cuts::of(step, class, target, shortest..next)?.bound(low, least);
        if next <= shortest {
            break;
        }
        shortest = next;
    }
    Some(least)
}

/// Returns a lower bound on the longest forward of any cut.
fn shortest(step: Step<'_>, stages: usize) -> f64 {
    let layers = step.layers.count();
    let are_enough = |time: f64| {
        let (mut used, mut first) = (0, 0);
        while first < layers && used < stages {
            let ends = first + 1..=layers;
            let fits = ends.take_while(|&end| step.layers.forward(first..end) <= time).last();
            let Some(end) = fits else { return false };
            (used, first) = (used + 1, end);
        }
        first == layers
    };
    let (mut low, mut high) = (0.0, step.layers.forward(0..layers));
    while high - low > ROUNDING * high {
        let middle = low + (high - low) / 2.0;
        if middle <= low {
            break;
        }
        if are_enough(middle) { high = middle } else { low = middle }
    }
    low
}

/// A stage that a cut may have.
#[derive(Debug, Clone, Copy)]
struct Piece {
    first: usize,
    end: usize,
    /// The level of a cut that ends with this stage, if it was not higher before.
    level: usize,
    /// The row of its sizes at this level. The rows of higher levels follow.
    row: usize,
}

/// Cuts whose longest forward is in some range.
struct Cuts {
    ranks: usize,
    layers: usize,
    levels: usize,
    /// The pieces of each stage, in the order of their first layers.
    stages: Vec<Vec<Piece>>,
    rows: Vec<Sizes>,
}

impl Cuts {
    /// Returns the cuts that may fit into `time`; `None` if there are too many pieces.
    fn of(step: Step<'_>, class: Class, time: f64, longest: Range<f64>) -> Option<Self> {
        let (layers, stages) = (step.layers.count(), class.stages());
        let terms = SizeTerms::of(step, class, &longest);
        let mut found: Vec<Vec<Range<usize>>> = Vec::new();
        let mut count = 0;
        for stage in 0..stages {
            let mut of_stage = Vec::new();
            let last = layers - (stages - stage - 1);
            for first in stage..last {
                let left = time * (1.0 + ROUNDING) - terms.start(stage, first);
                let fits = |end: &usize| {
                    let work = step.microbatches * step.layers.work(first..*end);
                    work <= left && step.layers.forward(first..*end) <= longest.end
                };
                of_stage.extend((first + 1..=last).take_while(fits).map(|end| first..end));
            }
            count += of_stage.len();
            if count > idle::MOST_PIECES {
                return None;
            }
            found.push(of_stage);
        }
        let levels = (idle::ROWS / count.max(1)).clamp(1, idle::LEVELS);
        let edges: Vec<f64> = (0..levels).map(|level| edge(level, levels, longest.start)).collect();
        let mut cuts =
            Self { ranks: class.ranks as usize, layers, levels, stages: Vec::new(), rows: Vec::new() };
        for (stage, of_stage) in found.into_iter().enumerate() {
            let mut pieces = Vec::new();
            for range in of_stage {
                let own = terms.slowest(stage, &range);
                let level = edges.iter().rposition(|&edge| edge <= own * (1.0 + ROUNDING)).unwrap_or(0);
                let row = cuts.rows.len();
                cuts.rows.push(terms.sizes(stage, &range, own));
                cuts.rows.extend(edges[level + 1..].iter().map(|&edge| terms.sizes(stage, &range, edge)));
                pieces.push(Piece { first: range.start, end: range.end, level, row });
            }
            cuts.stages.push(pieces);
        }
        cuts.keep_with_partners(time * (1.0 + ROUNDING));
        Some(cuts)
    }

    /// Removes the pieces that do not fit into `time` with the smallest pieces of all other rounds.
    fn keep_with_partners(&mut self, time: f64) {
        let rounds = self.stages.len() / self.ranks;
        let mut smallest = vec![[f64::INFINITY; TERMS]; rounds];
        for (stage, pieces) in self.stages.iter().enumerate() {
            let smallest = &mut smallest[stage / self.ranks];
            for piece in pieces {
                let sizes = &self.rows[piece.row];
                *smallest = std::array::from_fn(|at| smallest[at].min(sizes[at]));
            }
        }
        for (stage, pieces) in self.stages.iter_mut().enumerate() {
            let others = smallest.iter().enumerate().filter(|&(round, _)| round != stage / self.ranks);
            let others: Vec<&Sizes> = others.map(|(_, sizes)| sizes).collect();
            let rows = &self.rows;
            pieces.retain(|piece| {
                let sizes = &rows[piece.row];
                (0..TERMS).all(|at| sizes[at] + others.iter().map(|other| other[at]).sum::<f64>() <= time)
            });
        }
    }

    /// Returns a lower bound for these cuts, at most `target`. Once it cannot exceed `low`, it is not
    /// improved further.
    fn bound(&self, low: f64, target: f64) -> f64 {
        let mut weights: Sizes = [1.0 / TERMS as f64; TERMS];
        let (mut most, mut since) = (0.0f64, 0);
        // No weights prove more than the largest sum of any cut.
        let mut limit = f64::INFINITY;
        for change in 0..idle::CHANGES {
            let Some(sums) = self.smallest(&weights) else { return target };
            let times: Sizes = sums.map(|sum| sum / self.ranks as f64);
            let mean: f64 = times.iter().zip(&weights).map(|(time, weight)| time * weight).sum();
            let largest = times.iter().copied().fold(0.0, f64::max);
            limit = limit.min(largest);
            since = if mean > most * (1.0 + idle::PROGRESS) { 0 } else { since + 1 };
            most = most.max(mean);
            if most >= target {
                return target;
            }
            if limit <= low.max(most * (1.0 + idle::PROGRESS)) || since > idle::PATIENCE {
                break;
            }
            let rate = idle::RATE / (1.0 + change as f64 / idle::HALF_RATE);
            for (weight, time) in weights.iter_mut().zip(times) {
                *weight =
                    (*weight * (rate * (time / largest - 1.0)).max(-2.0).exp()).max(idle::SMALLEST_WEIGHT);
            }
            let all: f64 = weights.iter().sum();
            weights.iter_mut().for_each(|weight| *weight /= all);
        }
        most
    }

    /// Returns the sums of the cut with the smallest mean, or `None` if there is no cut.
    fn smallest(&self, weights: &Sizes) -> Option<Sizes> {
        let size_of = |sizes: &Sizes| sizes.iter().zip(weights).map(|(size, weight)| size * weight).sum();
        let means: Vec<f64> = self.rows.iter().map(size_of).collect();
        let (levels, width) = (self.levels, (self.layers + 1) * self.levels);
        let mut before = vec![f64::INFINITY; width];
        before[0] = 0.0;
        // For each stage, each end of it, and each level there: the place before it, and the row.
        let mut found = vec![(0u32, 0u32); self.stages.len() * width];
        for (stage, pieces) in self.stages.iter().enumerate() {
            let mut after = vec![f64::INFINITY; width];
            let found = &mut found[stage * width..][..width];
            for piece in pieces {
                for level in 0..levels {
                    let from = piece.first * levels + level;
                    let now = level.max(piece.level);
                    let (row, to) = (piece.row + now - piece.level, piece.end * levels + now);
                    let sum = before[from] + means[row];
                    if sum < after[to] {
                        after[to] = sum;
                        found[to] = (from as u32, row as u32);
                    }
                }
            }
            before = after;
        }
        // The longest forward of every cut here is at the last level, at least.
        let mut at = width - 1;
        if before[at].is_infinite() {
            return None;
        }
        let mut sums = Sizes::default();
        for stage in (0..self.stages.len()).rev() {
            let (from, row) = found[stage * width + at];
            let sizes = &self.rows[row as usize];
            sums = std::array::from_fn(|at| sums[at] + sizes[at]);
            at = from as usize;
        }
        Some(sums)
    }
}

/// Returns the longest forward at which a level begins. The first level begins at 0, the others from half of
/// `longest` to
/// `longest`.
fn edge(level: usize, levels: usize, longest: f64) -> f64 {
    match level {
        0 => 0.0,
        _ if level + 1 == levels => longest,
        _ => longest * 0.5f64.powf(1.0 - (level - 1) as f64 / (levels - 2) as f64),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::bound::equal_layers;
    use crate::plan::class::Path;
    use crate::plan::cuts::for_each_cut;
    use crate::plan::tests::model;

    /// Checks the bound for two stages per rank of one layer each, whose three times are 1. No order and no
    /// placement is faster than `optimum`.
    fn check(ranks: u32, microbatches: u32, expected: f64, optimum: f64) {
        let layers = equal_layers(2 * ranks as usize, ranks);
        let step = Step::of(&layers, ranks, microbatches);
        let found = bound(step, Class { ranks, chunks: 2, path: Path::Loop }, 1.0);
        // The search for weights ends near the largest bound.
        let is_near = (expected * 0.999..=expected * 1.001).contains(&found);
        assert!(is_near && found <= optimum, "{found}, expected {expected}, at most {optimum}");
    }

    /// The last stage of each rank receives few forwards before its first backward. An enumeration of all
    /// orders gave the optima for two and three ranks. With four ranks, there is a plan that takes as long.
    #[test]
    fn ranks_are_idle_before_their_first_backwards() {
        // Each rank has work of 12. Before its first backward, one rank is idle for 1 of 4, and the other one
        // for 1 of 5.
        check(2, 2, 13.0, 13.0);
        // Single moments prove 8.5, 18.5, 11, 46/3, 59/3 and 26.5; several together prove more.
        check(2, 1, 8.831, 9.0);
        check(2, 3, 18.742, 19.0);
        check(3, 1, 12.865, 13.0);
        check(3, 2, 15.996, 16.0);
        check(3, 3, 19.890, 20.0);
        check(4, 4, 26.769, 27.0);
    }

    /// With many microbatches, only the fill is left.
    #[test]
    fn enough_microbatches_keep_ranks_busy() {
        check(4, 40, 240.0 + 1.5, 243.0);
    }

    #[test]
    fn layers_that_take_no_time_have_no_bound() {
        let layers = equal_layers(4, 2);
        let step = Step::of(&layers, 2, 3);
        assert_eq!(bound(step, Class { ranks: 2, chunks: 2, path: Path::Loop }, 0.0), 0.0);
    }

    /// The bound of a part is not above the bound of any cut in it.
    #[test]
    fn no_cut_is_below_the_bound_of_its_part() {
        for seed in 0..30 {
            let (ranks, count) = (2 + (seed % 2) as u32, 9 + (seed % 3) as usize);
            let layers = model(seed, count, ranks, 1);
            let step = Step::of(&layers, ranks, 1 + (seed % 6) as u32);
            let class = Class { ranks, chunks: 2 + (seed % 2) as u32, path: Path::Loop };
            let (all, mut parts) = (step.layers.forward(0..count), 0);
            let mut shortest = shortest(step, class.stages());
            while shortest <= all {
                let longest = shortest..shortest * idle::PART;
                let cuts = Cuts::of(step, class, 1e9, longest.clone()).expect("few pieces");
                let found = cuts.bound(0.0, 1e9);
                let terms = SizeTerms::of(step, class, &longest);
                let mut least = f64::INFINITY;
                for_each_cut(count, class.stages(), &mut |starts| {
                    let ranges = || starts.windows(2).map(|range| range[0]..range[1]).enumerate();
                    let forward = |(_, range): (usize, Range<usize>)| step.layers.forward(range);
                    if !longest.contains(&ranges().map(forward).fold(0.0, f64::max)) {
                        return;
                    }
                    let (mut slowest, mut sums) = (0.0f64, Sizes::default());
                    for (stage, range) in ranges() {
                        slowest = slowest.max(terms.slowest(stage, &range));
                        let sizes = terms.sizes(stage, &range, slowest);
                        sums = std::array::from_fn(|at| sums[at] + sizes[at]);
                    }
                    least = least.min(sums.into_iter().fold(0.0, f64::max) / f64::from(ranks));
                });
                assert!(found <= least * (1.0 + 1e-9), "seed {seed}, {longest:?}: {found} above {least}");
                parts += usize::from(least.is_finite());
                shortest *= idle::PART;
            }
            assert!(parts > 0, "seed {seed}");
        }
    }
}
