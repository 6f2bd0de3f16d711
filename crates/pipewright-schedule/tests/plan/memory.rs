//! The memory that plans count for parameters and optimizer state.

use pipewright_schedule::lower::{OffloadConfig, TrainingLowering, for_training};
use pipewright_schedule::mesh::{DataParallelMode, Mesh};
use pipewright_schedule::plan::{
    PlanChoice, PlanError, PlanRequest, TrainingState, plan, predict, predict_program,
};
use pipewright_schedule::profile::{LayerProfile, LinkProfile, Profile};
use pipewright_schedule::recompute::StageRecompute;
use pipewright_schedule::{Recompute, ScheduleSpec, generate};

use crate::instances::block;

#[test]
fn the_state_of_the_optimizer_takes_memory() {
    let link = LinkProfile::new(0.0, 1e12);
    let profile = Profile { link, layers: vec![block("layer", 1.0); 4], ..Profile::default() };
    let parameters: u64 = profile.each_layer().map(|layer| layer.parameter_bytes).sum();
    let peak = |optimizer| {
        let state = TrainingState { optimizer, ..TrainingState::default() };
        let request = PlanRequest { ranks: 1, microbatches: 1, state, ..PlanRequest::default() };
        plan(&profile, &request, &mut || true).expect("a plan").plans[0].peak_bytes[0]
    };
    assert_eq!(peak(2.0) - peak(0.0), 2 * parameters);
    assert_eq!(peak(2.5) - peak(2.0), parameters / 2);
}

/// Replicas of one rank whose layers have only parameters.
#[test]
fn replicas_that_hold_the_parameters_together_need_less_memory() {
    const PARAMETERS: u64 = 1 << 20;
    let layer = LayerProfile { parameter_bytes: PARAMETERS / 4, activation_bytes: 0, ..block("layer", 1.0) };
    let link = LinkProfile::new(0.0, 1e12);
    let profile = Profile { link, layers: vec![layer; 4], ..Profile::default() };
    let schedule = generate("gpipe", &ScheduleSpec { ranks: 1, microbatches: 2, ..ScheduleSpec::default() });
    let schedule = schedule.expect("a schedule");
    let quarters_of = |profile: &Profile, data, groups, copy| {
        let state = TrainingState { groups, copy, ..TrainingState::default() };
        let choice = PlanChoice { mesh: Mesh { data, ..Mesh::default() }, state, ..PlanChoice::default() };
        let peaks = predict(profile, &schedule, &choice).expect("it fits the schedule").peak_bytes;
        4.0 * peaks[0] as f64 / PARAMETERS as f64
    };
    let quarters = |data, groups, copy| quarters_of(&profile, data, groups, copy);
    // Parameters, two moments, gradients.
    assert_eq!(quarters(2, DataParallelMode::Replicated, 0.0), 16.0);
    // Half of the parameters and moments; the gathered parameters; gradients.
    assert_eq!(quarters(2, DataParallelMode::Sharded, 0.0), 6.0 + 4.0 + 4.0);
    assert_eq!(quarters(4, DataParallelMode::Sharded, 0.0), 3.0 + 4.0 + 4.0);
    assert_eq!(quarters(4, DataParallelMode::Hybrid { shards: 2 }, 0.0), 6.0 + 4.0 + 4.0);
    // Groups of three do not divide four replicas.
    assert_eq!(quarters(4, DataParallelMode::Hybrid { shards: 3 }, 0.0), 3.0 + 4.0 + 4.0);
    // Until the norm is known, the parameters and moments from before an update. The gathered parameters of
    // the last stage are counted too, although they are gone by then.
    let with_undo = |data, groups| {
        let state = TrainingState { groups, post_validation: true, ..TrainingState::default() };
        let choice = PlanChoice { mesh: Mesh { data, ..Mesh::default() }, state, ..PlanChoice::default() };
        let peaks = predict(&profile, &schedule, &choice).expect("it fits the schedule").peak_bytes;
        4.0 * peaks[0] as f64 / PARAMETERS as f64
    };
    assert_eq!(with_undo(2, DataParallelMode::Replicated), 16.0 + 12.0);
    assert_eq!(with_undo(4, DataParallelMode::Sharded), 3.0 + 4.0 + 4.0 + 3.0);
    // The copy of half precision copies the gathered parameters.
    assert_eq!(quarters(2, DataParallelMode::Sharded, 0.5), 6.0 + 4.0 + 2.0 + 4.0);
    // The same if the profile has the bytes of each layer.
    let mut of_layers = profile.clone();
    for layer in &mut of_layers.layers {
        layer.held_bytes = Some(2 * layer.parameter_bytes);
        layer.copy_bytes = Some(layer.parameter_bytes / 2);
    }
    assert_eq!(quarters_of(&of_layers, 2, DataParallelMode::Sharded, 0.0), (4.0 + 4.0) + 8.0 + 2.0 + 4.0);
    let fits = |groups| {
        let state = TrainingState { groups, ..TrainingState::default() };
        let (memory, data_parallel) = (Some(15 * PARAMETERS / 4), Some(2));
        let request = PlanRequest { state, memory, data_parallel, ..PlanRequest::default() };
        plan(&profile, &request, &mut || true).map(drop)
    };
    assert!(matches!(fits(DataParallelMode::Replicated), Err(PlanError::DoesNotFit { .. })));
    assert_eq!(fits(DataParallelMode::Sharded), Ok(()));
}

/// The bytes of an input of [`moved_inputs`].
const INPUT: u64 = 1000;

/// Returns how many inputs less each of two ranks with a layer each holds in its peak if inputs leave memory.
/// The ranks compute their forwards again. The second one keeps the inputs of four microbatches, or moves
/// them.
fn moved_inputs(layer: &LayerProfile, state: TrainingState, offload_bytes_per_s: Option<f64>) -> [u64; 2] {
    let link = LinkProfile { offload_bytes_per_s, ..LinkProfile::new(0.0, 1e12) };
    let profile = Profile { link, layers: vec![layer.clone(); 2], ..Profile::default() };
    let spec = ScheduleSpec { ranks: 2, microbatches: 4, ..ScheduleSpec::default() };
    let schedule = generate("gpipe", &spec).expect("a schedule");
    let recompute = vec![Some(StageRecompute::WHOLE); 2];
    let choice = PlanChoice { boundaries: vec![1], recompute, state, ..PlanChoice::default() };
    let all = Some(OffloadConfig::all(Recompute::Stage));
    let peaks = [None, all].map(|offload| {
        let lowering = TrainingLowering { offload, ..TrainingLowering::default() };
        let program = for_training(&schedule, &lowering).expect("it is sound");
        predict_program(&profile, &schedule, program, &choice).expect("it fits the schedule").peak_bytes
    });
    [0, 1].map(|rank| (peaks[0][rank] - peaks[1][rank]) / INPUT)
}

#[test]
fn inputs_that_leave_memory_are_not_counted() {
    let layer = LayerProfile {
        output_bytes: INPUT,
        parameter_bytes: 0,
        weight_activation_bytes: Some(0),
        ..block("layer", 1.0)
    };
    let less = |bytes_per_s| moved_inputs(&layer, TrainingState::default(), bytes_per_s);
    // The first backward holds its own input.
    assert_eq!(less(None), [0, 3]);
    // Each transfer takes a hundred times as long as a computation: the last input has not left yet.
    assert_eq!(less(Some(INPUT as f64 / 100.0 / layer.forward_s)), [0, 2]);
}

/// In its update, a rank holds no inputs, wherever they were before.
#[test]
fn inputs_that_leave_memory_do_not_make_the_update_smaller() {
    let layer = LayerProfile {
        output_bytes: INPUT,
        parameter_bytes: 100 * INPUT,
        activation_bytes: 2 * INPUT,
        weight_activation_bytes: Some(0),
        ..block("layer", 1.0)
    };
    let less = |post_validation| {
        moved_inputs(&layer, TrainingState { post_validation, ..TrainingState::default() }, None)
    };
    // The gradients are larger than an input, so the peak is in the second backward, which holds its own
    // input instead of three.
    assert_eq!((less(false), less(true)), ([0, 2], [0, 0]));
}

/// Two ranks with room for the activations of one and a half microbatches. Two thirds of them are results of
/// parts that take a hundredth of a forward.
#[test]
fn plans_compute_cheap_parts_again_instead_of_layers() {
    let layer = LayerProfile {
        norms_bytes: 2_000_000,
        norms_s: 1e-5,
        feed_forward_bytes: 2_000_000,
        feed_forward_s: 1e-5,
        ..block("layer", 1.0)
    };
    let link = LinkProfile::new(0.0, 1e12);
    let profile = Profile { link, layers: vec![layer; 8], ..Profile::default() };
    let memory = 4 * (4 * 4_000_000) + 4 * 9_000_000;
    let best = |partial_recompute| {
        let request = PlanRequest {
            memory: Some(memory),
            data_parallel: Some(1),
            larger_microbatches: false,
            partial_recompute,
            effort: PlanRequest::EFFORT / 100,
            ..PlanRequest::default()
        };
        let report = plan(&profile, &request, &mut || true).expect("a plan");
        assert!(report.lower_bound_s <= report.plans[0].step_s);
        report.plans[0].clone()
    };
    let [whole, part] = [false, true].map(best);
    assert!(part.step_s < 0.97 * whole.step_s, "{} and {}", part.step_s, whole.step_s);
    assert!(part.peak_bytes.iter().all(|&peak| peak <= memory), "{:?}", part.peak_bytes);
    let recompute = Recompute::of_stages(&part.recompute);
    assert!(recompute.has_parts() && !recompute.has_second_forwards(), "{recompute}");
}

/// The first of two stages has norms, and the second one has activations of feed-forward layers.
#[test]
fn parts_that_no_layer_of_a_stage_has_are_refused() {
    let norms = LayerProfile { norms_bytes: 1_000, ..block("attention", 1.0) };
    let feed_forward = LayerProfile { feed_forward_bytes: 1_000, ..block("feed-forward", 1.0) };
    let link = LinkProfile::new(0.0, 1e12);
    let profile = Profile { link, layers: vec![norms, feed_forward], ..Profile::default() };
    let spec = ScheduleSpec { ranks: 2, microbatches: 2, ..ScheduleSpec::default() };
    let schedule = generate("1f1b", &spec).expect("a schedule");
    let refused = |layers: &[LayerProfile], parts: [&str; 2]| {
        let of_stage = |names: &str| StageRecompute::of_parts(names.parse().unwrap_or_default());
        let recompute = parts.map(of_stage).to_vec();
        let choice = PlanChoice { recompute, boundaries: vec![1], ..PlanChoice::default() };
        let profile = Profile { layers: layers.to_vec(), ..profile.clone() };
        predict(&profile, &schedule, &choice).map(drop).map_err(|error| error.to_string())
    };
    let all = "norms+feed-forward";
    assert_eq!(refused(&profile.layers, [all, all]), Ok(()), "the choice of all parts of all stages");
    assert_eq!(refused(&profile.layers, ["norms", "feed-forward"]), Ok(()));
    let message = |place: &str, parts: &str| {
        Err(format!(
            "no layer of {place} has these parts, which are to be recomputed: {parts}; write their sizes into [[layers]] \
             (`norms_bytes`, `feed_forward_bytes`), or leave them out"
        ))
    };
    assert_eq!(refused(&profile.layers, ["norms", "norms"]), message("stage 1", "norms"));
    assert_eq!(refused(&profile.layers, [all, ""]), message("stage 0", "feed-forward"));
    let without = [block("layer", 1.0), block("layer", 1.0)];
    assert_eq!(refused(&without, [all, all]), message("the profile", all));
}
