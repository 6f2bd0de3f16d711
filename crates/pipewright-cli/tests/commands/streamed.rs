//! Adapters on a base that stays in its files: the figures of a base in memory, and what `check` and `profile` say.

use std::fs;
use std::process::Stdio;

use pipewright_schedule::plan::READ_ROOM;

use super::adapters::folder_without_path;
use super::command_line::reference;
use super::profile::write_times;
use crate::run::Run;

/// Adapters on a model of ten layers, each a stage of one rank.
const LAYERS: [&str; 6] = [
    "adapter.kind=lora",
    "adapter.rank=4",
    "pipeline.ranks=1",
    "pipeline.microbatches=4",
    "pipeline.schedule=looped-bfs",
    "pipeline.stages_per_rank=10",
];

fn folder(settings: &[&str]) -> (Run, Vec<String>) {
    let settings = LAYERS.iter().chain(settings).map(|setting| (*setting).to_owned()).collect();
    (folder_without_path(), settings)
}

fn with<'a>(settings: &'a [String], more: &[&'a str]) -> Vec<&'a str> {
    settings.iter().map(String::as_str).chain(more.iter().copied()).collect()
}

#[test]
fn a_base_in_its_files_has_the_figures_of_one_in_memory() {
    let evaluates = ["data.validation_share=0.25", "run.eval_every=2"];
    let (folder, settings) = folder(&evaluates);
    let figures = |more: &[&str]| {
        folder.train(&with(&settings, more));
        let validation =
            folder.steps().iter().map(|step| step["validation_loss"].clone()).collect::<Vec<_>>();
        (folder.figures(), validation)
    };
    let resident = figures(&["model.stream=false"]);
    for window in ["model.stream_window=1", "model.stream_window=3"] {
        assert_eq!(figures(&["model.stream=true", window]), resident);
    }
    assert!(folder.read("out/timeline.json").contains("unshard"), "the last run has read its base");
    // A run is resumed with the base where it was not before.
    let two = with(&settings, &["model.stream=true", "run.steps=2"]);
    folder.train(&two);
    folder.resume(&["run.steps=4", "model.stream=false"]);
    assert_eq!(folder.figures(), resident.0);
    let generate = |more: &[&str]| {
        let how = ["generate", "out", "--prompt", "a", "--tokens", "3", "--tokenizer", "bytes"];
        folder.print(&[&how[..], more].concat())
    };
    assert_eq!(generate(&["--stream"]), generate(&[]));
    folder.says(&["export", "out", "merged", "--merge"], &[], "wrote the model of step 4");
}

#[test]
fn check_counts_the_stages_that_are_in_memory() {
    let (folder, settings) = folder(&[]);
    let memory =
        |more: &[&str]| folder.json(&["check", "small.toml"], &with(&settings, more))["memory"].clone();
    let parameters = |memory: &serde_json::Value| memory["ranks"][0]["parameters"].as_u64().expect("bytes");
    let resident = memory(&["model.stream=false"]);
    let [one, two] = ["model.stream_window=1", "model.stream_window=2"]
        .map(|window| memory(&["model.stream=true", window]));
    let window = |memory: &serde_json::Value| memory["streamed"]["window"].as_u64().expect("bytes");
    assert!(resident["streamed"].is_null());
    // Each block has as many bytes, and a window of two has two of them.
    assert_eq!(window(&two), 2 * window(&one));
    assert_eq!(parameters(&two) - parameters(&one), window(&one));
    let step = |memory: &serde_json::Value| memory["streamed"]["step"].as_u64().expect("bytes");
    let base = parameters(&resident) - parameters(&one) + window(&one);
    // The stages that are in memory at the turn are read once.
    assert!(step(&two) < step(&one) && step(&one) <= 2 * base && step(&two) > base, "{one} {two} {base}");
}

/// Writes a model whose tensors are larger than the blocks that the allocator does not count, with a configuration of
/// adapters on it.
pub(super) fn wide_base() -> Run {
    let run = Run::new();
    run.write("text.txt", "the quick brown fox jumps over the lazy dog ".repeat(400));
    let sizes = ["hidden_size=128", "intermediate_size=384", "num_hidden_layers=6", "vocab_size=256"];
    let sizes = sizes.map(|size| format!("model.{size}"));
    let sizes: Vec<&str> =
        sizes.iter().map(String::as_str).chain(["run.steps=1", "data.seq_len=128"]).collect();
    run.train(&sizes);
    run.succeed(&["export", "out", "base"], &[]);
    let config = "[model]\nfrom = \"base\"\n[adapter]\nkind = \"lora\"\nrank = 16\n[data]\npath = \"text.txt\"\n\
                  tokenizer = \"bytes\"\nseq_len = 128\n[pipeline]\nranks = 1\nmicrobatches = 4\nmicrobatch_size = 2\n\
                  [run]\nsteps = 2\nout = \"out\"\n";
    run.write("small.toml", config);
    run
}

/// A predicted peak equals the peak of the run within this share.
const ERROR: f64 = 0.05;

/// The backward of a block that was computed again holds gradients next to its activations, and a rank of several has copies of
/// the inputs of its adapters.
#[test]
fn check_predicts_how_much_more_longer_rows_hold() {
    let run = wide_base();
    let recomputed =
        ["pipeline.schedule=looped-bfs", "pipeline.stages_per_rank=8", "pipeline.recompute=stage"];
    let of_ranks = ["mesh.tensor_parallel=2", "run.precision=bf16"];
    for set in [&recomputed[..], &of_ranks] {
        let peaks = |length: &str| {
            let set = [set, &["pipeline.microbatches=1", length]].concat();
            let total = run.json(&["check", "small.toml"], &set)["memory"]["ranks"][0]["total"].clone();
            run.succeed(&["train", "small.toml"], &set);
            let steps = run.steps();
            let found = steps.iter().map(|step| step["peak_bytes"][0].as_u64().expect("bytes")).max();
            [total.as_u64().expect("bytes"), found.expect("a step")]
        };
        let (short, long) = (peaks("data.seq_len=128"), peaks("data.seq_len=512"));
        let [predicted, found] = [0, 1].map(|index| (long[index] - short[index]) as f64);
        let ratio = predicted / found;
        assert!((0.85..=1.05).contains(&ratio), "{set:?}: {ratio}, {predicted} instead of {found}");
    }
}

/// Temporary tensors and the workspace of products are not counted, so differences are compared: a rank with larger adapters
/// or windows holds as much more as predicted.
#[test]
fn check_predicts_how_much_more_a_rank_holds() {
    let run = wide_base();
    let peaks = |set: &[&str]| {
        let rank = run.json(&["check", "small.toml"], set)["memory"]["ranks"][0].clone();
        run.succeed(&["train", "small.toml"], set);
        let steps = run.steps();
        let found = steps.iter().map(|step| step["peak_bytes"][0].as_u64().expect("bytes")).max();
        (rank, found.expect("a step") as f64)
    };
    let streamed = [
        "model.stream=true",
        "pipeline.schedule=looped-bfs",
        "pipeline.stages_per_rank=8",
        "pipeline.recompute=stage",
    ];
    for (set, more) in [
        (&streamed[..], &["adapter.rank=64"][..]),
        (&streamed, &["adapter.rank=64", "model.stream_window=4"]),
        (&streamed[1..3], &["adapter.rank=64"]),
    ] {
        let (small, found_small) = peaks(&[set, &["adapter.rank=4"]].concat());
        let (large, found_large) = peaks(&[set, more].concat());
        let part = |rank: &serde_json::Value, name: &str| rank[name].as_f64().expect("bytes");
        let (predicted, found) = (part(&large, "total") - part(&small, "total"), found_large - found_small);
        let ratio = predicted / found;
        assert!((1.0 - ERROR..=1.0 + ERROR).contains(&ratio), "{set:?}: {ratio}, {found}: {small} {large}");
        // The gradients of most stages do not exist yet when the activations have their peak.
        let sum: f64 = ["parameters", "gradients", "activations", "optimizer"]
            .iter()
            .map(|name| part(&large, name))
            .sum();
        let room = if set == streamed { READ_ROOM as f64 } else { 0.0 };
        assert!(part(&large, "total") < sum + room, "{large}");
    }
}

#[test]
fn the_rate_of_the_disk_is_measured_and_used() {
    let (folder, settings) = folder(&["model.stream=true"]);
    let settings = with(&settings, &[]);
    folder.says(
        &["profile", "small.toml", "--time-limit", "1s", "-o", "p.toml"],
        &settings,
        "files of the base:",
    );
    let rate = folder.read_toml("p.toml")["link"]["read_bytes_per_s"].as_float().expect("a rate");
    let streamed =
        &folder.json(&["check", "small.toml", "--profile", "p.toml"], &settings)["memory"]["streamed"];
    let expected = streamed["step"].as_f64().expect("bytes") / rate;
    let found = streamed["seconds"].as_f64().expect("a time");
    assert!((found - expected).abs() <= 1e-3 * expected, "{found} {expected}");
    let (said, _) = folder.succeed(&["check", "small.toml", "--profile", "p.toml"], &settings);
    assert!(said.contains("the base stays in its files: a rank has at most"), "{said}");
}

/// Tensor ranks read their rows of the matrices that they divide by outputs, and whole matrices of the others.
#[test]
fn tensor_ranks_read_their_rows() {
    let (folder, settings) = folder(&["model.stream=true"]);
    let step = |ranks: &str| {
        let set = [ranks, "pipeline.schedule=gpipe", "pipeline.stages_per_rank=1"];
        let checked = folder.json(&["check", "small.toml"], &with(&settings, &set));
        checked["memory"]["streamed"]["step"].as_u64().expect("bytes")
    };
    let config: serde_json::Value =
        serde_json::from_str(&fs::read_to_string(reference("qwen3-tiny") + "/config.json").expect("a model"))
            .expect("JSON");
    let size = |key: &str| config[key].as_u64().expect(key);
    let queries = size("num_attention_heads") * size("head_dim");
    let by_inputs = size("num_hidden_layers") * size("hidden_size") * (queries + size("intermediate_size"));
    // One stage is read once for each rank.
    assert_eq!(step("mesh.tensor_parallel=2") - step("mesh.tensor_parallel=1"), 4 * by_inputs);
}

/// Also with replicas, which send no parameters then.
#[test]
fn the_page_of_a_run_says_that_its_base_is_read() {
    let (folder, settings) = folder(&["mesh.data_parallel=2", "run.steps=1"]);
    let page = |more: &[&str]| {
        folder.train(&with(&settings, more));
        folder.succeed(&["view", "out", "-o", "out/view.html"], &[]);
        folder.read("out/view.html")
    };
    assert!(page(&["model.stream=true"]).contains("\"readsBase\":true"));
    assert!(page(&["mesh.data_parallel_mode=sharded"]).contains("\"readsBase\":false"));
}

/// Bytes of lists of a rank that no prediction counts.
const LISTS: u64 = 96 << 10;

#[test]
fn a_plan_leaves_a_base_in_its_files_if_the_memory_is_too_small() {
    let run = wide_base();
    run.succeed(&["profile", "small.toml", "--time-limit", "1s", "-o", "p.toml"], &[]);
    write_times(&run, "p.toml", 1.0);
    assert!(run.read_toml("p.toml")["link"]["read_bytes_per_s"].as_float().expect("a rate") > 0.0);
    let plan = |limit: u64, set: &[&str]| {
        let limit = limit.to_string();
        let how = ["plan", "small.toml", "--profile", "p.toml", "--time-limit", "20s", "-o", "planned.toml"];
        let report = run.json(&[&how[..], &["--memory", &limit]].concat(), set);
        report["plans"][0].clone()
    };
    // What the smallest plan needs with the base in memory, and with the base in its files.
    let [in_files, in_memory] = ["model.stream=true", "model.stream=false"].map(|stream| {
        let how = ["plan", "small.toml", "--profile", "p.toml", "--time-limit", "5s", "--memory", "1000000"];
        let (code, _, said) = run.call(&how, &[stream]);
        assert_eq!(code, Some(3), "{said}");
        let needed = said.split(" needs ").nth(1).and_then(|rest| rest.split(' ').next());
        needed.and_then(|bytes| bytes.parse::<u64>().ok()).unwrap_or_else(|| panic!("{said}"))
    });
    let mut windows = Vec::new();
    for share in [0.2, 0.8] {
        let limit = in_files + ((in_memory - in_files) as f64 * share) as u64;
        let best = plan(limit, &[]);
        let window = best["stream"]["window"].as_u64().unwrap_or_else(|| panic!("{best}"));
        windows.push(window);
        let written = run.read_toml("planned.toml");
        assert_eq!(written["model"]["stream"].as_bool(), Some(true));
        assert_eq!(written["model"]["stream_window"].as_integer(), Some(window as i64));
        // It runs as planned: the program reads as many bytes, and the rank holds no more than the limit.
        let checked = run.json(&["check", "planned.toml"], &[])["memory"].clone();
        assert_eq!(checked["streamed"]["step"], best["stream"]["step_bytes"]);
        run.succeed(&["train", "planned.toml"], &[]);
        let peaks = run.steps().iter().map(|step| step["peak_bytes"][0].as_u64().expect("bytes")).max();
        let found = peaks.expect("a step");
        assert!(found <= limit + LISTS, "{found} of {limit}: {best}");
        let predicted = best["peak_bytes"][0].as_u64().expect("bytes");
        let ratio = predicted as f64 / found as f64;
        assert!(
            (1.0 - ERROR..=1.0 + 2.0 * ERROR).contains(&ratio),
            "{ratio}: {found} instead of {predicted}: {best}"
        );
    }
    assert!(windows[0] <= windows[1], "{windows:?}");
    // With enough memory the base is in memory, unless the configuration says otherwise.
    assert!(plan(1 << 30, &[])["stream"].is_null());
    assert!(run.read_toml("planned.toml").get("model").and_then(|model| model.get("stream")).is_none());
    assert!(plan(1 << 30, &["model.stream=true"])["stream"].is_object());
}

#[test]
fn a_plan_for_tensor_ranks_reads_as_many_bytes_as_its_run() {
    let run = wide_base();
    run.succeed(&["profile", "small.toml", "--time-limit", "1s", "-o", "p.toml"], &[]);
    write_times(&run, "p.toml", 1.0);
    run.write("p.toml", run.read("p.toml") + "\n[node]\nranks = 2\nlatency_s = 1e-6\nbytes_per_s = 1e10\n");
    let how = ["plan", "small.toml", "--profile", "p.toml", "--time-limit", "5s", "-o", "planned.toml"];
    let how = [&how[..], &["--memory", "1GB", "--tensor-parallel", "2"]].concat();
    for ranks in ["pipeline.ranks=2", "pipeline.ranks=4"] {
        let best = run.json(&how, &["model.stream=true", ranks])["plans"][0].clone();
        let checked = run.json(&["check", "planned.toml"], &[]);
        assert_eq!(checked["mesh"]["tensor_parallel"], 2, "{checked}");
        let memory = &checked["memory"];
        assert_eq!(memory["streamed"]["step"], best["stream"]["step_bytes"], "{best}");
        let peaks = [&memory["ranks"][0]["total"], &best["peak_bytes"][0]]
            .map(|bytes| bytes.as_f64().expect("bytes"));
        assert!((peaks[0] / peaks[1] - 1.0).abs() < 3.0 * ERROR, "{peaks:?}: {best}");
    }
}

#[test]
fn a_run_with_its_own_plan_reads_its_base_as_planned() {
    let run = wide_base();
    run.succeed(&["train", "small.toml"], &["model.stream=true", "pipeline.schedule=auto"]);
    let config = run.read_toml("out/config.toml");
    assert_eq!(config["model"]["stream"].as_bool(), Some(true));
    assert!(config["model"]["stream_window"].as_integer().is_some_and(|window| window > 0));
    assert!(run.read("out/timeline.json").contains("unshard"));
}

#[test]
fn a_window_without_effect_is_named() {
    let (folder, settings) = folder(&["model.stream_window=1"]);
    let settings = with(&settings, &[]);
    folder.says(
        &["check", "small.toml"],
        &settings,
        "`model.stream_window` has no effect, because the base is in memory",
    );
    let refused = [&settings[..], &["model.stream=false"]].concat();
    folder.refuse(
        &["check", "small.toml"],
        &refused,
        "`stream_window` has no effect, because `stream` is false",
    );
}

#[test]
fn the_disk_is_measured_on_a_file_of_gguf() {
    let folder = folder_without_path();
    folder.succeed(&["quantize", &reference("qwen3-tiny"), "base.gguf", "--to", "q8_0"], &[]);
    let settings = [&LAYERS[..], &["model.from='base.gguf'", "model.stream=true"]].concat();
    let profile = ["profile", "small.toml", "--time-limit", "1s", "-o", "p.toml"];
    folder.says(&profile, &settings, "files of the base:");
    assert!(folder.read_toml("p.toml")["link"]["read_bytes_per_s"].as_float().expect("a rate") > 0.0);
    let streamed =
        folder.json(&["check", "small.toml", "--profile", "p.toml"], &settings)["memory"]["streamed"].clone();
    assert!(
        streamed["seconds"].as_f64().expect("a time") > 0.0 && streamed["window"].as_u64() > Some(0),
        "{streamed}"
    );
}

#[test]
fn what_cannot_stream_is_refused() {
    let folder = folder_without_path();
    let refuse = |settings: &[&str], part: &str| folder.refuse(&["check", "small.toml"], settings, part);
    let adapter = ["adapter.kind=lora", "adapter.rank=4", "model.stream=true"];
    let add = |more: &[&'static str]| [&adapter[..], more].concat();
    refuse(&adapter[2..], "training changes the whole model: add a section [adapter]");
    refuse(
        &add(&["mesh.data_parallel=2", "mesh.data_parallel_mode=sharded"]),
        "it is not divided among replicas",
    );
    refuse(&["model.stream=2"], "stream");
    let rows = "0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n";
    folder.write("plain.csv", rows);
    folder.print(&["lower", "plain.csv", "--pass", "send-recv", "-o", "messages.csv"]);
    folder.print(&["lower", "plain.csv", "--pass", "unshard,send-recv", "-o", "reading.csv"]);
    let of_rows = |file: &'static str| add(&[file, "pipeline.ranks=2", "pipeline.microbatches=2"]);
    let never = "messages.csv: the base stays in its files (`model.stream`), and the schedule communicates and never reads";
    refuse(&of_rows("pipeline.schedule=messages.csv"), never);
    folder.succeed(&["check", "small.toml"], &of_rows("pipeline.schedule=reading.csv"));
    let fresh = Run::empty();
    fresh.write("a.toml", "[model]\nstream = true\n");
    fresh.refuse(&["check", "a.toml"], &[], "`stream`");
}

#[test]
fn a_file_that_is_removed_ends_the_run_with_its_name() {
    let (folder, settings) = folder(&["model.stream=true", "run.steps=1000000"]);
    let base = folder.path("base");
    fs::create_dir(&base).expect("a folder");
    for entry in fs::read_dir(reference("qwen3-tiny")).expect("the model") {
        let path = entry.expect("a file").path();
        fs::copy(&path, base.join(path.file_name().expect("a name"))).expect("a copy");
    }
    let from = format!("model.from={}", base.display());
    let child = folder.start_heard("train", &["small.toml"], &with(&settings, &[&from]), Stdio::piped());
    folder.wait_for_step(2);
    let file = base.join("model.safetensors");
    fs::remove_file(&file).expect("it is there");
    let output = child.wait_with_output().expect("it ends");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "{said}");
    for part in ["the file was removed while it was in use", "the base of stage", "put back the file"] {
        assert!(said.contains(part), "{part}: {said}");
    }
}
