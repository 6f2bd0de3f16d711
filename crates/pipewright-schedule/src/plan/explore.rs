//! The phases of the search for one shape.

use std::rc::Rc;

use crate::plan::balance::{Numbers, balanced, even};
use crate::plan::class::Class;
use crate::plan::cuts::{count_cuts, for_each_cut};
use crate::plan::families::Family;
use crate::plan::greedy::Rules;
use crate::plan::order::Order;
use crate::plan::recompute::{ALL_CHOICES, every_choice, to_fit, to_hold};
use crate::plan::search::{Choice, Label, Search};
use crate::plan::shape::Shape;
use crate::plan::stage_load::{engine_costs, stage_loads};

/// The largest number of cuts of an arrangement that are all tried.
const ALL_CUTS: u64 = 300;
/// The number of walks that look for balanced cuts of an arrangement.
const WALKS: u64 = 4;
/// The steps of a walk for each stage.
const WALK_STEPS: usize = 1_500;
/// The most steps of a walk.
const MOST_WALK_STEPS: usize = 40_000;
/// A gap below which the search ends.
const GOOD_ENOUGH: f64 = 5e-4;

/// A cut of an arrangement, and the bound on its time.
#[derive(Debug, Clone)]
struct Cut {
    bound: f64,
    class: Class,
    starts: Vec<usize>,
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
    let named = named(search, &shapes[at]);
    let budget = search.left();
    first_looks(search, shapes, at, &cuts, &named);
    try_named(search, shapes, at, &cuts, &named);
    if search.request.searched {
        try_rules(search, shapes, at, &cuts, bound, budget / 2);
        improve(search, shapes, at, bound, budget / 5);
    }
    climb_named(search, shapes, at, &named, bound);
}

/// Returns the cuts to try, the one with the lowest bound first.
fn pool(search: &mut Search<'_>, shape: &Shape) -> Vec<Cut> {
    let (step, layers) = (shape.step(), shape.layers.count());
    let mut cuts: Vec<Cut> = Vec::new();
    for &class in &shape.classes {
        let mut add = |starts: Vec<usize>| {
            let bound = step.cut_time(class, &starts);
            if !cuts.iter().any(|cut| cut.class == class && cut.starts == starts) {
                cuts.push(Cut { bound, class, starts });
            }
        };
        if count_cuts(layers, class.stages()) <= ALL_CUTS {
            for_each_cut(layers, class.stages(), &mut |starts| add(starts.to_vec()));
            continue;
        }
        let steps = (WALK_STEPS * class.stages()).min(MOST_WALK_STEPS);
        for seed in 0..WALKS {
            add(balanced(step, class, search.request.memory, seed, steps));
        }
        add(even(layers, class.stages()));
    }
    cuts.sort_by(|one, other| one.bound.total_cmp(&other.bound));
    cuts
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

/// Tries a few rules on the best cut of each arrangement.
fn first_looks(search: &mut Search<'_>, shapes: &[Shape], at: usize, cuts: &[Cut], named: &[Named]) {
    if !search.request.searched {
        return;
    }
    let shape = &shapes[at];
    let _ = named;
    for &class in &shape.classes {
        let Some(cut) = cuts.iter().find(|cut| cut.class == class) else { continue };
        for recompute in choices(search, shape, cut) {
            for rules in Rules::all(shape.ranks, class.stages() as u32).into_iter().take(2) {
                if !search.goes_on(0) {
                    return;
                }
                let choice = Choice { shape: at, starts: &cut.starts, recompute: &recompute };
                search.search_order(shapes, class, choice, rules, f64::INFINITY);
            }
        }
    }
}

/// Returns the stages that may recompute in a searched order.
fn choices(search: &Search<'_>, shape: &Shape, cut: &Cut) -> Vec<Vec<bool>> {
    let stages = cut.class.stages();
    let none = vec![false; stages];
    let Some(memory) = search.request.memory else { return vec![none] };
    if stages <= ALL_CHOICES {
        return every_choice(stages).collect();
    }
    let loads = stage_loads(&shape.layers, &cut.starts, &none, shape.data_parallel);
    let ranks = shape.ranks as usize;
    let as_1f1b = to_hold(&loads, cut.class, memory, |rank| (ranks - rank) as u64);
    let twice = to_hold(&loads, cut.class, memory, |rank| 2 * (ranks - rank) as u64);
    let mut choices = vec![none, as_1f1b, twice, vec![true; stages]];
    choices.dedup();
    choices
}

/// Simulates the named schedules: all cuts where there are few, otherwise the best cuts of their arrangement and the
/// even one.
fn try_named(search: &mut Search<'_>, shapes: &[Shape], at: usize, cuts: &[Cut], named: &[Named]) {
    let layers = shapes[at].layers.count();
    for it in named {
        let Some(class) = it.class else { continue };
        let all = count_cuts(layers, class.stages()) <= ALL_CUTS;
        let own = cuts.iter().filter(|cut| cut.class == class);
        for (index, cut) in own.enumerate() {
            let is_even = cut.starts == even(layers, class.stages());
            let hopeless = cut.bound >= search.best_time() && index > 0;
            if (hopeless && !is_even) || (!all && index > 1 && !is_even) {
                continue;
            }
            if !search.goes_on(0) {
                return;
            }
            try_cut(search, shapes, at, it, &cut.starts);
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
    let rules = |class: Class| Rules::all(shape.ranks, class.stages() as u32);
    let most = cuts.iter().map(|cut| rules(cut.class).len()).max().unwrap_or(0);
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
                let choice = Choice { shape: at, starts: &cut.starts, recompute: &recompute };
                let before = search.best_time();
                let Some(&rules) = rules(cut.class).get(index) else { continue };
                search.search_order(shapes, cut.class, choice, rules, before);
            }
        }
    }
}

/// Moves boundaries and changes recomputation of the best searched plan of this shape, as long as that helps.
fn improve(search: &mut Search<'_>, shapes: &[Shape], at: usize, bound: f64, reserve: u64) {
    let shape = &shapes[at];
    let step = shape.step();
    let mut numbers = Numbers(1);
    let mut failures = 0;
    while let Some(best) =
        search.best.get(crate::plan::report::SEARCHED).filter(|best| best.shape == at).cloned()
    {
        let Some(class) = Class::of(&best.order.placement) else { return };
        let stages = class.stages();
        let done = search.best_time() <= bound * (1.0 + GOOD_ENOUGH);
        if done || failures > 40 * stages || !search.goes_on(reserve) {
            return;
        }
        let (mut starts, mut recompute) = (best.starts.clone(), best.recompute.clone());
        let rules = match numbers.below(4) {
            0 => {
                let all = Rules::all(shape.ranks, stages as u32);
                all[numbers.below(all.len())]
            }
            _ => best.rules.unwrap_or(Rules { deepest: true, alternate: false, filling: 0.0, in_flight: 0 }),
        };
        if search.request.memory.is_some() && numbers.below(4) == 0 {
            let stage = numbers.below(stages);
            recompute[stage] = !recompute[stage];
        }
        for _ in 0..=numbers.below(3) {
            move_boundary(&mut starts, &mut numbers);
        }
        failures += 1;
        if step.cut_time(class, &starts) >= best.time {
            continue;
        }
        let choice = Choice { shape: at, starts: &starts, recompute: &recompute };
        if search.search_order(shapes, class, choice, rules, best.time).is_some() {
            failures = 0;
        }
    }
}

/// Moves one boundary by one layer, if both its stages keep a layer.
fn move_boundary(starts: &mut [usize], numbers: &mut Numbers) {
    if starts.len() < 3 {
        return;
    }
    let boundary = 1 + numbers.below(starts.len() - 2);
    let moved = if numbers.below(2) == 0 { starts[boundary] - 1 } else { starts[boundary] + 1 };
    if moved > starts[boundary - 1] && moved < starts[boundary + 1] {
        starts[boundary] = moved;
    }
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
