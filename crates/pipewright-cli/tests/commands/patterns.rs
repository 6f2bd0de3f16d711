//! Models whose blocks follow a pattern: bars that cut the stages, side inputs of the rows, and what is
//! refused.

use std::fs;

use serde_json::Value;

use crate::run::Run;

/// The reference with every part of the hybrid family.
const HYBRID: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../pipewright-models/tests/data/hybrid-full");

/// Runs a command on `small.toml` with overrides. Returns the exit code and everything that was printed.
fn command(run: &Run, name: &str, set: &[String]) -> (Option<i32>, String) {
    let set = set.iter().flat_map(|set| ["--set", set]);
    let output = run.command(&[name, "small.toml"].into_iter().chain(set).collect::<Vec<_>>());
    let printed = [output.stdout, output.stderr].concat();
    (output.status.code(), String::from_utf8_lossy(&printed).into_owned())
}

/// The settings of the reference's runs with 4 microbatches.
fn reference() -> Vec<String> {
    let mut set: Vec<String> = [
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
    ]
    .map(str::to_owned)
    .into();
    set.push(format!("model.from={HYBRID}"));
    set.push(format!("data.path={HYBRID}/tokens.jsonl"));
    set.push(format!("data.side={HYBRID}/side.safetensors"));
    set
}

fn json(path: impl AsRef<std::path::Path>) -> Vec<Value> {
    let text = fs::read_to_string(path).expect("the file exists");
    serde_json::Deserializer::from_str(&text).into_iter().map(|value| value.expect("it is JSON")).collect()
}

#[test]
fn side_inputs_reach_evaluations() {
    // With these settings a step changes no parameter, so the loss of an evaluation equals the loss of the
    // steps on its rows.
    let frozen = ["optimizer.learning_rate=1e-30", "optimizer.weight_decay=0"].map(str::to_owned);
    let trained = |more: &[String]| {
        let run = Run::new();
        let (code, said) = command(&run, "train", &[&reference(), &frozen[..], more].concat());
        assert_eq!(code, Some(0), "{said}");
        json(run.path("hybrid/metrics.jsonl"))
    };
    let files = trained(&[
        format!("data.validation={HYBRID}/tokens.jsonl"),
        format!("data.validation_side={HYBRID}/side.safetensors"),
        "run.eval_every=3".to_owned(),
        "run.eval_batches=3".to_owned(),
    ]);
    let mean = files.iter().map(|step| step["loss"].as_f64().expect("a loss")).sum::<f64>() / 3.0;
    assert_eq!(files[2]["validation_loss"].as_f64(), Some(mean));

    // The reference has 80 rows, 8 in each batch; the last two batches are held out.
    let all = trained(&["run.steps=10".to_owned()]);
    let share = ["data.validation_share=0.2", "run.eval_every=1", "run.steps=1"].map(str::to_owned);
    let held = trained(&share);
    let mean = all[8..].iter().map(|step| step["loss"].as_f64().expect("a loss")).sum::<f64>() / 2.0;
    assert_eq!(held[0]["validation_loss"].as_f64(), Some(mean));
}

#[test]
fn a_run_with_side_inputs_and_bars_retraces_the_reference() {
    let run = Run::new();
    let (code, said) = command(&run, "train", &reference());
    assert_eq!(code, Some(0), "{said}");
    let expected = json(format!("{HYBRID}/expected.json"));
    let metrics = json(run.path("hybrid/metrics.jsonl"));
    assert_eq!(metrics.len(), 3);
    for (step, found) in metrics.iter().enumerate() {
        let expected = &expected[0]["expected"]["4"][step];
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
    let (code, said) = command(&run, "check", &reference());
    assert_eq!(code, Some(0), "{said}");
    // The further prediction has a copy of the embedding's table, and the attentions of each stage one of the
    // relations' table.
    for table in ["embed_tokens", "relation_bias"] {
        let line =
            format!("shared    model.{table}.weight: one parameter, with a copy in each of stages 0 and 1\n");
        assert!(said.contains(&line), "{said}");
    }
    let mut four = reference();
    four.extend(
        ["pipeline.partition=optimal", "pipeline.stages_per_rank=2", "pipeline.schedule=interleaved1f1b"]
            .map(str::to_owned),
    );
    let (code, said) = command(&run, "check", &four);
    assert_eq!(code, Some(0), "{said}");
    assert!(
        said.contains("model.embed_tokens.weight: one parameter, with a copy in each of stages 0 and 3\n"),
        "{said}"
    );
}

#[test]
fn bars_that_do_not_fit_the_stages_are_refused() {
    let run = Run::new();
    let with = |further: &str| {
        let mut set = reference();
        set.push(further.to_owned());
        command(&run, "check", &set)
    };
    let (code, said) = with("pipeline.ranks=3");
    assert_eq!(code, Some(2), "{said}");
    assert!(said.contains("pattern has 1 bar, for 2 stages, and the schedule has 3 stages"), "{said}");
    let (code, said) = command(&run, "check", &["pipeline.partition=pattern".to_owned()]);
    assert_eq!(code, Some(2), "{said}");
    assert!(said.contains("the model has no pattern with bars"), "{said}");
}

#[test]
fn a_companion_that_does_not_fit_is_refused() {
    let run = Run::new();
    let set = vec![format!("data.side={HYBRID}/side.safetensors")];
    let (code, said) = command(&run, "check", &set);
    assert_eq!(code, Some(2), "{said}");
    assert!(
        said.contains("side.safetensors: tensor `") && said.contains("`llama` has no side inputs"),
        "{said}"
    );
    let mut set = reference();
    set.push("data.side=nowhere.safetensors".to_owned());
    let (code, said) = command(&run, "check", &set);
    assert_eq!(code, Some(2), "{said}");
    assert!(said.contains("nowhere.safetensors: cannot be read"), "{said}");
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
    let set: Vec<String> = set.map(str::to_owned).into();
    let (code, said) = command(&run, "train", &set);
    assert_eq!(code, Some(0), "{said}");
    let mut wrong = set.clone();
    wrong.push("model.pattern=AM|EX".to_owned());
    let (code, said) = command(&run, "train", &wrong);
    assert_eq!(code, Some(2), "{said}");
    assert!(said.contains("`pattern`: block 3 is `X`"), "{said}");
}
