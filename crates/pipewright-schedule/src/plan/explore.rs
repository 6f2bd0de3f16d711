//! The phases of the search for one shape.

use std::cell::OnceCell;

use crate::partition::Method;
use crate::placement::Placement;
use crate::plan::balance::balanced;
use crate::plan::class::{Class, Path};
use crate::plan::evaluate::ranks_of_stages;
use crate::plan::greedy::Rules;
use crate::plan::named::{climb_named, named, try_named};
use crate::plan::numbers::Numbers;
use crate::plan::placed_cut::{PlacedCut, Swaps, WalkTask};
use crate::plan::pool::{PooledCut, cut_by, placement, pool};
use crate::plan::rank_memory::RankMemory;
use crate::plan::recompute::{
    chosen, drawn_parts, few_whole_choices, layers_to_hold, stages_to_hold, without_repetitions,
};
use crate::plan::report::SEARCHED;
use crate::plan::search::{Choice, Search};
use crate::plan::shape::Shape;
use crate::plan::stage_load::stage_loads;
use crate::plan::tuning;
use crate::plan::unlike_pool::{estimate, quick_layout, stays, unlike_pool};
use crate::recompute::{LayerParts, StageRecompute};

/// Searches the plans of one shape.
pub(super) fn explore(search: &mut Search<'_>, at: usize) {
    let shape = &search.shapes[at];
    if shape.classes.is_empty() {
        // There are more unlike ranks than layers.
        return;
    }
    let cuts = if shape.layers.is_unlike() { unlike_pool(search, shape) } else { pool(search, shape) };
    let is_hopeful =
        search.searches_orders() && cuts.first().is_some_and(|cut| cut.bound < search.best_time());
    let budget = share(search, shape);
    let reserve = search.left() - budget;
    if is_hopeful {
        let kept = if shape.layers.is_unlike() { reserve + budget / 2 } else { 0 };
        first_looks(search, at, &cuts, kept);
    }
    // After a first plan, because the orders of all named schedules may take long.
    let named = named(search, shape);
    try_named(search, at, &cuts, &named);
    if is_hopeful {
        try_rules(search, at, &cuts, reserve + budget / 4 * 3);
        anneal(search, at, &cuts, reserve + budget / 20);
    }
    climb_named(search, at, &named, reserve);
}

/// Returns the work for the plans of a shape: the work of some plans with the most stages, and at least a
/// part of what is left. The rest is for other shapes, and for changes of the best plan.
fn share(search: &Search<'_>, shape: &Shape) -> u64 {
    let left = search.left();
    let stages = shape.classes.iter().map(|class| class.stages() as u64).max().unwrap_or(1);
    let (microbatches, ranks) = (u64::from(shape.microbatches), u64::from(shape.ranks.max(1)));
    let plans = tuning::search::PLANS * (microbatches / ranks).max(1);
    let is_unlike = shape.layers.is_unlike();
    let share = if is_unlike { tuning::unlike::SHARE } else { tuning::search::SHARE };
    (plans * 3 * stages).saturating_mul(microbatches).clamp(left / share, left - left / 10)
}

/// The times of a shape before its search.
#[derive(Debug, Clone, Copy)]
pub(super) struct Scouted {
    /// The time of one plan by rules; infinity if it does not fit.
    pub(super) time: f64,
    /// An estimate of the time of good plans. Of equal ranks, it is the same.
    pub(super) estimate: f64,
}

/// Simulates one plan of a shape: with one stage per rank, or of unlike ranks with the stages that a short walk finds.
pub(super) fn scout(search: &mut Search<'_>, at: usize) -> Scouted {
    let shape = &search.shapes[at];
    let stages = shape.ranks as usize;
    let layout = if shape.layers.is_unlike() {
        quick_layout(search, shape)
    } else {
        let rank_of = Class { ranks: shape.ranks, chunks: 1, path: Path::Loop }.ranks_of();
        cut_by(shape, stages, &Method::Optimal).map(|starts| PlacedCut { starts, rank_of })
    };
    let Some(layout) = layout else { return Scouted { time: f64::INFINITY, estimate: f64::INFINITY } };
    let time = time_by_rules(search, at, &layout);
    let estimate = if shape.layers.is_unlike() { estimate(shape, &layout, 1.0) } else { time };
    Scouted { time, estimate }
}

/// Makes an order by rules for a layout, and returns its time; infinity if it does not fit.
pub(super) fn time_by_rules(search: &mut Search<'_>, at: usize, layout: &PlacedCut) -> f64 {
    let shape = &search.shapes[at];
    let (placement, starts) = (placement(layout), &layout.starts);
    let stages = starts.len() - 1;
    let mut choices = vec![vec![None; stages]];
    if let Some(memory) = &shape.memory {
        if search.request.recomputes_in_part() {
            choices.push(to_hold_as_1f1b(shape, starts, &placement, memory, 1.0));
        }
        choices.push(vec![Some(StageRecompute::WHOLE); stages]);
    }
    for recompute in choices {
        if !search.goes_on(0) {
            break;
        }
        let choice = Choice { shape: at, starts, recompute: &recompute };
        let rules = rules_of(shape, shape.ranks as usize)[0];
        if let Some(time) = search.search_order(&placement, choice, rules, f64::INFINITY) {
            return time;
        }
    }
    f64::INFINITY
}

/// Tries a few rules on the best cuts of each arrangement, while more than `reserve` of the work is left. Cuts with few
/// stages come first, because their plans take the least work, and there may be little of it.
fn first_looks(search: &mut Search<'_>, at: usize, cuts: &[PooledCut], reserve: u64) {
    let shape = &search.shapes[at];
    let is_unlike = shape.layers.is_unlike();
    // Unlike ranks may have any numbers of stages.
    let chunks = |cut: &PooledCut| cut.layout.rank_of.len().div_ceil(shape.ranks.max(1) as usize);
    let most = if is_unlike { tuning::unlike::LOOKS } else { 2 };
    let mut seen: Vec<(Option<Class>, usize)> = Vec::new();
    let mut sorted: Vec<&PooledCut> = cuts.iter().collect();
    sorted.sort_by_key(|cut| chunks(cut));
    let mut looks = Vec::new();
    for cut in sorted {
        let kind = (cut.class.filter(|_| !is_unlike), chunks(cut));
        if seen.iter().filter(|&&known| known == kind).count() < most {
            seen.push(kind);
            looks.push((cut, Trials::of(search, shape, cut)));
        }
    }
    let passes = if is_unlike { [0..2, 2..usize::MAX] } else { [0..usize::MAX, 0..0] };
    for choices in passes {
        for (cut, trials) in &looks {
            if cut.bound >= search.best_time() {
                continue;
            }
            let own = trials.choices.iter().enumerate().filter(|(index, _)| choices.contains(index));
            for (_, recompute) in own {
                for &rules in trials.rules.iter().take(2) {
                    if !search.goes_on(reserve) {
                        return;
                    }
                    let choice = Choice { shape: at, starts: &cut.layout.starts, recompute };
                    search.search_order(&trials.placement, choice, rules, f64::INFINITY);
                }
            }
        }
    }
}

/// The orders that are searched for a cut: each of the rules with each choice of recomputation.
struct Trials {
    placement: Placement,
    rules: Vec<Rules>,
    choices: Vec<Vec<Option<StageRecompute>>>,
}

impl Trials {
    fn of(search: &Search<'_>, shape: &Shape, cut: &PooledCut) -> Self {
        let placement = placement(&cut.layout);
        let choices = choices(search, shape, cut, &placement);
        let rules = rules_of(shape, cut.layout.rank_of.len());
        Self { placement, rules, choices }
    }
}

/// Returns the rules to try for a number of stages, the most promising first.
fn rules_of(shape: &Shape, stages: usize) -> Vec<Rules> {
    if shape.layers.is_unlike() {
        Rules::all_for_unlike(shape.ranks, stages as u32)
    } else {
        Rules::all(shape.ranks, stages as u32)
    }
}

/// Returns what may be recomputed in a searched order.
fn choices(
    search: &Search<'_>,
    shape: &Shape,
    cut: &PooledCut,
    placement: &Placement,
) -> Vec<Vec<Option<StageRecompute>>> {
    let stages = cut.layout.rank_of.len();
    let (none, all) = (vec![None; stages], vec![Some(StageRecompute::WHOLE); stages]);
    let Some(memory) = &shape.memory else { return vec![none] };
    let mut choices = vec![none];
    let few = few_whole_choices(stages, tuning::search::ALL_CHOICES);
    if search.request.recomputes_in_part() {
        let starts = &cut.layout.starts;
        let shares = tuning::search::IN_FLIGHT.iter();
        choices.extend(shares.map(|&share| to_hold_as_1f1b(shape, starts, placement, memory, share)));
        choices.push(all);
        choices.extend(few);
    } else if !few.is_empty() {
        return few;
    } else {
        let loads = stage_loads(&shape.layers, placement, &cut.layout.starts, &choices[0]);
        choices.extend([1, 2].map(|factor| {
            let places = places(placement);
            let wanted = |rank: usize| {
                let in_flight = factor * (shape.ranks as usize - places[rank]) as u64;
                in_flight.min(u64::from(shape.microbatches))
            };
            stages_to_hold(&shape.layers, &loads, placement, memory, wanted)
        }));
        choices.push(all);
    }
    without_repetitions(choices)
}

/// Returns the choice of the fewest layers with which each rank can hold a share of the microbatches that it
/// holds in 1F1B, rounded up. It holds at most all microbatches.
fn to_hold_as_1f1b(
    shape: &Shape,
    starts: &[usize],
    placement: &Placement,
    memory: &RankMemory,
    share: f64,
) -> Vec<Option<StageRecompute>> {
    let places = places(placement);
    let wanted = |rank: usize| {
        let in_flight = (share * f64::from(shape.ranks - places[rank] as u32)).ceil() as u64;
        in_flight.min(u64::from(shape.microbatches))
    };
    layers_to_hold(&shape.layers, starts, placement, memory, wanted)
}

/// Returns the place of each rank in the order of their first stages.
fn places(placement: &Placement) -> Vec<usize> {
    let first = |rank| placement.stages_of(rank).first().copied();
    let firsts: Vec<_> = placement.all_ranks().map(first).collect();
    firsts.iter().map(|own| firsts.iter().filter(|other| *other < own).count()).collect()
}

/// Tries all rules on all cuts that may be better than the best plan, while more than `reserve` of the work
/// is left.
fn try_rules(search: &mut Search<'_>, at: usize, cuts: &[PooledCut], reserve: u64) {
    let shape = &search.shapes[at];
    let most = cuts.iter().map(|cut| rules_of(shape, cut.layout.rank_of.len()).len()).max();
    let trials: Vec<OnceCell<Trials>> = cuts.iter().map(|_| OnceCell::new()).collect();
    for index in 0..most.unwrap_or(0) {
        for (cut, trials) in cuts.iter().zip(&trials) {
            if cut.bound >= search.best_time() {
                continue;
            }
            let trials = trials.get_or_init(|| Trials::of(search, shape, cut));
            let Some(&rules) = trials.rules.get(index) else { continue };
            for recompute in &trials.choices {
                if search.is_good_enough() || !search.goes_on(reserve) {
                    return;
                }
                let choice = Choice { shape: at, starts: &cut.layout.starts, recompute };
                let before = search.best_time();
                search.search_order(&trials.placement, choice, rules, before);
            }
        }
    }
}

/// Anneals plans with searched orders: makes random changes, and keeps the changes that make the plan faster,
/// or at first only a little slower. Episodes begin with the best plan and with the cuts that have the lowest
/// bounds in turn.
fn anneal(search: &mut Search<'_>, at: usize, cuts: &[PooledCut], reserve: u64) {
    let shape = &search.shapes[at];
    let mut numbers = Numbers(2);
    for episode in 0..tuning::annealing::EPISODES {
        let best = search.best.get(SEARCHED).filter(|best| best.shape == at).cloned();
        let cut = &cuts[(episode / 2) % cuts.len()];
        let rules = best.as_ref().and_then(|best| best.rules);
        let rules = rules.unwrap_or_else(|| rules_of(shape, 1)[0]);
        let start = match best {
            Some(best) if episode % 2 == 0 => Annealed {
                layout: PlacedCut { starts: best.starts.clone(), rank_of: ranks_of_stages(&best.order) },
                recompute: best.recompute.clone(),
                rules,
                time: best.time,
            },
            _ if cut.bound >= search.best_time() => continue,
            _ => {
                let choices = choices(search, shape, cut, &placement(&cut.layout));
                let recompute = choices.into_iter().nth(1);
                let recompute = recompute.unwrap_or_else(|| vec![None; cut.layout.rank_of.len()]);
                Annealed { layout: cut.layout.clone(), recompute, rules, time: f64::INFINITY }
            }
        };
        if !run_episode(search, at, start, &mut numbers, reserve) {
            return;
        }
    }
}

/// A plan during annealing.
#[derive(Clone)]
struct Annealed {
    layout: PlacedCut,
    recompute: Vec<Option<StageRecompute>>,
    rules: Rules,
    time: f64,
}

impl Annealed {
    /// Recomputes nothing if the layout has another number of stages.
    fn fit_recompute(&mut self) {
        let stages = self.layout.rank_of.len();
        if self.recompute.len() != stages {
            self.recompute = vec![None; stages];
        }
    }
}

/// Changes a plan at random: sometimes its rules and its recomputation, and always its layout. Half of the
/// time, that is a small change; otherwise a larger one, after which a short walk balances the ranks again.
/// Returns also whether the recomputation was drawn.
fn changed(
    search: &mut Search<'_>,
    shape: &Shape,
    now: &Annealed,
    numbers: &mut Numbers,
) -> (Annealed, bool) {
    let mut next = now.clone();
    let (ranks, stages) = (shape.ranks as usize, now.recompute.len());
    if numbers.below(6) == 0 {
        next.rules.shake(shape.ranks, stages as u32, numbers);
    }
    let memory = shape.memory.as_ref();
    let recomputes_anew = memory.is_some() && numbers.below(4) == 0;
    if recomputes_anew {
        let stage = numbers.below(stages);
        let range = next.layout.starts[stage]..next.layout.starts[stage + 1];
        let count = range.len();
        next.recompute[stage] = match next.recompute[stage] {
            now if search.request.recomputes_in_part() => {
                drawn_choice(shape.layers.parts_of(range), now, count, numbers)
            }
            Some(_) => None,
            None => Some(StageRecompute::WHOLE),
        };
    }
    if numbers.below(2) == 0 {
        for _ in 0..=numbers.below(2) {
            next.layout.shake(ranks, shape.swaps(), numbers);
        }
        next.fit_recompute();
        return (next, recomputes_anew);
    }
    let is_free = numbers.below(tuning::annealing::FREE) == 0;
    let swaps = if is_free { shape.swaps() } else { Swaps::None };
    for _ in 0..=numbers.below(tuning::annealing::CHANGES) {
        next.layout.shake(ranks, swaps, numbers);
    }
    let mut changes = 0;
    let stays = stays(shape);
    let stay = if stays.len() > 1 { stays[numbers.below(stays.len())] } else { 1.0 };
    let walk = WalkTask { step: shape.step(), memory, stay, swaps, steps: tuning::annealing::BALANCING };
    next.layout = balanced(walk, next.layout, numbers, &mut changes);
    if shape.layers.is_unlike() {
        search.charge_unlike_walk(changes, next.layout.rank_of.len());
    } else {
        search.charge_walk(changes, (stages / ranks) as u32);
    }
    next.fit_recompute();
    (next, recomputes_anew)
}

/// Returns what a stage of `count` layers recomputes after a random change: one layer more or less, all or none,
/// or any number; or one of the parts that its layers have more or less. The rules keep no microbatches, and the
/// order that they make is fitted anew ([`Search::search_order`]).
fn drawn_choice(
    all: LayerParts,
    now: Option<StageRecompute>,
    count: usize,
    numbers: &mut Numbers,
) -> Option<StageRecompute> {
    let parts = now.map_or(LayerParts::NONE, |choice| choice.parts);
    if let Some(changed) = drawn_parts(all, parts, numbers) {
        return chosen(now.map_or(0, |choice| choice.layers_of(count)), count, changed);
    }
    let layers = now.map_or(0, |choice| choice.layers_of(count));
    let drawn = match numbers.below(4) {
        0 => layers.saturating_sub(1),
        1 => layers + 1,
        2 => count * usize::from(layers == 0),
        _ => numbers.below(count + 1),
    };
    chosen(drawn, count, parts)
}

/// Often lets the stages recompute what they must for the changed layout, for a random number of microbatches
/// in flight.
fn refit(search: &Search<'_>, shape: &Shape, next: &mut Annealed, numbers: &mut Numbers) {
    let Some(memory) = shape.memory.as_ref().filter(|_| search.request.recomputes_in_part()) else { return };
    if numbers.below(2) == 0 {
        let share = 0.5 + numbers.below(16) as f64 / 10.0;
        next.recompute = to_hold_as_1f1b(shape, &next.layout.starts, &placement(&next.layout), memory, share);
    }
}

/// Runs one episode; returns whether another one may follow.
fn run_episode(
    search: &mut Search<'_>,
    at: usize,
    mut now: Annealed,
    numbers: &mut Numbers,
    reserve: u64,
) -> bool {
    let shape = &search.shapes[at];
    let step = shape.step();
    let tries = tuning::annealing::TRIES * now.recompute.len();
    for attempt in 0..tries {
        if search.is_good_enough() || !search.goes_on(reserve) {
            return false;
        }
        let left = (tries - attempt) as f64 / tries as f64;
        let before = now.time * (1.0 + tuning::annealing::WORSE * left * left);
        let is_first = attempt == 0 && now.time.is_infinite();
        let (mut next, recomputes_anew) =
            if is_first { (now.clone(), true) } else { changed(search, shape, &now, numbers) };
        if step.cut_time(&next.layout.rank_of, &next.layout.starts) >= before {
            continue;
        }
        if !recomputes_anew {
            refit(search, shape, &mut next, numbers);
        }
        let is_same = (&next.layout, &next.recompute, next.rules) == (&now.layout, &now.recompute, now.rules);
        if is_same && !is_first {
            continue;
        }
        let choice = Choice { shape: at, starts: &next.layout.starts, recompute: &next.recompute };
        if let Some(time) = search.search_order(&placement(&next.layout), choice, next.rules, before) {
            next.time = time;
            now = next;
        }
    }
    true
}
