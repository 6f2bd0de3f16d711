//! Estimates all layouts, and simulates the fastest ones that fit.

use pipewright_schedule::generate::find;

use crate::layout::{Cut, Layout, Recompute, Sharding};
use crate::memory::{Parameters, state};
use crate::pipeline::Programs;
use crate::predict::{Prediction, predict_with};
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
    if let Some(schedule) = &request.fixed.schedule {
        find(schedule)?;
    }
    let mut exploration = Exploration {
        request,
        limit: request.memory_limit(),
        kept: if request.plans == 1 { KEPT_FOR_ONE } else { KEPT },
        skips_large: true,
        candidates: Vec::new(),
        fastest: f64::INFINITY,
        least: None,
        estimated: 0,
    };
    let shapes = space::shapes(request);
    shapes.iter().for_each(|shape| exploration.add_shape(shape));
    if exploration.candidates.is_empty() {
        // All layouts are estimated, to find the one that needs least memory.
        exploration.skips_large = false;
        shapes.iter().for_each(|shape| exploration.add_shape(shape));
    }
    if exploration.estimated == 0 {
        return Err(nothing_to_estimate(request, &shapes));
    }
    exploration.simulate()
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

/// Returns bytes that the largest rank needs at least: the state of the mean rank, and the activations that it
/// holds by its schedule.
fn least_bytes(layout: &Layout, units: &Units, total: &Unit) -> f64 {
    let ranks = f64::from(layout.pipeline);
    // A tied table may count once only.
    let parameters = Parameters { shared: total.parameters.shared - units.table, ..total.parameters };
    let state = state(parameters * (1.0 / ranks), units.largest_block, layout).state();
    state + total.activation / ranks * schedules::held(layout)
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
    /// The multiple of the fastest estimate up to which candidates are kept.
    kept: f64,
    /// Whether layouts are skipped whose mean rank does not fit.
    skips_large: bool,
    candidates: Vec<Candidate>,
    /// The fastest estimate.
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
    fn setting<'b>(&self, layout: &'b Layout) -> Setting<'b>
    where
        'a: 'b,
    {
        Setting { model: &self.request.model, layout, machine: &self.request.machine }
    }

    /// Estimates all pipelines of a layout whose pipeline is not chosen.
    fn add_shape(&mut self, shape: &Layout) {
        let pipelines = space::pipelines(self.request, shape);
        if pipelines.is_empty() {
            return;
        }
        let with = |recompute| {
            let layout = Layout { recompute, ..shape.clone() };
            let units = Units::of(&self.setting(&layout));
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
        let shardings = self.shardings(&layout);
        for Shared { recompute, units, total } in recomputes {
            layout.recompute = *recompute;
            let work = f64::from(layout.microbatches()) * total.time.total() / f64::from(layout.pipeline);
            if work > self.fastest * self.kept || layout.check(&self.request.model).is_err() {
                return;
            }
            for (index, &sharding) in shardings.iter().enumerate() {
                layout.sharding = sharding;
                if self.skips_large && least_bytes(&layout, units, total) > self.limit {
                    continue;
                }
                // A later sharding needs less memory and more time.
                if self.estimate(&layout, units) && index == 0 {
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
        let estimate =
            predict_with(&self.setting(layout), units, |costs| Ok(schedules::estimate(layout, costs)));
        self.estimated += 1;
        let Ok(estimate) = estimate else { return false };
        let fits = self.fits(layout, &estimate);
        if fits && estimate.seconds <= self.fastest * self.kept {
            self.fastest = self.fastest.min(estimate.seconds);
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
            // Only simulations count from here on.
            self.least = None;
        }
        let mut programs = Programs::up_to(MOST_COMPUTATIONS);
        let (mut plans, mut simulated): (Vec<ClusterPlan>, usize) = (Vec::new(), 0);
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
                bound_seconds: lower_bound(self.request),
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
        let units = Units::of(&self.setting(layout));
        let balanced = Layout { cut: Cut::Balanced, ..layout.clone() };
        let mut layouts = vec![layout.clone()];
        if units.cut(layout) != units.cut(&balanced) {
            layouts.push(balanced);
        }
        let mut plans = Vec::new();
        for layout in layouts {
            *simulated += 1;
            let run = predict_with(&self.setting(&layout), &units, |costs| Ok(programs.run(&layout, costs)?));
            // A schedule that does not exist in this size has no plan.
            let Ok(prediction) = run else { continue };
            if self.fits(&layout, &prediction) {
                plans.push(ClusterPlan::new(self.request, layout, prediction));
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
