//! Tests of groups of parameters without weight decay, and of accumulated gradients.

use std::collections::BTreeMap;

use crate::run::{Run, tensors};

/// Takes one step in a folder of its own, and returns the tensors after it.
fn after_a_step(set: &[&str]) -> BTreeMap<String, Vec<u8>> {
    let run = Run::new();
    run.train(&[&["run.steps=1", "optimizer.warmup_steps=0"], set].concat());
    let all = tensors(&run.path("out/checkpoints/step-00000001")).into_iter();
    all.filter(|(name, _)| !name.contains('@')).collect()
}

/// Checks which parameters have no decay. The gradients of the first step do not depend on the decay, so each
/// parameter must have the value of a step with decay or of one without.
fn check(model: &[&str], groups: &str, has_no_decay: impl Fn(&str) -> bool) {
    let with = after_a_step(&[model, &["optimizer.weight_decay=50"]].concat());
    let without = after_a_step(&[model, &["optimizer.weight_decay=0"]].concat());
    let no_decay = format!("optimizer.no_decay={groups}");
    let found = after_a_step(&[model, &["optimizer.weight_decay=50", &no_decay]].concat());
    let mut counts = [0, 0];
    for (name, values) in &found {
        let (expected, other) =
            if has_no_decay(name) { (&without[name], &with[name]) } else { (&with[name], &without[name]) };
        assert_eq!(values, expected, "{name}");
        // A parameter of zeros, such as a fresh bias, does not decay.
        counts[usize::from(has_no_decay(name))] += usize::from(expected != other);
    }
    assert_eq!(found.len(), with.len());
    assert!(counts.iter().all(|count| *count > 0), "{groups}: {counts:?}");
}

#[test]
fn groups_have_no_decay() {
    let is_norm = |name: &str| name.contains("norm");
    check(&[], "[\"norm\"]", is_norm);
    check(&["model.tie_word_embeddings=true"], "[\"embedding\"]", |name| name.contains("embed"));
    check(&["model.architecture=qwen3"], "[\"norm\", \"embedding\", \"bias\"]", |name| {
        is_norm(name) || name.contains("embed")
    });
    let pattern =
        ["model.architecture=nemotron_h", "model.hybrid_override_pattern=M-*-", "model.num_hidden_layers=4"];
    check(&pattern, "[\"bias\", \"norm\"]", |name| is_norm(name) || name.ends_with("bias"));
    let hybrid = [
        "model.architecture=hybrid",
        "model.pattern=AMED",
        "model.num_relations=2",
        "model.embed_norm=dyt",
        "model.mamba_num_heads=2",
        "model.mamba_head_dim=8",
        "model.ssm_state_size=8",
        "model.num_experts=4",
        "model.num_experts_per_tok=2",
        "model.moe_intermediate_size=8",
    ];
    check(&hybrid, "[\"norm\", \"bias\", \"embedding\"]", |name| {
        is_norm(name) || name.contains("bias") || name.contains("embed")
    });
}

#[test]
fn groups_do_not_depend_on_the_cut_and_survive_a_resume() {
    const SET: [&str; 3] = [
        "optimizer.no_decay=[\"norm\", \"embedding\"]",
        "optimizer.weight_decay=5",
        "model.tie_word_embeddings=true",
    ];
    let whole = Run::new();
    whole.train(&[&SET[..], &["run.steps=6", "pipeline.ranks=1"]].concat());
    let parts = Run::new();
    parts.train(&[&SET[..], &["run.steps=6", "run.checkpoint_every=3", "pipeline.ranks=2"]].concat());
    assert_eq!(parts.figures(), whole.figures());
    parts.print(&["resume", "out/checkpoints/step-00000003", "--set", "pipeline.ranks=4"]);
    assert_eq!(parts.figures(), whole.figures());
    let last = |run: &Run| tensors(&run.path("out/checkpoints/step-00000006"));
    assert_eq!(last(&parts), last(&whole));
}

#[test]
fn accumulated_batches_are_one_large_batch_to_the_bit() {
    let trained = |set: &[&str]| {
        let run = Run::new();
        run.train(&[&["run.steps=4"], set].concat());
        (run.figures(), tensors(&run.path("out/checkpoints/step-00000004")))
    };
    let expected = trained(&["pipeline.microbatches=12"]);
    for set in [
        &["run.accumulate=3"][..],
        &["run.accumulate=3", "pipeline.ranks=1"],
        &["run.accumulate=3", "pipeline.schedule=zbvzerobubble", "pipeline.stages_per_rank=2"],
        &["run.accumulate=3", "pipeline.schedule=gpipe", "pipeline.recompute=stage"],
        &["run.accumulate=2", "pipeline.microbatches=6"],
    ] {
        assert_eq!(trained(set), expected, "{set:?}");
    }
    let replicas = |mode: &str| {
        let mode = format!("mesh.data_parallel_mode={mode}");
        trained(&["run.accumulate=3", "mesh.data_parallel=2", &mode])
    };
    assert_eq!(replicas("sharded"), replicas("replicated"));
}

#[test]
fn an_accumulating_run_resumes_and_counts_its_tokens() {
    let whole = Run::new();
    whole.train(&["run.steps=6", "run.accumulate=2", "optimizer.schedule=constant"]);
    let parts = Run::new();
    parts.train(&["run.steps=3", "run.accumulate=2", "optimizer.schedule=constant"]);
    parts.resume(&["run.steps=6"]);
    assert_eq!(parts.figures(), whole.figures());
    assert_eq!(whole.steps()[5]["tokens"], 6 * 2 * 4 * 8);
    let batches = "4 steps of 8 rows, in 2 batches an epoch";
    whole.prints(&["check", "small.toml"], &["run.accumulate=2"], batches);
}

#[test]
fn the_batches_of_a_step_rise_over_the_first_steps() {
    let constant = ["optimizer.schedule=constant", "run.accumulate=3", "run.rampup_steps=4"];
    let whole = Run::new();
    whole.train(&[&["run.steps=12"], &constant[..]].concat());
    let steps = whole.steps();
    let batches: Vec<_> =
        steps.iter().map(|step| step["tokens"].as_u64().expect("a number") / (4 * 8)).collect();
    // 1, 1, 2, 2 batches, and 3 from then on.
    assert_eq!(batches, [1, 2, 4, 6, 9, 12, 15, 18, 21, 24, 27, 30]);
    // The first step with all batches warms up, and the five steps after it are measured.
    let predicted: Vec<_> = steps.iter().map(|step| step["predicted_step_ms"].is_f64()).collect();
    assert_eq!(predicted.iter().position(|is_predicted| *is_predicted), Some(10), "{predicted:?}");
    let parts = Run::new();
    parts.train(&[&["run.steps=3"], &constant[..]].concat());
    parts.resume(&["run.steps=12"]);
    assert_eq!(parts.figures(), whole.figures());
    let batches = "of 12 rows, in 3 batches after the first 4 steps";
    whole.prints(&["check", "small.toml"], &["run.rampup_steps=4", "run.accumulate=3"], batches);
    let none = "`rampup_steps` has no effect without accumulated batches";
    whole.refuse(&["check", "small.toml"], &["run.rampup_steps=4", "run.accumulate=1"], none);
}
