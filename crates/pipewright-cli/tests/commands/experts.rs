//! A family with experts through the command line: its keys, the parts of its loss, its export, a router that
//! overflows, and tensor ranks with whole experts.

use std::collections::BTreeSet;
use std::fs;

use safetensors::SafeTensors;
use serde_json::Value;

use crate::run::Run;
use crate::scratch;

const MODEL: &str = "\
architecture = \"qwen3_moe\"
head_dim = 6
num_experts = 4
num_experts_per_tok = 2
decoder_sparse_step = 2
router_aux_loss_coef = 0.5
output_router_logits = true
[data]
";

/// Four blocks. The second and the fourth have experts.
pub(super) fn folder() -> Run {
    Run::of(&scratch::small(4, 4, 3).replace("[data]\n", MODEL))
}

/// Returns the parts of each step's loss, and its gradient norm.
pub(super) fn parts(folder: &Run) -> Vec<[f64; 4]> {
    let parts = |step: &Value| {
        let numbers = [&step["loss"], &step["auxiliary"]["moe_aux"], &step["total"], &step["grad_norm"]];
        numbers.map(|number| number.as_f64().expect("a number"))
    };
    folder.steps().iter().map(parts).collect()
}

#[test]
fn every_part_of_the_loss_is_reported_and_is_the_same_for_every_cut() {
    let folder = folder();
    let train = |set: &[&str]| {
        let (_, said) = folder.succeed(&["train", "small.toml"], set);
        assert!(said.contains("  moe_aux ") && said.contains("  total "), "{said}");
        parts(&folder)
    };
    let one = train(&["pipeline.ranks=1"]);
    assert_eq!(one.len(), 3);
    for [loss, balance, total, _] in &one {
        assert!((1.9..4.0).contains(balance), "two of four experts are chosen: {balance}");
        assert!((loss + 0.5 * balance - total).abs() < 1e-12, "{loss} {balance} {total}");
    }
    assert_eq!(train(&["pipeline.ranks=2"]), one);
    assert_eq!(train(&["pipeline.ranks=3", "pipeline.schedule=zb-h1"]), one);
    assert_eq!(train(&["pipeline.ranks=2", "pipeline.schedule=dualpipev"]), one);
}

/// Returns the parts of the balance loss by layer, and the load of each expert, of each step. Checks that
/// they add up.
fn by_layer(folder: &Run) -> Vec<(Value, Value)> {
    let sum = |values: &mut dyn Iterator<Item = &Value>| values.filter_map(Value::as_f64).sum::<f64>();
    let numbers_of = |step: &Value| {
        let layers = step["auxiliary_by_layer"]["moe_aux"].as_object().expect("layers");
        let whole = step["auxiliary"]["moe_aux"].as_f64().expect("a number");
        assert!((sum(&mut layers.values()) - whole).abs() < 1e-12, "{step}");
        for shares in step["expert_load"].as_object().expect("layers").values() {
            let shares = shares.as_array().expect("a list");
            assert_eq!(shares.len(), 4);
            assert!((sum(&mut shares.iter()) - 1.0).abs() < 1e-12, "{step}");
        }
        (step["auxiliary_by_layer"].clone(), step["expert_load"].clone())
    };
    folder.steps().iter().map(numbers_of).collect()
}

#[test]
fn each_layer_has_its_part_of_the_balance_loss_and_the_load_of_its_experts() {
    let folder = folder();
    let train = |set: &[&str]| {
        folder.train(set);
        by_layer(&folder)
    };
    let one = train(&["pipeline.ranks=1"]);
    for (losses, loads) in &one {
        let names = |layers: &Value| layers.as_object().expect("layers").keys().cloned().collect::<Vec<_>>();
        assert_eq!(names(&losses["moe_aux"]), ["model.layers.1.mlp", "model.layers.3.mlp"]);
        assert_eq!(names(loads), ["model.layers.1.mlp", "model.layers.3.mlp"]);
    }
    assert_eq!(train(&["pipeline.ranks=3", "pipeline.schedule=zb-h1"]), one);
    assert_eq!(train(&["pipeline.ranks=2", "pipeline.recompute=block"]), one);
    assert_eq!(train(&["pipeline.ranks=1", "mesh.data_parallel=2"])[0].1, one[0].1);
    let experts = ["mesh.tensor_parallel=2", "mesh.whole_experts=true", "model.num_attention_heads=2"];
    assert_eq!(train(&[&["pipeline.ranks=1"], &experts[..]].concat())[0].1, one[0].1);
    // Two batches of a step have the load of both.
    assert_ne!(train(&["run.accumulate=2"])[0].1, one[0].1);
}

#[test]
fn check_counts_the_kinds_of_layers() {
    let folder = folder();
    let set = ["pipeline.partition=explicit", "pipeline.boundaries=[3]"];
    let (printed, _) = folder.succeed(&["check", "small.toml"], &set);
    assert!(printed.contains("layers 0 to 2 (1 embedding, 1 decoder, 1 mixture), "), "{printed}");
    assert!(printed.contains("layers 3 to 5 (1 decoder, 1 mixture, 1 head), "), "{printed}");
}

#[test]
fn a_router_that_overflows_is_named() {
    let folder = folder();
    folder.train(&[]);
    folder.succeed(&["export", "out", "model"], &[]);
    let from = ["model.from=model", "run.out=again"];
    folder.train(&from);

    let path = folder.path("model/model.safetensors");
    let mut bytes = fs::read(&path).expect("weights");
    let router = SafeTensors::deserialize(&bytes).expect("a sound file");
    let router = router.tensor("model.layers.3.mlp.gate.weight").expect("a router").data();
    let start = router.as_ptr().addr() - bytes.as_ptr().addr();
    let largest = f32::MAX.to_le_bytes();
    let length = router.len();
    bytes[start..start + length].chunks_exact_mut(4).for_each(|number| number.copy_from_slice(&largest));
    fs::write(&path, bytes).expect("a file");
    let (code, _, said) = folder.call(&["train", "small.toml"], &["model.from=model", "run.out=third"]);
    assert_eq!(code, Some(4), "{said}");
    let words =
        "a probability of the router `model.layers.3.mlp.gate` is not finite; the parameters are still those";
    assert!(said.contains(words) && said.contains("stage 1") && said.contains("step 1"), "{said}");
    let first = "the first value that is not finite is a probability of the router `model.layers.3.mlp.gate`, in microbatch";
    assert!(said.contains(first), "{said}");
    let mark = said.split_whitespace().find(|word| word.ends_with('!')).unwrap_or_default();
    assert!(mark.starts_with("1F"), "the failing action is marked: {said}");
    assert!(said.contains("\n  rank 0: ") && said.contains("\n  rank 1: "), "last actions: {said}");
    let page = folder.read("third/failed-step-1.html");
    assert!(page.contains("failed: step 1: rank 1, stage 1"), "the title says what failed");
    assert!(said.contains("third/failed-step-1.html"), "{said}");
    assert!(
        said.lines().last().is_some_and(|line| line.starts_with("error: ")),
        "the error comes last: {said}"
    );
}

/// Returns the experts of the second block that the file of each rank has after so many steps.
pub(super) fn stored_experts<const N: usize>(folder: &Run, step: u64, ranks: [u32; N]) -> [String; N] {
    ranks.map(|rank| {
        let file = format!("out/checkpoints/step-{step:08}/rank-{rank:04}.safetensors");
        let bytes = fs::read(folder.path(&file)).expect("a file of the checkpoint");
        let stored = SafeTensors::deserialize(&bytes).expect("a sound file");
        let expert = |name: &str| {
            let rest = name.strip_prefix("model.layers.1.mlp.experts.")?;
            rest.split_once('.').map(|(expert, _)| expert.to_owned())
        };
        let experts: BTreeSet<String> = stored.names().into_iter().filter_map(expert).collect();
        experts.into_iter().collect::<Vec<_>>().join(" ")
    })
}

#[test]
fn tensor_ranks_with_whole_experts_train_as_one_and_resume_with_slices() {
    const SETTINGS: [&str; 2] = ["model.num_attention_heads=4", "model.num_experts=6"];
    const WHOLE: &str = "mesh.whole_experts=true";
    const SLICES: &str = "mesh.whole_experts=false";
    let folder = folder();
    folder.train(&[&SETTINGS[..], &["pipeline.ranks=1", "run.steps=6"]].concat());
    let expected = parts(&folder);
    let four = ["pipeline.ranks=1", "mesh.tensor_parallel=4"];
    let two = ["pipeline.ranks=2", "mesh.tensor_parallel=2"];
    for (before, held, after, held_after) in
        [(four, WHOLE, two, WHOLE), (four, WHOLE, two, SLICES), (two, SLICES, four, WHOLE)]
    {
        let set = [&SETTINGS[..], &before, &[held, "run.steps=3"]].concat();
        folder.train(&set);
        if held == WHOLE {
            assert_eq!(stored_experts(&folder, 3, [0, 1, 2, 3]), ["0 1", "2 3", "4", "5"]);
        }
        folder.resume(&[&after[..], &[held_after, "run.steps=6"]].concat());
        let found = parts(&folder);
        assert_eq!(found.len(), expected.len());
        let are_close =
            found.iter().flatten().zip(expected.iter().flatten()).all(|(a, b)| (a - b).abs() <= 2e-5 * b);
        assert!(are_close, "{before:?} {held} to {after:?} {held_after}: {found:?} {expected:?}");
    }
}

#[test]
fn more_tensor_ranks_than_whole_experts_are_refused() {
    let folder = folder();
    let set = ["model.num_attention_heads=8", "mesh.tensor_parallel=8", "mesh.whole_experts=true"];
    let expected = "stage 0: `model.layers.1.mlp` cannot be divided among 8 tensor ranks that hold whole experts \
                    (`mesh.whole_experts`): `model.layers.1.mlp.experts.0.gate_proj.weight` belongs to one of \
                    `num_experts = 4`, so some rank would get nothing";
    folder.refuse_settings(&set, expected);
    assert!(!folder.out().exists());
}

/// Trains a small DeepSeek V3, and returns the corrections of its router in the export.
fn corrections(folder: &Run, set: &[&str]) -> Vec<f32> {
    folder.train(set);
    // The export of an earlier call.
    let _ = fs::remove_dir_all(folder.path("m"));
    folder.succeed(&["export", "out", "m"], &[]);
    let file = fs::read(folder.path("m/model.safetensors")).expect("the weights");
    let file = SafeTensors::deserialize(&file).expect("it is sound");
    let tensor = file.tensor("model.layers.1.mlp.gate.e_score_correction_bias").expect("it has corrections");
    let number = |bytes: &[u8]| f32::from_le_bytes(bytes.try_into().expect("four bytes"));
    tensor.data().chunks_exact(4).map(number).collect()
}

#[test]
fn the_corrections_of_scores_follow_the_loads() {
    let config = scratch::small(2, 4, 3).replace("[data]\n", "architecture = \"deepseek_v3\"\n[data]\n");
    let folder = Run::of(&config);
    let speed = "optimizer.expert_balance_speed=0.25";
    let one = corrections(&folder, &["pipeline.ranks=1", speed]);
    assert!(one.iter().all(|number| (number * 4.0).fract() == 0.0 && number.abs() <= 0.75), "{one:?}");
    assert!(one.iter().any(|number| *number > 0.0) && one.iter().any(|number| *number < 0.0), "{one:?}");
    assert_eq!(corrections(&folder, &["pipeline.ranks=2", speed]), one);
    assert_eq!(corrections(&folder, &[]), [0.0; 8]);
    let [sharded, whole] = ["sharded", "replicated"].map(|mode| {
        let mode = format!("mesh.data_parallel_mode={mode}");
        corrections(&folder, &["pipeline.ranks=1", "mesh.data_parallel=2", &mode, speed])
    });
    assert_eq!(sharded, whole);
    let refused = |set: &[&str], expected: &str| {
        folder.refuse(&["check", "small.toml"], &[&[speed], set].concat(), expected);
    };
    let other = ["model.architecture=llama"];
    refused(&other, "this model has no `gate.e_score_correction_bias`; remove the key");
    let adapted = ["model.from=m", "adapter.kind=lora"];
    refused(&adapted, "changes the model, which adapters keep as it is: remove the key");
}
