//! `pipeline.embedding_parts` through the command line: the layers that it makes, runs that are killed and
//! resume with another number of parts, the model that such a run leaves, plans for a table that no rank can
//! hold, and embeddings that cannot be cut.

use std::fs;

use crate::head_parts::{command, killed_and_resumed, weights};
use crate::run::{Run, tensors};
use crate::scratch;

/// Requires the losses of another run to the bit. Gradient norms are sums over parts, so their last bit may
/// differ.
fn assert_same(found: &Run, expected: &Run) {
    let (found, expected) = (found.figures(), expected.figures());
    assert_eq!(found.len(), expected.len());
    for (found, expected) in found.iter().zip(&expected) {
        assert_eq!(found.1, expected.1, "step {}", found.0);
        let [found, expected] = [&found.2, &expected.2].map(|norm| norm.parse::<f64>().expect("a number"));
        assert!((found - expected).abs() <= 1e-14 * expected, "{found} {expected}");
    }
}

/// Returns the words of a message.
fn words(said: &str) -> String {
    said.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[test]
fn check_lists_the_parts_and_counts_their_memory() {
    let run = Run::new();
    let explicit = ["pipeline.embedding_parts=3", "pipeline.partition=explicit", "pipeline.boundaries=[2]"];
    let layout = ["pipeline.embedding_parts=3", "pipeline.layout=E*2 | E A*2 L"];
    for set in [&explicit[..], &layout[..]] {
        let (code, out, said) = command(&run, &["check", "small.toml"], set);
        let text = out + &said;
        assert_eq!(code, Some(0), "{text}");
        assert!(text.contains("model     6 layers"), "{text}");
        // 43 of 128 rows with 16 columns in each of the first two parts.
        let first = "stage 0   on rank 0: layers 0 to 1 (2 embedding part), 1376 parameters";
        assert!(text.contains(first), "{text}");
        let second = "stage 1   on rank 1: layers 2 to 5 (1 embedding part, 2 decoder, 1 head)";
        assert!(text.contains(second) && !text.contains("one parameter"), "{text}");
    }
    let tied = ["model.tie_word_embeddings=true", "pipeline.head_parts=3"];
    let (code, out, said) = command(&run, &["check", "small.toml"], &[&explicit[..], &tied].concat());
    assert_eq!(code, Some(0), "{said}");
    let shared =
        "model.embed_tokens.weight: one parameter, with all or some of its rows in each of stages 0 and 1";
    assert!(out.contains(shared), "{out}");
}

#[test]
fn a_killed_run_resumes_with_another_number_of_parts() {
    let [cut, whole] = killed_and_resumed("pipeline.embedding_parts");
    assert_same(&cut, &whole);
}

#[test]
fn a_run_in_parts_leaves_the_model_of_a_whole_embedding() {
    let trained = |set: &[&str]| {
        let run = Run::new();
        let more = [
            "run.steps=10",
            "data.validation_share=0.3",
            "run.eval_every=5",
            "run.sample_prompts=[\"the\", \"quick\"]",
            "run.sample_tokens=4",
        ];
        run.train(&[set, &more].concat());
        let (code, _, said) = command(&run, &["export", "out", "model"], &[]);
        assert_eq!(code, Some(0), "{said}");
        run
    };
    let text = |run: &Run, of: &str, ranks: &str| {
        let arguments = [
            "generate",
            of,
            "--prompt",
            "the quick",
            "--tokens",
            "4",
            "--temperature",
            "0",
            "--ranks",
            ranks,
        ];
        let (code, out, said) = command(run, &arguments, &[]);
        assert_eq!(code, Some(0), "{said}");
        out
    };
    let (whole, cut) = (trained(&[]), trained(&["pipeline.embedding_parts=3"]));
    assert_same(&cut, &whole);
    assert_eq!(weights(&cut.path("model")), weights(&whole.path("model")));
    let samples = |run: &Run| {
        let metrics = fs::read_to_string(run.path("out/metrics.jsonl")).expect("the metrics");
        let line = metrics.lines().last().expect("a step").to_owned();
        serde_json::from_str::<serde_json::Value>(&line).expect("an object")["samples"].to_string()
    };
    assert!(samples(&cut).contains("quick"), "{}", samples(&cut));
    assert_eq!(samples(&cut), samples(&whole));
    let expected = text(&whole, "out", "1");
    for (of, ranks) in [("out", "1"), ("out", "2"), ("model", "1")] {
        assert_eq!(text(&cut, of, ranks), expected, "{of} on {ranks} ranks");
    }
    let checkpoint = cut.path("out/checkpoints").join(cut.checkpoints().last().expect("a checkpoint"));
    let names: Vec<String> = tensors(&checkpoint).into_iter().map(|(name, _)| name).collect();
    assert!(names.iter().any(|name| name.starts_with("model.embed_tokens.weight#")), "{names:?}");
    let (code, out, said) = command(&cut, &["inspect", "out"], &[]);
    assert_eq!(code, Some(0), "{said}");
    assert!(out.contains("[128, 16]  model.embed_tokens.weight") && !out.contains('#'), "{out}");
}

#[test]
fn a_model_directory_is_read_in_parts() {
    let run = Run::new();
    run.train(&["run.steps=1"]);
    let (code, _, said) = command(&run, &["export", "out", "model"], &[]);
    assert_eq!(code, Some(0), "{said}");
    let config = scratch::small(2, 4, 3);
    let config = config.split_once("[data]").expect("a section of the data").1;
    fs::write(run.path("from.toml"), format!("[model]\nfrom = \"model\"\n[data]{config}")).expect("a file");
    let losses = |set: &[&str]| {
        fs::remove_dir_all(run.out()).expect("a folder");
        let (code, _, said) = command(&run, &["train", "from.toml"], set);
        assert_eq!(code, Some(0), "{said}");
        run.figures().into_iter().map(|(_, loss, _)| loss).collect::<Vec<_>>()
    };
    let parts = "pipeline.embedding_parts=5";
    assert_eq!(losses(&[parts]), losses(&[]));
    // Adapters train on a frozen embedding in parts.
    let adapter =
        ["adapter.kind=lora", "adapter.rank=2", "adapter.targets=[\"q_proj\"]", "run.precision=bf16"];
    assert_eq!(losses(&[&adapter[..], &[parts]].concat()), losses(&adapter));
}

#[test]
fn parts_are_measured_as_kinds_of_their_own() {
    let run = Run::new();
    let arguments = ["profile", "small.toml", "--time-limit", "1s", "-o", "p.toml"];
    let (code, _, said) = command(&run, &arguments, &["pipeline.embedding_parts=5", "model.vocab_size=130"]);
    assert_eq!(code, Some(0), "{said}");
    let profile: toml::Table =
        fs::read_to_string(run.path("p.toml")).expect("the profile").parse().expect("TOML");
    let layers = profile["layers"].as_array().expect("a list");
    let kinds =
        layers.iter().map(|layer| (layer["kind"].as_str().expect("a word"), layer["count"].as_integer()));
    let parts = |count| ("embedding part", Some(count));
    let expected = [parts(1), parts(3), parts(1), ("decoder", Some(2)), ("head", Some(1))];
    assert_eq!(kinds.collect::<Vec<_>>(), expected);
    for layer in layers {
        assert!(layer["forward_s"].as_float().is_some_and(|time| time > 0.0), "{layer}");
    }
}

/// A table of 10 MB, which takes 41 MB with its gradients and the optimizer's state.
const LARGE: [&str; 6] = [
    "model.vocab_size=40000",
    "model.hidden_size=64",
    "model.intermediate_size=96",
    "pipeline.ranks=4",
    "pipeline.microbatches=4",
    "run.steps=2",
];

#[test]
fn a_table_that_no_rank_holds_is_planned_in_parts() {
    let run = Run::new();
    let limit = 30_000_000;
    let plan = |parts: &str| {
        let limit = limit.to_string();
        let arguments = [
            "plan",
            "small.toml",
            "--data-parallel",
            "1",
            "--memory",
            &limit,
            "--time-limit",
            "20s",
            "-o",
            "planned.toml",
        ];
        command(&run, &arguments, &[&LARGE[..], &[parts]].concat())
    };
    let (code, _, said) = plan("pipeline.embedding_parts=1");
    let said = words(&said);
    assert!(code != Some(0) && said.contains("no plan fits"), "{code:?} {said}");
    let note = "note: the embedding alone needs 39.1 MiB, and a rank has 28.6 MiB: cut it along the vocabulary (`pipeline.embedding_parts`;";
    assert!(said.contains(note), "{said}");
    let (code, printed, said) = plan("pipeline.embedding_parts=4");
    assert_eq!(code, Some(0), "{printed} {said}");
    let planned: toml::Table =
        fs::read_to_string(run.path("planned.toml")).expect("the plan").parse().expect("TOML");
    assert_eq!(planned["pipeline"]["embedding_parts"].as_integer(), Some(4));
    let (code, _, said) = command(&run, &["train", "planned.toml"], &[]);
    assert_eq!(code, Some(0), "{said}");
    let metrics = fs::read_to_string(run.path("out/metrics.jsonl")).expect("the metrics");
    let line: serde_json::Value =
        serde_json::from_str(metrics.lines().last().expect("a step")).expect("JSON");
    let peaks = line["peak_bytes"].as_array().expect("a list");
    let most = peaks.iter().filter_map(serde_json::Value::as_u64).max().expect("a rank");
    assert!((20_000_000..limit).contains(&most), "{peaks:?}");
}

#[test]
fn other_systems_have_no_parts() {
    let run = Run::new();
    let arguments = ["plan", "small.toml", "--emit", "torchtitan", "-o", "plan"];
    let (code, _, said) = command(&run, &arguments, &["pipeline.embedding_parts=2"]);
    let said = words(&said);
    assert!(code == Some(2) && said.contains("--emit: the embedding is in parts"), "{code:?} {said}");
}

/// The bars of a pattern are between its blocks, however many layers are before them.
#[test]
fn a_pattern_keeps_its_cuts() {
    let run = Run::new();
    let set = [
        "model.architecture=hybrid",
        "model.pattern=AD|AD",
        "pipeline.partition=pattern",
        "pipeline.embedding_parts=3",
    ];
    let (code, out, said) = command(&run, &["check", "small.toml"], &set);
    assert_eq!(code, Some(0), "{said}");
    assert!(out.contains("layers 0 to 4 (3 embedding part, 1 attention, 1 dense)"), "{out}");
}

#[test]
fn embeddings_that_cannot_be_cut_are_refused() {
    let run = Run::new();
    let refused = |set: &[&str], expected: &str| {
        for subcommand in ["check", "train"] {
            let (code, _, said) = command(&run, &[subcommand, "small.toml"], set);
            let said = words(&said);
            assert!(code == Some(2) && said.contains(expected), "{code:?} {said}");
        }
    };
    let parts = "pipeline.embedding_parts=2";
    refused(&["pipeline.embedding_parts=0"], "`embedding_parts` is 0, where a whole number from 1");
    refused(&["pipeline.embedding_parts=\"two\""], "`embedding_parts` is a text, where a whole number");
    for number in ["127", "129"] {
        refused(
            &[&format!("pipeline.embedding_parts={number}")],
            &format!(
                "{number} parts of a vocabulary of 128 tokens leave a part of the embedding without a token"
            ),
        );
    }
    let tied = "model.tie_word_embeddings=true";
    refused(&[parts, tied], "have one table, which cannot have 2 parts and 1");
    refused(&[parts, tied, "pipeline.head_parts=3"], "have one table, which cannot have 2 parts and 3");
    refused(&[parts, "mesh.tensor_parallel=2"], "2 tensor ranks split the vocabulary already");
    refused(&[parts, "pipeline.layout=E | A*2 L"], "the embedding has 2 parts, and the layout 1");
    refused(&[parts, "pipeline.ranks=6", "pipeline.microbatches=6"], "5 layers cannot fill 6 stages");
    let (code, _, said) = command(&run, &["check", "small.toml"], &[parts, "optimizer.name=adafactor"]);
    let said = words(&said);
    assert!(code == Some(2) && said.contains("each layer has only some rows of the embedding"), "{said}");
}
