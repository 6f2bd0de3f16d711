//! Tests of verified steps in several processes: the process that has computed wrong bits is named.

use std::fs;

use super::{figures, folder, processes_command, train_on_threads, words};

/// Checks that a process that computes wrong bits once is named, and that the run has the figures of threads
/// without the fault.
fn check_verified(count: u32, rank: u32, set: &[&str]) {
    let folder = folder();
    let common = ["run.steps=10", "pipeline.microbatches=4", "model.num_hidden_layers=4", "pipeline.ranks=2"];
    let set = [&common[..], set].concat();
    let expected = train_on_threads(folder.path(), &set);
    let set = [&set[..], &["run.verify=on-suspicion"]].concat();
    let mut command = processes_command(folder.path(), count, &set);
    let fault = format!("flip:{rank}:9");
    let output = command.env("PIPEWRIGHT_FAULT", fault).output().expect("mpirun is installed with MPI");
    let words = words(&output);
    assert_eq!(output.status.code(), Some(0), "{words}");
    assert_eq!(figures(folder.path()), expected, "{words}");
    let sentence = format!("computed 2 times more: rank {rank} has computed wrong bits in action 1");
    assert_eq!(words.matches(&sentence).count(), 1, "{set:?}: {words}");
    let metrics = fs::read_to_string(folder.path().join("out/metrics.jsonl")).expect("metrics");
    assert!(metrics.contains("{\"event\":\"wrong_bits\",\"step\":9,"), "{metrics}");
}

#[test]
fn a_verified_step_names_the_process_with_wrong_bits() {
    check_verified(2, 1, &["mesh.data_parallel=1"]);
    check_verified(4, 1, &["mesh.data_parallel=2"]);
}

/// The wrong gradients reach the experts of the stage before, which the replicas hold together.
#[test]
fn a_verified_step_names_the_process_with_wrong_bits_among_replicas_that_hold_experts_together() {
    check_verified_experts(4, 1, &["mesh.data_parallel=2"]);
    // The tensor ranks of a stage have neighbouring numbers.
    let tensor = ["mesh.data_parallel=2", "mesh.tensor_parallel=2", "mesh.data_parallel_mode=sharded"];
    check_verified_experts(8, 6, &tensor);
}

#[test]
#[ignore = "takes a minute"]
fn a_verified_step_names_the_process_with_wrong_bits_in_other_meshes_with_experts() {
    check_verified_experts(4, 3, &["mesh.data_parallel=2", "mesh.data_parallel_mode=sharded"]);
    // Two expert groups hold the same rows of experts.
    check_verified_experts(8, 5, &["mesh.data_parallel=4", "mesh.data_parallel_mode=sharded"]);
    check_verified_experts(8, 3, &["mesh.data_parallel=2", "mesh.tensor_parallel=2"]);
}

/// Like [`check_verified`], for replicas that hold experts together in twos.
fn check_verified_experts(count: u32, rank: u32, overrides: &[&str]) {
    let experts = ["model.architecture=qwen3_moe", "model.num_experts=4", "mesh.expert_parallel=2"];
    check_verified(count, rank, &[&experts[..], overrides].concat());
}
