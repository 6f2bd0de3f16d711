//! Schedules from a building block of six slots a rank, which is repeated for every microbatch and then
//! squeezed.
//!
//! Qi et al., "Pipeline Parallelism with Controllable Memory", 2024. There are two stages per rank, placed in
//! a V, and the backward is split. The paper's B and W are `I` and `W` here.
//!
//! Notation: `F0`, `I0`, `W0` belong to the stage on the way down, `F1`, `I1`, `W1` to the stage on the way
//! up. A block gives the slots in which each rank runs `F0`, `F1`, `I1` and `I0` of microbatch 0. The slots
//! of microbatch `j` are `6 j` later. No two of them share a slot, so two slots in six are left for `W0` and
//! `W1`. The lifetime of an activation in the block decides the memory: the fewer slots are between `F0` and
//! `I0`, the fewer activations are alive at once.
//!
//! Squeezing runs the repeated block tick by tick. Every action takes one tick. In each tick a rank runs the
//! first of these actions that can run:
//!
//! 1. the action whose slot is next;
//! 2. a forward whose slot is later, if memory allows it *and* all forwards with slots in between. So the
//!    rest of the block always fits, and there is no deadlock;
//! 3. a backward whose slot is later, once the rank has run all forwards of the way up. Earlier it could
//!    delay another action;
//! 4. the weight gradient that has waited longest.
//!
//! Time: four candidates for each action, so linear in the actions.

use std::collections::VecDeque;

use crate::action::Action;
use crate::generate::generator::Grid;
use crate::generate::stage_cursor::StageCursor;
use crate::ids::{Rank, StageIndex};
use crate::placement::Placement;

/// The number of slots from the actions of a microbatch to the actions of the next one.
const PERIOD: u32 = 6;

/// The settings of a schedule of this family.
#[derive(Debug, Clone, Copy)]
pub(super) struct BuildingBlock {
    /// Returns the slots of microbatch 0 for a number of ranks and a rank, in the order of [`Pass`].
    pub(super) slots: fn(u32, u32) -> [u32; 4],
    /// Returns the largest number of activations that the repeated block holds on any rank, for a number of
    /// ranks.
    pub(super) peak: fn(u32) -> u32,
}

/// The actions with given slots, in the order of their dependencies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Pass {
    ForwardDown,
    ForwardUp,
    BackwardUp,
    BackwardDown,
}

/// The state of a rank in the repeated block.
struct RankState {
    cursors: [StageCursor; 2],
    stages: [StageIndex; 2],
    slots: [u32; 4],
    /// The number of microbatches that each pass has run.
    run: [u32; 4],
    /// The number of activations held: forwards whose weight gradient has not run.
    held: u32,
    /// The chunks of the pending weight gradients, oldest first.
    waiting: VecDeque<usize>,
    row: Vec<Option<Action>>,
}

/// The number of actions that have run before the current tick, by stage.
struct Finished {
    forwards: Vec<u32>,
    backwards: Vec<u32>,
    microbatches: u32,
    limit: u32,
}

impl Pass {
    const ALL: [Self; 4] = [Self::ForwardDown, Self::ForwardUp, Self::BackwardUp, Self::BackwardDown];

    fn is_forward(self) -> bool {
        matches!(self, Self::ForwardDown | Self::ForwardUp)
    }

    fn chunk(self) -> usize {
        usize::from(matches!(self, Self::ForwardUp | Self::BackwardUp))
    }
}

/// Makes the schedule of a block by squeezing.
pub(super) fn squeezed(placement: &Placement, microbatches: u32, block: BuildingBlock) -> Grid {
    let mut finished = Finished {
        forwards: vec![0; placement.stages() as usize],
        backwards: vec![0; placement.stages() as usize],
        microbatches,
        limit: (block.peak)(placement.ranks()),
    };
    let mut ranks: Vec<RankState> =
        placement.all_ranks().map(|rank| RankState::new(placement, rank, block, microbatches)).collect();
    let mut left = u64::from(microbatches) * 3 * u64::from(placement.stages());
    let mut just_run: Vec<(Pass, StageIndex)> = Vec::new();
    let mut awake = Awake::all(placement.ranks());
    while left > 0 {
        let mut ran = 0;
        for rank in awake.take() {
            let state = &mut ranks[rank.index()];
            if state.row.len() < 6 * microbatches as usize && state.tick(&finished, &mut just_run) {
                ran += 1;
                awake.wake(rank);
            }
        }
        assert!(ran > 0, "the rest of the repeated block fits in memory at any time");
        left -= ran;
        for (pass, stage) in just_run.drain(..) {
            let counts = if pass.is_forward() { &mut finished.forwards } else { &mut finished.backwards };
            counts[stage.index()] += 1;
            let next = if pass.is_forward() { placement.next(stage) } else { placement.previous(stage) };
            next.into_iter().for_each(|stage| awake.wake(placement.rank_of(stage)));
        }
    }
    ranks.into_iter().map(|rank| rank.row).collect()
}

/// The ranks that may run an action in the next tick. A rank that could run none sleeps until a neighbour has
/// run an action whose result it needs, so that idle cells take no time.
struct Awake {
    ranks: Vec<Rank>,
    is_awake: Vec<bool>,
}

impl Awake {
    fn all(ranks: u32) -> Self {
        Self { ranks: (0..ranks).map(Rank::new).collect(), is_awake: vec![true; ranks as usize] }
    }

    fn wake(&mut self, rank: Rank) {
        if !std::mem::replace(&mut self.is_awake[rank.index()], true) {
            self.ranks.push(rank);
        }
    }

    /// Returns the ranks that are awake. All of them sleep afterwards.
    fn take(&mut self) -> Vec<Rank> {
        let ranks = std::mem::take(&mut self.ranks);
        for rank in &ranks {
            self.is_awake[rank.index()] = false;
        }
        ranks
    }
}

impl RankState {
    fn new(placement: &Placement, rank: Rank, block: BuildingBlock, microbatches: u32) -> Self {
        let stages = [rank.get(), placement.stages() - 1 - rank.get()].map(StageIndex::new);
        Self {
            cursors: stages.map(StageCursor::new),
            stages,
            slots: (block.slots)(placement.ranks(), rank.get()),
            run: [0; 4],
            held: 0,
            waiting: VecDeque::new(),
            row: Vec::with_capacity(6 * microbatches as usize),
        }
    }

    /// Runs one action, if any can run, and returns whether one did.
    fn tick(&mut self, finished: &Finished, just_run: &mut Vec<(Pass, StageIndex)>) -> bool {
        let mut candidates = Pass::ALL;
        candidates.sort_unstable_by_key(|&pass| self.slot(pass));
        let mut unfinished =
            candidates.into_iter().filter(|&pass| self.run[pass as usize] < finished.microbatches);
        let next = unfinished.next();
        let chosen = next.filter(|&pass| self.can_run(pass, finished) && self.fits(pass, 0, finished));
        let chosen = chosen.or_else(|| unfinished.find(|&pass| self.may_overtake(pass, finished)));
        if let Some(pass) = chosen {
            just_run.push((pass, self.stages[pass.chunk()]));
            self.run(pass);
        } else if let Some(chunk) = self.waiting.pop_front() {
            self.held -= 1;
            self.row.push(Some(self.cursors[chunk].weight_backward()));
        } else {
            return false;
        }
        true
    }

    fn run(&mut self, pass: Pass) {
        self.run[pass as usize] += 1;
        let cursor = &mut self.cursors[pass.chunk()];
        if pass.is_forward() {
            self.held += 1;
            self.row.push(Some(cursor.forward()));
        } else {
            self.waiting.push_back(pass.chunk());
            self.row.push(Some(cursor.input_backward()));
        }
    }

    /// Returns the slot of the next microbatch's `pass`.
    fn slot(&self, pass: Pass) -> u32 {
        self.slots[pass as usize] + PERIOD * self.run[pass as usize]
    }

    /// Returns whether the tensors that the next microbatch's `pass` needs exist.
    fn can_run(&self, pass: Pass, finished: &Finished) -> bool {
        let (stage, microbatch) = (self.stages[pass.chunk()].index(), self.run[pass as usize]);
        if pass.is_forward() {
            return stage.checked_sub(1).is_none_or(|previous| finished.forwards[previous] > microbatch);
        }
        let gradient = finished.backwards.get(stage + 1).is_none_or(|&backwards| backwards > microbatch);
        gradient && finished.forwards[stage] > microbatch
    }

    /// Returns whether memory allows `pass` and `reserved` further forwards.
    fn fits(&self, pass: Pass, reserved: u32, finished: &Finished) -> bool {
        !pass.is_forward() || self.held + reserved < finished.limit
    }

    /// Returns whether `pass` may run although its slot is not the next one.
    fn may_overtake(&self, pass: Pass, finished: &Finished) -> bool {
        let other = match pass {
            Pass::ForwardDown => Pass::ForwardUp,
            Pass::ForwardUp => Pass::ForwardDown,
            Pass::BackwardUp | Pass::BackwardDown => {
                let forwards_over = self.run[Pass::ForwardUp as usize] == finished.microbatches;
                return forwards_over && self.can_run(pass, finished);
            }
        };
        let between = self.slot(pass).saturating_sub(self.slot(other)).div_ceil(PERIOD);
        let left = finished.microbatches - self.run[other as usize];
        self.can_run(pass, finished) && self.fits(pass, between.min(left), finished)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::generate::{v_half, v_min};

    /// Checks that the slots of a block are disjoint and follow the dependencies, and that the block holds as
    /// much as `peak` says.
    fn check(block: BuildingBlock) {
        for ranks in 1..40 {
            let slots: Vec<[u32; 4]> = (0..ranks).map(|rank| (block.slots)(ranks, rank)).collect();
            for own in &slots {
                let mut places = own.map(|slot| slot % PERIOD);
                places.sort_unstable();
                assert!(places.is_sorted_by(|a, b| a < b), "{ranks}: {own:?}");
                assert!(own.is_sorted_by(|a, b| a < b), "{ranks}: {own:?}");
            }
            for pair in slots.windows(2) {
                let [down, up] = [pair[0], pair[1]];
                assert!(down[0] < up[0] && up[1] < down[1] && down[2] < up[2] && up[3] < down[3], "{pair:?}");
            }
            let held = slots.iter().map(|own| held(*own)).max();
            assert_eq!(held, Some((block.peak)(ranks)), "{ranks} ranks");
        }
    }

    /// The largest number of activations that the repeated block holds, if each `W` takes the first free
    /// slot.
    fn held(slots: [u32; 4]) -> u32 {
        let end = slots[3] + PERIOD * 12;
        let (mut held, mut waiting, mut peak) = (0, 0, 0);
        for slot in 0..end {
            let pass = slots.iter().position(|&first| slot >= first && (slot - first) % PERIOD == 0);
            match pass {
                Some(0 | 1) => held += 1,
                Some(_) => waiting += 1,
                None if waiting > 0 => (held, waiting) = (held - 1, waiting - 1),
                None => {}
            }
            peak = peak.max(held);
        }
        peak
    }

    #[test]
    fn v_half_is_a_block() {
        check(v_half::BLOCK);
    }

    #[test]
    fn v_min_is_a_block() {
        check(v_min::BLOCK);
    }
}
