//! The bound on the time of a step for a cut over unlike ranks: the bounds of `rank_times.rs`, with the times
//! that each stage takes on its own rank and each message on its own link.
//!
//! Ranks may have any stages, in any order. So the fill of a stage is the sum of the forwards of all stages
//! before it, each on its rank, and of their messages; the drain is the sum of the input backwards of these
//! stages and of the messages back, down to the first stage that runs backward, and a weight gradient there.
//!
//! **Pace of ranks.** A rank delays microbatches by all of its stages together. Number the computations of each kind of
//! a stage by the order of their starts. Forward `n` (from 0) of a stage starts after forward `n` of the stage before it
//! has ended, because `n + 1` microbatches must have passed that stage; backward `n` likewise starts after backward `n` of
//! the next stage, and after forward `n` of all stages. Let `since` be the earliest start of the first stage of a rank, and
//! let `s` be one of its stages. Before forward `n` of `s`, the rank has computed `n` forwards of `s` and `n + 1` of each of
//! its stages before `s`. Before backward `n` of `s`, it has computed `n + 1` forwards of all of its stages, `n` input
//! backwards of `s`, and `n + 1` of each of its stages after `s`. It computes one thing at a time, so the sum of these times
//! comes between `since` and that start. The other stages on the way of the microbatch follow after the shortest way from
//! `s` to them. Bound 4 counts the rank and the stage that delay the last microbatch the most, besides the slowest stage.

use crate::plan::layers::Layers;

/// The earliest starts of the computations of one kind of a stage: each one is the later one of two bounds.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Starts {
    /// The start of the first one.
    pub(super) first: f64,
    /// How many follow in a unit of time, by the slowest stage.
    rate: f64,
    /// The start of the first one, and how many follow in a unit of time, by the rank that delays the last one the
    /// most.
    since: f64,
    rank_rate: f64,
}

impl Starts {
    /// Returns the number of microbatches that cannot start before `time`.
    fn left(&self, time: f64, microbatches: f64) -> f64 {
        let begun = ((time - self.first) * self.rate).min((time - self.since) * self.rank_rate);
        let begun = begun.clamp(0.0, microbatches);
        // Many processors need a call for `ceil`.
        let whole = f64::from(begun as u32);
        microbatches - if whole < begun { whole + 1.0 } else { whole }
    }
}

/// A stage on its rank.
#[derive(Debug, Clone, Copy)]
pub(super) struct StageOnRank {
    /// The times of one microbatch. `backward` is `I + W`.
    pub(super) forward: f64,
    pub(super) input: f64,
    backward: f64,
    pub(super) forwards: Starts,
    /// Of a stage that runs forward only, the starts of its forwards.
    pub(super) backwards: Starts,
    /// The time after the last input backward of the stage; `None` if it runs forward only.
    drain: Option<f64>,
}

/// The sums over the stages of a rank.
#[derive(Debug, Clone, Copy, Default)]
struct RankSums {
    /// The earliest start of the rank.
    first: f64,
    forward: f64,
    /// While times are computed, of the stages that gradients have passed.
    input: f64,
    /// `F + I + W`.
    work: f64,
}

/// The starts that the stages of one rank allow, counted from the earliest start of each stage on the way behind them.
#[derive(Debug, Clone, Copy, Default)]
struct Delay {
    /// The start of the first microbatch.
    offset: f64,
    /// The time between two microbatches.
    pace: f64,
    /// The start of the last microbatch.
    last: f64,
}

/// The times of a cut over unlike ranks.
pub(super) struct UnlikeCut<'a> {
    microbatches: f64,
    first_trained: usize,
    /// The layers with the times on each rank.
    on: Vec<&'a Layers>,
    /// The latency, and the time for each byte, from each rank to each rank.
    links: Vec<[f64; 2]>,
    /// The bytes of the output of each layer.
    outputs: Vec<f64>,
    pub(super) stages: Vec<StageOnRank>,
    /// The stages of each rank, in order.
    pub(super) stages_of: Vec<Vec<usize>>,
    ranks: Vec<RankSums>,
    /// Bound 3.
    path: f64,
}

impl<'a> UnlikeCut<'a> {
    /// Prepares the times of cuts over `ranks` ranks.
    pub(super) fn of(layers: &'a Layers, ranks: u32, microbatches: f64) -> Self {
        let ranks = ranks as usize;
        let link = |pair: usize| {
            let (from, to) = (pair / ranks, pair % ranks);
            let link = layers.network.link(from as u32, to as u32);
            if from == to { [0.0; 2] } else { [link.latency_s, 1.0 / link.bytes_per_s] }
        };
        Self {
            microbatches,
            first_trained: layers.first_trained,
            on: (0..ranks).map(|rank| layers.on(rank)).collect(),
            links: (0..ranks * ranks).map(link).collect(),
            outputs: layers.list.iter().map(|layer| layer.output as f64).collect(),
            stages: Vec::new(),
            stages_of: vec![Vec::new(); ranks],
            ranks: Vec::new(),
            path: 0.0,
        }
    }

    /// Computes the times of a cut.
    pub(super) fn set(&mut self, rank_of: &[u32], starts: &[usize]) {
        self.stages.clear();
        self.stages_of.iter_mut().for_each(Vec::clear);
        self.ranks.clear();
        self.ranks.resize(self.on.len(), RankSums::default());
        let mut delay = Delay::default();
        let (mut start, mut slowest) = (0.0, 0.0f64);
        for (stage, (range, &rank)) in starts.windows(2).zip(rank_of).enumerate() {
            if stage > 0 {
                start += self.message(rank_of[stage - 1], rank, range[0] - 1);
            }
            let layers = self.on[rank as usize];
            let (forward, input) = (layers.forward(range[0]..range[1]), layers.input(range[0]..range[1]));
            let work = layers.work(range[0]..range[1]);
            let own = &mut self.stages_of[rank as usize];
            let sums = &mut self.ranks[rank as usize];
            if own.is_empty() {
                sums.first = start;
            }
            own.push(stage);
            slowest = slowest.max(forward);
            delay = delay.with(sums.first + sums.forward - start, sums.forward + forward, self.microbatches);
            let forwards = Starts::of(start, slowest, delay);
            sums.forward += forward;
            sums.work += work;
            let backward = work - forward;
            self.stages.push(StageOnRank {
                forward,
                input,
                backward,
                forwards,
                backwards: forwards,
                drain: None,
            });
            start += forward;
        }
        let first = starts.partition_point(|&start| start <= self.first_trained) - 1;
        // The time at which the gradient of the output of a stage can arrive.
        let mut gradient = start;
        for stage in (first..rank_of.len()).rev() {
            let input = self.stages[stage].input;
            let sums = &mut self.ranks[rank_of[stage] as usize];
            slowest = slowest.max(input);
            let pace = sums.forward + sums.input + input;
            delay = delay.with(sums.first + sums.forward + sums.input - gradient, pace, self.microbatches);
            self.stages[stage].backwards = Starts::of(gradient, slowest, delay);
            sums.input += input;
            gradient += input;
            if stage > first {
                gradient += self.message(rank_of[stage], rank_of[stage - 1], starts[stage] - 1);
            }
        }
        let mut drain = self.on[rank_of[first] as usize].list[self.first_trained].weight;
        self.path = gradient + delay.last.max((self.microbatches - 1.0) * slowest) + drain;
        for stage in first..rank_of.len() {
            self.stages[stage].drain = Some(drain);
            if let Some(&next) = rank_of.get(stage + 1) {
                drain += self.stages[stage].input + self.message(next, rank_of[stage], starts[stage + 1] - 1);
            }
        }
    }

    /// Returns the bound for the cut: the largest of all.
    pub(super) fn time(&self) -> f64 {
        (0..self.ranks.len()).map(|rank| self.time_of_rank(rank)).fold(self.path, f64::max)
    }

    /// Returns the bounds 1, 2 and 4 of a rank.
    pub(super) fn time_of_rank(&self, rank: usize) -> f64 {
        let own = || self.stages_of[rank].iter().map(|&stage| &self.stages[stage]);
        let sums = &self.ranks[rank];
        let drain = own().find_map(|stage| stage.drain).unwrap_or(0.0);
        let longest = sums.first + self.microbatches * (sums.forward + sums.input) + drain;
        let with_rest = |time: f64| {
            let left = |stage: &StageOnRank| {
                stage.forwards.left(time, self.microbatches) * stage.forward
                    + stage.backwards.left(time, self.microbatches) * stage.backward
            };
            time + own().map(left).sum::<f64>()
        };
        own().fold(longest.max(self.least_time_of_rank(rank)), |longest, stage| {
            longest.max(with_rest(stage.forwards.first)).max(with_rest(stage.backwards.first))
        })
    }

    /// Returns bound 1 of a rank.
    pub(super) fn least_time_of_rank(&self, rank: usize) -> f64 {
        self.ranks[rank].first + self.microbatches * self.ranks[rank].work
    }

    /// Returns the time of a message with the output of a layer, or its gradient.
    fn message(&self, from: u32, to: u32, layer: usize) -> f64 {
        let [latency, of_byte] = self.links[from as usize * self.on.len() + to as usize];
        latency + self.outputs[layer] * of_byte
    }
}

impl Starts {
    fn of(first: f64, slowest: f64, delay: Delay) -> Self {
        let rate = |pace: f64| if pace > 0.0 { 1.0 / pace } else { f64::MAX };
        Self { first, rate: rate(slowest), since: first + delay.offset, rank_rate: rate(delay.pace) }
    }
}

impl Delay {
    /// Returns the delay by another rank if that is longer.
    fn with(self, offset: f64, pace: f64, microbatches: f64) -> Self {
        let last = offset + (microbatches - 1.0) * pace;
        if last > self.last { Self { offset, pace, last } } else { self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::bound::equal_layers;

    /// Checks the earliest starts of three microbatches.
    fn check(starts: Starts, expected: [f64; 3]) {
        for (before, start) in expected.into_iter().enumerate() {
            let left = (3 - before) as f64;
            assert_eq!(
                [start, start + 0.1].map(|time| starts.left(time, 3.0)),
                [left, left - 1.0],
                "{starts:?}"
            );
        }
    }

    #[test]
    fn all_stages_of_a_rank_delay_microbatches() {
        let layers = equal_layers(4, 2);
        let mut cut = UnlikeCut::of(&layers, 2, 3.0);
        cut.set(&[0, 1, 0, 1], &[0, 1, 2, 3, 4]);
        check(cut.stages[0].forwards, [0.0, 1.0, 2.0]);
        // Rank 0 has computed five forwards before the last one of its second stage.
        check(cut.stages[2].forwards, [2.0, 3.0, 5.0]);
        check(cut.stages[3].forwards, [3.0, 4.0, 6.0]);
        // Rank 1 starts at 1, and has computed six forwards and two input backwards before the last one.
        check(cut.stages[3].backwards, [4.0, 6.0, 9.0]);
        check(cut.stages[2].backwards, [5.0, 7.0, 10.0]);
        // Three more input backwards.
        check(cut.stages[1].backwards, [6.0, 8.0, 12.0]);
        check(cut.stages[0].backwards, [7.0, 9.0, 13.0]);
        // The last input backward and its weight gradient take 2.
        assert_eq!(cut.path, 15.0);
    }
}
