//! Finds the repeating row of each rank: a simulation of several batches in which a rank never waits while it may compute the next batch.
//!
//! Rules: (1) a rank computes each batch in the order of its schedule; (2) when it is free, it takes the next
//! computation of its older batch if that is ready and not a `W`, else the one of the next batch, else a `W` of the
//! older one: a `W` can wait, and a forward of the next batch keeps other ranks busy; (3) a forward of the next batch
//! waits while the rank keeps as many activations as at the peak of the schedule alone, and the last computation of
//! the next batch waits for the end of the older one; (4) a batch waits
//! for the update that it needs ([`crate::delay`]); (5) costs are whole ticks, so equal times are equal.
//!
//! If ranks still wait (GPipe keeps all activations of a batch, so the next one cannot begin), the limit of rule 3 is
//! raised by 1, 2, 4 and so on activations up to twice the largest peak, and the first limit with the shortest period
//! counts.
//!
//! With many schedules, every rank has one order from batch to batch after some batches, which is the row that repeats. If there is no such order within [`BATCHES`], its batches are merged by the times that they would have alone, each one period after the
//! one before it: these rows have no deadlock either, because all waits go from earlier to later times, or, at equal
//! times, from the older batch to the next one.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::delayed_action::{DelayError, DelayedAction};
use crate::action::{Action, ActionKind};
use crate::batch_gate::needed_by;
use crate::costs::Costs;
use crate::generate::ticks::{StageTicks, ticks};
use crate::ids::{Microbatch, StageIndex};
use crate::placement::Placement;
use crate::schedule::Schedule;

/// The number of batches that are simulated.
const BATCHES: usize = 12;

/// A pipeline is full if its period is longer than the work of its slowest rank by at most this part of it.
const FULL: u64 = 200;

/// The number of batches whose tensors are kept: a rank in batch `t + 2` has seen all ranks end batch `t`.
const LIVE_BATCHES: usize = 4;

/// The time of a tensor that has not been made.
const NEVER: u64 = u64::MAX;

/// Returns the repeating row of each rank.
pub(super) fn weave(schedule: &Schedule, costs: &Costs) -> Result<Vec<Vec<DelayedAction>>, DelayError> {
    let alone = Weaver::over(schedule, costs, 1).run()?;
    let work = alone.ranks.iter().map(|state| alone.work(state)).max().unwrap_or(0);
    let peaks: Vec<u32> = alone.ranks.iter().map(|state| state.peak).collect();
    let most = peaks.iter().copied().max().unwrap_or(0);
    let mut best: Option<(u64, Vec<Vec<DelayedAction>>)> = None;
    for more in
        std::iter::once(0).chain((0..u32::BITS).map(|power| 1 << power)).take_while(|more| *more <= most)
    {
        let caps = peaks.iter().map(|peak| peak + more).collect();
        let woven = Weaver { caps, ..Weaver::over(schedule, costs, BATCHES) }.run()?;
        let Some(rows) = woven.repeating_rows() else { continue };
        let period = woven.period();
        if best.as_ref().is_none_or(|(shortest, _)| period < *shortest) {
            best = Some((period, rows));
        }
        if period <= work + work / FULL {
            break;
        }
    }
    Ok(best.map_or_else(|| alone.merged(), |(_, rows)| rows))
}

/// A computation that a rank has done.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Done {
    action: Action,
    batch: u32,
    /// The older batch of the rank at that time.
    older: u32,
    start: u64,
}

/// The state of a rank.
#[derive(Clone, Default)]
struct RankState {
    /// Its older batch.
    older: usize,
    /// The number of computations that it has done of the older and of the next batch.
    next: [usize; 2],
    free_at: u64,
    kept: u32,
    peak: u32,
    done: Vec<Done>,
}

/// The simulation.
struct Weaver<'a> {
    placement: &'a Placement,
    microbatches: usize,
    batches: usize,
    ticks: Vec<StageTicks>,
    /// The computations of each rank in one batch.
    rows: Vec<Vec<Action>>,
    /// The number of activations that each rank may keep; empty without limits.
    caps: Vec<u32>,
    ranks: Vec<RankState>,
    /// When outputs and gradients arrive, for each live batch, stage and microbatch.
    arrivals: Vec<[u64; 2]>,
    /// For each batch, the number of ranks that have not ended it, and the time at which the last one has.
    ended: Vec<(usize, u64)>,
    /// The times at which ranks may be able to compute.
    wakes: BinaryHeap<Reverse<(u64, usize)>>,
}

impl<'a> Weaver<'a> {
    fn over(schedule: &'a Schedule, costs: &Costs, batches: usize) -> Self {
        let placement = schedule.placement();
        let ranks = schedule.rows().len();
        let row =
            |row: &Vec<Option<Action>>| row.iter().flatten().flat_map(|action| action.parts()).collect();
        let rows: Vec<Vec<Action>> = schedule.rows().iter().map(row).collect();
        let (stages, microbatches) = (placement.stages() as usize, schedule.microbatches() as usize);
        Self {
            placement,
            microbatches,
            batches,
            ticks: ticks(costs, placement),
            rows,
            caps: Vec::new(),
            ranks: vec![RankState::default(); ranks],
            arrivals: vec![[NEVER; 2]; LIVE_BATCHES.min(batches) * stages * microbatches],
            ended: vec![(ranks, 0); batches],
            wakes: (0..ranks).map(|rank| Reverse((0, rank))).collect(),
        }
    }

    /// Runs all batches.
    fn run(mut self) -> Result<Self, DelayError> {
        while let Some(Reverse((now, rank))) = self.wakes.pop() {
            if self.ranks[rank].free_at <= now {
                self.advance(rank, now);
            }
        }
        match self.ranks.iter().position(|state| state.older < self.batches) {
            Some(rank) => Err(DelayError(format!(
                "rank {rank} of the schedule waits for ever for a tensor; `validate` shows the cause"
            ))),
            None => Ok(self),
        }
    }

    /// Starts the computation that `rank` takes at `now`, if there is one.
    fn advance(&mut self, rank: usize, now: u64) {
        let Some(is_next) = self.choose(rank, now) else { return };
        let state = &self.ranks[rank];
        let (batch, position) = (state.older + usize::from(is_next), state.next[usize::from(is_next)]);
        let action = self.rows[rank][position];
        let end = now + self.duration(action);
        let done = Done { action, batch: batch as u32, older: state.older as u32, start: now };
        let state = &mut self.ranks[rank];
        state.free_at = end;
        state.next[usize::from(is_next)] += 1;
        state.kept = match action.kind() {
            ActionKind::Forward => state.kept + 1,
            ActionKind::Backward | ActionKind::WeightBackward => state.kept.saturating_sub(1),
            _ => state.kept,
        };
        state.peak = state.peak.max(state.kept);
        state.done.push(done);
        self.deliver(action, batch, end);
        self.wakes.push(Reverse((end, rank)));
        if self.ranks[rank].next[0] == self.rows[rank].len() {
            self.end_batch(rank, end);
        }
    }

    /// Returns whether `rank` takes the next batch at `now`; `None` if it waits.
    fn choose(&self, rank: usize, now: u64) -> Option<bool> {
        let state = &self.ranks[rank];
        let head = |is_next: bool| {
            let batch = state.older + usize::from(is_next);
            let action =
                *self.rows[rank].get(state.next[usize::from(is_next)]).filter(|_| batch < self.batches)?;

            if is_next && state.next[1] + 1 == self.rows[rank].len() {
                return None;
            }
            (self.is_updated(batch, now) && self.has_arrived(action, batch, now)).then_some(action)
        };
        let has_room = |action: Action| {
            action.kind() != ActionKind::Forward || self.caps.get(rank).is_none_or(|cap| state.kept < *cap)
        };
        let (older, next) = (head(false), head(true).filter(|action| has_room(*action)));
        match (older, next) {
            (Some(older), Some(_)) => Some(older.kind() == ActionKind::WeightBackward),
            (Some(_), None) => Some(false),
            (None, Some(_)) => Some(true),
            (None, None) => None,
        }
    }

    /// Returns whether the update that `batch` needs has happened by `now`.
    fn is_updated(&self, batch: usize, now: u64) -> bool {
        needed_by(batch as u32).is_none_or(|needed| {
            let (ranks, at) = self.ended[needed as usize];
            ranks == 0 && at <= now
        })
    }

    /// Returns whether the tensors from other stages that `action` needs have arrived by `now`.
    fn has_arrived(&self, action: Action, batch: usize, now: u64) -> bool {
        let stage = action.stage();
        let (source, slot) = match action.kind() {
            ActionKind::Forward => (self.placement.previous(stage), 0),
            ActionKind::Backward | ActionKind::InputBackward => (self.placement.next(stage), 1),
            _ => return true,
        };
        source.is_none_or(|source| self.arrivals[self.tensor(source, action, batch)][slot] <= now)
    }

    /// Notes when the output or the gradient of `action` arrives, and wakes the rank that needs it.
    fn deliver(&mut self, action: Action, batch: usize, end: u64) {
        let stage = action.stage();
        let ticks = self.ticks[stage.index()];
        let (reader, slot, hop) = match action.kind() {
            ActionKind::Forward => (self.placement.next(stage), 0, ticks.output_hop),
            ActionKind::Backward | ActionKind::InputBackward => {
                (self.placement.previous(stage), 1, ticks.gradient_hop)
            }
            _ => return,
        };
        let tensor = self.tensor(stage, action, batch);
        self.arrivals[tensor][slot] = end + hop;
        if let Some(reader) = reader {
            self.wakes.push(Reverse((end + hop, self.placement.rank_of(reader).index())));
        }
    }

    /// Notes that `rank` has ended its older batch.
    fn end_batch(&mut self, rank: usize, end: u64) {
        let state = &mut self.ranks[rank];
        let (left, at) = &mut self.ended[state.older];
        (*left, *at) = (*left - 1, end.max(*at));
        let is_last = *left == 0;
        let at = *at;
        state.older += 1;
        state.next = [state.next[1], 0];
        let (older, batches) = (state.older - 1, self.batches);
        // The batch after the next one takes the place of the one that all ranks have ended.
        if is_last {
            let size = self.arrivals.len() / LIVE_BATCHES.min(batches);
            if batches > LIVE_BATCHES {
                let first = older % LIVE_BATCHES * size;
                self.arrivals[first..first + size].fill([NEVER; 2]);
            }
            self.wakes.extend((0..self.ranks.len()).map(|rank| Reverse((at, rank))));
        }
    }

    /// Returns the index of a tensor that `stage` makes in `arrivals`.
    fn tensor(&self, stage: StageIndex, action: Action, batch: usize) -> usize {
        let stages = self.ticks.len();
        let microbatch = action.microbatch().map_or(0, Microbatch::index);
        ((batch % LIVE_BATCHES) * stages + stage.index()) * self.microbatches + microbatch
    }

    fn duration(&self, action: Action) -> u64 {
        let ticks = self.ticks[action.stage().index()];
        match action.kind() {
            ActionKind::Forward => ticks.forward,
            ActionKind::InputBackward => ticks.input_backward,
            ActionKind::WeightBackward => ticks.weight_backward,
            _ => ticks.backward(),
        }
    }

    /// Returns the rows that repeat; `None` if there are none.
    fn repeating_rows(&self) -> Option<Vec<Vec<DelayedAction>>> {
        let repetition = |rank: usize, older: u32| {
            let done = self.ranks[rank].done.iter().filter(move |done| done.older == older);
            done.map(move |done| DelayedAction { action: done.action, is_next: done.batch > older })
        };
        let ranks = self.ranks.len();
        let repeats =
            |older: u32| (0..ranks).all(|rank| repetition(rank, older).eq(repetition(rank, older + 1)));
        // The last batches have no next one, so the ones before them are not as they would be.
        let older = (1..self.batches.saturating_sub(4) as u32).find(|older| repeats(*older))?;
        Some((0..ranks).map(|rank| repetition(rank, older).collect()).collect())
    }

    /// Returns the time that a rank has computed.
    fn work(&self, state: &RankState) -> u64 {
        state.done.iter().map(|done| self.duration(done.action)).sum()
    }

    /// Returns the mean time from one batch to the next, away from the first and the last batches.
    fn period(&self) -> u64 {
        let last = self.batches.saturating_sub(4);
        (self.ended[last].1 - self.ended[last / 2].1) / (last - last / 2) as u64
    }

    /// Merges the rows of one batch with the rows of the next batch, which begins one period later.
    fn merged(&self) -> Vec<Vec<DelayedAction>> {
        let end = self.ranks.iter().map(|state| state.free_at).max().unwrap_or(0);
        // Two periods hold a whole batch, because the batch after the next one waits for its update.
        let period = self.ranks.iter().map(|state| self.work(state)).max().unwrap_or(0).max(end.div_ceil(2));
        let merge = |state: &RankState| {
            let last = state.done.last().map_or(0, |done| done.start);
            let of = |is_next: bool| {
                let shift = if is_next { period } else { 0 };
                state.done.iter().map(move |done| (done.start + shift, is_next, done.action))
            };
            // A repetition ends with the older batch, and has the actions of it that come after the end of the
            // one before.
            let mut cells: Vec<_> = of(false).filter(|cell| cell.0 + period > last).chain(of(true)).collect();
            cells.retain(|cell| cell.0 <= last);
            cells.sort_by_key(|cell| (cell.0, cell.1));
            cells.into_iter().map(|(_, is_next, action)| DelayedAction { action, is_next }).collect()
        };
        self.ranks.iter().map(merge).collect()
    }
}
