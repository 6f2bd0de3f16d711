//! The cuts and placements that the search over unlike ranks begins with.
//!
//! The ranks stand in one of a few orders: by speed, with the fastest ones at one end, at both ends or in the
//! middle, or each next to the one to which it sends fastest. A rank has a part of the layers by its speed, in as
//! many stages as it has layers for. A short walk from there moves boundaries. Long walks from the best of them also
//! exchange ranks, and divide and join stages.

use crate::plan::balance::balanced;
use crate::plan::class::{Class, MAX_CHUNKS, Path};
use crate::plan::cuts::{count_cuts, for_each_cut};
use crate::plan::numbers::Numbers;
use crate::plan::placed_cut::{PlacedCut, Swaps, WalkTask};
use crate::plan::pool::PooledCut;
use crate::plan::rank_times::Step;
use crate::plan::search::Search;
use crate::plan::shape::Shape;
use crate::plan::tuning;
use crate::plan::unlike_walk::time_with_memory;

/// Returns the cuts to try: in turn the most promising ones with regular rounds, and of free walks. The most promising
/// ones have the lowest bound, with second forwards if memory forces them. If memory is limited, this is done for
/// each of several times that microbatches stay in flight.
pub(super) fn unlike_pool(search: &mut Search<'_>, shape: &Shape) -> Vec<PooledCut> {
    let stays = stays(shape);
    let budget = search.left() / tuning::unlike::WALK_SHARE / stays.len() as u64;
    let mut lists: Vec<std::vec::IntoIter<PooledCut>> = Vec::new();
    for &stay in stays {
        let [regular, free] = cuts_for(search, shape, stay, budget);
        lists.extend([free, regular].map(Vec::into_iter));
    }
    let mut cuts: Vec<PooledCut> = Vec::new();
    while lists.iter().any(|list| list.len() > 0) {
        for cut in lists.iter_mut().filter_map(Iterator::next) {
            if !cuts.iter().any(|known| known.layout == cut.layout) {
                cuts.push(cut);
            }
        }
    }
    cuts
}

/// Returns how many times as long as the shortest way microbatches may stay in flight.
pub(super) fn stays(shape: &Shape) -> &'static [f64] {
    let is_limited = shape.layers.is_unlike() && shape.memory.is_some();
    if is_limited { &tuning::unlike::STAYS } else { &[1.0] }
}

/// Returns cuts with regular rounds, and cuts of free walks, the most promising ones first.
fn cuts_for(search: &mut Search<'_>, shape: &Shape, stay: f64, budget: u64) -> [Vec<PooledCut>; 2] {
    let seeds = seeds(shape);
    let mut numbers = Numbers(1);
    let (mut regular, mut free) = (Promising::default(), Promising::default());
    // Returns the steps of each of several walks that share the budget.
    let steps_of = |layout: &PlacedCut, walks: usize, most: usize| {
        let stages = layout.rank_of.len();
        let affordable = budget / walks.max(1) as u64 * tuning::work::WALKED_UNLIKE / stages as u64;
        (most * stages).min(affordable as usize)
    };
    let count = seeds.len();
    for seed in seeds {
        if !regular.cuts.is_empty() && !search.may_try() {
            break;
        }
        let steps = steps_of(&seed, 4 * count, tuning::unlike::FIRST_STEPS);
        let walk = WalkTask { swaps: Swaps::None, ..walk_of(shape, stay, steps) };
        let layout = walked(search, walk, seed.clone(), &mut numbers);
        regular.add(shape, layout, stay);
        regular.add(shape, seed, stay);
    }
    let long_walks = tuning::unlike::LONG_WALKS;
    let best: Vec<PlacedCut> =
        regular.cuts.iter().take(long_walks).map(|(_, cut)| cut.layout.clone()).collect();
    for layout in best {
        if !search.may_try() {
            break;
        }
        let steps = steps_of(&layout, long_walks, tuning::unlike::WALK_STEPS);
        let layout = walked(search, walk_of(shape, stay, steps), layout, &mut numbers);
        free.add(shape, layout, stay);
    }
    [regular, free].map(|list| list.cuts.into_iter().map(|(_, cut)| cut).collect())
}

/// Cuts with estimates of their times, the shortest first.
#[derive(Default)]
struct Promising {
    cuts: Vec<(f64, PooledCut)>,
}

impl Promising {
    fn add(&mut self, shape: &Shape, layout: PlacedCut, stay: f64) {
        if !self.cuts.iter().any(|(_, known)| known.layout == layout) {
            let (time, cut) = (estimate(shape, &layout, stay), pooled(shape, layout));
            let place = self.cuts.partition_point(|&(other, _)| other <= time);
            self.cuts.insert(place, (time, cut));
        }
    }
}

/// Returns the bound of a layout, or the time with the second forwards that memory forces, if that is longer.
pub(super) fn estimate(shape: &Shape, layout: &PlacedCut, stay: f64) -> f64 {
    let bound = shape.step().cut_time(&layout.rank_of, &layout.starts);
    bound.max(time_with_memory(walk_of(shape, stay, 0), layout))
}

/// Returns a layout that a short walk from one stage on each rank finds, to compare divisions.
pub(super) fn quick_layout(search: &mut Search<'_>, shape: &Shape) -> Option<PlacedCut> {
    let seed = seeds(shape).into_iter().next()?;
    let steps = tuning::unlike::QUICK_STEPS * seed.rank_of.len();
    Some(walked(search, walk_of(shape, 1.0, steps), seed, &mut Numbers(1)))
}

/// Returns every order of the ranks with every cut, one stage on each rank, with the lowest bounds first; nothing
/// if there are too many.
pub(super) fn every_layout(shape: &Shape) -> Vec<PooledCut> {
    let (ranks, layers) = (shape.ranks as usize, shape.layers.count());
    let orders = (1..=ranks as u64).fold(1u64, u64::saturating_mul);
    if orders.saturating_mul(count_cuts(layers, ranks)) > tuning::unlike::ALL_LAYOUTS {
        return Vec::new();
    }
    let mut cuts = Vec::new();
    for_each_order(&mut (0..shape.ranks).collect::<Vec<_>>(), 0, &mut |rank_of| {
        for_each_cut(layers, ranks, &mut |starts| {
            let layout = PlacedCut { starts: starts.to_vec(), rank_of: rank_of.to_vec() };
            cuts.push(pooled(shape, layout));
        });
    });
    cuts.sort_by(|one, other| one.bound.total_cmp(&other.bound));
    cuts
}

/// Returns the layout of an arrangement with the ranks in an order, and with stages by the speeds of their ranks;
/// `None` if there are more stages than layers.
pub(super) fn arranged(step: Step<'_>, class: Class, order: &[u32]) -> Option<PlacedCut> {
    let rank_of: Vec<u32> = class.ranks_of().into_iter().map(|place| order[place as usize]).collect();
    let speeds = step.mean_speeds();
    cut_by_shares(step, &rank_of, |rank| speeds[rank as usize])
}

/// Returns the arrangement of a placement, apart from the order of the ranks; `None` if it is none of these.
pub(super) fn class_of(rank_of: &[u32], ranks: u32) -> Option<Class> {
    let chunks = rank_of.len() as u32 / ranks.max(1);
    let classes = [Path::Loop, Path::V].map(|path| Class { ranks, chunks, path });
    let is_alike = |class: &Class| {
        let order = rank_of.get(..ranks as usize).unwrap_or_default();
        class.stages() == rank_of.len()
            && class.ranks_of().iter().zip(rank_of).all(|(&place, &rank)| order[place as usize] == rank)
    };
    classes.into_iter().find(is_alike)
}

/// Returns the order of the ranks of the fastest ones first.
pub(super) fn fastest_first(step: Step<'_>) -> Vec<u32> {
    let speeds = step.mean_speeds();
    let mut order: Vec<u32> = (0..step.ranks).collect();
    order.sort_by(|&one, &other| speeds[other as usize].total_cmp(&speeds[one as usize]));
    order
}

fn pooled(shape: &Shape, layout: PlacedCut) -> PooledCut {
    let bound = shape.step().cut_time(&layout.rank_of, &layout.starts);
    PooledCut { bound, class: class_of(&layout.rank_of, shape.ranks), layout }
}

fn walked(search: &mut Search<'_>, walk: WalkTask<'_>, seed: PlacedCut, numbers: &mut Numbers) -> PlacedCut {
    let mut changes = 0;
    let layout = balanced(walk, seed, numbers, &mut changes);
    search.charge_unlike_walk(changes, layout.rank_of.len());
    layout
}

/// Returns a walk that may change the ranks of stages.
pub(super) fn walk_of(shape: &Shape, stay: f64, steps: usize) -> WalkTask<'_> {
    WalkTask { step: shape.step(), memory: shape.memory.as_ref(), stay, swaps: Swaps::Any, steps }
}

/// Returns the layouts from which the walks start.
fn seeds(shape: &Shape) -> Vec<PlacedCut> {
    let step = shape.step();
    let speeds = step.mean_speeds();
    let all: f64 = speeds.iter().sum();
    let mut seeds: Vec<PlacedCut> = Vec::new();
    for chunks in 1..=MAX_CHUNKS {
        let layers = |rank: u32| speeds[rank as usize] / all * shape.layers.count() as f64;
        let chunks_of = |rank: u32| (layers(rank).round() as u32).clamp(1, chunks);
        for order in orders(step) {
            for path in [Path::Loop, Path::V] {
                let rounds = (0..chunks).flat_map(|round| {
                    let is_back = path == Path::V && round % 2 == 1;
                    let mut round: Vec<u32> =
                        order.iter().copied().filter(|&rank| chunks_of(rank) > round).collect();
                    if is_back {
                        round.reverse();
                    }
                    round
                });
                let rank_of: Vec<u32> = rounds.collect();
                let share = |rank: u32| speeds[rank as usize] / f64::from(chunks_of(rank));
                let seed = cut_by_shares(step, &rank_of, share);
                seeds.extend(seed.filter(|seed| !seeds.contains(seed)));
            }
        }
    }
    seeds
}

/// Cuts the layers so that each stage has a share of the work; `None` if there are more stages than layers.
fn cut_by_shares(step: Step<'_>, rank_of: &[u32], share: impl Fn(u32) -> f64) -> Option<PlacedCut> {
    let (stages, layers) = (rank_of.len(), step.layers.count());
    if stages > layers {
        return None;
    }
    let all: f64 = rank_of.iter().map(|&rank| share(rank)).sum();
    let work = step.layers.work(0..layers);
    let mut starts = vec![0];
    let mut sum = 0.0;
    for (stage, &rank) in rank_of[..stages - 1].iter().enumerate() {
        sum += share(rank) / all * work;
        let before = starts[stage];
        let nearest = (before + 1..layers).find(|&at| step.layers.work(0..at) >= sum).unwrap_or(layers);
        let is_over = nearest > before + 1
            && sum - step.layers.work(0..nearest - 1) < step.layers.work(0..nearest) - sum;
        let nearest = if is_over { nearest - 1 } else { nearest };
        starts.push(nearest.clamp(before + 1, layers - (stages - 1 - stage)));
    }
    starts.push(layers);
    Some(PlacedCut { starts, rank_of: rank_of.to_vec() })
}

/// Returns the orders of the ranks that seeds have.
fn orders(step: Step<'_>) -> Vec<Vec<u32>> {
    let first = fastest_first(step);
    let last: Vec<u32> = first.iter().rev().copied().collect();
    let sides = |order: &[u32]| -> Vec<u32> {
        let even = order.iter().step_by(2).copied();
        even.chain(order.iter().skip(1).step_by(2).rev().copied()).collect()
    };
    let mut orders = vec![first.clone(), last.clone(), sides(&first), sides(&last)];
    if step.layers.network.has_own_links() {
        orders.extend((0..step.ranks).map(|rank| chain(step, rank)).take(tuning::unlike::CHAINS));
    }
    let mut known: Vec<Vec<u32>> = Vec::new();
    orders.retain(|order| {
        let is_new = !known.contains(order);
        known.push(order.clone());
        is_new
    });
    orders
}

/// Returns the ranks from `first` on, each before the one of the others with the shortest way there and back.
fn chain(step: Step<'_>, first: u32) -> Vec<u32> {
    let message = |from: u32, to: u32| {
        let link = step.layers.network.link(from, to);
        link.latency_s + step.layers.smallest_output() as f64 / link.bytes_per_s
    };
    let both = |one: u32, other: u32| message(one, other) + message(other, one);
    let mut order = vec![first];
    let mut left: Vec<u32> = (0..step.ranks).filter(|&rank| rank != first).collect();
    while !left.is_empty() {
        let now = order[order.len() - 1];
        let nearest = (0..left.len())
            .min_by(|&one, &other| both(now, left[one]).total_cmp(&both(now, left[other])))
            .unwrap_or(0);
        order.push(left.remove(nearest));
    }
    order
}

fn for_each_order(order: &mut Vec<u32>, from: usize, visit: &mut dyn FnMut(&[u32])) {
    if from == order.len() {
        visit(order);
        return;
    }
    for at in from..order.len() {
        order.swap(from, at);
        for_each_order(order, from + 1, visit);
        order.swap(from, at);
    }
}
