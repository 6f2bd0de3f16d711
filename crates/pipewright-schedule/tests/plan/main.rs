//! Tests of the planner: against an enumerator that tries everything, and over random models.

#[expect(dead_code, reason = "the report of the planner uses the other instances")]
mod instances;
mod exchanges;
mod frozen;
mod memory;
mod parts;
mod trying;
mod optimum;
mod unlike;
mod unlike_replicas;

use std::env::var_os;
use std::ops::Range;

use instances::{Instance, Numbers, block};
use pipewright_schedule::partition::{Method, partition};
use pipewright_schedule::plan::{
    OutcomeKind, Plan, PlanChoice, PlanError, PlanReport, PlanRequest, Prediction, best_cut, plan, predict,
};
use pipewright_schedule::profile::{LinkProfile, NodeProfile, Profile};
use pipewright_schedule::recompute::StageRecompute;
use pipewright_schedule::{ActionKind, Rank, Schedule, ScheduleSpec, generate};
use trying::{by_trying, by_trying_all_sizes, every_cut, every_spec, first_layers};

/// Returns the seeds of the instances that a test compares, from `first` on: a third of `count`, or all with
/// `PIPEWRIGHT_LONG_TESTS`, as in `.ci/run nightly`.
fn seeds(first: u64, count: u64) -> Range<u64> {
    let count = if var_os("PIPEWRIGHT_LONG_TESTS").is_some() { count } else { count.div_ceil(3) };
    first..first + count
}

fn request(instance: &Instance, memory: Option<u64>) -> PlanRequest {
    PlanRequest {
        ranks: instance.ranks,
        microbatches: instance.microbatches,
        data_parallel: Some(1),
        larger_microbatches: false,
        memory,
        ..PlanRequest::default()
    }
}

/// Returns a request for the best named schedule: without work, there are no searched orders.
fn named_only(instance: &Instance, memory: Option<u64>) -> PlanRequest {
    PlanRequest { effort: 0, ..request(instance, memory) }
}

/// Returns a model of a few layers with random costs.
fn small(seed: u64) -> Instance {
    let mut numbers = Numbers(seed);
    let count = numbers.between(3, 10);
    let layers = (0..count).map(|_| block("layer", 0.3 + 2.0 * numbers.share())).collect();
    let link = LinkProfile::new(1e-5 * numbers.share(), 1e10);
    let profile = Profile { link, layers, ..Profile::default() };
    let ranks = numbers.between(1, 3) as u32;
    Instance { what: "small", profile, ranks, microbatches: numbers.between(1, 6) as u32 }
}

fn predicted(
    profile: &Profile,
    schedule: &Schedule,
    boundaries: &[usize],
    recompute: Vec<Option<StageRecompute>>,
) -> Prediction {
    let choice = PlanChoice { boundaries: boundaries.to_vec(), recompute, ..PlanChoice::default() };
    predict(profile, schedule, &choice).expect("a sound schedule")
}

/// Checks the plan for one replica and microbatches of one row against all named schedules.
fn check_against_trying(seed: u64, memory: Option<u64>) {
    let instance = small(seed);
    if instance.ranks as usize > instance.profile.layers.len() {
        return;
    }
    let best = by_trying(&instance, memory, &PlanChoice::default(), false);
    let request = PlanRequest { partial_recompute: false, ..named_only(&instance, memory) };
    check_against(best, &instance, &request, seed);
    // There are many choices of layers.
    if memory.is_some() && instance.profile.layers.len() < 7 {
        check_partial(best, &instance, memory, seed);
    }
}

/// Checks the plan that may recompute parts of stages against all named schedules that do. `whole` is the time
/// of the best one that does not. The model has so few layers that the planner tries all choices of them.
fn check_partial(whole: f64, instance: &Instance, memory: Option<u64>, seed: u64) {
    let best = by_trying(instance, memory, &PlanChoice::default(), true);
    assert!(best <= whole, "seed {seed}: {best} and {whole}");
    let request = named_only(instance, memory);
    assert!(request.partial_recompute);
    check_against(best, instance, &request, seed);
    if let Ok(report) = plan(&instance.profile, &request, &mut || true) {
        check_plan(instance, &report.plans[0], memory);
    }
}

/// Checks a plan against the time of the best named schedule.
fn check_against(best: f64, instance: &Instance, request: &PlanRequest, seed: u64) {
    match plan(&instance.profile, request, &mut || true) {
        Ok(report) => {
            let found = report.plans[0].step_s;
            assert!((found - best).abs() <= 1e-12 * best, "seed {seed}: {found} instead of {best}");
            assert!(
                report.lower_bound_s <= best,
                "seed {seed}: the bound {} of {best}",
                report.lower_bound_s
            );
        }
        Err(PlanError::DoesNotFit { .. }) => {
            assert!(best.is_infinite(), "seed {seed}: a plan of {best} fits");
        }
        Err(error) => assert!(best.is_infinite(), "seed {seed}: {error}"),
    }
    let searched = PlanRequest { effort: PlanRequest::EFFORT, ..request.clone() };
    if let Ok(report) = plan(&instance.profile, &searched, &mut || true) {
        assert!(report.plans[0].step_s <= best * (1.0 + 1e-12), "seed {seed}: a searched plan is worse");
        assert!(report.lower_bound_s <= report.plans[0].step_s, "seed {seed}");
    }
}

#[test]
fn small_plans_are_the_best_of_all() {
    for seed in seeds(0, 25) {
        check_against_trying(seed, None);
    }
}

#[test]
fn small_plans_of_any_size_are_the_best_of_all() {
    let mut replicated = 0;
    let seeds = seeds(200, 24);
    let instances = seeds.end - seeds.start;
    for seed in seeds {
        let mut instance = small(seed);
        // Replicas sum their gradients, over links that are slow for some.
        instance.profile.link.bytes_per_s = 10f64.powi(9 + (seed % 3) as i32);
        instance.ranks = 2 + (seed % 2) as u32;
        instance.microbatches = [2, 3, 4, 6][seed as usize / 2 % 4];
        let memory = (seed % 5 == 0).then_some(120_000_000);
        let (best, data_parallel) = by_trying_all_sizes(&instance, memory, false);
        let of_any_size = PlanRequest {
            data_parallel: None,
            larger_microbatches: true,
            partial_recompute: false,
            ..named_only(&instance, memory)
        };
        check_against(best, &instance, &of_any_size, seed);
        if memory.is_some() && instance.profile.layers.len() < 7 {
            let (best, _) = by_trying_all_sizes(&instance, memory, true);
            let in_part = PlanRequest { partial_recompute: true, ..of_any_size };
            check_against(best, &instance, &in_part, seed);
        }
        replicated += u64::from(data_parallel > 1);
    }
    let eighth = instances / 8;
    let some = eighth..instances - eighth;
    assert!(some.contains(&replicated), "{replicated} of {instances} with replicas");
}

#[test]
fn small_plans_in_little_memory_are_the_best_of_all() {
    for seed in seeds(100, 8) {
        check_against_trying(seed, Some(70_000_000));
    }
}

/// There are too many choices of layers to try them all, but all choices of whole stages are tried.
#[test]
fn parts_of_stages_are_never_slower_than_whole_stages() {
    let mut faster = 0;
    for seed in 400..404 {
        let mut numbers = Numbers(seed);
        let layers = (0..16 + seed % 3).map(|_| block("layer", 0.3 + 2.0 * numbers.share())).collect();
        let profile = Profile { layers, ..small(seed).profile };
        let instance = Instance { what: "deep", profile, ranks: 2 + (seed % 2) as u32, microbatches: 4 };
        let plain = plan(&instance.profile, &named_only(&instance, None), &mut || true).expect("a plan");
        let peak = plain.plans[0].peak_bytes.iter().max().expect("a rank");
        for tenths in [6, 8] {
            let request = named_only(&instance, Some(peak / 10 * tenths));
            let whole = PlanRequest { partial_recompute: false, ..request.clone() };
            let Ok(whole) = plan(&instance.profile, &whole, &mut || true) else { continue };
            let partial = plan(&instance.profile, &request, &mut || true).expect("a plan");
            let (found, whole) = (partial.plans[0].step_s, whole.plans[0].step_s);
            assert!(found <= whole * (1.0 + 1e-12), "seed {seed}, {tenths}: {found} and {whole}");
            faster += u32::from(found < whole * 0.999);
        }
    }
    assert!(faster > 0, "parts of stages never help");
}

/// A cut is found in which the stages have the layers that they are to recompute, and its time counts the
/// microbatches that keep their activations.
#[test]
fn the_best_cut_has_the_layers_that_are_recomputed() {
    for seed in 0..10 {
        let instance = small(seed);
        let (layers, ranks) = (instance.profile.layers.len(), instance.ranks as usize);
        let most = layers + 1 - ranks.min(layers);
        let spec = ScheduleSpec {
            ranks: instance.ranks,
            microbatches: instance.microbatches,
            ..ScheduleSpec::default()
        };
        let schedule = generate("gpipe", &spec).expect("a schedule");
        let first = StageRecompute { keep: 1, ..first_layers(most, layers + 1).expect("a layer") };
        let mut recompute = vec![None; ranks];
        recompute[0] = Some(first);
        let choice = PlanChoice { recompute: recompute.clone(), ..PlanChoice::default() };
        let Ok(found) = best_cut(&instance.profile, &schedule, &choice) else {
            assert!(ranks > layers, "seed {seed}: no cut of {layers} layers");
            continue;
        };
        let time = |cut: &[usize]| {
            let choice = PlanChoice { boundaries: cut.to_vec(), ..choice.clone() };
            predict(&instance.profile, &schedule, &choice).map_or(f64::INFINITY, |found| found.step_s())
        };
        let best = every_cut(layers, ranks).iter().map(|cut| time(cut)).fold(f64::INFINITY, f64::min);
        assert!(best.is_finite() && time(&found) == best, "seed {seed}: {found:?}");
    }
}

fn check_plan(instance: &Instance, plan: &Plan, memory: Option<u64>) {
    let prediction = predicted(&instance.profile, &plan.schedule, &plan.boundaries, plan.recompute.clone());
    assert_eq!((prediction.step_s(), &prediction.peak_bytes), (plan.step_s, &plan.peak_bytes));
    if let Some(memory) = memory {
        assert!(plan.peak_bytes.iter().all(|&peak| peak <= memory), "{}: {:?}", plan.name, plan.peak_bytes);
    }
}

#[test]
fn plans_of_random_models_are_sound_and_near_the_bound() {
    let mut gaps = Vec::new();
    for seed in seeds(0, 8) {
        let instance = instances::random(seed);
        let request = PlanRequest { effort: 1_000_000, ..request(&instance, None) };
        let report = plan(&instance.profile, &request, &mut || true).expect("a plan");
        assert_eq!(plan(&instance.profile, &request, &mut || true).as_ref(), Ok(&report), "seed {seed}");
        for plan in &report.plans {
            check_plan(&instance, plan, None);
        }
        assert!(report.lower_bound_s <= report.plans[0].step_s);
        gaps.push(report.gap());
    }
    gaps.sort_by(f64::total_cmp);
    assert!(gaps[gaps.len() / 2] < 0.08, "{gaps:?}");
}

#[test]
fn plans_keep_to_the_memory() {
    for seed in seeds(0, 6) {
        let instance = Instance { microbatches: 24, ..instances::random(seed) };
        let of = |memory| PlanRequest { effort: 600_000, ..request(&instance, memory) };
        let free = plan(&instance.profile, &of(None), &mut || true).expect("a plan");
        let most = free.plans[0].peak_bytes.iter().copied().max().expect("a rank");
        let memory = most / 2;
        match plan(&instance.profile, &of(Some(memory)), &mut || true) {
            Ok(report) => report.plans.iter().for_each(|plan| check_plan(&instance, plan, Some(memory))),
            Err(PlanError::DoesNotFit { shortage, .. }) => assert!(shortage.needed > memory),
            Err(error) => panic!("{error}"),
        }
    }
}

/// A search that is stopped has a plan and a sound bound, however early that happens.
#[test]
fn a_search_may_be_stopped_at_any_time() {
    for seed in 0..2 {
        let instance = instances::random(seed);
        let request = PlanRequest { effort: 100_000, ..request(&instance, None) };
        let whole = plan(&instance.profile, &request, &mut || true).expect("a plan");
        for calls in [0, 1, 2, 4, 8, 32] {
            let mut left = calls;
            let mut keep_going = || {
                left -= i32::from(left > 0);
                left > 0
            };
            let report = plan(&instance.profile, &request, &mut keep_going).expect("a plan");
            check_plan(&instance, &report.plans[0], None);
            assert!(
                report.stopped && report.lower_bound_s <= whole.lower_bound_s,
                "seed {seed}, {calls} calls"
            );
            assert!(report.plans[0].step_s >= whole.plans[0].step_s, "seed {seed}, {calls} calls");
        }
        let request = PlanRequest { memory: Some(1_000_000), ..request };
        let error = plan(&instance.profile, &request, &mut || false).expect_err("a megabyte is too little");
        assert_eq!(error, PlanError::Stopped, "seed {seed}");
    }
}

#[test]
fn what_does_not_fit_is_said() {
    let instance = small(1);
    let error = plan(&instance.profile, &request(&instance, Some(1_000_000)), &mut || true);
    let message = error.expect_err("a megabyte is too little").to_string();
    assert!(message.starts_with("no plan fits: rank "), "{message}");
    assert!(message.contains(" and has 1000000, which is "), "{message}");
}

#[test]
fn the_search_stops_when_told() {
    let instance = instances::random(0);
    let mut asked = 0;
    let mut keep_going = || {
        asked += 1;
        asked < 20
    };
    let report = plan(&instance.profile, &request(&instance, None), &mut keep_going).expect("a plan");
    assert!(report.stopped && report.simulated <= 20, "{} plans", report.simulated);
}

#[test]
fn replicas_are_searched() {
    // Gradients so small that replicas cost nothing, and too few microbatches to fill a pipeline.
    let layers = (0..4)
        .map(|_| {
            let mut layer = block("layer", 1.0);
            layer.parameter_bytes = 1;
            layer
        })
        .collect();
    let link = LinkProfile::new(1e-6, 1e12);
    let profile = Profile { link, layers, ..Profile::default() };
    let request = PlanRequest { ranks: 4, microbatches: 4, ..PlanRequest::default() };
    let report = plan(&profile, &request, &mut || true).expect("a plan");
    assert_eq!(report.plans[0].mesh.data, 4, "{:?}", report.plans[0]);
}

#[test]
fn the_best_cut_of_a_schedule_is_found() {
    for seed in 0..20 {
        let instance = small(seed);
        let (layers, ranks) = (instance.profile.layers.len(), instance.ranks);
        let spec = ScheduleSpec { ranks, microbatches: instance.microbatches, ..ScheduleSpec::default() };
        let schedule = generate("zb-h1", &spec).expect("a schedule");
        let recompute = vec![None; ranks as usize];
        let choice = PlanChoice { recompute: recompute.clone(), ..PlanChoice::default() };
        let found = best_cut(&instance.profile, &schedule, &choice);
        let found = found.unwrap_or_else(|error| panic!("seed {seed}, {layers} layers: {error}"));
        let time = |cut: &[usize]| predicted(&instance.profile, &schedule, cut, recompute.clone()).step_s();
        let best =
            every_cut(layers, ranks as usize).iter().map(|cut| time(cut)).fold(f64::INFINITY, f64::min);
        assert_eq!(time(&found), best, "seed {seed}");
    }
}

/// Layers that are equal make cuts that differ only in which stages are longer.
#[test]
fn no_named_schedule_with_a_usual_cut_is_faster() {
    for seed in [13, 17] {
        let instance = instances::random(seed);
        let request = named_only(&instance, None);
        let planned = plan(&instance.profile, &request, &mut || true).expect("a plan").plans[0].step_s;
        let weights = vec![1; instance.profile.layers.len()];
        for (name, is_made_to_measure, spec) in every_spec(&instance) {
            let Ok(schedule) = generate(name, &spec) else { continue };
            let stages = schedule.placement().stages();
            for method in [Method::Even, Method::Optimal] {
                let Ok(cut) = partition(&weights, stages, &method) else { continue };
                if is_made_to_measure {
                    continue;
                }
                let boundaries: Vec<usize> = cut.ranges().skip(1).map(|range| range.start).collect();
                let none = vec![None; stages as usize];
                let time = predicted(&instance.profile, &schedule, &boundaries, none).step_s();
                assert!(
                    planned <= time * (1.0 + 1e-12),
                    "seed {seed}: {name} takes {time}, the plan {planned}"
                );
            }
        }
    }
}

/// Under 1F1B the last stage runs each backward right after its forward, so it computes nothing again.
#[test]
fn recomputation_costs_what_it_costs_in_training() {
    let layers = vec![block("layer", 1.0); 6];
    let profile = Profile { link: LinkProfile::new(0.0, 1e12), layers, ..Profile::default() };
    let spec = ScheduleSpec { ranks: 2, microbatches: 4, ..ScheduleSpec::default() };
    let schedule = generate("1f1b", &spec).expect("a schedule");
    let of = |layers: [usize; 2]| {
        let recompute = layers.map(|layers| first_layers(layers, 3));
        predicted(&profile, &schedule, &[3], recompute.to_vec())
    };
    let [none, last, all, part] = [[0, 0], [0, 3], [3, 3], [2, 0]].map(of);
    assert_eq!((last.step_s(), &last.peak_bytes), (none.step_s(), &none.peak_bytes));
    assert!(all.step_s() > none.step_s() && all.peak_bytes[0] < none.peak_bytes[0], "{:?}", all.peak_bytes);
    assert_eq!(all.peak_bytes[1], none.peak_bytes[1]);
    assert!(all.step_s() > part.step_s() && part.step_s() > none.step_s(), "{}", part.step_s());
    assert!(all.peak_bytes[0] < part.peak_bytes[0] && part.peak_bytes[0] < none.peak_bytes[0]);
    let second_forwards = |prediction: &Prediction, rank| {
        let events = prediction.run.timeline().events_of(Rank::new(rank));
        events.iter().filter(|event| event.action.kind() == ActionKind::Forward).count() - 4
    };
    assert_eq!((second_forwards(&all, 0), second_forwards(&all, 1)), (4, 0));
}

/// Returns an instance whose ranks are on nodes.
fn on_nodes(seed: u64) -> Instance {
    let mut instance = small(seed);
    let mut numbers = Numbers(seed ^ 0x5eed);
    for layer in &mut instance.profile.layers {
        layer.optimizer_s = 0.1 * numbers.share();
    }
    instance.ranks = 4 * numbers.between(1, 2) as u32;
    instance.microbatches = 8;
    let node = NodeProfile {
        ranks: [2, 4][numbers.between(0, 1) as usize],
        latency_s: 1e-6,
        bytes_per_s: 1e10 + 1e11 * numbers.share(),
    };
    instance.profile.node = Some(node);
    instance
}

#[test]
fn plans_on_nodes_keep_the_bound_and_the_memory() {
    for seed in seeds(0, 6) {
        let instance = on_nodes(seed);
        let request = PlanRequest {
            data_parallel: None,
            larger_microbatches: true,
            effort: 200_000,
            plans: usize::MAX,
            ..request(&instance, None)
        };
        let free = plan(&instance.profile, &request, &mut || true).expect("a plan");
        let of_best = free.plans[0].peak_bytes.iter().max().copied();
        let memory = of_best.map(|peak| peak - peak / 8);
        let limited = plan(&instance.profile, &PlanRequest { memory, ..request }, &mut || true);
        let bounded = |report: &PlanReport| {
            let fastest = report.plans.iter().map(|plan| plan.step_s).fold(f64::INFINITY, f64::min);
            assert!(
                report.lower_bound_s <= fastest * (1.0 + 1e-9),
                "seed {seed}: {} {fastest}",
                report.lower_bound_s
            );
        };
        bounded(&free);
        let Ok(limited) = limited else { continue };
        bounded(&limited);
        let mut peaks = limited.plans.iter().flat_map(|plan| &plan.peak_bytes);
        assert!(peaks.all(|&peak| Some(peak) <= memory), "seed {seed}");
    }
}

#[test]
fn a_plan_says_why_a_schedule_was_not_tried() {
    let layers = vec![block("layer", 1.0); 12];
    let profile = Profile { link: LinkProfile::new(1e-6, 1e12), layers, ..Profile::default() };
    let request =
        PlanRequest { ranks: 3, microbatches: 4, larger_microbatches: false, ..PlanRequest::default() };
    let report =
        plan(&profile, &PlanRequest { data_parallel: Some(1), effort: 100_000, ..request }, &mut || true);
    let outcomes = report.expect("a plan").outcomes;
    let reason = |name: &str| {
        let outcome = outcomes.iter().find(|outcome| outcome.name == name).expect("every schedule is listed");
        match &outcome.result {
            OutcomeKind::Refused(reason) => reason.clone(),
            other => panic!("{name}: {other:?}"),
        }
    };
    // Not that it has two stages per rank, which is tried.
    assert_eq!(reason("dualpipev"), "`dualpipev` needs at least as many microbatches as its 6 stages, not 4");
    assert!(reason("seq1f1b").starts_with("it cuts microbatches into slices"), "{}", reason("seq1f1b"));
}

#[test]
fn impossible_requests_are_refused() {
    let instance = small(1);
    let of = |change: &dyn Fn(&mut PlanRequest)| {
        let mut request = request(&instance, None);
        change(&mut request);
        plan(&instance.profile, &request, &mut || true).expect_err("impossible").to_string()
    };
    assert!(of(&|request| request.ranks = 0).starts_with("0 ranks and "));
    assert!(of(&|request| request.ranks = 40).starts_with("there is no plan for 40 ranks, "));
    assert!(
        of(&|request| request.data_parallel = Some(7)).starts_with("7 replicas of 1 tensor-parallel rank")
    );
    assert!(
        of(&|request| request.tensor_parallel = Some(2))
            .starts_with("2 tensor-parallel ranks were asked for")
    );
    assert_eq!(
        of(&|request| request.head_parts = vec![1, 0]),
        "a head in 0 parts was asked for; use a number from 1 to 9996"
    );
    assert!(
        of(&|request| request.head_parts = vec![4_000_000_000]).starts_with("a head in 4000000000 parts")
    );
    let empty = Profile::default();
    let error = plan(&empty, &PlanRequest::default(), &mut || true).expect_err("no layers").to_string();
    assert!(
        error.starts_with("2 problems in the profile, the first: `layers` of the profile is empty"),
        "{error}"
    );
}
