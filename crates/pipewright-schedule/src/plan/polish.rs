//! The last phase of the search: small changes of the best plans, at random, that keep what helps.
//!
//! It begins with the best plans of each number of stages, because a slower plan often becomes the faster
//! one. All rounds get the same work. In the first round it is divided among all plans, in the next one among
//! the faster half, and so on until one plan is left.
//!
//! A change moves one computation within a block of the critical path, or the boundaries of a few
//! neighbouring stages by one layer. If the memory is limited, it may also let a stage recompute a layer or a
//! part of its layers more or less, or keep a microbatch more or less. The critical path is a chain of
//! computations without a gap that ends with the step: each starts when the one before it on its rank ends,
//! or when its message arrives. A block is a part of it on one rank. Only a change that puts another
//! computation first or last in a block can shorten the path, as in the job shop problem (Nowicki and
//! Smutnicki, "A fast taboo search algorithm for the job shop problem", 1996). A change may make the plan a
//! little slower. The less work is left in the round, the less slower it may become.

use std::rc::Rc;

use crate::plan::change::Change;
use crate::plan::critical::{Block, critical};
use crate::plan::draws::{Draws, drawn_tolerance};
use crate::plan::evaluate::{Changed, Evaluator};
use crate::plan::layers::Layers;
use crate::plan::numbers::Numbers;
use crate::plan::order::Order;
use crate::plan::search::{Candidate, Choice, Search, optimizer_time};
use crate::plan::stage_load::{StageLoad, stage_loads};
use crate::plan::tuning;
use crate::recompute::StageRecompute;

/// The plan that is changed.
struct Polished {
    order: Order,
    starts: Vec<usize>,
    recompute: Vec<Option<StageRecompute>>,
    shape: usize,
    loads: Vec<StageLoad>,
    evaluator: Evaluator,
    /// The time of the optimizer, which is a part of the time.
    optimizer: f64,
    time: f64,
    /// The shortest time so far.
    least: f64,
    /// Whether changes let stages recompute some layers, parts of layers or microbatches.
    recomputes_in_part: bool,
    blocks: Vec<Block>,
}

/// Changes several plans while there is work left. In each round, all plans get the same work, and the faster
/// half of them continues.
pub(super) fn polish(search: &mut Search<'_>) {
    if !search.searches_orders() {
        return;
    }
    let mut plans = Vec::new();
    for plan in starts(search) {
        if search.goes_on(0) {
            plans.extend(Polished::of(search, plan));
        }
    }
    let mut numbers = Numbers(3);
    while !plans.is_empty() && !search.is_good_enough() {
        let rounds = 1 + u64::from(plans.len().next_power_of_two().ilog2());
        let share = search.left() / rounds / plans.len() as u64;
        for plan in &mut plans {
            plan.change(search, search.left() - share, &mut numbers);
        }
        if plans.len() == 1 {
            return;
        }
        plans.sort_by(|one, other| one.least.total_cmp(&other.least));
        plans.truncate(plans.len().div_ceil(2));
    }
}

/// Returns the plans to change: the best one of all, and then the best ones by rules, in turn for each number
/// of stages.
fn starts(search: &Search<'_>) -> Vec<Candidate> {
    let best = search.best.values().min_by(|one, other| one.time.total_cmp(&other.time)).cloned();
    let limit = search.best_time() * tuning::polish::NEAR;
    let near: Vec<&Candidate> = search.promising.iter().filter(|plan| plan.time < limit).collect();
    // The index of each plan among the plans with as many stages.
    let place =
        |at: usize| near[..at].iter().filter(|other| other.starts.len() == near[at].starts.len()).count();
    let mut order: Vec<usize> = (0..near.len()).collect();
    order.sort_by_key(|&at| place(at));
    let is_best = |plan: &Candidate| best.as_ref().is_some_and(|best| best.time == plan.time);
    let others = order.into_iter().map(|at| near[at]).filter(|plan| !is_best(plan)).cloned();
    best.clone().into_iter().chain(others).take(tuning::polish::STARTS).collect()
}

impl Polished {
    fn of(search: &mut Search<'_>, plan: Candidate) -> Option<Self> {
        let Candidate { starts, recompute, shape, .. } = plan;
        let layers = &search.shapes[shape].layers;
        let loads = stage_loads(layers, &plan.order.placement, &starts, &recompute);
        // A change of the cut may give any stage a gradient to send.
        // Single computations are moved, so overlaps are taken apart.
        let order = plan.order.apart().split(0);
        let mut evaluator = Evaluator::default();
        let optimizer = optimizer_time(&order, &loads);
        let time = evaluator.time(&order, &loads, &layers.network)? + optimizer;
        search.charge_evaluation(evaluator.computations(), recompute.len());
        let blocks = critical(&order, &evaluator);
        let recomputes_in_part = search.shapes[shape].memory.is_some() && search.request.recomputes_in_part();
        Some(Self {
            order,
            starts,
            recompute,
            shape,
            loads,
            evaluator,
            optimizer,
            time,
            least: time,
            recomputes_in_part,
            blocks,
        })
    }

    /// Changes the plan while more than `reserve` of the work is left.
    fn change(&mut self, search: &mut Search<'_>, reserve: u64, numbers: &mut Numbers) {
        let whole = (search.left() - reserve).max(1) as f64;
        for _ in 0..tuning::polish::TRIES * self.order.computations() {
            let best = search.best_time();
            if search.is_near(best.min(self.time), search.bound) || !search.goes_on(reserve) {
                break;
            }
            let tolerance =
                tuning::polish::WORSE * drawn_tolerance(numbers) * (search.left() - reserve) as f64 / whole;
            let Some(change) = self.draws(&search.shapes[self.shape].layers).draw(numbers) else {
                search.charge_draw();
                continue;
            };
            let time = self.time;
            if self.make(search, change, time * (1.0 + tolerance)) && time < best && self.time > time {
                // Only the last of many small improvements is kept.
                self.apply(change.reversed());
                self.keep(search, time);
                self.apply(change);
            }
            self.least = self.least.min(self.time);
        }
        if self.time < search.best_time() {
            self.keep(search, self.time);
        }
    }

    /// Keeps the plan, which takes `time`.
    fn keep(&self, search: &mut Search<'_>, time: f64) {
        let loads = self.loads_of(search);
        let choice = Choice { shape: self.shape, starts: &self.starts, recompute: &self.recompute };
        search.keep_changed(&Rc::new(self.order.clone()), &loads, choice, time);
    }

    /// Returns the loads of the stages as they are.
    fn loads_of(&self, search: &Search<'_>) -> Vec<StageLoad> {
        let layers = &search.shapes[self.shape].layers;
        stage_loads(layers, &self.order.placement, &self.starts, &self.recompute)
    }

    /// Returns the plan as changes are drawn for it.
    fn draws<'a>(&'a self, layers: &'a Layers) -> Draws<'a> {
        let Self { order, starts, recompute, blocks, .. } = self;
        Draws { order, starts, recompute, blocks, layers, recomputes_in_part: self.recomputes_in_part }
    }

    /// Makes a change if the time is then below `before` and the plan fits into the memory. Returns whether
    /// it does.
    fn make(&mut self, search: &mut Search<'_>, change: Change, before: f64) -> bool {
        self.apply(change);
        let (changed, row, loads) = match change {
            Change::Shift { .. } | Change::Recompute(_) => {
                let loads = self.loads_of(search);
                (Changed::Everything, None, Some(loads))
            }
            Change::Move { rank, from, to } => (Changed::Row { rank, from: from.min(to) }, Some(rank), None),
        };
        let now = loads.as_ref().unwrap_or(&self.loads);
        let optimizer = if loads.is_some() { optimizer_time(&self.order, now) } else { self.optimizer };
        let time = self.evaluator.time_changed(&self.order, now, changed, before - optimizer);
        search.charge_evaluation(self.evaluator.computations(), self.recompute.len());
        let Some(time) = time.filter(|_| search.fits(self.shape, &self.order, now, row)) else {
            self.apply(change.reversed());
            return false;
        };
        self.evaluator.keep_change();
        (self.time, self.optimizer) = (time + optimizer, optimizer);
        self.blocks = critical(&self.order, &self.evaluator);
        if let Some(loads) = loads {
            self.loads = loads;
        }
        true
    }

    fn apply(&mut self, change: Change) {
        change.apply(&mut self.order, &mut self.starts, &mut self.recompute);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::generate::{ScheduleSpec, generate};
    use crate::placement::Placement;
    use crate::plan::balance::even;
    use crate::plan::change::Recomputed;
    use crate::plan::greedy::{Rules, Task, greedy};
    use crate::plan::order::{Cell, Kind};
    use crate::plan::predict::{PlanChoice, predict};
    use crate::plan::rank_memory::RankMemory;
    use crate::plan::request::PlanRequest;
    use crate::plan::shape::Shape;
    use crate::profile::{LayerProfile, LinkProfile, Profile};

    fn profile(seed: u64, layers: usize) -> Profile {
        let mut numbers = Numbers(seed);
        let mut time = || (1 + numbers.below(20)) as f64;
        let layer = |_| LayerProfile {
            kind: "layer".into(),
            forward_s: time(),
            input_backward_s: time(),
            weight_backward_s: time(),
            activation_bytes: 10,
            ..LayerProfile::default()
        };
        let layers = (0..layers).map(layer).collect();
        Profile { link: LinkProfile::new(0.0, f64::INFINITY), layers, ..Profile::default() }
    }

    /// Returns the same model with messages that take as long as some layers, or much longer for half of the
    /// seeds, so that they wait for each other. Some layers and their messages take no time.
    fn with_messages(seed: u64, layers: usize) -> Profile {
        let mut profile = profile(seed, layers);
        let mut numbers = Numbers(seed + 1);
        for (at, layer) in profile.layers.iter_mut().enumerate() {
            layer.output_bytes = numbers.below(10) as u64;
            if at < 4 && numbers.below(3) > 0 {
                (layer.forward_s, layer.input_backward_s, layer.output_bytes) = (0.0, 0.0, 0);
            }
        }
        let bytes_per_s = if seed % 4 < 2 { 0.7 } else { 0.07 };
        Profile { link: LinkProfile::new((seed % 2) as f64, bytes_per_s), ..profile }
    }

    /// Returns a request for 3 ranks, and its shape.
    fn asked(profile: &Profile, memory: Option<u64>, effort: u64) -> (PlanRequest, Vec<Shape>) {
        let request = PlanRequest {
            ranks: 3,
            microbatches: 4,
            data_parallel: Some(1),
            larger_microbatches: false,
            memory,
            effort,
            ..PlanRequest::default()
        };
        let shapes = Shape::all(profile, &request);
        (request, shapes)
    }

    /// Returns an order of 6 stages by rules, with its cut.
    fn made(shape: &Shape, memory: Option<u64>) -> (Order, Vec<usize>) {
        let (starts, memory) = (even(shape.layers.count(), 6), memory.map(RankMemory::Equal));
        let placement = Placement::looped(3, 2).expect("a placement");
        let loads = stage_loads(&shape.layers, &placement, &starts, &[None; 6]);
        let (network, sharding) = (&shape.layers.network, shape.layers.sharding);
        let task = Task {
            placement: &placement,
            microbatches: 4,
            loads: &loads,
            network,
            sharding,
            memory: memory.as_ref(),
        };
        let order = greedy(&task, Rules::all(3, 6)[0], f64::INFINITY, &mut 0).expect("an order").0;
        (order, starts)
    }

    #[test]
    fn the_critical_path_takes_the_time_of_the_step() {
        for seed in 0..50 {
            let profile = profile(seed, 9);
            let (_, shapes) = asked(&profile, None, 0);
            let (order, starts) = made(&shapes[0], None);
            let loads = stage_loads(&shapes[0].layers, &order.placement, &starts, &[None; 6]);
            let mut evaluator = Evaluator::default();
            let time = evaluator.time(&order, &loads, &shapes[0].layers.network).expect("no deadlock");
            let takes = |cell: &Cell| {
                let load = &loads[cell.stage as usize];
                match cell.kind {
                    Kind::Forward => load.forward,
                    Kind::Input => load.input,
                    Kind::Weight => load.weight_apart(),
                    Kind::Backward => load.backward(),
                }
            };
            let blocks = critical(&order, &evaluator);
            let cells_of = |block: &Block| &order.rows[block.rank][block.first..=block.last];
            let sum: f64 = blocks.iter().flat_map(cells_of).map(takes).sum();
            assert!((sum - time).abs() < 1e-9 * time, "seed {seed}: {sum} of {time}");
            assert!(blocks.iter().all(|block| block.first <= block.last));
        }
    }

    /// Checks that the computations of each microbatch on each stage, and the computations of each kind, keep
    /// their order.
    fn check_order(order: &Order) {
        for row in &order.rows {
            for (at, cell) in row.iter().enumerate() {
                for later in row[at + 1..].iter().filter(|later| later.stage == cell.stage) {
                    let kinds = [cell.kind as u8, later.kind as u8];
                    let same = cell.microbatch == later.microbatch;
                    assert!(!same || kinds[0] < kinds[1], "{cell:?} before {later:?}");
                    assert!(kinds[0] != kinds[1] || cell.microbatch < later.microbatch);
                }
            }
        }
    }

    #[test]
    fn changes_keep_what_must_come_first_and_can_be_taken_back() {
        // With a limit, changes also let stages recompute more or less.
        for (seed, memory) in (0..10).flat_map(|seed| [(seed, None), (seed, Some(10_000))]) {
            let profile = with_messages(seed, 9);
            let (request, shapes) = asked(&profile, memory, 1_000_000);
            let mut keep_going = || true;
            let mut search = Search::new(&request, &shapes, &mut keep_going);
            let keeping = StageRecompute { keep: 1, ..StageRecompute::WHOLE };
            let recompute = [memory.map(|_| keeping); 6];
            let mut plan = start_with(&mut search, memory, recompute);
            let mut numbers = Numbers(seed);
            let (mut made, mut refused) = (0, 0);
            for _ in 0..2_000 {
                let Some(change) = plan.draws(&shapes[0].layers).draw(&mut numbers) else {
                    continue;
                };
                let before = (plan.order.clone(), plan.starts.clone());
                if plan.make(&mut search, change, plan.time * 1.02) {
                    made += 1;
                    assert_eq!(plan.loads, plan.loads_of(&search));
                } else {
                    refused += 1;
                    assert_eq!((&plan.order, &plan.starts), (&before.0, &before.1), "{change:?}");
                }
                check_order(&plan.order);
                let evaluated =
                    Evaluator::default().time(&plan.order, &plan.loads, &shapes[0].layers.network);
                assert_eq!(evaluated.map(|time| time + plan.optimizer), Some(plan.time), "{change:?}");
                assert!(plan.starts.is_sorted_by(|one, other| one < other));
            }
            assert!(made > 0 && refused > 0, "seed {seed}: {made} made, {refused} refused");
        }
    }

    #[test]
    fn a_change_of_what_a_stage_recomputes_leaves_the_rest() {
        let mut profile = profile(0, 12);
        profile.layers.iter_mut().for_each(|layer| layer.norms_bytes = 2);
        let (request, shapes) = asked(&profile, Some(10_000), 1_000_000);
        let mut keep_going = || true;
        let mut search = Search::new(&request, &shapes, &mut keep_going);
        let before = StageRecompute { keep: 2, ..StageRecompute::first(1).expect("a layer") };
        let plan = start_with(&mut search, Some(10_000), [Some(before); 6]);
        let mut numbers = Numbers(0);
        let mut found = BTreeSet::new();
        for _ in 0..1_000 {
            let change = plan.draws(&shapes[0].layers).draw(&mut numbers);
            if let Some(Change::Recompute(Recomputed { after, .. })) = change {
                found.insert(after.map(|choice| choice.to_string()));
            }
        }
        // Each stage has two layers.
        let expected =
            ["", ":keep=2", ":layers=1:keep=1", ":layers=1:keep=2:parts=norms", ":layers=1:keep=3"];
        let expected = expected.map(|text| Some(text.to_owned()).filter(|text| !text.is_empty()));
        assert_eq!(found.into_iter().collect::<Vec<_>>(), expected);
    }

    #[test]
    fn a_refused_choice_of_recomputation_leaves_no_times() {
        let keeping = StageRecompute { keep: 1, ..StageRecompute::WHOLE };
        for seed in 0..10 {
            let (_, shapes) = asked(&profile(seed, 9), None, 0);
            let (layers, (order, starts)) = (&shapes[0].layers, made(&shapes[0], None));
            let [kept, refused] = [keeping, StageRecompute::WHOLE]
                .map(|choice| stage_loads(layers, &order.placement, &starts, &[Some(choice); 6]));
            let mut evaluator = Evaluator::default();
            let time = evaluator.time(&order, &kept, &layers.network);
            let slower = evaluator.time_changed(&order, &refused, Changed::Everything, f64::INFINITY);
            assert!(slower > time, "seed {seed}: {slower:?}, {time:?}");
            let row = Changed::Row { rank: 0, from: 0 };
            assert_eq!(evaluator.time_changed(&order, &kept, row, f64::INFINITY), time, "seed {seed}");
        }
    }

    /// Returns a plan by rules, which the search knows.
    fn start(search: &mut Search<'_>, memory: Option<u64>) -> Polished {
        start_with(search, memory, [None; 6])
    }

    fn start_with(
        search: &mut Search<'_>,
        memory: Option<u64>,
        recompute: [Option<StageRecompute>; 6],
    ) -> Polished {
        let (order, starts) = made(&search.shapes[0], memory);
        let loads = stage_loads(&search.shapes[0].layers, &order.placement, &starts, &recompute);
        let time =
            Evaluator::default().time(&order, &loads, &search.shapes[0].layers.network).expect("no deadlock");
        let choice = Choice { shape: 0, starts: &starts, recompute: &recompute };
        search.keep_changed(&Rc::new(order), &loads, choice, time);
        let candidate = search.best.values().next().cloned().expect("a plan");
        Polished::of(search, candidate).expect("no deadlock")
    }

    /// In a named order, the first stage that runs backward has whole backwards. When a change of the cut
    /// moves trained layers to the stage before it, its gradients are sent.
    #[test]
    fn a_changed_cut_has_the_time_of_its_program() {
        let mut profile = profile(7, 5);
        for (index, layer) in profile.layers.iter_mut().enumerate() {
            layer.trained_bytes = (index < 2).then_some(0);
            layer.backward_s = Some(layer.input_backward_s + 0.1 * layer.weight_backward_s);
        }
        let (request, shapes) = asked(&profile, None, 1_000_000);
        let mut keep_going = || true;
        let mut search = Search::new(&request, &shapes, &mut keep_going);
        let spec = ScheduleSpec { ranks: 3, microbatches: 4, ..ScheduleSpec::default() };
        let order = Order::of(&generate("1f1b", &spec).expect("a schedule")).split(1);
        let (starts, recompute) = ([0, 2, 4, 5], [None; 3]);
        let loads = stage_loads(&shapes[0].layers, &order.placement, &starts, &recompute);
        let choice = Choice { shape: 0, starts: &starts, recompute: &recompute };
        search.keep_changed(&Rc::new(order), &loads, choice, f64::MAX);
        let candidate = search.best.values().next().cloned().expect("a plan");
        let mut plan = Polished::of(&mut search, candidate).expect("no deadlock");
        let change = Change::Shift { first: 1, last: 1, is_up: true, recomputed: None };
        assert!(plan.make(&mut search, change, f64::INFINITY));
        let choice = PlanChoice {
            boundaries: plan.starts[1..3].to_vec(),
            recompute: plan.recompute.clone(),
            ..PlanChoice::default()
        };
        let predicted = predict(&profile, &plan.order.schedule(), &choice).expect("a sound order");
        assert_eq!(plan.time, predicted.step_s());
    }

    #[test]
    fn changed_plans_are_faster_and_keep_to_the_memory() {
        let mut faster = 0;
        for seed in 0..10 {
            let profile = profile(seed, 9);
            let memory = (seed % 2 == 0).then_some(120);
            let (request, shapes) = asked(&profile, memory, 200_000);
            let mut keep_going = || true;
            let mut search = Search::new(&request, &shapes, &mut keep_going);
            let first = start(&mut search, memory).time;
            polish(&mut search);
            let best = search.best.values().next().expect("a plan");
            assert!(best.time <= first, "seed {seed}");
            faster += usize::from(best.time < 0.97 * first);
            let loads = stage_loads(&shapes[0].layers, &best.order.placement, &best.starts, &best.recompute);
            let time = Evaluator::default().time(&best.order, &loads, &shapes[0].layers.network);
            assert_eq!(time, Some(best.time));
            let limit = memory.unwrap_or(u64::MAX);
            let peaks = crate::plan::peaks::peaks(&best.order, &loads, shapes[0].layers.sharding);
            assert!(peaks.iter().all(|&peak| peak <= limit), "seed {seed}: {peaks:?}");
            check_order(&best.order);
        }
        assert!(faster >= 6, "{faster} of 10");
    }
}
