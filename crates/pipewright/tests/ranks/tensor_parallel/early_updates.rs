//! Updates before the gradient norm on tensor ranks, and on replicas that hold experts together: the bits of
//! updates after it.

use std::sync::Arc;

use pipewright::mesh::DataParallelMode;
use pipewright::pipeline::{NamedParameter, Pipeline, PipelineConfig, StepSummary};

use super::expert_groups;
use super::model::{MICROBATCHES, config_of, sizes, take_step, try_launch};
use crate::support::{Late, program};

/// The losses and the norm of each step, and the parameters of all ranks at the end.
type Outcome = (Vec<(Vec<f64>, f64)>, Vec<Vec<u32>>);

fn run(
    schedule: &str,
    config: &PipelineConfig,
    launch: &dyn Fn(&PipelineConfig) -> Pipeline,
) -> (Outcome, Vec<StepSummary>) {
    let groups = [config.data_parallel, config.tensor_parallel];
    let late = Late::new(&program(schedule, 2, MICROBATCHES / config.data_parallel), groups, 0);
    let mut pipeline = launch(&PipelineConfig { hook: Some(Arc::new(late)), ..config.clone() });
    let steps: Vec<_> = (0..6).map(|step| take_step(&mut pipeline, step).expect("a step")).collect();
    let bits = |parameter: NamedParameter| parameter.data.iter::<f32>().map(f32::to_bits).collect();
    let parameters = pipeline.parameters().expect("every rank answers").into_iter().map(bits).collect();
    let results = steps.iter().map(|step| (step.losses.clone(), step.gradient_norm)).collect();
    ((results, parameters), steps)
}

/// Compares updates before and after the norm, with a limit between the norms.
fn check(schedule: &str, config: &PipelineConfig, launch: impl Fn(&PipelineConfig) -> Pipeline) {
    let what = format!("{schedule}, {} replicas", config.data_parallel);
    let unclipped = PipelineConfig { clip_norm: None, ..config.clone() };
    let (_, steps) = run(schedule, &unclipped, &launch);
    let mut norms: Vec<f64> = steps.iter().map(|step| step.gradient_norm).collect();
    norms.sort_by(f64::total_cmp);
    let config = PipelineConfig { clip_norm: Some(norms[norms.len() / 2]), ..config.clone() };
    let (expected, _) = run(schedule, &config, &launch);
    let (found, steps) = run(schedule, &PipelineConfig { post_validation: true, ..config }, &launch);
    assert!(found == expected, "{what}: {:?} {:?}", found.0, expected.0);
    let early = |step: &&StepSummary| step.early_update.iter().any(|time| !time.is_zero());
    let repaired = steps.iter().filter(|step| step.repaired).count();
    let early = steps.iter().filter(early).count();
    assert!(0 < repaired && repaired < early, "{what}: {repaired} of {early} early updates are repaired");
}

#[test]
fn early_updates_of_tensor_ranks_have_the_same_bits() {
    for (schedule, sizes) in
        [("1f1b", sizes(2, 1, 2)), ("1f1b", sizes(2, 2, 2)), ("dualpipev", sizes(2, 1, 2))]
    {
        check(schedule, &config_of(sizes), |config| {
            try_launch(schedule, sizes, config, None).expect("it starts")
        });
    }
}

#[test]
fn early_updates_of_experts_across_replicas_have_the_same_bits() {
    for experts in [2, 4] {
        check("1f1b", &expert_groups::config(experts), |config| expert_groups::launch("1f1b", config));
    }
    let sharded = expert_groups::sharded(4, DataParallelMode::Hybrid { shards: 2 }, 2);
    check("1f1b", &sharded, |config| expert_groups::launch("1f1b", config));
}
