//! Adapters through the command line: what `check` and `train` say about them, the losses of PEFT, and
//! settings and files that are refused.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use super::command_line::reference;
use crate::run::{Run, assert_near, in_one_line, numbers};
use crate::scratch;

/// Writes a configuration that trains the adapter of the reference on a tiny Qwen3.
pub(super) fn folder() -> Run {
    let folder = Run::empty();
    let base = reference("qwen3-tiny");
    let config = format!(
        "[model]\nfrom = \"{base}\"\n[adapter]\nkind = \"lora\"\npath = \"{}\"\n[data]\npath = \"{base}/tokens.jsonl\"\nseq_len = 64\n\
         shuffle = false\n[pipeline]\nmicrobatches = 8\n[optimizer]\nlearning_rate = 5e-3\n[run]\nsteps = 4\nout = \"out\"\n",
        reference("lora/qwen3-tiny")
    );
    folder.write("small.toml", config);
    folder
}

/// The settings of new adapters on the queries, in place of the adapters of the reference.
const NEW: [&str; 2] = ["adapter.kind=lora", "adapter.targets=[\"q_proj\"]"];

/// Writes the configuration without its adapters, which arguments add.
pub(super) fn folder_without_path() -> Run {
    let folder = folder();
    folder.write("small.toml", without_adapter(&folder.read("small.toml")));
    folder
}

/// Returns a configuration without the keys of the adapters.
fn without_adapter(config: &str) -> String {
    let is_own = |line: &&str| !line.starts_with("kind = ") && !line.ends_with("lora/qwen3-tiny\"");
    config.lines().filter(is_own).collect::<Vec<_>>().join("\n")
}

#[test]
fn the_binary_trains_as_peft_does() {
    let expected = fs::read_to_string(reference("lora/qwen3-tiny/expected.json")).expect("the reference");
    let expected: Value = serde_json::from_str(&expected).expect("JSON");
    let found = folder().trained("small.toml", &["pipeline.schedule=zb-h1"]);
    let expected = numbers(expected["expected"].as_array().expect("the steps"));
    assert_eq!(found.len(), 4);
    for (found, expected) in found.iter().zip(&expected) {
        for (index, tolerance) in [(0, 5e-6), (1, 5e-5)] {
            assert!(
                (found[index] - expected[index]).abs() <= tolerance * expected[index],
                "{found:?} for {expected:?}"
            );
        }
    }
}

/// Slices, a head in parts and recomputation change the order of sums at most.
#[test]
fn other_ways_to_run_train_alike() {
    const SHARDED: [&str; 2] = ["mesh.data_parallel=2", "mesh.data_parallel_mode=sharded"];
    let folder = folder();
    folder.train(&["run.steps=2"]);
    let expected = folder.losses();
    for set in [
        &["pipeline.schedule=seq1f1b", "pipeline.slices=2"][..],
        &["pipeline.head_parts=2", "pipeline.schedule=zbvzerobubble"],
        &["pipeline.recompute=block", "run.accumulate=2", "pipeline.microbatches=4"],
        &SHARDED,
    ] {
        folder.train(&[set, &["run.steps=2"]].concat());
        assert_near(&folder.losses(), &expected, 5e-6, &format!("{set:?}"));
    }
    // The last run was sharded; one pipeline resumes it, in half precision too.
    folder.resume(&["run.steps=3", "mesh.data_parallel=1", "mesh.data_parallel_mode=replicated"]);
    folder.train(&[&SHARDED[..], &["run.steps=2", "run.precision=bf16"]].concat());
    folder.resume(&["run.steps=3"]);
    let (found, expected) = (folder.losses()[1][0], expected[1][0]);
    assert!(found != expected && (found - expected).abs() <= 4e-3 * expected, "{found} for {expected}");
}

#[test]
fn check_counts_what_is_trained() {
    let folder = folder_without_path();
    let bytes = |set: &[&str]| {
        let (out, said) = folder.succeed(&["check", "small.toml", "--format", "json"], set);
        let json: Value = serde_json::from_str(&out).expect("JSON");
        let ranks = json["memory"]["ranks"].as_array().expect("a list").clone();
        let sum = |key: &str| ranks.iter().map(|rank| rank[key].as_u64().expect("bytes")).sum::<u64>();
        ([sum("parameters"), sum("gradients"), sum("optimizer")], json["model"]["trained"].clone(), said)
    };
    let ([all, gradients, optimizer], trained, _) = bytes(&[]);
    assert_eq!((gradients, optimizer), (all, 2 * all));
    assert_eq!(trained, json!(all / 4));
    // 8 layers, each with matrices of 64 x 8 and 8 x 96.
    let own = 8 * 8 * (64 + 96);
    let ([with, gradients, optimizer], trained, said) = bytes(&NEW);
    assert_eq!([with, gradients, optimizer], [all + 4 * own, 4 * own, 8 * own]);
    assert_eq!(trained, json!(own));
    let said = in_one_line(&said);
    assert!(said.contains("adapter: lora of rank 8 on 8 layers: 10240 parameters trained, 2.8"), "{said}");
    let ([dora, ..], ..) = bytes(&[&NEW[..], &["adapter.dora=true"]].concat());
    assert_eq!(dora, all + 4 * (own + 8 * 96));
    let ([half, ..], ..) = bytes(&[&NEW[..], &["run.precision=bf16"]].concat());
    assert_eq!(half, all / 2 + 4 * own);
}

/// Sizes with which the tensors of a step are much larger than its lists.
const LARGER: [&str; 9] = [
    "model.vocab_size=256",
    "model.hidden_size=128",
    "model.intermediate_size=384",
    "model.num_hidden_layers=6",
    "data.seq_len=256",
    "pipeline.ranks=2",
    "pipeline.microbatches=4",
    "pipeline.microbatch_size=4",
    "run.steps=2",
];

/// A plan for a cluster predicts the state of parameters that `check` counts.
#[test]
fn a_plan_for_a_cluster_has_the_state_that_check_counts() {
    let folder = folder_without_path();
    for set in [&NEW[..], &["adapter.kind=lora", "adapter.dora=true", "adapter.targets=[\"*.layers.6.*\"]"]] {
        let set = [set, &["run.precision=bf16"]].concat();
        let ranks = folder.estimates("small.toml", &set);
        let planned = folder.json(&["plan", "small.toml", "--cluster", "h100", "--ranks", "1"], &set);
        for part in ["parameters", "gradients", "optimizer"] {
            let expected: u64 = ranks.iter().map(|rank| rank[part].as_u64().expect("bytes")).sum();
            let found = planned["plans"][0]["memory_parts"][0][part].as_u64().expect("bytes");
            // A plan does not count the norm before the head.
            let most = if part == "parameters" { 2 * 64 } else { 0 };
            assert!(expected.abs_diff(found) <= most, "{part}: {found} for {expected}");
        }
    }
    let plan = ["plan", "small.toml", "--cluster", "h100", "--ranks", "2", "--tensor-parallel", "2"];
    let dropout = [&NEW[..], &["adapter.dropout=0.1"]].concat();
    folder.refuse(&plan, &dropout, "--tensor-parallel 2: `adapter.dropout` needs");
}

/// The base is not updated, so only the adapters are kept until the gradient norm is known.
#[test]
fn adapters_with_early_updates_have_the_same_figures() {
    let folder = folder();
    let train = |early: &str, clip: &str| {
        folder.train(&["pipeline.ranks=2", clip, early]);
        folder.figures()
    };
    for clip in ["optimizer.clip_norm=0", "optimizer.clip_norm=0.01"] {
        let expected = train("optimizer.post_validation=false", clip);
        assert_eq!(train("optimizer.post_validation=true", clip), expected, "{clip}");
    }
}

/// Trains a model with these settings, and writes a configuration of adapters on it.
fn larger_base(settings: &[&str]) -> Run {
    let folder = Run::of(&scratch::small(2, 4, 2));
    folder.write("text.txt", "the quick brown fox jumps over the lazy dog ".repeat(1200));
    folder.train(&[&LARGER[..4], &["run.steps=1"], settings].concat());
    folder.print(&["export", "out", "base"]);
    let mut config = folder.read_toml("small.toml");
    config.insert("model".to_owned(), toml::toml! { from = "base" }.into());
    config.insert("adapter".to_owned(), toml::toml! { kind = "lora" }.into());
    folder.write("small.toml", config.to_string());
    folder
}

/// Without the gradients that a backward holds, or the copies in single precision, the estimate would be too small; with the
/// inputs of frozen products, a run would hold more.
#[test]
fn the_estimate_of_memory_is_the_peak_of_a_run_of_adapters() {
    let folder = larger_base(&[]);
    for set in [
        &["run.precision=f32"][..],
        &["pipeline.recompute=parts"],
        &["run.precision=bf16"],
        &["run.precision=bf16", "pipeline.recompute=parts"],
        &["run.precision=bf16", "pipeline.recompute=block"],
        &["run.precision=bf16", "adapter.dropout=0.1"],
        &["adapter.dropout=0.1", "pipeline.schedule=zb-h1"],
        &["adapter.dora=true"],
        &["adapter.dora=true", "run.precision=bf16"],
        &["adapter.dora=true", "run.precision=bf16", "pipeline.recompute=stage", "pipeline.head_parts=2"],
        &["adapter.targets=[\"q_proj\", \"v_proj\"]", "run.precision=bf16"],
    ] {
        folder.check_peaks("small.toml", &[&LARGER[4..], set].concat());
    }
}

#[test]
fn the_estimate_of_memory_is_the_peak_of_a_run_of_adapters_on_a_mixture() {
    let experts = ["model.num_experts=8", "model.num_experts_per_tok=2", "model.moe_intermediate_size=128"];
    let folder = larger_base(&[&["model.architecture=qwen3_moe"], &experts[..]].concat());
    let of_experts = r#"adapter.targets=["experts.gate_up_proj", "experts.down_proj"]"#;
    let of_entry = r#"adapter.targets=["experts.gate_up_proj"]"#;
    for set in [
        &["run.precision=bf16"][..],
        &["run.precision=bf16", "adapter.kind=none"],
        &["run.precision=f32", of_experts],
        &["run.precision=bf16", of_experts],
        &["run.precision=bf16", of_experts, "pipeline.recompute=block"],
        &["run.precision=bf16", of_entry, "pipeline.schedule=gpipe"],
    ] {
        folder.check_peaks("small.toml", &[&LARGER[4..], set].concat());
    }
}

/// Only the last two of eight blocks have adapters, so the first of two stages is frozen.
#[test]
fn frozen_stages_run_forward_only_and_change_no_figure() {
    let folder = folder_without_path();
    let upper = r#"adapter.targets=["*.layers.6.*", "*.layers.7.*"]"#;
    let set = |ranks| ["adapter.kind=lora", upper, ranks, "pipeline.partition=even", "run.steps=2"];
    let two_ranks = set("pipeline.ranks=2");
    let (out, _) = folder.succeed(&["check", "small.toml"], &two_ranks);
    let stage = |number: usize| {
        let is_stage = |line: &&str| line.starts_with(&format!("stage {number}"));
        let mut lines = out.lines().filter(is_stage);
        (lines.next().unwrap_or_default(), lines.next().unwrap_or_default())
    };
    assert!(stage(0).0.ends_with("frozen: forward only") && !stage(1).0.contains("frozen"), "{out}");
    let check = folder.json(&["check", "small.toml"], &two_ranks);
    let bytes = |stage: usize, part: &str| check["stages"][stage]["bytes"][part].as_u64().expect("bytes");
    for part in ["gradients", "optimizer", "activations"] {
        assert!(bytes(0, part) == 0 && bytes(1, part) > 0, "{part}: {check}");
    }
    folder.train(&set("pipeline.ranks=1"));
    let expected = folder.figures();
    for schedule in ["pipeline.schedule=1f1b", "pipeline.schedule=zb-h1", "pipeline.schedule=zbvzerobubble"] {
        folder.train(&[&two_ranks[..], &[schedule]].concat());
        assert_eq!(folder.figures(), expected, "{schedule}");
        folder.print(&["view", "out", "-o", "page.html"]);
    }
}

#[test]
fn settings_that_do_not_fit_are_refused() {
    let folder = folder_without_path();
    let refused = |set: &[&str], expected: &str| folder.refuse_settings(set, expected);
    let with = |more: &[&'static str]| [&NEW, more].concat();
    refused(
        &["adapter.kind=lora", "adapter.targets=[\"q_proj\", \"query\"]"],
        "`adapter.targets`: `query` is not a linear layer of the model: write names of down_proj, embed_tokens, gate_proj",
    );
    refused(
        &with(&["adapter.modules_to_save=[\"head\"]"]),
        "`adapter.modules_to_save`: `head` is not a module of the model with parameters: write names of",
    );
    refused(
        &["adapter.modules_to_save=[\"lm_head\"]"],
        "`modules_to_save` has no effect without `kind = \"lora\"`",
    );
    refused(
        &["adapter.kind=lora", "adapter.targets=[\"lm_head\"]", "pipeline.head_parts=2"],
        "`lm_head` has an adapter, which needs the head in one part",
    );
    refused(&["adapter.rank=4"], "`rank` has no effect without `kind = \"lora\"`");
    refused(
        &with(&["adapter.dropout=0.1", "mesh.tensor_parallel=2"]),
        "`adapter.dropout` needs layers that one rank computes, and 2 tensor ranks compute each",
    );
    refused(
        &with(&["optimizer.groups=[{ parameters = [\"norm\"], weight_decay = 0.0 }]"]),
        "`norm` matches no trained parameter of the model; parameters have paths such as `model.layers.0.self_attn.q_proj.lora_A.weight`",
    );
    let other = format!("model.from={}", reference("nemotron-h-tiny"));
    refused(&with(&[Box::leak(other.into_boxed_str())]), "`nemotron_h` cannot have adapters");
}

#[test]
fn adapters_that_do_not_fit_are_refused() {
    let folder = folder_without_path();
    let source = reference("lora/qwen3-tiny");
    let dir = folder.path("adapter");
    fs::create_dir(&dir).expect("the scratch folder takes folders");
    let path = format!("adapter.path={}", dir.display());
    let copy = || {
        for name in ["adapter_config.json", "adapter_model.safetensors"] {
            fs::copy(Path::new(&source).join(name), dir.join(name)).expect("it can be copied");
        }
    };
    let refused = |expected: &str| {
        folder.refuse(&["train", "small.toml"], &["adapter.kind=lora", &path], expected);
        assert!(!folder.path("out").exists());
    };
    let change = |key: &str, value: Value| {
        copy();
        let file = dir.join("adapter_config.json");
        let mut config: Value =
            serde_json::from_str(&fs::read_to_string(&file).expect("it was copied")).expect("JSON");
        config[key] = value;
        fs::write(file, config.to_string()).expect("it can be written");
    };
    refused("there is no PEFT adapter here");
    for (key, value) in [
        ("lora_bias", json!(true)),
        ("layers_to_transform", json!([0])),
        ("rank_pattern", json!({ "q_proj": 2 })),
        ("modules_to_save", json!(["lm_head"])),
        ("bias", json!("all")),
        ("a_key_of_a_later_version", json!(1)),
        ("init_lora_weights", json!("pissa_niter_4")),
        ("peft_type", json!("IA3")),
    ] {
        change(key, value.clone());
        refused(&format!("adapter_config.json: `{key}` is {value}: "));
    }
    for (key, value) in [
        ("r", json!("four")),
        ("lora_alpha", json!(-8)),
        ("lora_dropout", json!(1.0)),
        ("use_rslora", json!("yes")),
        ("arrow_config", json!({ "top_k": 2 })),
    ] {
        change(key, value.clone());
        refused(&format!("adapter_config.json: `{key}` is {value}: "));
    }
    change("use_dora", json!(true));
    refused("lora_magnitude_vector");
    change("r", Value::Null);
    refused("`r` is missing");
    change("r", json!(5));
    refused(
        "tensor `base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight` has shape [4, 64], and \
         its layer, with the rank in adapter_config.json, needs [5, 64]",
    );
    copy();
    let bytes = fs::read(dir.join("adapter_model.safetensors")).expect("it was copied");
    fs::write(dir.join("adapter_model.safetensors"), &bytes[..bytes.len() - 4]).expect("it can be written");
    refused("copy or download it again");
    copy();
    let llama = Path::new(&reference("lora/llama-tiny")).join("adapter_model.safetensors");
    fs::copy(llama, dir.join("adapter_model.safetensors")).expect("it can be copied");
    refused("has shape [6, ");
}

#[test]
fn checkpoints_have_adapters_alone_and_resume_to_the_bit_under_another_cut() {
    let (folder, whole) = (folder(), folder());
    whole.train(&[]);
    folder.train(&["run.steps=2", "pipeline.schedule=zb-h1"]);
    let (out, _) = folder.succeed(&["inspect", "out"], &[]);
    assert!(out.contains("q_proj.lora_A.weight") && !out.contains("q_proj.weight"), "{out}");
    let set = ["run.steps=4", "pipeline.ranks=4", "pipeline.schedule=1f1b"];
    folder.resume(&set);
    assert_eq!(folder.figures(), whole.figures());
    let bytes = |folder: &Run| -> u64 {
        let checkpoint = folder.path("out/checkpoints/step-00000004");
        let files = fs::read_dir(checkpoint).expect("the checkpoint").flatten();
        files.map(|file| file.metadata().expect("a file").len()).sum()
    };
    let base =
        fs::metadata(Path::new(&reference("qwen3-tiny")).join("model.safetensors")).expect("it exists");
    assert!(bytes(&folder) < base.len() / 2, "{} {}", bytes(&folder), base.len());
}

#[test]
fn a_run_of_other_adapters_or_another_base_is_refused() {
    let folder = folder();
    folder.train(&["run.steps=2"]);
    let refused = |arguments: &[&str], set: &[&str], expected: &str| {
        folder.refuse(arguments, set, expected);
    };
    // A base of the same shapes: one weight differs.
    let other = folder.path("base");
    fs::create_dir(&other).expect("the scratch folder takes folders");
    let base = reference("qwen3-tiny");
    let base = Path::new(&base);
    fs::copy(base.join("config.json"), other.join("config.json")).expect("it can be copied");
    let mut bytes = fs::read(base.join("model.safetensors")).expect("the weights");
    *bytes.last_mut().expect("it has bytes") ^= 1;
    fs::write(other.join("model.safetensors"), bytes).expect("it can be written");
    let from = format!("model.from={}", other.display());
    refused(&["resume", "out"], &["run.steps=4", &from], "adapter.base_weights was");
    let dir = other.display().to_string();
    refused(
        &["export", "out", "merged", "--merge", "--base", &dir],
        &[],
        "the adapters were trained on other weights",
    );
    let none = ["run.steps=4", "adapter.kind=none"];
    let config = folder.path("out/config.toml");
    let text = fs::read_to_string(&config).expect("the configuration");
    fs::write(&config, without_adapter(&text)).expect("it can be written");
    refused(&["resume", "out"], &none, "adapter.kind was \"lora\" and is absent");
    refused(&["resume", "out"], &["run.steps=4", "adapter.kind=lora"], "adapter.rank was 4 and is 8");
    refused(&["export", "out", "x", "--dtype", "bfloat16"], &[], "adapters are written as float32");
    assert!(!folder.path("x").exists() && !folder.path("merged").exists());
}

/// The decoder families with a part of their own, and the keys that a small model of each needs.
const FAMILIES: [(&str, &[&str]); 21] = [
    ("mistral", &["model.sliding_window=3"]),
    ("mixtral", &["model.num_local_experts=4"]),
    ("smollm3", &["model.no_rope_layer_interval=2"]),
    ("granite", &["model.logits_scaling=2.0"]),
    ("granitemoehybrid", &["model.layer_types=[\"mamba\", \"attention\"]", "model.num_local_experts=4"]),
    ("phi3", &["model.sliding_window=3"]),
    ("olmo2", &[]),
    ("olmo3", &["model.sliding_window=3"]),
    ("ministral3", &["model.sliding_window=3"]),
    ("glm4_moe", &["model.n_routed_experts=4"]),
    ("gemma2", &["model.sliding_window=3"]),
    ("gemma3_text", &["model.sliding_window=3", "model.sliding_window_pattern=2"]),
    ("starcoder2", &["model.sliding_window=3"]),
    ("gpt2", &["model.scale_attn_by_inverse_layer_idx=true"]),
    ("gpt_oss", &["model.num_local_experts=4", "model.sliding_window=3"]),
    ("qwen2_moe", &["model.num_experts=4"]),
    ("qwen3_next", &["model.num_experts=4", "model.full_attention_interval=2"]),
    ("qwen3_5_text", &["model.full_attention_interval=2"]),
    ("qwen3_5_moe_text", &["model.num_experts=4", "model.full_attention_interval=2"]),
    ("deepseek_v2", &["model.n_routed_experts=4"]),
    ("deepseek_v3", &["model.n_routed_experts=4"]),
];

/// A model of each family starts from random values and is exported. Adapters on it train to the same digits
/// on one rank and on two.
#[test]
fn every_family_trains_from_its_name_alone_and_with_adapters() {
    let folder = Run::of(&scratch::small(2, 2, 2));
    let train = |set: &[&str]| {
        folder.train(set);
        folder.losses()
    };
    for (index, (family, keys)) in FAMILIES.into_iter().enumerate() {
        // Every second family has magnitudes too.
        let dora = format!("adapter.dora={}", index % 2 == 1);
        let architecture = format!("model.architecture={family}");
        let all = train(&[&[architecture.as_str(), "pipeline.ranks=2"], keys].concat());
        folder.succeed(&["export", "out", family], &[]);
        let config = fs::read(folder.path(family).join("config.json")).expect("a configuration");
        let config: Value = serde_json::from_slice(&config).expect("JSON");
        assert_eq!(config["model_type"], family);
        let from = format!("model.from={family}");
        let adapted = [from.as_str(), "adapter.kind=lora", dora.as_str()];
        let one = train(&[&adapted[..], &["pipeline.ranks=1"]].concat());
        assert_eq!(train(&[&adapted[..], &["pipeline.ranks=2"]].concat()), one, "{family}");
        assert!(one[0] != all[0] && one[0] != one[1], "{family}: {one:?} {all:?}");
    }
}
