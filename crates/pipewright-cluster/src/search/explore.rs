//! Estimates layouts, and keeps the layouts that fit.

use std::collections::{HashMap, HashSet};
use std::ops::Range;

use crate::layout::{Cut, Layout, Recompute, ShardedState};
use crate::pipeline::{PipelineError, Programs, computations};
use crate::placed::Placed;
use crate::predict::{Prediction, RunPipeline};
use crate::search::backward_form::{BackwardForm, backward_form};
use crate::search::bound::lower_bound;
use crate::search::error::LeastMemory;
use crate::search::found::ClusterPlan;
use crate::search::least_bytes::{least_bytes, mean_state};
use crate::search::request::Request;
use crate::search::{schedules, space};
use crate::units::{Unit, Units};
use pipewright_shapes::operations::AttentionCount;

/// Candidates are kept up to this multiple of the fastest estimate, if several plans are sought.
const KEPT: f64 = 1.4;
/// The same if one plan is sought.
const KEPT_FOR_ONE: f64 = 1.1;
/// The most computations of a pipeline that the search simulates. 1F1B has a closed form above.
pub(crate) const MOST_COMPUTATIONS: u64 = 1 << 17;

/// The costs that layouts share which differ only in their pipelines and replicas.
struct Shared {
    recompute: Recompute,
    /// Whether the exchange of experts is hidden behind another microbatch.
    overlaps_experts: bool,
    /// On each kind of machine.
    units: Vec<Units>,
    /// All parts of the model, on the first kind of machine.
    total: Unit,
}

/// The layouts that are not estimated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Pruning {
    /// Layouts whose first or mean rank does not fit, whose computation alone takes longer than an estimate
    /// that fits, that compute more or send more than a layout that fits, or whose blocks are cut by their
    /// time although an even cut does not fit.
    Quick,
    /// No layouts.
    None,
}

/// An estimated layout.
pub(super) struct Candidate {
    pub(super) layout: Layout,
    /// The estimated seconds of a step.
    pub(super) seconds: f64,
    /// The seconds that a step takes at least, however the blocks are cut.
    pub(super) least: f64,
    /// The estimated bytes that the tightest rank lacks, below 0 if it has some left.
    pub(super) missing: f64,
}

/// The facts about layouts without a plan, and the programs of their simulations.
pub(super) struct Tried {
    pub(super) programs: Programs,
    /// The runs of pipelines that were simulated. Layouts that differ in their sharding only share one.
    pub(super) runs: HashMap<Layout, RunPipeline>,
    /// The layouts that were predicted by a simulation, or have one stage. None of them fits.
    pub(super) predicted: HashSet<Layout>,
    /// The pipelines that were simulated.
    pub(super) simulations: usize,
    /// The layout that needs least memory, among layouts that do not fit by a simulation or by an exact estimate.
    pub(super) least: Option<LeastMemory>,
    /// The schedule of the first pipeline that cannot be simulated, and the cause.
    pub(super) failed: Option<(String, PipelineError)>,
}

impl Tried {
    /// Returns that no layout was tried.
    pub(super) fn nothing() -> Self {
        Self {
            programs: Programs::up_to(MOST_COMPUTATIONS),
            runs: HashMap::new(),
            predicted: HashSet::new(),
            simulations: 0,
            least: None,
            failed: None,
        }
    }
}

/// The layouts that were estimated.
pub(super) struct Exploration<'a> {
    pub(super) request: &'a Request,
    pub(super) lower_bound_s: f64,
    /// The operations of the model per token.
    operations: f64,
    pub(super) pruning: Pruning,
    /// The plan from which the search starts.
    pub(super) known: Option<ClusterPlan>,
    pub(super) candidates: Vec<Candidate>,
    /// The seconds of the known plan, or of the fastest estimate whose memory is exact. Others may not fit in
    /// the simulation.
    fastest: f64,
    /// Layouts that do not fit by an estimate that may be too small, unless layouts are left out.
    pub(super) too_large: Vec<Candidate>,
    pub(super) tried: Tried,
    pub(super) estimated: usize,
}

impl<'a> Exploration<'a> {
    /// Estimates the layouts of all shapes.
    pub(super) fn of(
        request: &'a Request,
        shapes: &[Layout],
        pruning: Pruning,
        known: Option<ClusterPlan>,
        tried: Tried,
    ) -> Self {
        let fastest = known.as_ref().map_or(f64::INFINITY, |plan| plan.prediction.seconds);
        let mut exploration = Self {
            request,
            lower_bound_s: lower_bound(request),
            operations: request
                .model
                .operations_per_token(u64::from(request.sequence), AttentionCount::Causal),
            pruning,
            known,
            candidates: Vec::new(),
            fastest,
            too_large: Vec::new(),
            tried,
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

    /// Returns the costs of the model's parts on each kind of machine.
    pub(super) fn units(&self, placed: &Placed<'_>) -> Vec<Units> {
        placed.kinds.iter().map(|setting| Units::with_operations(setting, self.operations)).collect()
    }

    /// Estimates all pipelines of a layout whose pipeline is not chosen.
    fn add_shape(&mut self, shape: &Layout) {
        let layouts = space::with_pipelines(self.request, shape);
        if layouts.is_empty() {
            return;
        }
        let mut all: Vec<Shared> = Vec::new();
        for mut layout in layouts {
            let mut chosen = Vec::new();
            for recompute in self.request.recomputes() {
                layout.recompute = recompute;
                let Some(overlaps_experts) = self.request.overlaps_experts(&layout) else { continue };
                let is_it = |shared: &Shared| {
                    (shared.recompute, shared.overlaps_experts) == (recompute, overlaps_experts)
                };
                chosen.push(all.iter().position(is_it).unwrap_or_else(|| {
                    let mut layout = Layout { recompute, ..shape.clone() };
                    layout.implementation.overlaps_experts = overlaps_experts;
                    let units = self.units(&self.request.placed(&layout));
                    all.push(Shared { recompute, overlaps_experts, total: units[0].total(), units });
                    all.len() - 1
                }));
            }
            let recomputes: Vec<&Shared> = chosen.into_iter().map(|index| &all[index]).collect();
            self.add_pipeline(layout, &recomputes);
        }
    }

    /// Estimates a pipeline with each recomputation and sharding. The quick exploration ends with the first
    /// one that fits if no other can be faster.
    fn add_pipeline(&mut self, mut layout: Layout, recomputes: &[&Shared]) {
        if layout.find_fault(&self.request.model).is_err() {
            return;
        }
        let mut with_shardings = Vec::new();
        for &shared in recomputes {
            layout.recompute = shared.recompute;
            layout.implementation.overlaps_experts = shared.overlaps_experts;
            let shardings = self.shardings(&layout);
            if !shardings.is_empty() {
                with_shardings.push((shared, shardings));
            }
        }
        // A pipeline that the system does not run has no other cause of failure.
        if with_shardings.is_empty() {
            return;
        }
        let computations = computations(&layout);
        if layout.schedule.is_some() && computations > MOST_COMPUTATIONS {
            self.fails(&layout, PipelineError::TooLarge { computations });
            return;
        }
        let is_quick = self.pruning == Pruning::Quick;
        for (Shared { recompute, overlaps_experts, units, total }, shardings) in with_shardings {
            layout.recompute = *recompute;
            layout.implementation.overlaps_experts = *overlaps_experts;
            // Without a sharded optimizer, the sharding that needs most memory is not the fastest.
            let is_ordered = shardings.len() == 1 || shardings[0] != ShardedState::Nothing;
            let work = f64::from(layout.microbatches()) * total.time.total() / f64::from(layout.pipeline);
            // A pipeline is at most as fast as if each of its kinds did its work by its speed.
            let speed = |kind: usize| total.time.total() / units[kind].total().time.total();
            let kinds = self.request.kinds();
            let share = |kind: usize| f64::from(kinds[kind].1) / f64::from(layout.gpus);
            let mean_speed =
                1.0 + (1..units.len()).map(|kind| (speed(kind) - 1.0) * share(kind)).sum::<f64>();
            let least = work / mean_speed;
            if least > self.slowest_kept() {
                return;
            }
            // On several kinds of machines, a part of the way may be faster. Slices of a microbatch are computed on
            // several stages at once.
            let has_way = units.len() == 1 && backward_form(&layout) != BackwardForm::Slices;
            let least = if has_way { least.max(total.time.way()) } else { least };
            let mut cuts = None;
            for (index, sharding) in shardings.into_iter().enumerate() {
                layout.sharding = sharding;
                if is_quick && self.is_too_large(&layout, &units[0], total) {
                    continue;
                }
                for (cut, pipeline) in cuts.get_or_insert_with(|| self.cuts(&layout, units)) {
                    layout.cut = cut.clone();
                    let fits = self.estimate(&layout, units, pipeline, least);
                    // A later recomputation or sharding needs less memory and more time.
                    if is_quick && fits && index == 0 && is_ordered && schedules::is_exact(&layout) {
                        return;
                    }
                    // Only several kinds of machines have another cut here, which is seldom faster.
                    if is_quick && fits {
                        break;
                    }
                }
            }
        }
    }

    /// Returns whether a layout needs too much memory, whatever the blocks of its stages are, or with an even cut if the
    /// machines are of one kind.
    fn is_too_large(&self, layout: &Layout, units: &Units, total: &Unit) -> bool {
        let limit = self.request.mean(|machine| self.request.limit_on(machine));
        if self.request.further.is_empty() {
            least_bytes(layout, units, total) > limit
        } else {
            mean_state(layout, units, total) > limit
        }
    }

    /// Keeps the cause if this is the first pipeline that cannot be simulated.
    pub(super) fn fails(&mut self, layout: &Layout, error: PipelineError) {
        self.tried.failed.get_or_insert_with(|| (layout.schedule_name().to_owned(), error));
    }

    /// Returns the shardings of a layout that the system of the request runs. Replicas that shard nothing are left
    /// out if the system shards the optimizer's state.
    fn shardings(&self, layout: &Layout) -> Vec<ShardedState> {
        let mut all = self.request.shardings(layout);
        if self.request.system.is_some() {
            all.retain(|&sharding| self.request.runs(&Layout { sharding, ..layout.clone() }));
        }
        if all.contains(&ShardedState::Optimizer) {
            all.retain(|&sharding| sharding != ShardedState::Nothing);
        }
        all
    }

    /// Returns the cuts of a layout that are estimated, and its pipeline with each: the given cut, or the even
    /// cut, and in the complete exploration or on several kinds of machines also the cut by time.
    fn cuts(&self, layout: &Layout, units: &[Units]) -> Vec<(Cut, RunPipeline)> {
        let given = self.request.fixed.cut.clone();
        let is_given = given.is_some();
        let even = Layout { cut: given.unwrap_or(Cut::Even), ..layout.clone() };
        let mut layouts = vec![(even.clone(), self.request.placed(&even).cut(units))];
        if (self.pruning == Pruning::None || units.len() > 1) && !is_given {
            layouts.extend(balanced(self.request, &even, units));
        }
        // On several kinds, the even cut is seldom the fastest one.
        if units.len() > 1 {
            layouts.reverse();
        }
        let run = |(layout, cut): (Layout, Vec<Range<usize>>)| {
            let run = |costs: &_| Ok(schedules::estimate(&layout, costs));
            let pipeline = RunPipeline::new(&self.request.placed(&layout), units, cut, run).ok()?;
            Some((layout.cut, pipeline))
        };
        layouts.into_iter().filter_map(run).collect()
    }

    /// Estimates a layout with its cut, and returns whether it fits. `least` is the time of its pipeline with any cut
    /// at least.
    fn estimate(&mut self, layout: &Layout, units: &[Units], pipeline: &RunPipeline, least: f64) -> bool {
        let estimate = pipeline.predict(&self.request.placed(layout), units);
        self.estimated += 1;
        let (seconds, missing) = (estimate.seconds, self.request.tightest_rank(layout, &estimate).missing());
        let least = if layout.stages() == 1 { seconds } else { least };
        let candidate = || Candidate { layout: layout.clone(), seconds, least, missing };
        if schedules::is_exact(layout) && !self.fits(layout, &estimate) {
            return false;
        }
        if missing > 0.0 {
            if self.pruning == Pruning::None {
                self.too_large.push(candidate());
            }
            return false;
        }
        if seconds <= self.slowest_kept() {
            if schedules::is_exact(layout) {
                self.fastest = self.fastest.min(seconds);
            }
            self.candidates.push(candidate());
        }
        true
    }

    /// Returns whether a prediction fits into memory. If it does not, it is kept if it needs least so far.
    pub(super) fn fits(&mut self, layout: &Layout, prediction: &Prediction) -> bool {
        let tightest = self.request.tightest_rank(layout, prediction);
        let fits = tightest.missing() <= 0.0;
        if !fits && self.tried.least.as_ref().is_none_or(|least| tightest.missing() < least.missing()) {
            self.tried.least = Some(tightest.of_layout(layout));
        }
        fits
    }
}

/// Returns a layout with its blocks cut by their time, unless its even cut is the same.
pub(super) fn balanced(
    request: &Request,
    layout: &Layout,
    units: &[Units],
) -> Option<(Layout, Vec<Range<usize>>)> {
    let balanced = Layout { cut: Cut::Balanced, ..layout.clone() };
    let cut = request.placed(&balanced).cut(units);
    (cut != request.placed(layout).cut(units)).then_some((balanced, cut))
}
