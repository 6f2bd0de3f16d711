//! The cuts that the search begins with.

use crate::partition::{Method, partition};
use crate::plan::balance::{Layout, Numbers, balanced, even};
use crate::plan::class::{Class, Path};
use crate::plan::cuts::{count_cuts, for_each_cut};
use crate::plan::layers::Layer;
use crate::plan::recut::descended;
use crate::plan::search::Search;
use crate::plan::shape::Shape;

/// The largest number of cuts of an arrangement that are all tried.
pub(super) const ALL_CUTS: u64 = 300;
/// The number of walks and of descents that look for balanced cuts of an arrangement.
const WALKS: u64 = 2;
/// The attempts of a descent.
const DESCENTS: usize = 150;
/// The steps of a walk with given ranks, for each stage.
const WALK_STEPS: usize = 750;
/// The most steps of such a walk.
const MOST_WALK_STEPS: usize = 20_000;
/// Such a walk has at most one step for each this many units of the work that is left.
const WALK_SHARE: u64 = 1_000;
/// The steps of all walks in which rounds may visit the ranks in any order, as a multiple of the steps of one walk with
/// given ranks.
const FREE_STEPS: usize = 12;
/// If there are more than the fewest of them, each has at least so many steps for each ordered pair of stages. Many short
/// walks find better cuts than a few long ones, and the cuts differ more, but a walk over many stages must not end too early.
const FREE_STEPS_OF_PAIR: usize = 10;
/// The fewest and the most of these walks.
const FREE_WALKS: [usize; 2] = [2, 32];

/// A cut of an arrangement, and the bound on its time.
#[derive(Debug, Clone)]
pub(super) struct Cut {
    pub(super) bound: f64,
    /// `None` for a placement in which rounds visit the ranks in any order.
    pub(super) class: Option<Class>,
    pub(super) layout: Layout,
}

/// Returns the cuts to try, the one with the lowest bound first.
pub(super) fn pool(search: &mut Search<'_>, shape: &Shape) -> Vec<Cut> {
    let (step, layers, memory) = (shape.step(), shape.layers.count(), search.request.memory);
    let mut cuts: Vec<Cut> = Vec::new();
    let mut numbers = Numbers(1);
    let affordable = (search.left() / WALK_SHARE) as usize;
    for &class in &shape.classes {
        if !cuts.is_empty() && !search.may_try() {
            break;
        }
        let mut add = |class: Option<Class>, layout: Layout| {
            let bound = step.cut_time(&layout.rank_of, &layout.starts);
            if !cuts.iter().any(|cut| cut.layout == layout) {
                cuts.push(Cut { bound, class, layout });
            }
        };
        let rank_of = class.ranks_of();
        let mut changes = 0;
        let steps = (WALK_STEPS * class.stages()).min(MOST_WALK_STEPS).min(affordable);
        let even = Layout { starts: even(layers, class.stages()), rank_of: rank_of.clone() };
        if search.request.searched && class.chunks > 1 && class.path == Path::Loop {
            let all = FREE_STEPS * steps;
            let [fewest, most] = FREE_WALKS;
            let walks = (all / (FREE_STEPS_OF_PAIR * class.stages().pow(2))).clamp(fewest, most);
            for _ in 0..walks {
                let steps = all / walks;
                add(None, balanced(step, memory, even.clone(), true, &mut numbers, steps, &mut changes));
            }
        }
        if count_cuts(layers, class.stages()) <= ALL_CUTS {
            for_each_cut(layers, class.stages(), &mut |starts| {
                add(Some(class), Layout { starts: starts.to_vec(), rank_of: rank_of.clone() });
            });
        } else {
            for seed in 0..WALKS {
                let starts = descended(step, class, memory, seed, DESCENTS);
                add(Some(class), Layout { starts, rank_of: rank_of.clone() });
                let even = even.clone();
                add(Some(class), balanced(step, memory, even, false, &mut numbers, steps, &mut changes));
            }
            add(Some(class), even);
            if let Some(starts) = cut_by(shape, class.stages(), &Method::Optimal) {
                add(Some(class), Layout { starts, rank_of });
            }
        }
        search.charge_walk(changes, class.chunks);
    }
    cuts.sort_by(|one, other| one.bound.total_cmp(&other.bound));
    cuts
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
