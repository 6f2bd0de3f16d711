//! `pipeline.head_parts` through the command line: the layers that it makes, runs that are killed and resume
//! with another number of parts, the model that such a run leaves, and heads that cannot be cut.

use std::fs;
use std::path::Path;

use crate::run::{Run, tensors};
use crate::scratch;

pub(crate) const CONSTANT: &str = "optimizer.schedule=constant";

/// Runs a command with overrides. Returns the exit code, standard output and standard error.
pub(crate) fn command(run: &Run, arguments: &[&str], set: &[&str]) -> (Option<i32>, String, String) {
    let set = set.iter().flat_map(|set| ["--set", set]);
    let output = run.command(&arguments.iter().copied().chain(set).collect::<Vec<_>>());
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.code(), text(&output.stdout), text(&output.stderr))
}

/// Compares figures that are sums in another order.
fn assert_near(found: &Run, expected: &Run) {
    let (found, expected) = (found.figures(), expected.figures());
    assert_eq!(found.len(), expected.len());
    for (found, expected) in found.iter().zip(&expected) {
        for (found, expected) in [(&found.1, &expected.1), (&found.2, &expected.2)] {
            let [found, expected] = [found, expected].map(|figure| figure.parse::<f64>().expect("a number"));
            assert!((found - expected).abs() <= 5e-5 * expected, "{found} {expected}");
        }
    }
}

/// Returns the weights of a model directory, by name.
pub(crate) fn weights(folder: &Path) -> Vec<(String, Vec<usize>, Vec<f32>)> {
    let bytes = fs::read(folder.join("model.safetensors")).expect("the weights");
    let file = safetensors::SafeTensors::deserialize(&bytes).expect("a sound file");
    let mut names: Vec<&str> = file.names();
    names.sort_unstable();
    let of = |name: &str| {
        let view = file.tensor(name).expect("it is there");
        let (numbers, _) = view.data().as_chunks();
        (name.to_owned(), view.shape().to_vec(), numbers.iter().copied().map(f32::from_le_bytes).collect())
    };
    names.into_iter().map(of).collect()
}

#[test]
fn check_lists_the_parts_and_counts_their_memory() {
    let run = Run::new();
    let set = ["pipeline.head_parts=3", "pipeline.partition=explicit", "pipeline.boundaries=[4]"];
    let (code, out, said) = command(&run, &["check", "small.toml"], &set);
    let text = out + &said;
    assert_eq!(code, Some(0), "{text}");
    assert!(text.contains("model     6 layers"), "{text}");
    assert!(
        text.contains("stage 0   on rank 0: layers 0 to 3 (1 embedding, 2 decoder, 1 head part)"),
        "{text}"
    );
    assert!(text.contains("stage 1   on rank 1: layers 4 to 5 (2 head part), 1360 parameters"), "{text}");
}

/// Trains with 3 parts, kills the run, and resumes it with 5 parts and then with one; `parts` is the setting.
/// Returns the run, and one without parts that has as many steps.
pub(crate) fn killed_and_resumed(parts: &str) -> [Run; 2] {
    let [three, five, one] = [3, 5, 1].map(|number| format!("{parts}={number}"));
    let cut = Run::new();
    let set = [&three, "pipeline.schedule=zb-h1", CONSTANT, "run.steps=100000", "run.checkpoint_every=2"];
    let mut child = cut.start("train", &["small.toml"], &set);
    cut.wait_for_step(4);
    child.kill().and_then(|()| child.wait()).expect("the run is ours to kill");
    let steps = cut.figures().len();
    let [second, third] = [4, 6].map(|more| format!("run.steps={}", steps + more));
    // Interleaved, a rank stores several slices of a matrix in its file.
    cut.resume(&["pipeline.schedule=interleaved1f1b", "pipeline.stages_per_rank=2", &five, &second]);
    cut.resume(&["pipeline.schedule=1f1b", "pipeline.stages_per_rank=1", &one, &third]);
    let whole = Run::new();
    whole.train(&[CONSTANT, &third]);
    [cut, whole]
}

#[test]
fn a_killed_run_resumes_with_another_number_of_parts() {
    let [cut, whole] = killed_and_resumed("pipeline.head_parts");
    assert_near(&cut, &whole);
}

/// A hybrid with a tied head and two further predictions.
const HYBRID: [&str; 5] = [
    "model.architecture=hybrid",
    "model.tie_word_embeddings=true",
    "model.mtp_loss_weight=0.3",
    "model.mtp_depth=2",
    "model.mtp_block=D",
];

#[test]
fn check_lists_predictions_and_the_shards_of_a_table() {
    let run = Run::new();
    let cut = ["pipeline.head_parts=3", "pipeline.partition=explicit", "pipeline.boundaries=[6]"];
    let (code, out, said) = command(&run, &["check", "small.toml"], &[&HYBRID[..], &cut].concat());
    let text = out + &said;
    assert_eq!(code, Some(0), "{text}");
    assert!(text.contains("model     10 layers"), "{text}");
    let first = "stage 0   on rank 0: layers 0 to 5 (1 embedding, 2 attention, 2 dense, 1 prediction)";
    assert!(text.contains(first), "{text}");
    assert!(text.contains("stage 1   on rank 1: layers 6 to 9 (1 prediction, 3 head part)"), "{text}");
    let shared =
        "model.embed_tokens.weight: one parameter, with all or some of its rows in each of stages 0 and 1";
    assert!(text.contains(shared), "{text}");
}

#[test]
fn a_hybrid_with_a_tied_head_resumes_with_another_number_of_parts() {
    let cut = Run::new();
    let first = ["run.steps=4", "pipeline.head_parts=3", "pipeline.schedule=zb-h1", CONSTANT];
    cut.train(&[&HYBRID[..], &first].concat());
    cut.resume(&["run.steps=6", "pipeline.head_parts=1", "pipeline.schedule=1f1b"]);
    cut.resume(&["run.steps=8", "pipeline.head_parts=5"]);
    let whole = Run::new();
    whole.train(&[&HYBRID[..], &["run.steps=8", CONSTANT]].concat());
    assert_near(&cut, &whole);
    // The text comes from the model without its further predictions, on one rank and on several.
    let texts = ["1", "2"].map(|ranks| {
        let arguments =
            ["generate", "out", "--prompt", "the", "--tokens", "4", "--temperature", "0", "--ranks", ranks];
        let (code, out, said) = command(&cut, &arguments, &[]);
        assert_eq!(code, Some(0), "{said}");
        out
    });
    assert_eq!(texts[0], texts[1]);
}

/// The parts of a head that no stage shares are not listed as copies.
#[test]
fn check_lists_no_copies_of_a_head_of_its_own() {
    let run = Run::new();
    let (code, out, said) = command(&run, &["check", "small.toml"], &["pipeline.head_parts=6"]);
    assert_eq!(code, Some(0), "{said}");
    assert!(!out.contains("lm_head.weight: one parameter"), "{out}");
}

#[test]
fn the_slices_of_a_file_have_names_of_their_own() {
    let run = Run::new();
    run.train(&["run.steps=2", "pipeline.ranks=1", "pipeline.schedule=gpipe", "pipeline.head_parts=3"]);
    let checkpoint = run.path("out/checkpoints").join(run.checkpoints().last().expect("a checkpoint"));
    let names: Vec<String> = tensors(&checkpoint).into_iter().map(|(name, _)| name).collect();
    for name in ["lm_head.weight#0", "lm_head.weight#1", "lm_head.weight#2"] {
        assert!(names.iter().any(|found| found == name), "{names:?}");
        assert!(names.iter().any(|found| found.starts_with(&format!("{name}@"))), "{names:?}");
    }
    let (code, out, said) = command(&run, &["inspect", "out"], &[]);
    assert_eq!(code, Some(0), "{said}");
    assert!(out.contains("[16, 128]  lm_head.weight") && !out.contains('#'), "{out}");
}

#[test]
fn a_run_in_parts_leaves_the_model_of_one_head() {
    let exported = |set: &[&str]| {
        let run = Run::new();
        run.train(&[set, &["run.steps=10", "data.validation_share=0.3", "run.eval_every=5"]].concat());
        let (code, _, said) = command(&run, &["export", "out", "model"], &[]);
        assert_eq!(code, Some(0), "{said}");
        let text = |of: &str| {
            let (code, out, said) = command(
                &run,
                &["generate", of, "--prompt", "the quick", "--tokens", "4", "--temperature", "0"],
                &[],
            );
            assert_eq!(code, Some(0), "{said}");
            out
        };
        let of_run = text("out");
        assert_eq!(of_run, text("model"));
        (run, of_run)
    };
    let (whole, expected_text) = exported(&[]);
    let (cut, text) = exported(&["pipeline.head_parts=3"]);
    assert_near(&cut, &whole);
    assert_eq!(text, expected_text);
    let (found, expected) = (weights(&cut.path("model")), weights(&whole.path("model")));
    assert_eq!(found.len(), expected.len());
    for ((name, shape, found), (other, other_shape, expected)) in found.iter().zip(&expected) {
        assert_eq!((name, shape), (other, other_shape));
        for (found, expected) in found.iter().zip(expected) {
            assert!((found - expected).abs() <= 1e-4, "{name}: {found} {expected}");
        }
    }
}

#[test]
fn parts_are_measured_as_a_kind_of_their_own() {
    let run = Run::new();
    let arguments = ["profile", "small.toml", "--time-limit", "1s", "-o", "p.toml"];
    let (code, _, said) = command(&run, &arguments, &["pipeline.head_parts=5", "model.vocab_size=130"]);
    assert_eq!(code, Some(0), "{said}");
    let profile: toml::Table =
        fs::read_to_string(run.path("p.toml")).expect("the profile").parse().expect("TOML");
    let layers = profile["layers"].as_array().expect("a list");
    let kinds =
        layers.iter().map(|layer| (layer["kind"].as_str().expect("a word"), layer["count"].as_integer()));
    let parts = |count| ("head part", Some(count));
    let expected = [("embedding", Some(1)), ("decoder", Some(2)), parts(1), parts(3), parts(1)];
    assert_eq!(kinds.collect::<Vec<_>>(), expected);
    for layer in layers {
        assert!(layer["forward_s"].as_float().is_some_and(|time| time > 0.0), "{layer}");
    }
}

#[test]
fn heads_that_cannot_be_cut_are_refused() {
    let run = Run::new();
    let refused = |set: &[&str], expected: &str| {
        for subcommand in ["check", "train"] {
            let (code, _, said) = command(&run, &[subcommand, "small.toml"], set);
            let words = said.split_whitespace().collect::<Vec<_>>().join(" ");
            assert!(code == Some(2) && words.contains(expected), "{code:?} {words}");
        }
    };
    let parts = "pipeline.head_parts=2";
    refused(&["pipeline.head_parts=0"], "`head_parts` is 0, where a whole number from 1");
    refused(&["pipeline.head_parts=\"two\""], "`head_parts` is a text, where a whole number");
    refused(
        &["pipeline.head_parts=129"],
        "129 parts of a vocabulary of 128 tokens leave a part without a token",
    );
    refused(
        &["pipeline.head_parts=127"],
        "127 parts of a vocabulary of 128 tokens leave a part without a token",
    );
    let hybrid = ["model.architecture=hybrid", "model.mtp_loss_weight=0.3"];
    refused(
        &[&hybrid[..], &["pipeline.head_parts=129"]].concat(),
        "129 parts of a vocabulary of 128 tokens leave a part without a token",
    );
    refused(&[parts, hybrid[0], hybrid[1], "model.mtp_depth=0"], "`mtp_depth = 0` is out of range");
    refused(&[parts, "mesh.tensor_parallel=2"], "2 tensor ranks split the vocabulary already");
    let (code, _, said) = command(&run, &["check", "small.toml"], &[parts, "optimizer.name=adafactor"]);
    let words = said.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(code == Some(2) && words.contains("each layer has only some rows of the head"), "{words}");
    // A schedule with more stages than layers.
    refused(&[parts, "pipeline.ranks=6", "pipeline.microbatches=6"], "5 layers cannot fill 6 stages");
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
    let losses = |parts: &str| {
        fs::remove_dir_all(run.out()).expect("a folder");
        let (code, _, said) = command(&run, &["train", "from.toml"], &[parts]);
        assert_eq!(code, Some(0), "{said}");
        run.figures()[0].1.parse::<f64>().expect("a number")
    };
    let (one, three) = (losses("pipeline.head_parts=1"), losses("pipeline.head_parts=3"));
    assert!((one - three).abs() <= 1e-6 * one, "{one} {three}");
}
