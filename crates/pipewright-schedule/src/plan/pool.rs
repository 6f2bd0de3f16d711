//! The cuts that the search begins with.

use crate::ids::Rank;
use crate::partition::{Method, partition};
use crate::placement::Placement;
use crate::plan::balance::{balanced, even};
use crate::plan::class::{Class, Path};
use crate::plan::cuts::{count_cuts, for_each_cut};
use crate::plan::layers::Layer;
use crate::plan::numbers::Numbers;
use crate::plan::placed_cut::{PlacedCut, Swaps, WalkTask};
use crate::plan::recut::descended;
use crate::plan::search::Search;
use crate::plan::shape::Shape;
use crate::plan::tuning;

/// A cut of an arrangement, and the bound on its time.
#[derive(Debug, Clone)]
pub(super) struct PooledCut {
    pub(super) bound: f64,
    /// `None` for a placement in which rounds visit the ranks in any order.
    pub(super) class: Option<Class>,
    pub(super) layout: PlacedCut,
}

/// Returns the cuts to try, the one with the lowest bound first.
pub(super) fn pool(search: &mut Search<'_>, shape: &Shape) -> Vec<PooledCut> {
    let (step, layers, memory) = (shape.step(), shape.layers.count(), shape.memory.as_ref());
    let mut cuts: Vec<PooledCut> = Vec::new();
    let mut numbers = Numbers(1);
    let affordable = (search.left() / tuning::pool::WALK_SHARE) as usize;
    for &class in &shape.classes {
        if !cuts.is_empty() && !search.may_try() {
            break;
        }
        let mut add = |class: Option<Class>, layout: PlacedCut| {
            let bound = step.cut_time(&layout.rank_of, &layout.starts);
            if !cuts.iter().any(|cut| cut.layout == layout) {
                cuts.push(PooledCut { bound, class, layout });
            }
        };
        let rank_of = class.ranks_of();
        let mut changes = 0;
        let steps =
            (tuning::pool::WALK_STEPS * class.stages()).min(tuning::pool::MOST_WALK_STEPS).min(affordable);
        let walk = WalkTask { step, memory, stay: 1.0, swaps: Swaps::None, steps };
        let even = PlacedCut { starts: even(layers, class.stages()), rank_of: rank_of.clone() };
        if class.chunks > 1 && class.path == Path::Loop {
            let all = tuning::pool::FREE_STEPS * steps;
            let [fewest, most] = tuning::pool::FREE_WALKS;
            let walks =
                (all / (tuning::pool::FREE_STEPS_OF_PAIR * class.stages().pow(2))).clamp(fewest, most);
            for _ in 0..walks {
                let walk = WalkTask { swaps: Swaps::Rounds, steps: all / walks, ..walk };
                add(None, balanced(walk, even.clone(), &mut numbers, &mut changes));
            }
        }
        if count_cuts(layers, class.stages()) <= tuning::pool::ALL_CUTS {
            for_each_cut(layers, class.stages(), &mut |starts| {
                add(Some(class), PlacedCut { starts: starts.to_vec(), rank_of: rank_of.clone() });
            });
        } else {
            for seed in 0..tuning::pool::WALKS {
                let starts = descended(step, class, memory, seed);
                add(Some(class), PlacedCut { starts, rank_of: rank_of.clone() });
                add(Some(class), balanced(walk, even.clone(), &mut numbers, &mut changes));
            }
            add(Some(class), even);
            if let Some(starts) = cut_by(shape, class.stages(), &Method::Optimal) {
                add(Some(class), PlacedCut { starts, rank_of });
            }
        }
        search.charge_walk(changes, class.chunks);
    }
    cuts.sort_by(|one, other| one.bound.total_cmp(&other.bound));
    cuts
}

/// Returns the placement of a layout.
pub(super) fn placement(layout: &PlacedCut) -> Placement {
    let ranks = layout.rank_of.iter().copied().map(Rank::new).collect();
    Placement::explicit(ranks).expect("every rank has a stage")
}

/// Returns the cuts that people use: even ones and those by weight.
pub(super) fn usual_cuts(shape: &Shape, stages: usize) -> Vec<Vec<usize>> {
    let by = [Method::Optimal, Method::Even, Method::Weighted];
    let mut cuts = vec![even(shape.layers.count(), stages)];
    for cut in by.iter().filter_map(|method| cut_by(shape, stages, method)) {
        if !cuts.contains(&cut) {
            cuts.push(cut);
        }
    }
    cuts
}

/// Returns the cut into `stages` stages by the work of each layer; `None` if the method finds none.
pub(super) fn cut_by(shape: &Shape, stages: usize, method: &Method) -> Option<Vec<usize>> {
    let layers = shape.layers.count();
    let all = shape.layers.work(0..layers).max(f64::MIN_POSITIVE);
    // Differences of running sums would make equal layers unequal.
    let work = |layer: &Layer| layer.forward + layer.input + layer.weight;
    let weights: Vec<u64> = shape.layers.list.iter().map(|layer| (work(layer) / all * 1e12) as u64).collect();
    let cut = partition(&weights, stages as u32, method).ok()?;
    Some(cut.ranges().map(|range| range.start).chain([layers]).collect())
}
