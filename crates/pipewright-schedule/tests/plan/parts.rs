//! Tests of heads that the planner cuts into parts along the vocabulary.

use pipewright_schedule::plan::{PlanChoice, PlanRequest, Prediction, plan, predict};
use pipewright_schedule::profile::{HEAD_PART, LayerProfile, LinkProfile, Profile};
use pipewright_schedule::{ScheduleSpec, generate};

use crate::instances::{self, Instance, block};
use crate::{by_trying, check_against, named_only, request, seeds, small};

/// Returns a model whose head takes as long as `weight` other layers.
fn with_head(layers: usize, weight: f64, ranks: u32) -> Instance {
    let mut list = vec![block("layer", 1.0); layers];
    list.push(LayerProfile { activation_bytes: 9_000_000, ..block("head", weight) });
    let link = LinkProfile::new(1e-6, 1e12);
    let profile = Profile { link, layers: list, tokens: Some(1000), ..Profile::default() };
    Instance { what: "head", profile, ranks, microbatches: 4 * ranks }
}

/// Predicts a step of 1F1B on two ranks with `head_parts`, whose last stage has the last `last` layers.
fn of_two(profile: &Profile, head_parts: Option<u32>, layers: usize, last: usize) -> Prediction {
    let spec = ScheduleSpec { ranks: 2, microbatches: 6, ..ScheduleSpec::default() };
    let schedule = generate("1f1b", &spec).expect("a schedule");
    let (boundaries, recompute) = (vec![layers - last], vec![None; 2]);
    let choice = PlanChoice { head_parts, boundaries, recompute, ..PlanChoice::default() };
    predict(profile, &schedule, &choice).expect("a sound schedule")
}

#[test]
fn a_part_has_its_share_of_the_head() {
    let profile = with_head(3, 4.0, 2).profile;
    let prediction = of_two(&profile, Some(4), 7, 1);
    let (whole, part) = (&prediction.costs.stages[0], &prediction.costs.stages[1]);
    assert!((whole.forward - 6e-3).abs() < 1e-12 && (part.forward - 1e-3).abs() < 1e-12, "{prediction:?}");
    assert!((part.backward - 2e-3).abs() < 1e-12);
    // Hidden states, and two numbers for each token.
    assert_eq!(prediction.costs.sizes[0].output, 524_288 + 8 * 1000);
    // The normalised hidden states, a quarter of the logits, and what the part keeps of each token.
    let (logits, tokens) = (9_000_000 - 2 * 524_288, 32 * 1000);
    let sizes = |last| of_two(&profile, Some(4), 7, last).costs.sizes;
    assert_eq!(sizes(1)[1].activation, 524_288 + logits / 4 + tokens);
    // All parts of a stage hold the same hidden states. The first one holds those before the norm too.
    assert_eq!(sizes(2)[1].activation, 524_288 + 2 * (logits / 4 + tokens));
    assert_eq!(sizes(4)[1].activation, 2 * 524_288 + 4 * (logits / 4 + tokens));
    // Of the head's activations, half of the logits is kept for `W`.
    assert_eq!(sizes(2)[1].stash, 524_288 + 2 * ((4_500_000 - 524_288) / 4 + tokens));
    assert_eq!(prediction.costs.sizes[1].gradient, 4_000_000);
    // One boundary is at the same place in both profiles, so the whole has the same times.
    let (cut, one) = (of_two(&profile, Some(4), 7, 4), of_two(&profile, None, 4, 1));
    assert!((cut.run.timeline().makespan() - one.run.timeline().makespan()).abs() < 1e-9);
}

#[test]
fn measured_parts_keep_their_figures() {
    let whole = with_head(3, 4.0, 2).profile;
    let mut parts = whole.clone();
    let head = parts.layers.pop().expect("a head");
    // Two parts; the first one is slower than half of the head.
    let part = |forward_s| LayerProfile { forward_s, kind: HEAD_PART.into(), ..block("", 2.0) };
    parts.layers.extend([part(3e-3), part(1e-3)]);
    assert_eq!(of_two(&parts, Some(2), 5, 1).costs, of_two(&parts, None, 5, 1).costs);
    assert_eq!(of_two(&parts, None, 5, 1).costs.stages[1].forward, 1e-3);
    for (count, share) in [(1, head.forward_s), (4, head.forward_s / 4.0)] {
        let found = of_two(&parts, Some(count), 3 + count as usize, 1).costs.stages[1].forward;
        assert!((found - share).abs() < 1e-12, "{count}: {found}");
    }
}

#[test]
fn small_plans_of_heads_in_parts_are_the_best_of_all() {
    let mut cut = 0;
    for seed in seeds(0, 24).filter(|&seed| small(seed).profile.layers.len() < 7) {
        let mut instance = small(seed);
        let head = instance.profile.layers.len() - 1;
        instance.profile.layers[head] = block("head", 4.0);
        let times = [1, 2, 3].map(|parts| {
            let choice = PlanChoice { head_parts: Some(parts), ..PlanChoice::default() };
            let best = by_trying(&instance, None, &choice, false);
            let request = PlanRequest { head_parts: vec![parts], ..named_only(&instance, None) };
            check_against(best, &instance, &request, seed);
            best
        });
        let best = times.into_iter().fold(f64::INFINITY, f64::min);
        let with_parts = PlanRequest { head_parts: vec![1, 2, 3], ..request(&instance, None) };
        let Ok(report) = plan(&instance.profile, &with_parts, &mut || true) else { continue };
        cut += usize::from(report.plans[0].head_parts > 1);
        let found = report.plans[0].step_s;
        assert!(
            report.lower_bound_s <= found && found <= best * (1.0 + 1e-12),
            "seed {seed}: {found} {best}"
        );
    }
    assert!(cut > 1, "{cut} heads are cut");
}

#[test]
fn a_heavy_head_is_cut_and_a_light_one_is_not() {
    for (weight, is_cut) in [(9.0, true), (1.0, false)] {
        let instance = with_head(15, weight, 4);
        let whole = PlanRequest { effort: 600_000, ..request(&instance, None) };
        let parts = PlanRequest { head_parts: vec![1, 4, 8], ..whole.clone() };
        let [one, several] =
            [&whole, &parts].map(|request| plan(&instance.profile, request, &mut || true).expect("a plan"));
        let best = &several.plans[0];
        assert_eq!(best.head_parts > 1, is_cut, "{} of {}", best.head_parts, best.name);
        assert!(best.step_s <= one.plans[0].step_s && several.lower_bound_s <= one.lower_bound_s);
        assert_eq!(one.plans[0].head_parts, 1);
        if is_cut {
            assert!(best.step_s < 0.8 * one.plans[0].step_s, "{} {}", best.step_s, one.plans[0].step_s);
        }
    }
}

/// Every plan has the time of the simulator, and none is below the bound.
#[test]
fn plans_with_parts_keep_the_bound() {
    for seed in seeds(0, 6) {
        let instance = instances::random(4 * seed + 3);
        let head_parts = vec![1, instance.ranks, 2 * instance.ranks];
        let request =
            PlanRequest { head_parts, effort: 300_000, plans: usize::MAX, ..request(&instance, None) };
        let report = plan(&instance.profile, &request, &mut || true).expect("a plan");
        for plan in &report.plans {
            let (boundaries, recompute) = (plan.boundaries.clone(), plan.recompute.clone());
            let head_parts = Some(plan.head_parts);
            let choice = PlanChoice { head_parts, boundaries, recompute, ..PlanChoice::default() };
            let prediction = predict(&instance.profile, &plan.schedule, &choice).expect("a sound schedule");
            assert_eq!(prediction.step_s(), plan.step_s);
            assert!(report.lower_bound_s <= plan.step_s, "seed {seed}: {}", plan.name);
        }
    }
}
