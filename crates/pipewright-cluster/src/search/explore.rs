//! Estimates layouts, and simulates the fastest ones that fit.

use crate::layout::{Cut, Layout, Recompute, Sharding};
use crate::operations::AttentionCount;
use crate::pipeline::Programs;
use crate::predict::{Prediction, predict_with};
use crate::search::bound::lower_bound;
use crate::search::error::{LeastMemory, SearchError};
use crate::search::found::{ClusterPlan, Found};
use crate::search::least_bytes::least_bytes;
use crate::search::request::{Fixed, Request};
use crate::search::{schedules, space};
use crate::setting::Setting;
use crate::units::{Unit, Units};

/// Candidates are kept up to this multiple of the fastest estimate, if several plans are sought.
const KEPT: f64 = 1.4;
/// The same if one plan is sought.
const KEPT_FOR_ONE: f64 = 1.1;
/// The share of its estimate that a simulated step takes at least. The closed form of 1F1B is within a percent
/// of its simulation, unless the stages differ much from each other.
const OPTIMISM: f64 = 0.98;
/// The most computations of a pipeline that the search simulates. 1F1B has a closed form above.
pub(super) const MOST_COMPUTATIONS: u64 = 1 << 17;

/// The costs that layouts share which differ only in their pipelines and replicas.
struct Shared {
    recompute: Recompute,
    units: Units,
    total: Unit,
}

/// The layouts that are not estimated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Pruning {
    /// Layouts whose first or mean rank does not fit, or whose computation alone takes longer than an estimate
    /// that fits.
    Quick,
    /// No layouts.
    None,
}

/// A layout that fits by its estimate.
struct Candidate {
    layout: Layout,
    /// The estimated seconds of a step.
    seconds: f64,
}

/// The layouts that were estimated.
pub(super) struct Exploration<'a> {
    request: &'a Request,
    limit: f64,
    bound_seconds: f64,
    /// The operations of the model per token.
    operations: f64,
    pruning: Pruning,
    /// The plan from which the search starts.
    known: Option<ClusterPlan>,
    candidates: Vec<Candidate>,
    /// The seconds of the known plan, or of the fastest estimate whose memory is exact. Others may not fit in
    /// the simulation.
    fastest: f64,
    /// The layout that needs least memory of those that do not fit.
    least: Option<LeastMemory>,
    pub(super) estimated: usize,
}

/// The sizes and the schedule in which plans that are returned differ.
type Kind<'a> = (u32, u32, u32, u32, &'a str);

fn kind(layout: &Layout) -> Kind<'_> {
    (layout.tensor, layout.pipeline, layout.context, layout.expert, layout.schedule_name())
}

impl<'a> Exploration<'a> {
    /// Estimates the layouts of all shapes.
    pub(super) fn of(
        request: &'a Request,
        shapes: &[Layout],
        pruning: Pruning,
        known: Option<ClusterPlan>,
    ) -> Self {
        let fastest = known.as_ref().map_or(f64::INFINITY, |plan| plan.prediction.seconds);
        let mut exploration = Self {
            request,
            limit: request.memory_limit(),
            bound_seconds: lower_bound(request),
            operations: request
                .model
                .operations_per_token(u64::from(request.sequence), AttentionCount::Causal),
            pruning,
            known,
            candidates: Vec::new(),
            fastest,
            least: None,
            estimated: 0,
        };
        shapes.iter().for_each(|shape| exploration.add_shape(shape));
        exploration
    }

    /// The seconds of an estimate above which layouts are left out.
    fn slowest_kept(&self) -> f64 {
        match self.pruning {
            Pruning::Quick if self.request.plans == 1 => self.fastest * KEPT_FOR_ONE,
            Pruning::Quick => self.fastest * KEPT,
            Pruning::None => f64::INFINITY,
        }
    }

    fn setting<'b>(&self, layout: &'b Layout) -> Setting<'b>
    where
        'a: 'b,
    {
        Setting { model: &self.request.model, layout, machine: &self.request.machine }
    }

    fn units(&self, layout: &Layout) -> Units {
        Units::with_operations(&self.setting(layout), self.operations)
    }

    /// Estimates all pipelines of a layout whose pipeline is not chosen.
    fn add_shape(&mut self, shape: &Layout) {
        let pipelines = space::pipelines(self.request, shape);
        if pipelines.is_empty() {
            return;
        }
        let with = |recompute| {
            let layout = Layout { recompute, ..shape.clone() };
            let units = self.units(&layout);
            Shared { recompute, total: units.total(), units }
        };
        // From the fastest and largest to the slowest and smallest.
        let all = [Recompute::None, Recompute::Selective, Recompute::Full];
        let recomputes: Vec<Shared> = all
            .into_iter()
            .filter(|&one| self.request.fixed.recompute.is_none_or(|fixed| fixed == one))
            .map(with)
            .collect();
        let Request { model, fixed, .. } = self.request;
        for pipeline in pipelines {
            let blocks = model.blocks.len() as u32;
            for choice in schedules::choices(pipeline, blocks, fixed.schedule.as_deref(), fixed.chunks) {
                let layout =
                    Layout { pipeline, chunks: choice.chunks, schedule: choice.schedule, ..shape.clone() };
                if schedules::has_size(&layout) {
                    self.add_pipeline(layout, &recomputes);
                }
            }
        }
    }

    /// Estimates a pipeline with each recomputation and sharding, until one fits that is the fastest.
    fn add_pipeline(&mut self, mut layout: Layout, recomputes: &[Shared]) {
        if layout.check(&self.request.model).is_err() {
            return;
        }
        let shardings = self.shardings(&layout);
        for Shared { recompute, units, total } in recomputes {
            layout.recompute = *recompute;
            let work = f64::from(layout.microbatches()) * total.time.total() / f64::from(layout.pipeline);
            if work > self.slowest_kept() {
                return;
            }
            for (index, &sharding) in shardings.iter().enumerate() {
                layout.sharding = sharding;
                if self.pruning == Pruning::Quick && least_bytes(&layout, units, total) > self.limit {
                    continue;
                }
                // A later recomputation or sharding needs less memory and more time.
                if self.estimate(&layout, units) && index == 0 && schedules::is_exact(&layout) {
                    return;
                }
            }
        }
    }

    fn shardings(&self, layout: &Layout) -> Vec<Sharding> {
        match self.request.fixed.sharding {
            Some(given) => vec![given],
            None if layout.replicas() == 1 => vec![Sharding::Replicated],
            None => vec![Sharding::Optimizer, Sharding::Gradients, Sharding::Parameters],
        }
    }

    /// Estimates a layout, and returns whether it fits.
    fn estimate(&mut self, layout: &Layout, units: &Units) -> bool {
        let run = |costs: &_| Ok(schedules::estimate(layout, costs));
        let estimate = predict_with(&self.setting(layout), units, &units.cut(layout), run);
        self.estimated += 1;
        let Ok(estimate) = estimate else { return false };
        let fits = self.fits(layout, &estimate);
        if fits && estimate.seconds <= self.slowest_kept() {
            if schedules::is_exact(layout) {
                self.fastest = self.fastest.min(estimate.seconds);
            }
            self.candidates.push(Candidate { layout: layout.clone(), seconds: estimate.seconds });
        }
        fits
    }

    /// Returns whether a prediction fits into memory. If it does not, it is kept if it needs least so far.
    fn fits(&mut self, layout: &Layout, prediction: &Prediction) -> bool {
        let needed = prediction.peak_memory();
        if needed <= self.limit {
            return true;
        }
        if self.least.as_ref().is_none_or(|least| needed < least.needed()) {
            let rank = prediction.memory.iter().position(|rank| rank.total() == needed).unwrap_or(0);
            self.least = Some(LeastMemory {
                layout: layout.clone(),
                rank,
                memory: prediction.memory[rank],
                limit: self.limit,
                has_given_parts: self.request.fixed != Fixed::default(),
            });
        }
        false
    }

    /// Simulates candidates in turns: the fastest estimate of each kind, then the second one of each, and so
    /// on.
    pub(super) fn simulate(mut self) -> Result<Found, SearchError> {
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
        plans.truncate(self.request.plans);
        match (plans.is_empty(), self.least, &self.request.fixed.schedule) {
            (false, ..) => Ok(Found {
                plans,
                memory_limit: self.limit,
                bound_seconds: self.bound_seconds,
                estimated: self.estimated,
                simulated,
            }),
            (true, Some(least), _) => Err(SearchError::Memory { least: Box::new(least) }),
            (true, None, schedule) => Err(schedules::without_plan(schedule.as_deref().unwrap_or_default())),
        }
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

    /// Simulates a layout with both cuts, and returns the plans that fit.
    fn plans_of(
        &mut self,
        layout: &Layout,
        programs: &mut Programs,
        simulated: &mut usize,
    ) -> Vec<ClusterPlan> {
        let units = self.units(layout);
        let balanced = Layout { cut: Cut::Balanced, ..layout.clone() };
        let [even_cut, balanced_cut] = [layout, &balanced].map(|layout| units.cut(layout));
        let is_other = even_cut != balanced_cut;
        let mut layouts = vec![(layout.clone(), even_cut)];
        if is_other {
            layouts.push((balanced, balanced_cut));
        }
        let mut plans = Vec::new();
        for (layout, cut) in layouts {
            *simulated += 1;
            let run = |costs: &_| Ok(programs.run(&layout, costs)?);
            let run = predict_with(&self.setting(&layout), &units, &cut, run);
            // A schedule that does not exist in this size has no plan.
            let Ok(prediction) = run else { continue };
            if self.fits(&layout, &prediction) {
                plans.push(ClusterPlan::new(self.request, self.bound_seconds, layout, prediction));
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
