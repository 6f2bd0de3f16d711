//! The time of an order, without a timeline: the same number as [`crate::simulate::timed()`] gives for the
//! program that trains, to the bit, in a fraction of the time.
//!
//! The arithmetic follows the timed simulation operation by operation. After a change of an order, only
//! computations that end at or after the first possible effect of the change are computed again. Earlier ones
//! depend only on computations that ended before them. The messages of a link are sent in the order of the
//! sender's row. An order with overlaps is only evaluated as a whole. A computation that a frozen stage drops
//! takes no time, and neither waits nor sends.

use crate::costs::Exchanges;
use crate::ids::{Rank, StageIndex};
use crate::plan::links::{Links, Route};
use crate::plan::network::Network;
use crate::plan::order::{Cell, Kind, Order};
use crate::plan::second_forwards::{is_recomputed, is_recomputed_at};
use crate::plan::stage_load::StageLoad;
use crate::recompute::KeptForwards;
use crate::simulate::alternation::{Halves, Work, alternate};
use crate::trained::StageBackward;

/// The time from which a link is free is not known.
const UNKNOWN: f64 = -1.0;

/// No tensor: a computation needs nothing of another stage, or sends nothing.
const NONE: usize = usize::MAX;

/// Evaluates an order, and then changes of it.
#[derive(Debug, Default)]
pub(super) struct Evaluator {
    rank_of: Vec<u32>,
    /// The roles of each stage, in the order of [`Kind`].
    roles: Vec<[Role; 4]>,
    links: Links,
    /// The inputs of all stages and microbatches, and then the gradients.
    messages: Vec<Message>,
    /// The time of all computations of each rank, without second forwards.
    work: Vec<f64>,
    /// The computations of each rank in the order that is kept.
    ended: Vec<Vec<Ended>>,
    /// The number of this evaluation.
    evaluation: u32,
    /// Computations that ended before this time keep their times.
    since: f64,
    /// The messages that this evaluation has replaced, if it is not kept yet.
    replaced: Vec<(usize, Message)>,
    /// The number of computations of each rank whose times are kept.
    kept: Vec<usize>,
    /// The later computations of each rank in this evaluation.
    changed: Vec<Vec<Ended>>,
    ready: Vec<u32>,
    /// The tensor that each rank waits for.
    waits: Vec<Option<usize>>,
    /// Whether the roles and the work belong to an order that is not kept.
    has_other_loads: bool,
    /// For each computation of a rank, whether it is recomputed or computes its forward again. Empty if no
    /// stage of the rank keeps microbatches in flight: then a look at the neighbours in the row shows it.
    again: Vec<Vec<bool>>,
    /// The rank whose row the last evaluation changed.
    changed_row: Option<usize>,
}

/// The data that all computations of one kind on one stage share.
#[derive(Debug, Clone, Copy)]
struct Role {
    /// Whether the stage drops it.
    is_dropped: bool,
    /// Whether the stage is trained. An overlap with its backward stays whole.
    is_whole: bool,
    /// The time with exchanges.
    takes: f64,
    /// The computation and the exchanges in it.
    work: Work,
    /// The second forward before it, as in `work`.
    work_again: Work,
    /// The time of the second forward before it, if the stage computes forwards again.
    again: Option<f64>,
    /// The first of the messages that it receives, one for each microbatch; [`NONE`] if it receives none.
    needs: usize,
    /// The first of the messages that it sends to another stage, one for each microbatch; [`NONE`] if it
    /// sends none.
    sends: usize,
    /// The rank of that stage.
    receiver: u32,
    /// The way to that rank.
    route: Route,
}

/// A tensor that a stage receives.
#[derive(Debug, Clone, Copy)]
struct Message {
    /// The end of the computation that sends it.
    sent: f64,
    arrival: f64,
    /// The time from which its link is free.
    free: f64,
    /// The evaluation that found these times.
    evaluation: u32,
    /// The position of the computation that sends it in the row of its rank.
    position: u32,
}

impl Message {
    const UNKNOWN: Self = Self { sent: f64::INFINITY, arrival: 0.0, free: 0.0, evaluation: 0, position: 0 };
}

/// When a computation ended.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ended {
    pub(super) at: f64,
    /// The time of the computations of its rank that have not run by then, without second forwards.
    rest: f64,
    /// Whether its rank was idle before it, until a message arrived.
    pub(super) has_waited: bool,
}

/// The computations of an order that may have other times than before.
#[derive(Debug, Clone, Copy)]
pub(super) enum Changed {
    /// All.
    Everything,
    /// The computations of a row from this position on, and what depends on them.
    Row { rank: usize, from: usize },
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

    /// Returns the same; `None` also if the time is not below `before`, as soon as the rest of a rank's work
    /// shows it.
    pub(super) fn time_before(
        &mut self,
        order: &Order,
        loads: &[StageLoad],
        network: &Network,
        before: f64,
    ) -> Option<f64> {
        self.begin(order, network);
        let time = self.time_changed(order, loads, Changed::Everything, before);
        self.keep_change();
        time
    }

    /// Returns the time of an order that differs from the one that is kept in what `changed` says, if it is
    /// below `before`. For a [`Changed::Row`], `loads` are the loads of the order that is kept.
    pub(super) fn time_changed(
        &mut self,
        order: &Order,
        loads: &[StageLoad],
        changed: Changed,
        before: f64,
    ) -> Option<f64> {
        let is_whole = matches!(changed, Changed::Everything);
        if is_whole || self.has_other_loads {
            self.set_roles(order, loads);
            self.set_work(order, loads);
        }
        self.set_again(order, loads, changed);
        self.has_other_loads = is_whole;
        self.restart(order, changed);
        let mut makespan = 0.0f64;
        while let Some(rank) = self.ready.pop() {
            let last = self.advance(&order.rows[rank as usize], rank as usize);
            makespan = makespan.max(last.at);
            // The sums of times are not exact.
            if (last.at + last.rest) * (1.0 - 1e-9) >= before {
                return None;
            }
        }
        let has_ended =
            |(rank, row): (usize, &Vec<Cell>)| self.kept[rank] + self.changed[rank].len() == row.len();
        let finished = order.rows.iter().enumerate().all(has_ended);
        if finished && loads.iter().any(|load| load.reduce > 0.0) {
            makespan = makespan.max(self.last_reduction(order, loads));
        }
        (finished && makespan < before).then_some(makespan)
    }

    /// Keeps the order of the last evaluation, which must be complete before a [`Changed::Row`] follows. If
    /// it is not called, the next evaluation starts from the order that was kept before.
    pub(super) fn keep_change(&mut self) {
        self.replaced.clear();
        self.has_other_loads = false;
        for ((ended, changed), &kept) in self.ended.iter_mut().zip(&self.changed).zip(&self.kept) {
            ended.truncate(kept);
            ended.extend_from_slice(changed);
        }
    }

    /// Returns the computations of each rank of the order that is kept.
    pub(super) fn ended(&self) -> &[Vec<Ended>] {
        &self.ended
    }

    /// Returns the rank and the position of the computation that sends what `cell` needs; `None` if it needs
    /// nothing of another stage. The last evaluation must have been kept.
    pub(super) fn sender_of(&self, cell: Cell) -> Option<(usize, usize)> {
        let needs = role_of(&self.roles, cell).needs;
        if needs == NONE {
            return None;
        }
        let stage = cell.stage as usize;
        let sender = if cell.kind == Kind::Forward { stage - 1 } else { stage + 1 };
        let position = self.messages[needs + cell.microbatch as usize].position as usize;
        Some((self.rank_of[sender] as usize, position))
    }

    /// Returns the number of computations that ran in the last evaluation.
    pub(super) fn computations(&self) -> u64 {
        self.changed.iter().map(|row| row.len() as u64).sum()
    }

    /// Forgets all orders.
    fn begin(&mut self, order: &Order, network: &Network) {
        self.rank_of = ranks_of_stages(order);
        self.links.set(&self.rank_of, network);
        let ranks = order.rows.len();
        self.replaced.clear();
        self.messages.resize(2 * self.rank_of.len() * order.microbatches as usize, Message::UNKNOWN);
        self.ended.resize(ranks, Vec::new());
        self.ended.iter_mut().for_each(Vec::clear);
        self.changed.resize(ranks, Vec::new());
    }

    /// Restores the order that is kept, and keeps all computations that the change cannot affect.
    fn restart(&mut self, order: &Order, changed: Changed) {
        for (at, message) in self.replaced.drain(..).rev() {
            self.messages[at] = message;
        }
        self.evaluation = self.evaluation.checked_add(1).unwrap_or_else(|| {
            self.messages.iter_mut().for_each(|message| message.evaluation = 0);
            1
        });
        self.since = match changed {
            Changed::Row { rank, from: from @ 1.. } => self.ended[rank][from - 1].at,
            _ => f64::NEG_INFINITY,
        };
        self.kept.clear();
        self.kept.extend(self.ended.iter().map(|row| row.partition_point(|ended| ended.at < self.since)));
        self.changed.iter_mut().for_each(Vec::clear);
        self.ready.clear();
        self.ready.extend((0..order.rows.len() as u32).rev());
        self.waits.clear();
        self.waits.resize(order.rows.len(), None);
        self.links.free.fill(UNKNOWN);
    }

    /// Runs a rank as far as it can, and returns its last computation.
    fn advance(&mut self, row: &[Cell], rank: usize) -> Ended {
        let Self { roles, messages, replaced, links, waits, ready, since, evaluation, again, .. } = self;
        let again = &again[rank];
        let changed = &mut self.changed[rank];
        let mut position = self.kept[rank] + changed.len();
        let before = changed.last().or_else(|| self.ended[rank][..self.kept[rank]].last()).copied();
        let start = || Ended { at: 0.0, rest: self.work[rank], has_waited: false };
        let mut ended = before.unwrap_or_else(start);
        while let Some(&cell) = row.get(position) {
            let role = role_of(roles, cell);
            // Returns when the message that a cell needs arrives, or the message if that is not known.
            let arrival_of = |cell: Cell, now: f64| {
                let needs = role_of(roles, cell).needs;
                if needs == NONE {
                    return Ok(now);
                }
                let message = &messages[needs + cell.microbatch as usize];
                let is_unknown = message.evaluation != *evaluation && message.sent >= *since;
                if is_unknown { Err(needs + cell.microbatch as usize) } else { Ok(message.arrival) }
            };
            let is_dropped = |cell: Cell| role_of(roles, cell).is_dropped;
            let is_again = |position: usize, role: &Role| {
                role.again.filter(|_| match again.get(position) {
                    Some(&is_again) => is_again,
                    None => is_recomputed_at(row, position, is_dropped),
                })
            };
            let now = ended.at;
            // An overlap is taken apart if its backward has no weight gradients.
            let partner = row.get(position + 1).copied();
            let partner = partner.filter(|&partner| cell.overlaps && role_of(roles, partner).is_whole);
            let both = [cell, partner.unwrap_or(cell)];
            let cells = if partner.is_some() { &both[..] } else { &both[..1] };
            let arrival = cells.iter().try_fold(now, |latest, &cell| Ok(latest.max(arrival_of(cell, now)?)));
            let arrival = match arrival {
                Ok(arrival) => arrival,
                Err(message) => {
                    waits[rank] = Some(message);
                    break;
                }
            };
            match partner {
                None => {
                    let now = now + is_again(position, role).unwrap_or(0.0);
                    ended = Ended {
                        at: now.max(arrival) + role.takes,
                        rest: ended.rest - role.work.compute,
                        has_waited: arrival > now,
                    };
                    changed.push(ended);
                }
                Some(partner) => {
                    let other = role_of(roles, partner);
                    let again = is_again(position + 1, other).map(|_| other.work_again);
                    let works = [again.unwrap_or(other.work), other.work];
                    let second = if again.is_some() { &works[..] } else { &works[1..] };
                    let are_of_one_stage = cell.stage == partner.stage;
                    let halves = Halves { works: [&[role.work], second], are_of_one_stage };
                    ended = Ended {
                        at: alternate(now.max(arrival), halves, |_| {}),
                        rest: ended.rest - role.work.compute - other.work.compute,
                        has_waited: arrival > now,
                    };
                    changed.extend([ended; 2]);
                }
            }
            let sent = ended.at;
            for &cell in cells {
                let role = role_of(roles, cell);
                if role.sends != NONE {
                    let target = role.sends + cell.microbatch as usize;
                    let (mut free, mut arrival) = (0.0, sent);
                    let link = role.route.link;
                    if let Some(link_free) = links.free.get_mut(link as usize) {
                        if *link_free == UNKNOWN {
                            *link_free = freed(roles, messages, &row[..self.kept[rank]], link);
                        }
                        arrival = role.route.send(link_free, sent);
                        free = *link_free;
                    }
                    let message =
                        Message { sent, arrival, free, evaluation: *evaluation, position: position as u32 };
                    replaced.push((target, std::mem::replace(&mut messages[target], message)));
                    let receiver = role.receiver as usize;
                    if waits[receiver] == Some(target) {
                        waits[receiver] = None;
                        ready.push(role.receiver);
                    }
                }
                position += 1;
            }
        }
        ended
    }

    /// Sets which computations of the rows that have changed are recomputed.
    fn set_again(&mut self, order: &Order, loads: &[StageLoad], changed: Changed) {
        let keeps =
            |&stage: &StageIndex| loads[stage.index()].recompute.is_some_and(|choice| choice.keep > 0);
        let before = self.changed_row.take();
        if let Changed::Row { rank, .. } = changed {
            self.changed_row = Some(rank);
        }
        let rows: Vec<usize> = match changed {
            // The change before may have been taken back. If it changed loads, all rows are affected.
            Changed::Row { rank, .. } if !self.has_other_loads => {
                before.into_iter().filter(|&other| other != rank).chain([rank]).collect()
            }
            _ => (0..order.rows.len()).collect(),
        };
        self.again.resize(order.rows.len(), Vec::new());
        for rank in rows {
            let again = &mut self.again[rank];
            again.clear();
            if !order.placement.stages_of(Rank::new(rank as u32)).iter().any(keeps) {
                continue;
            }
            let mut kept = vec![KeptForwards::default(); loads.len()];
            let row = &order.rows[rank];
            let is_dropped = |cell: Cell| cell.is_dropped(loads);
            again.extend(row.iter().enumerate().map(|(position, &cell)| {
                let stage = cell.stage as usize;
                !is_dropped(cell)
                    && is_recomputed(loads[stage].recompute, &mut kept[stage], row, position, is_dropped)
            }));
        }
    }

    /// Sets the roles of all stages.
    fn set_roles(&mut self, order: &Order, loads: &[StageLoad]) {
        self.links.set_sizes(loads);
        self.roles.clear();
        let (stages, width) = (loads.len(), order.microbatches as usize);
        let runs_backward = |stage: usize| loads[stage].computes != StageBackward::None;
        for (stage, load) in loads.iter().enumerate() {
            // The inputs of all stages come first, then the gradients of their outputs.
            let input = if stage > 0 { stage * width } else { NONE };
            let gradient = if stage + 1 < stages { (stages + stage) * width } else { NONE };
            let [forward, backward] =
                [(stage + 1, 0), (stage.wrapping_sub(1), 1)].map(|(target, direction)| {
                    let receiver =
                        self.rank_of.get(target).filter(|_| direction == 0 || runs_backward(target));
                    let Some(&receiver) = receiver else { return Role::NOTHING };
                    let sends = (direction * stages + target) * width;
                    Role { sends, receiver, route: self.links.route(stage, direction), ..Role::NOTHING }
                });
            let again = load.recompute.map(|_| load.again_takes());
            let work = |compute, exchanges| Work { compute, exchanges };
            let work_again = work(load.again, load.exchanges.again());
            // In the order of the kinds.
            let mut roles = [
                Role { work: work(load.forward, load.exchanges.forward), needs: input, ..forward },
                Role {
                    work: work(load.input, load.exchanges.backward),
                    again,
                    work_again,
                    needs: gradient,
                    ..backward
                },
                Role { work: work(load.weight_apart(), Exchanges::default()), ..Role::NOTHING },
                Role {
                    work: work(load.backward(), load.exchanges.backward),
                    again,
                    work_again,
                    needs: gradient,
                    ..backward
                },
            ];
            for (kind, role) in Kind::ALL.into_iter().zip(&mut roles) {
                role.takes = role.work.total();
                role.is_whole = load.computes == StageBackward::Whole;
                if kind.is_dropped(load.computes) {
                    *role = Role { is_dropped: true, ..Role::NOTHING };
                }
            }
            self.roles.push(roles);
        }
    }

    /// Sets the times of all computations of each rank.
    fn set_work(&mut self, order: &Order, loads: &[StageLoad]) {
        self.work.clear();
        self.work.resize(order.rows.len(), 0.0);
        for (load, &rank) in loads.iter().zip(&self.rank_of) {
            // The least: `W` may be apart from its `I`.
            let work = load.forward + load.backward();
            self.work[rank as usize] += f64::from(order.microbatches) * work;
        }
    }

    /// Returns the end of the last reduction over replicas. A stage is reduced after its last weight
    /// gradient, on a channel of its rank that takes one reduction at a time, in the order of the weight
    /// gradients in the row of the rank.
    fn last_reduction(&self, order: &Order, loads: &[StageLoad]) -> f64 {
        let mut latest = 0.0f64;
        for (rank, row) in order.rows.iter().enumerate() {
            let kept = self.kept[rank];
            let end_of = |at: usize| match at.checked_sub(kept) {
                Some(changed) => self.changed[rank][changed].at,
                None => self.ended[rank][at].at,
            };
            let mut reductions: Vec<(usize, u32)> = Vec::new();
            for (at, cell) in row.iter().enumerate().rev() {
                let is_last = !reductions.iter().any(|&(_, stage)| stage == cell.stage);
                let is_trained = loads[cell.stage as usize].computes == StageBackward::Whole;
                if matches!(cell.kind, Kind::Weight | Kind::Backward) && is_trained && is_last {
                    reductions.push((at, cell.stage));
                }
            }
            let ends = reductions.iter().rev().map(|&(at, stage)| (end_of(at), loads[stage as usize].reduce));
            latest = latest.max(ends.fold(0.0f64, |free, (start, takes)| free.max(start) + takes));
        }
        latest
    }
}

impl Role {
    /// The role of a computation that takes no time, and neither receives nor sends anything.
    const NOTHING: Self = Self {
        is_dropped: false,
        is_whole: false,
        takes: 0.0,
        work: Work { compute: 0.0, exchanges: Exchanges::new(0, 0.0) },
        work_again: Work { compute: 0.0, exchanges: Exchanges::new(0, 0.0) },
        again: None,
        needs: NONE,
        sends: NONE,
        receiver: 0,
        route: Route::NONE,
    };
}

/// Returns the time from which a link is free after the kept computations of the rank that sends on it; 0 if
/// none did.
fn freed(roles: &[[Role; 4]], messages: &[Message], kept: &[Cell], link: u32) -> f64 {
    let sends = |cell: &&Cell| role_of(roles, **cell).route.link == link;
    let last = kept.iter().rev().find(sends);
    last.map_or(0.0, |&cell| messages[role_of(roles, cell).sends + cell.microbatch as usize].free)
}

/// Returns the role of a computation.
fn role_of(roles: &[[Role; 4]], cell: Cell) -> &Role {
    &roles[cell.stage as usize][cell.kind as usize]
}
