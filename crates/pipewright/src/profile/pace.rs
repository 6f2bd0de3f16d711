//! Whether computations keep their pace over several steps.
//!
//! A process may be stopped again and again, for example by a quota of processor time: it computes at full speed for a
//! part of each period and not at all in the rest. A short step then falls into one part or the other, so the median of
//! the steps is not the time that many of them take. The mean is, but a single stop for another reason changes it too.
//!
//! So the measured times of a step are added up over blocks that last for several periods. If the steps together take as
//! long as their medians say, the medians count. Otherwise there are several blocks. The fastest of equal computations says
//! how long one of them takes if it is not stopped, or as seldom as possible, and the blocks say how many times
//! as long all of them take. A stop may hit any computation, so all are stretched alike: the stops of one kind of
//! layers are too few to be counted.

use std::time::Duration;

use super::quartiles::Quartiles;

/// The time of a block. By default, quotas of Linux have periods of 100 ms.
const BLOCK: Duration = Duration::from_millis(500);
/// The number of blocks if the steps do not keep their pace.
const BLOCKS: usize = 5;
/// The share by which the steps together may differ from their medians.
const STEADY: f64 = 0.05;
/// The share by which a block may differ from the median of the blocks and still count.
const NEAR: f64 = 0.25;

/// The times of the steps of a run.
#[derive(Clone, Debug)]
pub(super) struct Pace {
    /// The time of a block, in seconds.
    block: f64,
    /// The time of all computations of each step, over the ranks of this process.
    computed: Vec<f64>,
    /// The times of the computations of the complete blocks, and of the block that has begun, with their steps.
    blocks: Vec<(f64, u32)>,
    begun: (f64, u32),
    begun_s: f64,
}

impl Pace {
    /// Makes a pace without steps, for a run that takes at most `limit`.
    pub(super) fn new(limit: Duration) -> Self {
        let block = BLOCK.min(limit / 2).as_secs_f64();
        Self { block, computed: Vec::new(), blocks: Vec::new(), begun: (0.0, 0), begun_s: 0.0 }
    }

    /// Adds a step whose computations took `computed` seconds on all ranks together, and which took `wall` seconds.
    pub(super) fn add(&mut self, computed: f64, wall: f64) {
        self.computed.push(computed);
        self.begun = (self.begun.0 + computed, self.begun.1 + 1);
        self.begun_s += wall;
        if self.begun_s >= self.block {
            self.blocks.push(std::mem::take(&mut self.begun));
            self.begun_s = 0.0;
        }
    }

    /// Returns whether more steps are needed, if the computations of a step take `typical` seconds by their medians.
    pub(super) fn needs_more(&self, typical: f64) -> bool {
        match self.blocks.len() {
            0 => true,
            blocks => blocks < BLOCKS && !is_steady(self.mean() / typical),
        }
    }

    /// Returns whether the process is stopped again and again, if the computations of a step take `typical` seconds by their
    /// medians.
    pub(super) fn has_stops(&self, typical: f64) -> bool {
        let of_blocks = Quartiles::of(self.ratios(typical));
        !is_steady(self.mean() / typical) && of_blocks.is_some_and(|ratios| !is_steady(ratios.median))
    }

    /// Returns for each block how many times as long as `fastest`, which is the sum of their fastest times, the computations
    /// of a step take. A block has one stop more or less than its part, so the ratios are scaled: their median is the mean
    /// of the blocks that do not differ much from it.
    pub(super) fn ratios(&self, fastest: f64) -> Vec<f64> {
        let ratio = |&(computed, steps): &(f64, u32)| computed / f64::from(steps) / fastest;
        let mut ratios: Vec<f64> = self.blocks.iter().map(ratio).collect();
        if let Some(Quartiles { median, .. }) = Quartiles::of(ratios.clone()) {
            let near = ratios.iter().filter(|&ratio| (ratio / median - 1.0).abs() < NEAR);
            let mean = near.clone().sum::<f64>() / near.count().max(1) as f64;
            ratios.iter_mut().for_each(|ratio| *ratio *= mean / median);
        }
        ratios
    }

    fn mean(&self) -> f64 {
        self.computed.iter().sum::<f64>() / self.computed.len().max(1) as f64
    }
}

/// Returns whether a ratio is near 1. One that cannot be computed is.
fn is_steady(ratio: f64) -> bool {
    !ratio.is_finite() || (ratio - 1.0).abs() <= STEADY
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A processor that computes for `burst` seconds of each period and then stops.
    struct Throttled {
        period: f64,
        burst: f64,
        /// The time, and the time that it has computed.
        now: f64,
        computed: f64,
    }

    impl Throttled {
        fn new(period: f64, share: f64) -> Self {
            Self { period, burst: period * share, now: 0.0, computed: 0.0 }
        }

        /// Returns the wall time in which it computes for `seconds`.
        fn takes(&mut self, seconds: f64) -> f64 {
            let start = self.now;
            let mut left = seconds;
            while left > 0.0 {
                let room = self.burst - self.computed;
                let part = left.min(room);
                (self.now, self.computed, left) = (self.now + part, self.computed + part, left - part);
                if left > 0.0 {
                    self.now = (self.now / self.period).floor() * self.period + self.period;
                    self.computed = 0.0;
                }
            }
            self.now - start
        }
    }

    /// Measures steps of computations of `kinds` seconds each, three times per step, as a run does. Returns for each kind the
    /// time that is found over its own, the same for all together, and the steps.
    fn measure(kinds: &[f64], takes: &mut impl FnMut(f64) -> f64) -> (Vec<f64>, f64, usize) {
        let limit = Duration::from_secs(10);
        let mut pace = Pace::new(limit);
        let mut times = vec![Vec::new(); kinds.len()];
        let mut fastest = vec![f64::INFINITY; kinds.len()];
        let mut wall = 0.0;
        loop {
            let mut step = 0.0;
            for ((kind, own), fastest) in kinds.iter().zip(&mut times).zip(&mut fastest) {
                let each = [0; 3].map(|_| takes(*kind));
                *fastest = each.into_iter().fold(*fastest, f64::min);
                let sum: f64 = each.iter().sum();
                own.push(sum / 3.0);
                step += sum;
            }
            wall += step;
            pace.add(step, step);
            let medians = times.iter().map(|own| Quartiles::of(own.clone()).expect("times").median);
            let medians: Vec<f64> = medians.collect();
            let typical = 3.0 * medians.iter().sum::<f64>();
            let has_steps = times[0].len() >= 12;
            if wall >= limit.as_secs_f64() || has_steps && !pace.needs_more(typical) {
                let found = if pace.has_stops(typical) {
                    let ratios = pace.ratios(3.0 * fastest.iter().sum::<f64>());
                    let ratio = Quartiles::of(ratios).expect("blocks").median;
                    fastest.iter().map(|&time| time * ratio).collect()
                } else {
                    medians
                };
                let all = found.iter().sum::<f64>() / kinds.iter().sum::<f64>();
                let each = found.iter().zip(kinds).map(|(found, kind)| found / kind).collect();
                return (each, all, times[0].len());
            }
        }
    }

    #[test]
    fn a_throttled_processor_has_its_share_whatever_the_burst() {
        for share in [0.35, 0.6, 0.9] {
            for period in [0.005, 0.02, 0.1] {
                for seconds in [1e-4, 1e-3, 7e-3, 30e-3, 200e-3] {
                    let mut processor = Throttled::new(period, share);
                    let (_, all, _) = measure(&[seconds, seconds / 3.0], &mut |time| processor.takes(time));
                    let found = 1.0 / all;
                    let what = format!("{found} of {share}, periods of {period} s, {seconds} s");
                    assert!((found / share - 1.0).abs() < 0.05, "{what}");
                }
            }
        }
    }

    /// A kind of layers that computes for a hundredth of the step is hardly ever stopped itself.
    #[test]
    fn short_computations_are_stretched_as_long_ones() {
        for (kinds, period) in [([1e-5, 1e-3], 0.1), ([1e-4, 9e-3], 0.1), ([2e-4, 4e-3], 0.02)] {
            let mut processor = Throttled::new(period, 0.35);
            let (each, ..) = measure(&kinds, &mut |time| processor.takes(time));
            let what = format!("{each:?} of {kinds:?}");
            assert!(each.iter().all(|found| (found * 0.35 - 1.0).abs() < 0.05), "{what}");
        }
    }

    #[test]
    fn a_steady_processor_has_its_medians_and_a_few_steps() {
        let mut at = 0;
        // Every fifth computation takes 3% longer.
        let mut noisy = |time: f64| {
            at += 1;
            time * if at % 5 == 0 { 1.03 } else { 1.0 }
        };
        let (each, _, steps) = measure(&[20e-3, 20e-3], &mut noisy);
        assert!(each.iter().all(|found| (found - 1.0).abs() < 0.02), "{each:?}");
        // Half a second, which 12 steps have.
        assert_eq!(steps, 12);
        let (_, _, steps) = measure(&[1e-3], &mut |time| time);
        assert_eq!(steps, 167);
    }

    #[test]
    fn one_long_stop_does_not_count() {
        let mut at = 0;
        let mut stopped = |time: f64| {
            at += 1;
            time + if at == 50 { 0.3 } else { 0.0 }
        };
        let (_, all, _) = measure(&[5e-3, 5e-3], &mut stopped);
        assert!((all - 1.0).abs() < 0.02, "{all}");
    }
}
