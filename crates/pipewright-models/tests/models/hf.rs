//! Model directories: written directories are read back bit for bit, and damaged ones are refused with an
//! error that names the problem.

use std::fs;
use std::path::{Path, PathBuf};

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{Device, Tensor, TensorData};
use pipewright_models::decoder::{DecoderConfig, LayerWindows};
use pipewright_models::hf;
use pipewright_models::llama::LlamaConfig;
use pipewright_models::qwen2::Qwen2Config;
use pipewright_models::qwen3_moe::Qwen3MoeConfig;
use pipewright_models::{ModelConfig, ModelError, ModelFamily, ModelStage, parameter_specs};
use serde_json::{Value, json};
use tempfile::TempDir;

const GOLDEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/llama-tiny");
const QWEN2: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/qwen2-tiny");
const LLAMA31: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/llama31-tiny");
const QWEN3: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/qwen3-tiny");
const QWEN3_MOE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/qwen3-moe-tiny");
const TIED: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/llama-tied-tiny");

fn config(dir: &Path) -> LlamaConfig {
    match ModelConfig::read(dir) {
        Ok(ModelConfig::Llama(config)) => config,
        other => panic!("a Llama was written, not {other:?}"),
    }
}

fn load(dir: &Path) -> Result<ModelStage, ModelError> {
    load_family(dir, &config(dir))
}

/// Loads the whole model as one stage.
fn load_family<F: ModelFamily>(dir: &Path, config: &F) -> Result<ModelStage, ModelError> {
    let layers = config.layers();
    hf::load_stage(dir, config, 0..layers, Device::flex())
}

fn values(stage: &ModelStage) -> Vec<TensorData> {
    struct Collector(Vec<TensorData>);
    impl ModuleVisitor for Collector {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.0.push(param.val().to_data());
        }
    }
    let mut collector = Collector(Vec::new());
    stage.visit(&mut collector);
    collector.0
}

/// Makes a copy of the golden model for a test to damage.
fn copy() -> (TempDir, PathBuf) {
    let folder = TempDir::new().expect("a temporary folder");
    for name in ["config.json", "model.safetensors"] {
        fs::copy(Path::new(GOLDEN).join(name), folder.path().join(name)).expect("the file can be read");
    }
    let weights = folder.path().join("model.safetensors");
    (folder, weights)
}

/// Rewrites the header of a safetensors file, and keeps the tensors.
fn edit_header(path: &Path, edit: impl FnOnce(&mut Value)) {
    let bytes = fs::read(path).expect("the file can be read");
    let length = u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes")) as usize;
    let mut header: Value = serde_json::from_slice(&bytes[8..8 + length]).expect("a header");
    edit(&mut header);
    let header = header.to_string().into_bytes();
    let length = (header.len() as u64).to_le_bytes();
    fs::write(path, [&length, header.as_slice(), &bytes[8 + bytes_before(&bytes)..]].concat())
        .expect("it is writable");
}

fn bytes_before(file: &[u8]) -> usize {
    u64::from_le_bytes(file[..8].try_into().expect("eight bytes")) as usize
}

fn check_refused(dir: &Path, message: &str) {
    let error = load(dir).map(|_| ()).expect_err("it is broken").to_string();
    let error = error.replace(&dir.display().to_string(), "DIR");
    assert_eq!(error, message);
}

/// Returns the content of a weights file after its header.
fn tensors(dir: &Path) -> Vec<u8> {
    let bytes = fs::read(dir.join("model.safetensors")).expect("the file can be read");
    bytes[8 + bytes_before(&bytes)..].to_vec()
}

/// Checks that a written reference model has the content of the reference, and can be read back.
fn check_round_trip<F: ModelFamily>(reference: &str, config: &F) -> Value {
    let folder = TempDir::new().expect("a temporary folder");
    let (dir, reference) = (folder.path().join("deep/model"), Path::new(reference));
    let stage = load_family(reference, config).expect("it loads");
    hf::save(&dir, config, &[&stage]).expect("it is written");

    assert_eq!(ModelConfig::read(&dir).ok(), ModelConfig::read(reference).ok());
    assert_eq!(values(&load_family(&dir, config).expect("it loads")), values(&stage));
    // The reference writes tensors in the same order and layout.
    assert!(tensors(&dir) == tensors(reference), "the bytes of the tensors differ");
    let json = fs::read(dir.join("config.json")).expect("the file can be read");
    serde_json::from_slice(&json).expect("it is JSON")
}

#[test]
fn round_trip_in_one_file() {
    let json = check_round_trip(GOLDEN, &config(Path::new(GOLDEN)));
    assert_eq!(json["model_type"], "llama");
    assert_eq!(json["tie_word_embeddings"], false);
}

#[test]
fn round_trip_of_a_tied_model() {
    let json = check_round_trip(TIED, &config(Path::new(TIED)));
    assert_eq!(json["tie_word_embeddings"], true);
}

#[test]
fn round_trip_of_qwen2() {
    let Ok(ModelConfig::Qwen2(config)) = ModelConfig::read(Path::new(QWEN2)) else { panic!("it is a Qwen2") };
    let json = check_round_trip(QWEN2, &config);
    assert_eq!(json["architectures"], json!(["Qwen2ForCausalLM"]));
    assert_eq!(json["max_window_layers"], 4);
}

#[test]
fn round_trips_of_the_other_families() {
    let read = |dir: &str| ModelConfig::read(Path::new(dir)).expect("a configuration");
    let ModelConfig::Llama(llama31) = read(LLAMA31) else { panic!("it is a Llama") };
    let json = check_round_trip(LLAMA31, &llama31);
    assert_eq!(json["rope_parameters"]["rope_type"], "llama3");
    let ModelConfig::Qwen3(qwen3) = read(QWEN3) else { panic!("it is a Qwen3") };
    assert_eq!(check_round_trip(QWEN3, &qwen3)["head_dim"], 24);
    let ModelConfig::Qwen3Moe(moe) = read(QWEN3_MOE) else { panic!("it is a Qwen3-MoE") };
    let json = check_round_trip(QWEN3_MOE, &moe);
    assert_eq!((&json["num_experts"], &json["mlp_only_layers"]), (&json!(8), &json!([3])));
}

/// The configuration of the reference as version 4 of transformers writes it.
#[test]
fn old_spellings_mean_the_same() {
    let old = |dir: &str, change: &dyn Fn(&mut serde_json::Map<String, Value>)| {
        let text = fs::read_to_string(Path::new(dir).join("config.json")).expect("the file can be read");
        let mut json: Value = serde_json::from_str(&text).expect("JSON");
        let table = json.as_object_mut().expect("a table");
        let mut rope = table.remove("rope_parameters").expect("positions");
        let theta = rope.as_object_mut().and_then(|rope| rope.remove("rope_theta")).expect("a base");
        table.insert("rope_theta".to_owned(), theta);
        table.insert(
            "rope_scaling".to_owned(),
            if rope["rope_type"] == "default" { Value::Null } else { rope },
        );
        let dtype = table.remove("dtype").expect("a type");
        table.insert("torch_dtype".to_owned(), dtype);
        change(table);
        assert_eq!(
            ModelConfig::from_json(json).expect("it is valid"),
            ModelConfig::read(Path::new(dir)).expect("it is valid"),
            "{dir}"
        );
    };
    old(LLAMA31, &|_| {});
    old(QWEN3, &|_| {});
    old(QWEN3_MOE, &|table| {
        let experts = table.remove("num_local_experts").expect("experts");
        table.insert("num_experts".to_owned(), experts);
    });
}

#[test]
fn a_published_qwen3_moe_is_understood() {
    let json = json!({
        "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "bos_token_id": 151_643,
        "decoder_sparse_step": 1, "eos_token_id": 151_645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048,
        "initializer_range": 0.02, "intermediate_size": 6144, "max_position_embeddings": 40960, "max_window_layers": 48,
        "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 768, "norm_topk_prob": true,
        "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
        "num_key_value_heads": 4, "output_router_logits": false, "rms_norm_eps": 1e-6, "rope_scaling": null,
        "rope_theta": 1_000_000.0, "router_aux_loss_coef": 0.001, "sliding_window": null,
        "tie_word_embeddings": false, "torch_dtype": "bfloat16", "use_cache": true, "use_sliding_window": false,
        "vocab_size": 151_936
    });
    let Ok(ModelConfig::Qwen3Moe(config)) = ModelConfig::from_json(json) else { panic!("it is a Qwen3-MoE") };
    // The published number of parameters.
    let parameters: u64 = config.describe(1).layers.iter().map(|layer| layer.parameters).sum();
    assert_eq!(parameters, 30_532_122_624);
    assert_eq!(Qwen3MoeConfig::from_json(config.to_json()).ok(), Some(config));
}

#[test]
fn a_mixture_that_cannot_be_run_is_refused_at_its_key() {
    let folder = TempDir::new().expect("a temporary folder");
    let text = fs::read_to_string(Path::new(QWEN3_MOE).join("config.json")).expect("the file can be read");
    let check = |key: &str, value: &str, message: &str| {
        let line = text.lines().position(|line| line.contains(&format!("\"{key}\""))).expect("the key") + 1;
        let old = text.lines().nth(line - 1).expect("a line");
        let new = format!("  \"{key}\": {value},");
        let path = folder.path().join("config.json");
        fs::write(&path, text.replace(old, &new)).expect("it is writable");
        let error = ModelConfig::read(folder.path()).expect_err("it cannot be run");
        assert_eq!(error.to_string(), format!("{}:{line}: the model cannot be run", path.display()));
        let source = std::error::Error::source(&error).expect("a cause").to_string();
        assert_eq!(source, message);
    };
    check(
        "num_experts_per_tok",
        "9",
        "`num_experts_per_tok = 9` is out of range: it must be from 1 to the number of experts",
    );
    check("num_local_experts", "0", "`num_local_experts = 0` is out of range: it must be from 1 to 16384");
    check("attention_dropout", "1.5", "`attention_dropout = 1.5` is not supported: only 0 is");
    check("decoder_sparse_step", "0", "`decoder_sparse_step = 0` is out of range: it must be at least 1");
    check("norm_topk_prob", "\"all\"", "the value of `norm_topk_prob` cannot be used");
}

#[test]
fn round_trip_of_stages_in_several_files() {
    let folder = TempDir::new().expect("a temporary folder");
    let dir = folder.path().join("model");
    let config = config(Path::new(GOLDEN));
    let stage = |range| hf::load_stage(Path::new(GOLDEN), &config, range, Device::flex()).expect("it loads");
    let stages = [stage(0..3), stage(3..10)];

    let specs = stages.iter().flat_map(parameter_specs).collect();
    let mut writer = hf::Writer::create(&dir, &config, specs, 500_000).expect("it starts");
    writer.write_stage(&stages[1]).expect("it is written");
    assert!(!dir.exists(), "nothing shows before the end");
    writer.write_stage(&stages[0]).expect("it is written");
    writer.finish().expect("it is complete");

    let mut names: Vec<_> =
        fs::read_dir(&dir).expect("it is there").map(|e| e.expect("an entry").file_name()).collect();
    names.sort();
    assert_eq!(
        names,
        [
            "config.json",
            "model-00001-of-00004.safetensors",
            "model-00002-of-00004.safetensors",
            "model-00003-of-00004.safetensors",
            "model-00004-of-00004.safetensors",
            "model.safetensors.index.json",
        ]
    );
    assert_eq!(values(&load(&dir).expect("it loads")), values(&load(Path::new(GOLDEN)).expect("it loads")));
}

#[test]
fn half_precision_is_widened() {
    let (folder, weights) = copy();
    let values = [1.0f32, -2.5, 0.15625, 65504.0];
    check_halves(
        folder.path(),
        &weights,
        "BF16",
        &values.map(|x| (x.to_bits() >> 16) as u16),
        &[1.0, -2.5, 0.15625],
    );
    check_halves(
        folder.path(),
        &weights,
        "F16",
        &[0x3c00, 0xc100, 0x3100, 0x0001],
        &[1.0, -2.5, 0.15625, 2f32.powi(-24)],
    );
}

/// Replaces the weights by a file that holds the final norm and the head in half precision.
fn check_halves(dir: &Path, weights: &Path, dtype: &str, bits: &[u16], expected: &[f32]) {
    let (norm, head) = (64 * 2, 256 * 64 * 2);
    let header = json!({
        "model.norm.weight": {"dtype": dtype, "shape": [64], "data_offsets": [0, norm]},
        "lm_head.weight": {"dtype": dtype, "shape": [256, 64], "data_offsets": [norm, norm + head]},
    });
    let header = header.to_string().into_bytes();
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header);
    file.extend(bits.iter().cycle().take((norm + head) / 2).flat_map(|bits| bits.to_le_bytes()));
    fs::write(weights, file).expect("it is writable");
    let stage = hf::load_stage(dir, &config(dir), 9..10, Device::flex()).expect("the norm and head are read");
    let norm: Vec<f32> = values(&stage)[0].iter().take(expected.len()).collect();
    assert_eq!(norm, expected);
}

#[test]
fn a_file_cut_short_is_refused() {
    let (folder, weights) = copy();
    let bytes = fs::read(&weights).expect("the file can be read");
    for (length, expected) in [(bytes.len() - 1, bytes.len()), (1000, 8 + bytes_before(&bytes)), (5, 8)] {
        fs::write(&weights, &bytes[..length]).expect("it is writable");
        let advice = "copy or download it again";
        check_refused(
            folder.path(),
            &format!(
                "DIR/model.safetensors: the file has {length} bytes, and its header asks for {expected}; {advice}"
            ),
        );
    }
}

#[test]
fn a_file_that_is_something_else_is_refused() {
    let (folder, weights) = copy();
    fs::write(&weights, "<html>not found</html>").expect("it is writable");
    check_refused(folder.path(), "DIR/model.safetensors: the file does not begin with a safetensors header");
    fs::write(&weights, [&[4, 0, 0, 0, 0, 0, 0, 0], b"{..}".as_slice()].concat()).expect("it is writable");
    check_refused(folder.path(), "DIR/model.safetensors: the file does not begin with a safetensors header");
}

#[test]
fn a_missing_tensor_is_named() {
    let (folder, weights) = copy();
    edit_header(&weights, |header| {
        let header = header.as_object_mut().expect("it is one");
        let tensor = header.remove("model.layers.6.mlp.up_proj.weight").expect("it is there");
        header.insert("other".to_owned(), tensor);
    });
    check_refused(
        folder.path(),
        "DIR/model.safetensors: tensor `model.layers.6.mlp.up_proj.weight` is missing",
    );
    let config = config(folder.path());
    let other = hf::load_stage(folder.path(), &config, 0..7, Device::flex());
    assert!(other.is_ok(), "a stage that does not need it loads");
}

#[test]
fn a_wrong_shape_shows_both() {
    let (folder, weights) = copy();
    edit_header(&weights, |header| header["model.layers.0.mlp.down_proj.weight"]["shape"] = json!([176, 64]));
    check_refused(
        folder.path(),
        "DIR/model.safetensors: tensor `model.layers.0.mlp.down_proj.weight` has shape [176, 64], and the configuration \
         asks for [64, 176]",
    );
}

#[test]
fn an_element_type_that_cannot_be_read_is_named() {
    let (folder, weights) = copy();
    edit_header(&weights, |header| header["lm_head.weight"]["dtype"] = json!("I32"));
    check_refused(
        folder.path(),
        "DIR/model.safetensors: tensor `lm_head.weight` has element type I32; convert it to F32, BF16 or F16",
    );
    edit_header(&weights, |header| header["lm_head.weight"]["dtype"] = json!("Q4"));
    check_refused(folder.path(), "DIR/model.safetensors: the file does not begin with a safetensors header");
}

#[test]
fn an_index_may_not_lead_out_of_the_folder() {
    let (folder, weights) = copy();
    fs::remove_file(weights).expect("it is there");
    check_refused(
        folder.path(),
        "DIR: the folder has neither model.safetensors nor model.safetensors.index.json; name a folder with weights",
    );
    let index = json!({"weight_map": {"model.embed_tokens.weight": "../secret.safetensors"}});
    fs::write(folder.path().join("model.safetensors.index.json"), index.to_string()).expect("it is writable");
    check_refused(
        folder.path(),
        "DIR/model.safetensors.index.json: tensor `model.embed_tokens.weight` is said to be in \
         `../secret.safetensors`, which is not a plain file name",
    );
}

/// A published Qwen2's configuration with some keys changed.
fn qwen2_json(change: Value) -> String {
    let mut json = json!({
        "architectures": ["Qwen2ForCausalLM"], "hidden_act": "silu", "hidden_size": 896, "intermediate_size": 4864,
        "max_position_embeddings": 131_072, "max_window_layers": 24, "model_type": "qwen2", "num_attention_heads": 14,
        "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "rope_theta": 1_000_000.0,
        "sliding_window": 131_072, "tie_word_embeddings": true, "use_sliding_window": false, "vocab_size": 151_936
    });
    json.as_object_mut().expect("it is one").append(change.clone().as_object_mut().expect("it is one"));
    json.to_string()
}

#[test]
fn a_published_qwen2_is_understood() {
    let folder = TempDir::new().expect("a temporary folder");
    fs::write(folder.path().join("config.json"), qwen2_json(json!({}))).expect("it is writable");
    let Ok(ModelConfig::Qwen2(config)) = ModelConfig::read(folder.path()) else { panic!("it is a Qwen2") };
    let decoder = DecoderConfig {
        hidden_size: 896,
        intermediate_size: 4864,
        num_hidden_layers: 24,
        num_key_value_heads: 2,
        rope_theta: 1e6,
        max_position_embeddings: Some(131_072),
        tie_word_embeddings: true,
        ..DecoderConfig::new(151_936, 14)
    };
    let windows = LayerWindows {
        sliding_window: Some(131_072),
        max_window_layers: Some(24),
        ..LayerWindows::default()
    };
    let expected = Qwen2Config { decoder, windows };
    assert_eq!(config, expected);
    // The published number of parameters.
    let parameters: u64 = config.describe(1).layers.iter().map(|layer| layer.parameters).sum();
    assert_eq!(parameters, 494_032_768);
    assert_eq!(Qwen2Config::from_json(config.to_json()).ok(), Some(config));
}

#[test]
fn llamas_attention_bias_is_kept() {
    let llama = LlamaConfig { attention_bias: true, ..DecoderConfig::new(16, 4).into() };
    assert_eq!(llama.to_json()["attention_bias"], true);
    assert_eq!(LlamaConfig::from_json(llama.to_json()).ok(), Some(llama));
}

#[test]
fn configurations_that_cannot_be_run_are_refused() {
    let (folder, _) = copy();
    let path = folder.path().join("config.json");
    let check = |content: &str, expected: &[&str]| {
        fs::write(&path, content).expect("it is writable");
        let error = ModelConfig::read(folder.path()).expect_err("it is broken");
        let chain = std::iter::successors(Some(&error as &dyn std::error::Error), |error| error.source());
        let chain: Vec<String> = chain.map(ToString::to_string).collect();
        let path = path.display().to_string();
        assert_eq!(chain.iter().map(|error| error.replace(&path, "FILE")).collect::<Vec<_>>(), expected);
    };
    check("{", &["FILE: cannot be parsed", "EOF while parsing an object at line 1 column 1"]);
    const KNOWN: &str = "the families are llama, qwen2, qwen3, qwen3_moe, qwen2_moe, qwen3_next, qwen3_5_text, qwen3_5_moe_text, mistral, ministral3, mixtral, smollm3, granite, granitemoehybrid, phi3, olmo2, olmo3, gemma2, gemma3_text, starcoder2, gpt2, gpt_oss, deepseek_v2, deepseek_v3, glm4_moe, nemotron_h, hybrid";
    let unknown = |family: &str, nearest: &str, difference: &str| {
        format!(
            "model family `{family}` is not supported: {KNOWN}; the nearest one is `{nearest}`, which {difference}"
        )
    };
    let same_keys = "may compute other things even where the keys are the same";
    for (family, nearest) in
        [("mamba", "hybrid"), ("qwen3_moe_x", "qwen3_moe"), ("qwen", "qwen3"), ("llama4", "llama")]
    {
        let json = format!("{{\n\"model_type\": \"{family}\"}}");
        check(&json, &["FILE:2: the model cannot be run", &unknown(family, nearest, same_keys)]);
    }
    check(
        r#"{"architectures": ["Qwen4NextForCausalLM"]}"#,
        &["FILE: the model cannot be run", &unknown("Qwen4NextForCausalLM", "qwen3", same_keys)],
    );
    check(
        r#"{"model_type": "phimoe", "num_local_experts": 8, "router_jitter_noise": 0.1}"#,
        &[
            "FILE:1: the model cannot be run",
            &unknown(
                "phimoe",
                "glm4_moe",
                "cannot compute `num_local_experts = 8`, `router_jitter_noise = 0.1`",
            ),
        ],
    );
    check(
        "{}",
        &[
            "FILE: the model cannot be run",
            &format!("no model family is named: `model_type` (or `architectures`) is missing; {KNOWN}"),
        ],
    );
    check(
        &qwen2_json(json!({"use_sliding_window": true, "sliding_window": 0})),
        &["FILE:1: the model cannot be run", "`sliding_window = 0` is out of range: it must be at least 1"],
    );
    check(
        &qwen2_json(json!({"rope_scaling": {"type": "ntk", "factor": 4.0}})),
        &[
            "FILE:1: the model cannot be run",
            "`rope_scaling.rope_type = ntk` is not supported: only default, linear, dynamic, yarn, longrope or llama3 is",
        ],
    );
    check(
        r#"{"architectures": ["LlamaForCausalLM"], "vocab_size": 2}"#,
        &["FILE: the model cannot be run", "missing field `hidden_size`"],
    );
    let golden = fs::read_to_string(Path::new(GOLDEN).join("config.json")).expect("the file can be read");
    let line = golden.lines().position(|line| line.contains("\"hidden_size\"")).expect("it has a width") + 1;
    check(
        &golden.replace("\"hidden_size\": 64", "\"hidden_size\": \"wide\""),
        &[
            &format!("FILE:{line}: the model cannot be run"),
            "the value of `hidden_size` cannot be used",
            "invalid type: string \"wide\", expected usize",
        ],
    );
}

#[test]
fn an_export_keeps_what_belongs_to_the_model_and_not_to_its_training() {
    let (folder, _) = copy();
    let (origin, kept, dir) = (folder.path(), folder.path().join("kept"), folder.path().join("exported"));
    let mut json: Value =
        serde_json::from_slice(&fs::read(origin.join("config.json")).expect("the file can be read"))
            .expect("JSON");
    json["bos_token_id"] = json!(7);
    json["eos_token_id"] = json!([8, 9]);
    json["quantization_config"] = json!({"bits": 4});
    json["rms_norm_eps"] = json!(1e-3);
    fs::write(origin.join("config.json"), json.to_string()).expect("it is writable");
    for name in ["tokenizer.json", "generation_config.json", "merges.txt", "notes.txt"] {
        fs::write(origin.join(name), name).expect("it is writable");
    }
    hf::keep_origin(origin, &kept).expect("it is copied");

    let config = config(Path::new(GOLDEN));
    let stage = load_family(Path::new(GOLDEN), &config).expect("it loads");
    let mut writer = hf::Writer::create(&dir, &config, parameter_specs(&stage), u64::MAX).expect("it starts");
    writer.add_origin(&kept).expect("it has the files");
    writer.write_stage(&stage).expect("it is written");
    writer.finish().expect("it is complete");

    let written = fs::read(dir.join("config.json")).expect("the file can be read");
    let written: Value = serde_json::from_slice(&written).expect("JSON");
    assert_eq!((&written["bos_token_id"], &written["eos_token_id"]), (&json!(7), &json!([8, 9])));
    assert_eq!(written["rms_norm_eps"], config.to_json()["rms_norm_eps"], "trained values win");
    assert_eq!(written.get("quantization_config"), None);
    let mut names: Vec<_> = fs::read_dir(&dir)
        .expect("a folder")
        .map(|entry| entry.expect("a file").file_name().into_string().expect("UTF-8"))
        .collect();
    names.sort();
    let expected =
        ["config.json", "generation_config.json", "merges.txt", "model.safetensors", "tokenizer.json"];
    assert_eq!(names, expected);
    assert_eq!(fs::read_to_string(dir.join("merges.txt")).ok().as_deref(), Some("merges.txt"));
}

#[test]
#[cfg(unix)]
fn devices_are_not_read_as_models() {
    let (folder, weights) = copy();
    fs::remove_file(&weights).expect("it is there");
    std::os::unix::fs::symlink("/dev/zero", &weights).expect("a link");
    let text = folder.path().join("config.json");
    // A path that is not a file counts as missing weights.
    check_refused(
        folder.path(),
        "DIR: the folder has neither model.safetensors nor model.safetensors.index.json; name a folder with weights",
    );
    fs::remove_file(&text).expect("it is there");
    std::os::unix::fs::symlink("/dev/zero", &text).expect("a link");
    let error = ModelConfig::read(folder.path()).expect_err("it has no end");
    let cause = std::error::Error::source(&error).expect("a cause").to_string();
    assert_eq!(cause, "this is a device or a pipe; copy its content to a regular file");
}

#[test]
fn a_folder_with_content_is_never_overwritten() {
    let (folder, weights) = copy();
    let before = fs::read(&weights).expect("the file can be read");
    let stage = load(folder.path()).expect("it loads");
    let error = hf::save(folder.path(), &config(folder.path()), &[&stage]).expect_err("it has content");
    assert!(error.to_string().contains("the folder is not empty"), "{error}");
    assert_eq!(fs::read(&weights).expect("the file can be read"), before);
}

#[test]
fn an_unfinished_model_leaves_nothing_behind() {
    let folder = TempDir::new().expect("a temporary folder");
    let config = LlamaConfig::from(DecoderConfig::new(16, 4));
    let stage = config.init_stage(0..2, 1, Device::flex()).expect("the range is valid");
    let other = config.init_stage(2..4, 1, Device::flex()).expect("the range is valid");
    let specs: Vec<_> = [&stage, &other].into_iter().flat_map(parameter_specs).collect();

    let dir = folder.path().join("model");
    let mut writer = hf::Writer::create(&dir, &config, specs.clone(), u64::MAX).expect("it starts");
    writer.write_stage(&stage).expect("it is written");
    let again = writer.write("model.embed_tokens.weight", &[0.0; 16 * 64]).expect_err("it exists already");
    assert_eq!(
        again.to_string(),
        "tensor `model.embed_tokens.weight` was not announced, or is written already"
    );
    let short = writer.write("model.norm.weight", &[0.0]).expect_err("it is too short");
    assert_eq!(short.to_string(), "tensor `model.norm.weight` was announced with 64 elements, 1 were given");
    let error = writer.finish().expect_err("it is not complete");
    assert_eq!(error.to_string(), "tensor `lm_head.weight` was announced and not written");
    assert_eq!(fs::read_dir(folder.path()).expect("it is there").count(), 0);

    let twice = hf::save(&dir, &config, &[&stage, &stage]).expect_err("the same layers");
    assert!(twice.to_string().contains("belongs to two stages"), "{twice}");
}
