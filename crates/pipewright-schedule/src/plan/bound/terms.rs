//! The part of a rank's time that a stage takes: terms whose sum over the stages of a rank no step is below.
//!
//! **Idle time of a rank.** Let no backward of a rank begin before `t`. Until `t`, the rank computes forwards
//! only, so it is idle for at least `t` less the time that its stages can compute forwards until then.
//! Forward `n` (from 0) of a stage starts no earlier than `F` of the layers before the stage plus
//! `n slowest`, where `slowest` is the largest `F` of any stage up to this one ([`Arrivals::computed`]). It
//! is at least the `F` of the stage, the `F` of any layer before its end, and the mean over the stages. There
//! are three such bounds for every rank:
//!
//! 1. the start of its first stage;
//! 2. with the earliest `t` at which any backward can begin: `F` of all layers, and the messages;
//! 3. with the earliest `t` at which the backward of its last stage can begin: also `I` of the layers after
//!    that stage. All other backwards of the rank follow that one. The forwards of its other stages count as
//!    computed by then.
//!
//! A stage that runs forward only has no backward, and any `t` before the end of the step is valid for it.
//! The first gradient arrives before that at the first stage that runs backward. So for such a stage, the
//! third `t` has only the messages to that stage.
//!
//! A mean of the three with any weights is a bound as well. Each term depends on the number of a stage and
//! its layers alone.

use std::ops::Range;

use crate::plan::class::Class;
use crate::plan::rank_times::Step;

/// The times at which forwards can start.
pub(super) struct Arrivals<'a> {
    step: Step<'a>,
    /// For each layer, the largest `F` of the layers before it.
    slowest: Vec<f64>,
}

impl<'a> Arrivals<'a> {
    pub(super) fn of(step: Step<'a>) -> Self {
        let mut slowest = vec![0.0f64];
        for layer in &step.layers.list {
            slowest.push(slowest[slowest.len() - 1].max(layer.forward));
        }
        Self { step, slowest }
    }

    /// Returns a lower bound on the largest `F` of the stages up to this one. `stage` stages come before it.
    pub(super) fn slowest(&self, stage: usize, layers: &Range<usize>) -> f64 {
        let forward = self.step.layers.forward(layers.clone());
        let mean = self.step.layers.forward(0..layers.end) / (stage + 1) as f64;
        self.slowest[layers.end].max(forward).max(mean)
    }

    /// Returns the most time that a stage of these layers, which starts at `start` at the earliest, computes
    /// forwards until `until`. `stage` stages come before it.
    fn computed(&self, stage: usize, layers: &Range<usize>, start: f64, until: f64) -> f64 {
        let forward = self.step.layers.forward(layers.clone());
        arrived(until - start, self.slowest(stage, layers), forward, self.step.microbatches)
    }
}

/// Returns the most time that a stage computes within `since` of its start, if its computations, which take
/// `each`, arrive `pace` after each other.
pub(super) fn arrived(since: f64, pace: f64, each: f64, microbatches: f64) -> f64 {
    if since <= 0.0 {
        return 0.0;
    }
    if since >= microbatches * pace {
        return microbatches * each;
    }
    let whole = (since / pace).floor();
    (whole * each + (since - whole * pace).min(each)).min(microbatches * each)
}

/// The terms of the stages of a class with weights of the three bounds.
pub(super) struct Terms<'a> {
    pub(super) step: Step<'a>,
    pub(super) class: Class,
    pub(super) arrivals: &'a Arrivals<'a>,
    pub(super) weights: [f64; 3],
}

impl Terms<'_> {
    /// Returns the earliest start of a stage.
    pub(super) fn start(&self, stage: usize, first: usize) -> f64 {
        self.step.fill(if stage < self.class.ranks as usize { stage } else { 0 }, first)
    }

    /// Returns the term of a stage: its work, and its part of the idle time of its rank.
    pub(super) fn size(&self, stage: usize, layers: Range<usize>) -> f64 {
        self.step.microbatches * self.step.layers.work(layers.clone()) + self.idle(stage, layers)
    }

    /// Returns the part of a stage in the idle time of its rank, which may be below 0.
    pub(super) fn idle(&self, stage: usize, layers: Range<usize>) -> f64 {
        let (ranks, stages) = (self.class.ranks as usize, self.class.stages());
        let start = self.start(stage, layers.start);
        let [filled, turned, reached] = self.weights;
        let turn = self.step.first_backward(self.step.layers.count(), 0);
        let mut idle = -turned * self.arrivals.computed(stage, &layers, start, turn);
        if stage < ranks {
            idle += filled * start + turned * turn;
        }
        if stage >= stages - ranks {
            let last = stage.max(self.step.layers.first_trained.min(stages - 1));
            let backward = self.step.first_backward(layers.end, stages - 1 - last);
            idle + reached * (backward - self.arrivals.computed(stage, &layers, start, backward))
        } else {
            idle - reached * self.step.microbatches * self.step.layers.forward(layers)
        }
    }
}
