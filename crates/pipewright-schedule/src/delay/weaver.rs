//! [`Weaver`]: a simulation of batches that overlap, by the rules of `weave.rs`.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::delayed_action::{DelayError, DelayedAction};
use super::taken::Taken;
use crate::action::{Action, ActionKind};
use crate::batch_gate::needed_by;
use crate::costs::Costs;
use crate::divisor::greatest_common_divisor;
use crate::generate::ticks::{StageTicks, ticks};
use crate::ids::{Microbatch, StageIndex};
use crate::placement::Placement;
use crate::schedule::Schedule;
use crate::trained::{StageBackward, TrainedStages};

/// The number of batches whose tensors are kept: a rank in batch `t + 2` has seen all ranks end batch `t`.
const LIVE_BATCHES: usize = 4;

/// The time of a tensor that has not been made.
const NEVER: u64 = u64::MAX;

/// How a rank chooses between its older and its next batch.
#[derive(Clone, Copy)]
pub(super) enum Rules<'a> {
    /// By rules 2 and 3. A rank keeps at most so many activations, if limits are given.
    Free { caps: &'a [u32], order: Order<'a> },
    /// In the order of given rows.
    Given(&'a [Vec<DelayedAction>]),
}

/// When the computations of a batch are due.
pub(super) struct Due {
    /// For each rank, the times of its computations, in their order.
    pub(super) times: Vec<Vec<i64>>,
    /// The time from one batch to the next.
    pub(super) period: i64,
}

impl Due {
    /// Returns whether a computation of the next batch is due before one of the older batch. `positions` has the places of
    /// both, of the older one first.
    fn is_next_first(&self, rank: usize, positions: [usize; 2]) -> bool {
        let [older, next] = positions.map(|position| self.times[rank][position]);
        next + self.period < older
    }
}

/// Which batch a rank takes if both can run.
#[derive(Clone, Copy)]
pub(super) enum Order<'a> {
    /// The older one, unless it is at a `W`.
    OlderFirst,
    NextFirst,
    /// The one whose computation is due first.
    Due(&'a Due),
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
pub(super) struct RankState {
    /// Its older batch.
    older: usize,
    /// The number of computations that it has done of the older and of the next batch.
    next: [usize; 2],
    pub(super) free_at: u64,
    kept: u32,
    pub(super) peak: u32,
    done: Vec<Done>,
}

impl RankState {
    /// Returns whether the next computation of a repeating row belongs to the next batch. `before` cells of the row do.
    fn is_next_in(&self, row: &[DelayedAction], before: usize) -> bool {
        // A repetition begins when the computations of its older batch that are cells of a next batch have run.
        let position = self.next[0].checked_sub(before).map(|older| older + self.next[1]);
        position.and_then(|position| row.get(position)).is_some_and(|cell| cell.is_next)
    }
}

/// The simulation.
pub(super) struct Weaver<'a> {
    pub(super) placement: &'a Placement,
    trained: &'a TrainedStages,
    pub(super) microbatches: usize,
    batches: usize,
    ticks: Vec<StageTicks>,
    /// The time by which messages to other ranks are late.
    late: u64,
    /// The computations of each rank in one batch, in their order.
    pub(super) rows: Vec<Vec<Action>>,
    rules: Rules<'a>,
    /// The number of cells of the next batch in each of the given rows.
    next_cells: Vec<usize>,
    pub(super) ranks: Vec<RankState>,
    /// The rank of each computation that has run.
    pub(super) sequence: Vec<usize>,
    /// When outputs and gradients arrive, for each live batch, stage and microbatch.
    pub(super) arrivals: Vec<[u64; 2]>,
    /// For each batch, the number of ranks that have not ended it, and the time at which the last one has.
    ended: Vec<(usize, u64)>,
    /// The times at which ranks may be able to compute.
    wakes: BinaryHeap<Reverse<(u64, usize)>>,
}

impl<'a> Weaver<'a> {
    pub(super) fn over(schedule: &'a Schedule, costs: &Costs, batches: usize) -> Self {
        let placement = schedule.placement();
        let ranks = schedule.rows().len();
        let row =
            |row: &Vec<Option<Action>>| row.iter().flatten().flat_map(|action| action.parts()).collect();
        let rows: Vec<Vec<Action>> = schedule.rows().iter().map(row).collect();
        let (stages, microbatches) = (placement.stages() as usize, schedule.microbatches() as usize);
        Self {
            placement,
            trained: schedule.trained(),
            microbatches,
            batches,
            ticks: ticks(costs, placement),
            late: 0,
            rows,
            rules: Rules::Free { caps: &[], order: Order::OlderFirst },
            next_cells: Vec::new(),
            ranks: vec![RankState::default(); ranks],
            sequence: Vec::new(),
            arrivals: vec![[NEVER; 2]; LIVE_BATCHES.min(batches) * stages * microbatches],
            ended: vec![(ranks, 0); batches],
            wakes: (0..ranks).map(|rank| Reverse((0, rank))).collect(),
        }
    }

    pub(super) fn by(self, rules: Rules<'a>) -> Self {
        let Rules::Given(given) = rules else { return Self { rules, ..self } };
        let count = |row: &Vec<DelayedAction>| row.iter().filter(|cell| cell.is_next).count();
        let rows = given.iter().map(|row| in_order(row).collect()).collect();
        Self { rules, rows, next_cells: given.iter().map(count).collect(), ..self }
    }

    /// Lets messages to other ranks be late.
    pub(super) fn late_by(self, late: u64) -> Self {
        Self { late, ..self }
    }

    /// Runs all batches.
    pub(super) fn run(mut self) -> Result<Self, DelayError> {
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
        let backward = self.trained.backward_of(action.stage());
        let state = &mut self.ranks[rank];
        state.free_at = end;
        state.next[usize::from(is_next)] += 1;
        state.kept = match (action.kind(), backward) {
            (ActionKind::Forward, StageBackward::Inputs | StageBackward::Whole) => state.kept + 1,
            (ActionKind::Backward | ActionKind::WeightBackward, _)
            | (ActionKind::InputBackward, StageBackward::Inputs) => state.kept.saturating_sub(1),
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
        let (caps, order) = match self.rules {
            Rules::Free { caps, order } => (caps, order),
            Rules::Given(rows) => {
                let is_next =
                    state.older + 1 < self.batches && state.is_next_in(&rows[rank], self.next_cells[rank]);
                return head(is_next).map(|_| is_next);
            }
        };
        let has_room = |action: Action| {
            action.kind() != ActionKind::Forward
                || !self.trained.runs_backward(action.stage())
                || caps.get(rank).is_none_or(|cap| state.kept < *cap)
        };
        let (older, next) = (head(false), head(true).filter(|action| has_room(*action)));
        match (older, next) {
            (Some(older), Some(_)) => Some(match order {
                Order::OlderFirst => older.kind() == ActionKind::WeightBackward,
                Order::NextFirst => true,
                Order::Due(due) => due.is_next_first(rank, state.next),
            }),
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
    pub(super) fn needed(&self, action: Action, batch: usize) -> Option<(usize, usize)> {
        let stage = action.stage();
        let (source, slot) = match action.kind() {
            ActionKind::Forward => (self.placement.previous(stage), 0),
            ActionKind::Backward | ActionKind::InputBackward => (self.placement.next(stage), 1),
            _ => return None,
        };
        source.map(|source| (self.tensor(source, action, batch), slot))
    }

    /// Returns the stage that needs what `action` makes, the place of the tensor, and the time of its message.
    pub(super) fn delivery(&self, action: Action) -> Option<(Option<StageIndex>, usize, u64)> {
        let stage = action.stage();
        let ticks = self.ticks[stage.index()];
        let (reader, slot, hop) = match action.kind() {
            ActionKind::Forward => (self.placement.next(stage), 0, ticks.output_hop),
            ActionKind::Backward | ActionKind::InputBackward => {
                (self.placement.previous(stage), 1, ticks.gradient_hop)
            }
            _ => return None,
        };
        let rank = |stage| self.placement.rank_of(stage);
        let late = if reader.is_some_and(|reader| rank(reader) != rank(stage)) { self.late } else { 0 };
        Some((reader, slot, hop + late))
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
    pub(super) fn tensor(&self, stage: StageIndex, action: Action, batch: usize) -> usize {
        let stages = self.ticks.len();
        let microbatch = action.microbatch().map_or(0, Microbatch::index);
        ((batch % LIVE_BATCHES) * stages + stage.index()) * self.microbatches + microbatch
    }

    pub(super) fn duration(&self, action: Action) -> u64 {
        let ticks = self.ticks[action.stage().index()];
        match action.kind() {
            ActionKind::Forward => ticks.forward,
            ActionKind::InputBackward => ticks.input_backward,
            ActionKind::WeightBackward => ticks.weight_backward,
            _ => ticks.backward(),
        }
    }

    /// Returns the time that a rank has computed.
    pub(super) fn work(&self, state: &RankState) -> u64 {
        state.done.iter().map(|done| self.duration(done.action)).sum()
    }

    /// Returns the mean time from one batch to the next, away from the first and the last batches.
    pub(super) fn period(&self) -> u64 {
        let last = self.batches.saturating_sub(4);
        (self.ended[last].1 - self.ended[last / 2].1) / (last - last / 2) as u64
    }

    /// Returns the rows of a late repetition, changed so that they repeat: a rank that has computed less of the next batch
    /// than it had computed of the older one before the repetition computes the difference first.
    pub(super) fn closed_rows(&self) -> Vec<Vec<DelayedAction>> {
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

    /// Returns the computations of each rank with their starts, one batch alone.
    pub(super) fn timed_rows(&self) -> Vec<Vec<(u64, Action)>> {
        let row = |state: &RankState| state.done.iter().map(|done| (done.start, done.action)).collect();
        self.ranks.iter().map(row).collect()
    }

    /// Merges the rows of one batch with the rows of the next batch, which begins one period later. Each computation
    /// starts as early as it can without one of another batch at the same time. `None` if two periods do not hold a
    /// whole batch: the batch after the next one waits for its update.
    pub(super) fn merged_within(&self, period: u64) -> Option<Vec<Vec<DelayedAction>>> {
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
        let timed =
            |(starts, row): (Vec<u64>, &Vec<Action>)| starts.into_iter().zip(row.iter().copied()).collect();
        Some(merged(&starts.into_iter().zip(&self.rows).map(timed).collect::<Vec<_>>(), period))
    }

    /// Returns the computations in the order in which they ran, with their ranks.
    pub(super) fn in_sequence(&self) -> impl Iterator<Item = (usize, Action)> {
        let mut next = vec![0; self.rows.len()];
        self.sequence.iter().map(move |&rank| {
            next[rank] += 1;
            (rank, self.rows[rank][next[rank] - 1])
        })
    }

    /// Returns the longest time of which all computations and messages take a multiple; at least a tick.
    pub(super) fn grid(&self) -> u64 {
        let times = |ticks: &StageTicks| {
            [ticks.forward, ticks.input_backward, ticks.weight_backward, ticks.output_hop, ticks.gradient_hop]
        };
        self.ticks.iter().flat_map(times).fold(0, greatest_common_divisor).max(1)
    }

    /// Returns the mean time of a computation.
    pub(super) fn mean_duration(&self) -> u64 {
        let computations = self.sequence.len().max(1) as u64;
        self.ranks.iter().map(|state| self.work(state)).sum::<u64>() / computations
    }
}

/// Returns the computations of a batch in the order of a repeating row.
pub(super) fn in_order(row: &[DelayedAction]) -> impl Iterator<Item = Action> {
    let of = |is_next: bool| row.iter().filter(move |cell| cell.is_next == is_next).map(|cell| cell.action);
    of(true).chain(of(false))
}

/// Merges the rows of one batch, whose computations have these starts in ascending order, with the rows of the next batch,
/// which begins one period later.
pub(super) fn merged(rows: &[Vec<(u64, Action)>], period: u64) -> Vec<Vec<DelayedAction>> {
    let merge = |row: &Vec<(u64, Action)>| {
        let last = row.last().map_or(0, |cell| cell.0);
        let of = |is_next: bool| {
            let later = if is_next { period } else { 0 };
            row.iter().map(move |(start, action)| (start + later, is_next, *action))
        };
        // A repetition ends with the older batch, and has the actions of it that come after the end of the
        // one before.
        let mut cells: Vec<_> = of(false).filter(|cell| cell.0 + period > last).chain(of(true)).collect();
        cells.retain(|cell| cell.0 <= last);
        cells.sort_by_key(|cell| (cell.0, cell.1));
        cells.into_iter().map(|(_, is_next, action)| DelayedAction { action, is_next }).collect()
    };
    rows.iter().map(merge).collect()
}
