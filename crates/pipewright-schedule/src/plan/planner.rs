//! The planner: from a profile and a request to the best plans and the proved bound.

use std::iter::repeat;

use crate::generate::{Generator, Setting, catalogue};
use crate::lower::for_training;
use crate::plan::bound::{
    lower_bound, memory_bound, optimizer_bound, reduction_bound, simple_bound, unlike_bound,
};
use crate::plan::explore::{Scouted, explore, scout};
use crate::plan::machines::machine_uses;
use crate::plan::named::try_every_layout;
use crate::plan::order::Order;
use crate::plan::polish::polish;
use crate::plan::predict::{PlanChoice, PredictError, predict_on};
use crate::plan::report::{Outcome, OutcomeKind, Plan, PlanError, PlanReport, SEARCHED};
use crate::plan::request::PlanRequest;
use crate::plan::search::{Candidate, Search};
use crate::plan::shape::Shape;
use crate::plan::stage_load::{StageLoad, stage_loads};
use crate::plan::tuning;
use crate::profile::{MAX_LAYERS, Profile};
use crate::schedule::Schedule;
use crate::words::counted;

/// Searches the best plans. The ranks of unlike replicas are merged ([`Profile::of_replicas`]).
pub(super) fn plan_pipelines(
    profile: &Profile,
    request: &PlanRequest,
    keep_going: &mut dyn FnMut() -> bool,
) -> Result<PlanReport, PlanError> {
    let is_large = request.ranks > tuning::unlike::ALL_SUBSETS;
    let share = if is_large { tuning::unlike::EFFORT_OF_MANY } else { tuning::unlike::EFFORT };
    let of_unlike = |effort: u64| (effort as f64 * share) as u64;
    let effort = if profile.has_unlike_ranks() { of_unlike(request.effort) } else { request.effort };
    let request = &PlanRequest { effort, ..request.clone() };
    let PlanRequest { ranks, microbatches, .. } = *request;
    if ranks == 0 || microbatches == 0 || request.microbatch_rows == 0 {
        let (ranks, microbatches) = (counted(ranks, "rank"), counted(microbatches, "microbatch"));
        return Err(PlanError::Input(format!("{ranks} and {microbatches}; use at least one of both")));
    }
    let most = MAX_LAYERS.saturating_sub(profile.layer_count()).max(1) as u32;
    if let Some(&parts) = request.head_parts.iter().find(|&parts| !(1..=most).contains(parts)) {
        return Err(PlanError::Input(format!(
            "a head in {parts} parts was asked for; use a number from 1 to {most}"
        )));
    }
    let shapes = Shape::all(profile, request);
    if shapes.is_empty() {
        return Err(no_shape(profile, request));
    }
    let shapes = with_room(shapes);
    let mut search = Search::new(request, &shapes, &mut *keep_going);
    let bounds = bounds_of(&mut search);
    search.bound = bounds.iter().copied().fold(f64::INFINITY, f64::min);
    let preferred = preferred(&shapes, &bounds);
    let others = (0..shapes.len()).filter(|at| !preferred.contains(at));
    let others: Vec<usize> = others.collect();
    for at in by_promise(&mut search, &bounds, preferred) {
        if bounds[at] < search.best_time() {
            explore(&mut search, at);
        }
    }
    if profile.has_unlike_ranks() {
        for (at, &bound) in bounds.iter().enumerate() {
            if bound < search.best_time() {
                try_every_layout(&mut search, at);
            }
        }
    }
    // Of a small model, there is time for the other numbers of parts.
    for at in others {
        let may_gain = !search.is_near(search.best_time(), bounds[at]);
        if may_gain && search.goes_on(request.effort / 2) {
            explore(&mut search, at);
        }
    }
    polish(&mut search);
    let mut report = finish(profile, &search)?;
    if profile.has_unlike_ranks() && request.data_parallel == Some(1) {
        report.machines = machine_uses(profile, request, &report.plans[0], keep_going);
    }
    Ok(report)
}

/// Returns why a request has no shape.
pub(super) fn no_shape(profile: &Profile, request: &PlanRequest) -> PlanError {
    let PlanRequest { ranks, microbatches, .. } = *request;
    let (replicas, tensor) = (request.data_parallel.unwrap_or(1), request.tensor_parallel.unwrap_or(1));
    let all_ranks = counted(ranks, "rank");
    PlanError::Input(match replicas.saturating_mul(tensor) {
        _ if tensor > 1 && profile.node.is_none() => format!(
            "{tensor} tensor-parallel ranks were asked for, and the profile has no [node] that they could share; add one, \
             or ask for 1"
        ),
        wanted if wanted == 0 || !ranks.is_multiple_of(wanted) => format!(
            "{} of {} do not divide {all_ranks}; use sizes that do",
            counted(replicas, "replica"),
            counted(tensor, "tensor-parallel rank")
        ),
        _ => format!(
            "there is no plan for {all_ranks}, {} and {}: the ranks of a pipeline are at most the layers, the replicas share \
             the microbatches evenly, tensor-parallel ranks divide the ranks of a node, and a step has no more than about \
             two million computations; use fewer ranks or other microbatches",
            counted(profile.layer_count(), "layer"),
            counted(microbatches, "microbatch")
        ),
    })
}

/// Returns the bounds of all shapes. A simple bound is enough for shapes that it shows to be worse than
/// another one.
fn bounds_of(search: &mut Search<'_>) -> Vec<f64> {
    let (shapes, ranks) = (search.shapes, search.request.ranks as usize);
    let parts = |shape: &Shape| {
        let step = shape.step();
        let total = shape.memory.as_ref().map(|memory| memory.total(shape.ranks));
        let limited = total.map_or(0.0, |memory| memory_bound(step, memory));
        (reduction_bound(step).max(limited), optimizer_bound(step))
    };
    let parts: Vec<(f64, f64)> = shapes.iter().map(parts).collect();
    let with_parts = |at: usize, program: f64| program.max(parts[at].0) + parts[at].1;
    let simple = |at: usize| {
        let shape = &shapes[at];
        let bound = if shape.layers.is_unlike() {
            unlike_bound(shape.step(), shape.memory.as_ref(), shape.has_machines(ranks))
        } else {
            simple_bound(shape.step())
        };
        with_parts(at, bound)
    };
    let mut bounds: Vec<f64> = (0..shapes.len()).map(simple).collect();
    // The bound of all unlike ranks holds for some of them too.
    for at in 0..shapes.len() {
        let is_whole =
            |&other: &usize| shapes[other].has_machines(ranks) && shapes[other].has_all_of(&shapes[at]);
        if let Some(whole) = (0..shapes.len()).find(is_whole) {
            bounds[at] = bounds[at].max(bounds[whole]);
        }
    }
    let mut order: Vec<usize> = (0..shapes.len()).collect();
    order.retain(|&at| !shapes[at].layers.is_unlike());
    order.sort_by(|&one, &other| bounds[one].total_cmp(&bounds[other]));
    let mut smallest = f64::INFINITY;
    for at in order {
        if bounds[at] > smallest * (1.0 + tuning::search::SAME_BOUND) || !search.may_try() {
            break;
        }
        let shape = &shapes[at];
        bounds[at] = with_parts(at, lower_bound(shape.step(), &shape.classes));
        smallest = smallest.min(bounds[at]);
    }
    bounds
}

/// Removes the shapes whose ranks together have too little memory for the parameters, gradients and optimizer
/// state, unless that is true of all shapes.
fn with_room(shapes: Vec<Shape>) -> Vec<Shape> {
    let has_room = |shape: &Shape| {
        let total = shape.memory.as_ref().map(|memory| memory.total(shape.ranks));
        total.is_none_or(|total| shape.fixed_bytes() <= total)
    };
    if shapes.iter().any(has_room) { shapes.into_iter().filter(has_room).collect() } else { shapes }
}

/// Returns, of the shapes that differ only in the parts of the head, the one with the fewest parts whose
/// bound is nearly the lowest.
fn preferred(shapes: &[Shape], bounds: &[f64]) -> Vec<usize> {
    let is_preferred = |&at: &usize| {
        let alike = || (0..shapes.len()).filter(|&other| shapes[other].is_like(&shapes[at]));
        let lowest = alike().map(|other| bounds[other]).fold(f64::INFINITY, f64::min);
        let good = alike().filter(|&other| bounds[other] <= lowest * (1.0 + tuning::search::SAME_BOUND));
        good.min_by_key(|&other| shapes[other].head_parts) == Some(at)
    };
    (0..shapes.len()).filter(is_preferred).collect()
}

/// Returns the shapes in the order in which they are searched. If there are several, one plan of each that
/// may be the best is simulated, and the fastest comes first.
fn by_promise(search: &mut Search<'_>, bounds: &[f64], mut order: Vec<usize>) -> Vec<usize> {
    order.sort_by(|&one, &other| bounds[one].total_cmp(&bounds[other]));
    if order.len() < 2 {
        return order;
    }
    let unknown = Scouted { time: f64::INFINITY, estimate: f64::INFINITY };
    let mut scouted = vec![unknown; search.shapes.len()];
    for &at in &order {
        if bounds[at] < search.best_time() {
            scouted[at] = scout(search, at);
        }
    }
    order.sort_by(|&one, &other| scouted[one].time.total_cmp(&scouted[other].time));
    let fastest = order.first().map_or(f64::INFINITY, |&at| scouted[at].time);
    if !search.shapes[order[0]].layers.is_unlike() || fastest.is_infinite() {
        return order;
    }
    let mut estimated: Vec<usize> =
        order.iter().copied().filter(|&at| scouted[at].time.is_finite()).collect();
    estimated.sort_by(|&one, &other| scouted[one].estimate.total_cmp(&scouted[other].estimate));
    order.retain(|&at| scouted[at].time <= fastest * tuning::unlike::NEAR);
    // In turn the ones with the shortest estimates, and the ones with the fastest plans.
    let mut in_turn: Vec<usize> = Vec::new();
    for (estimated, fast) in estimated.into_iter().zip(order.into_iter().map(Some).chain(repeat(None))) {
        for at in [Some(estimated), fast].into_iter().flatten() {
            if !in_turn.contains(&at) {
                in_turn.push(at);
            }
        }
    }
    in_turn.truncate(tuning::unlike::DIVISIONS);
    in_turn
}

fn finish(profile: &Profile, search: &Search<'_>) -> Result<PlanReport, PlanError> {
    let mut plans = Vec::new();
    for candidate in search.best.values() {
        let made = finished(profile, search.request, &search.shapes[candidate.shape], candidate);
        plans.push(made.map_err(|error| nothing_tried(&error))?);
    }
    plans.sort_by(|one, other| one.step_s.total_cmp(&other.step_s));
    if plans.is_empty() {
        return Err(failure(search));
    }
    let outcomes = outcomes(search);
    plans.truncate(search.request.plans.max(1));
    let (simulated, stopped) = (search.simulated, search.stopped);
    Ok(PlanReport { plans, lower_bound_s: search.bound, outcomes, simulated, stopped, machines: Vec::new() })
}

/// Returns the plan of a candidate. [`predict`] computes its numbers.
fn finished(
    profile: &Profile,
    request: &PlanRequest,
    shape: &Shape,
    candidate: &Candidate,
) -> Result<Plan, PredictError> {
    let loads =
        stage_loads(&shape.layers, &candidate.order.placement, &candidate.starts, &candidate.recompute);
    let schedule = schedule_of(candidate, &loads);
    let boundaries = candidate.starts[1..candidate.starts.len() - 1].to_vec();
    let choice = PlanChoice {
        head_parts: Some(shape.head_parts),
        boundaries,
        // The search may choose recomputation for stages that run forward only, where it has no effect, and
        // more layers than a stage has.
        recompute: loads.iter().map(StageLoad::choice).collect(),
        mesh: shape.mesh,
        microbatch_rows: shape.microbatch_rows,
        state: request.state,
        ..PlanChoice::default()
    };
    let program = for_training(&schedule, &choice.lowering(profile))?;
    let prediction = predict_on(&shape.layers, &schedule, program, &choice)?;
    Ok(Plan {
        name: candidate.name,
        settings: candidate.settings,
        schedule,
        head_parts: shape.head_parts,
        boundaries: choice.boundaries,
        recompute: choice.recompute,
        mesh: choice.mesh,
        machines: shape.machines.clone(),
        batch_shares: Vec::new(),
        collectives: prediction.collectives,
        microbatch_rows: choice.microbatch_rows,
        step_s: prediction.step_s(),
        bubble_fraction: prediction.run.timeline().bubble_fraction(),
        peak_bytes: prediction.peak_bytes,
        stream: None,
    })
}

/// Returns the schedule of a candidate. The search moves computations without regard to the computations that
/// frozen stages drop, so in a searched order these follow at the end.
fn schedule_of(candidate: &Candidate, loads: &[StageLoad]) -> Schedule {
    let order = &candidate.order;
    if candidate.name != SEARCHED {
        return order.schedule();
    }
    let (placement, rows) = (order.placement.clone(), order.rows.clone());
    Order::completed(placement, order.microbatches, rows, loads).schedule()
}

/// Why schedules with slices are not searched.
const SLICED: &str = "it cuts microbatches into slices, whose times are not in a profile; `simulate` compares it with others \
                      at costs of your own";

/// Returns the error of a search whose schedules do not exist at its size.
fn nothing_tried(reason: &dyn std::fmt::Display) -> PlanError {
    PlanError::Input(format!("no schedule was tried: {reason}"))
}

fn failure(search: &Search<'_>) -> PlanError {
    let least = search.shortages.values().min_by_key(|(shortage, _)| shortage.needed);
    match least {
        Some((shortage, plan)) => {
            PlanError::DoesNotFit { plan: plan.clone(), shortage: *shortage, stopped: search.stopped }
        }
        None => match search.refused.values().next() {
            Some(reason) => nothing_tried(&reason.kind),
            None => PlanError::Stopped,
        },
    }
}

fn outcomes(search: &Search<'_>) -> Vec<Outcome> {
    let takes = search.best.values().map(|best| (best.name, OutcomeKind::Takes(best.time)));
    let too_large = search.shortages.iter().map(|(&name, (it, _))| (name, OutcomeKind::TooLarge(*it)));
    let refused =
        search.refused.iter().map(|(&name, why)| (name, OutcomeKind::Refused(why.kind.to_string())));
    let has_slices = |generator: &&Generator| generator.settings.contains(&Setting::Slices);
    let sliced = catalogue()
        .iter()
        .filter(has_slices)
        .map(|generator| (generator.name, OutcomeKind::Refused(SLICED.to_owned())));
    let best = search.best.values().min_by(|one, other| one.time.total_cmp(&other.time));
    let mut outcomes: Vec<Outcome> = Vec::new();
    for (name, result) in takes.chain(too_large).chain(refused).chain(sliced) {
        if !outcomes.iter().any(|known| known.name == name) {
            let mesh = search.best.get(name).map(|own| search.shapes[own.shape].plan_mesh());
            let on_best_mesh_s = best.and_then(|best| search.times.get(&(name, best.shape)).copied());
            outcomes.push(Outcome { name, result, mesh, on_best_mesh_s });
        }
    }
    // Plans on the mesh of the best one come in the order of their times there.
    let rank = |outcome: &Outcome| match &outcome.result {
        OutcomeKind::Takes(time) => (0, outcome.on_best_mesh_s.unwrap_or(*time)),
        OutcomeKind::TooLarge(shortage) => (1, shortage.needed as f64),
        OutcomeKind::Refused(_) => (2, 0.0),
    };
    outcomes.sort_by(|one, other| rank(one).partial_cmp(&rank(other)).unwrap_or(std::cmp::Ordering::Equal));
    outcomes
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use super::*;
    use crate::generate::{ScheduleSpec, generate};
    use crate::plan::change::Change;
    use crate::plan::report::PlanSettings;
    use crate::profile::{LayerProfile, LinkProfile};
    use crate::recompute::StageRecompute;

    /// The search moves boundaries without regard to what the stages recompute.
    #[test]
    fn a_stage_that_lost_layers_recomputes_those_that_it_has() {
        let layer = LayerProfile { forward_s: 1.0, activation_bytes: 10, ..LayerProfile::default() };
        let link = LinkProfile::new(0.0, 1e9);
        let profile = Profile { link, layers: vec![layer; 6], ..Profile::default() };
        let request =
            PlanRequest { ranks: 2, microbatches: 3, data_parallel: Some(1), ..PlanRequest::default() };
        let shapes = Shape::all(&profile, &request);
        let shape = shapes.iter().find(|shape| shape.microbatches == 3).expect("a shape");
        let spec = ScheduleSpec { ranks: 2, microbatches: 3, ..ScheduleSpec::default() };
        let mut order = Order::of(&generate("1f1b", &spec).expect("a schedule")).split(0);
        let mut starts = vec![0, 4, 6];
        let mut recompute = vec![StageRecompute::first(3).map(|it| StageRecompute { keep: 1, ..it }), None];
        let expected = [Some(StageRecompute { keep: 1, ..StageRecompute::WHOLE }), None];
        let shift = Change::Shift { first: 1, last: 1, is_up: false, recomputed: None };
        for _ in 0..2 {
            shift.apply(&mut order, &mut starts, &mut recompute);
            let candidate = Candidate {
                name: SEARCHED,
                settings: PlanSettings::default(),
                order: Rc::new(order.clone()),
                rules: None,
                starts: starts.clone(),
                recompute: recompute.clone(),
                shape: 0,
                time: 0.0,
                peak: 0,
            };
            let plan = finished(&profile, &request, shape, &candidate).expect("a plan");
            assert_eq!(plan.recompute, expected, "{starts:?}");
        }
    }
}
