//! Adapters that `export` writes, alone and merged into their base.

use std::fs;
use std::path::Path;

use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};

use super::adapters::{folder, folder_without_path};
use super::command_line::reference;
use crate::run::{Run, assert_near, in_one_line, numbers};

/// Takes a step on the rows after the first `rows` rows of the data. Returns the figures before its update.
fn step_after(folder: &Run, rows: usize, set: &[&str]) -> [f64; 2] {
    let data =
        fs::read_to_string(Path::new(&reference("qwen3-tiny")).join("tokens.jsonl")).expect("the data");
    let rest: Vec<&str> = data.lines().skip(rows).collect();
    folder.write("rest.jsonl", rest.join("\n"));
    first_step(folder, &[&["data.path=rest.jsonl"], set].concat())
}

/// Takes one step in a folder of its own. Returns the figures before its update.
fn first_step(folder: &Run, set: &[&str]) -> [f64; 2] {
    folder.train(&[set, &["run.steps=1", "run.out=next"]].concat());
    numbers(&folder.metrics_in("next"))[0]
}

/// Returns the names and shapes of the tensors of a file.
fn tensors(file: &Path) -> Vec<(String, Vec<usize>)> {
    let bytes = fs::read(file).expect("the file");
    let file = safetensors::SafeTensors::deserialize(&bytes).expect("a sound file");
    let mut tensors: Vec<_> =
        file.tensors().into_iter().map(|(name, view)| (name, view.shape().to_vec())).collect();
    tensors.sort_unstable();
    tensors
}

/// Returns PEFT's configuration in a folder.
fn peft(folder: &Path) -> Value {
    let text = fs::read_to_string(folder.join("adapter_config.json")).expect("the configuration");
    serde_json::from_str(&text).expect("JSON")
}

#[test]
fn an_export_has_the_form_of_peft_and_trains_on() {
    let folder = folder();
    folder.train(&["run.steps=2"]);
    folder.says(&["export", "out", "adapter"], &[], "wrote the adapters of step 2 to adapter");
    let (written, golden) = (folder.path("adapter"), reference("lora/qwen3-tiny"));
    let golden = Path::new(&golden);
    assert_eq!(
        tensors(&written.join("adapter_model.safetensors")),
        tensors(&golden.join("adapter_model.safetensors"))
    );
    let (found, expected) = (peft(&written), peft(golden));
    for (key, value) in found.as_object().expect("an object") {
        let is_base = key == "base_model_name_or_path";
        assert_eq!(
            value,
            &if is_base { json!(reference("qwen3-tiny")) } else { expected[key].clone() },
            "{key}"
        );
    }
    let whole = self::folder();
    whole.train(&["run.steps=3"]);
    let path = format!("adapter.path={}", written.display());
    assert_eq!(step_after(&folder, 16, &[&path]), whole.losses()[2]);
}

#[test]
fn a_merged_model_computes_what_the_adapted_one_does() {
    let folder = folder();
    folder.train(&[]);
    let generate = |of: &str| {
        let how = ["--prompt", "a", "--tokens", "12", "--temperature", "0", "--tokenizer", "bytes", "--json"];
        let (out, _) = folder.succeed(&[&["generate", of], &how[..]].concat(), &[]);
        let json: Value = serde_json::from_str(&out).expect("JSON");
        json["texts"][0]["tokens"].clone()
    };
    let merge = ["export", "out", "merged", "--merge"];
    folder.says(&merge, &[], "wrote the model of step 4 in float32 to merged");
    assert_eq!(generate("merged"), generate("out"));
    // The base may have moved.
    let on_base = |base: &str| {
        let how = ["generate", "out", "--prompt", "a", "--tokens", "3", "--tokenizer", "bytes", "--base"];
        folder.call(&[&how[..], &[base]].concat(), &[])
    };
    assert_eq!(on_base(&reference("qwen3-tiny")).0, Some(0));
    let (code, _, said) = on_base(&reference("llama-tiny"));
    let said = in_one_line(&said);
    assert!(code == Some(2) && said.contains("the adapters were trained on other weights"), "{said}");
    folder.succeed(&["export", "out", "adapter"], &[]);
    let path = format!("adapter.path={}", folder.path("adapter").display());
    let [adapted, _] = step_after(&folder, 32, &[&path]);
    let from = format!("model.from={}", folder.path("merged").display());
    let [merged, _] = step_after(&folder_without_path(), 32, &[&from]);
    assert!((adapted - merged).abs() <= 2e-6 * adapted, "{adapted} {merged}");
    let [base, _] = step_after(&folder_without_path(), 32, &[]);
    assert!((base - merged).abs() > 1e-3 * merged, "{base} {merged}");
}

#[test]
fn magnitudes_are_resumed_exported_and_merged() {
    let (folder, whole) = (folder_without_path(), folder_without_path());
    let dora = ["adapter.kind=lora", "adapter.rank=4", "adapter.dora=true"];
    whole.says(&["train", "small.toml"], &dora, "adapter: dora of rank 4 on 56 layers");
    folder.train(&[&dora[..], &["run.steps=2", "pipeline.schedule=zb-h1"]].concat());
    folder.resume(&["run.steps=4", "pipeline.ranks=4", "pipeline.schedule=1f1b"]);
    assert_eq!(folder.figures(), whole.figures());
    folder.succeed(&["export", "out", "merged", "--merge"], &[]);
    folder.succeed(&["export", "out", "adapter"], &[]);
    let adapter = folder.path("adapter");
    let config = peft(&adapter);
    assert_eq!(config["use_dora"], json!(true));
    let magnitudes = ("base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector", vec![96]);
    let magnitudes = (magnitudes.0.to_owned(), magnitudes.1);
    assert!(tensors(&adapter.join("adapter_model.safetensors")).contains(&magnitudes));
    let path = format!("adapter.path={}", adapter.display());
    let [adapted, _] = step_after(&folder, 32, &["adapter.kind=lora", &path]);
    let from = format!("model.from={}", folder.path("merged").display());
    let [merged, _] = step_after(&folder, 32, &[&from]);
    assert!((adapted - merged).abs() <= 2e-6 * adapted, "{adapted} {merged}");
    // Without its magnitudes it is another adapter.
    let file = adapter.join("adapter_config.json");
    fs::write(file, config.to_string().replace("\"use_dora\":true", "\"use_dora\":false"))
        .expect("it can be written");
    folder.refuse(&["train", "small.toml"], &["adapter.kind=lora", &path], "lora_magnitude_vector");
}

/// Writes a configuration that trains new adapters on a tiny DeepSeek V3.
fn deepseek() -> Run {
    with_experts("deepseek-v3-tiny")
}

/// Writes a configuration that trains new adapters on a tiny model with experts.
fn with_experts(base: &str) -> Run {
    let folder = Run::empty();
    let base = reference(base);
    let config = format!(
        "[model]\nfrom = \"{base}\"\n[data]\npath = \"{base}/tokens.jsonl\"\nseq_len = 24\nshuffle = false\n[adapter]\n\
         kind = \"lora\"\n[optimizer]\nlearning_rate = 5e-2\n[run]\nsteps = 2\nout = \"out\"\n"
    );
    folder.write("small.toml", config);
    folder
}

/// PEFT takes modules of the names of dense and shared layers for layers of routed experts, but keeps parameters.
#[test]
fn an_export_of_a_family_with_experts_names_parameters() {
    let folder = deepseek();
    folder.train(&[]);
    let (_, said) = folder.succeed(&["export", "out", "adapter"], &[]);
    assert!(!said.contains("PEFT with") && !said.contains("dropout"), "{said}");
    let adapter = folder.path("adapter");
    let (mut found, golden) = (peft(&adapter), peft(Path::new(&reference("lora/deepseek-v3-tiny"))));
    for key in ["target_modules", "target_parameters"] {
        assert_eq!(found[key], golden[key], "{key}");
    }
    // It trains on as the merged model does.
    folder.succeed(&["export", "out", "merged", "--merge"], &[]);
    let loss = |set: &[&str]| first_step(&folder, set)[0];
    let path = format!("adapter.path={}", adapter.display());
    let (adapted, merged) = (loss(&[&path]), loss(&["model.from=merged"]));
    assert!((adapted - merged).abs() <= 2e-6 * adapted, "{adapted} {merged}");
    // Adapters of routers are refused by that name.
    let file = adapter.join("adapter_config.json");
    found["target_parameters"] = json!(["mlp.gate.weight"]);
    fs::write(&file, found.to_string()).expect("it can be written");
    let expected = "`target_parameters` is \"mlp.gate.weight\": this is not the weight of a linear layer";
    folder.refuse(&["train", "small.toml"], &[&path], expected);
    found["target_parameters"] = Value::Null;
    fs::write(&file, found.to_string()).expect("it can be written");
    let name = "base_model.model.model.layers.1.mlp.experts.lora_A.weight";
    let tensor = TensorView::new(Dtype::F32, vec![1], &[0; 4]).expect("a tensor");
    let bytes = safetensors::serialize([(name, tensor)], None).expect("a file");
    fs::write(adapter.join("adapter_model.safetensors"), bytes).expect("it can be written");
    let expected =
        "lora_A.weight` has shape [1], and its layer, with the rank in adapter_config.json, needs [48, 16]";
    folder.refuse(&["train", "small.toml"], &[&path], expected);
}

#[test]
fn an_export_names_the_limits_of_peft() {
    let folder = deepseek();
    let said = |set: &str| {
        folder.train(&["run.steps=1", set]);
        let to = set.split('=').next().expect("a key");
        in_one_line(&folder.succeed(&["export", "out", to], &[]).1)
    };
    let dora = said("adapter.dora=true");
    assert!(dora.contains("no DoRA for the 9 adapted feed-forward layers"), "{dora}");
    assert!(dora.contains("--merge writes a model that has them"), "{dora}");
    let dropout = said("adapter.dropout=0.25");
    assert!(dropout.contains("lora_dropout is written as 0 instead of 0.25"), "{dropout}");
}

/// Trains with modules to save, under one cut and with a resume under others. Returns the folder of the run.
fn trained_with_modules(base: &str, modules: &str, count: &str) -> Run {
    let (folder, whole) = (folder_without_path(), folder_without_path());
    let from = format!("model.from={}", reference(base));
    let saved = format!("adapter.modules_to_save={modules}");
    let set = ["adapter.kind=lora", "adapter.targets=[\"q_proj\"]", &saved, &from];
    whole.says(&["train", "small.toml"], &set, count);
    folder.train(&[&set[..], &["run.steps=2", "pipeline.schedule=zb-h1"]].concat());
    folder.resume(&["run.steps=4", "pipeline.ranks=4", "pipeline.schedule=1f1b"]);
    assert_eq!(folder.figures(), whole.figures());
    folder.succeed(&["export", "out", "merged", "--merge", "--dtype", "float32"], &[]);
    folder.succeed(&["export", "out", "adapter"], &[]);
    let adapter = format!("adapter.path={}", folder.path("adapter").display());
    let [adapted, _] = step_after(&folder, 32, &["adapter.kind=lora", &adapter, &from]);
    let merged = format!("model.from={}", folder.path("merged").display());
    let [merged, _] = step_after(&folder, 32, &[&merged]);
    assert!((adapted - merged).abs() <= 2e-6 * adapted, "{adapted} {merged}");
    // New adapters change nothing.
    let [base, _] = step_after(&folder, 32, &["adapter.kind=lora", "adapter.targets=[\"q_proj\"]", &from]);
    assert!((base - merged).abs() > 1e-3 * merged, "{base} {merged}");
    folder
}

#[test]
fn saved_modules_are_resumed_exported_and_merged() {
    const MODULES: &str = "[\"embed_tokens\", \"lm_head\", \"*.0.input_layernorm\"]";
    let folder = trained_with_modules("qwen3-tiny", MODULES, "on 8 layers and 3 modules as a whole");
    let config = peft(&folder.path("adapter"));
    let modules = json!(["lm_head", "model.embed_tokens", "model.layers.0.input_layernorm"]);
    assert_eq!((&config["modules_to_save"], config.get("ensure_weight_tying")), (&modules, None));
    let names = tensors(&folder.path("adapter/adapter_model.safetensors"));
    let is_saved = |(name, _): &&(String, Vec<usize>)| !name.contains(".lora_");
    assert_eq!(names.iter().filter(is_saved).count(), 3, "{names:?}");
    assert!(names.contains(&("base_model.model.lm_head.weight".to_owned(), vec![256, 64])), "{names:?}");
}

#[test]
fn a_tied_head_is_saved_with_its_embedding() {
    let folder = trained_with_modules("llama-tied-tiny", "[\"embed_tokens\"]", "and 1 module as a whole");
    let file = folder.path("adapter/adapter_config.json");
    let config = peft(&folder.path("adapter"));
    assert_eq!(config["ensure_weight_tying"], true);
    // PEFT has the table as the head too.
    let names = tensors(&folder.path("adapter/adapter_model.safetensors"));
    assert!(names.contains(&("base_model.model.lm_head.weight".to_owned(), vec![256, 32])), "{names:?}");
    // PEFT would leave the head as it was.
    fs::write(
        file,
        config.to_string().replace("\"ensure_weight_tying\":true", "\"ensure_weight_tying\":false"),
    )
    .expect("it can be written");
    let path = format!("adapter.path={}", folder.path("adapter").display());
    let from = format!("model.from={}", reference("llama-tied-tiny"));
    folder.refuse(
        &["train", "small.toml"],
        &["adapter.kind=lora", &path, &from],
        "the embedding is saved without the head",
    );
}

/// The matrices of saved modules are decoded, and the others stay quantised.
#[test]
fn modules_of_a_quantised_base_are_saved() {
    trained_with_modules(
        "llama-nf4",
        "[\"model.layers.0.mlp\", \"embed_tokens\"]",
        "and 4 modules as a whole",
    );
}

/// Trains with adapters on the queries and the table of the embedding, under one cut and with a resume under others.
fn trained_with_embedding(base: &str, set: &[&str]) -> (Run, String) {
    let (folder, whole) = (folder_without_path(), folder_without_path());
    let from = format!("model.from={}", reference(base));
    let targets = "adapter.targets=[\"q_proj\", \"embed_tokens\"]";
    let set = [&["adapter.kind=lora", targets, &from][..], set].concat();
    whole.says(&["train", "small.toml"], &set, "adapter: lora of rank 8 on");
    folder.train(&[&set[..], &["run.steps=2", "pipeline.schedule=zb-h1"]].concat());
    folder.resume(&["run.steps=4", "pipeline.ranks=4", "pipeline.schedule=1f1b"]);
    assert_eq!(folder.figures(), whole.figures());
    folder.succeed(&["export", "out", "adapter"], &[]);
    assert_eq!(peft(&folder.path("adapter"))["target_modules"], json!(["embed_tokens", "q_proj"]));
    (folder, from)
}

#[test]
fn adapters_of_the_embedding_are_resumed_exported_and_merged() {
    let (folder, from) = trained_with_embedding("qwen3-tiny", &[]);
    let names = tensors(&folder.path("adapter/adapter_model.safetensors"));
    let first = ("base_model.model.model.embed_tokens.lora_embedding_A".to_owned(), vec![8, 256]);
    let second = ("base_model.model.model.embed_tokens.lora_embedding_B".to_owned(), vec![64, 8]);
    assert!(names.contains(&first) && names.contains(&second), "{names:?}");
    folder.succeed(&["export", "out", "merged", "--merge", "--dtype", "float32"], &[]);
    let adapter = format!("adapter.path={}", folder.path("adapter").display());
    let [adapted, _] = step_after(&folder, 32, &["adapter.kind=lora", &adapter, &from]);
    let [merged, _] = step_after(&folder, 32, &[&format!("model.from={}", folder.path("merged").display())]);
    assert!((adapted - merged).abs() <= 2e-6 * adapted, "{adapted} {merged}");
    let [base, _] = step_after(&folder, 32, &["adapter.kind=lora", "adapter.targets=[\"q_proj\"]", &from]);
    assert!((base - merged).abs() > 1e-3 * merged, "{base} {merged}");
    let targets = ["adapter.kind=lora", "adapter.targets=[\"embed_tokens\"]"];
    for (set, expected) in [
        ("adapter.dora=true", "`model.embed_tokens` is a table, and tables have no magnitudes"),
        ("pipeline.embedding_parts=2", "needs the embedding in one part"),
    ] {
        folder.refuse_settings(&[&targets[..], &[set]].concat(), expected);
    }
}

/// The head multiplies by the table without its adapter, which a merged model cannot say.
#[test]
fn the_adapter_of_a_table_is_not_merged_into_a_tied_head() {
    let (folder, from) = trained_with_embedding("llama-tied-tiny", &["pipeline.head_parts=2"]);
    folder.refuse(&["export", "out", "merged", "--merge"], &[], "so the adapters cannot be merged");
    folder.succeed(&["generate", "out", "--prompt", "a", "--tokens", "3", "--tokenizer", "bytes"], &[]);
    let file = folder.path("adapter/adapter_config.json");
    let mut config = peft(&folder.path("adapter"));
    config["ensure_weight_tying"] = true.into();
    fs::write(file, config.to_string()).expect("it can be written");
    let path = format!("adapter.path={}", folder.path("adapter").display());
    let set = ["adapter.kind=lora", &path, &from];
    folder.refuse(&["train", "small.toml"], &set, "the head has the adapter of the embedding");
}

/// Both matrices of all experts have adapters.
const EXPERTS: &str = "adapter.targets=[\"q_proj\", \"experts.gate_up_proj\", \"experts.down_proj\"]";

#[test]
fn adapters_of_experts_are_resumed_exported_and_merged() {
    let set = [EXPERTS, "adapter.rank=2", "run.steps=4", "pipeline.microbatches=2"];
    let (folder, whole) = (with_experts("qwen3-moe-tiny"), with_experts("qwen3-moe-tiny"));
    whole.says(&["train", "small.toml"], &set, "on 6 layers and the experts of 5 blocks");
    folder.train(&[&set[..], &["run.steps=2", "pipeline.ranks=2", "pipeline.schedule=zb-h1"]].concat());
    folder.resume(&["run.steps=4", "pipeline.ranks=3", "pipeline.schedule=1f1b"]);
    assert_eq!(folder.figures(), whole.figures());
    folder.succeed(&["export", "out", "adapter"], &[]);
    let (adapter, golden) = (folder.path("adapter"), reference("lora/qwen3-moe-tiny-experts"));
    let file = |dir: &Path| tensors(&dir.join("adapter_model.safetensors"));
    assert_eq!(file(&adapter), file(Path::new(&golden)));
    let parameters = peft(&adapter)["target_parameters"].clone();
    let parameters = parameters.as_array().expect("a list");
    assert_eq!(parameters.len(), 10);
    assert_eq!(parameters[0], "model.layers.0.mlp.experts.down_proj");
    // It trains on as the merged model does.
    folder.succeed(&["export", "out", "merged", "--merge", "--dtype", "float32"], &[]);
    let loss = |set: &[&str]| first_step(&folder, set)[0];
    let path = format!("adapter.path={}", adapter.display());
    let (adapted, merged) = (loss(&[&path]), loss(&["model.from=merged", "adapter.kind=none"]));
    assert!((adapted - merged).abs() <= 2e-6 * adapted, "{adapted} {merged}");
    let base = loss(&[]);
    assert!((base - merged).abs() > 1e-3 * merged, "{base} {merged}");
    folder.succeed(&["generate", "out", "--prompt", "a", "--tokens", "3", "--tokenizer", "bytes"], &[]);
    for (other, expected) in [
        ("adapter.dora=true", "adapters of experts have neither magnitudes nor dropout"),
        ("adapter.dropout=0.1", "adapters of experts have neither magnitudes nor dropout"),
    ] {
        folder.refuse_settings(&[EXPERTS, other], expected);
    }
}

/// PEFT has put these adapters on the layers of each expert, with transformers 4.
#[test]
fn adapters_of_the_experts_own_layers_keep_their_form() {
    let (folder, golden) = (with_experts("qwen3-moe-tiny"), reference("lora/qwen3-moe-tiny-own-experts"));
    let path = format!("adapter.path={golden}");
    let set = [&*path, "pipeline.microbatches=2"];
    folder.train(&[&set[..], &["run.steps=1"]].concat());
    folder.resume(&["run.steps=2", "pipeline.ranks=2", "pipeline.schedule=zb-h1"]);
    folder.succeed(&["export", "out", "adapter"], &[]);
    let (adapter, golden) = (folder.path("adapter"), Path::new(&golden));
    let file = |dir: &Path| tensors(&dir.join("adapter_model.safetensors"));
    assert_eq!(file(&adapter), file(golden));
    for key in ["target_modules", "target_parameters"] {
        assert_eq!(peft(&adapter)[key], peft(golden)[key], "{key}");
    }
    folder.succeed(&["export", "out", "merged", "--merge", "--dtype", "float32"], &[]);
    let loss = |set: &[&str]| first_step(&folder, set)[0];
    let path = format!("adapter.path={}", adapter.display());
    let (adapted, merged) = (loss(&[&path]), loss(&["model.from=merged", "adapter.kind=none"]));
    assert!((adapted - merged).abs() <= 2e-6 * adapted, "{adapted} {merged}");
    assert_ne!(adapted, loss(&[set[0]]), "two steps have changed the adapters");
    // Others were trained with dropout, which the settings replace.
    let mut config = peft(golden);
    config["lora_dropout"] = json!(0.1);
    let (dropped, weights) = (folder.path("dropped"), "adapter_model.safetensors");
    fs::create_dir(&dropped).expect("a folder");
    fs::write(dropped.join("adapter_config.json"), config.to_string()).expect("it can be written");
    fs::copy(golden.join(weights), dropped.join(weights)).expect("it can be copied");
    let path = format!("adapter.path={}", dropped.display());
    folder.refuse_settings(&[&path], "adapters of experts have neither magnitudes nor dropout");
    assert_eq!(loss(&[&path, "adapter.dropout=0"]), loss(&[set[0]]));
}

/// Adapters on the matrices of Mamba-2 and on experts, whose matrices are in tensors of the family.
#[test]
fn adapters_of_granite_4_have_the_form_of_peft_and_are_merged() {
    let folder = with_experts("granite-hybrid-rope-tiny");
    let targets =
        r#"adapter.targets=["in_proj", "out_proj", "o_proj", "experts.gate_up_proj", "experts.down_proj"]"#;
    folder.train(&[targets, "adapter.rank=2", "run.steps=4", "pipeline.ranks=2"]);
    folder.succeed(&["export", "out", "adapter"], &[]);
    let (adapter, golden) = (folder.path("adapter"), reference("lora/granite-hybrid-rope-tiny-mamba"));
    let file = |dir: &Path| tensors(&dir.join("adapter_model.safetensors"));
    assert_eq!(file(&adapter), file(Path::new(&golden)));
    assert_eq!(peft(&adapter)["target_modules"], json!(["in_proj", "o_proj", "out_proj"]));
    let parameters = peft(&adapter)["target_parameters"].clone();
    assert_eq!(parameters[0], "model.layers.0.block_sparse_moe.experts.down_proj");
    folder.succeed(&["export", "out", "merged", "--merge", "--dtype", "float32"], &[]);
    let loss = |set: &[&str]| first_step(&folder, set)[0];
    let path = format!("adapter.path={}", adapter.display());
    let (adapted, merged) = (loss(&[&path]), loss(&["model.from=merged", "adapter.kind=none"]));
    assert!((adapted - merged).abs() <= 2e-6 * adapted, "{adapted} {merged}");
    let base = loss(&[]);
    assert!((base - merged).abs() > 1e-3 * merged, "{base} {merged}");
}

/// The matrices of experts of a base in GGUF stay quantised next to their adapters.
#[test]
fn quantised_experts_have_adapters() {
    let folder = Run::empty();
    folder.write(
        "small.toml",
        "[model]\narchitecture = \"qwen3_moe\"\nvocab_size = 256\nhidden_size = 64\nintermediate_size = 64\n\
         moe_intermediate_size = 32\nnum_experts = 4\nnum_experts_per_tok = 2\nnum_hidden_layers = 2\nnum_attention_heads = 4\n\
         head_dim = 16\n[data]\nseq_len = 32\n[run]\nsteps = 1\nout = \"out\"\n",
    );
    folder.train(&[]);
    folder.succeed(&["export", "out", "base"], &[]);
    folder.succeed(&["quantize", "base", "base.gguf", "--to", "q8_0"], &[]);
    folder.write("small.toml", "[data]\nseq_len = 32\ntokenizer = \"bytes\"\n[adapter]\nkind = \"lora\"\n[run]\nsteps = 4\nout = \"out\"\n");
    let run = |base: &str| {
        let set = [&*format!("model.from={base}"), EXPERTS, "optimizer.learning_rate=0.02"];
        let json = folder.json(&["check", "small.toml"], &set);
        let bytes = json["memory"]["ranks"][0]["parameters"].as_u64().expect("bytes");
        folder.train(&set);
        (bytes, folder.losses())
    };
    let ((whole, expected), (quantised, found)) = (run("base"), run("base.gguf"));
    assert!(2 * quantised < whole, "{quantised} {whole}");
    assert_near(&found, &expected, 2e-2, "GGUF");
    assert!(found[3][0] < found[0][0] && found != expected, "{found:?}");
    // The adapters are not merged into the base.
    folder.succeed(&["generate", "out", "--prompt", "a", "--tokens", "3", "--tokenizer", "bytes"], &[]);
}

#[test]
fn joined_experts_have_no_adapters() {
    let folder = with_experts("gpt-oss-mxfp4");
    folder.refuse_settings(
        &[EXPERTS],
        "`adapter.targets`: `experts.gate_up_proj` is not a linear layer of the model",
    );
}
