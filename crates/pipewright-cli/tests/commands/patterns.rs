//! Models whose blocks follow a pattern: bars that cut the stages, side inputs of the rows, and what is
//! refused.

use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::run::Run;

/// The reference with every part of the hybrid family.
const HYBRID: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../pipewright-models/tests/data/hybrid-full");

const SIDE: &str = concat!(
    "data.side=",
    env!("CARGO_MANIFEST_DIR"),
    "/../pipewright-models/tests/data/hybrid-full/side.safetensors"
);

/// The settings of the reference's runs with 4 microbatches.
fn reference() -> Vec<&'static str> {
    vec![
        "data.seq_len=32",
        "data.shuffle=false",
        "pipeline.microbatches=4",
        "pipeline.microbatch_size=2",
        "pipeline.partition=pattern",
        "optimizer.learning_rate=2e-3",
        "optimizer.schedule=constant",
        "optimizer.warmup_steps=0",
        "optimizer.betas=[0.9, 0.95]",
        "optimizer.eps=1e-8",
        "optimizer.weight_decay=0.1",
        "optimizer.clip_norm=1.0",
        "run.steps=3",
        "run.out=hybrid",
        concat!("model.from=", env!("CARGO_MANIFEST_DIR"), "/../pipewright-models/tests/data/hybrid-full"),
        concat!(
            "data.path=",
            env!("CARGO_MANIFEST_DIR"),
            "/../pipewright-models/tests/data/hybrid-full/tokens.jsonl"
        ),
        SIDE,
    ]
}

#[test]
fn side_inputs_reach_evaluations() {
    // With these settings a step changes no parameter, so the loss of an evaluation equals the loss of the
    // steps on its rows.
    let frozen = ["optimizer.learning_rate=1e-30", "optimizer.weight_decay=0"];
    let trained = |more: &[&str]| {
        let run = Run::new();
        run.train(&[&reference(), &frozen[..], more].concat());
        run.metrics_in("hybrid")
    };
    let files = trained(&[
        &*format!("data.validation={HYBRID}/tokens.jsonl"),
        &format!("data.validation_side={HYBRID}/side.safetensors"),
        "run.eval_every=3",
        "run.eval_batches=3",
    ]);
    let mean = files.iter().map(|step| step["loss"].as_f64().expect("a loss")).sum::<f64>() / 3.0;
    assert_eq!(files[2]["validation_loss"].as_f64(), Some(mean));

    // The reference has 80 rows, 8 in each batch; the last two batches are held out.
    let all = trained(&["run.steps=10"]);
    let share = ["data.validation_share=0.2", "run.eval_every=1", "run.steps=1"];
    let held = trained(&share);
    let mean = all[8..].iter().map(|step| step["loss"].as_f64().expect("a loss")).sum::<f64>() / 2.0;
    assert_eq!(held[0]["validation_loss"].as_f64(), Some(mean));
}

#[test]
fn a_run_with_side_inputs_and_bars_retraces_the_reference() {
    let run = Run::new();
    run.train(&reference());
    let expected = fs::read(Path::new(HYBRID).join("expected.json")).expect("the reference");
    let expected: Value = serde_json::from_slice(&expected).expect("JSON");
    let metrics = run.metrics_in("hybrid");
    assert_eq!(metrics.len(), 3);
    for (step, found) in metrics.iter().enumerate() {
        let expected = &expected["expected"]["4"][step];
        let close = |found: &Value, name: &str| {
            let (found, expected) = (found.as_f64().expect(name), expected[name].as_f64().expect(name));
            assert!(
                (found - expected).abs() <= 5e-6 * expected,
                "step {step}: {name} {found} for {expected}"
            );
        };
        close(&found["loss"], "ce");
        close(&found["total"], "total");
        for name in ["moe_aux", "moe_z", "mod_aux", "mtp"] {
            close(&found["auxiliary"][name], name);
        }
        for name in ["moe_aux", "moe_z", "mod_aux"] {
            let parts = found["auxiliary_by_layer"][name].as_object().expect(name).values();
            let sum: f64 = parts.filter_map(Value::as_f64).sum();
            close(&sum.into(), name);
        }
        assert!(found["expert_load"].as_object().is_some_and(|layers| !layers.is_empty()), "{found}");
    }
}

#[test]
fn what_the_stages_share_is_listed() {
    let run = Run::new();
    let (said, _) = run.succeed(&["check", "small.toml"], &reference());
    // The further prediction has a copy of the embedding's table, and the attentions of each stage one of the
    // relations' table.
    for table in ["embed_tokens", "relation_bias"] {
        let line =
            format!("shared    model.{table}.weight: one parameter, with a copy in each of stages 0 and 1\n");
        assert!(said.contains(&line), "{said}");
    }
    let four =
        ["pipeline.partition=optimal", "pipeline.stages_per_rank=2", "pipeline.schedule=interleaved1f1b"];
    let (said, _) = run.succeed(&["check", "small.toml"], &[&reference(), &four[..]].concat());
    let line = "model.embed_tokens.weight: one parameter, with a copy in each of stages 0 and 3\n";
    assert!(said.contains(line), "{said}");
}

#[test]
fn bars_and_companions_that_do_not_fit_are_refused() {
    let run = Run::new();
    let refused = |set: &[&str], expected: &str| run.refuse(&["check", "small.toml"], set, expected);
    let with = |further| [&reference()[..], &[further]].concat();
    refused(&with("pipeline.ranks=3"), "pattern has 1 bar, for 2 stages, and the schedule has 3 stages");
    refused(&["pipeline.partition=pattern"], "the model has no pattern with bars");
    for expected in ["side.safetensors: tensor `", "`llama` has no side inputs"] {
        refused(&[SIDE], expected);
    }
    refused(&with("data.side=nowhere.safetensors"), "nowhere.safetensors: cannot be read");
}

#[test]
fn a_fresh_model_of_a_pattern_is_trained() {
    let run = Run::new();
    let set = [
        "model.architecture=hybrid",
        "model.pattern=AM|E-",
        "model.mamba_num_heads=4",
        "model.mamba_head_dim=8",
        "model.ssm_state_size=8",
        "model.num_experts=4",
        "model.num_experts_per_tok=2",
        "model.moe_intermediate_size=16",
        "model.bos_token_id=10",
        "pipeline.partition=pattern",
        "run.steps=2",
    ];
    run.train(&set);
    let wrong = [&set[..], &["model.pattern=AM|EX"]].concat();
    run.refuse(&["train", "small.toml"], &wrong, "`pattern`: block 3 is `X`");
}
