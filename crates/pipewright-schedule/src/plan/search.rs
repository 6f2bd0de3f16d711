//! The search: simulates plans, the most promising first, and keeps the best of each schedule.
//!
//! `plan/README.md` describes the phases. Everything is deterministic; only the caller's clock can stop it
//! early.

use std::collections::BTreeMap;
use std::rc::Rc;

use crate::generate::GenerateError;
use crate::ids::Rank;
use crate::placement::Placement;
use crate::plan::evaluate::Evaluator;
use crate::plan::greedy::{Rules, Task, greedy};
use crate::plan::justify::justified;
use crate::plan::order::Order;
use crate::plan::peaks::{peak_of_rank, peaks};
use crate::plan::recompute::{layers_to_fit, stages_to_fit};
use crate::plan::report::{PlanSettings, SEARCHED, Shortage};
use crate::plan::request::PlanRequest;
use crate::plan::shape::Shape;
use crate::plan::stage_load::{StageLoad, held_throughout, stage_loads};
use crate::plan::system::{Offer, System};
use crate::plan::tuning;
use crate::recompute::StageRecompute;
use crate::sharding::Sharding;
use crate::words::counted;

/// A plan that was simulated and fits.
#[derive(Debug, Clone)]
pub(super) struct Candidate {
    pub(super) name: &'static str,
    pub(super) settings: PlanSettings,
    pub(super) order: Rc<Order>,
    /// The rules that made the order, if rules made it.
    pub(super) rules: Option<Rules>,
    pub(super) starts: Vec<usize>,
    pub(super) recompute: Vec<Option<StageRecompute>>,
    /// The index of its shape in the list of shapes.
    pub(super) shape: usize,
    /// The time of a step.
    pub(super) time: f64,
    /// The peak bytes of the rank with the most.
    pub(super) peak: u64,
}

/// The state of a search.
pub(super) struct Search<'a> {
    pub(super) request: &'a PlanRequest,
    /// The divisions that are searched.
    pub(super) shapes: &'a [Shape],
    /// The lower bound of all plans.
    pub(super) bound: f64,
    keep_going: &'a mut dyn FnMut() -> bool,
    evaluator: Evaluator,
    /// The work that is left, in the unit of [`PlanRequest::effort`].
    left: u64,
    pub(super) simulated: u64,
    pub(super) stopped: bool,
    /// The best plan of each schedule.
    pub(super) best: BTreeMap<&'static str, Candidate>,
    /// The time of the best plan of each schedule and shape.
    pub(super) times: BTreeMap<(&'static str, usize), f64>,
    /// The best plans by rules, the fastest first: one of each layout, and at most
    /// [`PROMISING`](tuning::search::PROMISING) of each number of stages.
    pub(super) promising: Vec<Candidate>,
    /// The smallest shortage of each schedule, with a description of the plan.
    pub(super) shortages: BTreeMap<&'static str, (Shortage, String)>,
    pub(super) refused: BTreeMap<&'static str, GenerateError>,
}

/// The name of a schedule and its settings.
#[derive(Debug, Clone, Copy)]
pub(super) struct Label {
    pub(super) name: &'static str,
    pub(super) settings: PlanSettings,
}

/// The choices of a plan other than its order.
#[derive(Debug, Clone, Copy)]
pub(super) struct Choice<'a> {
    pub(super) shape: usize,
    pub(super) starts: &'a [usize],
    pub(super) recompute: &'a [Option<StageRecompute>],
}

/// An order with what its stages recompute.
struct Fitted {
    order: Order,
    /// The time without the optimizer.
    time: f64,
    recompute: Vec<Option<StageRecompute>>,
    loads: Vec<StageLoad>,
}

impl<'a> Search<'a> {
    /// Starts a search.
    pub(super) fn new(
        request: &'a PlanRequest,
        shapes: &'a [Shape],
        keep_going: &'a mut dyn FnMut() -> bool,
    ) -> Self {
        Self {
            request,
            shapes,
            bound: 0.0,
            keep_going,
            evaluator: Evaluator::default(),
            left: request.effort,
            simulated: 0,
            stopped: false,
            best: BTreeMap::new(),
            times: BTreeMap::new(),
            promising: Vec::new(),
            shortages: BTreeMap::new(),
            refused: BTreeMap::new(),
        }
    }

    /// Returns whether the best plan is so near to the lower bound of all plans that the search may
    /// end.
    pub(super) fn is_good_enough(&self) -> bool {
        self.is_near(self.best_time(), self.bound)
    }

    /// Returns whether a plan that takes `time` is near enough to `bound` that the search may end.
    pub(super) fn is_near(&self, time: f64, bound: f64) -> bool {
        time <= bound * (1.0 + tuning::search::GOOD_ENOUGH)
    }

    /// Returns whether orders without a name are searched.
    pub(super) fn searches_orders(&self) -> bool {
        self.request.system.is_none_or(System::runs_searched_orders)
    }

    /// Returns whether the system that is to execute the plan can run it. The orders of shapes are the
    /// system's already.
    fn may_run(&self, label: Label, placement: &Placement, choice: Choice<'_>) -> bool {
        let Some(system) = self.request.system else { return true };
        let shape = &self.shapes[choice.shape];
        let offer = Offer {
            name: label.name,
            group_size: label.settings.group_size,
            placement,
            microbatches: shape.microbatches,
            recompute: choice.recompute,
            head_parts: shape.head_parts,
            has_rows_in_nodes: false,
        };
        system.refusal(&offer).is_none()
    }

    /// Returns the work that is left.
    pub(super) fn left(&self) -> u64 {
        self.left
    }

    /// Returns whether the search may simulate more while more than `reserve` of the work is left. The first
    /// plan is tried whatever the caller says.
    pub(super) fn goes_on(&mut self, reserve: u64) -> bool {
        let has_tried = self.simulated > 0 || !self.shortages.is_empty();
        (self.may_try() || !has_tried) && self.left > reserve
    }

    /// Returns whether the caller lets the search continue, even without work. The plans that are tried in
    /// any case are few.
    pub(super) fn may_try(&mut self) -> bool {
        self.stopped = self.stopped || !(self.keep_going)();
        !self.stopped
    }

    /// Returns the time of the best plan so far.
    pub(super) fn best_time(&self) -> f64 {
        self.best.values().map(|candidate| candidate.time).fold(f64::INFINITY, f64::min)
    }

    /// Simulates an order, and keeps it if it is the best of its schedule. Returns its time if it fits.
    pub(super) fn consider(&mut self, label: Label, order: &Rc<Order>, choice: Choice<'_>) -> Option<f64> {
        let shape = &self.shapes[choice.shape];
        if !self.may_run(label, &order.placement, choice) {
            return None;
        }
        let loads = stage_loads(&shape.layers, &order.placement, choice.starts, choice.recompute);
        if let Some(shortage) = self.shortage(order, &loads, shape) {
            self.keep_shortage(label.name, shortage, shape, &loads);
            return None;
        }
        self.charge(order.computations() as u64);
        let time = self.evaluator.time(order, &loads, &shape.layers.network)? + optimizer_time(order, &loads);
        self.keep(label, order, None, choice, time, peak(order, &loads, shape.layers.sharding));
        Some(time)
    }

    /// Makes an order by rules and justifies it. Keeps the faster one of the two if it is among the best
    /// plans. Returns its time if that is below `before`.
    pub(super) fn search_order(
        &mut self,
        placement: &Placement,
        choice: Choice<'_>,
        rules: Rules,
        before: f64,
    ) -> Option<f64> {
        let shape = &self.shapes[choice.shape];
        let label = Label { name: SEARCHED, settings: PlanSettings::default() };
        if !self.may_run(label, placement, choice) {
            self.charge_draw();
            return None;
        }
        // The rules count memory as if no microbatch in flight kept its activations.
        let keeps_none = |choice: Option<StageRecompute>| choice.map(|it| StageRecompute { keep: 0, ..it });
        let recompute: Vec<_> = choice.recompute.iter().copied().map(keeps_none).collect();
        let choice = Choice { recompute: &recompute, ..choice };
        let loads = stage_loads(&shape.layers, placement, choice.starts, choice.recompute);
        let own =
            |rank: Rank| placement.stages_of(rank).iter().map(|stage| loads[stage.index()].optimizer).sum();
        let optimizer = placement.all_ranks().map(own).fold(0.0, f64::max);
        let task = Task {
            placement,
            microbatches: shape.microbatches,
            loads: &loads,
            network: &shape.layers.network,
            sharding: shape.layers.sharding,
            memory: shape.memory.as_ref(),
        };
        let mut work = 0;
        let made = greedy(&task, rules, before * (1.0 + tuning::search::SLOWER) - optimizer, &mut work);
        // An order that fits into no memory costs the loads of its stages.
        self.charge(work.max(8 * loads.len() as u64));
        let (order, _) = made?;
        if let Some(shortage) = self.shortage(&order, &loads, shape) {
            self.keep_shortage(SEARCHED, shortage, shape, &loads);
            return None;
        }
        let (order, time) = self.improved(order, &loads, shape)?;
        let fitted = Fitted { order, time, recompute: choice.recompute.to_vec(), loads };
        let Fitted { order, time, recompute, loads } = self.refitted(fitted, shape, choice)?;
        let choice = Choice { recompute: &recompute, ..choice };
        let time = time + optimizer_time(&order, &loads);
        let peak = peak(&order, &loads, shape.layers.sharding);
        self.keep(label, &Rc::new(order), Some(rules), choice, time, peak);
        (time < before).then_some(time)
    }

    /// Recomputes only what an order needs to fit into the memory. Returns `given` if that is not faster.
    fn refitted(&mut self, given: Fitted, shape: &Shape, choice: Choice<'_>) -> Option<Fitted> {
        let is_recomputed = given.loads.iter().any(|load| load.choice().is_some());
        let Some(memory) = shape.memory.as_ref().filter(|_| is_recomputed) else {
            return Some(given);
        };
        let (layers, starts, order) = (&shape.layers, choice.starts, &given.order);
        let recompute = if self.request.recomputes_in_part() {
            layers_to_fit(layers, starts, order, memory)
        } else {
            stages_to_fit(layers, starts, order, memory)
        };
        self.left = self.left.saturating_sub(tuning::work::REFITTED * order.computations() as u64);
        let loads = stage_loads(layers, &order.placement, starts, &recompute);
        if loads == given.loads || self.shortage(order, &loads, shape).is_some() {
            return Some(given);
        }
        let (order, time) = self.improved(order.clone(), &loads, shape)?;
        Some(if time < given.time { Fitted { order, time, recompute, loads } } else { given })
    }

    /// Justifies an order. Returns the justified order if it is faster and fits into the memory, and
    /// otherwise the order itself; with the time without the optimizer.
    fn improved(&mut self, order: Order, loads: &[StageLoad], shape: &Shape) -> Option<(Order, f64)> {
        let layers = &shape.layers;
        let time = self.evaluator.time(&order, loads, &layers.network)?;
        self.left = self.left.saturating_sub(tuning::work::JUSTIFIED * self.evaluator.computations());
        let other = justified(&order, self.evaluator.ended(), loads, &layers.network);
        let faster = self.evaluator.time_before(
            &other,
            loads,
            &layers.network,
            time * (1.0 - tuning::search::DIFFERENT),
        );
        match faster.filter(|_| self.shortage(&other, loads, shape).is_none()) {
            Some(faster) => Some((other, faster)),
            None => Some((order, time)),
        }
    }

    /// Charges an evaluation that ran `computations` computations of an order with `stages` stages.
    pub(super) fn charge_evaluation(&mut self, computations: u64, stages: usize) {
        self.charge(computations / tuning::work::EVALUATED + stages as u64 / 8 + 2);
    }

    /// Returns whether an order fits into the memory. If it differs only in the row of one rank from an order that
    /// fits, `changed` is that rank.
    pub(super) fn fits(
        &self,
        shape: usize,
        order: &Order,
        loads: &[StageLoad],
        changed: Option<usize>,
    ) -> bool {
        let shape = &self.shapes[shape];
        match (&shape.memory, changed) {
            (None, _) => true,
            (Some(memory), Some(rank)) => {
                peak_of_rank(order, loads, shape.layers.sharding, rank) <= memory.of_rank(rank)
            }
            (Some(_), None) => self.shortage(order, loads, shape).is_none(),
        }
    }

    /// Keeps a changed order that fits, if it is the best.
    pub(super) fn keep_changed(
        &mut self,
        order: &Rc<Order>,
        loads: &[StageLoad],
        choice: Choice<'_>,
        time: f64,
    ) {
        let peak = peak(order, loads, self.shapes[choice.shape].layers.sharding);
        let label = Label { name: SEARCHED, settings: PlanSettings::default() };
        self.keep(label, order, None, choice, time, peak);
    }

    /// Charges a change that was drawn and cannot be made.
    pub(super) fn charge_draw(&mut self) {
        self.left = self.left.saturating_sub(1);
    }

    /// Charges `changes` changes of a walk over layouts with `chunks` stages per rank.
    pub(super) fn charge_walk(&mut self, changes: u64, chunks: u32) {
        self.left = self.left.saturating_sub(tuning::work::WALKED * u64::from(chunks) * changes);
    }

    /// Charges `changes` changes of a walk over layouts of unlike ranks with `stages` stages.
    pub(super) fn charge_unlike_walk(&mut self, changes: u64, stages: usize) {
        self.left = self.left.saturating_sub(changes * stages as u64 / tuning::work::WALKED_UNLIKE);
    }

    /// Charges the making of a schedule for its costs.
    pub(super) fn charge_made(&mut self, order: &Order) {
        self.left = self.left.saturating_sub(tuning::work::MADE * order.computations() as u64);
    }

    fn charge(&mut self, work: u64) {
        self.simulated += 1;
        self.left = self.left.saturating_sub(work);
    }

    fn keep(
        &mut self,
        label: Label,
        order: &Rc<Order>,
        rules: Option<Rules>,
        choice: Choice<'_>,
        time: f64,
        peak: u64,
    ) {
        let best_of_shape = self.times.entry((label.name, choice.shape)).or_insert(f64::INFINITY);
        *best_of_shape = best_of_shape.min(time);
        let is_better = self.best.get(label.name).is_none_or(|best| {
            time < best.time * (1.0 - tuning::search::DIFFERENT) || time <= best.time && peak < best.peak
        });
        let is_promising = rules.is_some() && self.may_be_promising(order, choice, time);
        if !is_better && !is_promising {
            return;
        }
        let candidate = Candidate {
            name: label.name,
            settings: label.settings,
            order: Rc::clone(order),
            rules,
            starts: choice.starts.to_vec(),
            recompute: choice.recompute.to_vec(),
            shape: choice.shape,
            time,
            peak,
        };
        if is_promising {
            self.keep_promising(candidate.clone());
        }
        if is_better {
            self.best.insert(label.name, candidate);
        }
    }

    /// Returns whether a plan by rules is faster than one of the promising plans with as many stages, or
    /// these are few. Large plans are not kept.
    fn may_be_promising(&self, order: &Order, choice: Choice<'_>, time: f64) -> bool {
        let mut alike = self.promising.iter().filter(|other| other.starts.len() == choice.starts.len());
        order.computations() <= tuning::search::LARGEST
            && alike.nth(tuning::search::PROMISING - 1).is_none_or(|last| time < last.time)
    }

    /// Adds a plan to the promising ones. It replaces a slower plan with the same layout.
    fn keep_promising(&mut self, plan: Candidate) {
        let has_layout = |other: &Candidate| {
            (other.shape, &other.starts) == (plan.shape, &plan.starts)
                && other.order.placement == plan.order.placement
        };
        if let Some(known) = self.promising.iter().position(has_layout) {
            if self.promising[known].time <= plan.time {
                return;
            }
            self.promising.remove(known);
        }
        let stages = plan.starts.len();
        let index = self.promising.partition_point(|other| other.time <= plan.time);
        self.promising.insert(index, plan);
        let mut alike = (0..self.promising.len()).filter(|&at| self.promising[at].starts.len() == stages);
        if let Some(last) = alike.nth(tuning::search::PROMISING) {
            self.promising.remove(last);
        }
    }

    /// Returns what an order lacks on the rank that lacks the most, if it does not fit.
    fn shortage(&self, order: &Order, loads: &[StageLoad], shape: &Shape) -> Option<Shortage> {
        let (memory, sharding) = (shape.memory.as_ref()?, shape.layers.sharding);
        let peaks = (0..).map(Rank::new).zip(peaks(order, loads, sharding));
        let lacks = |&(rank, peak): &(Rank, u64)| i128::from(peak) - i128::from(memory.of_rank(rank.index()));
        let (rank, needed) = peaks.max_by_key(lacks)?;
        let memory = memory.of_rank(rank.index());
        if needed <= memory {
            return None;
        }
        let own = order.placement.stages_of(rank).iter().map(|stage| &loads[stage.index()]);
        let fixed = StageLoad::fixed(own, sharding);
        Some(Shortage { rank: shape.machine_of(rank), needed, fixed, memory })
    }

    /// Returns whether no recomputation makes an order fit or lack less than the other plans of the schedule:
    /// a rank always holds at least as much as one of them needs, which does not fit.
    pub(super) fn never_fits(
        &self,
        name: &'static str,
        order: &Order,
        loads: &[StageLoad],
        sharding: Sharding,
    ) -> bool {
        let Some((known, _)) = self.shortages.get(name) else { return false };
        let holds = |rank| held_throughout(order.placement.stages_of(rank), loads, sharding);
        order.placement.all_ranks().any(|rank| holds(rank) >= known.needed)
    }

    fn keep_shortage(&mut self, name: &'static str, shortage: Shortage, shape: &Shape, loads: &[StageLoad]) {
        if self.shortages.get(name).is_some_and(|(known, _)| known.needed <= shortage.needed) {
            return;
        }
        let recomputes = loads.iter().filter(|load| load.recompute.is_some()).count();
        let has_layers = |load: &&StageLoad| load.recompute.is_some_and(|choice| choice.layers.is_some());
        let in_part = match loads.iter().filter(has_layers).count() {
            0 => String::new(),
            count => format!(" ({count} in part)"),
        };
        let plan = format!(
            "{name}, {} of {}{}{}, {}, {recomputes} of them recomputing{in_part}",
            counted(shape.mesh.data, "replica"),
            counted(shape.ranks, "rank"),
            match shape.mesh.tensor {
                1 => String::new(),
                tensor => format!(" times {tensor} tensor-parallel ones"),
            },
            match shape.head_parts {
                1 => String::new(),
                parts => format!(", head in {parts} parts"),
            },
            counted(loads.len(), "stage")
        );
        self.shortages.insert(name, (shortage, plan));
    }
}

/// Returns the peak bytes of the rank with the most.
fn peak(order: &Order, loads: &[StageLoad], sharding: Sharding) -> u64 {
    peaks(order, loads, sharding).into_iter().max().unwrap_or(0)
}

/// Returns the time of the optimizer, which all ranks begin together.
pub(super) fn optimizer_time(order: &Order, loads: &[StageLoad]) -> f64 {
    let seconds_of = |rank| {
        let own = order.placement.stages_of(rank).iter();
        own.map(|stage| loads[stage.index()].optimizer).sum::<f64>()
    };
    order.placement.all_ranks().map(seconds_of).fold(0.0, f64::max)
}
