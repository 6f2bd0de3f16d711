//! The command `devices`, and runs on a device that is not the processor, through the binary.
//!
//! Runs need the feature `wgpu` and a Vulkan adapter that computes on the processor. Without such an adapter
//! they print a message and pass, unless `PIPEWRIGHT_REQUIRE_DEVICE` is set.

#[expect(dead_code, reason = "the tests of this file use a part of it")]
mod run;
mod scratch;

use run::Run;

fn refuse(arguments: &[&str], expected: &[&str]) {
    let output = Run::new().command(arguments);
    let words = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{arguments:?}: {words}");
    for part in expected {
        assert!(words.contains(part), "{arguments:?}: {words}");
    }
}

#[test]
fn the_processor_is_listed() {
    let output = Run::new().command(&["devices"]);
    let table = String::from_utf8_lossy(&output.stdout).into_owned();
    let mut lines = table.lines();
    assert!(lines.next().is_some_and(|line| line.starts_with("device ")), "{table}");
    let processor = lines.next().unwrap_or_default();
    assert!(processor.starts_with("flex ") && processor.contains("iB"), "{table}");
    #[cfg(not(feature = "cuda"))]
    assert!(table.contains("not in this build: cuda, ") && table.contains("--features cuda"), "{table}");
}

#[test]
fn devices_that_cannot_be_used_are_refused() {
    refuse(&["check", "small.toml", "--set", "run.device=flexx"], &["did you mean `flex`?"]);
    #[cfg(not(feature = "cuda"))]
    refuse(&["train", "small.toml", "--set", "run.device=cuda"], &["cargo build --release --features cuda"]);
    let both = ["check", "small.toml", "--set", "run.device=flex", "--set", "run.devices=[\"flex\"]"];
    refuse(&both, &["`device` and `devices` are both written", "remove one of them"]);
    let shared = ["check", "small.toml", "--set", "run.exclusive=true"];
    refuse(&shared, &["2 ranks need different devices, but have only 1"]);
}

#[test]
fn an_argument_replaces_the_other_key_of_the_file() {
    let run = Run::new();
    run.train(&["run.steps=2", "run.devices=[\"flex\", \"flex\"]"]);
    run.resume(&["run.steps=3", "run.device=flex"]);
    let config = std::fs::read_to_string(run.path("out/config.toml")).expect("the run's configuration");
    assert!(config.contains("device = \"flex\"") && !config.contains("devices"), "{config}");
    assert_eq!(run.figures().len(), 3);
}

#[cfg(feature = "wgpu")]
mod on_a_device {
    use std::collections::BTreeMap;
    use std::sync::OnceLock;

    use pipewright::device::{DeviceChoice, Devices};
    use safetensors::SafeTensors;

    use super::{Run, refuse};

    const DEVICE: &str = "wgpu:cpu";

    /// Returns whether the tested device exists.
    #[expect(clippy::print_stdout, reason = "a test that is left out says so")]
    fn is_there() -> bool {
        static IS_THERE: OnceLock<bool> = OnceLock::new();
        *IS_THERE.get_or_init(|| match Devices::open(&[DEVICE.parse::<DeviceChoice>().expect("a device")]) {
            Ok(_) => true,
            Err(error) if std::env::var_os("PIPEWRIGHT_REQUIRE_DEVICE").is_some() => panic!("{error}"),
            Err(error) => {
                println!("not tested: {error}");
                false
            }
        })
    }

    fn close(found: &Run, expected: &Run) {
        let (found, expected) = (found.figures(), expected.figures());
        assert_eq!(found.len(), expected.len());
        for ((step, loss, norm), (_, expected_loss, expected_norm)) in found.iter().zip(&expected) {
            for (found, expected, within) in [(loss, expected_loss, 2e-5), (norm, expected_norm, 2e-4)] {
                let [found, expected] = [found, expected].map(|text| text.parse::<f64>().expect("a number"));
                assert!((found - expected).abs() <= within * expected, "step {step}: {found} {expected}");
            }
        }
    }

    #[test]
    fn the_device_is_listed_with_its_name() {
        if !is_there() {
            return;
        }
        let output = Run::new().command(&["devices", "--format", "json"]);
        let list: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
        let found = list.as_array().into_iter().flatten().find(|device| device["device"] == DEVICE);
        let device = found.unwrap_or_else(|| panic!("{list:#}"));
        assert!(device["name"].as_str().is_some_and(|name| !name.is_empty()), "{device:#}");
        assert_eq!((&device["back_end"], &device["copies_directly"]), (&"wgpu".into(), &false.into()));
    }

    #[test]
    fn a_run_moves_between_the_processor_and_a_device() {
        if !is_there() {
            return;
        }
        let on_device = format!("run.device={DEVICE}");
        let (moved, stays) = (Run::new(), Run::new());
        // With a decay, the learning rate of a step depends on the last step.
        let constant = "optimizer.schedule=constant";
        stays.train(&["run.steps=6", constant]);
        moved.train(&["run.steps=6", constant, &on_device, "run.checkpoint_every=2"]);
        close(&moved, &stays);
        // Back to the checkpoint of step 2, which the device wrote, and on with the processor.
        let output = moved.command(&[
            "resume",
            "out/checkpoints/step-00000002",
            "--set",
            "run.steps=4",
            "--set",
            "run.device=flex",
        ]);
        assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
        // The last steps run on both: the processor wrote the checkpoint.
        moved.resume(&["run.steps=6", &format!("run.devices=[\"flex\", \"{DEVICE}\"]"), "pipeline.ranks=2"]);
        close(&moved, &stays);
        let output = moved.command(&["export", "out", "model"]);
        assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
        assert!(moved.path("model/model.safetensors").exists());
    }

    /// Returns the tensors of a run's checkpoints by step and name.
    fn stored(run: &Run, steps: u64) -> Vec<BTreeMap<String, Vec<u8>>> {
        let of_step = |step| {
            let path = run.path(&format!("out/checkpoints/step-{step:08}/rank-0000.safetensors"));
            let bytes = std::fs::read(path).expect("a checkpoint of each step");
            let file = SafeTensors::deserialize(&bytes).expect("tensors");
            file.tensors().into_iter().map(|(name, view)| (name, view.data().to_vec())).collect()
        };
        (1..=steps).map(of_step).collect()
    }

    #[test]
    fn a_checkpoint_has_the_parameters_of_its_step() {
        if !is_there() {
            return;
        }
        let on_device = format!("run.device={DEVICE}");
        // Each checkpoint is written while the next step computes.
        let set = ["run.steps=8", "run.checkpoint_every=1", "run.keep_checkpoints=8", &on_device];
        let stored_by_run = || {
            let run = Run::new();
            run.train(&set);
            stored(&run, 8)
        };
        let expected = stored_by_run();
        for _ in 0..2 {
            for (step, (found, expected)) in (1..).zip(stored_by_run().iter().zip(&expected)) {
                let differing: Vec<_> = found.keys().filter(|name| found[*name] != expected[*name]).collect();
                assert!(differing.is_empty(), "step {step}: {differing:?}");
            }
        }
    }

    #[test]
    fn a_run_that_the_device_cannot_hold_names_the_place_and_the_bytes() {
        if !is_there() {
            return;
        }
        let run = Run::new();
        // A result of the first matrix of a feed-forward layer has 8 GiB.
        let text = "the quick brown fox jumps over the lazy dog ".repeat(4 * 2048 / 44 + 1);
        std::fs::write(run.path("long.txt"), text).expect("the scratch folder takes files");
        let device = format!("run.device={DEVICE}");
        let set = [
            "data.path=long.txt",
            "data.seq_len=2048",
            "model.hidden_size=4",
            "model.intermediate_size=1048576",
            "run.steps=1",
            &device,
        ];
        let set = set.iter().flat_map(|set| ["--set", set]);
        let output = run.command(&["train", "small.toml"].into_iter().chain(set).collect::<Vec<_>>());
        let words = String::from_utf8_lossy(&output.stderr).split_whitespace().collect::<Vec<_>>().join(" ");
        assert_eq!(output.status.code(), Some(4), "{words}");
        for part in
            ["step 1: rank ", ", stage ", ", microbatch ", ", action ", "the device has no memory left: "]
        {
            assert!(words.contains(part), "{words}");
        }
    }

    #[test]
    fn a_precision_that_the_device_lacks_is_refused() {
        if !is_there() {
            return;
        }
        // WGSL has no bfloat16.
        let device = format!("run.device={DEVICE}");
        for command in ["check", "train"] {
            let arguments = [command, "small.toml", "--set", &device, "--set", "run.precision=bf16"];
            refuse(&arguments, &["the device `wgpu:cpu` does not compute in bf16: use another device"]);
        }
    }

    #[test]
    fn a_device_that_is_not_there_is_refused_with_those_that_are() {
        if !is_there() {
            return;
        }
        let expected =
            ["the device `wgpu:7` is not available; available: `flex` (processor), ", "`wgpu:cpu` ("];
        refuse(&["train", "small.toml", "--set", "run.device=wgpu:7"], &expected);
    }
}
