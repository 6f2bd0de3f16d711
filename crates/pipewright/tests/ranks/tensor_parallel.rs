//! Ranks that compute stages together: the results of one rank, also in half precision, the bytes at
//! boundaries, placements between stages, hooks, modules, failures, checkpoints, whole experts.

mod checkpoints;
mod delayed;
mod early_updates;
mod edges;
mod expert_exchange_times;
mod expert_groups;
mod expert_overlaps;
mod expert_verification;
mod experts;
mod failures;
mod hooks;
mod model;
mod modules;
mod outputs;
mod precision;
mod verification;

use burn::module::ParamGroup;
use burn::optim::MuonConfig;
use pipewright::mesh::DataParallelMode;
use pipewright::pipeline::{PipelineConfig, SeededPipeline};
use pipewright_schedule::generate::catalogue;

use crate::support::{self, batch, program, stage};
use model::{MICROBATCHES, Sizes, assert_close, config_of, launch, sizes, take_step, take_steps, try_launch};

#[test]
fn every_mesh_has_the_results_of_one_rank() {
    let expected = take_steps(&mut launch("1f1b", sizes(1, 1, 1)), 0..4);
    for sizes in [sizes(1, 1, 2), sizes(1, 1, 3), sizes(2, 1, 3), sizes(1, 2, 2), sizes(2, 2, 2)] {
        let found = take_steps(&mut launch("1f1b", sizes), 0..4);
        assert_close(&found, &expected, &format!("{sizes:?}"));
        let again = take_steps(&mut launch("1f1b", sizes), 0..4);
        assert_eq!(found, again, "{sizes:?} has the same bits again");
    }
}

#[test]
fn every_schedule_has_the_results_of_one_rank() {
    let expected = take_steps(&mut launch("1f1b", sizes(1, 1, 1)), 0..2);
    for generator in catalogue().iter().filter(|generator| generator.trains) {
        let found = take_steps(&mut launch(generator.name, sizes(2, 1, 2)), 0..2);
        assert_close(&found, &expected, generator.name);
    }
}

#[test]
fn replicas_may_hold_rows_of_the_shards() {
    let sizes = sizes(2, 2, 2);
    let config = PipelineConfig { data_parallel_mode: DataParallelMode::Sharded, ..config_of(sizes) };
    let mut sharded = try_launch("zb-h1", sizes, &config, None).expect("it starts");
    let replicated = take_steps(&mut launch("zb-h1", sizes), 0..3);
    assert_eq!(take_steps(&mut sharded, 0..3), replicated, "the same bits");
}

#[test]
fn a_rank_sends_its_part_of_a_boundary() {
    let bytes = |schedule: &str, sizes: Sizes| {
        take_step(&mut launch(schedule, sizes), 0).expect("a step").boundary_bytes
    };
    for schedule in ["1f1b", "zbvzerobubble"] {
        let whole = bytes(schedule, sizes(2, 1, 1));
        assert!(whole.iter().all(|&bytes| bytes > 0), "{whole:?}");
        // A microbatch has three rows.
        let parts = bytes(schedule, sizes(2, 1, 3));
        let expected: Vec<u64> = whole.iter().flat_map(|bytes| [bytes / 3; 3]).collect();
        assert_eq!(parts, expected, "{schedule}");
    }
}

#[test]
fn an_evaluation_has_the_losses_of_one_rank() {
    let evaluate = |sizes: Sizes| {
        let mut pipeline = launch("1f1b", sizes);
        let split = |seed| support::split(batch(seed, MICROBATCHES), MICROBATCHES);
        let batch = pipewright::batch::Batch::new(split(0), split(100));
        pipeline.eval_losses(batch).expect("an evaluation").losses
    };
    let (found, expected) = (evaluate(sizes(2, 1, 2)), evaluate(sizes(2, 1, 1)));
    assert_close(&[(found, 1.0)], &[(expected, 1.0)], "evaluation");
}

#[test]
fn accumulated_gradients_are_added_once() {
    let steps = |sizes: Sizes| {
        let mut pipeline = launch("1f1b", sizes);
        let split = |seed| support::split(batch(seed, MICROBATCHES), MICROBATCHES);
        let half = pipewright::batch::Batch::new(split(7), split(107));
        pipeline.accumulate(half).expect("half a step");
        take_steps(&mut pipeline, 0..2)
    };
    assert_close(&steps(sizes(2, 1, 2)), &steps(sizes(2, 1, 1)), "accumulated");
}

#[test]
fn a_world_of_another_size_is_refused() {
    let sizes = sizes(2, 1, 2);
    let config = PipelineConfig { tensor_parallel: 3, ..config_of(sizes) };
    let error = try_launch("1f1b", sizes, &config, None).err().expect("6 ranks are needed").to_string();
    assert_eq!(
        error,
        "the transport has 4 ranks, and 1 replica of a program of 2 ranks need 1 x 2 x 3 (tensor ranks)"
    );
}

#[test]
fn a_pipeline_on_one_thread_refuses_tensor_ranks() {
    let config = config_of(sizes(1, 1, 2));
    let outcome = SeededPipeline::new(program("1f1b", 1, 2), &config, 0, |index| stage(index, 1));
    let error = outcome.err().expect("the ranks would wait for each other");
    assert!(error.to_string().contains("and 2 tensor ranks need one each"), "{error}");
}

#[test]
fn an_optimizer_that_needs_whole_matrices_is_refused() {
    let sizes = sizes(1, 1, 2);
    let matrices = ParamGroup::from_predicate("up.weight");
    let optimizer = support::optimizer().with_group(matrices, MuonConfig::new().build(), None);
    let config = PipelineConfig { optimizer: Some(optimizer), ..config_of(sizes) };
    let error = try_launch("1f1b", sizes, &config, None).err().expect("it mixes rows").to_string();
    assert!(error.contains("depends on other elements"), "{error}");
}
