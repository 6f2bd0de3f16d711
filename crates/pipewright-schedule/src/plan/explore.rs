//! The phases of the search for one shape.

use std::rc::Rc;

use crate::partition::{Method, partition};
use crate::placement::Placement;
use crate::plan::balance::{Layout, Numbers, balanced, even};
use crate::plan::class::{Class, Path};
use crate::plan::cuts::{count_cuts, for_each_cut};
use crate::plan::evaluate::ranks_of_stages;
use crate::plan::families::Family;
use crate::plan::greedy::Rules;
use crate::plan::order::Order;
use crate::plan::recompute::{ALL_CHOICES, every_choice, to_fit, to_hold};
use crate::plan::recut::descended;
use crate::plan::report::SEARCHED;
use crate::plan::search::{Choice, Label, Search};
use crate::plan::shape::Shape;
use crate::plan::stage_load::{engine_costs, stage_loads};

/// The largest number of cuts of an arrangement that are all tried.
const ALL_CUTS: u64 = 300;
/// The number of walks and of descents that look for balanced cuts of an arrangement.
const WALKS: u64 = 2;
/// The attempts of a descent.
const DESCENTS: usize = 150;
/// The steps of a walk for each stage.
const WALK_STEPS: usize = 1_500;
/// The most steps of a walk.
const MOST_WALK_STEPS: usize = 40_000;
/// The most episodes of annealing.
const EPISODES: usize = 24;
/// The attempts of an episode for each stage.
const TRIES: usize = 20;
/// The share by which a plan may become slower at the beginning of an episode.
const WORSE: f64 = 0.01;
/// A gap below which the search ends.
const GOOD_ENOUGH: f64 = 5e-4;

/// A cut of an arrangement, and the bound on its time.
#[derive(Debug, Clone)]
struct Cut {
    bound: f64,
    /// `None` for a placement in which rounds visit the ranks in any order.
    class: Option<Class>,
    layout: Layout,
}

/// A named schedule with its order.
struct Named {
    family: Family,
    class: Option<Class>,
    /// `None` if the order depends on the costs.
    order: Option<Rc<Order>>,
}

/// Searches the plans of one shape. `bound` is the lower bound of all plans.
pub(super) fn explore(search: &mut Search<'_>, shapes: &[Shape], at: usize, bound: f64) {
    let cuts = pool(search, &shapes[at]);
    if cuts.first().is_none_or(|cut| cut.bound >= search.best_time()) {
        return;
    }
    let named = named(search, &shapes[at]);
    let budget = search.left();
    first_looks(search, shapes, at, &cuts);
    try_named(search, shapes, at, &cuts, &named);
    if search.request.searched {
        try_rules(search, shapes, at, &cuts, bound, budget / 4 * 3);
        anneal(search, shapes, at, &cuts, bound, budget / 20);
    }
    climb_named(search, shapes, at, &named, bound);
}

/// Returns the cuts to try, the one with the lowest bound first.
fn pool(search: &mut Search<'_>, shape: &Shape) -> Vec<Cut> {
    let (step, layers, memory) = (shape.step(), shape.layers.count(), search.request.memory);
    let mut cuts: Vec<Cut> = Vec::new();
    let mut add = |class: Option<Class>, layout: Layout| {
        let bound = step.cut_time(&layout.rank_of, &layout.starts);
        if !cuts.iter().any(|cut| cut.layout == layout) {
            cuts.push(Cut { bound, class, layout });
        }
    };
    let mut numbers = Numbers(1);
    for &class in &shape.classes {
        let rank_of = class.ranks_of();
        if count_cuts(layers, class.stages()) <= ALL_CUTS {
            for_each_cut(layers, class.stages(), &mut |starts| {
                add(Some(class), Layout { starts: starts.to_vec(), rank_of: rank_of.clone() });
            });
            continue;
        }
        let steps = (WALK_STEPS * class.stages()).min(MOST_WALK_STEPS);
        let even = Layout { starts: even(layers, class.stages()), rank_of: rank_of.clone() };
        for seed in 0..WALKS {
            let starts = descended(step, class, memory, seed, DESCENTS);
            add(Some(class), Layout { starts, rank_of: rank_of.clone() });
            add(Some(class), balanced(step, memory, even.clone(), false, &mut numbers, steps));
            if search.request.searched && class.chunks > 1 && class.path == Path::Loop {
                add(None, balanced(step, memory, even.clone(), true, &mut numbers, steps));
            }
        }
        add(Some(class), even);
        let starts = lightest(shape, class);
        add(Some(class), Layout { starts, rank_of });
    }
    cuts.sort_by(|one, other| one.bound.total_cmp(&other.bound));
    cuts
}

/// Returns the cut whose heaviest stage is as light as possible.
fn lightest(shape: &Shape, class: Class) -> Vec<usize> {
    let layers = shape.layers.count();
    let all = shape.layers.work(0..layers).max(f64::MIN_POSITIVE);
    let weight = |layer: usize| (shape.layers.work(layer..layer + 1) / all * 1e12) as u64;
    let weights: Vec<u64> = (0..layers).map(weight).collect();
    let cut = partition(&weights, class.stages() as u32, &Method::Optimal);
    let cut = cut.expect("an arrangement has at most as many stages as there are layers");
    cut.ranges().map(|range| range.start).chain([layers]).collect()
}

fn named(search: &mut Search<'_>, shape: &Shape) -> Vec<Named> {
    let mut named = Vec::new();
    for family in Family::all(shape.ranks, shape.microbatches, shape.layers.count()) {
        if family.is_made_to_measure {
            let class = shape.classes.iter().copied().find(|class| class.chunks == 1);
            let class = class.filter(|_| family.chunks == 1);
            named.push(Named { family, class, order: None });
            continue;
        }
        match family.order(&crate::costs::Costs::default()) {
            Ok(order) => {
                let class = Class::of(&order.placement);
                named.push(Named { family, class, order: Some(Rc::new(order)) });
            }
            Err(reason) => {
                search.refused.entry(family.name).or_insert(reason);
            }
        }
    }
    named
}

/// Tries a few rules on the best cuts of each arrangement.
fn first_looks(search: &mut Search<'_>, shapes: &[Shape], at: usize, cuts: &[Cut]) {
    if !search.request.searched {
        return;
    }
    let shape = &shapes[at];
    let mut seen: Vec<(Option<Class>, usize)> = Vec::new();
    for cut in cuts {
        let kind = (cut.class, cut.layout.rank_of.len());
        if seen.iter().filter(|&&known| known == kind).count() > 1 || cut.bound >= search.best_time() {
            continue;
        }
        seen.push(kind);
        for recompute in choices(search, shape, cut) {
            for rules in Rules::all(shape.ranks, kind.1 as u32).into_iter().take(2) {
                if !search.goes_on(0) {
                    return;
                }
                let choice = Choice { shape: at, starts: &cut.layout.starts, recompute: &recompute };
                search.search_order(shapes, &placement(&cut.layout), choice, rules, f64::INFINITY);
            }
        }
    }
}

fn placement(layout: &Layout) -> Placement {
    let ranks = layout.rank_of.iter().copied().map(crate::ids::Rank::new).collect();
    Placement::explicit(ranks).expect("the first round visits every rank")
}

/// Returns the stages that may recompute in a searched order.
fn choices(search: &Search<'_>, shape: &Shape, cut: &Cut) -> Vec<Vec<bool>> {
    let stages = cut.layout.rank_of.len();
    let none = vec![false; stages];
    let Some(memory) = search.request.memory else { return vec![none] };
    if stages <= ALL_CHOICES {
        return every_choice(stages).collect();
    }
    let loads = stage_loads(&shape.layers, &cut.layout.starts, &none, shape.data_parallel);
    let ranks = shape.ranks as usize;
    let as_1f1b = to_hold(&loads, &cut.layout.rank_of, memory, |rank| (ranks - rank) as u64);
    let twice = to_hold(&loads, &cut.layout.rank_of, memory, |rank| 2 * (ranks - rank) as u64);
    let mut choices = vec![none, as_1f1b, twice, vec![true; stages]];
    choices.dedup();
    choices
}

/// Simulates the named schedules: all cuts where there are few, otherwise the best cuts of their arrangement, the even
/// one, and the one with the lightest stages.
fn try_named(search: &mut Search<'_>, shapes: &[Shape], at: usize, cuts: &[Cut], named: &[Named]) {
    let layers = shapes[at].layers.count();
    for it in named {
        let Some(class) = it.class else { continue };
        let all = count_cuts(layers, class.stages()) <= ALL_CUTS;
        let own = cuts.iter().filter(|cut| cut.class == Some(class));
        for (index, cut) in own.enumerate() {
            let is_usual = cut.layout.starts == even(layers, class.stages())
                || cut.layout.starts == lightest(&shapes[at], class);
            let hopeless = cut.bound >= search.best_time() && index > 0;
            if (hopeless && !is_usual) || (!all && index > 1 && !is_usual) {
                continue;
            }
            if !search.goes_on(0) {
                return;
            }
            try_cut(search, shapes, at, it, &cut.layout.starts);
        }
    }
}

/// Simulates a named schedule with a cut, without recomputation and with what it needs to fit.
fn try_cut(
    search: &mut Search<'_>,
    shapes: &[Shape],
    at: usize,
    named: &Named,
    starts: &[usize],
) -> Option<f64> {
    let shape = &shapes[at];
    let stages = starts.len() - 1;
    let none = vec![false; stages];
    let label = Label { name: named.family.name, settings: named.family.settings };
    let order = match &named.order {
        Some(order) => Rc::clone(order),
        None => {
            let loads = stage_loads(&shape.layers, starts, &none, shape.data_parallel);
            match named.family.order(&engine_costs(&shape.layers, &loads)) {
                Ok(order) => Rc::new(order),
                Err(reason) => {
                    search.refused.entry(named.family.name).or_insert(reason);
                    return None;
                }
            }
        }
    };
    let plain = search.consider(shapes, label, &order, Choice { shape: at, starts, recompute: &none });
    let Some(memory) = search.request.memory else { return plain };
    if plain.is_some() {
        return plain;
    }
    let choices: Vec<Vec<bool>> = match stages <= ALL_CHOICES {
        true => every_choice(stages).skip(1).collect(),
        false => vec![to_fit(&shape.layers, starts, &order, shape.data_parallel, memory)],
    };
    let mut best: Option<f64> = None;
    for recompute in choices {
        let choice = Choice { shape: at, starts, recompute: &recompute };
        if let Some(time) = search.consider(shapes, label, &order, choice) {
            best = Some(best.map_or(time, |best: f64| best.min(time)));
        }
    }
    best
}

/// Tries all rules on all cuts that may be better than the best plan, while more than `reserve` of the work is left.
fn try_rules(search: &mut Search<'_>, shapes: &[Shape], at: usize, cuts: &[Cut], bound: f64, reserve: u64) {
    let shape = &shapes[at];
    let rules = |cut: &Cut| Rules::all(shape.ranks, cut.layout.rank_of.len() as u32);
    let most = cuts.iter().map(|cut| rules(cut).len()).max().unwrap_or(0);
    for index in 0..most {
        for cut in cuts {
            if cut.bound >= search.best_time() {
                break;
            }
            for recompute in choices(search, shape, cut) {
                let done = search.best_time() <= bound * (1.0 + GOOD_ENOUGH);
                if done || !search.goes_on(reserve) {
                    return;
                }
                let choice = Choice { shape: at, starts: &cut.layout.starts, recompute: &recompute };
                let before = search.best_time();
                let Some(&rules) = rules(cut).get(index) else { continue };
                search.search_order(shapes, &placement(&cut.layout), choice, rules, before);
            }
        }
    }
}

/// Anneals plans with searched orders: changes the layout, the recomputation and the rules at random, and keeps changes
/// that make the plan faster, or at first only a little slower. Episodes begin with the best plan and with the cuts that
/// have the lowest bounds in turn.
fn anneal(search: &mut Search<'_>, shapes: &[Shape], at: usize, cuts: &[Cut], bound: f64, reserve: u64) {
    let shape = &shapes[at];
    let mut numbers = Numbers(2);
    for episode in 0..EPISODES {
        let best = search.best.get(SEARCHED).filter(|best| best.shape == at).cloned();
        let cut = &cuts[(episode / 2) % cuts.len()];
        let rules = best.as_ref().and_then(|best| best.rules);
        let rules = rules.unwrap_or_else(|| Rules::all(shape.ranks, 1)[0]);
        let start = match best {
            Some(best) if episode % 2 == 0 => State {
                layout: Layout { starts: best.starts.clone(), rank_of: ranks_of_stages(&best.order) },
                recompute: best.recompute.clone(),
                rules,
                time: best.time,
            },
            _ if cut.bound >= search.best_time() => continue,
            _ => {
                let recompute = choices(search, shape, cut).into_iter().nth(1);
                let recompute = recompute.unwrap_or_else(|| vec![false; cut.layout.rank_of.len()]);
                State { layout: cut.layout.clone(), recompute, rules, time: f64::INFINITY }
            }
        };
        if !run_episode(search, shapes, at, start, &mut numbers, bound, reserve) {
            return;
        }
    }
}

/// A plan during annealing.
#[derive(Clone)]
struct State {
    layout: Layout,
    recompute: Vec<bool>,
    rules: Rules,
    time: f64,
}

/// Runs one episode; returns whether another one may follow.
fn run_episode(
    search: &mut Search<'_>,
    shapes: &[Shape],
    at: usize,
    mut now: State,
    numbers: &mut Numbers,
    bound: f64,
    reserve: u64,
) -> bool {
    let shape = &shapes[at];
    let (step, ranks) = (shape.step(), shape.ranks as usize);
    let stages = now.recompute.len();
    let all = Rules::all(shape.ranks, stages as u32);
    let tries = TRIES * stages;
    for attempt in 0..tries {
        if search.best_time() <= bound * (1.0 + GOOD_ENOUGH) || !search.goes_on(reserve) {
            return false;
        }
        let left = (tries - attempt) as f64 / tries as f64;
        let before = now.time * (1.0 + WORSE * left * left);
        let mut next = now.clone();
        if attempt > 0 {
            if numbers.below(6) == 0 {
                next.rules = all[numbers.below(all.len())];
            }
            if search.request.memory.is_some() && numbers.below(4) == 0 {
                let stage = numbers.below(stages);
                next.recompute[stage] = !next.recompute[stage];
            }
            for _ in 0..=numbers.below(2) {
                next.layout.shake(ranks, true, numbers);
            }
        }
        if step.cut_time(&next.layout.rank_of, &next.layout.starts) >= before {
            continue;
        }
        let choice = Choice { shape: at, starts: &next.layout.starts, recompute: &next.recompute };
        if let Some(time) = search.search_order(shapes, &placement(&next.layout), choice, next.rules, before)
        {
            next.time = time;
            now = next;
        }
    }
    true
}

/// Moves the boundaries of the best named plans, one at a time, as long as that helps.
fn climb_named(search: &mut Search<'_>, shapes: &[Shape], at: usize, named: &[Named], bound: f64) {
    let mut order: Vec<(f64, &'static str)> = search
        .best
        .values()
        .filter(|best| best.rules.is_none() && best.shape == at)
        .map(|best| (best.time, best.name))
        .collect();
    order.sort_by(|one, other| one.0.total_cmp(&other.0));
    for (_, name) in order {
        let mut improved = true;
        while improved {
            improved = false;
            let Some(best) = search.best.get(name).cloned() else { break };
            let it = named.iter().find(|it| {
                let same = it.family.name == name && it.family.settings == best.settings;
                same && it.class == Class::of(&best.order.placement)
            });
            let Some(it) = it else { break };
            for boundary in 1..best.starts.len() - 1 {
                for up in [false, true] {
                    if search.best_time() <= bound * (1.0 + GOOD_ENOUGH) || !search.goes_on(0) {
                        return;
                    }
                    let mut starts = search.best[name].starts.clone();
                    let moved = if up { starts[boundary] + 1 } else { starts[boundary] - 1 };
                    if moved <= starts[boundary - 1] || moved >= starts[boundary + 1] {
                        continue;
                    }
                    starts[boundary] = moved;
                    let before = search.best[name].time;
                    improved |= try_cut(search, shapes, at, it, &starts).is_some_and(|time| time < before);
                }
            }
        }
    }
}
