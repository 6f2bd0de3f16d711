//! The time and the memory of an order, without a timeline: the same numbers as [`crate::simulate::timed()`] and
//! [`crate::simulate::peak_memory`] give for the program that trains, to the bit, in a fraction of the time. The memory also
//! includes what is not in a simulation: what a rank holds all the time, only while an action runs, or between two of its
//! stages.
//!
//! The arithmetic follows the timed simulation operation by operation. The memory of a rank depends on the order of its
//! row alone, because a rank computes one thing at a time.

use crate::ids::{Rank, StageIndex};
use crate::plan::network::Network;
use crate::plan::order::{Cell, Kind, Order};
use crate::plan::stage_load::{StageLoad, beside, waiting};
use crate::profile::LinkProfile;
use crate::sharding::Sharding;

/// A time that is not known yet.
const UNKNOWN: f64 = -1.0;
/// No link: the neighbouring stage is on the same rank, or there is none.
const NO_LINK: u32 = u32::MAX;

/// The buffers of an evaluation, kept between evaluations.
#[derive(Debug, Default)]
pub(super) struct Evaluator {
    /// The arrivals of inputs and of gradients, by stage and microbatch.
    arrivals: [Vec<f64>; 2],
    free: Vec<f64>,
    position: Vec<usize>,
    ready: Vec<u32>,
    /// The tensor that each rank waits for: its direction and its place among the arrivals.
    waits: Vec<Option<(usize, usize)>>,
    /// The last weight gradient of each stage so far: its place in the row of its rank, and its end.
    weights_ended: Vec<(usize, f64)>,
    links: Links,
    /// The computations of each rank that have run.
    ended: Vec<Vec<Ended>>,
    /// The time of the computations of each rank that have not run, without second forwards.
    rest: Vec<f64>,
}

/// When a computation ended.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ended {
    pub(super) at: f64,
    /// Whether its rank was idle before it, until a message arrived.
    pub(super) has_waited: bool,
}

/// The links that messages of each stage take.
#[derive(Debug, Default)]
pub(super) struct Links {
    /// For each stage, the link of its output and that of the gradient of its input.
    pub(super) of: Vec<[u32; 2]>,
    /// The time from which each link is free.
    free: Vec<f64>,
    /// The costs of each link.
    costs: Vec<LinkProfile>,
}

impl Links {
    /// Numbers the links between the ranks of neighbouring stages.
    pub(super) fn set(&mut self, rank_of: &[u32], network: &Network) {
        let mut known: Vec<(u32, u32)> = Vec::new();
        let mut number = |from: u32, to: u32| {
            if from == to {
                return NO_LINK;
            }
            // There are few pairs: each rank has at most two neighbours in a loop or a V.
            let found = known.iter().rposition(|&pair| pair == (from, to));
            found.unwrap_or_else(|| {
                known.push((from, to));
                known.len() - 1
            }) as u32
        };
        self.of.clear();
        for (stage, &rank) in rank_of.iter().enumerate() {
            let output = rank_of.get(stage + 1).map_or(NO_LINK, |&next| number(rank, next));
            let gradient = stage.checked_sub(1).map_or(NO_LINK, |before| number(rank, rank_of[before]));
            self.of.push([output, gradient]);
        }
        self.free.clear();
        self.free.resize(known.len(), 0.0);
        self.costs.clear();
        self.costs.extend(known.iter().map(|&(from, to)| network.link(from, to)));
    }

    /// Sends `bytes` over `link` at `now`, and returns the arrival.
    pub(super) fn send(&mut self, link: u32, bytes: u64, now: f64) -> f64 {
        if link == NO_LINK {
            return now;
        }
        let costs = self.costs[link as usize];
        let occupied = bytes as f64 / costs.bytes_per_s;
        let free = &mut self.free[link as usize];
        let start = free.max(now);
        *free = start + occupied;
        start + occupied + costs.latency_s
    }
}

/// Returns the rank of each stage.
pub(super) fn ranks_of_stages(order: &Order) -> Vec<u32> {
    order.placement.all_stages().map(|stage| order.placement.rank_of(stage).get()).collect()
}

impl Evaluator {
    /// Returns the time of `order`, without the optimizer; `None` if the ranks wait for each other.
    pub(super) fn time(&mut self, order: &Order, loads: &[StageLoad], network: &Network) -> Option<f64> {
        self.time_before(order, loads, network, f64::INFINITY)
    }

    /// Returns the same; `None` also if the time is not below `before`, as soon as the rest of a rank's work shows it.
    pub(super) fn time_before(
        &mut self,
        order: &Order,
        loads: &[StageLoad],
        network: &Network,
        before: f64,
    ) -> Option<f64> {
        let rank_of = ranks_of_stages(order);
        self.reset(order, loads, &rank_of, network);
        let mut makespan = 0.0f64;
        while let Some(rank) = self.ready.pop() {
            makespan = makespan.max(self.advance(order, loads, &rank_of, rank as usize));
            // The sums of times are not exact.
            if (self.free[rank as usize] + self.rest[rank as usize]) * (1.0 - 1e-9) >= before {
                return None;
            }
        }
        let finished = self.position.iter().zip(&order.rows).all(|(&position, row)| position == row.len());
        let has_replicas = loads.iter().any(|load| load.reduce > 0.0);
        if has_replicas {
            makespan = makespan.max(last_reduction(order, loads, &self.weights_ended));
        }
        (finished && makespan < before).then_some(makespan)
    }

    /// Returns the computations of each rank that ran in the last evaluation.
    pub(super) fn ended(&self) -> &[Vec<Ended>] {
        &self.ended
    }

    /// Returns the number of computations that ran in the last evaluation.
    pub(super) fn computations(&self) -> u64 {
        self.ended.iter().map(|row| row.len() as u64).sum()
    }

    fn reset(&mut self, order: &Order, loads: &[StageLoad], rank_of: &[u32], network: &Network) {
        let (ranks, cells) = (order.rows.len(), rank_of.len() * order.microbatches as usize);
        for arrivals in &mut self.arrivals {
            arrivals.clear();
            arrivals.resize(cells, UNKNOWN);
        }
        self.free.clear();
        self.free.resize(ranks, 0.0);
        self.position.clear();
        self.position.resize(ranks, 0);
        self.ready.clear();
        self.ready.extend((0..ranks as u32).rev());
        self.waits.clear();
        self.waits.resize(ranks, None);
        self.weights_ended.clear();
        self.weights_ended.resize(rank_of.len(), (0, 0.0));
        self.links.set(rank_of, network);
        self.ended.resize(ranks, Vec::new());
        self.ended.iter_mut().for_each(Vec::clear);
        self.rest.clear();
        self.rest.resize(ranks, 0.0);
        for (load, &rank) in loads.iter().zip(rank_of) {
            let work = load.forward + load.input + load.weight;
            self.rest[rank as usize] += f64::from(order.microbatches) * work;
        }
    }

    /// Runs a rank as far as it can, and returns the end of its last computation.
    fn advance(&mut self, order: &Order, loads: &[StageLoad], rank_of: &[u32], rank: usize) -> f64 {
        let (width, last) = (order.microbatches as usize, rank_of.len() - 1);
        let (mut now, mut position) = (self.free[rank], self.position[rank]);
        while let Some(&cell) = order.rows[rank].get(position) {
            let stage = cell.stage as usize;
            let (at, load) = (stage * width + cell.microbatch as usize, &loads[stage]);
            let again = recomputes(&order.rows[rank], loads, position);
            let (needs, duration) = match cell.kind {
                Kind::Forward => ((stage > 0).then_some(0), load.forward),
                Kind::Input => ((stage < last).then_some(1), load.input),
                Kind::Weight => (None, load.weight),
                Kind::Backward => ((stage < last).then_some(1), load.input + load.weight),
            };
            let mut arrival = now;
            if let Some(direction) = needs {
                arrival = self.arrivals[direction][at];
                if arrival == UNKNOWN {
                    self.waits[rank] = Some((direction, at));
                    break;
                }
            }
            if let Some(again) = again {
                now += again;
            }
            let has_waited = arrival > now;
            now = now.max(arrival) + duration;
            self.rest[rank] -= duration;
            self.ended[rank].push(Ended { at: now, has_waited });
            if matches!(cell.kind, Kind::Weight | Kind::Backward) {
                self.weights_ended[stage] = (position, now);
            }
            position += 1;
            let (direction, target, bytes) = match cell.kind {
                Kind::Forward if stage < last => (0, at + width, load.output),
                Kind::Input | Kind::Backward if stage > 0 => (1, at - width, loads[stage - 1].output),
                _ => continue,
            };
            self.arrivals[direction][target] = self.links.send(self.links.of[stage][direction], bytes, now);
            let receiver = rank_of[if direction == 0 { stage + 1 } else { stage - 1 }];
            if self.waits[receiver as usize] == Some((direction, target)) {
                self.waits[receiver as usize] = None;
                self.ready.push(receiver);
            }
        }
        self.free[rank] = now;
        self.position[rank] = position;
        now
    }
}

/// Returns the time that the cell at `position` of a row takes to compute its forward again; `None` for other cells, and
/// if that forward is right before it.
pub(super) fn recomputes(row: &[Cell], loads: &[StageLoad], position: usize) -> Option<f64> {
    let again = loads[row[position].stage as usize].again?;
    let is_backward = matches!(row[position].kind, Kind::Input | Kind::Backward);
    (is_backward && !(position > 0 && is_followed(row, position - 1))).then_some(again)
}

/// Returns whether the cell at `position` is a forward that its own backward follows.
fn is_followed(row: &[Cell], position: usize) -> bool {
    let forward = row[position];
    row.get(position + 1).is_some_and(|next| {
        let is_backward = matches!(next.kind, Kind::Input | Kind::Backward);
        forward.kind == Kind::Forward
            && is_backward
            && (next.stage, next.microbatch) == (forward.stage, forward.microbatch)
    })
}

/// Returns the end of the last reduction over replicas. A stage is reduced after its last weight gradient, on a channel
/// of its rank that takes one reduction at a time. `ended` has each stage's last weight gradient: its place in the row of
/// its rank, and its end. Two of them may end at the same time, so the places decide which stage is reduced first.
fn last_reduction(order: &Order, loads: &[StageLoad], ended: &[(usize, f64)]) -> f64 {
    let mut latest = 0.0f64;
    for rank in order.placement.all_ranks() {
        let own = order.placement.stages_of(rank);
        let mut reductions: Vec<((usize, f64), f64)> =
            own.iter().map(|stage| (ended[stage.index()], loads[stage.index()].reduce)).collect();
        reductions.sort_by_key(|&((place, _), _)| place);
        let channel = reductions.iter().fold(0.0f64, |free, &((_, start), takes)| free.max(start) + takes);
        latest = latest.max(channel);
    }
    latest
}

/// Returns the peak bytes of each rank: parameters, optimizer state, gradients and activations, and what is held only while
/// actions run.
pub(super) fn peaks(order: &Order, loads: &[StageLoad], sharding: Sharding) -> Vec<u64> {
    let trains = order.rows.iter().flatten().any(|cell| cell.kind != Kind::Forward);
    (0..order.rows.len()).map(|rank| peak(order, loads, sharding, rank, trains)).collect()
}

fn peak(order: &Order, loads: &[StageLoad], sharding: Sharding, rank: usize, trains: bool) -> u64 {
    let own = order.placement.stages_of(Rank::new(rank as u32));
    let always = StageLoad::always(own.iter().map(|stage| &loads[stage.index()]), sharding);
    let mut held = always.saturating_add(waiting(own, loads));
    let mut peak = held;
    let mut with_gradient: Vec<u32> = Vec::new();
    let row = &order.rows[rank];
    let own_loads: Vec<StageLoad> = own.iter().map(|&stage| beside(stage, own, loads)).collect();
    for (position, cell) in row.iter().enumerate() {
        let load = &own_loads[order.placement.chunk_of(StageIndex::new(cell.stage)).index()];
        let (more, less) = match cell.kind {
            Kind::Forward if trains && !is_followed(row, position) => (load.kept, 0),
            Kind::Forward if trains => (load.activation(), 0),
            Kind::Forward => (load.activation(), load.activation()),
            Kind::Input | Kind::Backward if position > 0 && is_followed(row, position - 1) => {
                (0, load.activation())
            }
            Kind::Input | Kind::Backward => (load.rebuilt, load.activation()),
            Kind::Weight => (0, load.stash),
        };
        held = held.saturating_add(more);
        peak = peak.max(held.saturating_add(load.temporary));
        let mut made = if cell.kind == Kind::Input { load.stash } else { 0 };
        let weighs = matches!(cell.kind, Kind::Weight | Kind::Backward);
        if weighs && !with_gradient.contains(&cell.stage) {
            // One parameter after the other gets its gradient, and what that needed is freed.
            with_gradient.push(cell.stage);
            made = load.gradient;
        }
        held = held.saturating_add(made).saturating_sub(less);
        peak = peak.max(held.saturating_add(load.temporary));
    }
    peak
}
