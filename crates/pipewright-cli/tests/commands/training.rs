//! Tests of training through the command line: the files, the display, and figures that do not depend on the
//! partition.

use std::fs;
use std::path::Path;
use std::process::Output;

use assert_cmd::Command;
use tempfile::TempDir;

use crate::scratch;

fn folder() -> TempDir {
    scratch::folder(&scratch::small(2, 4, 4))
}

fn train(folder: &Path, arguments: &[&str]) -> Output {
    let mut command = Command::cargo_bin("pipewright").expect("the binary is built");
    command.current_dir(folder).arg("train").args(arguments).timeout(std::time::Duration::from_secs(120));
    command.output().expect("the binary starts")
}

/// Trains with these overrides. Returns the exact loss and gradient norm of each step.
fn figures(folder: &TempDir, overrides: &[&str]) -> Vec<(String, String)> {
    let mut arguments = vec!["small.toml"];
    arguments.extend(overrides.iter().flat_map(|argument| ["--set", argument]));
    let output = train(folder.path(), &arguments);
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    let metrics =
        fs::read_to_string(folder.path().join("out/metrics.jsonl")).expect("a run writes its metrics");
    let figure = |line: &str| {
        let value: serde_json::Value = serde_json::from_str(line).expect("a line is an object");
        (value["loss"].to_string(), value["grad_norm"].to_string())
    };
    metrics.lines().map(figure).collect()
}

#[test]
fn a_run_writes_its_results() {
    let folder = folder();
    let output = train(folder.path(), &["small.toml"]);
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(output.stdout.is_empty(), "words for people go to standard error");
    let out = |name: &str| fs::read_to_string(folder.path().join("out").join(name)).expect(name);
    let metrics = out("metrics.jsonl");
    let steps: Vec<serde_json::Value> =
        metrics.lines().map(|line| serde_json::from_str(line).expect("a line is an object")).collect();
    assert_eq!(steps.iter().map(|step| step["step"].as_u64()).collect::<Vec<_>>(), [1, 2, 3, 4].map(Some));
    let loss = steps[0]["loss"].as_f64().expect("a number");
    assert!((loss - 128f64.ln()).abs() < 0.1, "a fresh model knows nothing: {loss}");
    assert!(steps[0]["peak_bytes"].as_array().is_some_and(|ranks| ranks.len() == 2));
    let trace: serde_json::Value = serde_json::from_str(&out("timeline.json")).expect("a trace is JSON");
    let events = trace["traceEvents"].as_array().expect("a list");
    let is_there = |action: &str| events.iter().any(|event| event["args"]["action"] == action);
    assert!(
        is_there("1I0") && is_there("1W0"),
        "gradients leave before the gradients of the weights are computed"
    );
    assert!(out("config.toml").contains("num_hidden_layers = 2"));
}

#[test]
fn a_zero_bubble_run_notes_gradients_that_cannot_wait_once() {
    let folder = folder();
    for (schedule, notes) in [("zb-h1", 1), ("1f1b", 0)] {
        let schedule = format!("pipeline.schedule={schedule}");
        let output = train(folder.path(), &["small.toml", "--set", &schedule]);
        let words = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(0), "{words}");
        let found: Vec<&str> = words.lines().filter(|line| line.starts_with("note: `I` computes")).collect();
        assert_eq!(found.len(), notes, "{schedule}: {words}");
        assert!(found.iter().all(|note| note.contains("norm")), "{found:?}");
    }
}

#[test]
fn the_effective_configuration_repeats_the_run() {
    let folder = folder();
    let first = figures(&folder, &["optimizer.learning_rate=0.01"]);
    let output = train(folder.path(), &["out/config.toml"]);
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    let words = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(words.contains("moved the earlier run to ") && words.contains("out.1"), "{words}");
    assert_eq!(
        fs::read_to_string(folder.path().join("out/config.toml")).expect("a configuration"),
        fs::read_to_string(folder.path().join("out.1/config.toml")).expect("a configuration"),
    );
    let again = fs::read_to_string(folder.path().join("out/metrics.jsonl")).expect("metrics");
    for (line, (loss, _)) in again.lines().zip(first) {
        assert!(line.contains(&format!("\"loss\":{loss},")), "{line} has another loss than {loss}");
    }
}

#[test]
fn cut_and_schedule_change_no_digit() {
    let folder = folder();
    let one = figures(&folder, &["pipeline.ranks=1"]);
    assert_eq!(one.len(), 4);
    for overrides in [
        &["pipeline.ranks=2"][..],
        &["pipeline.ranks=4"],
        &["pipeline.ranks=2", "pipeline.schedule=gpipe"],
        &["pipeline.ranks=3", "pipeline.partition=explicit", "pipeline.boundaries=[1, 2]"],
    ] {
        assert_eq!(figures(&folder, overrides), one, "{overrides:?}");
    }
}

#[test]
fn tied_embeddings_and_biases_train_the_same_under_any_cut() {
    let folder = folder();
    for model in ["model.tie_word_embeddings=true", "model.architecture=qwen2"] {
        let one = figures(&folder, &[model, "pipeline.ranks=1"]);
        assert_eq!(figures(&folder, &[model, "pipeline.ranks=4"]), one, "{model}");
    }
}

/// A hybrid model of an attention and a Mamba-2 block.
const HYBRID: [&str; 5] = [
    "model.architecture=hybrid",
    "model.pattern=AM",
    "model.mamba_num_heads=2",
    "model.mamba_head_dim=8",
    "model.ssm_state_size=8",
];

#[test]
fn packed_documents_train_the_same_under_any_cut() {
    // Each word is a document.
    const PACKED: [&str; 2] = ["data.bos_id=32", "data.packed=true"];
    let folder = folder();
    for model in [
        &["model.architecture=llama"][..],
        &["model.architecture=nemotron_h", "model.hybrid_override_pattern=M*"],
        &HYBRID,
    ] {
        let packed = [model, &PACKED].concat();
        let one = figures(&folder, &[&packed[..], &["pipeline.ranks=1"]].concat());
        assert_eq!(figures(&folder, &[&packed[..], &["pipeline.ranks=4"]].concat()), one, "{model:?}");
        let open = figures(&folder, &[model, &["data.bos_id=32", "pipeline.ranks=1"]].concat());
        assert_ne!(open, one, "{model:?}");
    }
    let restarted = [&PACKED[..], &["data.restart_positions=true"]].concat();
    let one = figures(&folder, &[&restarted[..], &["pipeline.ranks=1"]].concat());
    assert_eq!(figures(&folder, &[&restarted[..], &["pipeline.recompute=block"]].concat()), one);
}

#[test]
fn beginnings_of_documents_that_do_not_fit_are_refused() {
    let folder = folder();
    let refuse = |set: &[&str], message: &str| {
        let set = set.iter().flat_map(|set| ["--set", set]);
        let output = train(folder.path(), &["small.toml"].into_iter().chain(set).collect::<Vec<_>>());
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(said.contains(message), "{said}");
    };
    refuse(
        &["data.bos_id=128"],
        "documents begin with the token id 128, which lies beyond the vocabulary of 128",
    );
    refuse(
        &[&HYBRID[..], &["model.bos_token_id=1", "data.bos_id=2", "data.packed=true"]].concat(),
        "`data.bos_id` is 2, and the model's documents begin with 1",
    );
}

#[test]
fn a_schedule_from_a_file_brings_its_sizes() {
    let folder = folder();
    let named = figures(&folder, &["pipeline.ranks=4"]);
    let mut schedule = Command::cargo_bin("pipewright").expect("the binary is built");
    let arguments = ["schedule", "1f1b", "--ranks", "4", "--microbatches", "4", "-o", "s.csv"];
    assert!(
        schedule.current_dir(folder.path()).args(arguments).output().expect("it starts").status.success()
    );
    assert_eq!(figures(&folder, &["pipeline.schedule=s.csv"]), named);
    let config = fs::read_to_string(folder.path().join("out/config.toml")).expect("a configuration");
    assert!(config.contains("ranks = 4"), "{config}");
}

#[test]
fn a_step_that_is_not_finite_is_refused_and_told() {
    let folder = folder();
    let overrides = ["small.toml", "--set", "optimizer.learning_rate=1e30", "--set", "optimizer.clip_norm=0"];
    let output = train(folder.path(), &overrides);
    let words = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(4), "{words}");
    let told = words.contains("error: step 2: rank ")
        && words.contains("the parameters are still those before this step");
    assert!(told, "{words}");
    let metrics = fs::read_to_string(folder.path().join("out/metrics.jsonl")).expect("metrics");
    assert_eq!(metrics.lines().count(), 1, "the first step is kept");
}

#[test]
fn an_update_that_is_skipped_is_told_and_recorded() {
    let folder = folder();
    let set = ["run.steps=8", "run.precision=f16", "run.loss_scale=4194304", "run.loss_scale_interval=2"];
    let arguments = ["small.toml"].into_iter().chain(set.into_iter().flat_map(|set| ["--set", set]));
    let output = train(folder.path(), &arguments.collect::<Vec<_>>());
    let words = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(0), "{words}");
    assert!(
        words.contains("step 1/8  loss ") && words.contains("loss scale 4194304, update skipped"),
        "{words}"
    );
    let metrics = fs::read_to_string(folder.path().join("out/metrics.jsonl")).expect("metrics");
    let steps: Vec<serde_json::Value> =
        metrics.lines().map(|line| serde_json::from_str(line).expect("a line is an object")).collect();
    let is_skipped = |step: &serde_json::Value| step["skipped"] == true;
    assert!(is_skipped(&steps[0]) && steps[0]["grad_norm"].is_null(), "{metrics}");
    assert!(steps.iter().any(|step| !is_skipped(step) && step["grad_norm"].is_number()), "{metrics}");
    for pair in steps.windows(2) {
        let [before, after] =
            [&pair[0], &pair[1]].map(|step| step["loss_scale"].as_f64().expect("f16 has one"));
        assert_eq!(after < before, is_skipped(&pair[0]), "{metrics}");
        assert!([0.5, 1.0, 2.0].contains(&(after / before)), "{metrics}");
    }
}

#[test]
fn weights_that_cannot_be_read_are_wrong_input() {
    let folder = folder();
    let output = train(folder.path(), &["small.toml", "--set", "model.from=nowhere"]);
    let words = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{words}");
    assert!(words.contains("nowhere/config.json"), "{words}");
    assert!(!folder.path().join("out").exists());
}

#[test]
fn sharded_replicas_train_as_whole_ones_digit_for_digit() {
    let folder = folder();
    for overrides in [
        &["pipeline.ranks=1"][..],
        &["pipeline.ranks=2", "model.tie_word_embeddings=true"],
        &["pipeline.schedule=zbvzerobubble", "pipeline.stages_per_rank=2", "mesh.unshard_window=1"],
        &[
            "pipeline.schedule=interleaved1f1b",
            "pipeline.stages_per_rank=2",
            "mesh.unshard_window=2",
            "mesh.unshard_lookahead=[1, 2]",
            "mesh.reduce_wait=deferred",
        ],
    ] {
        let figures_of = |mode| figures(&folder, &[overrides, &["mesh.data_parallel=2", mode]].concat());
        let [whole, parts] = ["replicated", "sharded"].map(|mode| format!("mesh.data_parallel_mode={mode}"));
        assert_eq!(figures_of(&parts), figures_of(&whole), "{overrides:?}");
    }
}

#[test]
fn groups_of_replicas_train_as_whole_ones_digit_for_digit() {
    let folder = folder();
    for overrides in [
        &["pipeline.ranks=1", "pipeline.microbatches=4"][..],
        &["pipeline.ranks=2", "pipeline.microbatches=8", "model.tie_word_embeddings=true"],
        &["pipeline.schedule=zbvzerobubble", "pipeline.stages_per_rank=2", "pipeline.microbatches=16"],
    ] {
        let on = |mesh| figures(&folder, &[overrides, &[mesh, "mesh.unshard_window=1"]].concat());
        let expected = on("mesh.data_parallel=4");
        for mesh in ["mesh.data_parallel=[2, 2]", "mesh.data_parallel=[1, 4]", "mesh.data_parallel=[4, 1]"] {
            assert_eq!(on(mesh), expected, "{overrides:?}, {mesh}");
        }
    }
}

#[test]
fn a_schedule_that_never_gathers_is_refused_where_parameters_are_sharded() {
    let folder = folder();
    let schedule = |level: &str| {
        let mut schedule = Command::cargo_bin("pipewright").expect("the binary is built");
        let arguments =
            ["schedule", "1f1b", "--ranks", "2", "--microbatches", "2", "--level", level, "-o", "s.csv"];
        let output = schedule.current_dir(folder.path()).args(arguments).output().expect("it starts");
        assert!(output.status.success());
        let overrides =
            ["mesh.data_parallel=2", "mesh.data_parallel_mode=sharded", "pipeline.schedule=s.csv"];
        let set = overrides.iter().flat_map(|argument| ["--set", argument]);
        train(folder.path(), &["small.toml"].into_iter().chain(set).collect::<Vec<_>>())
    };
    for level in ["compute", "full"] {
        let output = schedule(level);
        assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    }
    let output = schedule("comms");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains("never gathers parameters"), "{said}");
}

#[test]
fn replicas_share_a_batch() {
    let folder = folder();
    let expected = figures(&folder, &[]);
    let close = |found: &str, expected: &str| {
        let [found, expected] = [found, expected].map(|figure| figure.parse::<f64>().expect("a number"));
        (found - expected).abs() <= 1e-6 * expected
    };
    for overrides in [&["mesh.data_parallel=2"][..], &["mesh.data_parallel=4", "pipeline.ranks=1"]] {
        let found = figures(&folder, overrides);
        assert_eq!(found.len(), expected.len());
        for ((loss, norm), (expected_loss, expected_norm)) in found.iter().zip(&expected) {
            assert!(close(loss, expected_loss) && close(norm, expected_norm), "{overrides:?}: {found:?}");
        }
    }
    let output = train(folder.path(), &["small.toml", "--set", "mesh.data_parallel=3"]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains("which 3 replicas (`mesh.data_parallel`) cannot share evenly"), "{said}");
}

#[test]
fn tensor_ranks_train_as_one() {
    let folder = folder();
    let expected = figures(&folder, &[]);
    let close = |found: &str, expected: &str| {
        let [found, expected] = [found, expected].map(|figure| figure.parse::<f64>().expect("a number"));
        (found - expected).abs() <= 1e-5 * expected
    };
    for overrides in [&["mesh.tensor_parallel=2"][..], &["mesh.tensor_parallel=2", "mesh.data_parallel=2"]] {
        let found = figures(&folder, overrides);
        assert_eq!(found.len(), expected.len());
        for ((loss, norm), (expected_loss, expected_norm)) in found.iter().zip(&expected) {
            assert!(close(loss, expected_loss) && close(norm, expected_norm), "{overrides:?}: {found:?}");
        }
    }
}

#[test]
fn a_model_that_tensor_ranks_cannot_share_is_refused_before_the_run() {
    let folder = folder();
    let refused = |arguments: &[&str], expected: &str| {
        let mut command = Command::cargo_bin("pipewright").expect("the binary is built");
        let output = command.current_dir(folder.path()).args(arguments).output().expect("it starts");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {said}");
        assert!(said.contains(expected), "{arguments:?}: {said}");
    };
    let three = ["small.toml", "--set", "mesh.tensor_parallel=3"];
    let expected = "stage 0: `model.layers.0.self_attn` cannot be split over 3 tensor ranks: \
                    `model.layers.0.self_attn.q_proj.weight` is split by `num_attention_heads = 2`";
    for command in ["train", "check"] {
        refused(&[&[command], &three[..]].concat(), expected);
    }
    assert!(!folder.path().join("out").exists());
    let two = ["small.toml", "--set", "mesh.tensor_parallel=2"];
    let expected = "`profile` and the schedule `auto` know only layers that one rank computes, and \
                    `mesh.tensor_parallel` is 2: set it to 1, or name a schedule";
    refused(&[&["profile"], &two[..]].concat(), expected);
    for command in ["train", "check"] {
        refused(&[&[command], &two[..], &["--set", "pipeline.schedule=auto"]].concat(), expected);
    }
}

#[test]
fn recomputation_changes_no_figure() {
    let folder = folder();
    let expected = figures(&folder, &[]);
    let tensor_ranks = "mesh.tensor_parallel=2";
    // The gradients of two ranks that compute a stage together may arrive before and after the second
    // forward.
    let split = figures(&folder, &[tensor_ranks]);
    let in_part = "[{ stage = 0, layers = 2 }, { stage = 1, keep = 1 }]";
    for choice in ["stage", "block", "[0]", in_part] {
        let recompute = format!("pipeline.recompute={choice}");
        assert_eq!(figures(&folder, &[&recompute]), expected, "{choice}");
        assert_eq!(figures(&folder, &[&recompute, tensor_ranks]), split, "{choice} on tensor ranks");
    }
}

/// A group size, with a short last group, orders the same computations as any other schedule. So does a
/// pipeline that is never full, which the run says.
#[test]
fn groups_and_few_microbatches_train_to_the_same_bits() {
    let folder = folder();
    let seven = "pipeline.microbatches=7";
    let expected = figures(&folder, &[seven, "pipeline.ranks=1"]);
    for schedule in ["interleaved1f1b", "interleavedzerobubble", "interleaved-zb-h1"] {
        for group in [2, 3, 7] {
            let (schedule, group) =
                (format!("pipeline.schedule={schedule}"), format!("pipeline.group_size={group}"));
            assert_eq!(figures(&folder, &[seven, &schedule, &group]), expected, "{schedule} {group}");
        }
    }
    let two = "pipeline.microbatches=2";
    let expected = figures(&folder, &[two, "pipeline.ranks=1"]);
    for schedule in ["gpipe", "1f1b"] {
        let schedule = format!("pipeline.schedule={schedule}");
        assert_eq!(figures(&folder, &[two, "pipeline.ranks=4", &schedule]), expected, "{schedule}");
        let set = ["small.toml", "--set", two, "--set", "pipeline.ranks=4", "--set", &schedule];
        let said = String::from_utf8_lossy(&train(folder.path(), &set).stderr).into_owned();
        assert!(
            said.contains("2 microbatches cannot fill the pipeline of 4 ranks: the bubble is 50% of a step"),
            "{said}"
        );
    }
}
