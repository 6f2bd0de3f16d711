//! Searched orders: a simulated run in which each free rank chooses its next computation by rules.
//!
//! A rank that is free runs, in this order of preference: (1) a backward whose gradient has arrived, the
//! oldest microbatch first; (2) a forward whose input has arrived, if memory allows it; (3) a pending weight
//! gradient, the oldest first. The rules ([`Rules`]) change the choice among forwards, the choice between a
//! forward and a backward, the gaps that weight gradients fill, and the number of microbatches in flight. For unlike
//! ranks, the most urgent forward or backward may come first instead: the one with the longest way to the end of the
//! step, where a later microbatch has more time.
//!
//! **Memory.** A forward of a stage runs only if its rank then still has room for one microbatch in all later
//! stages of the rank. There is no deadlock: let `j` be the oldest unfinished microbatch, and let it need a
//! forward of some stage next. Stages take microbatches in order, so the later stages of that rank hold
//! nothing. Everything that the rank holds was admitted together with the room for this forward, and a weight
//! gradient can always run and only frees memory. The room includes what the input backward of one microbatch
//! may add; if it does not fit, weight gradients run first. A stage that runs forward only holds nothing.
//!
//! **Frozen stages.** Ranks run what the program that trains has. The computations that frozen stages drop
//! follow at the end of the rows ([`Order::completed`]).
//!
//! **Early end.** A rank ends no earlier than its last computation so far plus the rest of its work. It also
//! does all its forwards and input backwards before the input backwards of all earlier stages begin to follow
//! the last one of its first stage. The run ends as soon as one of these times shows that it will be too
//! slow.
//!
//! **Time.** Logarithmic in the ranks for each computation, and linear in the stages of a rank for each
//! choice.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use crate::ids::StageIndex;
use crate::placement::Placement;
use crate::plan::links::Links;
use crate::plan::network::Network;
use crate::plan::numbers::Numbers;
use crate::plan::order::{Cell, Kind, Order, first_backward};
use crate::plan::rank_memory::RankMemory;
use crate::plan::stage_load::{StageLoad, besides_microbatches, held_in_update};
use crate::sharding::Sharding;
use crate::trained::StageBackward;

/// The rules of a searched order.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Rules {
    /// The forward that is preferred.
    pub(super) forward: Preferred,
    /// After a backward, prefer a forward.
    pub(super) alternate: bool,
    /// A weight gradient runs in a gap only if the gap has at least this share of its time.
    pub(super) filling: f64,
    /// The number of microbatches between their first forward and their last backward; 0 for any number.
    pub(super) in_flight: u32,
}

/// A choice among forwards.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Preferred {
    /// The forward of the last stage.
    Deepest,
    /// The forward of the oldest microbatch.
    Oldest,
    /// The forward of the first stage.
    Shallowest,
    /// The forward or backward with the longest way of its microbatch to the end of the step. Each microbatch has more
    /// time than the one before it: this share of the work of a mean rank for a microbatch.
    Urgent { pace: f64 },
}

impl Rules {
    /// Returns the rules to try for unlike ranks, the most promising first.
    pub(super) fn all_for_unlike(ranks: u32, stages: u32) -> Vec<Self> {
        let mut rules = Vec::new();
        for filling in [0.0, 0.6] {
            for pace in [0.3, 0.5, 0.2, 0.4] {
                let forward = Preferred::Urgent { pace };
                rules.push(Self { forward, alternate: false, filling, in_flight: 0 });
            }
        }
        // The two kinds in turn.
        let mut others = Self::all(ranks, stages).into_iter();
        let mut mixed = Vec::new();
        for urgent in rules {
            mixed.push(urgent);
            mixed.extend(others.next());
        }
        mixed.extend(others);
        mixed
    }

    /// Returns the rules to try, the most promising first.
    pub(super) fn all(ranks: u32, stages: u32) -> Vec<Self> {
        let mut rules = Vec::new();
        for in_flight in [0, ranks + ranks / 2, 2 * ranks, ranks, stages + 1] {
            for filling in [0.0, 0.6] {
                for forward in [Preferred::Deepest, Preferred::Oldest] {
                    for alternate in [false, true] {
                        rules.push(Self { forward, alternate, filling, in_flight });
                    }
                }
            }
        }
        rules
    }

    /// Changes one rule at random.
    pub(super) fn shake(&mut self, ranks: u32, stages: u32, numbers: &mut Numbers) {
        match numbers.below(4) {
            0 if matches!(self.forward, Preferred::Urgent { .. }) && numbers.below(3) > 0 => {
                self.forward = Preferred::Urgent { pace: (1 + numbers.below(14)) as f64 / 20.0 };
            }
            0 => {
                let all = [Preferred::Deepest, Preferred::Oldest, Preferred::Shallowest];
                self.forward = all[numbers.below(3)];
            }
            1 => self.alternate = !self.alternate,
            2 => self.filling = numbers.below(6) as f64 / 5.0,
            _ => {
                let most = (stages + 2 * ranks) as usize;
                self.in_flight = if numbers.below(3) == 0 { 0 } else { ranks + numbers.below(most) as u32 };
            }
        }
    }
}

/// The input of a searched order.
pub(super) struct Task<'a> {
    pub(super) placement: &'a Placement,
    pub(super) microbatches: u32,
    pub(super) loads: &'a [StageLoad],
    pub(super) network: &'a Network,
    pub(super) sharding: Sharding,
    /// The memory of the ranks.
    pub(super) memory: Option<&'a RankMemory>,
}

struct StageState {
    rank: u32,
    /// The numbers of forwards, input backwards and weight backwards that have run.
    forwards: u32,
    inputs: u32,
    /// The arrivals of inputs and of gradients, by microbatch. Forwards and input backwards take them in
    /// order.
    input_at: Vec<f64>,
    gradient_at: Vec<f64>,
    /// The bytes that must be free on the rank when a forward of this stage starts.
    room: u64,
}

struct RankState {
    free: f64,
    held: u64,
    limit: u64,
    /// The times of all computations, and of all forwards and input backwards, that have not run, without
    /// second forwards.
    work: f64,
    critical: f64,
    /// The shortest time from the end of the rank's last input backward to the end of the step.
    drain: f64,
    pending: VecDeque<Cell>,
    backward_was_last: bool,
    own: Vec<usize>,
    row: Vec<Cell>,
}

/// The moment at which a rank looks for work. Times are not negative, so that their bits have the order of
/// the times.
type Wake = Reverse<(u64, u32)>;

struct Run<'a> {
    task: &'a Task<'a>,
    rules: Rules,
    stages: Vec<StageState>,
    ranks: Vec<RankState>,
    links: Links,
    wakes: BinaryHeap<Wake>,
    left: usize,
    /// The first stage that runs backward.
    first: usize,
    /// For each stage, the time from the start of its forward, and of its backward, to the end of the step, if nothing
    /// is in its way.
    ways: Vec<[f64; 2]>,
    /// The work of a mean rank for a microbatch.
    interval: f64,
}

/// Returns the order that the rules make, with its end; `None` if it does not end before `before`, or if the
/// memory of a rank is too small. Adds the number of computations that were simulated to `work`.
pub(super) fn greedy(task: &Task<'_>, rules: Rules, before: f64, work: &mut u64) -> Option<(Order, f64)> {
    let mut run = Run::of(task, rules)?;
    let mut end = 0.0f64;
    while let Some(Reverse((bits, rank))) = run.wakes.pop() {
        let now = f64::from_bits(bits);
        if run.ranks[rank as usize].free > now {
            continue;
        }
        if let Some(cell) = run.choose(rank as usize, now) {
            end = end.max(run.perform(rank as usize, cell));
            *work += 1;
            if end.max(run.earliest_end(rank as usize)) >= before {
                return None;
            }
        }
    }
    if run.left > 0 {
        return None;
    }
    let rows = run.ranks.into_iter().map(|rank| rank.row).collect();
    Some((Order::completed(task.placement.clone(), task.microbatches, rows, task.loads), end))
}

impl<'a> Run<'a> {
    fn of(task: &'a Task<'a>, rules: Rules) -> Option<Self> {
        let placement = task.placement;
        let rank_of: Vec<u32> = placement.all_stages().map(|stage| placement.rank_of(stage).get()).collect();
        let mut links = Links::default();
        links.set(&rank_of, task.network);
        links.set_sizes(task.loads);
        let mut stages: Vec<StageState> = rank_of
            .iter()
            .map(|&rank| StageState {
                rank,
                forwards: 0,
                inputs: 0,
                input_at: Vec::with_capacity(task.microbatches as usize),
                gradient_at: Vec::with_capacity(task.microbatches as usize),
                room: 0,
            })
            .collect();
        stages[0].input_at.resize(task.microbatches as usize, 0.0);
        let first = first_backward(task.loads) as usize;
        let drains = drains(task, &rank_of, first);
        let ranks = placement.all_ranks().map(|rank| {
            let own: Vec<usize> = placement.stages_of(rank).iter().map(|stage| stage.index()).collect();
            let memory = task.memory.map_or(u64::MAX, |memory| memory.of_rank(rank.index()));
            let limit = rank_limit(task, memory, placement.stages_of(rank), &mut stages)?;
            let row = Vec::with_capacity(3 * own.len() * task.microbatches as usize);
            let loads = own.iter().map(|&stage| &task.loads[stage]);
            let critical = loads.clone().map(|load| load.forward_takes() + load.input_takes()).sum::<f64>();
            let weight = loads.map(StageLoad::weight_apart).sum::<f64>();
            let microbatches = f64::from(task.microbatches);
            Some(RankState {
                free: 0.0,
                held: 0,
                limit,
                work: microbatches * (critical + weight),
                critical: microbatches * critical,
                // All other computations of the rank lead to a backward of its first stage that has one.
                drain: own.iter().find(|&&stage| stage >= first).map_or(0.0, |&stage| drains[stage]),
                pending: VecDeque::new(),
                backward_was_last: false,
                own,
                row,
            })
        });
        let ranks = ranks.collect::<Option<Vec<_>>>()?;
        let kinds = [Kind::Forward, Kind::Input, Kind::Weight];
        let count_kinds =
            |load: &StageLoad| kinds.into_iter().filter(|kind| !kind.is_dropped(load.computes)).count();
        let left = task.loads.iter().map(count_kinds).sum::<usize>() * task.microbatches as usize;
        let wakes = BinaryHeap::from([Reverse((0, stages[0].rank))]);
        let works = ranks.iter().map(|rank| rank.work).sum::<f64>();
        let interval = works / (ranks.len().max(1) as f64 * f64::from(task.microbatches.max(1)));
        let ways = ways(task, &rank_of, &drains);
        Some(Self { task, rules, stages, ranks, links, wakes, left, first, ways, interval })
    }

    /// Returns a time that is not after the end of the step, by what the rank has left to do.
    fn earliest_end(&self, rank: usize) -> f64 {
        let state = &self.ranks[rank];
        // The sums of times are not exact.
        (state.free + state.work.max(state.critical + state.drain)) * (1.0 - 1e-9)
    }

    /// Returns the next computation of a free rank; `None` to wait for a message.
    fn choose(&self, rank: usize, now: f64) -> Option<Cell> {
        let state = &self.ranks[rank];
        let mut input: Option<(u32, Reverse<usize>)> = None;
        let mut forward: Option<(u32, Reverse<usize>)> = None;
        let mut urgent: Option<(f64, Cell)> = None;
        let mut next_arrival = f64::INFINITY;
        let mut is_full = false;
        for &stage in &state.own {
            let it = &self.stages[stage];
            if let Some(&arrival) = it.gradient_at.get(it.inputs as usize) {
                let key = (it.inputs, Reverse(stage));
                if arrival > now {
                    next_arrival = next_arrival.min(arrival);
                } else if state.held.saturating_add(self.task.loads[stage].growth()) > state.limit {
                    // Weight gradients run first, because they free memory.
                    is_full = true;
                } else if let Preferred::Urgent { pace } = self.rules.forward {
                    self.keep_urgent(&mut urgent, pace, Kind::Input, stage);
                } else if input.is_none_or(|best| key < best) {
                    input = Some(key);
                }
            }
            if let Some(&arrival) = it.input_at.get(it.forwards as usize)
                && self.may_forward(state, stage)
            {
                let first = match self.rules.forward {
                    Preferred::Deepest | Preferred::Urgent { .. } => 0,
                    Preferred::Oldest => it.forwards,
                    Preferred::Shallowest => stage as u32,
                };
                let key = (first, Reverse(stage));
                if arrival > now {
                    next_arrival = next_arrival.min(arrival);
                } else if let Preferred::Urgent { pace } = self.rules.forward {
                    self.keep_urgent(&mut urgent, pace, Kind::Forward, stage);
                } else if forward.is_none_or(|best| key < best) {
                    forward = Some(key);
                }
            }
        }
        let forward = forward.map(|(_, Reverse(stage))| self.cell(Kind::Forward, stage));
        let input = input.map(|(_, Reverse(stage))| self.cell(Kind::Input, stage));
        if self.rules.alternate && state.backward_was_last && forward.is_some() {
            return forward;
        }
        urgent.map(|(_, cell)| cell).or(input).or(forward).or_else(|| {
            let &cell = state.pending.front()?;
            let takes = self.task.loads[cell.stage as usize].weight_apart();
            let fits = is_full || next_arrival - now >= self.rules.filling * takes;
            fits.then_some(cell)
        })
    }

    /// Replaces `urgent` by the next computation of a stage if that is more urgent.
    fn keep_urgent(&self, urgent: &mut Option<(f64, Cell)>, pace: f64, kind: Kind, stage: usize) {
        let cell = self.cell(kind, stage);
        let way = self.ways[stage][usize::from(kind != Kind::Forward)];
        let urgency = way - pace * self.interval * f64::from(cell.microbatch);
        if urgent.is_none_or(|(most, _)| urgency > most) {
            *urgent = Some((urgency, cell));
        }
    }

    fn may_forward(&self, state: &RankState, stage: usize) -> bool {
        let it = &self.stages[stage];
        let finished = self.stages[self.first].inputs;
        let is_admitted =
            stage > 0 || self.rules.in_flight == 0 || it.forwards - finished < self.rules.in_flight;
        is_admitted && state.held.saturating_add(it.room) <= state.limit
    }

    fn cell(&self, kind: Kind, stage: usize) -> Cell {
        let it = &self.stages[stage];
        let microbatch = if kind == Kind::Forward { it.forwards } else { it.inputs };
        Cell { kind, stage: stage as u32, microbatch, overlaps: false }
    }

    /// Runs a computation and returns its end.
    ///
    /// It starts as soon as its tensor had arrived and its rank was free and had computed the forward again.
    /// That may be in the past: a rank that waits for one message may find at another that a weight gradient
    /// must make room first. The order of the rank is the same, and so is the time that the simulator gives
    /// it.
    fn perform(&mut self, rank: usize, cell: Cell) -> f64 {
        let stage = &mut self.stages[cell.stage as usize];
        let load = &self.task.loads[cell.stage as usize];
        let state = &mut self.ranks[rank];
        let (arrival, again, takes) = match cell.kind {
            Kind::Forward => {
                let arrival = stage.input_at.get(stage.forwards as usize).copied();
                stage.forwards += 1;
                state.held = state.held.saturating_add(load.kept);
                state.critical -= load.forward_takes();
                state.work -= load.forward_takes();
                state.backward_was_last = false;
                (arrival, 0.0, load.forward_takes())
            }
            Kind::Input | Kind::Backward => {
                let arrival = stage.gradient_at.get(stage.inputs as usize).copied();
                stage.inputs += 1;
                state.held = state.held.saturating_add(load.stash).saturating_sub(load.kept);
                if load.computes == StageBackward::Whole {
                    state.pending.push_back(Cell { kind: Kind::Weight, ..cell });
                }
                state.critical -= load.input_takes();
                state.work -= load.input_takes();
                state.backward_was_last = true;
                let forward = Cell { kind: Kind::Forward, ..cell };
                let again = if state.row.last() == Some(&forward) { 0.0 } else { load.again_takes() };
                (arrival, again, load.input_takes())
            }
            Kind::Weight => {
                state.pending.pop_front();
                state.held = state.held.saturating_sub(load.stash);
                state.work -= load.weight_apart();
                (None, 0.0, load.weight_apart())
            }
        };
        let ready = state.free + again;
        let end = arrival.map_or(ready, |arrival| ready.max(arrival)) + takes;
        state.row.push(cell);
        state.free = end;
        self.left -= 1;
        self.wake(end, rank as u32);
        self.deliver(cell, end);
        end
    }

    fn deliver(&mut self, cell: Cell, end: f64) {
        let (stage, last) = (cell.stage as usize, self.stages.len() - 1);
        let (direction, target) = match cell.kind {
            Kind::Forward if stage == last => {
                self.stages[stage].gradient_at.push(end);
                return;
            }
            Kind::Forward => (0, stage + 1),
            Kind::Input if stage > self.first => (1, stage - 1),
            Kind::Input if stage > 0 => {
                // The first rank may wait because of the microbatches in flight. No gradient wakes it.
                let rank = self.stages[0].rank;
                self.wake(end.max(self.ranks[rank as usize].free), rank);
                return;
            }
            _ => return,
        };
        let arrival = self.links.send(stage, direction, end);
        let target = &mut self.stages[target];
        let queue = if direction == 0 { &mut target.input_at } else { &mut target.gradient_at };
        queue.push(arrival);
        let rank = target.rank;
        let free = self.ranks[rank as usize].free;
        // A busy rank looks for work when it is free. If stages run forward only, forwards that were held
        // back may start in the past, so that a message arrives before its rank has begun to wait.
        if free <= arrival || self.first > 0 {
            self.wake(arrival.max(free), rank);
        }
    }

    fn wake(&mut self, at: f64, rank: u32) {
        self.wakes.push(Reverse((at.to_bits(), rank)));
    }
}

/// Returns for each stage the time from the end of its last input backward to the end of the step, if nothing
/// is in its way: the input backwards of the stages before it with their messages, and a weight gradient of
/// `first`, the first stage that runs backward.
fn drains(task: &Task<'_>, rank_of: &[u32], first: usize) -> Vec<f64> {
    let mut drains = vec![0.0; first];
    drains.push(task.loads[first].weight_apart());
    for stage in first + 1..rank_of.len() {
        let (from, to) = (rank_of[stage], rank_of[stage - 1]);
        let before = &task.loads[stage - 1];
        let link = task.network.link(from, to);
        let hop = if from == to { 0.0 } else { link.latency_s + before.output as f64 / link.bytes_per_s };
        drains.push(drains[stage - 1] + hop + before.input_takes());
    }
    drains
}

/// Returns for each stage the time from the start of its forward, and of its backward, to the end of the step, if
/// nothing is in its way.
fn ways(task: &Task<'_>, rank_of: &[u32], drains: &[f64]) -> Vec<[f64; 2]> {
    let mut ways = vec![[0.0; 2]; rank_of.len()];
    let mut after = 0.0;
    for (stage, load) in task.loads.iter().enumerate().rev() {
        let backward = load.input_takes() + drains[stage];
        if let (Some(&from), Some(&to)) = (rank_of.get(stage), rank_of.get(stage + 1)) {
            let link = task.network.link(from, to);
            after += if from == to { 0.0 } else { link.latency_s + load.output as f64 / link.bytes_per_s };
        } else {
            after = backward;
        }
        after += load.forward_takes();
        ways[stage] = [after, backward];
    }
    ways
}

/// Returns the bytes that a rank has for activations, and sets the room that a forward of each of its stages
/// needs, in `memory` bytes; `None` if not even one microbatch or the update fits.
fn rank_limit(task: &Task<'_>, memory: u64, own: &[StageIndex], stages: &mut [StageState]) -> Option<u64> {
    let other = besides_microbatches(own, task.loads, task.sharding);
    let growth = own.iter().map(|stage| task.loads[stage.index()].growth());
    let mut room = growth.max().unwrap_or(0);
    for stage in own.iter().rev().map(|stage| stage.index()) {
        room = room.saturating_add(task.loads[stage].kept);
        stages[stage].room = room;
    }
    let limit = memory.checked_sub(other)?;
    let fits = room <= limit && held_in_update(own, task.loads, task.sharding) <= memory;
    fits.then_some(limit)
}
