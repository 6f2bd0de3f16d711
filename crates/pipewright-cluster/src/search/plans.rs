//! The search: a quick exploration of the layouts, and a complete one if the first finds no plan.

use pipewright_schedule::words::counted;

use crate::expert_overlap;
use crate::layout::Layout;
use crate::pipeline::{PipelineError, Programs};
use crate::placed::check_pipeline;
use crate::predict::predict_placed;
use crate::search::bound::lower_bound;
use crate::search::error::{SearchError, SearchErrorKind};
use crate::search::explore::{Exploration, MOST_COMPUTATIONS, Pruning, Tried};
use crate::search::found::{ClusterPlan, ClusterReport};
use crate::search::request::{Fixed, Request};
use crate::search::simulate::keep;
use crate::search::{schedules, space};
use crate::size_names::SCHEDULE;
use crate::systems;

/// Finds the fastest layouts that fit into memory.
///
/// # Errors
/// When a number of the request is 0, the given parts of the layout do not fit, no mesh divides the GPUs, or
/// no layout fits into memory. The last error has the layout that needs least, its largest rank and the bytes
/// that are missing.
pub fn search(request: &Request) -> Result<ClusterReport, SearchError> {
    request.check()?;
    let request = &request.with_generator_name()?;
    find_in_both_orders(request, None)
}

/// Like [`search`], but starts from a known layout of the request's GPUs and batch. If the layout fits into
/// memory and the system runs it, the first plan is not slower, even if the search does not try such a layout by itself.
/// A pipeline that is too large to simulate counts with its closed form, as in the search.
///
/// # Errors
/// Like [`search`], unless the known layout fits.
pub fn search_from(request: &Request, known: &Layout) -> Result<ClusterReport, SearchError> {
    request.check()?;
    let request = &request.with_generator_name()?;
    let fits = |plan: &ClusterPlan| {
        request.tightest_rank(&plan.layout, &plan.prediction).missing() <= 0.0 && request.runs(&plan.layout)
    };
    find_in_both_orders(request, plan_of(request, known).filter(fits))
}

/// Returns the plan of a known layout, unless it cannot be predicted. Its pipeline is simulated up to the
/// same size as in the search, so that both times can be compared.
pub(super) fn plan_of(request: &Request, layout: &Layout) -> Option<ClusterPlan> {
    layout.check(&request.model).ok()?;
    check_pipeline(&request.kinds(), layout.pipeline, request.names).ok()?;
    let mut programs = Programs::up_to(MOST_COMPUTATIONS);
    let prediction = predict_placed(&request.placed(layout), &mut programs).ok()?;
    Some(ClusterPlan::new(request, lower_bound(request), layout.clone(), prediction))
}

/// Finds plans with the kinds of machines in the order of the request and in the opposite one. The known plan has the
/// order of the request.
fn find_in_both_orders(request: &Request, known: Option<ClusterPlan>) -> Result<ClusterReport, SearchError> {
    let known_s = known.as_ref().map_or(f64::INFINITY, |plan| plan.prediction.seconds);
    let found = find_plans(request, known);
    if request.further.is_empty() {
        return found;
    }
    let missing = |error: &SearchError| match &error.kind {
        SearchErrorKind::Memory(least) => least.missing(),
        SearchErrorKind::Request | SearchErrorKind::System => f64::INFINITY,
    };
    match (found, find_plans(&request.reversed(), None)) {
        (Ok(found), Ok(other)) => {
            let mut plans = Vec::new();
            found.plans.into_iter().chain(other.plans).for_each(|plan| keep(&mut plans, plan));
            plans.truncate(request.plans);
            // The first kind of one order is the last one of the other.
            let is_worse = other.accuracy.mean > found.accuracy.mean;
            let mut merged = ClusterReport {
                plans,
                preferred: None,
                accuracy: if is_worse { other.accuracy } else { found.accuracy },
                estimated: found.estimated + other.estimated,
                simulated: found.simulated + other.simulated,
                ..found
            };
            merged.prefer_usual(&request.machine, known_s);
            Ok(merged)
        }
        (Ok(found), Err(_)) | (Err(_), Ok(found)) => Ok(found),
        (Err(one), Err(other)) => Err(if missing(&other) < missing(&one) { other } else { one }),
    }
}

/// Finds plans for a request that was checked, and starts from a plan that fits.
fn find_plans(request: &Request, known: Option<ClusterPlan>) -> Result<ClusterReport, SearchError> {
    let shapes = space::shapes(request);
    let quick = Exploration::of(request, &shapes, Pruning::Quick, known, Tried::nothing());
    let tried = match quick.simulate() {
        Ok(found) => return Ok(found),
        Err(tried) => tried,
    };
    // A layout that was left out may fit, and the error has the one that needs least memory.
    let complete = Exploration::of(request, &shapes, Pruning::None, None, *tried);
    complete.simulate().map_err(|tried| match *tried {
        Tried { least: Some(least), .. } => request.lacks_memory(least),
        Tried { failed: Some((schedule, error)), .. } => no_simulation(request, &schedule, &error),
        Tried { least: None, failed: None, .. } => nothing_to_estimate(request, &shapes),
    })
}

/// Returns why the system of a request runs none of its layouts; `None` without a system or a layout.
fn refusal_of_all(request: &Request, shapes: &[Layout]) -> Option<SearchError> {
    let system = request.system?;
    let pipelines = shapes.iter().flat_map(|shape| space::with_pipelines(request, shape));
    let layouts = pipelines.filter(|layout| layout.find_fault(&request.model).is_ok()).flat_map(|layout| {
        let with = |recompute| {
            let mut layout = Layout { recompute, ..layout.clone() };
            layout.implementation.overlaps_experts = request.fixed.overlaps_experts == Some(true);
            layout
        };
        request.recomputes().into_iter().map(with).collect::<Vec<Layout>>()
    });
    let layouts = layouts.flat_map(|layout| {
        let with = |sharding| Layout { sharding, ..layout.clone() };
        request.shardings(&layout).into_iter().map(with).collect::<Vec<Layout>>()
    });
    let reason = systems::refusal_of_all(system, layouts, &request.model)?;
    let [parts, advice] = if request.fixed == Fixed::default() {
        ["", ""]
    } else {
        [" with the given parts", "change a given part of the layout, or "]
    };
    Some(SearchError {
        kind: SearchErrorKind::System,
        reason: format!("{system} runs no plan{parts}: {reason}"),
        advice: format!("{advice}use another system"),
    })
}

/// Returns why the stack of a request overlaps the exchange of experts in none of its layouts; `None` unless the request
/// asks for it.
fn no_overlap(request: &Request, shapes: &[Layout]) -> Option<SearchError> {
    if request.fixed.overlaps_experts != Some(true) {
        return None;
    }
    let stack = request.implementation.stack;
    let mut layouts = shapes.iter().flat_map(|shape| space::with_pipelines(request, shape));
    let why = layouts.find_map(|layout| expert_overlap::fault(&layout, stack, &request.model))?;
    let reason = format!("no plan hides the exchange of experts: the stack `{}` {why}", stack.name());
    Some(SearchError::new(reason, "leave --expert-overlap out, or change a given part of the layout"))
}

/// Says that no pipeline can be simulated, and none fits without a simulation.
fn no_simulation(request: &Request, schedule: &str, error: &PipelineError) -> SearchError {
    let PipelineError::TooLarge { computations } = error else {
        let reason = "no plan can be simulated; the pipeline with the schedule";
        return SearchError::new(format!("{reason} `{schedule}` failed: {error}"), "");
    };
    let other = match request.fixed.schedule {
        Some(_) => format!("leave {} out", request.names.name(SCHEDULE)),
        None => request.names.with_value(SCHEDULE, "1f1b"),
    };
    SearchError::new(
        format!(
            "no plan can be simulated: a pipeline with the schedule {schedule} has {computations} forwards and backwards, \
             which are too many"
        ),
        format!("use fewer microbatches or stages, or {other}"),
    )
}

/// Returns why a request has no layout.
fn nothing_to_estimate(request: &Request, shapes: &[Layout]) -> SearchError {
    if let Err(error) = request.check_given() {
        return error.into();
    }
    if let Some(error) = refusal_of_all(request, shapes).or_else(|| no_overlap(request, shapes)) {
        return error;
    }
    let has_mesh = shapes.iter().any(|shape| !space::pipelines(request, shape).is_empty());
    let (with, other) = request.given_sizes().with_all();
    match &request.fixed.schedule {
        Some(schedule) if has_mesh => SearchError::new(
            format!(
                "no mesh{with} that divides the GPUs and the batch has a plan with {}, whose ranks have {} of at least one \
                 block",
                request.names.with_value(SCHEDULE, schedule),
                schedules::chunks_text(schedule)
            ),
            format!("leave {} out, or change the batch{other}", request.names.name(SCHEDULE)),
        ),
        _ => SearchError::new(
            format!(
                "no mesh{with} divides {} such that its replicas divide {} of a step, it has at most {} and its tensor groups \
                 divide the heads",
                counted(request.gpus, "GPU"),
                counted(request.batch, "row"),
                counted(request.model.blocks.len(), "stage")
            ),
            format!("change the number of GPUs or of rows{other}"),
        ),
    }
}
