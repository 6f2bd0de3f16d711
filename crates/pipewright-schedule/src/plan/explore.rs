//! The phases of the search for one shape.

use std::rc::Rc;

use crate::plan::anneal::anneal;
use crate::plan::balance::even;
use crate::plan::class::Class;
use crate::plan::cuts::count_cuts;
use crate::plan::families::Family;
use crate::plan::greedy::Rules;
use crate::plan::order::Order;
use crate::plan::pool::{ALL_CUTS, Cut, GOOD_ENOUGH, choices, lightest, placement, pool};
use crate::plan::recompute::{ALL_CHOICES, every_choice, to_fit};
use crate::plan::search::{Choice, Label, Search};
use crate::plan::shape::Shape;
use crate::plan::stage_load::{engine_costs, stage_loads};

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
    let budget = search.left();
    first_looks(search, shapes, at, &cuts);
    let named = named(search, &shapes[at]);
    try_named(search, shapes, at, &cuts, &named);
    if search.request.searched {
        try_rules(search, shapes, at, &cuts, bound, budget / 4 * 3);
        anneal(search, shapes, at, &cuts, bound, budget / 20);
    }
    climb_named(search, shapes, at, &named, bound);
}

/// Returns the named schedules of a shape, or those that there was time for.
fn named(search: &mut Search<'_>, shape: &Shape) -> Vec<Named> {
    let mut named = Vec::new();
    for family in Family::all(shape.ranks, shape.microbatches, shape.layers.count()) {
        if !search.goes_on(0) {
            break;
        }
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
