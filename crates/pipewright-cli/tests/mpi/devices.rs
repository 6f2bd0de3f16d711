//! Tests of processes whose ranks compute on a device that is not the processor.

use std::fs;

use pipewright::device::{DeviceChoice, Devices};

use super::{figures, folder, processes, train_on_threads, words};

/// Returns whether there is an adapter that computes on the processor. A test without one prints a message
/// and passes, unless `PIPEWRIGHT_REQUIRE_DEVICE` is set.
#[expect(clippy::print_stdout, reason = "a test that is left out says so")]
fn is_there() -> bool {
    let device: DeviceChoice = "wgpu:cpu".parse().expect("a device");
    let Err(error) = Devices::open(&[device]) else { return true };
    assert!(std::env::var_os("PIPEWRIGHT_REQUIRE_DEVICE").is_none(), "{error}");
    println!("not tested: {error}");
    false
}

#[test]
fn a_device_that_fails_in_one_process_ends_all_with_the_action_that_sends() {
    if !is_there() {
        return;
    }
    let folder = folder();
    // A result of the first matrix of a feed-forward layer has 8 GiB.
    let text = "the quick brown fox jumps over the lazy dog ".repeat(16 * 1024);
    fs::write(folder.path().join("long.txt"), text).expect("the scratch folder takes files");
    // A second microbatch would let the rank meet the failure in its forward before the thread that sends
    // does.
    fs::write(folder.path().join("one.csv"), "0F0,,,0B0\n,1F0,1B0,\n")
        .expect("the scratch folder takes files");
    let overrides = [
        "model.num_hidden_layers=2",
        "data.path=long.txt",
        "data.seq_len=2048",
        "model.hidden_size=4",
        "model.intermediate_size=1048576",
        "pipeline.microbatches=1",
        "pipeline.ranks=2",
        "pipeline.schedule=one.csv",
        "run.device=wgpu:cpu",
    ];
    let output = processes(folder.path(), 2, &overrides);
    let words = words(&output).split_whitespace().collect::<Vec<_>>().join(" ");
    assert_eq!(output.status.code(), Some(4), "{words}");
    for part in
        ["step 1: rank 0, stage 0, microbatch 0, action 0SEND_F0: ", "the device has no memory left: "]
    {
        assert!(words.contains(part), "{words}");
    }
}

#[test]
fn processes_on_a_device_train_as_threads_do_to_the_bit() {
    if !is_there() {
        return;
    }
    let folder = folder();
    for devices in ["[\"wgpu:cpu\"]", "[\"wgpu:cpu\", \"flex\"]"] {
        let devices = format!("run.devices={devices}");
        let overrides = [
            "model.num_hidden_layers=4",
            "pipeline.microbatches=4",
            "pipeline.ranks=2",
            "pipeline.schedule=zbvzerobubble",
            devices.as_str(),
        ];
        let expected = train_on_threads(folder.path(), &overrides);
        let output = processes(folder.path(), 2, &overrides);
        assert_eq!(output.status.code(), Some(0), "{devices}: {}", words(&output));
        assert_eq!(figures(folder.path()), expected, "{devices}");
    }
}
