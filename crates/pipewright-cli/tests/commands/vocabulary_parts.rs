//! `pipeline.head_parts` and `pipeline.embedding_parts` through the command line: the layers that they make, runs that are
//! killed and resume with another number of parts, the model that such a run leaves, plans for a table that no rank can
//! hold, and layers that cannot be cut.

use std::path::Path;

use crate::run::{Run, assert_near, tensors};
use crate::scratch;

const HEAD: &str = "pipeline.head_parts";
const EMBEDDING: &str = "pipeline.embedding_parts";
const CONSTANT: &str = "optimizer.schedule=constant";

fn in_parts(key: &str, number: u32) -> String {
    format!("{key}={number}")
}

/// Compares a run in parts with a whole one. The figures of a head in parts are sums in another order. An embedding in
/// parts has the same losses to the bit, and gradient norms that are sums over parts.
fn assert_alike(key: &str, found: &Run, expected: &Run) {
    let (found, expected) = (found.losses(), expected.losses());
    assert_near(&found, &expected, if key == HEAD { 5e-5 } else { 1e-14 }, key);
    let losses = |figures: &[[f64; 2]]| figures.iter().map(|figures| figures[0]).collect::<Vec<_>>();
    assert!(key == HEAD || losses(&found) == losses(&expected), "{found:?} {expected:?}");
}

/// Returns the weights of a model directory, by name.
fn weights(folder: &Path) -> Vec<(String, Vec<usize>, Vec<f32>)> {
    let bytes = std::fs::read(folder.join("model.safetensors")).expect("the weights");
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

/// A hybrid with a tied head and two further predictions.
const HYBRID: [&str; 5] = [
    "model.architecture=hybrid",
    "model.tie_word_embeddings=true",
    "model.mtp_loss_weight=0.3",
    "model.mtp_depth=2",
    "model.mtp_block=D",
];

const SHARED: &str =
    "model.embed_tokens.weight: one parameter, with all or some of its rows in each of stages 0 and 1";

#[test]
fn check_lists_the_parts_and_counts_their_memory() {
    let run = Run::new();
    let check = |set: &[&str], expected: &[&str], absent: &str| {
        let (out, said) = run.succeed(&["check", "small.toml"], set);
        let text = out + &said;
        assert!(expected.iter().all(|part| text.contains(part)), "{set:?}: {text}");
        assert!(absent.is_empty() || !text.contains(absent), "{set:?}: {text}");
    };
    let explicit = |parts, boundary| [parts, "pipeline.partition=explicit", boundary];
    let head = explicit("pipeline.head_parts=3", "pipeline.boundaries=[4]");
    check(
        &head,
        &[
            "model     6 layers",
            "stage 0   on rank 0: layers 0 to 3 (1 embedding, 2 decoder, 1 head part)",
            "stage 1   on rank 1: layers 4 to 5 (2 head part), 1360 parameters",
        ],
        "",
    );
    // The parts of a head that no stage shares are not listed as copies.
    check(&["pipeline.head_parts=6"], &[], "lm_head.weight: one parameter");
    let embedding = explicit("pipeline.embedding_parts=3", "pipeline.boundaries=[2]");
    let layout = ["pipeline.embedding_parts=3", "pipeline.layout=E*2 | E A*2 L"];
    for set in [&embedding[..], &layout[..]] {
        let expected = [
            "model     6 layers",
            // 43 of 128 rows with 16 columns in each of the first two parts.
            "stage 0   on rank 0: layers 0 to 1 (2 embedding part), 1376 parameters",
            "stage 1   on rank 1: layers 2 to 5 (1 embedding part, 2 decoder, 1 head)",
        ];
        check(set, &expected, "one parameter");
    }
    let tied = ["model.tie_word_embeddings=true", "pipeline.head_parts=3"];
    check(&[&embedding[..], &tied].concat(), &[SHARED], "");
    let predictions = explicit("pipeline.head_parts=3", "pipeline.boundaries=[6]");
    check(
        &[&HYBRID[..], &predictions].concat(),
        &[
            "model     10 layers",
            "stage 0   on rank 0: layers 0 to 5 (1 embedding, 2 attention, 2 dense, 1 prediction)",
            "stage 1   on rank 1: layers 6 to 9 (1 prediction, 3 head part)",
            SHARED,
        ],
        "",
    );
    // The bars of a pattern are between its blocks, however many layers are before them.
    let pattern = ["model.architecture=hybrid", "model.pattern=AD|AD", "pipeline.partition=pattern"];
    check(
        &[&pattern[..], &["pipeline.embedding_parts=3"]].concat(),
        &["layers 0 to 4 (3 embedding part, 1 attention, 1 dense)"],
        "",
    );
}

/// A run with 3 parts is killed, and resumes with 5 parts and then with one.
#[test]
fn a_killed_run_resumes_with_another_number_of_parts() {
    for key in [HEAD, EMBEDDING] {
        let [three, five, one] = [3, 5, 1].map(|number| in_parts(key, number));
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
        assert_alike(key, &cut, &whole);
    }
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
    assert_alike(HEAD, &cut, &whole);
    // The text comes from the model without its further predictions, on one rank and on several.
    assert_eq!(text(&cut, "out", "1"), text(&cut, "out", "2"));
}

fn text(run: &Run, of: &str, ranks: &str) -> String {
    let greedy = ["--prompt", "the quick", "--tokens", "4", "--temperature", "0", "--ranks", ranks];
    run.print(&[&["generate", of], &greedy[..]].concat())
}

#[test]
fn a_run_in_parts_leaves_the_model_of_a_whole_layer() {
    const SAMPLES: [&str; 2] = ["run.sample_prompts=[\"the\", \"quick\"]", "run.sample_tokens=4"];
    let trained = |set: &[&str]| {
        let run = Run::new();
        let more = ["run.steps=10", "data.validation_share=0.3", "run.eval_every=5"];
        run.train(&[set, &more].concat());
        run.print(&["export", "out", "model"]);
        run
    };
    let samples = |run: &Run| run.steps().pop().expect("a step")["samples"].to_string();
    let whole = trained(&SAMPLES);
    let (expected_text, expected) = (text(&whole, "out", "1"), weights(&whole.path("model")));
    for (key, parameter, shape) in [
        (HEAD, "lm_head.weight", "[16, 128]  lm_head.weight"),
        (EMBEDDING, "model.embed_tokens.weight", "[128, 16]  model.embed_tokens.weight"),
    ] {
        let parts = in_parts(key, 3);
        // A head in parts has no logits for samples.
        let samples_of: &[&str] = if key == HEAD { &[] } else { &SAMPLES };
        let cut = trained(&[&[parts.as_str()], samples_of].concat());
        assert_alike(key, &cut, &whole);
        let found = weights(&cut.path("model"));
        assert_eq!(found.len(), expected.len());
        for ((name, shape, found), (other, other_shape, expected)) in found.iter().zip(&expected) {
            assert_eq!((name, shape), (other, other_shape));
            let are_close = found.iter().zip(expected).all(|(a, b)| (a - b).abs() <= 1e-4);
            assert!(if key == HEAD { are_close } else { found == expected }, "{key}: {name}");
        }
        if key == EMBEDDING {
            assert!(samples(&cut).contains("quick"), "{}", samples(&cut));
            assert_eq!(samples(&cut), samples(&whole));
        }
        for (of, ranks) in [("out", "1"), ("out", "2"), ("model", "1")] {
            assert_eq!(text(&cut, of, ranks), expected_text, "{key}: {of} on {ranks} ranks");
        }
        // The slices have names of their own in a checkpoint.
        let checkpoint = cut.path("out/checkpoints").join(cut.checkpoints().last().expect("a checkpoint"));
        let names: Vec<String> = tensors(&checkpoint).into_iter().map(|(name, _)| name).collect();
        for name in [0, 1, 2].map(|part| format!("{parameter}#{part}")) {
            assert!(names.contains(&name), "{name}: {names:?}");
            assert!(names.iter().any(|found| found.starts_with(&format!("{name}@"))), "{name}: {names:?}");
        }
        let out = cut.print(&["inspect", "out"]);
        assert!(out.contains(shape) && !out.contains('#'), "{out}");
    }
}

#[test]
fn a_model_directory_is_read_in_parts() {
    let run = Run::new();
    run.train(&["run.steps=1"]);
    run.print(&["export", "out", "model"]);
    let config = scratch::small(2, 4, 3);
    let config = config.split_once("[data]").expect("a section of the data").1;
    run.write("from.toml", format!("[model]\nfrom = \"model\"\n[data]{config}"));
    let losses = |set: &[&str]| {
        std::fs::remove_dir_all(run.out()).expect("a folder");
        run.trained("from.toml", set).into_iter().map(|[loss, _]| loss).collect::<Vec<_>>()
    };
    let whole = losses(&[]);
    let head = losses(&["pipeline.head_parts=3"]);
    assert!((head[0] - whole[0]).abs() <= 1e-6 * whole[0], "{head:?} {whole:?}");
    let parts = "pipeline.embedding_parts=5";
    assert_eq!(losses(&[parts]), whole);
    // Adapters train on a frozen embedding in parts.
    let adapter =
        ["adapter.kind=lora", "adapter.rank=2", "adapter.targets=[\"q_proj\"]", "run.precision=bf16"];
    assert_eq!(losses(&[&adapter[..], &[parts]].concat()), losses(&adapter));
}

#[test]
fn parts_are_measured_as_kinds_of_their_own() {
    let run = Run::new();
    let check = |key: &str, expected: [(&str, i64); 5]| {
        let arguments = ["profile", "small.toml", "--time-limit", "1s", "-o", "p.toml"];
        run.succeed(&arguments, &[&in_parts(key, 5), "model.vocab_size=130"]);
        let profile = run.read_toml("p.toml");
        let layers = profile["layers"].as_array().expect("a list");
        let kind = |layer: &toml::Value| {
            assert!(layer["forward_s"].as_float().is_some_and(|time| time > 0.0), "{layer}");
            let count = layer["count"].as_integer().expect("a number");
            (layer["kind"].as_str().expect("a word").to_owned(), count)
        };
        let expected = expected.map(|(kind, count)| (kind.to_owned(), count));
        assert_eq!(layers.iter().map(kind).collect::<Vec<_>>(), expected);
    };
    let (head, embedding) = ("head part", "embedding part");
    check(HEAD, [("embedding", 1), ("decoder", 2), (head, 1), (head, 3), (head, 1)]);
    check(EMBEDDING, [(embedding, 1), (embedding, 3), (embedding, 1), ("decoder", 2), ("head", 1)]);
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
    let memory = limit.to_string();
    let plan = ["plan", "small.toml", "--data-parallel", "1", "--time-limit", "20s", "--memory", &memory];
    let plan = [&plan[..], &["-o", "planned.toml"]].concat();
    let note = "note: the embedding alone needs 39.1 MiB, and a rank has 28.6 MiB: cut it along the vocabulary (`pipeline.embedding_parts`;";
    let whole = [&LARGE[..], &["pipeline.embedding_parts=1"]].concat();
    run.fail(3, &plan, &whole, &["no plan fits", note]);
    run.succeed(&plan, &[&LARGE[..], &["pipeline.embedding_parts=4"]].concat());
    assert_eq!(run.read_toml("planned.toml")["pipeline"]["embedding_parts"].as_integer(), Some(4));
    run.succeed(&["train", "planned.toml"], &[]);
    let most = run.peaks().into_iter().fold(0.0, f64::max);
    assert!((20_000_000.0..f64::from(limit)).contains(&most), "{most}");
}

#[test]
fn layers_that_cannot_be_cut_are_refused() {
    let run = Run::new();
    let tied = "model.tie_word_embeddings=true";
    let hybrid: Vec<&str> = vec!["model.architecture=hybrid", "model.mtp_loss_weight=0.3"];
    for (key, short, left) in [
        (HEAD, "head_parts", "leave a part without a token"),
        (EMBEDDING, "embedding_parts", "leave a part of the embedding without a token"),
    ] {
        let refused = |number: &str, more: &[&str], expected: &str| {
            run.refuse_settings(&[&[&*format!("{key}={number}")], more].concat(), expected);
        };
        refused("0", &[], &format!("`{short}` is 0, where a whole number from 1"));
        refused("\"two\"", &[], &format!("`{short}` is a text, where a whole number"));
        for number in ["127", "129"] {
            let expected = format!("{number} parts of a vocabulary of 128 tokens {left}");
            refused(number, &[], &expected);
            if key == HEAD && number == "129" {
                refused(number, &hybrid, &expected);
            }
        }
        refused("2", &["mesh.tensor_parallel=2"], "2 tensor ranks split the vocabulary already");
        // A schedule with more stages than layers.
        refused("2", &["pipeline.ranks=6", "pipeline.microbatches=6"], "5 layers cannot fill 6 stages");
        let rows = short.trim_end_matches("_parts");
        let set = [&*in_parts(key, 2), "optimizer.name=adafactor"];
        run.refuse(&["check", "small.toml"], &set, &format!("each layer has only some rows of the {rows}"));
        // The parts of an embedding have whole rows, and the parts of a head do not.
        let set = [&*in_parts(key, 2), "optimizer.name=adamw_8bit"];
        if key == HEAD {
            run.refuse(&["check", "small.toml"], &set, "each layer has only a part of the rows of the head");
        } else {
            run.succeed(&["check", "small.toml"], &set);
        }
    }
    let parts = "pipeline.head_parts=2";
    let none = ["model.mtp_depth=0", parts];
    run.refuse_settings(&[&hybrid[..], &none].concat(), "`mtp_depth = 0` is out of range");
    let parts = "pipeline.embedding_parts=2";
    run.refuse_settings(&[parts, tied], "have one table, which cannot have 2 parts and 1");
    run.refuse_settings(
        &[parts, tied, "pipeline.head_parts=3"],
        "have one table, which cannot have 2 parts and 3",
    );
    run.refuse_settings(&[parts, "pipeline.layout=E | A*2 L"], "the embedding has 2 parts, and the layout 1");
    let emitted = ["plan", "small.toml", "--emit", "torchtitan", "-o", "plan"];
    run.refuse(&emitted, &[parts], "--emit: the embedding is in parts");
}
