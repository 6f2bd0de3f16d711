//! The best cut for a given schedule: of all cuts where there are few, otherwise the end of a climb.

use std::collections::BTreeMap;

use crate::ids::StageIndex;
use crate::partition::{Method, partition};
use crate::plan::balance::{balanced, even};
use crate::plan::cuts::{count_cuts, for_each_cut, with_moved};
use crate::plan::evaluate::{Evaluator, ranks_of_stages};
use crate::plan::numbers::Numbers;
use crate::plan::order::{Order, first_backward};
use crate::plan::placed_cut::{PlacedCut, Swaps, WalkTask};
use crate::plan::predict::{PlanChoice, PredictError};
use crate::plan::rank_times::Step;
use crate::plan::search::optimizer_time;
use crate::plan::stage_load::stage_loads;
use crate::plan::tuning;
use crate::profile::Profile;
use crate::recompute::Recompute;
use crate::schedule::Schedule;

/// Returns the first layer of each stage except the first in the fastest cut that is found for `schedule`. A
/// cut is preferred in which each stage has the layers, and the parts of layers, that it is to recompute. The
/// boundaries of `choice` are ignored, and memory is not limited.
///
/// # Errors
/// When there are more stages than layers, or the choice fits neither the schedule nor the nodes.
pub fn best_cut(
    profile: &Profile,
    schedule: &Schedule,
    choice: &PlanChoice,
) -> Result<Vec<usize>, PredictError> {
    let layers = choice.layers(profile, schedule.ranks())?;
    let whole = Order::with_overlaps(schedule, layers.has_exchanges);
    let stages = schedule.placement().stages();
    choice.check_recompute(stages)?;
    partition(&vec![1; layers.count()], stages, &Method::Even)?;
    let stages = stages as usize;
    let mut evaluator = Evaluator::default();
    // The order for each first stage that runs backward.
    let mut orders: BTreeMap<u32, Order> = BTreeMap::new();
    let recompute = Recompute::of_stages(&choice.recompute);
    let mut time = |starts: &[usize]| {
        let range = |stage: StageIndex| starts[stage.index()]..starts[stage.index() + 1];
        let parts_of = |stage| layers.parts_of(range(stage));
        if recompute.beyond_layers(|stage| range(stage).len()).is_some()
            || recompute.parts_beyond(stages as u32, parts_of).is_some()
        {
            return f64::INFINITY;
        }
        let loads = stage_loads(&layers, schedule.placement(), starts, &choice.recompute);
        let first = first_backward(&loads);
        let order = orders.entry(first).or_insert_with(|| whole.split(first));
        let time = evaluator.time(order, &loads, &layers.network).unwrap_or(f64::INFINITY);
        time + optimizer_time(order, &loads)
    };
    let mut best = Best { time: f64::INFINITY, starts: Vec::new() };
    let even = even(layers.count(), stages);
    best.consider(time(&even), &even);
    if count_cuts(layers.count(), stages) <= tuning::best_cut::ALL_CUTS {
        for_each_cut(layers.count(), stages, &mut |starts| {
            best.consider(time(starts), starts);
        });
        return Ok(best.inner());
    }
    let rank_of = ranks_of_stages(&whole);
    // The walk assumes that the first stages of equal ranks are on the ranks of their number.
    let visits_in_order = (0..schedule.ranks()).zip(&rank_of).all(|(rank, &first)| rank == first);
    if visits_in_order || layers.is_unlike() {
        let step = Step::of(&layers, schedule.ranks(), schedule.microbatches());
        let layout = PlacedCut { starts: even, rank_of };
        let steps = tuning::best_cut::WALK_STEPS * stages;
        let walk = WalkTask { step, memory: None, stay: 1.0, swaps: Swaps::None, steps };
        let walked = balanced(walk, layout, &mut Numbers(1), &mut 0).starts;
        best.consider(time(&walked), &walked);
    }
    let mut improved = true;
    while improved {
        improved = false;
        for boundary in 1..stages {
            for up in [false, true] {
                if let Some(starts) = with_moved(&best.starts, boundary, up) {
                    improved |= best.consider(time(&starts), &starts);
                }
            }
        }
    }
    Ok(best.inner())
}

/// The fastest cut so far.
struct Best {
    time: f64,
    starts: Vec<usize>,
}

impl Best {
    /// Keeps a cut if it is faster, and returns whether it is.
    fn consider(&mut self, time: f64, starts: &[usize]) -> bool {
        let is_faster = self.starts.is_empty() || time < self.time;
        if is_faster {
            *self = Self { time, starts: starts.to_vec() };
        }
        is_faster
    }

    /// Returns the first layer of each stage except the first.
    fn inner(&self) -> Vec<usize> {
        self.starts[1..self.starts.len() - 1].to_vec()
    }
}
