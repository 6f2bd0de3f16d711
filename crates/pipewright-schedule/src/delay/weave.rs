//! Finds the repeating row of each rank: a simulation of several batches in which a rank never waits while it may compute the
//! next batch, and batches that are merged.
//!
//! Rules: (1) a rank computes each batch in the order of its schedule; (2) when it is free, it takes the next
//! computation of its older batch if that is ready and not a `W`, else the one of the next batch, else a `W` of the
//! older one: a `W` can wait, and a forward of the next batch keeps other ranks busy; (3) a forward of the next batch
//! waits while the rank keeps as many activations as at the peak of the schedule alone, and the last computation of
//! the next batch waits for the end of the older one; (4) a batch waits
//! for the update that it needs ([`crate::delay`]); (5) costs are whole ticks, so equal times are equal.
//!
//! There are two kinds of candidates. Woven rows are a late repetition of such a simulation; a variant of rule 2 always
//! takes the next batch first. For merged rows, each computation of one batch starts as early as its rank is free in a given
//! period, apart from the computations of other batches one period before and after. All candidates are run as they
//! repeat. A candidate counts if every rank keeps at most as many activations as rule 3 allows, and if it ends for as many
//! batches as prove that any number ends. The one with the shortest period wins.
//!
//! If ranks still wait, the limit of rule 3 is raised by 1, 2, 4 and so on activations up to twice the largest peak. Some
//! pipelines are never full: two periods hold at least a whole batch, because of rule 4. GPipe needs almost two periods
//! for a batch if there are as many microbatches as ranks, so hardly any computation can be later than that.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::num::NonZeroU32;

use super::delayed_action::{DelayError, DelayedAction};
use super::taken::Taken;
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

/// By how many percent of the work the periods are longer in which rows are merged.
const PERCENT: [u64; 10] = [0, 1, 2, 3, 4, 6, 8, 12, 16, 32];

/// The number of batches whose tensors are kept: a rank in batch `t + 2` has seen all ranks end batch `t`.
const LIVE_BATCHES: usize = 4;

/// The time of a tensor that has not been made.
const NEVER: u64 = u64::MAX;

/// Returns the repeating row of each rank. As many batches as `enough` prove any number of them.
pub(super) fn weave(
    schedule: &Schedule,
    costs: &Costs,
    enough: NonZeroU32,
) -> Result<Vec<Vec<DelayedAction>>, DelayError> {
    let alone = Weaver::over(schedule, costs, 1).run()?;
    let work = alone.ranks.iter().map(|state| alone.work(state)).max().unwrap_or(0);
    let peaks: Vec<u32> = alone.ranks.iter().map(|state| state.peak).collect();
    let most = peaks.iter().copied().max().unwrap_or(0);
    let end = alone.ranks.iter().map(|state| state.free_at).max().unwrap_or(0);
    // One batch after another is sound and needs no more activations than the schedule.
    let mut best = Rows { period: end, peaks: peaks.clone(), cells: alone.merged(&alone.starts(), end) };
    let run = |cells| Rows::run(schedule, costs, cells, BATCHES);
    let mut merged: Option<Vec<Rows>> = None;
    let powers = (0..u32::BITS).map(|power| 1 << power).take_while(|more| *more <= most);
    for more in std::iter::once(0).chain(powers) {
        let caps: Vec<u32> = peaks.iter().map(|peak| peak + more).collect();
        let mut candidates = Vec::new();
        for prefers_next in [false, true] {
            let rules = Rules::Free { caps: &caps, prefers_next };
            let woven = Weaver { rules, ..Weaver::over(schedule, costs, BATCHES) }.run()?;
            candidates.extend(run(woven.closed_rows()));
        }
        if candidates.iter().all(|rows| !rows.is_full(work)) {
            let merge = || {
                PERCENT.iter().filter_map(|percent| run(alone.merged_within(work + work * percent / 100)?))
            };
            candidates.extend(merged.get_or_insert_with(|| merge().collect()).iter().cloned());
        }
        let fits = |rows: &Rows| rows.peaks.iter().zip(&caps).all(|(peak, cap)| peak <= cap);
        for rows in candidates.into_iter().filter(fits) {
            if rows.period < best.period && rows.are_sound(schedule, costs, enough) {
                best = rows;
            }
        }
        if best.is_full(work) {
            break;
        }
    }
    Ok(best.cells)
}

/// Rows that repeat.
#[derive(Clone)]
struct Rows {
    /// The time from one batch to the next.
    period: u64,
    /// The most activations that each rank keeps.
    peaks: Vec<u32>,
    cells: Vec<Vec<DelayedAction>>,
}

impl Rows {
    /// Runs `batches` repetitions of rows; `None` if the ranks wait for each other.
    fn run(
        schedule: &Schedule,
        costs: &Costs,
        cells: Vec<Vec<DelayedAction>>,
        batches: usize,
    ) -> Option<Self> {
        let rules = Rules::Given(&cells);
        let run = Weaver { rules, ..Weaver::over(schedule, costs, batches) }.run().ok()?;
        let peaks = run.ranks.iter().map(|state| state.peak).collect();
        Some(Self { period: run.period(), peaks, cells })
    }

    /// Returns whether the period is hardly longer than `work`.
    fn is_full(&self, work: u64) -> bool {
        self.period <= work + work / FULL
    }

    /// Returns whether any number of repetitions ends ([`crate::delay`]).
    fn are_sound(&self, schedule: &Schedule, costs: &Costs, enough: NonZeroU32) -> bool {
        let batches = enough.get() as usize;
        batches <= BATCHES || Self::run(schedule, costs, self.cells.clone(), batches).is_some()
    }
}

/// How a rank chooses between its older and its next batch.
#[derive(Clone, Copy)]
enum Rules<'a> {
    /// By rules 2 and 3. A rank keeps at most so many activations, if limits are given.
    Free { caps: &'a [u32], prefers_next: bool },
    /// In the order of given rows.
    Given(&'a [Vec<DelayedAction>]),
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

impl RankState {
    /// Returns whether the next computation of a repeating row belongs to the next batch.
    fn is_next_in(&self, row: &[DelayedAction]) -> bool {
        // A repetition begins when the computations of its older batch that are cells of a next batch have run.
        let before = row.iter().filter(|cell| cell.is_next).count();
        let position = self.next[0].checked_sub(before).map(|older| older + self.next[1]);
        position.and_then(|position| row.get(position)).is_some_and(|cell| cell.is_next)
    }
}

/// The simulation.
struct Weaver<'a> {
    placement: &'a Placement,
    microbatches: usize,
    batches: usize,
    ticks: Vec<StageTicks>,
    /// The computations of each rank in one batch.
    rows: Vec<Vec<Action>>,
    rules: Rules<'a>,
    ranks: Vec<RankState>,
    /// The rank of each computation that has run.
    sequence: Vec<usize>,
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
            rules: Rules::Free { caps: &[], prefers_next: false },
            ranks: vec![RankState::default(); ranks],
            sequence: Vec::new(),
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
        self.sequence.push(rank);
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
        let (caps, prefers_next) = match self.rules {
            Rules::Free { caps, prefers_next } => (caps, prefers_next),
            Rules::Given(rows) => {
                let is_next = state.older + 1 < self.batches && state.is_next_in(&rows[rank]);
                return head(is_next).map(|_| is_next);
            }
        };
        let has_room = |action: Action| {
            action.kind() != ActionKind::Forward || caps.get(rank).is_none_or(|cap| state.kept < *cap)
        };
        let (older, next) = (head(false), head(true).filter(|action| has_room(*action)));
        match (older, next) {
            (Some(older), Some(_)) => Some(prefers_next || older.kind() == ActionKind::WeightBackward),
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
        self.needed(action, batch).is_none_or(|(tensor, slot)| self.arrivals[tensor][slot] <= now)
    }

    /// Returns the place in `arrivals` of the tensor from another stage that `action` needs.
    fn needed(&self, action: Action, batch: usize) -> Option<(usize, usize)> {
        let stage = action.stage();
        let (source, slot) = match action.kind() {
            ActionKind::Forward => (self.placement.previous(stage), 0),
            ActionKind::Backward | ActionKind::InputBackward => (self.placement.next(stage), 1),
            _ => return None,
        };
        source.map(|source| (self.tensor(source, action, batch), slot))
    }

    /// Returns the stage that needs what `action` makes, the place of the tensor, and the time of its message.
    fn delivery(&self, action: Action) -> Option<(Option<StageIndex>, usize, u64)> {
        let stage = action.stage();
        let ticks = self.ticks[stage.index()];
        match action.kind() {
            ActionKind::Forward => Some((self.placement.next(stage), 0, ticks.output_hop)),
            ActionKind::Backward | ActionKind::InputBackward => {
                Some((self.placement.previous(stage), 1, ticks.gradient_hop))
            }
            _ => None,
        }
    }

    /// Notes when the output or the gradient of `action` arrives, and wakes the rank that needs it.
    fn deliver(&mut self, action: Action, batch: usize, end: u64) {
        let Some((reader, slot, hop)) = self.delivery(action) else { return };
        let tensor = self.tensor(action.stage(), action, batch);
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

    /// Returns the time that a rank has computed.
    fn work(&self, state: &RankState) -> u64 {
        state.done.iter().map(|done| self.duration(done.action)).sum()
    }

    /// Returns the mean time from one batch to the next, away from the first and the last batches.
    fn period(&self) -> u64 {
        let last = self.batches.saturating_sub(4);
        (self.ended[last].1 - self.ended[last / 2].1) / (last - last / 2) as u64
    }

    /// Returns the rows of a late repetition, changed so that they repeat: a rank that has computed less of the next batch
    /// than it had computed of the older one before the repetition computes the difference first.
    fn closed_rows(&self) -> Vec<Vec<DelayedAction>> {
        let older = self.batches.saturating_sub(5) as u32;
        let close = |(row, state): (&Vec<Action>, &RankState)| {
            let done = state.done.iter().filter(|done| done.older == older);
            let cells: Vec<DelayedAction> =
                done.map(|done| DelayedAction { action: done.action, is_next: done.batch > older }).collect();
            let ahead = cells.iter().filter(|cell| cell.is_next).count();
            let before = row.len() - (cells.len() - ahead);
            let first = row.get(ahead..before).unwrap_or_default().iter();
            let first = first.map(|&action| DelayedAction { action, is_next: false });
            let repeated = ahead.saturating_sub(before);
            let mut older_cells = 0;
            let others = cells.into_iter().filter(move |cell| {
                older_cells += usize::from(!cell.is_next);
                cell.is_next || older_cells > repeated
            });
            first.chain(others).collect()
        };
        self.rows.iter().zip(&self.ranks).map(close).collect()
    }

    /// Returns when the computations of each rank start, one batch alone.
    fn starts(&self) -> Vec<Vec<u64>> {
        self.ranks.iter().map(|state| state.done.iter().map(|done| done.start).collect()).collect()
    }

    /// Merges the rows of one batch with the rows of the next batch, which begins one period later. Each computation
    /// starts as early as it can without one of another batch at the same time. `None` if two periods do not hold a
    /// whole batch: the batch after the next one waits for its update.
    fn merged_within(&self, period: u64) -> Option<Vec<Vec<DelayedAction>>> {
        let mut arrivals = vec![[0; 2]; self.arrivals.len()];
        let mut taken = vec![Taken::of(period); self.ranks.len()];
        let mut starts: Vec<Vec<u64>> = vec![Vec::new(); self.ranks.len()];
        let mut free_at = vec![0; self.ranks.len()];
        for &rank in &self.sequence {
            let action = self.rows[rank][starts[rank].len()];
            let needed = self.needed(action, 0).map_or(0, |(tensor, slot)| arrivals[tensor][slot]);
            let start = taken[rank].take(free_at[rank].max(needed), self.duration(action))?;
            let end = start + self.duration(action);
            if end > 2 * period {
                return None;
            }
            starts[rank].push(start);
            free_at[rank] = end;
            if let Some((_, slot, hop)) = self.delivery(action) {
                arrivals[self.tensor(action.stage(), action, 0)][slot] = end + hop;
            }
        }
        Some(self.merged(&starts, period))
    }

    /// Merges the rows of one batch, whose computations have these starts, with the rows of the next batch, which
    /// begins one period later.
    fn merged(&self, starts: &[Vec<u64>], period: u64) -> Vec<Vec<DelayedAction>> {
        let merge = |(row, starts): (&Vec<Action>, &Vec<u64>)| {
            let last = starts.last().copied().unwrap_or(0);
            let of = |is_next: bool| {
                let later = if is_next { period } else { 0 };
                starts.iter().zip(row).map(move |(start, action)| (start + later, is_next, *action))
            };
            // A repetition ends with the older batch, and has the actions of it that come after the end of the
            // one before.
            let mut cells: Vec<_> = of(false).filter(|cell| cell.0 + period > last).chain(of(true)).collect();
            cells.retain(|cell| cell.0 <= last);
            cells.sort_by_key(|cell| (cell.0, cell.1));
            cells.into_iter().map(|(_, is_next, action)| DelayedAction { action, is_next }).collect()
        };
        self.rows.iter().zip(starts).map(merge).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::generate::{ScheduleSpec, generate};

    /// Merges batches of a schedule within a period, with actions that take a second each. Returns the period in which the
    /// rows run, in seconds, and the rows.
    fn merged(name: &str, ranks: u32, microbatches: u32, period: u64) -> Option<(f64, Vec<String>)> {
        let schedule = generate(name, &ScheduleSpec { ranks, microbatches, ..ScheduleSpec::default() });
        let (schedule, costs) = (schedule.expect("a schedule"), "F=1,I=1,W=1".parse().expect("costs"));
        let alone = Weaver::over(&schedule, &costs, 1).run().expect("no deadlock");
        let second = alone.duration(alone.rows[0][0]);
        let cells = alone.merged_within(period * second)?;
        let row =
            |row: &Vec<DelayedAction>| row.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ");
        let rows = cells.iter().map(row).collect();
        let run = Rows::run(&schedule, &costs, cells, BATCHES).expect("no deadlock");
        Some((run.period as f64 / second as f64, rows))
    }

    #[test]
    fn merged_batches_run_in_their_period() {
        // Alone, a batch of two microbatches on two ranks takes 9, and the work of each rank 6.
        let (period, rows) = merged("gpipe", 2, 2, 6).expect("rows");
        assert_eq!(period, 6.0);
        assert_eq!(rows, ["0F0' 0F1' 0B0 0B1", "1F0 1F1 1B0 1B1"]);
        assert_eq!(merged("gpipe", 2, 2, 5), None, "two periods hold a batch, but a rank has work of 6");
        // A batch takes 45.
        assert_eq!(merged("gpipe", 8, 8, 22), None);
        let (found, _) = merged("gpipe", 8, 8, 45).expect("rows");
        assert!(found <= 45.0, "{found}");
    }
}
