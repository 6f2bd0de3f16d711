//! Simulates the layouts of an exploration, the fastest estimates first.

use crate::layout::Layout;
use crate::pipeline::{PipelineError, Programs};
use crate::predict::{PredictError, predict_with};
use crate::search::error::LeastMemory;
use crate::search::explore::{Candidate, Exploration, MOST_COMPUTATIONS, Pruning, balanced};
use crate::search::found::{ClusterPlan, Found};

/// The share of its estimate that a simulated step takes at least. The closed form of 1F1B is within a
/// percent of its simulation, unless the stages differ much from each other.
const OPTIMISM: f64 = 0.98;
/// The most layouts that are simulated to find the one that needs least memory.
const LEAST_SIMULATED: usize = 64;

/// The reasons why a search has no plan.
pub(super) struct WithoutPlan {
    /// The layout that needs least memory.
    pub(super) least: Option<LeastMemory>,
    /// The schedule of the first pipeline that cannot be simulated, and the cause.
    pub(super) failed: Option<(String, PipelineError)>,
}

/// The sizes and the schedule in which plans that are returned differ.
type Kind<'a> = (u32, u32, u32, u32, &'a str);

fn kind(layout: &Layout) -> Kind<'_> {
    (layout.tensor, layout.pipeline, layout.context, layout.expert, layout.schedule_name())
}

impl Exploration<'_> {
    /// Simulates candidates in turns: the fastest estimate of each kind, then the second one of each, and so
    /// on.
    pub(super) fn simulate(mut self) -> Result<Found, Box<WithoutPlan>> {
        let kinds = self.by_kind();
        let mut programs = Programs::up_to(MOST_COMPUTATIONS);
        let (mut plans, mut simulated) = (Vec::from_iter(self.known.take()), 0);
        let most = kinds.iter().map(Vec::len).max().unwrap_or(0);
        for turn in 0..most {
            for candidate in kinds.iter().filter_map(|kind| kind.get(turn)) {
                let slowest =
                    plans.get(self.request.plans - 1).map_or(f64::INFINITY, |plan| plan.prediction.seconds);
                let is_enough = simulated >= self.request.simulations && !plans.is_empty();
                if is_enough || candidate.seconds * OPTIMISM > slowest {
                    continue;
                }
                for plan in self.plans_of(&candidate.layout, &mut programs, &mut simulated) {
                    keep(&mut plans, plan);
                }
            }
        }
        if plans.is_empty() && self.pruning == Pruning::None {
            plans = self.simulate_least(&mut programs, &mut simulated);
        }
        if plans.is_empty() {
            return Err(Box::new(WithoutPlan { least: self.least, failed: self.failed }));
        }
        plans.truncate(self.request.plans);
        Ok(Found {
            plans,
            memory_limit: self.limit,
            bound_seconds: self.bound_seconds,
            estimated: self.estimated,
            simulated,
        })
    }

    /// Simulates the layouts that need least by estimates that may be too small, and returns the plans that
    /// fit in spite of them. [`Self::least`] is then simulated, or its estimate is exact.
    fn simulate_least(&mut self, programs: &mut Programs, simulated: &mut usize) -> Vec<ClusterPlan> {
        let mut too_large = std::mem::take(&mut self.too_large);
        too_large.sort_by(|one, other| one.needed.total_cmp(&other.needed));
        let mut plans = Vec::new();
        for candidate in too_large.iter().take(LEAST_SIMULATED) {
            if self.least.as_ref().is_some_and(|least| least.needed() <= candidate.needed) {
                break;
            }
            for plan in self.plans_of(&candidate.layout, programs, simulated) {
                keep(&mut plans, plan);
            }
        }
        plans
    }

    /// Returns the candidates of each kind, the fastest estimates first, and the fastest kinds first.
    fn by_kind(&mut self) -> Vec<Vec<Candidate>> {
        let mut candidates = std::mem::take(&mut self.candidates);
        candidates.sort_by(|one, other| one.seconds.total_cmp(&other.seconds));
        let mut kinds: Vec<Vec<Candidate>> = Vec::new();
        for candidate in candidates {
            match kinds.iter_mut().find(|known| kind(&known[0].layout) == kind(&candidate.layout)) {
                Some(known) => known.push(candidate),
                None => kinds.push(vec![candidate]),
            }
        }
        kinds
    }

    /// Simulates a layout, and returns the plans that fit. After the quick exploration, which only has even
    /// cuts, it is also simulated with its blocks cut by their time.
    fn plans_of(
        &mut self,
        layout: &Layout,
        programs: &mut Programs,
        simulated: &mut usize,
    ) -> Vec<ClusterPlan> {
        let units = self.units(layout);
        let mut layouts = vec![(layout.clone(), units.cut(layout))];
        if self.pruning == Pruning::Quick {
            layouts.extend(balanced(layout, &units));
        }
        let mut plans = Vec::new();
        for (layout, cut) in layouts {
            *simulated += 1;
            let run = |costs: &_| Ok(programs.run(&layout, costs)?);
            match predict_with(&self.setting(&layout), &units, &cut, run) {
                Ok(prediction) if self.fits(&layout, &prediction) => {
                    plans.push(ClusterPlan::new(self.request, self.bound_seconds, layout, prediction));
                }
                Ok(_) | Err(PredictError::Layout(_)) => {}
                Err(PredictError::Pipeline(error)) => self.fails(&layout, error),
            }
        }
        plans
    }
}

/// Adds a plan in the order of time, unless a plan of the same kind is as fast.
fn keep(plans: &mut Vec<ClusterPlan>, plan: ClusterPlan) {
    let seconds = |plan: &ClusterPlan| plan.prediction.seconds;
    if let Some(same) = plans.iter().position(|known| kind(&known.layout) == kind(&plan.layout)) {
        if seconds(&plans[same]) <= seconds(&plan) {
            return;
        }
        plans.remove(same);
    }
    let index = plans.partition_point(|known| seconds(known) <= seconds(&plan));
    plans.insert(index, plan);
}
