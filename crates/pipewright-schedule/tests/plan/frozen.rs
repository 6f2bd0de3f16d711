//! Plans of models whose layers are frozen in part.

use pipewright_schedule::plan::{PlanChoice, PlanRequest, plan};
use pipewright_schedule::profile::{LayerProfile, LinkProfile, Profile};
use pipewright_schedule::{Rank, StageBackward, StageIndex};

use crate::instances::{self, Instance, Numbers, block};
use crate::{by_trying, check_against, check_plan, named_only, request, small};

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
            let best = by_trying(&instance, memory, &PlanChoice::default());
            check_against(best, &instance, &named_only(&instance, memory), seed);
        }
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
        report.plans.iter().for_each(|plan| check_plan(&instance, plan, None));
        let fastest = report.plans[0].step_s;
        assert!(report.lower_bound_s <= fastest && report.gap() < 0.25, "seed {seed}: {}", report.gap());
        searched += usize::from(report.plans.iter().any(|plan| plan.name == "searched"));
        // Half of the memory: some stages recompute, and none that runs forward only.
        let memory = report.plans[0].peak_bytes.iter().max().map(|peak| peak / 2);
        if let Ok(report) = plan(&instance.profile, &PlanRequest { memory, ..whole }, &mut || true) {
            report.plans.iter().for_each(|plan| check_plan(&instance, plan, memory));
        }
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
fn the_cut_puts_more_frozen_layers_on_a_rank() {
    let instance = |profile| Instance { what: "", profile, ranks: 2, microbatches: 8 };
    let planned = |profile: &Profile| {
        let request = PlanRequest { effort: 0, ..request(&instance(profile.clone()), None) };
        plan(profile, &request, &mut || true).expect("a plan").plans.remove(0)
    };
    let whole = Profile { layers: vec![block("layer", 1.0); 12], ..adapted(12, 0) };
    let upper = adapted(12, 6);
    let (of_whole, of_upper) = (planned(&whole), planned(&upper));
    assert!(of_upper.step_s < 0.6 * of_whole.step_s, "{} {}", of_upper.step_s, of_whole.step_s);
    let choice = PlanChoice {
        boundaries: of_upper.boundaries.clone(),
        recompute: of_upper.recompute.clone(),
        ..PlanChoice::default()
    };
    let trained = choice.trained_stages(&upper);
    assert_eq!(trained.backward_of(StageIndex::new(0)), StageBackward::None);
    let first_rank = of_upper.schedule.placement().stages_of(Rank::new(0)).len();
    assert!(first_rank > 0 && of_upper.boundaries[0] > of_whole.boundaries[0].min(6) || first_rank > 1);
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
