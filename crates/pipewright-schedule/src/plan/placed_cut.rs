//! Layouts: where a model is cut, and which rank has each stage; and their small changes.

use std::ops::Range;

use crate::plan::class::MAX_CHUNKS;
use crate::plan::numbers::Numbers;
use crate::plan::rank_memory::RankMemory;
use crate::plan::rank_times::Step;

/// The first layer of each stage with the number of layers at the end, and the rank of each stage.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct PlacedCut {
    pub(super) starts: Vec<usize>,
    pub(super) rank_of: Vec<u32>,
}

/// The stages that may exchange their ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Swaps {
    /// None.
    None,
    /// Stages of one round other than the first.
    Rounds,
    /// All stages. A rank may also have more stages and another one fewer, stages are divided, neighbouring ones are
    /// joined, and layers move to other ranks. Rounds have no meaning then.
    Any,
}

/// The settings of a walk.
#[derive(Debug, Clone, Copy)]
pub(super) struct WalkTask<'a> {
    pub(super) step: Step<'a>,
    pub(super) memory: Option<&'a RankMemory>,
    /// How many times as long as the shortest way a microbatch stays in flight, for the memory of unlike ranks.
    pub(super) stay: f64,
    pub(super) swaps: Swaps,
    /// The length of the walk.
    pub(super) steps: usize,
}

/// A change of a layout.
#[derive(Debug, Clone)]
pub(super) enum WalkChange {
    /// Two stages exchange their ranks.
    Swap([usize; 2]),
    /// A stage gets another rank.
    Give { stage: usize, from: u32, to: u32 },
    /// The first layers of some stages move up or down by one.
    Shift { stages: Range<usize>, is_up: bool },
    /// A stage begins a new stage at the layer `at`. `rank_of` has the ranks of both parts.
    Split { stage: usize, at: usize, rank_of: [u32; 2], before: u32 },
    /// A stage and the next one, which begins at the layer `at`, become one. `rank_of` has their ranks.
    Merge { stage: usize, at: usize, rank_of: [u32; 2], after: u32 },
    /// Neighbouring layers go to another rank, which may give layers of its own for them.
    Move { before: Box<PlacedCut>, after: Box<PlacedCut> },
}

impl PlacedCut {
    /// Changes one thing at random: boundaries, or the ranks of stages as far as `swaps` allows. The result has
    /// no empty stage, and no rank without a stage.
    pub(super) fn shake(&mut self, ranks: usize, swaps: Swaps, numbers: &mut Numbers) {
        if let Some(change) = self.draw(ranks, swaps, numbers) {
            self.apply(&change);
        }
    }

    /// Returns a change at random; `None` if it would make an empty stage.
    pub(super) fn draw(&self, ranks: usize, swaps: Swaps, numbers: &mut Numbers) -> Option<WalkChange> {
        let stages = self.rank_of.len();
        if stages < 2 {
            return None;
        }
        let rounds = stages / ranks;
        if swaps == Swaps::Any {
            match numbers.below(8) {
                0 => return self.draw_rank(stages > ranks, numbers),
                1 => return self.draw_split(ranks, numbers),
                2 => return self.draw_merge(numbers),
                3 | 4 => return self.draw_move(self.rank_of[numbers.below(stages)], ranks, numbers),
                _ => {}
            }
        }
        if swaps == Swaps::Rounds && rounds > 1 && numbers.below(3) == 0 {
            let round = ranks * (1 + numbers.below(rounds - 1));
            return Some(WalkChange::Swap([round + numbers.below(ranks), round + numbers.below(ranks)]));
        }
        let first = 1 + numbers.below(stages - 1);
        let last = if numbers.below(3) == 0 { first + numbers.below(stages - first) } else { first };
        let is_up = numbers.below(2) == 0;
        let fits = if is_up {
            self.starts[last] + 1 < self.starts[last + 1]
        } else {
            self.starts[first] - 1 > self.starts[first - 1]
        };
        fits.then_some(WalkChange::Shift { stages: first..last + 1, is_up })
    }

    /// Returns two stages that exchange their ranks, or with `gives` sometimes a stage that gets the rank of
    /// another one; `None` if its own rank would have no stage.
    fn draw_rank(&self, gives: bool, numbers: &mut Numbers) -> Option<WalkChange> {
        let [one, other] = [0; 2].map(|_| numbers.below(self.rank_of.len()));
        let (from, to) = (self.rank_of[one], self.rank_of[other]);
        if gives && numbers.below(2) == 0 {
            return (self.has_another(one) && from != to).then_some(WalkChange::Give {
                stage: one,
                from,
                to,
            });
        }
        (from != to).then_some(WalkChange::Swap([one, other]))
    }

    /// Returns the division of a stage. One part goes to any rank.
    fn draw_split(&self, ranks: usize, numbers: &mut Numbers) -> Option<WalkChange> {
        let stages = self.rank_of.len();
        let stage = numbers.below(stages);
        let layers = self.starts[stage + 1] - self.starts[stage];
        if layers < 2 || stages >= MAX_CHUNKS as usize * ranks {
            return None;
        }
        let at = self.starts[stage] + 1 + numbers.below(layers - 1);
        let (before, other) = (self.rank_of[stage], numbers.below(ranks) as u32);
        let rank_of = if numbers.below(2) == 0 { [before, other] } else { [other, before] };
        Some(WalkChange::Split { stage, at, rank_of, before })
    }

    /// Returns the union of two neighbouring stages; `None` if the rank of one would have no stage.
    fn draw_merge(&self, numbers: &mut Numbers) -> Option<WalkChange> {
        let stage = numbers.below(self.rank_of.len() - 1);
        let rank_of = [self.rank_of[stage], self.rank_of[stage + 1]];
        let kept = numbers.below(2);
        let lost = stage + 1 - kept;
        let is_possible = rank_of[0] == rank_of[1] || self.has_another(lost);
        let at = self.starts[stage + 1];
        is_possible.then_some(WalkChange::Merge { stage, at, rank_of, after: rank_of[kept] })
    }

    /// Returns a change in which a rank gives neighbouring layers to another rank, and half of the time gets layers of
    /// it; `None` if it is the same rank, a rank would have no stage, or there would be too many stages.
    pub(super) fn draw_move(&self, from: u32, ranks: usize, numbers: &mut Numbers) -> Option<WalkChange> {
        let to = numbers.below(ranks) as u32;
        if from == to {
            return None;
        }
        let mut after = self.with_layers_on(self.draw_layers(from, numbers)?, to);
        if numbers.below(2) == 0 {
            after = after.with_layers_on(self.draw_layers(to, numbers)?, from);
        }
        let most = (MAX_CHUNKS as usize * ranks).max(self.rank_of.len());
        let fits = [from, to].iter().all(|rank| after.rank_of.contains(rank)) && after.rank_of.len() <= most;
        fits.then(|| WalkChange::Move { before: Box::new(self.clone()), after: Box::new(after) })
    }

    /// Returns neighbouring layers of a stage of a rank: often one layer, or the whole stage.
    fn draw_layers(&self, rank: u32, numbers: &mut Numbers) -> Option<Range<usize>> {
        let own: Vec<usize> = (0..self.rank_of.len()).filter(|&stage| self.rank_of[stage] == rank).collect();
        let stage = *own.get(numbers.below(own.len().max(1)))?;
        let (start, end) = (self.starts[stage], self.starts[stage + 1]);
        let count = match numbers.below(4) {
            0 => end - start,
            1 => 1 + numbers.below(end - start),
            _ => 1,
        };
        let first = start + numbers.below(end - start - count + 1);
        Some(first..first + count)
    }

    /// Returns the layout with layers of one stage on another rank. They join the stages of this rank next to them.
    fn with_layers_on(&self, layers: Range<usize>, rank: u32) -> Self {
        let mut layout = Self { starts: Vec::new(), rank_of: Vec::new() };
        let mut add = |start: usize, own: u32, joins: bool| {
            if !joins || layout.rank_of.last() != Some(&own) {
                layout.starts.push(start);
                layout.rank_of.push(own);
            }
        };
        for (stage, &own) in self.rank_of.iter().enumerate() {
            let (start, end) = (self.starts[stage], self.starts[stage + 1]);
            if end <= layers.start || start >= layers.end {
                add(start, own, start == layers.end);
                continue;
            }
            if start < layers.start {
                add(start, own, false);
            }
            add(layers.start, rank, true);
            if layers.end < end {
                add(layers.end, own, own == rank);
            }
        }
        layout.starts.extend(self.starts.last());
        layout
    }

    /// Returns whether the rank of a stage has another stage.
    fn has_another(&self, stage: usize) -> bool {
        let rank = self.rank_of[stage];
        self.rank_of.iter().filter(|&&other| other == rank).nth(1).is_some()
    }

    pub(super) fn apply(&mut self, change: &WalkChange) {
        match change {
            WalkChange::Give { stage, to, .. } => self.rank_of[*stage] = *to,
            WalkChange::Swap([one, other]) => self.rank_of.swap(*one, *other),
            WalkChange::Shift { stages, is_up } => {
                for start in &mut self.starts[stages.clone()] {
                    *start = if *is_up { *start + 1 } else { *start - 1 };
                }
            }
            WalkChange::Split { stage, at, rank_of: [first, second], .. } => {
                self.starts.insert(stage + 1, *at);
                self.rank_of[*stage] = *first;
                self.rank_of.insert(stage + 1, *second);
            }
            WalkChange::Merge { stage, after, .. } => {
                self.starts.remove(stage + 1);
                self.rank_of.remove(stage + 1);
                self.rank_of[*stage] = *after;
            }
            WalkChange::Move { after, .. } => self.clone_from(after),
        }
    }
}

impl WalkChange {
    /// Returns the change that takes this one back.
    pub(super) fn reversed(&self) -> Self {
        match *self {
            Self::Swap(stages) => Self::Swap(stages),
            Self::Give { stage, from, to } => Self::Give { stage, from: to, to: from },
            Self::Shift { ref stages, is_up } => Self::Shift { stages: stages.clone(), is_up: !is_up },
            Self::Split { stage, at, rank_of, before } => Self::Merge { stage, at, rank_of, after: before },
            Self::Merge { stage, at, rank_of, after } => Self::Split { stage, at, rank_of, before: after },
            Self::Move { ref before, ref after } => {
                Self::Move { before: after.clone(), after: before.clone() }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_change_can_be_taken_back() {
        let mut layout = PlacedCut { starts: vec![0, 3, 4, 8, 12], rank_of: vec![0, 1, 2, 1] };
        let mut numbers = Numbers(1);
        let mut counts = std::collections::BTreeSet::new();
        for _ in 0..2_000 {
            let Some(change) = layout.draw(3, Swaps::Any, &mut numbers) else { continue };
            let before = layout.clone();
            layout.apply(&change);
            let stages = layout.rank_of.len();
            assert!(layout.starts.is_sorted_by(|one, other| one < other), "{change:?}: {layout:?}");
            assert_eq!((layout.starts.len(), layout.starts[stages]), (stages + 1, 12));
            assert!((0..3).all(|rank| layout.rank_of.contains(&rank)), "{change:?}: {layout:?}");
            let after = layout.clone();
            layout.apply(&change.reversed());
            assert_eq!(layout, before, "{change:?}");
            layout = after;
            counts.insert(stages);
        }
        // Stages are divided and joined, down to one for each rank. There are at most four for each rank.
        assert_eq!(counts.first(), Some(&3));
        assert!(counts.last().is_some_and(|most| (8..=12).contains(most)), "{counts:?}");
    }
}
