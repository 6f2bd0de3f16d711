//! Tests of `plan`, `simulate --profile` and `partition --layout` through the binary.

use std::time::{Duration, Instant};

use serde_json::Value;

use crate::{folder, refuse, run, split, succeed, text, write};

pub(crate) const PROFILE: &str = "\
[device]
name = \"by hand\"
memory_bytes = 17179869184
[link]
latency_s = 5e-6
bytes_per_s = 1e10
[[layers]]
kind = \"embedding\"
forward_s = 2e-4
input_backward_s = 1e-4
weight_backward_s = 1e-4
output_bytes = 524288
parameter_bytes = 4194304
activation_bytes = 524288
[[layers]]
kind = \"attention\"
count = 8
forward_s = 1e-3
input_backward_s = 1e-3
weight_backward_s = 1e-3
optimizer_s = 1e-4
output_bytes = 524288
parameter_bytes = 4194304
activation_bytes = 6291456
[[layers]]
kind = \"head\"
forward_s = 3e-3
input_backward_s = 3e-3
weight_backward_s = 3e-3
output_bytes = 0
parameter_bytes = 8388608
activation_bytes = 12582912
";

fn json(output: &str) -> Value {
    serde_json::from_str(output).expect("JSON")
}

#[test]
fn a_plan_is_what_simulate_predicts() {
    check_plans(PROFILE);
}

/// The first half of the model is frozen, and the head above it too.
#[test]
fn a_plan_of_frozen_layers_is_what_simulate_predicts() {
    let attention = PROFILE.find("[[layers]]\nkind = \"attention\"").expect("the section");
    let (before, rest) = PROFILE.split_at(attention);
    let (attention, head) = rest.split_at(rest.find("[[layers]]\nkind = \"head\"").expect("the section"));
    let [below, above] = ["0", "65536"]
        .map(|bytes| format!("{}trained_bytes = {bytes}\n", attention.replace("count = 8", "count = 4")));
    check_plans(&format!("{before}trained_bytes = 0\n{below}{above}{head}trained_bytes = 0\n"));
}

/// Checks that `simulate` predicts the times and peaks of the plans of a profile.
fn check_plans(profile: &str) {
    let folder = folder();
    write(&folder, "p.toml", profile);
    let size = ["--ranks", "2", "--microbatches", "4", "--data-parallel", "1"];
    let planned =
        succeed(&folder, &[&["plan", "--profile", "p.toml", "--format", "json"], &size[..]].concat());
    let report = json(&planned);
    let bound = report["lower_bound_s"].as_f64().expect("a bound");
    let plans = report["plans"].as_array().expect("plans");
    let best = plans[0]["predicted_step_s"].as_f64().expect("a time");
    assert!(
        bound <= best && report["gap"].as_f64().is_some_and(|gap| (gap - (best / bound - 1.0)).abs() < 1e-9)
    );
    let named = plans.iter().filter(|plan| plan["schedule"] != "searched" && plan["schedule"] != "zb-greedy");
    let mut compared = 0;
    for plan in named.filter(|plan| plan["group"].is_null() && plan["wide_warmup"].is_null()) {
        let boundaries: Vec<String> =
            plan["boundaries"].as_array().expect("a list").iter().map(ToString::to_string).collect();
        let (boundaries, microbatches) = (boundaries.join(","), plan["microbatches"].to_string());
        let chunks = plan["stages_per_rank"].to_string();
        if plan["microbatch_size"] != 1 {
            continue;
        }
        let name = plan["schedule"].as_str().expect("a name");
        let simulate = format!(
            "simulate {name} --ranks 2 --stages-per-rank {chunks} --microbatches {microbatches} --profile p.toml \
             --boundaries {boundaries} --format json"
        );
        let simulated = json(&succeed(&folder, &split(&simulate)));
        assert_eq!(simulated["makespan"], plan["predicted_step_s"], "{name}");
        assert_eq!(simulated["peak_bytes"], plan["peak_bytes"], "{name}");
        compared += 1;
    }
    assert!(compared > 0, "{planned}");
}

#[test]
fn a_heavy_head_is_planned_in_parts() {
    let folder = folder();
    let head = "kind = \"head\"\nforward_s = 3e-3";
    write(
        &folder,
        "p.toml",
        format!("tokens = 128\n{}", PROFILE.replace(head, &head.replace("3e-3", "36e-3"))),
    );
    let size = ["--profile", "p.toml", "--ranks", "2", "--microbatches", "8", "--data-parallel", "1"];
    let parts = ["--head-parts", "1,8", "-o", "best.toml"];
    let planned = succeed(&folder, &[&["plan"], &size[..], &parts[..], &["--format", "json"]].concat());
    let report = json(&planned);
    let best = &report["plans"][0];
    assert_eq!(best["head_parts"], 8, "{best}");
    assert!(report["lower_bound_s"].as_f64() <= best["predicted_step_s"].as_f64(), "{planned}");
    let config = std::fs::read_to_string(folder.path().join("best.toml")).expect("the configuration");
    assert!(config.contains("head_parts = 8"), "{config}");
    let text = succeed(&folder, &[&["plan"], &size[..], &parts[..2]].concat());
    assert!(text.contains("stages, head in 8 parts, "), "{text}");
    // The schedule is in a file next to the configuration, if it has no name.
    assert_eq!(best["microbatch_size"], 1, "{best}");
    let chunks = best["stages_per_rank"].to_string();
    let name = best["schedule"].as_str().expect("a name");
    let microbatches = best["microbatches"].to_string();
    let named = [name, "--ranks", "2", "--stages-per-rank", &chunks, "--microbatches", &microbatches];
    let schedule = if folder.path().join("best.csv").exists() { &["--csv", "best.csv"] } else { &named[..] };
    let boundaries: Vec<String> =
        best["boundaries"].as_array().expect("a list").iter().map(ToString::to_string).collect();
    let choice = ["--profile", "p.toml", "--head-parts", "8", "--boundaries", &boundaries.join(",")];
    let simulate = [&["simulate"], schedule, &choice[..], &["--format", "json"]].concat();
    let simulated = json(&succeed(&folder, &simulate));
    assert_eq!(simulated["makespan"], best["predicted_step_s"]);
    assert_eq!(simulated["peak_bytes"], best["peak_bytes"]);
    let none = [&["plan"], &size[..], &["--head-parts", "0"]].concat();
    refuse(&folder, &none, 2, "error: a head in 0 parts was asked for");
}

#[test]
fn a_plan_for_a_cluster_has_a_mesh() {
    let folder = folder();
    let node = "[node]\nranks = 4\nlatency_s = 1e-6\nbytes_per_s = 1e11\n[link]";
    write(&folder, "p.toml", PROFILE.replace("[link]", node));
    let size = ["plan", "--profile", "p.toml", "--ranks", "16", "--microbatches", "8"];
    let mesh = ["--data-parallel", "2", "--tensor-parallel", "4"];
    let report =
        json(&succeed(&folder, &[&size[..], &mesh, &["--format", "json", "-o", "best.toml"]].concat()));
    let best = &report["plans"][0];
    assert_eq!([&best["ranks"], &best["data_parallel"], &best["tensor_parallel"]], [2, 2, 4]);
    assert_eq!(best["rank_order"], serde_json::json!(["tensor", "pipeline", "data"]));
    let collectives = &best["assumed_collectives"];
    // Each rank sums half a mebibyte in at least four layers, twice forwards and twice backwards, for each of
    // four microbatches: it sends a quarter of it to each of three others, twice.
    let sums = 4.0 * 4.0 * 4.0 * 2.0 * 3.0 * 131_072.0 / 1e11;
    assert!(collectives["tensor_parallel_s"].as_f64().is_some_and(|found| found >= sums), "{collectives}");
    assert!(collectives["data_parallel_s"].as_f64().is_some_and(|found| found > 0.0), "{collectives}");
    let config = std::fs::read_to_string(folder.path().join("best.toml")).expect("the configuration");
    assert!(config.contains("[mesh]\ndata_parallel = 2\ntensor_parallel = 4"), "{config}");
    let searched = succeed(&folder, &size);
    assert!(searched.contains("assumed, not measured: tensor-parallel ranks share"), "{searched}");
    let refused = run(&folder, &[&size[..], &["--tensor-parallel", "3"]].concat());
    assert_eq!(refused.status.code(), Some(2), "{}", text(&refused.stderr));
}

#[test]
fn links_inside_a_node_are_faster() {
    let folder = folder();
    let node = |bytes: &str| {
        let node = format!("[node]\nranks = 2\nlatency_s = 1e-6\nbytes_per_s = {bytes}\n[link]");
        PROFILE.replace("[link]", &node)
    };
    let makespan = |profile: &str| {
        write(&folder, "p.toml", profile);
        let size = ["--ranks", "4", "--microbatches", "4", "--profile", "p.toml", "--format", "json"];
        let predicted = json(&succeed(&folder, &[&["simulate", "1f1b"], &size[..]].concat()));
        predicted["makespan"].as_f64().expect("a time")
    };
    let [flat, same, fast] =
        [PROFILE.to_owned(), node("1e10"), node("1e12")].map(|profile| makespan(&profile));
    assert!(fast < same && same < flat, "{fast} {same} {flat}");
}

#[test]
fn a_plan_is_written_for_train() {
    let folder = folder();
    write(&folder, "p.toml", PROFILE);
    let arguments = split("plan --profile p.toml --ranks 2 --microbatches 8 --data-parallel 1 -o best.toml");
    let printed = succeed(&folder, &arguments);
    assert!(printed.starts_with("best  ") && printed.contains("of the best possible"), "{printed}");
    assert!(printed.contains("lost  gpipe: "), "{printed}");
    let config = std::fs::read_to_string(folder.path().join("best.toml")).expect("the configuration");
    assert!(config.contains("ranks = 2") && config.contains("schedule = "), "{config}");
    if config.contains("best.csv") {
        let proved = succeed(&folder, &["validate", "best.csv", "--level", "compute"]);
        assert!(proved.starts_with("best.csv: sound"), "{proved}");
    }
}

#[test]
fn a_plan_with_overlaps_says_so() {
    let folder = folder();
    let layers = "\
[link]
latency_s = 0.0
bytes_per_s = 1e12
[[layers]]
kind = \"mixture\"
count = 8
forward_s = 1e-3
input_backward_s = 1e-3
weight_backward_s = 1e-3
exchange_s = 8e-4
output_bytes = 0
parameter_bytes = 0
activation_bytes = 0
";
    write(&folder, "p.toml", layers);
    let size = ["--ranks", "2", "--microbatches", "8", "--data-parallel", "1"];
    let arguments = [&["plan", "--profile", "p.toml"], &size[..], &["-o", "best.toml"]].concat();
    let printed = succeed(&folder, &arguments);
    let title = "zbvzerobubble with overlaps: 2 ranks, 4 stages, 8 microbatches of 1 row";
    assert!(printed.starts_with(&format!("best  {title}  ")), "{printed}");
    let rows = std::fs::read_to_string(folder.path().join("best.csv")).expect("the rows");
    assert!(rows.contains("OVERLAP_F_B"), "{rows}");
}

#[test]
fn a_plan_replaces_the_choices_of_the_configuration() {
    let folder = folder();
    let of_schedule = ["--set", "pipeline.schedule=group-interleaved", "--set", "pipeline.group_size=2"];
    let set = split("--set model.num_hidden_layers=8 --set pipeline.recompute=stage --set pipeline.ranks=3");
    let set = [&set[..], &of_schedule].concat();
    let arguments = ["plan", "--time-limit", "2s", "-o", "best.toml"];
    let printed = succeed(&folder, &[&arguments[..], &set].concat());
    assert!(!printed.contains("recompute"), "{printed}");
    let config = std::fs::read_to_string(folder.path().join("best.toml")).expect("the configuration");
    assert!(config.contains("recompute = \"none\""), "{config}");
    assert!(config.contains("num_hidden_layers = 8"), "{config}");
    assert!(!config.contains("group_size"), "a setting of another schedule: {config}");
    succeed(&folder, &["check", "best.toml"]);
}

#[test]
fn a_plan_has_no_replicas_that_hold_experts_together() {
    let folder = folder();
    let sizes = ["--ranks", "4", "--data-parallel", "2", "--time-limit", "1s", "-o", "best.toml"];
    let set = ["--set", "mesh.data_parallel=4", "--set", "mesh.expert_parallel=4"];
    let output = run(&folder, &[&["plan"], &sizes[..], &set].concat());
    let stderr = text(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{stderr}");
    let note =
        "note: each replica of the plan holds all experts, and `mesh.expert_parallel` is 1 instead of 4: ";
    assert!(stderr.starts_with(note), "{stderr}");
    let config = std::fs::read_to_string(folder.path().join("best.toml")).expect("the configuration");
    assert!(config.contains("data_parallel = 2") && config.contains("expert_parallel = 1"), "{config}");
    succeed(&folder, &["check", "best.toml"]);
}

/// Two replicas of one rank each; rows are short, so that nearly all bytes are parameters and their state.
#[test]
fn a_model_that_fits_only_when_replicas_share_it() {
    let folder = folder();
    let planned = |mesh: &str, memory: Option<u64>| {
        let set = ["model.hidden_size=512", "model.intermediate_size=1024", "data.seq_len=16", mesh];
        let memory = memory.map_or_else(|| "1TiB".to_owned(), |bytes| bytes.to_string());
        let sizes =
            ["plan", "--ranks", "2", "--data-parallel", "2", "--format", "json", "--time-limit", "2s"];
        let set = set.iter().flat_map(|set| ["--set", set]);
        let arguments: Vec<&str> = sizes.into_iter().chain(["--memory", &memory]).chain(set).collect();
        let output = run(&folder, &arguments);
        (output.status.code(), text(&output.stdout))
    };
    let (code, whole) = planned("mesh.data_parallel=2", None);
    assert_eq!(code, Some(0));
    let peaks = |report: &str| -> Vec<u64> {
        let plans = json(report)["plans"].as_array().expect("plans").clone();
        plans.iter().map(|plan| plan["peak_bytes"][0].as_u64().expect("a number")).collect()
    };
    let least = peaks(&whole).into_iter().min().expect("a plan");
    let memory = Some(least / 100 * 97);
    assert_eq!(planned("mesh.data_parallel=2", memory).0, Some(3), "whole on each replica");
    let (code, shared) = planned("mesh.data_parallel=[1,2]", memory);
    assert_eq!(code, Some(0), "half on each replica");
    assert!(peaks(&shared).into_iter().all(|peak| Some(peak) <= memory), "{shared}");
}

#[test]
fn a_plan_says_that_groups_become_one() {
    let folder = folder();
    let planned = |replicas: &str, format: &str| {
        let sizes = ["--ranks", replicas, "--data-parallel", replicas, "--microbatches", "12"];
        let further = ["plan", "--time-limit", "1s", "--format", format, "-o", "best.toml"];
        let set = ["--set", "mesh.data_parallel=[2, 2]"];
        let printed = succeed(&folder, &[&further[..], &sizes, &set].concat());
        let config = std::fs::read_to_string(folder.path().join("best.toml")).expect("the configuration");
        (printed, config)
    };
    let note = "mesh.data_parallel: groups of 2 do not divide the number of replicas of the plan, 3, so all replicas form \
                one group";
    let (printed, config) = planned("3", "text");
    assert!(printed.lines().any(|line| line == note), "{printed}");
    assert!(config.contains("data_parallel = 3") && config.contains("\"sharded\""), "{config}");
    assert_eq!(json(&planned("3", "json").0)["note"], note);
    let (printed, config) = planned("4", "text");
    assert!(!printed.contains("one group"), "{printed}");
    assert!(config.contains("data_parallel = [2, 2]"), "{config}");
}

#[test]
fn absurd_sizes_neither_hang_nor_exhaust_the_memory() {
    let folder = folder();
    write(&folder, "p.toml", PROFILE);
    for (ranks, microbatches) in [("1", "4000000000"), ("4000000000", "4000000000"), ("7", "4294967291")] {
        let size = ["--ranks", ranks, "--microbatches", microbatches, "--time-limit", "100ms"];
        let start = Instant::now();
        let output = run(&folder, &[&["plan", "--profile", "p.toml"], &size[..]].concat());
        // A plan, nothing that can be tried in this time, or nothing that fits.
        assert!(matches!(output.status.code(), Some(0 | 2 | 3)), "{}", text(&output.stderr));
        let took = start.elapsed();
        assert!(took < Duration::from_secs(30), "{ranks} ranks and {microbatches} microbatches: {took:?}");
    }
}

#[test]
fn what_does_not_fit_exits_with_3() {
    let folder = folder();
    write(&folder, "p.toml", PROFILE);
    let arguments =
        ["plan", "--profile", "p.toml", "--ranks", "2", "--microbatches", "4", "--memory", "20MiB"];
    refuse(&folder, &arguments, 3, "error: no plan fits: rank ");
}

#[test]
fn a_wrong_profile_is_refused_with_its_line() {
    let folder = folder();
    write(&folder, "p.toml", PROFILE.replacen("forward_s = 2e-4", "forward_ms = 0.2", 1));
    let output = run(&folder, &["plan", "--profile", "p.toml", "--ranks", "2", "--microbatches", "4"]);
    let stderr = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    assert!(
        stderr.contains("p.toml:9:1: `forward_ms` has another unit") && stderr.contains("write `forward_s`"),
        "{stderr}"
    );
}

#[test]
fn the_best_partition_is_the_default() {
    let folder = folder();
    write(&folder, "p.toml", PROFILE);
    let of = |further: &[&str]| {
        let size = ["--ranks", "2", "--microbatches", "4", "--profile", "p.toml", "--format", "json"];
        let printed = succeed(&folder, &[&["simulate", "1f1b"], &size[..], further].concat());
        json(&printed)["makespan"].as_f64().expect("a time")
    };
    let best = of(&[]);
    for boundary in 1..10 {
        assert!(best <= of(&["--boundaries", &boundary.to_string()]), "boundary {boundary}");
    }
    assert!(of(&["--recompute", "stage"]) > best);
}

#[test]
fn a_simulation_for_a_profile_names_its_file_its_bytes_and_its_times() {
    let folder = folder();
    write(&folder, "p.toml", PROFILE);
    let size = ["--ranks", "2", "--microbatches", "4"];
    write(&folder, "Mixed.csv", succeed(&folder, &[&["schedule", "1f1b"], &size[..]].concat()));
    let of_file = ["simulate", "--csv", "Mixed.csv", "--profile", "p.toml"];
    let of_name = [&["simulate", "ZB-Greedy"], &size[..], &["--profile", "p.toml"]].concat();
    for (arguments, title) in [(&of_file[..], "Mixed.csv: 2 ranks, "), (&of_name, "zb-greedy: 2 ranks, ")] {
        let found = json(&succeed(&folder, &[arguments, &["--format", "json"]].concat()));
        for step in ["generate", "lower", "validate", "simulate"] {
            assert!(found["engine_ms"][step].as_f64().is_some_and(|ms| ms > 0.0), "{step}: {found}");
        }
        let text = succeed(&folder, arguments);
        assert!(text.starts_with(title), "{text}");
        assert!(!text.contains("engine     0.00 ms"), "{text}");
        let held = found["peak_bytes"].as_array().expect("a list");
        let mebibytes = |bytes: &Value| format!("{:.1} MiB", bytes.as_f64().expect("a size") / 1_048_576.0);
        let bytes = held.iter().map(mebibytes).collect::<Vec<_>>().join("  ");
        let line = format!("\n           {bytes} at most, by rank: parameters, ");
        assert!(text.contains(&line), "{line}{text}");
    }
}

#[test]
fn a_layout_is_a_partition() {
    let folder = folder();
    let printed = succeed(&folder, &["partition", "--layout", "E | A*3 | (A M)*2 | A L", "--format", "json"]);
    assert_eq!(printed, "{\"stages\":[[0,0],[1,3],[4,7],[8,9]],\"weights\":[1,3,4,2]}\n");
    let output = run(&folder, &["partition", "--layout", "E | | L"]);
    let stderr = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    assert!(
        stderr.contains("column 5: this stage has no layer") && stderr.contains("  E | | L\n      ^"),
        "{stderr}"
    );
}

#[test]
fn a_plan_compares_schedules_on_one_mesh_and_has_a_name() {
    let folder = folder();
    write(&folder, "p.toml", PROFILE);
    let size = ["plan", "--profile", "p.toml", "--ranks", "4", "--microbatches", "8"];
    let printed = succeed(&folder, &size);
    let best = printed.lines().next().expect("a line");
    assert!(best.starts_with("best  ") && best.contains(" ms per step, bubble "), "{printed}");
    assert!(!printed.contains("0.0"), "times have units that fit: {printed}");
    let lost: Vec<&str> = printed.lines().filter(|line| line.contains("% longer")).collect();
    assert!(!lost.is_empty(), "{printed}");
    for line in lost {
        let has_mesh = line.contains(" on the same mesh") || line.contains(" with ");
        assert!(has_mesh && line.contains(" ms"), "{line}");
    }
    let report = json(&succeed(&folder, &[&size[..], &["--format", "json"]].concat()));
    for plan in report["plans"].as_array().expect("plans") {
        let (schedule, name) =
            (plan["schedule"].as_str().expect("text"), plan["name"].as_str().expect("text"));
        match schedule {
            "searched" => {
                assert!(name.starts_with("searched-") && printed.contains(name), "{name}: {printed}");
            }
            named => assert_eq!(name, named),
        }
    }
}
