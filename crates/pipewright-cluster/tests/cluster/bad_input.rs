//! Errors of cluster files, layouts and files of runs.

use pipewright_cluster::catalogue::{by_name, from_toml, machines};
use pipewright_cluster::comparison::compare;
use pipewright_cluster::machine::Constants;
use pipewright_cluster::published::read;
use pipewright_schedule::error_text::with_causes;

use crate::data::RUNS;

/// Checks that the runs with `old` replaced by `new` fail with a message that contains `message`.
fn check_runs(old: &str, new: &str, message: &str) {
    assert!(RUNS.contains(old), "{old}");
    let text = RUNS.replacen(old, new, 1);
    let error = match read(&text) {
        Ok(published) => with_causes(&compare(&published).map(drop).expect_err("an error")),
        Err(error) => with_causes(&error),
    };
    assert!(error.contains(message), "{error}");
}

fn check_cluster(text: &str, message: &str) {
    let error = with_causes(&from_toml(text).expect_err("an error"));
    assert!(error.contains(message), "{error}");
}

#[test]
fn known_machines_are_complete_and_have_sources() {
    let machines = machines();
    let names: Vec<&str> =
        machines.iter().flat_map(|machine| machine.aliases.first()).map(String::as_str).collect();
    let expected = ["a100", "h100", "h100-500w", "h200", "b200", "gb200", "mi300x", "l40s", "4090"];
    assert_eq!(names, expected);
    assert!(machines.iter().all(|machine| machine.source.len() > 20));
}

#[test]
fn unknown_machines_suggest_near_ones() {
    let error = by_name("h10").expect_err("an error").to_string();
    assert!(
        error.starts_with("there is no machine `h10`; the nearest name is `h100`; known are a100"),
        "{error}"
    );
}

#[test]
fn a_cluster_file_with_units_that_do_not_match_is_refused() {
    check_cluster(
        "name = \"h100\"\nmemory_gb = \"80 GB/s\"",
        "`memory_gb` is `80 GB/s`, which measures bytes per second",
    );
    check_cluster("name = \"h100\"\nnetwork_gb_per_s = \"50 GB\"", "it must measure bytes per second");
    check_cluster("name = \"h100\"\nbf16_tflops = \"989 TB/s\"", "it must measure operations per second");
    check_cluster("name = \"h100\"\nmemory_gb = -80", "use a number above 0");
    check_cluster("name = \"h100\"\ngpus_per_node = 0", "`gpus_per_node` is 0");
    check_cluster("name = \"my own\"\nmemory_gb = 80", "`memory_gb_per_s` is missing");
    check_cluster("name = \"h100\"\nmemory = 80", "unknown field `memory`");
}

#[test]
fn a_cluster_file_changes_a_known_machine() {
    let machine = from_toml(
        "name = \"H100 with less memory\"\nmemory_gb = \"40 GiB\"\nnetwork_gb_per_s = \"200 Gbit/s\"",
    );
    let machine = machine.expect("a machine");
    let known = by_name("h100").expect("a machine");
    assert_eq!((machine.memory, machine.network_bandwidth), (40.0 * 1_073_741_824.0, 25e9));
    assert_eq!((machine.bf16, machine.constants), (known.bf16, known.constants));
}

#[test]
fn a_machine_of_its_own_has_the_expected_constants() {
    let sizes = "memory_gb = 96\nmemory_gb_per_s = 4000\nnode_gb_per_s = 900\nnetwork_gb_per_s = 100\ngpus_per_node = 4";
    let machine = from_toml(&format!("name = \"my own\"\nbf16_tflops = 1000\n{sizes}")).expect("a machine");
    assert_eq!(machine.constants, Constants::EXPECTED);
    assert_eq!((machine.bf16, machine.gpus_per_node), (Some(1e15), 4));
    let constants = "[constants]\nproduct = 1.2\nproduct_fp8 = 0.5\nattention = 0.5\nmemory = 0.8\nlink = 0.8\nhidden = 0\nlaunch = 0";
    check_cluster(
        &format!("name = \"my own\"\n{sizes}\n{constants}"),
        "the constant `product` is 1.2; use a value from 0.3 to 0.9",
    );
}

#[test]
fn gpus_that_the_mesh_does_not_divide_are_refused() {
    check_runs(
        "gpus = 64\ntp = 8\npp = 8",
        "gpus = 63\ntp = 8\npp = 8",
        "run 2 (`gpt3-175B`): 63 GPUs are not a multiple of 64",
    );
    check_runs(
        "tp = 4\npp = 8\nvp = 6\nmbs = 1\ngbs = 256",
        "tp = 4\npp = 8\nvp = 6\nmbs = 1\ngbs = 255",
        "use 256 rows",
    );
    check_runs("pp = 64\nvp = 1", "pp = 64\nvp = 4", "fewer than the 256 stages");
    check_runs(
        "tp = 8\npp = 1\nvp = 1\nmbs = 4\ngbs = 4",
        "tp = 0\npp = 1\nvp = 1\nmbs = 4\ngbs = 4",
        "`tp` is 0",
    );
}

#[test]
fn unknown_keys_and_names_are_named() {
    check_runs("vp = 1\n", "vq = 1\n", "unknown field `vq`");
    check_runs("model = \"megatron-22B\"", "model = \"megatron-22\"", "the nearest name is `megatron-22B`");
    check_runs(
        "machine = \"H100 80 GB SXM\"",
        "machine = \"H100 80GB SXM\"",
        "the nearest name is `H100 80 GB SXM`",
    );
    check_runs("step_s = 1.42\n", "", "neither `step_s` nor `tokens_per_s_per_gpu`");
    check_runs("schedule = \"1f1b\"", "schedule = \"1f2b\"", "1f2b");
    check_runs("precision = \"f16\"", "precision = \"f61\"", "f61");
    check_runs("tp = 8\n", "tp = 8\ndp = 3\n", "the mesh make 1 replicas");
}
