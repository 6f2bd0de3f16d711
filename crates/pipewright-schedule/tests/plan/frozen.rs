//! Plans of models whose layers are frozen in part.

use pipewright_schedule::mesh::Mesh;
use pipewright_schedule::plan::{
    OutcomeKind, Plan, PlanChoice, PlanReport, PlanRequest, best_cut, plan, predict,
};
use pipewright_schedule::profile::{LayerProfile, LinkProfile, NodeProfile, Profile};
use pipewright_schedule::{ScheduleSpec, StageBackward, StageIndex, generate};

use crate::instances::{self, Instance, Numbers, block};
use crate::{by_trying, check_against, check_partial, check_plan, named_only, predicted, request, small};

/// Freezes layers of an instance: those before a random one, and every third of the others.
fn freeze(instance: &mut Instance, seed: u64) {
    let layers = &mut instance.profile.layers;
    let first = Numbers(seed).between(0, layers.len() as u64 - 1) as usize;
    for (index, layer) in layers.iter_mut().enumerate() {
        let is_frozen = index < first || (index - first) % 3 == 1;
        layer.trained_bytes = Some(if is_frozen { 0 } else { layer.parameter_bytes / 50 });
    }
}

#[test]
fn small_plans_of_frozen_layers_are_the_best_of_all() {
    // Models with few layers, because all cuts are tried.
    for seed in (300..330).filter(|&seed| small(seed).profile.layers.len() < 6).take(3) {
        let mut instance = small(seed);
        freeze(&mut instance, seed);
        if instance.ranks as usize <= instance.profile.layers.len() {
            let memory = (seed % 3 == 0).then_some(60_000_000);
            let best = by_trying(&instance, memory, &PlanChoice::default(), false);
            let request = PlanRequest { partial_recompute: false, ..named_only(&instance, memory) };
            check_against(best, &instance, &request, seed);
            if memory.is_some() {
                check_partial(best, &instance, memory, seed);
            }
        }
    }
}

/// Checks that plans have the numbers of the simulator, that the search found the same times, and that stages
/// that run forward only do not recompute.
fn check_report(instance: &Instance, report: &PlanReport, memory: Option<u64>) {
    for plan in &report.plans {
        check_plan(instance, plan, memory);
        let outcome = report.outcomes.iter().find(|outcome| outcome.name == plan.name);
        assert_eq!(outcome.map(|outcome| &outcome.result), Some(&OutcomeKind::Takes(plan.step_s)));
        check_recompute(&instance.profile, plan);
    }
}

fn check_recompute(profile: &Profile, plan: &Plan) {
    let choice = PlanChoice { boundaries: plan.boundaries.clone(), ..PlanChoice::default() };
    let trained = choice.trained_stages(profile);
    for (stage, recompute) in (0..).map(StageIndex::new).zip(&plan.recompute) {
        let runs_backward = trained.backward_of(stage) != StageBackward::None;
        assert!(runs_backward || recompute.is_none(), "{} with {:?}", plan.name, plan.recompute);
    }
}

#[test]
fn plans_of_frozen_layers_have_the_time_of_the_simulator() {
    let mut searched = 0;
    for seed in [1, 3] {
        let mut instance = instances::random(seed);
        freeze(&mut instance, seed);
        let whole = PlanRequest { effort: 200_000, plans: usize::MAX, ..request(&instance, None) };
        let report = plan(&instance.profile, &whole, &mut || true).expect("a plan");
        check_report(&instance, &report, None);
        let fastest = report.plans[0].step_s;
        assert!(report.lower_bound_s <= fastest && report.gap() < 0.25, "seed {seed}: {}", report.gap());
        searched += usize::from(report.plans.iter().any(|plan| plan.name == "searched"));
        // In less memory, some stages recompute, and none that runs forward only.
        let memory = report.plans[0].peak_bytes.iter().max().map(|peak| peak / 4 * 3);
        let report = plan(&instance.profile, &PlanRequest { memory, ..whole }, &mut || true).expect("a plan");
        check_report(&instance, &report, memory);
        assert!(report.plans.iter().any(Plan::recomputes), "seed {seed}");
    }
    assert!(searched > 0, "no searched order");
}

/// Returns a profile of equal layers. The layers from `trained` on have small adapters.
fn adapted(count: usize, trained: usize) -> Profile {
    let layer = |index: usize| {
        let is_frozen = index < trained;
        let layer = block("layer", 1.0);
        LayerProfile {
            trained_bytes: Some(if is_frozen { 0 } else { layer.parameter_bytes / 100 }),
            input_backward_s: if is_frozen { 0.0 } else { layer.input_backward_s },
            weight_backward_s: if is_frozen { 0.0 } else { layer.weight_backward_s / 20.0 },
            ..layer
        }
    };
    Profile {
        link: LinkProfile::new(0.0, 1e12),
        layers: (0..count).map(layer).collect(),
        ..Profile::default()
    }
}

#[test]
fn the_best_cut_puts_more_frozen_layers_on_a_rank() {
    let spec = ScheduleSpec { ranks: 2, microbatches: 8, ..ScheduleSpec::default() };
    let schedule = generate("1f1b", &spec).expect("a schedule");
    let choice = PlanChoice { recompute: vec![None; 2], ..PlanChoice::default() };
    let cut_of = |profile: &Profile| best_cut(profile, &schedule, &choice).expect("enough layers");
    let whole = Profile { layers: vec![block("layer", 1.0); 12], ..adapted(12, 0) };
    let upper = adapted(12, 8);
    assert_eq!([&whole, &adapted(12, 0), &upper].map(cut_of), [[6], [6], [8]]);
    let step = |cut| predicted(&upper, &schedule, &[cut], vec![None; 2]).step_s();
    assert!(step(8) < 0.9 * step(6), "{} {}", step(8), step(6));
    let instance = Instance { what: "", profile: upper.clone(), ranks: 2, microbatches: 8 };
    let report = plan(&upper, &named_only(&instance, None), &mut || true).expect("a plan");
    assert!(report.plans[0].step_s <= step(8), "{} {}", report.plans[0].step_s, step(8));
}

#[test]
fn the_sums_of_tensor_parallel_ranks_are_those_that_take_place() {
    let spec = ScheduleSpec { ranks: 1, microbatches: 3, ..ScheduleSpec::default() };
    let schedule = generate("1f1b", &spec).expect("a schedule");
    let choice = PlanChoice { mesh: Mesh { tensor: 2, ..Mesh::default() }, ..PlanChoice::default() };
    let sums_of = |layers: Vec<LayerProfile>| {
        let node = Some(NodeProfile { ranks: 2, latency_s: 0.0, bytes_per_s: 1e9 });
        let profile = Profile { node, layers, ..adapted(4, 0) };
        predict(&profile, &schedule, &choice).expect("a sound schedule").collectives.tensor_s
    };
    let (whole, upper) = (sums_of(vec![block("layer", 1.0); 4]), sums_of(adapted(4, 3).layers));
    // Four forwards each, and four or one input backwards.
    assert!(whole > 0.0 && (upper / whole - 5.0 / 8.0).abs() < 1e-9, "{upper} of {whole}");
}

#[test]
fn a_profile_without_trained_layers_is_refused() {
    let mut profile = adapted(3, 2);
    assert!(profile.problems().is_empty());
    profile.layers[2].trained_bytes = Some(0);
    let said = |profile: &Profile| profile.problems().iter().map(ToString::to_string).collect::<Vec<_>>();
    let expected = "`trained_bytes` of [[layers]] number 1 is 0, where at least one layer with trained parameters is expected";
    assert_eq!(said(&profile), [expected]);
    profile.layers[2] = LayerProfile { trained_bytes: Some(9), parameter_bytes: 8, ..block("layer", 1.0) };
    let expected = "`trained_bytes` of [[layers]] number 3 is 9, where a number of bytes from 0 to 8 (`parameter_bytes`) is expected";
    assert_eq!(said(&profile), [expected]);
}
