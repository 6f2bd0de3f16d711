//! Updates before the gradient norm is known: the same bits as updates after it, whether the norm clips or
//! not.

mod failures;

use std::sync::Arc;

use pipewright::loss_scale::LossScaling;
use pipewright::mesh::DataParallelMode;
use pipewright::optimizer::ClipGroup;
use pipewright::pipeline::{PipelineConfig, SeededPipeline, StepSummary};
use pipewright::tensor::Precision;
use pipewright_schedule::ValidatedProgram;

use crate::ahead::batches::{MICROBATCHES, RATE, StepResult, begin, numbered, parameters, result_of};
use crate::support::{Late, config, launch, program, stage};

/// Steps of each run.
const STEPS: u64 = 6;

/// The results of a run, and its parameters at the end.
type Outcome = (Vec<StepResult>, Vec<(String, Vec<f32>)>);

/// Trains. Each batch begins during the one before, and every `every`th updates. `late` is the rank that ends
/// last.
fn train(
    program: ValidatedProgram,
    config: &PipelineConfig,
    late: u32,
    every: u64,
) -> (Outcome, Vec<StepSummary>) {
    let hook = Arc::new(Late::new(&program, [config.data_parallel, 1], late));
    let mut pipeline = launch(program, &PipelineConfig { hook: Some(hook), ..config.clone() });
    let mut summaries = Vec::new();
    begin(&mut pipeline, 0, every, config);
    for number in 1..=STEPS * every {
        if number < STEPS * every {
            begin(&mut pipeline, number, every, config);
        }
        summaries.push(pipeline.finish().expect("a batch"));
    }
    ((summaries.iter().map(result_of).collect(), parameters(&mut pipeline)), summaries)
}

/// Trains with and without early updates, and compares all bits. A step with early updates has repaired them
/// if its norm is above the limit, and only then. Returns the number of steps with early updates that were
/// repaired, and that were kept.
fn check(program: &ValidatedProgram, config: &PipelineConfig, late: u32, every: u64) -> [usize; 2] {
    let early = PipelineConfig { post_validation: true, ..config.clone() };
    let (expected, norm_first) = train(program.clone(), config, late, every);
    assert!(norm_first.iter().all(|step| !is_early(step) && !step.repaired));
    let (found, summaries) = train(program.clone(), &early, late, every);
    let limit = config.clip_norm.unwrap_or(f64::INFINITY);
    assert_eq!(found, expected, "rank {late} is late, limit {limit}");
    let mut counts = [0, 0];
    for step in summaries.iter().filter(|step| is_early(step)) {
        // As close to the limit as this, rounding decides.
        let is_clipped = step.gradient_norm + 1e-6 > limit;
        assert_eq!(step.repaired, is_clipped, "a norm of {} and a limit of {limit}", step.gradient_norm);
        counts[usize::from(!step.repaired)] += 1;
    }
    counts
}

fn is_early(step: &StepSummary) -> bool {
    step.early_update.iter().any(|time| !time.is_zero())
}

/// Checks runs with a limit that no norm reaches, one that all norms exceed, and one in between.
fn check_limits(program: &ValidatedProgram, config: &PipelineConfig, late: u32, every: u64) {
    let with = |clip_norm| PipelineConfig { clip_norm, ..config.clone() };
    let [repaired, kept] = check(program, &with(None), late, every);
    assert!(repaired == 0 && kept > 0, "nothing is clipped: {repaired} {kept}");
    let [repaired, kept] = check(program, &with(Some(1e-4)), late, every);
    assert!(repaired > 0 && kept == 0, "all are clipped: {repaired} {kept}");
    let (_, summaries) = train(program.clone(), &with(None), late, every);
    let mut norms: Vec<f64> =
        summaries.iter().map(|step| step.gradient_norm).filter(|norm| *norm > 0.0).collect();
    norms.sort_by(f64::total_cmp);
    let median = norms[norms.len() / 2];
    let [repaired, kept] = check(program, &with(Some(median)), late, every);
    assert!(repaired > 0 && kept > 0, "some are clipped: {repaired} {kept}");
}

#[test]
fn every_schedule_has_the_same_bits() {
    for (schedule, ranks, late) in [
        ("gpipe", 2, 0),
        ("1f1b", 4, 0),
        ("interleaved1f1b", 2, 0),
        ("zb-h1", 2, 1),
        ("zbvzerobubble", 2, 1),
        ("dualpipev", 2, 0),
    ] {
        check_limits(&program(schedule, ranks, MICROBATCHES), &config(), late, 1);
    }
}

#[test]
fn replicas_have_the_same_bits() {
    for data_parallel_mode in [DataParallelMode::Replicated, DataParallelMode::Sharded] {
        let config = PipelineConfig { data_parallel: 2, data_parallel_mode, ..config() };
        for late in [0, 3] {
            check_limits(&program("1f1b", 2, MICROBATCHES), &config, late, 1);
        }
    }
}

#[test]
fn accumulated_batches_have_the_same_bits() {
    check_limits(&program("1f1b", 2, MICROBATCHES), &config(), 0, 3);
}

#[test]
fn groups_with_norms_of_their_own_have_the_same_bits() {
    // The norm of the group is above its limit in each step, so each early update is repaired.
    let group = ClipGroup::new(|path| path.ends_with("bias"), 1e-4);
    let config = PipelineConfig { clip_norm: None, clip_groups: vec![group], ..config() };
    let program = program("1f1b", 2, MICROBATCHES);
    let early = PipelineConfig { post_validation: true, ..config.clone() };
    let (expected, _) = train(program.clone(), &config, 0, 1);
    let (found, summaries) = train(program, &early, 0, 1);
    assert_eq!(found, expected);
    assert!(summaries.iter().any(is_early) && summaries.iter().all(|step| step.repaired == is_early(step)));
}

#[test]
fn an_update_that_is_skipped_is_undone() {
    let loss_scaling = LossScaling { initial: f64::from(1 << 24), interval: 2 };
    let config = PipelineConfig { precision: Precision::F16, loss_scaling, clip_norm: None, ..config() };
    let program = program("zb-h1", 2, MICROBATCHES);
    for late in [0, 1] {
        let early = PipelineConfig { post_validation: true, ..config.clone() };
        let (expected, _) = train(program.clone(), &config, late, 1);
        let (found, summaries) = train(program.clone(), &early, late, 1);
        assert_eq!(found, expected);
        assert!(summaries.iter().any(|step| step.repaired), "the first scale is too large");
        assert!(summaries.iter().all(|step| step.repaired == (step.skipped && is_early(step))));
    }
}

/// The order of messages and ranks is random: a rank may have the norm before it could update early, or
/// update some of its stages early.
#[test]
fn any_order_of_messages_has_the_same_bits() {
    let program = || program("zbvzerobubble", 2, MICROBATCHES);
    let limit =
        launch(program(), &config()).step_batch(numbered(0, &config()), RATE).expect("a step").gradient_norm;
    let run = |post_validation, seed| {
        // The first norm is the limit, so some steps are clipped.
        let config = PipelineConfig { post_validation, clip_norm: Some(limit), ..config() };
        let stages = program().placement().stages();
        let mut pipeline =
            SeededPipeline::new(program(), &config, seed, |index| stage(index, stages)).expect("it starts");
        let steps =
            (0..4).map(|number| pipeline.step_batch(numbered(number, &config), RATE).expect("a step"));
        let steps: Vec<StepSummary> = steps.collect();
        let repaired = steps.iter().filter(|step| step.repaired).count();
        let early = steps.iter().filter(|step| is_early(step)).count();
        (steps.iter().map(result_of).collect::<Vec<_>>(), repaired, early)
    };
    let (expected, ..) = run(false, 0);
    let (mut repaired, mut early) = (0, 0);
    for seed in 0..60 {
        let (found, more_repaired, more_early) = run(true, seed);
        assert_eq!(found, expected, "seed {seed}");
        repaired += more_repaired;
        early += more_early;
    }
    assert!(0 < repaired && repaired < early && early <= 240, "{repaired} of {early}");
}
