//! The named schedules in the search: which of them there are for a shape, and their best cuts.

use std::collections::BTreeMap;
use std::rc::Rc;

use crate::costs::Costs;
use crate::generate::{GenerateError, GenerateErrorKind};
use crate::placement::Placement;
use crate::plan::class::Class;
use crate::plan::cuts::{count_cuts, with_moved};
use crate::plan::evaluate::ranks_of_stages;
use crate::plan::families::Family;
use crate::plan::order::{Order, first_backward};
use crate::plan::placed_cut::PlacedCut;
use crate::plan::pool::{PooledCut, placement, usual_cuts};
use crate::plan::rank_memory::RankMemory;
use crate::plan::recompute::{
    count_choices, every_choice, few_whole_choices, layers_to_fit, stages_to_fit, without_repetitions,
};
use crate::plan::report::PlanSettings;
use crate::plan::search::{Choice, Label, Search};
use crate::plan::shape::Shape;
use crate::plan::stage_load::{engine_costs, stage_loads};
use crate::plan::tuning;
use crate::plan::unlike_pool::{arranged, class_of, every_layout, fastest_first};
use crate::recompute::StageRecompute;

/// The schedule that is tried with every order of unlike ranks.
const PLAIN: &str = "1f1b";

/// A named schedule with its order.
pub(super) struct Named {
    family: Family,
    /// `None` for a placement that is not among the arrangements of the search.
    class: Option<Class>,
    stages: usize,
    /// `None` if the order depends on the costs.
    order: Option<NamedOrder>,
}

/// The order of a schedule.
struct NamedOrder {
    /// With the backwards of the schedule.
    whole: Order,
    /// With the backwards split if another rank waits for their gradient, if all stages run backward.
    split: Rc<Order>,
}

impl NamedOrder {
    fn of(whole: Order) -> Self {
        Self { split: Rc::new(whole.split(0)), whole }
    }

    /// Returns the order for a cut whose stages before `first` run forward only.
    fn split(&self, first: u32) -> Rc<Order> {
        if first == 0 { Rc::clone(&self.split) } else { Rc::new(self.whole.split(first)) }
    }
}

/// Returns the named schedules of a shape, or fewer if the search is stopped. Of further shapes of unlike ranks,
/// there is only 1F1B.
pub(super) fn named(search: &mut Search<'_>, shape: &Shape) -> Vec<Named> {
    let mut named = Vec::new();
    // Other systems are not told which actions overlap.
    let may_overlap = shape.layers.has_exchanges && search.request.system.is_none();
    for family in Family::all(shape.ranks, shape.microbatches, shape.layers.count(), may_overlap) {
        if !search.may_try() {
            break;
        }
        if shape.layers.is_unlike() && search.best.contains_key(PLAIN) && family.name != PLAIN {
            continue;
        }
        // The placement of an order that depends on the costs does not depend on the microbatches.
        let is_made_to_measure = family.is_made_to_measure;
        let sample =
            Family { microbatches: if is_made_to_measure { 1 } else { family.microbatches }, ..family };
        match sample.order(&Costs::default(), shape.layers.has_exchanges) {
            Ok(order) => {
                let class = Class::of(&order.placement);
                let stages = order.placement.stages() as usize;
                let order = (!is_made_to_measure).then(|| NamedOrder::of(order));
                named.push(Named { family, class, stages, order });
            }
            Err(reason) => refuse(search, family.name, reason),
        }
    }
    named
}

/// Records why a schedule cannot run at a size. Most schedules refuse some numbers of stages per rank, so any
/// other reason replaces that one.
fn refuse(search: &mut Search<'_>, name: &'static str, reason: GenerateError) {
    let is_about_stages =
        |reason: &GenerateError| matches!(reason.kind, GenerateErrorKind::StagesPerRank { .. });
    let known = search.refused.get(name);
    if known.is_none_or(|known| is_about_stages(known) && !is_about_stages(&reason)) {
        search.refused.insert(name, reason);
    }
}

/// Simulates the named schedules: all cuts where there are few, otherwise the best cuts of their arrangement;
/// and the usual cuts. These are tried however much work was done, so that no plan is slower than a named
/// schedule.
pub(super) fn try_named(search: &mut Search<'_>, at: usize, cuts: &[PooledCut], named: &[Named]) {
    let layers = search.shapes[at].layers.count();
    let is_unlike = search.shapes[at].layers.is_unlike();
    for it in named {
        let all = !is_unlike && count_cuts(layers, it.stages) <= tuning::pool::ALL_CUTS;
        let own = cuts.iter().filter(|cut| cut.class.is_some() && cut.class == it.class);
        let mut tried: Vec<&[usize]> = Vec::new();
        for (index, cut) in own.enumerate() {
            let is_hopeless = cut.bound >= search.best_time() && index > 0;
            if is_hopeless || (!all && index > 1) {
                continue;
            }
            if !search.may_try() {
                return;
            }
            try_cut(search, at, it, &cut.layout);
            tried.push(&cut.layout.starts);
        }
        if search.shapes[at].layers.is_unlike() {
            if tried.is_empty() {
                try_by_speeds(search, at, it);
            }
            continue;
        }
        for starts in usual_cuts(&search.shapes[at], it.stages) {
            if tried.contains(&starts.as_slice()) {
                continue;
            }
            if !search.may_try() {
                return;
            }
            try_cut(search, at, it, &PlacedCut { starts, rank_of: Vec::new() });
        }
    }
}

/// Simulates a named schedule on unlike ranks, with stages by their speeds.
fn try_by_speeds(search: &mut Search<'_>, at: usize, named: &Named) {
    let step = search.shapes[at].step();
    let layout = named.class.and_then(|class| arranged(step, class, &fastest_first(step)));
    if let Some(layout) = layout.filter(|_| search.may_try()) {
        try_cut(search, at, named, &layout);
    }
}

/// Simulates 1F1B with one stage on each of unlike ranks, with every order of the ranks and every cut that may be
/// better than the best plan, if they are few.
pub(super) fn try_every_layout(search: &mut Search<'_>, at: usize) {
    let shape = &search.shapes[at];
    let has_exchanges = shape.layers.has_exchanges;
    let families = Family::all(shape.ranks, shape.microbatches, shape.ranks as usize, false);
    let plain = |family: &Family| family.name == PLAIN && family.settings == PlanSettings::default();
    let Some(family) = families.into_iter().find(plain) else { return };
    let Ok(order) = family.order(&Costs::default(), has_exchanges) else { return };
    let class = Class::of(&order.placement);
    let named = Named { family, class, stages: shape.ranks as usize, order: Some(NamedOrder::of(order)) };
    for cut in every_layout(shape) {
        if cut.bound >= search.best_time() || !search.may_try() {
            return;
        }
        try_cut(search, at, &named, &cut.layout);
    }
}

/// Simulates a named schedule with a cut, without recomputation and with what it needs to fit. Only on unlike
/// ranks, the layout has the rank of each stage.
fn try_cut(search: &mut Search<'_>, at: usize, named: &Named, layout: &PlacedCut) -> Option<f64> {
    let shape = &search.shapes[at];
    let starts = layout.starts.as_slice();
    let stages = starts.len() - 1;
    let is_unlike = shape.layers.is_unlike();
    let ranks = &layout.rank_of;
    let placement = match (named.class, &named.order) {
        _ if is_unlike => placement(layout),
        (Some(class), _) => class.placement(),
        (None, Some(order)) => order.whole.placement.clone(),
        // Its costs do not depend on the ranks.
        (None, None) => Placement::looped(shape.ranks, 1).ok()?,
    };
    let none = vec![None; stages];
    let label = Label { name: named.family.name, settings: named.family.settings };
    let loads = stage_loads(&shape.layers, &placement, starts, &none);
    let on_ranks = |order: Rc<Order>| if is_unlike { Rc::new(order.on_ranks(ranks)) } else { order };
    let costs = || {
        let costs = engine_costs(&shape.layers, &loads);
        // The schedule has other numbers for unlike ranks.
        if is_unlike { Costs { links: BTreeMap::new(), ..costs } } else { costs }
    };
    let order = match &named.order {
        Some(order) => on_ranks(order.split(first_backward(&loads))),
        None => match named.family.order(&costs(), shape.layers.has_exchanges) {
            Ok(order) => {
                search.charge_made(&order);
                on_ranks(Rc::new(order.split(first_backward(&loads))))
            }
            Err(reason) => {
                refuse(search, named.family.name, reason);
                return None;
            }
        },
    };
    let plain = search.consider(label, &order, Choice { shape: at, starts, recompute: &none });
    let Some(memory) = &shape.memory else { return plain };
    if plain.is_some() || search.never_fits(label.name, &order, &loads, shape.layers.sharding) {
        return plain;
    }
    let mut best: Option<f64> = None;
    for recompute in choices_to_fit(search, shape, starts, &order, memory) {
        let choice = Choice { shape: at, starts, recompute: &recompute };
        if let Some(time) = search.consider(label, &order, choice) {
            best = Some(best.map_or(time, |best| best.min(time)));
        }
    }
    best
}

/// Returns what may be recomputed if an order does not fit without: all choices if there are few. If all stages
/// recompute, that need not take the least memory: a second forward returns an output once more, which is more
/// than it saves if few microbatches are in flight.
fn choices_to_fit(
    search: &Search<'_>,
    shape: &Shape,
    starts: &[usize],
    order: &Order,
    memory: &RankMemory,
) -> Vec<Vec<Option<StageRecompute>>> {
    let (stages, most) = (starts.len() - 1, tuning::search::ALL_CHOICES);
    let is_partial = search.request.recomputes_in_part();
    let counts: Vec<usize> = if is_partial {
        starts.windows(2).map(|range| range[1] - range[0]).collect()
    } else {
        vec![1; stages]
    };
    let mut choices = Vec::new();
    if count_choices(&counts) <= most {
        choices.extend(every_choice(&counts).skip(1));
        if !is_partial || shape.layers.parts_of(0..shape.layers.count()).is_empty() {
            return choices;
        }
    }
    if is_partial {
        choices.push(layers_to_fit(&shape.layers, starts, order, memory));
    }
    choices.push(stages_to_fit(&shape.layers, starts, order, memory));
    choices.push(vec![Some(StageRecompute::WHOLE); stages]);
    choices.extend(few_whole_choices(stages, most).into_iter().skip(1));
    without_repetitions(choices)
}

/// Moves the boundaries of the best named plans, one at a time, as long as that helps and more than
/// `reserve` of the work is left.
pub(super) fn climb_named(search: &mut Search<'_>, at: usize, named: &[Named], reserve: u64) {
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
            let rank_of = ranks_of_stages(&best.order);
            let class = if search.shapes[at].layers.is_unlike() {
                class_of(&rank_of, search.shapes[at].ranks)
            } else {
                Class::of(&best.order.placement)
            };
            let it = named.iter().find(|it| {
                let same = it.family.name == name && it.family.settings == best.settings;
                same && it.class == class
            });
            let Some(it) = it else { break };
            for boundary in 1..best.starts.len() - 1 {
                for up in [false, true] {
                    if search.is_good_enough() || !search.goes_on(reserve) {
                        return;
                    }
                    let Some(starts) = with_moved(&search.best[name].starts, boundary, up) else { continue };
                    let before = search.best[name].time;
                    let layout = PlacedCut { starts, rank_of: rank_of.clone() };
                    improved |= try_cut(search, at, it, &layout).is_some_and(|time| time < before);
                }
            }
        }
    }
}
