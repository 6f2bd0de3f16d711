//! Cuts that are found round by round: given the cuts of all other rounds, the best cut of one round is found
//! exactly.
//!
//! In each round of a loop or a V, every rank takes one stage. With the other rounds fixed, bisection finds
//! the smallest bound on the time of every rank under which the layers of the round fit, and each rank in
//! turn takes as many of them as that allows. Rounds are cut again and again, from one end or the other,
//! after random shifts of the limits between rounds, and the best cut is kept.

use std::ops::Range;

use crate::plan::balance::even;
use crate::plan::class::Class;
use crate::plan::numbers::Numbers;
use crate::plan::rank_memory::RankMemory;
use crate::plan::rank_times::Step;
use crate::plan::tuning;

/// A round that is cut again.
struct Round<'a> {
    step: Step<'a>,
    class: Class,
    memory: Option<&'a RankMemory>,
    /// Running sums of the bytes that a rank always holds.
    bytes: &'a [u64],
    starts: &'a [usize],
    number: usize,
    /// For each rank, `F + I + W` and `F + I` of its stages in other rounds, and their bytes.
    others: Vec<(f64, f64, u64)>,
}

/// Returns the best cut that some attempts find.
pub(super) fn descended(step: Step<'_>, class: Class, memory: Option<&RankMemory>, seed: u64) -> Vec<usize> {
    let (layers, ranks) = (step.layers.count(), class.ranks as usize);
    let mut bytes = vec![0u64];
    for layer in &step.layers.list {
        let always = step.layers.layer_bytes(layer, class.chunks as usize);
        bytes.push(bytes[bytes.len() - 1].saturating_add(always));
    }
    let mut numbers = Numbers(seed);
    let rank_of = class.ranks_of();
    let mut best = even(layers, class.stages());
    let mut best_time = step.cut_time(&rank_of, &best);
    for attempt in 0..tuning::pool::DESCENTS {
        let mut starts = best.clone();
        if attempt > 0 {
            shake(&mut starts, ranks, &mut numbers);
        }
        let first = numbers.below(class.chunks as usize);
        for offset in 0..class.chunks as usize {
            let number = (first + offset) % class.chunks as usize;
            let round = Round::of(step, class, memory, &bytes, &starts, number);
            if let Some(cut) = round.cut(numbers.below(2) == 0, tuning::pool::HALVINGS) {
                starts[number * ranks..number * ranks + cut.len()].copy_from_slice(&cut);
            }
        }
        let time = step.cut_time(&rank_of, &starts);
        if time <= best_time {
            best_time = time;
            best = starts;
        }
    }
    best
}

/// Moves a few boundaries by a layer or two, the limits between rounds most of all.
fn shake(starts: &mut [usize], ranks: usize, numbers: &mut Numbers) {
    let (stages, chunks) = (starts.len() - 1, (starts.len() - 1) / ranks);
    for _ in 0..1 + numbers.below(3) {
        if stages < 2 {
            return;
        }
        let is_limit = chunks > 1 && numbers.below(3) > 0;
        let boundary =
            if is_limit { ranks * (1 + numbers.below(chunks - 1)) } else { 1 + numbers.below(stages - 1) };
        let reach = 1 + numbers.below(3);
        let moved = if numbers.below(2) == 0 {
            starts[boundary].saturating_sub(reach)
        } else {
            starts[boundary] + reach
        };
        let (low, high) = (starts[boundary - 1] + 1, starts[boundary + 1] - 1);
        starts[boundary] = moved.clamp(low, high);
    }
}

impl<'a> Round<'a> {
    fn of(
        step: Step<'a>,
        class: Class,
        memory: Option<&'a RankMemory>,
        bytes: &'a [u64],
        starts: &'a [usize],
        number: usize,
    ) -> Self {
        let ranks = class.ranks as usize;
        let mut others = vec![(0.0, 0.0, 0u64); ranks];
        for (stage, range) in starts.windows(2).enumerate().filter(|(stage, _)| stage / ranks != number) {
            let layers = range[0]..range[1];
            let other = &mut others[class.rank_of(stage)];
            other.0 += step.layers.work(layers.clone());
            other.1 += step.layers.forward(layers.clone()) + step.layers.input(layers.clone());
            other.2 += bytes[layers.end] - bytes[layers.start];
        }
        Self { step, class, memory, bytes, starts, number, others }
    }

    /// Returns the first layers of the stages of this round, filled from the front or from the back; `None`
    /// if no cut fits into the memory.
    fn cut(&self, from_front: bool, halvings: u32) -> Option<Vec<usize>> {
        let fill =
            |time: f64| if from_front { self.filled_from_front(time) } else { self.filled_from_back(time) };
        let (mut low, mut high) = (0.0, self.step.cut_time(&self.class.ranks_of(), self.starts));
        let mut best = fill(high)?;
        for _ in 0..halvings {
            let middle = f64::midpoint(low, high);
            match fill(middle) {
                Some(cut) => {
                    best = cut;
                    high = middle;
                }
                None => low = middle,
            }
        }
        Some(best)
    }

    fn limits(&self) -> Range<usize> {
        let ranks = self.class.ranks as usize;
        self.starts[self.number * ranks]..self.starts[(self.number + 1) * ranks]
    }

    fn filled_from_front(&self, time: f64) -> Option<Vec<usize>> {
        let (limits, ranks) = (self.limits(), self.class.ranks as usize);
        let mut cut = Vec::with_capacity(ranks);
        let mut start = limits.start;
        for index in 0..ranks {
            cut.push(start);
            let most = limits.end - (ranks - 1 - index);
            if !self.fits(index, start..start + 1, time) {
                return None;
            }
            let (mut low, mut high) = (start + 1, most);
            while low < high {
                let middle = (low + high).div_ceil(2);
                if self.fits(index, start..middle, time) { low = middle } else { high = middle - 1 }
            }
            start = low;
        }
        (start == limits.end).then_some(cut)
    }

    fn filled_from_back(&self, time: f64) -> Option<Vec<usize>> {
        let (limits, ranks) = (self.limits(), self.class.ranks as usize);
        let mut cut = vec![0; ranks];
        let mut end = limits.end;
        for index in (0..ranks).rev() {
            let least = limits.start + index;
            if !self.fits(index, end - 1..end, time) {
                return None;
            }
            let (mut low, mut high) = (least, end - 1);
            while low < high {
                let middle = usize::midpoint(low, high);
                if self.fits(index, middle..end, time) { high = middle } else { low = middle + 1 }
            }
            end = low;
            cut[index] = end;
        }
        (end == limits.start).then_some(cut)
    }

    /// Returns whether the rank of the round's stage `index` may have these layers within `time`.
    fn fits(&self, index: usize, layers: Range<usize>, time: f64) -> bool {
        let rank = self.class.rank_of(self.number * self.class.ranks as usize + index);
        let (work, critical, bytes) = self.others[rank];
        let first = if self.number == 0 { layers.start } else { self.starts[rank] };
        let all = &self.step.layers;
        let work = work + all.work(layers.clone());
        let critical = critical + all.forward(layers.clone()) + all.input(layers.clone());
        let bytes = bytes + (self.bytes[layers.end] - self.bytes[layers.start]);
        let has_room = self.memory.is_none_or(|memory| bytes <= memory.of_rank(rank));
        has_room && self.step.rank_time(rank, first, work, critical) <= time
    }
}
