//! Estimates all layouts, and simulates the fastest ones that fit.

use crate::layout::{Cut, Layout, Recompute, Sharding};
use crate::memory::{Parameters, state};
use crate::operations::AttentionCount;
use crate::pipeline::Programs;
use crate::predict::{Prediction, predict, predict_with};
use crate::search::bound::lower_bound;
use crate::search::error::{LeastMemory, SearchError};
use crate::search::found::{ClusterPlan, Found};
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

/// Finds the fastest layouts that fit into memory.
///
/// # Errors
/// When a number of the request is 0, the given parts of the layout do not fit, no mesh divides the GPUs, or
/// no layout fits into memory. The last error has the layout that needs least, its largest rank and the bytes
/// that are missing.
pub fn search(request: &Request) -> Result<Found, SearchError> {
    request.check()?;
    let request = &request.with_generator_name()?;
    find_plans(request, None)
}

/// Like [`search`], but starts from a known layout of the request's GPUs and batch. If the layout fits into
/// memory, the search finds no slower plan, also where the search tries no such layout.
///
/// # Errors
/// Like [`search`], unless the known layout fits.
pub fn search_from(request: &Request, known: &Layout) -> Result<Found, SearchError> {
    request.check()?;
    let request = &request.with_generator_name()?;
    let setting = Setting { model: &request.model, layout: known, machine: &request.machine };
    let prediction = predict(&setting, &mut Programs::default()).ok();
    let fitting = prediction.filter(|prediction| prediction.peak_memory() <= request.memory_limit());
    let bound = lower_bound(request);
    find_plans(request, fitting.map(|prediction| ClusterPlan::new(request, bound, known.clone(), prediction)))
}

/// Finds plans for a request that was checked, and starts from a plan that fits.
fn find_plans(request: &Request, known: Option<ClusterPlan>) -> Result<Found, SearchError> {
    let shapes = space::shapes(request);
    let quick = Exploration::of(request, &shapes, Pruning::Quick, known);
    if let Ok(found) = quick.simulate() {
        return Ok(found);
    }
    // A layout that was left out may fit, and the error has the one that needs least memory.
    let complete = Exploration::of(request, &shapes, Pruning::None, None);
    if complete.estimated == 0 {
        return Err(nothing_to_estimate(request, &shapes));
    }
    complete.simulate()
}

/// Returns why a request has no layout.
fn nothing_to_estimate(request: &Request, shapes: &[Layout]) -> SearchError {
    if let Err(error) = request.check_given() {
        return error.into();
    }
    let has_mesh = shapes.iter().any(|shape| !space::pipelines(request, shape).is_empty());
    match &request.fixed.schedule {
        Some(schedule) if has_mesh => no_schedule(schedule),
        _ => SearchError::NoMesh {
            gpus: request.gpus,
            batch: request.batch,
            blocks: request.model.blocks.len(),
            given: request.given_sizes(),
        },
    }
}

/// Returns that a schedule has no plan.
fn no_schedule(schedule: &str) -> SearchError {
    SearchError::Schedule { schedule: schedule.to_owned(), chunks: schedules::chunks_text(schedule) }
}

/// The costs that layouts share which differ only in their pipelines and replicas.
struct Shared {
    recompute: Recompute,
    units: Units,
    total: Unit,
}

/// Returns bytes that the largest rank needs at least: the state of the mean rank, or what the first rank needs
/// for the embedding and as many of the smallest blocks as it has.
fn least_bytes(layout: &Layout, units: &Units, total: &Unit) -> f64 {
    // A tied table may count once only.
    let parameters = Parameters { shared: total.parameters.shared - units.table, ..total.parameters };
    let state = |parameters: Parameters| state(parameters, units.largest_block, layout).state();
    let blocks = f64::from(first_blocks(layout, units.blocks() as u32));
    let smallest = units.smallest_block();
    let first = state(units.embedding.parameters + smallest.parameters * blocks)
        + smallest.activation * blocks * schedules::held(layout, 0);
    state(parameters * (1.0 / f64::from(layout.pipeline))).max(first)
}

/// Returns the blocks of the first rank with an even cut, or one or two fewer.
fn first_blocks(layout: &Layout, blocks: u32) -> u32 {
    let (stages, chunks) = (layout.stages(), layout.chunks);
    if blocks.is_multiple_of(stages) {
        return blocks / stages * chunks;
    }
    // The embedding counts as a block. With several chunks, the rank may also have the head.
    let others = if chunks > 1 { 2 } else { 1 };
    ((blocks + 2) / stages * chunks).saturating_sub(others)
}

/// The layouts that are not estimated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Pruning {
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
struct Exploration<'a> {
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
    least: Option<LeastMemory>,
    estimated: usize,
}

/// The sizes and the schedule in which plans that are returned differ.
type Kind<'a> = (u32, u32, u32, u32, &'a str);

fn kind(layout: &Layout) -> Kind<'_> {
    (layout.tensor, layout.pipeline, layout.context, layout.expert, layout.schedule_name())
}

impl<'a> Exploration<'a> {
    /// Estimates the layouts of all shapes.
    fn of(request: &'a Request, shapes: &[Layout], pruning: Pruning, known: Option<ClusterPlan>) -> Self {
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

    /// Returns whether a prediction fits into memory, and keeps the one that needs least.
    fn fits(&mut self, layout: &Layout, prediction: &Prediction) -> bool {
        let needed = prediction.peak_memory();
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
        needed <= self.limit
    }

    /// Simulates candidates in turns: the fastest estimate of each kind, then the second one of each, and so
    /// on.
    fn simulate(mut self) -> Result<Found, SearchError> {
        let kinds = self.by_kind();
        if !kinds.is_empty() {
            // The memory of estimates may be too small, so only simulations count from here on.
            self.least = None;
        }
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
            (true, None, schedule) => Err(no_schedule(schedule.as_deref().unwrap_or_default())),
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalogue::by_name;
    use crate::hf_config;
    use crate::layout::Precision;

    /// 126 blocks, which few pipelines divide. Activations are the largest part of the memory.
    #[test]
    fn no_estimate_needs_less_than_the_least_bytes() {
        let model =
            hf_config::read(include_str!("../../tests/cluster/llama_405b.json")).expect("a model").model;
        let machine = by_name("h100").expect("a machine");
        let mut request = Request::new(model, machine, 2048, 512, 8192, Precision::Half);
        request.fixed = Fixed { tensor: Some(1), context: Some(1), microbatch: Some(1), ..Fixed::default() };
        let exploration = Exploration::of(&request, &[], Pruning::None, None);
        let mut compared = 0;
        for pipeline in [1, 2, 4, 8, 16, 32, 64, 128] {
            for choice in schedules::choices(pipeline, 126, None, None) {
                let sharding = Sharding::Parameters;
                let schedules::Choice { schedule, chunks } = choice;
                let layout = Layout { pipeline, chunks, schedule, sharding, ..request.smallest_layout() };
                let setting = exploration.setting(&layout);
                let units = Units::of(&setting);
                let run = |costs: &_| Ok(schedules::estimate(&layout, costs));
                let estimate = predict_with(&setting, &units, &units.cut(&layout), run).expect("an estimate");
                let least = least_bytes(&layout, &units, &units.total());
                assert!(
                    least <= estimate.peak_memory(),
                    "{layout:?}: {least} and {}",
                    estimate.peak_memory()
                );
                compared += 1;
            }
        }
        assert!(compared > 50, "{compared}");
    }
}
