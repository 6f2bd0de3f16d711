//! A rank with the embedding and a tied head holds one table, in a run and in what `check` says about it.

use serde_json::Value;

use crate::run::Run;
use crate::scratch;

/// The table is much larger than the tensors of a step.
const SIZES: [&str; 4] = [
    "model.vocab_size=8192",
    "model.hidden_size=32",
    "model.intermediate_size=48",
    "pipeline.microbatches=2",
];

/// Returns the most bytes that a rank needs as `check` says, and that it held in the last step of a run.
fn bytes(folder: &Run, config: &str, set: &[&str]) -> [f64; 2] {
    let estimates = folder.estimates(config, set);
    let estimate = estimates.iter().map(|rank| rank["total"].as_f64().expect("bytes")).fold(0.0, f64::max);
    folder.succeed(&["train", config], set);
    [estimate, folder.peaks().into_iter().fold(0.0, f64::max)]
}

/// Checks that a tied model needs less memory than one with a head of its own, and that `check` says how much less.
/// The buffers of products, which `check` does not count, are the same in both.
fn check(folder: &Run, [tied, untied]: [&str; 2], set: &[&str]) {
    let [tied, untied] = [tied, untied].map(|config| bytes(folder, config, set));
    let [estimated, held] = [0, 1].map(|index| untied[index] - tied[index]);
    assert!(tied[1] < untied[1], "{set:?}: {tied:?} {untied:?}");
    assert!((0.9..1.1).contains(&(held / estimated)), "{set:?}: {tied:?} {untied:?}");
}

#[test]
fn a_tied_model_needs_less_memory_than_one_with_a_head_of_its_own() {
    let folder = Run::of(&scratch::small(2, 2, 2));
    let small = folder.read("small.toml");
    folder.write("tied.toml", small.replace("[data]", "tie_word_embeddings = true\n[data]"));
    for pipeline in [&["pipeline.ranks=1"][..], &["pipeline.ranks=2", "pipeline.schedule=zbvzerobubble"]] {
        for precision in ["run.precision=f32", "run.precision=bf16"] {
            check(&folder, ["tied.toml", "small.toml"], &[&SIZES, pipeline, &[precision]].concat());
        }
    }
    for config in ["tied", "small"] {
        folder.succeed(&["train", &format!("{config}.toml")], &[&SIZES[..], &["run.steps=1"]].concat());
        folder.succeed(&["export", "out", config], &[]);
        let mut adapted: toml::Table = small.parse().expect("TOML");
        adapted.insert("model".to_owned(), toml::toml! { from = "base" }.into());
        adapted["model"]["from"] = config.into();
        adapted.insert("adapter".to_owned(), toml::toml! { kind = "lora" }.into());
        folder.write(&format!("{config}-lora.toml"), adapted.to_string());
    }
    check(&folder, ["tied-lora.toml", "small-lora.toml"], &["pipeline.ranks=1", "pipeline.microbatches=2"]);
    // The ranks of a process hold the frozen table once, but each of them counts it.
    let set = ["pipeline.ranks=2", "pipeline.microbatches=2"];
    let (out, _) = folder.succeed(&["check", "tied-lora.toml", "--format", "json"], &set);
    let memory = serde_json::from_str::<Value>(&out).expect("JSON")["memory"].take();
    let ranks = memory["ranks"].as_array().expect("a list").iter();
    let total: u64 = ranks.map(|rank| rank["total"].as_u64().expect("bytes")).sum();
    assert_eq!(memory["needed"].as_u64(), Some(total - 4 * 8192 * 32), "{memory}");
}
