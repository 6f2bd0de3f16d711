//! The speeds of unlike ranks, and bounds of a step that follow from them alone.

use crate::plan::rank_times::Step;

impl Step<'_> {
    /// Returns how many times as fast as the profile each rank is at the kind of layer that it is best at.
    pub(super) fn speeds(&self) -> Vec<f64> {
        let ratio = |rank: usize| {
            let own = self.layers.on(rank);
            let ratios = self.layers.list.iter().zip(&own.list).map(|(layer, own)| {
                let times =
                    [(layer.forward, own.forward), (layer.input, own.input), (layer.weight, own.weight)];
                let known = times.into_iter().filter(|&(_, takes)| takes > 0.0);
                known.map(|(at_one, takes)| at_one / takes).fold(0.0, f64::max)
            });
            let best = ratios.fold(0.0, f64::max);
            if best > 0.0 { best } else { 1.0 }
        };
        (0..self.ranks as usize).map(ratio).collect()
    }

    /// Returns the largest of the speeds; 1 if the ranks are equal.
    pub(super) fn fastest(&self) -> f64 {
        if self.layers.is_unlike() { self.speeds().into_iter().fold(0.0, f64::max) } else { 1.0 }
    }

    /// Returns how many times as fast as the profile the optimizer of each rank is at the layer that it is best at. It
    /// may differ from the speed of computations, because its time does not depend on the rows.
    pub(super) fn optimizer_speeds(&self) -> Vec<f64> {
        let ratio = |rank: usize| {
            let pairs = self.layers.list.iter().zip(&self.layers.on(rank).list);
            let known = pairs.filter(|(_, own)| own.optimizer > 0.0);
            let best = known.map(|(layer, own)| layer.optimizer / own.optimizer).fold(0.0, f64::max);
            if best > 0.0 { best } else { 1.0 }
        };
        (0..self.ranks as usize).map(ratio).collect()
    }

    /// Returns how many times as fast as the profile all ranks together compute the whole model.
    pub(super) fn sum_of_speeds(&self) -> f64 {
        if !self.layers.is_unlike() {
            return f64::from(self.ranks);
        }
        self.mean_speeds().into_iter().sum()
    }

    /// Returns how many times as fast as the profile each rank computes the whole model.
    pub(super) fn mean_speeds(&self) -> Vec<f64> {
        let all = 0..self.layers.count();
        let at_one = self.layers.work(all.clone());
        let speed = |rank: usize| {
            let own = self.layers.on(rank).work(all.clone());
            if own > 0.0 { at_one / own } else { 1.0 }
        };
        (0..self.ranks as usize).map(speed).collect()
    }

    /// Returns the shortest time of a message between any two ranks.
    pub(super) fn shortest_message(&self) -> f64 {
        let bytes = self.layers.smallest_output() as f64;
        let ranks = self.ranks;
        let pairs = (0..ranks).flat_map(|from| (0..ranks).map(move |to| (from, to)));
        let links =
            pairs.filter(|(from, to)| from != to).map(|(from, to)| self.layers.network.link(from, to));
        let shortest =
            links.map(|link| link.latency_s + bytes / link.bytes_per_s).fold(f64::INFINITY, f64::min);
        if shortest.is_finite() { shortest } else { 0.0 }
    }

    /// Returns whether the ranks together, after their fill, have enough of `time` for all microbatches if each
    /// takes `work` at speed 1. At least `r` layers come before the first layer of the rank that is number `r`
    /// in the order of the first layers, so the fastest rank has the shortest fill.
    pub(super) fn unlike_has_time(&self, time: f64, work: f64) -> bool {
        let mut speeds = self.speeds();
        speeds.sort_by(|one, other| other.total_cmp(one));
        let (fastest, hop) = (speeds[0], self.shortest_message());
        let left = |(rank, speed): (usize, &f64)| {
            let layers = rank.min(self.layers.count());
            let fill = self.layers.forward(0..layers) / fastest + rank as f64 * hop;
            speed * (time - fill).max(0.0)
        };
        speeds.iter().enumerate().map(left).sum::<f64>() >= self.microbatches * work
    }
}
