//! Plans for layers whose tokens travel to the ranks of their experts.

use pipewright_schedule::csv::print_program;
use pipewright_schedule::lower::TrainingLowering;
use pipewright_schedule::lower::for_training;
use pipewright_schedule::plan::{PlanChoice, PlanReport, PlanRequest, plan, predict};
use pipewright_schedule::profile::{LayerProfile, LinkProfile, Profile};
use pipewright_schedule::{ScheduleSpec, generate};

fn profile(exchange_s: f64) -> Profile {
    let block = LayerProfile {
        kind: "mixture".into(),
        count: 16,
        forward_s: 1e-3,
        input_backward_s: 1e-3,
        weight_backward_s: 1e-3,
        exchange_s,
        ..LayerProfile::default()
    };
    Profile { link: LinkProfile::new(0.0, 1e12), layers: vec![block], ..Profile::default() }
}

fn planned(profile: &Profile) -> PlanReport {
    let request = PlanRequest {
        ranks: 4,
        microbatches: 16,
        data_parallel: Some(1),
        larger_microbatches: false,
        effort: 2_000_000,
        ..PlanRequest::default()
    };
    plan(profile, &request, &mut || true).expect("a plan")
}

/// Returns the choice of four layers for each of four stages.
fn even(stages: usize) -> PlanChoice {
    let boundaries = (1..stages).map(|stage| stage * 16 / stages).collect();
    PlanChoice { boundaries, recompute: vec![None; stages], ..PlanChoice::default() }
}

#[test]
fn a_long_exchange_makes_overlaps_the_best_plan() {
    let profile = profile(0.8e-3);
    let report = planned(&profile);
    let best = &report.plans[0];
    assert!(best.name == "zbvzerobubble" && best.settings.overlap, "{} {:?}", best.name, best.settings);
    let dual_pipe_v = report.plans.iter().find(|plan| plan.name == "dualpipev").expect("a plan");
    assert!(dual_pipe_v.step_s < 1.02 * best.step_s, "{} of {}", dual_pipe_v.step_s, best.step_s);
    assert!(report.lower_bound_s > 0.0 && report.lower_bound_s <= best.step_s);
    // The plan has the time of its program.
    let choice = PlanChoice { boundaries: best.boundaries.clone(), ..even(8) };
    let predicted = predict(&profile, &best.schedule, &choice).expect("a prediction");
    assert!((predicted.step_s() - best.step_s).abs() < 1e-12, "{} of {}", predicted.step_s(), best.step_s);
    let exchanges = predicted.run.exchanges();
    let (all, exposed) =
        exchanges.iter().fold((0.0, 0.0), |sum, rank| (sum.0 + rank.seconds, sum.1 + rank.exposed));
    // 16 microbatches pass 16 layers with an exchange in both directions.
    assert!((all - 16.0 * 16.0 * 2.0 * 0.8e-3).abs() < 1e-9, "{all}");
    assert!(exposed < 0.6 * all, "{exposed} of {all}");
}

#[test]
fn a_plan_without_overlaps_is_slower_by_its_exchanges() {
    let spec = ScheduleSpec { ranks: 4, microbatches: 16, ..ScheduleSpec::default() };
    let schedule = generate("1f1b", &spec).expect("a schedule");
    let step = |exchange_s| {
        let predicted = predict(&profile(exchange_s), &schedule, &even(4)).expect("a prediction");
        (predicted.step_s(), predicted.run.exchanges().to_vec())
    };
    let ((without, none), (with, exchanges)) = (step(0.0), step(0.5e-3));
    assert!(none.iter().all(|rank| rank.seconds == 0.0));
    for rank in &exchanges {
        assert_eq!(rank.exposed, rank.seconds);
    }
    // Three forwards and input backwards of 4 layers, and 16 forwards and backwards. Each forward and each
    // backward has 2 ms of exchanges.
    assert!((without - (3.0 * 8e-3 + 16.0 * 12e-3)).abs() < 1e-9, "{without}");
    assert!((with - (3.0 * 12e-3 + 16.0 * 16e-3)).abs() < 1e-9, "{with}");
}

#[test]
fn without_exchanges_overlaps_are_taken_apart() {
    let spec = ScheduleSpec { ranks: 4, microbatches: 16, ..ScheduleSpec::default() };
    let schedule = generate("dualpipev", &spec).expect("a schedule");
    let predicted = predict(&profile(0.0), &schedule, &even(8)).expect("a prediction");
    let apart = for_training(&schedule, &TrainingLowering::default()).expect("sound");
    assert_eq!(predicted.program.as_program(), apart.as_program());
    let plans = planned(&profile(0.0)).plans;
    assert_ne!(plans[0].name, "dualpipev");
    assert!(plans.iter().all(|plan| !plan.settings.overlap));
}

#[test]
fn overlaps_stay_whole_where_the_stage_of_the_backward_is_trained() {
    let spec = ScheduleSpec { ranks: 4, microbatches: 16, ..ScheduleSpec::default() };
    let schedule = generate("dualpipev", &spec).expect("a schedule");
    let mut profile = profile(0.8e-3);
    let block = LayerProfile { count: 1, parameter_bytes: 1 << 20, ..profile.layers[0].clone() };
    // The layers of stage 3 are frozen.
    let layer = |index: usize| {
        let is_frozen = (6..8).contains(&index);
        LayerProfile { trained_bytes: is_frozen.then_some(0), ..block.clone() }
    };
    profile.layers = (0..16).map(layer).collect();
    let choice = even(8);
    let predicted = predict(&profile, &schedule, &choice).expect("a prediction");
    let rows = print_program(predicted.program.as_program());
    assert!(rows.contains(";5B1)OVERLAP_F_B") && !rows.contains("3B"), "{rows}");
    // It is the program of a run whose replicas hold the experts together.
    let trained = choice.trained_stages(&profile);
    let lowering = TrainingLowering { trained, ..TrainingLowering::default() }.with_exchanges(true);
    assert_eq!(for_training(&schedule, &lowering).expect("sound"), predicted.program);
}

#[test]
fn times_of_exchanges_are_checked() {
    let problems = profile(-1.0).problems();
    assert_eq!(problems.len(), 1);
    assert_eq!(problems[0].key, "exchange_s");
}
