//! Weights that are delayed by one update, through the command line.

use serde_json::Value;

use super::adapters::folder_without_path;
use crate::run::{Figures, Run, tensors};

const SIZE: [&str; 4] =
    ["run.steps=6", "pipeline.ranks=2", "optimizer.schedule=constant", "run.deadline_seconds=20"];
const DELAY: &str = "optimizer.delay=1";
const CORRECTION: &str = "optimizer.delay_correction=error-feedback";

const SHARDED: [&str; 2] = ["mesh.data_parallel=2", "mesh.data_parallel_mode=sharded"];

type Outcome = (Vec<Figures>, Vec<(String, Vec<u8>)>);

/// Returns the figures of a run, and the tensors of its last checkpoint.
fn outcome(run: &Run) -> Outcome {
    (run.figures(), tensors(&run.path("out/checkpoints/step-00000006")))
}

fn train(set: &[&str]) -> Outcome {
    let run = Run::new();
    run.train(&[&SIZE[..], &[DELAY], set].concat());
    outcome(&run)
}

/// A checkpoint has both versions, evaluations and checkpoints drain the pipeline, and neither they nor the cut change a bit.
#[test]
fn runs_have_the_same_bits_under_every_cut_and_after_a_stop() {
    let expected = train(&[]);
    let older = expected.1.iter().filter(|(name, _)| name.ends_with("@older")).count();
    assert!(older > 0 && older * 2 < expected.1.len(), "one for each parameter, and the optimizer's state");
    for set in [
        &["pipeline.ranks=1", "pipeline.schedule=gpipe"][..],
        &["pipeline.ranks=4"],
        &["pipeline.schedule=zbvzerobubble"],
        &["run.eval_every=2", "data.validation=0.2", "run.checkpoint_every=3"],
    ] {
        // Another part of the data is left to train on.
        let is_split = set.iter().any(|key| key.starts_with("data."));
        let plain = ["data.validation=0.2", "run.eval_every=100"];
        let expected = if is_split { train(&plain) } else { expected.clone() };
        let found = train(set);
        assert!(found.0 == expected.0, "{set:?}: {:?} {:?}", found.0, expected.0);
        assert!(found.1 == expected.1, "{set:?}: the checkpoints differ");
    }
    // These runs have other bits, the same under every cut.
    let experts = ["model.architecture=qwen3_moe", "model.num_experts=4", "mesh.data_parallel=2"];
    for set in [
        &["mesh.data_parallel=2"][..],
        &["mesh.tensor_parallel=2"],
        &SHARDED,
        &["run.precision=f16"],
        &["run.precision=f16", "run.loss_scale=16777216"],
        &[CORRECTION],
        &[CORRECTION, "mesh.data_parallel=2", "mesh.data_parallel_mode=sharded"],
        &[CORRECTION, "optimizer.name=muon", "optimizer.post_validation=true"],
        &["model.tie_word_embeddings=true"],
        &experts,
        &[&experts[..], &["mesh.expert_parallel=2"]].concat(),
    ] {
        assert!(train(set).0 == train(&[set, &["pipeline.ranks=1"]].concat()).0, "{set:?}");
    }
    let run = Run::new();
    run.train(&[&SIZE[..], &[DELAY, "run.steps=3"]].concat());
    run.resume(&["run.steps=6", "pipeline.ranks=4"]);
    assert!(outcome(&run).0 == expected.0, "after a stop");
    assert!(outcome(&run).1 == expected.1, "the checkpoint after a stop");
}

/// Ranks that exchange tensors in the middle of their stages resume too, replicas that share parameters, and loss scales.
#[test]
fn runs_of_other_kinds_resume() {
    let experts = ["model.architecture=qwen3_moe", "model.num_experts=4", "mesh.data_parallel=2"];
    for set in [
        &["mesh.tensor_parallel=2"][..],
        &[&experts[..], &["mesh.expert_parallel=2"]].concat(),
        &SHARDED,
        &["run.precision=f16", "run.loss_scale=16777216"],
    ] {
        let run = Run::new();
        run.train(&[&SIZE[..], &[DELAY, "run.steps=3"], set].concat());
        run.resume(&["run.steps=6"]);
        assert!(outcome(&run) == train(set), "{set:?}");
    }
}

/// Adapters on the upper blocks leave the first stage without a backward. The base has one version.
#[test]
fn runs_with_frozen_stages_have_the_same_bits_and_resume() {
    let upper = [DELAY, "adapter.kind=lora", r#"adapter.targets=["*.layers.6.*", "*.layers.7.*"]"#];
    let train = |set: &[&str], steps: &[&str]| {
        let folder = folder_without_path();
        let set = [&upper[..], set].concat();
        folder.train(&[&set[..], &[steps[0]]].concat());
        steps[1..].iter().for_each(|more| folder.resume(&[more]));
        folder.figures()
    };
    let expected = train(&["pipeline.ranks=1"], &["run.steps=6"]);
    for set in [
        &["pipeline.ranks=2"][..],
        &["pipeline.ranks=4"],
        &["pipeline.ranks=2", "pipeline.schedule=zbvzerobubble"],
    ] {
        assert!(train(set, &["run.steps=6"]) == expected, "{set:?}");
    }
    assert!(train(&["pipeline.ranks=2"], &["run.steps=3", "run.steps=6"]) == expected, "after a stop");
}

/// The last update is state too.
#[test]
fn a_corrected_run_resumes() {
    let run = Run::new();
    run.train(&[&SIZE[..], &[DELAY, CORRECTION, "run.steps=3"]].concat());
    run.resume(&["run.steps=6", "pipeline.ranks=4"]);
    let expected = train(&[CORRECTION]);
    assert!(outcome(&run).0 == expected.0 && outcome(&run).1 == expected.1);
    let plain = train(&[]).0;
    assert!(expected.0[..3] == plain[..3], "two updates without an error before them");
    assert!(expected.0[3..] != plain[3..]);
}

/// A run may resume with and without the correction. The first corrected update has no error before it, so the losses of six
/// steps are those without: the losses of a step follow the update with the batch two before.
#[test]
fn a_run_resumes_with_and_without_the_correction() {
    let run = Run::new();
    run.train(&[&SIZE[..], &[DELAY, "run.steps=3"]].concat());
    let note = "updates are corrected for the delay from step 5 on, because the update of step 4 has no error before it";
    run.says(&["resume", "out"], &["run.steps=8", CORRECTION], note);
    let plain = Run::new();
    plain.train(&[&SIZE[..], &[DELAY, "run.steps=8"]].concat());
    assert!(run.figures()[..6] == plain.figures()[..6], "the update of step 4 is not corrected");
    assert!(run.figures()[6..] != plain.figures()[6..], "the update of step 5 is");
    let run = Run::new();
    run.train(&[&SIZE[..], &[DELAY, CORRECTION, "run.steps=3"]].concat());
    let note = "updates are not corrected for the delay from step 4 on";
    run.says(&["resume", "out"], &["run.steps=6", "optimizer.delay_correction=none"], note);
    assert!(outcome(&run).1.iter().all(|(name, _)| !name.ends_with("@update")), "no last updates");
}

/// A run may resume with another delay: it begins with the newer version.
#[test]
fn a_run_resumes_with_and_without_delay() {
    let run = Run::new();
    run.train(&[&SIZE[..], &[DELAY, "run.steps=3"]].concat());
    run.resume(&["run.steps=6", "optimizer.delay=0"]);
    assert!(outcome(&run).1.iter().all(|(name, _)| !name.ends_with("@older")), "one version");
    let figures = run.figures();
    assert!(figures[..3] == train(&[]).0[..3] && figures[3..] != train(&[]).0[3..]);
}

fn number(rank: &Value, key: &str) -> u64 {
    rank[key].as_u64().unwrap_or(0)
}

/// The second version costs as much as the parameters. While batches overlap, each has gradients.
#[test]
fn check_counts_both_versions() {
    let run = Run::new();
    let memory = |set: &[&str]| run.estimates("small.toml", &[&SIZE[..], set].concat());
    let cases: [(&[&str], u64); 3] = [
        (&["pipeline.ranks=2"], 2),
        (&["pipeline.ranks=1"], 1),
        // Both batches may have gathered a stage.
        (&["pipeline.ranks=2", SHARDED[0], SHARDED[1]], 2),
    ];
    for (ranks, batches) in cases {
        for (plain, delayed) in memory(ranks).iter().zip(memory(&[ranks, &[DELAY]].concat())) {
            assert_eq!(number(&delayed, "parameters"), 2 * number(plain, "parameters"), "{delayed}");
            assert_eq!(number(&delayed, "gradients"), batches * number(plain, "gradients"), "{delayed}");
            assert_eq!(number(&delayed, "optimizer"), number(plain, "optimizer"), "{delayed}");
            assert!(number(&delayed, "activations") >= number(plain, "activations"), "{delayed}");
            // An update holds all versions and gradients, and no activations.
            let state = ["parameters", "gradients", "optimizer"].map(|key| number(&delayed, key));
            assert!(number(&delayed, "total") >= state.iter().sum(), "{delayed}");
        }
        // AdamW has two moments, and the correction one tensor of the same size.
        let [delayed, corrected] =
            [&[DELAY][..], &[DELAY, CORRECTION]].map(|set| memory(&[ranks, set].concat()));
        for (delayed, corrected) in delayed.iter().zip(corrected) {
            assert_eq!(2 * number(&corrected, "optimizer"), 3 * number(delayed, "optimizer"), "{corrected}");
        }
    }
}

/// Steps that overlap are on one time axis in the page of their run. Whether steps of a short run overlap depends on their times,
/// so the test writes that they do.
#[test]
fn a_page_has_three_steps_that_overlap() {
    let run = Run::new();
    run.train(&[&SIZE[..], &["run.timelines=6"]].concat());
    let page = || {
        run.succeed(&["view", "out", "-o", "page.html"], &[]);
        run.read("page.html")
    };
    assert!(!page().contains("\"before\":2"));
    let metrics = run.read("out/metrics.jsonl").replace("{\"step\":", "{\"start_after_ms\":2.5,\"step\":");
    run.write("out/metrics.jsonl", metrics);
    assert!(page().contains("\"step\":6,\"before\":2"), "the last three steps");
}

#[test]
fn other_delays_are_refused() {
    let run = Run::new();
    run.fail(2, &["check", "small.toml"], &["optimizer.delay=2"], &["delay"]);
    run.fail(2, &["train", "small.toml"], &["optimizer.delay=true"], &["delay"]);
    run.fail(
        2,
        &["check", "small.toml"],
        &[CORRECTION],
        &["`delay_correction` has no effect without `delay = 1`"],
    );
}
