//! How many bytes ranks send for the sums of gradients: over replicas, and over the owners of a shared
//! parameter.

use pipewright::batch::Batch;
use pipewright::ids::WorldRank;
use pipewright::mesh::DataParallelMode;
use pipewright::pipeline::{PipelineConfig, SeededPipeline};
use pipewright::transport::Traffic;

use crate::sharing;
use crate::support::{LAYERS, ROWS, WIDTH, batch, config, program, split, stage};

/// Takes a step on `microbatches` microbatches and returns what each rank sent in it.
fn sent_in_a_step(pipeline: &mut SeededPipeline, ranks: u32, microbatches: u32) -> Vec<Traffic> {
    let sent = |pipeline: &SeededPipeline| -> Vec<Traffic> {
        (0..ranks).map(|rank| pipeline.sent_by(WorldRank::new(rank))).collect()
    };
    let before = sent(pipeline);
    let parts = |seed| split(batch(seed, microbatches), microbatches);
    pipeline.step_batch(Batch::new(parts(0), parts(100)), 1e-2).expect("a step");
    let difference = |(after, before): (Traffic, Traffic)| Traffic {
        messages: after.messages - before.messages,
        bytes: after.bytes - before.bytes,
    };
    sent(pipeline).into_iter().zip(before).map(difference).collect()
}

#[test]
fn replicas_send_their_gradients_twice_at_most() {
    let gradients = (LAYERS * (WIDTH * WIDTH + WIDTH) * 4) as u64;
    for replicas in [2, 4, 8] {
        // One rank per replica, so that there are no messages between stages.
        let config = PipelineConfig { data_parallel: replicas, ..config() };
        let program = program("gpipe", 1, 2);
        let mut pipeline =
            SeededPipeline::new(program, &config, 0, |index| stage(index, 1)).expect("it starts");
        let sent = sent_in_a_step(&mut pipeline, replicas, 2 * replicas);
        let others = u64::from(replicas - 1);
        let total: u64 = sent.iter().map(|traffic| traffic.bytes).sum();
        // A replica sends all parts but its own, and its sum to each other replica. All replicas together
        // send the whole gradient twice for each replica but one. The rest is the norm.
        let sums = 2 * others * gradients;
        assert!((sums..sums + 32 * u64::from(replicas)).contains(&total), "{replicas}: {total} for {sums}");
        // Two messages to each other replica, whatever the number of parameters, and the messages of two
        // trees.
        let trees = 2 * u64::from(replicas.ilog2());
        for traffic in &sent {
            assert!(traffic.messages <= 2 * others + trees, "{replicas}: {traffic:?}");
            // Parts are whole rows: six rows in eight parts differ from each other.
            let share = 2.0 * others as f64 / f64::from(replicas) * gradients as f64;
            assert!((traffic.bytes as f64) < 1.5 * share, "{replicas}: {traffic:?} for {share}");
        }
    }
}

#[test]
fn groups_send_the_gradients_of_a_shard_to_each_other() {
    const SHARDS: u32 = 2;
    let gradients = (LAYERS * (WIDTH * WIDTH + WIDTH) * 4) as u64;
    let sent_by = |replicas: u32| -> u64 {
        let data_parallel_mode = DataParallelMode::Hybrid { shards: SHARDS };
        let config = PipelineConfig { data_parallel: replicas, data_parallel_mode, ..config() };
        let program = program("gpipe", 1, 2);
        let mut pipeline =
            SeededPipeline::new(program, &config, 0, |index| stage(index, 1)).expect("it starts");
        let sent = sent_in_a_step(&mut pipeline, replicas, 2 * replicas);
        sent.iter().map(|traffic| traffic.bytes).sum()
    };
    let one_group = sent_by(SHARDS);
    for groups in [2, 3] {
        // Inside a group nothing changes. Each shard is sent to another group twice for each group but one.
        let replicas = groups * SHARDS;
        let expected = u64::from(groups) * one_group + 2 * u64::from(groups - 1) * gradients;
        let found = sent_by(replicas);
        let norm = 128 * u64::from(replicas) * u64::from(groups);
        assert!(found.abs_diff(expected) < norm, "{groups} groups: {found} for {expected}");
    }
}

#[test]
fn owners_of_a_shared_parameter_send_one_gradient_and_get_one_sum() {
    const MICROBATCHES: u32 = 8;
    let weight = (WIDTH * WIDTH * 4) as u64;
    let boundary = (ROWS * WIDTH * 4) as u64;
    for owners in [2u32, 3, 4, 8] {
        let program = program("gpipe", owners, MICROBATCHES);
        let mut pipeline = SeededPipeline::new(program, &config(), 0, |stage| sharing::stage(stage, owners))
            .expect("it starts");
        let sent = sent_in_a_step(&mut pipeline, owners, MICROBATCHES);
        let total: u64 = sent.iter().map(|traffic| traffic.bytes).sum();
        let others = u64::from(owners - 1);
        let messages = 2 * others * u64::from(MICROBATCHES) * boundary;
        // Two owners send each other one gradient. More send one each, and get one sum each.
        let sums = 2 * others * weight;
        let rest = total - messages;
        assert!((sums..sums + 64 * u64::from(owners)).contains(&rest), "{owners}: {rest} for {sums}");
    }
}
