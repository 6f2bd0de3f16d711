//! Tests of training in several processes: it has the figures of threads, to the bit.

use std::fs;
use std::path::Path;
use std::process::Command;

use super::{figures, folder, pipewright, processes, schedules, train_on_threads, with_overrides, words};

/// Trains with threads and with processes, and compares the figures. Returns the number of compared
/// schedules.
fn compare(ranks: u32) -> usize {
    let folder = folder();
    let mut compared = 0;
    for schedule in schedules() {
        let [ranks_key, schedule_key] =
            [format!("pipeline.ranks={ranks}"), format!("pipeline.schedule={schedule}")];
        let overrides = [ranks_key.as_str(), schedule_key.as_str()];
        let mut alone = Command::new(pipewright());
        with_overrides(alone.current_dir(folder.path()), &overrides);
        let output = alone.output().expect("it starts");
        if output.status.code() == Some(2) {
            // The schedule does not exist for this number of ranks.
            continue;
        }
        assert_eq!(output.status.code(), Some(0), "{}", words(&output));
        let expected = figures(folder.path());
        let output = processes(folder.path(), ranks, &overrides);
        assert_eq!(output.status.code(), Some(0), "{schedule}, {ranks} ranks: {}", words(&output));
        assert_eq!(figures(folder.path()), expected, "{schedule}, {ranks} ranks");
        compared += 1;
    }
    compared
}

#[test]
fn processes_train_as_threads_do_to_the_bit() {
    for ranks in [2, 4, 8] {
        let compared = compare(ranks);
        assert!(compared >= 12, "{ranks} ranks: {compared} schedules");
    }
}

/// Returns the fingerprints of a run.
fn fingerprints(folder: &Path) -> Vec<String> {
    let text = fs::read_to_string(folder.join("out/fingerprints.jsonl")).expect("fingerprints");
    text.lines().map(str::to_owned).collect()
}

#[test]
fn fingerprints_of_processes_are_those_of_threads() {
    let folder = folder();
    for mesh in ["mesh.data_parallel_mode=sharded", "mesh.data_parallel_mode=replicated"] {
        let set = ["pipeline.ranks=2", "mesh.data_parallel=2", "run.fingerprint_every=1", mesh];
        train_on_threads(folder.path(), &set);
        let expected = fingerprints(folder.path());
        assert_eq!(expected.len(), 2);
        let output = processes(folder.path(), 4, &set);
        assert_eq!(output.status.code(), Some(0), "{mesh}: {}", words(&output));
        assert_eq!(fingerprints(folder.path()), expected, "{mesh}");
    }
}

/// Batches overlap as far as the processes have read them in time, which changes no bit.
#[test]
fn delayed_weights_train_in_processes_as_in_threads_to_the_bit() {
    let folder = folder();
    let common = [
        "optimizer.delay=1",
        "run.steps=9",
        "run.eval_every=4",
        "data.validation_share=0.5",
        "pipeline.microbatches=4",
    ];
    let (replicas, tensor) = (["mesh.data_parallel=2"], ["mesh.tensor_parallel=2"]);
    for (schedule, more, processes_of_run) in
        [("1f1b", &[][..], 2), ("gpipe", &[], 4), ("zbvzerobubble", &replicas, 4), ("1f1b", &tensor, 4)]
    {
        let ranks = processes_of_run / (1 + more.len() as u32);
        let cut = [format!("pipeline.ranks={ranks}"), format!("pipeline.schedule={schedule}")];
        let overrides: Vec<&str> =
            common.into_iter().chain(cut.iter().map(String::as_str)).chain(more.iter().copied()).collect();
        let expected = train_on_threads(folder.path(), &overrides);
        let output = processes(folder.path(), processes_of_run, &overrides);
        assert_eq!(output.status.code(), Some(0), "{schedule}: {}", words(&output));
        assert_eq!(figures(folder.path()), expected, "{schedule}");
    }
}

#[test]
fn parts_of_a_head_train_in_processes_as_in_threads_to_the_bit() {
    let folder = folder();
    let parts = [
        "pipeline.ranks=4",
        "pipeline.head_parts=3",
        "pipeline.partition=explicit",
        "pipeline.boundaries=[9, 18, 19]",
    ];
    let expected = train_on_threads(folder.path(), &parts);
    let output = processes(folder.path(), 4, &parts);
    assert_eq!(output.status.code(), Some(0), "{}", words(&output));
    assert_eq!(figures(folder.path()), expected);
}

#[test]
fn experts_train_in_processes_as_in_threads_to_the_bit() {
    let folder = folder();
    let model = ["model.architecture=qwen3_moe", "model.num_experts=4", "model.output_router_logits=true"];
    for schedule in ["pipeline.schedule=zb-h1", "pipeline.schedule=zbvzerobubble"] {
        let overrides: Vec<&str> = model.into_iter().chain(["pipeline.ranks=4", schedule]).collect();
        let expected = train_on_threads(folder.path(), &overrides);
        assert!(
            expected.iter().all(|[_, auxiliary, ..]| auxiliary.starts_with("{\"moe_aux\":")),
            "{expected:?}"
        );
        let output = processes(folder.path(), 4, &overrides);
        assert_eq!(output.status.code(), Some(0), "{}", words(&output));
        assert_eq!(figures(folder.path()), expected, "{schedule}");
    }
}

#[test]
fn evaluations_in_processes_have_the_bits_of_threads() {
    let folder = folder();
    let common = [
        "data.validation_share=0.5",
        "data.bos_id=32",
        "data.packed=true",
        "run.eval_every=1",
        "run.accumulate=2",
        "run.steps=4",
        "run.patience=2",
    ];
    for (learning_rate, steps) in [("optimizer.learning_rate=1e-3", 4), ("optimizer.learning_rate=1e-30", 3)]
    {
        let cut =
            [learning_rate, "pipeline.ranks=2", "mesh.data_parallel=2", "mesh.data_parallel_mode=sharded"];
        let overrides: Vec<&str> =
            common.into_iter().chain(cut).chain(["optimizer.weight_decay=0"]).collect();
        let expected = train_on_threads(folder.path(), &overrides);
        assert!(expected.iter().all(|figures| figures[4] != "null"), "{expected:?}");
        assert_eq!(expected.len(), steps, "a loss that does not fall ends the run");
        let output = processes(folder.path(), 4, &overrides);
        assert_eq!(output.status.code(), Some(0), "{}", words(&output));
        assert_eq!(figures(folder.path()), expected);
        let best = fs::read_link(folder.path().join("out/checkpoints/best")).expect("a link");
        assert_eq!(best.display().to_string(), format!("step-{:08}", if steps == 3 { 1 } else { 4 }));
    }
}

/// The base of adapters in several processes gives the reference, and only the first process writes its file.
#[test]
fn preferences_train_in_processes_as_in_threads_to_the_bit() {
    let folder = folder();
    let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("../pipewright-models/tests/data");
    let config = "[model]\nfrom = \"MODELS/llama-tiny\"\n[adapter]\nkind = \"lora\"\npath = \"MODELS/preference/adapter\"\n[preference]\n\
         loss = \"dpo\"\n[data]\npath = \"MODELS/preference/pairs.jsonl\"\ntokenizer = \"bytes\"\nseq_len = 128\n\
         validation_share = 0.25\n[pipeline]\nmicrobatches = 2\n[mesh]\ndata_parallel = 2\n[run]\nsteps = 2\neval_every = 1\n\
         deadline_seconds = 20\nout = \"out\"\n"
        .to_owned();
    fs::write(folder.path().join("small.toml"), config.replace("MODELS", &models.display().to_string()))
        .expect("a file");
    let reference = || fs::read(folder.path().join("out/reference.json")).expect("the file of the reference");
    let expected = (train_on_threads(folder.path(), &[]), reference());
    assert!(expected.0.iter().all(|figures| figures[4] != "null"), "{expected:?}");
    let output = processes(folder.path(), 4, &[]);
    assert_eq!(output.status.code(), Some(0), "{}", words(&output));
    assert_eq!((figures(folder.path()), reference()), expected);
}

/// Only the process with the last stage knows the rewards and the accuracies.
#[test]
fn scores_train_in_processes_as_in_threads_to_the_bit() {
    let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("../pipewright-models/tests/data");
    let reward = "[preference]\nloss = \"reward\"\n";
    for (model, data, loss) in
        [("llama", "preference/pairs.jsonl", reward), ("qwen3", "score/texts.jsonl", "")]
    {
        let folder = folder();
        let config = format!(
            "[model]\nfrom = \"MODELS/score/{model}\"\n{loss}[data]\npath = \"MODELS/{data}\"\ntokenizer = \"bytes\"\n\
             seq_len = 128\nvalidation_share = 0.25\n[pipeline]\nmicrobatches = 2\n[mesh]\ndata_parallel = 2\n[run]\n\
             steps = 2\neval_every = 1\ndeadline_seconds = 20\nout = \"out\"\n"
        );
        let config = config.replace("MODELS", &models.display().to_string());
        fs::write(folder.path().join("small.toml"), config).expect("a file");
        let expected = train_on_threads(folder.path(), &[]);
        let output = processes(folder.path(), 4, &[]);
        assert_eq!(output.status.code(), Some(0), "{}", words(&output));
        assert_eq!(figures(folder.path()), expected);
    }
}

#[test]
fn processes_skip_the_same_updates_as_threads() {
    let folder = folder();
    let set = ["pipeline.ranks=2", "mesh.data_parallel=2", "run.steps=8", "run.precision=f16"];
    let scale = ["run.loss_scale=4194304", "run.loss_scale_interval=2"];
    let overrides: Vec<&str> = set.into_iter().chain(scale).collect();
    let expected = train_on_threads(folder.path(), &overrides);
    let skipped = expected.iter().filter(|[_, _, _, norm, _]| norm == "null").count();
    assert!((1..8).contains(&skipped), "{expected:?}");
    let output = processes(folder.path(), 4, &overrides);
    assert_eq!(output.status.code(), Some(0), "{}", words(&output));
    assert_eq!(figures(folder.path()), expected);
}

#[test]
fn replicas_train_in_processes_as_in_threads_to_the_bit() {
    let folder = folder();
    for (schedule, mode) in [
        ("1f1b", "replicated"),
        ("zbvzerobubble", "replicated"),
        ("1f1b", "sharded"),
        ("zbvzerobubble", "sharded"),
    ] {
        let (schedule, mode) =
            (format!("pipeline.schedule={schedule}"), format!("mesh.data_parallel_mode={mode}"));
        let overrides = ["mesh.data_parallel=2", "mesh.unshard_window=1", &schedule, &mode];
        let expected = train_on_threads(folder.path(), &overrides);
        let output = processes(folder.path(), 4, &overrides);
        assert_eq!(output.status.code(), Some(0), "{}", words(&output));
        assert_eq!(figures(folder.path()), expected, "{overrides:?}");
    }
}

#[test]
fn parameters_that_stay_gathered_in_processes_have_the_bits_of_threads() {
    let folder = folder();
    let set = ["mesh.data_parallel=2", "mesh.data_parallel_mode=sharded", "run.accumulate=3"];
    for schedule in ["pipeline.schedule=1f1b", "pipeline.schedule=zbvzerobubble"] {
        let expected = train_on_threads(folder.path(), &[&set[..], &[schedule]].concat());
        let gathered = [&set[..], &[schedule, "mesh.keep_gathered=true"]].concat();
        assert_eq!(train_on_threads(folder.path(), &gathered), expected, "{schedule}");
        let output = processes(folder.path(), 4, &gathered);
        assert_eq!(output.status.code(), Some(0), "{}", words(&output));
        assert_eq!(figures(folder.path()), expected, "{schedule}");
    }
}

#[test]
fn groups_of_replicas_train_in_processes_as_in_threads_to_the_bit() {
    let folder = folder();
    let set = ["mesh.data_parallel=[2, 2]", "mesh.unshard_window=1", "run.steps=4", "run.checkpoint_every=2"];
    let cuts = [(8, "pipeline.schedule=1f1b"), (4, "pipeline.ranks=1")];
    for (count, cut) in cuts {
        let overrides = [&set[..], &[cut]].concat();
        let expected = train_on_threads(folder.path(), &overrides);
        let output = processes(folder.path(), count, &overrides);
        assert_eq!(output.status.code(), Some(0), "{}", words(&output));
        assert_eq!(figures(folder.path()), expected, "{overrides:?}");
        // The processes of the first group have saved their parts, and threads continue with them.
        let mut resumed = Command::new(pipewright());
        resumed.current_dir(folder.path()).args(["resume", "out/checkpoints/step-00000002"]);
        resumed.args(["--set", "pipeline.transport=local", "--set", "mesh.data_parallel=4"]);
        let output =
            resumed.args(["--set", "mesh.data_parallel_mode=replicated"]).output().expect("it starts");
        assert_eq!(output.status.code(), Some(0), "{}", words(&output));
        assert_eq!(figures(folder.path()), expected, "{overrides:?}, resumed");
    }
}

#[test]
fn tensor_ranks_train_in_processes_as_in_threads_to_the_bit() {
    let folder = folder();
    for (ranks, overrides) in [
        (4, &["mesh.tensor_parallel=2"][..]),
        (8, &["mesh.data_parallel=2", "mesh.tensor_parallel=2", "pipeline.schedule=zbvzerobubble"]),
        (4, &["mesh.tensor_parallel=2", "mesh.sequence_parallel=true", "pipeline.schedule=zbvzerobubble"]),
        (
            4,
            &[
                "mesh.tensor_parallel=2",
                "mesh.whole_experts=true",
                "model.architecture=qwen3_moe",
                "model.num_experts=5",
                "model.output_router_logits=true",
            ],
        ),
    ] {
        let expected = train_on_threads(folder.path(), overrides);
        let output = processes(folder.path(), ranks, overrides);
        assert_eq!(output.status.code(), Some(0), "{}", words(&output));
        assert_eq!(figures(folder.path()), expected, "{overrides:?}");
    }
}

#[test]
fn replicas_that_hold_experts_together_train_in_processes_as_in_threads_to_the_bit() {
    let folder = folder();
    let experts = ["model.architecture=qwen3_moe", "model.num_experts=4", "mesh.data_parallel=2"];
    for (count, set) in [
        (2, &["pipeline.ranks=1", "pipeline.schedule=1f1b"][..]),
        (4, &["pipeline.ranks=2", "pipeline.schedule=1f1b"]),
        // A forward computes while a backward exchanges tokens, and the other way round.
        (2, &["pipeline.ranks=1", "pipeline.schedule=dualpipev"]),
        // Two replicas hold the same rows of experts, and other rows of the other parameters.
        (4, &["pipeline.ranks=1", "mesh.data_parallel=4", "mesh.data_parallel_mode=sharded"]),
    ] {
        let whole = [&experts[..], set].concat();
        let expected = train_on_threads(folder.path(), &whole);
        let output = processes(folder.path(), count, &[&whole[..], &["mesh.expert_parallel=2"]].concat());
        assert_eq!(output.status.code(), Some(0), "{}", words(&output));
        assert_eq!(figures(folder.path()), expected, "{set:?}");
    }
}
