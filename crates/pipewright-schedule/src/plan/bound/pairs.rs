//! The bound for two stages per rank, over all cuts, and with each stage of the second round on any rank.
//!
//! A search over cuts, stage by stage, looks for one whose stages fit into the time `T` of all ranks. If it
//! ends without one, `T` is too short. It may visit a limited number of beginnings of cuts; if that is not
//! enough, nothing is proved about `T`. The sizes of the stages of a rank are at most `T` in sum
//! (`terms.rs`), with any of several weights. So a beginning of a cut needs no continuation if, for one of
//! them,
//!
//! 1. its sizes, and the smallest possible sum of the sizes of the stages after it, are more than `p T`;
//! 2. more stages of the second round are longer than some time than there are stages of the first round that
//!    leave so much.
//!
//! A cut fits if its ranks can have partners for all stages of the second round ([`Fit::has_partners`]).

use crate::plan::bound::bisect::bisect;
use crate::plan::bound::terms::{Arrivals, Terms};
use crate::plan::class::Class;
use crate::plan::rank_times::Step;
use crate::plan::tuning::bound::ACCURACY;
use crate::plan::tuning::{ROUNDING, pairs};

/// The weights of the three bounds of `terms.rs` that are tried together.
const WEIGHTS: [[f64; 3]; 4] = [[1.0, 0.0, 0.0], [0.5, 0.0, 0.5], [0.0, 0.0, 1.0], [0.5, 0.25, 0.25]];

type Sizes = [f64; WEIGHTS.len()];

/// Returns a time that no step with two rounds is below. `low` is a bound already.
pub(super) fn bound(step: Step<'_>, class: Class, low: f64) -> f64 {
    bound_within(step, class, low, [pairs::VISITS, pairs::ALL_VISITS])
}

/// Returns the bound. At most `visits` beginnings of cuts are visited for a time, and `all_visits` for all times together.
fn bound_within(step: Step<'_>, class: Class, low: f64, [visits, all_visits]: [usize; 2]) -> f64 {
    let arrivals = Arrivals::of(step);
    let all = WEIGHTS.map(|weights| Terms { step, class, arrivals: &arrivals, weights });
    let mut left = all_visits;
    bisect(low, ACCURACY, |time| {
        let may_visit = left.min(visits);
        let mut fit = Fit::of(&all, time, may_visit);
        let is_found = fit.is_found(0, Sizes::default());
        left -= may_visit - fit.left;
        is_found
    })
}

/// A stage that a cut may have: the first layer after it, and its size for each of the weights.
#[derive(Debug, Clone, Copy)]
struct Piece {
    end: usize,
    sizes: Sizes,
}

/// The search for a cut that fits into a time.
struct Fit {
    ranks: usize,
    layers: usize,
    time: f64,
    /// For each number of stages, and each number of layers in them, the stages that may follow.
    pieces: Vec<Vec<Vec<Piece>>>,
    /// For the same, the smallest sums of the sizes of all stages that follow.
    after: Vec<Vec<Sizes>>,
    /// The stages so far.
    chosen: Vec<Piece>,
    /// The beginnings of cuts that may still be visited.
    left: usize,
}

impl Fit {
    fn of(all: &[Terms<'_>; WEIGHTS.len()], time: f64, left: usize) -> Self {
        let (step, class) = (all[0].step, all[0].class);
        let (layers, stages, ranks) = (step.layers.count(), class.stages(), class.ranks as usize);
        let time = time * (1.0 + ROUNDING);
        let mut pieces = vec![vec![Vec::new(); layers + 1]; stages];
        let mut shortest = [[f64::INFINITY; WEIGHTS.len()]; 2];
        for (stage, own) in pieces.iter_mut().enumerate() {
            let last = layers - (stages - stage - 1);
            for (first, own) in own.iter_mut().enumerate().take(last).skip(stage) {
                let start = all[0].start(stage, first);
                for end in first + 1..=last {
                    if start + step.microbatches * step.layers.work(first..end) > time {
                        break;
                    }
                    let sizes: Sizes = std::array::from_fn(|at| all[at].size(stage, first..end));
                    let shortest = &mut shortest[stage / ranks];
                    *shortest = std::array::from_fn(|at| shortest[at].min(sizes[at]));
                    own.push(Piece { end, sizes });
                }
            }
        }
        let mut after = vec![vec![[f64::INFINITY; WEIGHTS.len()]; layers + 1]; stages + 1];
        after[stages][layers] = Sizes::default();
        for stage in (0..stages).rev() {
            let partner = shortest[1 - stage / ranks];
            for first in 0..layers {
                let own = &mut pieces[stage][first];
                own.retain(|piece| (0..WEIGHTS.len()).all(|at| piece.sizes[at] + partner[at] <= time));
                let mut least = [f64::INFINITY; WEIGHTS.len()];
                for piece in own.iter() {
                    let rest = &after[stage + 1][piece.end];
                    least = std::array::from_fn(|at| least[at].min(piece.sizes[at] + rest[at]));
                }
                after[stage][first] = least;
            }
        }
        Self { ranks, layers, time, pieces, after, chosen: Vec::new(), left }
    }

    /// Returns whether a cut that begins with the chosen stages may fit. `sums` are the sums of their sizes.
    fn is_found(&mut self, first: usize, sums: Sizes) -> bool {
        let stage = self.chosen.len();
        if stage == self.pieces.len() {
            return first == self.layers && self.has_partners();
        }
        for at in 0..self.pieces[stage][first].len() {
            let piece = self.pieces[stage][first][at];
            let sums: Sizes = std::array::from_fn(|at| sums[at] + piece.sizes[at]);
            let most = self.ranks as f64 * self.time;
            let rest = &self.after[stage + 1][piece.end];
            if (0..WEIGHTS.len()).any(|at| sums[at] + rest[at] > most) {
                continue;
            }
            if self.left == 0 {
                return true;
            }
            self.left -= 1;
            self.chosen.push(piece);
            let is_found = self.leaves_time(stage) && self.is_found(piece.end, sums);
            self.chosen.pop();
            if is_found {
                return true;
            }
        }
        false
    }

    /// Returns whether as many stages of the first round leave the time for a stage of the second round as
    /// there are stages of that size so far.
    fn leaves_time(&self, stage: usize) -> bool {
        if stage < self.ranks {
            return true;
        }
        let (firsts, seconds) = self.chosen.split_at(self.ranks);
        (0..WEIGHTS.len()).all(|at| {
            let size = self.chosen[stage].sizes[at];
            let needed = seconds.iter().filter(|piece| piece.sizes[at] >= size).count();
            firsts.iter().filter(|piece| piece.sizes[at] + size <= self.time).count() >= needed
        })
    }

    /// Returns whether each stage of the second round can be on the rank of another stage of the first round,
    /// so that both fit for all weights.
    fn has_partners(&self) -> bool {
        let mut partner_of: Vec<Option<usize>> = vec![None; self.ranks];
        (0..self.ranks).all(|second| {
            let mut seen = vec![false; self.ranks];
            self.finds_partner(second, &mut partner_of, &mut seen)
        })
    }

    /// Finds a partner for a stage of the second round; the partners of others may change for it.
    fn finds_partner(&self, second: usize, partner_of: &mut [Option<usize>], seen: &mut [bool]) -> bool {
        for first in 0..self.ranks {
            let (one, other) = (&self.chosen[first], &self.chosen[self.ranks + second]);
            let fits = (0..WEIGHTS.len()).all(|at| one.sizes[at] + other.sizes[at] <= self.time);
            if !fits || std::mem::replace(&mut seen[first], true) {
                continue;
            }
            if partner_of[first].is_none_or(|known| self.finds_partner(known, partner_of, seen)) {
                partner_of[first] = Some(second);
                return true;
            }
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::class::Path;
    use crate::plan::cuts::for_each_cut;
    use crate::plan::tests::model;

    /// Returns the smallest time over all cuts and all partners by trying them.
    fn by_trying(step: Step<'_>, class: Class) -> f64 {
        let (ranks, arrivals) = (class.ranks as usize, Arrivals::of(step));
        let mut least = f64::INFINITY;
        for_each_cut(step.layers.count(), class.stages(), &mut |starts| {
            let longest = |seconds: &[usize]| {
                let longest_for = |weights: [f64; 3]| {
                    let terms = Terms { step, class, arrivals: &arrivals, weights };
                    let size = |stage: usize| terms.size(stage, starts[stage]..starts[stage + 1]);
                    let size_of = |(rank, &second): (usize, &usize)| size(rank) + size(second);
                    seconds.iter().enumerate().map(size_of).fold(0.0, f64::max)
                };
                WEIGHTS.into_iter().map(longest_for).fold(0.0, f64::max)
            };
            for_each_order(ranks, &mut |order| {
                let seconds: Vec<usize> = order.iter().map(|index| ranks + index).collect();
                least = least.min(longest(&seconds));
            });
        });
        least
    }

    fn for_each_order(count: usize, visit: &mut dyn FnMut(&[usize])) {
        fn extend(order: &mut Vec<usize>, count: usize, visit: &mut dyn FnMut(&[usize])) {
            if order.len() == count {
                return visit(order);
            }
            for next in 0..count {
                if !order.contains(&next) {
                    order.push(next);
                    extend(order, count, visit);
                    order.pop();
                }
            }
        }
        extend(&mut Vec::new(), count, visit);
    }

    #[test]
    fn the_search_finds_the_best_cut_and_partners() {
        for seed in 0..40 {
            let (ranks, count) = (2 + (seed % 3) as u32, 8 + (seed % 4) as usize);
            let layers = model(seed, count, ranks, 1);
            let step = Step::of(&layers, ranks, 1 + (seed % 7) as u32);
            let class = Class { ranks, chunks: 2, path: Path::Loop };
            let (found, best) = (bound(step, class, 0.0), by_trying(step, class));
            // The bisection ends below the bound.
            assert!((best * 0.999..=best * (1.0 + 1e-8)).contains(&found), "seed {seed}: {found} {best}");
            for visits in [0, 1, 5, 20] {
                let found = bound_within(step, class, 0.0, [visits, 3 * visits]);
                assert!(found <= best * (1.0 + 1e-8), "seed {seed}, {visits} visits: {found} {best}");
            }
        }
    }
}
