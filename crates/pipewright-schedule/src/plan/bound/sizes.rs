//! Terms of the stages for the bound of `idle.rs`. Summed over the stages of a rank, each term is at most the
//! time of the step.
//!
//! Each term belongs to a time `t` of every rank. Until then the rank has done no more than what has arrived
//! of its stages' work, and the rest comes after `t`. So `t` and the rest, summed over the stages of the
//! rank, are at most the time of the step. The time `t` counts for the first or the last stage of the rank.
//!
//! 1. `t` is the start of the rank's first stage: nothing has been done by then.
//! 2. `t` is the first backward of the rank's last stage, which all its other backwards follow. The forwards
//!    of its other stages count as done.
//! 3. `t` is a time that all ranks share. There are several.
//!
//! Forwards of a stage follow each other no faster than the slowest stage so far takes them. Backwards follow
//! each other no faster than forwards of the slowest stage of all, or input backwards of the stage itself.
//! Every round visits all ranks, so each message within a round goes to another rank. Gradients pass only the
//! stages from the last one to the first that runs backward. The step does not end before they arrive there,
//! which is the time that counts for stages that run forward only.

use std::ops::Range;

use crate::plan::bound::terms::{Arrivals, arrived};
use crate::plan::class::Class;
use crate::plan::rank_times::Step;
use crate::plan::tuning::idle;

/// The numbers of shared times before the earliest first backward, and from it on.
const EARLY: usize = 3;
const LATE: usize = 5;
/// The number of terms.
pub(super) const TERMS: usize = 2 + EARLY + LATE;

/// The terms of a stage, in the order of the list above.
pub(super) type Sizes = [f64; TERMS];

/// The data that the terms of all stages share.
pub(super) struct SizeTerms<'a> {
    step: Step<'a>,
    class: Class,
    /// The longest forward of a cut is not below this.
    longest: f64,
    arrivals: Arrivals<'a>,
    /// The times that all ranks share.
    times: [f64; EARLY + LATE],
}

impl<'a> SizeTerms<'a> {
    /// The last shared time is the share [`idle::LAST`] of `I` of all layers after the earliest first backward.
    pub(super) fn of(step: Step<'a>, class: Class, longest: &Range<f64>) -> Self {
        let arrivals = Arrivals::of(step);
        let mut terms = Self { step, class, longest: longest.start, arrivals, times: [0.0; EARLY + LATE] };
        let layers = step.layers.count();
        let turn = terms.first_backward(class.stages() - 1, layers);
        let all_inputs = idle::LAST * step.layers.input(0..layers);
        terms.times = std::array::from_fn(|at| match at.checked_sub(EARLY) {
            None => turn * (at + 1) as f64 / (EARLY + 1) as f64,
            Some(late) => turn + all_inputs * late as f64 / (LATE - 1) as f64,
        });
        terms
    }

    /// Returns the round of a stage, and its place in the round.
    fn round(&self, stage: usize) -> (usize, usize) {
        (stage / self.class.ranks as usize, stage % self.class.ranks as usize)
    }

    /// Returns the earliest start of a stage. The first round visits the ranks in order, and each later one
    /// visits all of them.
    pub(super) fn start(&self, stage: usize, first: usize) -> f64 {
        let others = self.class.ranks as usize - 1;
        match self.round(stage) {
            (0, index) => self.step.fill(index, first),
            (round, index) => {
                self.step.fill(others, first) + self.step.shortest_hops((round - 1) * others + index)
            }
        }
    }

    /// Returns the earliest first backward of a stage that ends before layer `end`.
    fn first_backward(&self, stage: usize, end: usize) -> f64 {
        let others = self.class.ranks as usize - 1;
        let later = self.class.chunks as usize - 1;
        // Each stage has a layer, so no stage after this one has the first trained layer.
        let last_first_trained = self.step.layers.first_trained.min(self.class.stages() - 1);
        let (round, index) = self.round(stage.max(last_first_trained));
        let back = (later - round) * others + others - index;
        self.step.first_backward(end, later * others + back)
    }

    /// Returns a lower bound on the longest forward of the stages up to this one.
    pub(super) fn slowest(&self, stage: usize, layers: &Range<usize>) -> f64 {
        self.arrivals.slowest(stage, layers)
    }

    /// Returns the terms of a stage whose forwards follow each other by at least `pace`.
    pub(super) fn sizes(&self, stage: usize, layers: &Range<usize>, pace: f64) -> Sizes {
        let microbatches = self.step.microbatches;
        let forward = self.step.layers.forward(layers.clone());
        let input = self.step.layers.input(layers.clone());
        let work = microbatches * self.step.layers.work(layers.clone());
        let backward = work / microbatches - forward;
        let (start, turn) = (self.start(stage, layers.start), self.first_backward(stage, layers.end));
        let forwards = |time: f64| arrived(time - start, pace, forward, microbatches);
        // Backwards follow each other no faster than forwards of any stage.
        let backwards = |time: f64| {
            let since = time - turn;
            if since <= 0.0 {
                return 0.0;
            }
            let begun = (since / self.longest.max(input)).floor() + 1.0;
            (begun.min(microbatches) * backward).min(since)
        };
        let (round, _) = self.round(stage);
        let (is_first, is_last) = (round == 0, round + 1 == self.class.chunks as usize);
        let once = |is_here: bool, time: f64| if is_here { time } else { 0.0 };
        std::array::from_fn(|at| match at {
            0 => work + once(is_first, start),
            1 if is_last => turn + work - forwards(turn),
            // All forwards of this stage may have run before the first backward of the rank's last stage.
            1 => work - microbatches * forward,
            _ => {
                let time = self.times[at - 2];
                work - forwards(time) - backwards(time) + once(is_first, time)
            }
        })
    }
}
