//! Plans of runs that train adapters: what `profile` measures, what `plan` predicts, and the schedule `auto`.

use std::fs;

use serde_json::Value as Json;
use toml::{Table, Value};

use super::adapters::folder_without_path;
use crate::run::{Run, in_one_line};

/// Adapters on the last two of eight blocks.
const UPPER: [&str; 5] = [
    "adapter.kind=lora",
    r#"adapter.targets=["*.layers.6.*", "*.layers.7.*"]"#,
    "pipeline.ranks=2",
    "pipeline.microbatches=4",
    "run.steps=1",
];

/// Measures a profile of adapters on the upper blocks.
fn profiled() -> (Run, Table) {
    let folder = folder_without_path();
    let (_, said) = folder.succeed(&["profile", "small.toml", "--time-limit", "1s", "-o", "p.toml"], &UPPER);
    // The caption and the row of the embedding, which has neither `I` nor `W`.
    let said = in_one_line(&said);
    assert!(said.contains(" embedding ") && said.contains(" - - "), "{said}");
    let profile = folder.read_toml("p.toml");
    (folder, profile)
}

#[test]
fn a_profile_has_what_adapters_train_and_a_plan_what_they_cost() {
    let (folder, profile) = profiled();
    let layers: Vec<&Table> =
        profile["layers"].as_array().expect("a list").iter().filter_map(Value::as_table).collect();
    let counts: Vec<i64> = layers.iter().filter_map(|layer| layer["count"].as_integer()).collect();
    assert_eq!(counts, [1, 6, 2, 1]);
    let runs = |key: &str| -> Vec<bool> {
        layers.iter().map(|layer| layer[key].as_float().is_some_and(|time| time > 0.0)).collect()
    };
    assert_eq!(runs("forward_s"), [true; 4]);
    assert_eq!(runs("input_backward_s"), [false, false, true, true]);
    assert_eq!(runs("weight_backward_s"), [false, false, true, false]);
    let bytes = |key: &str| layers.iter().map(|layer| layer[key].as_integer()).collect::<Vec<_>>();
    let trained = bytes("trained_bytes");
    assert_eq!([trained[0], trained[1], trained[3]], [Some(0); 3]);
    assert!(trained[2] > Some(0) && trained[2] < bytes("parameter_bytes")[2], "{trained:?}");

    let plan = ["plan", "small.toml", "--profile", "p.toml", "--data-parallel", "1", "--time-limit", "2s"];
    let (printed, _) =
        folder.succeed(&[&plan[..], &["--format", "json", "-o", "best.toml"]].concat(), &UPPER);
    let report: Json = serde_json::from_str(&printed).expect("JSON");
    let best = &report["plans"][0];
    let (bound, time) = (report["lower_bound_s"].as_f64(), best["predicted_step_s"].as_f64());
    assert!(bound > Some(0.0) && bound <= time, "{report}");
    // The program that `train` runs has the plan's stages: the first is frozen.
    let (checked, _) = folder.succeed(&["check", "best.toml"], &[]);
    assert!(checked.lines().any(|line| line.contains("frozen: forward only")), "{checked}");
    for (set, key) in [
        ("adapter.rank=4", "`parameter_bytes` is"),
        (r#"adapter.targets=["q_proj"]"#, "`parameter_bytes` is"),
        ("adapter.kind=none", "`trained_bytes` is 0, and layer 0 of the model (embedding) has"),
    ] {
        let set = if set == "adapter.kind=none" { vec![set] } else { [&UPPER[..], &[set]].concat() };
        folder.refuse(&plan, &set, key);
    }
    folder.refuse(
        &[&plan[..], &["--emit", "torchtitan"]].concat(),
        &UPPER,
        "--emit: the profile has frozen layers",
    );
}

#[test]
fn auto_trains_adapters_as_planned() {
    let folder = folder_without_path();
    let set = [&UPPER[..], &["pipeline.schedule=auto"]].concat();
    let (_, said) = folder.succeed(&["train", "small.toml"], &set);
    let said = in_one_line(&said);
    assert!(said.contains("auto: ") && said.contains("; measured in "), "{said}");
    let planned = folder.read("out/config.toml");
    assert!(planned.contains("planned_step_ms"), "{planned}");
    let profiles = || -> Vec<String> {
        let entries = fs::read_dir(folder.path("out")).expect("the folder").flatten();
        let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
        names.filter(|name| name.starts_with("profile-")).collect()
    };
    let first = profiles();
    assert_eq!(first.len(), 1);
    // The profile of other adapters is not used.
    folder.says(&["train", "small.toml"], &[&set[..], &["adapter.rank=4"]].concat(), "; measured in ");
    // The earlier run was moved aside with its own.
    assert_eq!(profiles().len(), 1);
    assert_ne!(profiles(), first);
}
