//! The named schedules in the search: which of them there are for a shape, and their best cuts.

use std::rc::Rc;

use crate::generate::{GenerateError, GenerateErrorKind};
use crate::plan::class::Class;
use crate::plan::cuts::{count_cuts, with_moved};
use crate::plan::families::Family;
use crate::plan::order::{Order, first_backward};
use crate::plan::pool::{PooledCut, usual_cuts};
use crate::plan::recompute::{
    count_choices, every_choice, few_whole_choices, layers_to_fit, stages_to_fit, without_repetitions,
};
use crate::plan::search::{Choice, Label, Search};
use crate::plan::shape::Shape;
use crate::plan::stage_load::{engine_costs, stage_loads};
use crate::plan::tuning;
use crate::recompute::StageRecompute;

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

/// Returns the named schedules of a shape, or fewer if the search is stopped.
pub(super) fn named(search: &mut Search<'_>, shape: &Shape) -> Vec<Named> {
    let mut named = Vec::new();
    // Other systems are not told which actions overlap.
    let may_overlap = shape.layers.has_exchanges && search.request.system.is_none();
    for family in Family::all(shape.ranks, shape.microbatches, shape.layers.count(), may_overlap) {
        if !search.may_try() {
            break;
        }
        // The placement of an order that depends on the costs does not depend on the microbatches.
        let is_made_to_measure = family.is_made_to_measure;
        let sample =
            Family { microbatches: if is_made_to_measure { 1 } else { family.microbatches }, ..family };
        match sample.order(&crate::costs::Costs::default(), shape.layers.has_exchanges) {
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
    for it in named {
        let all = count_cuts(layers, it.stages) <= tuning::pool::ALL_CUTS;
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
            try_cut(search, at, it, &cut.layout.starts);
            tried.push(&cut.layout.starts);
        }
        for starts in usual_cuts(&search.shapes[at], it.stages) {
            if tried.contains(&starts.as_slice()) {
                continue;
            }
            if !search.may_try() {
                return;
            }
            try_cut(search, at, it, &starts);
        }
    }
}

/// Simulates a named schedule with a cut, without recomputation and with what it needs to fit.
fn try_cut(search: &mut Search<'_>, at: usize, named: &Named, starts: &[usize]) -> Option<f64> {
    let shape = &search.shapes[at];
    let stages = starts.len() - 1;
    let none = vec![None; stages];
    let label = Label { name: named.family.name, settings: named.family.settings };
    let loads = stage_loads(&shape.layers, starts, &none);
    let order = match &named.order {
        Some(order) => order.split(first_backward(&loads)),
        None => match named.family.order(&engine_costs(&shape.layers, &loads), shape.layers.has_exchanges) {
            Ok(order) => {
                search.charge_made(&order);
                Rc::new(order.split(first_backward(&loads)))
            }
            Err(reason) => {
                refuse(search, named.family.name, reason);
                return None;
            }
        },
    };
    let plain = search.consider(label, &order, Choice { shape: at, starts, recompute: &none });
    let Some(memory) = search.request.memory else { return plain };
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
    memory: u64,
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
            let it = named.iter().find(|it| {
                let same = it.family.name == name && it.family.settings == best.settings;
                same && it.class == Class::of(&best.order.placement)
            });
            let Some(it) = it else { break };
            for boundary in 1..best.starts.len() - 1 {
                for up in [false, true] {
                    if search.is_good_enough() || !search.goes_on(reserve) {
                        return;
                    }
                    let Some(starts) = with_moved(&search.best[name].starts, boundary, up) else { continue };
                    let before = search.best[name].time;
                    improved |= try_cut(search, at, it, &starts).is_some_and(|time| time < before);
                }
            }
        }
    }
}
