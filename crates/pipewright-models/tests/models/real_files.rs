//! Model directories as they are found in practice: other names, several files, other formats, and weights
//! that contradict their configuration.

use std::fs;
use std::path::{Path, PathBuf};

use burn::tensor::Device;
use pipewright::train::data::Tokenizer;
use pipewright_models::decoder::DecoderConfig;
use pipewright_models::hf::{self, WeightType, WeightTypes};
use pipewright_models::llama::LlamaConfig;
use pipewright_models::qwen3::Qwen3Config;
use pipewright_models::{ModelConfig, ModelError, ModelFamily, parameter_specs};
use safetensors::{Dtype, SafeTensors};
use serde_json::{Value, json};
use tempfile::TempDir;

use super::model_copy::{Copy, Stored};

const LLAMA: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/llama-tiny");
const QWEN3: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/qwen3-tiny");
const DEEPSEEK: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/deepseek-v3-tiny");
const TIED: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/llama-tied-tiny");

/// Returns the values of all parameters of a Llama.
fn values(copy: &Copy) -> Result<Vec<f32>, String> {
    let Ok(ModelConfig::Llama(config)) = ModelConfig::read(copy.dir()) else { panic!("it is a Llama") };
    let stage = hf::load_stage(copy.dir(), &config, 0..config.layers(), Device::flex());
    let stage = stage.map_err(|error| error.to_string())?;
    let mut values = Vec::new();
    struct Collect<'a>(&'a mut Vec<f32>);
    impl burn::module::ModuleVisitor for Collect<'_> {
        fn visit_float<const D: usize>(&mut self, param: &burn::module::Param<burn::tensor::Tensor<D>>) {
            self.0.extend(param.val().into_data().iter::<f32>());
        }
    }
    burn::module::Module::visit(&stage, &mut Collect(&mut values));
    Ok(values)
}

#[test]
fn names_without_the_prefix_of_the_model_are_read() {
    let copy = Copy::of(LLAMA);
    let expected = values(&copy).expect("it loads");
    copy.edit(|tensors| {
        for (name, ..) in tensors {
            *name = name.strip_prefix("model.").unwrap_or(name).to_owned();
        }
    });
    assert_eq!(copy.check(), Ok(Vec::new()));
    assert!(values(&copy) == Ok(expected));
}

#[test]
fn several_files_need_no_index_if_they_are_complete() {
    let copy = Copy::of(LLAMA);
    let expected = values(&copy).expect("it loads");
    let tensors = copy.tensors();
    for (index, part) in (1..).zip(tensors.chunks(tensors.len().div_ceil(3))) {
        copy.store(&format!("model-{index:05}-of-00003.safetensors"), part);
    }
    fs::remove_file(copy.path("model.safetensors")).expect("it is there");
    assert_eq!(copy.check(), Ok(Vec::new()));
    assert!(values(&copy) == Ok(expected));
    fs::remove_file(copy.path("model-00002-of-00003.safetensors")).expect("it is there");
    copy.check_refused(&["DIR: 1 of the model's files are missing: model-00002-of-00003.safetensors"]);
}

#[test]
fn tensors_that_the_model_does_not_use_are_named() {
    let copy = Copy::of(LLAMA);
    let extra = |name: &str| (name.to_owned(), Dtype::F32, vec![1], vec![0; 4]);
    copy.edit(|tensors| {
        tensors.push(extra("model.layers.0.self_attn.rotary_emb.inv_freq"));
        tensors.push(extra("visual.patch.weight"));
    });
    assert_eq!(copy.check(), Ok(vec!["visual.patch.weight".to_owned()]));

    let relabelled = Copy::of(QWEN3);
    relabelled.configure(&json!({"model_type": "llama"}));
    relabelled.check_refused(&["`architectures = Qwen3ForCausalLM`"]);
    relabelled.configure(&json!({"architectures": ["LlamaForCausalLM"]}));
    let unused = relabelled.check().expect("Llama needs no other tensors");
    assert_eq!((unused.len(), unused[0].as_str()), (16, "model.layers.0.self_attn.k_norm.weight"));
}

#[test]
fn files_with_more_layers_than_the_configuration_are_refused() {
    let copy = Copy::of(LLAMA);
    copy.configure(&json!({"num_hidden_layers": 5}));
    let message = "DIR/model.safetensors: the files have 8 layers, and the configuration asks for 5";
    copy.check_refused(&[message]);
    assert!(values(&copy).expect_err("the same without the check").contains("the files have 8 layers"));
}

#[test]
fn modules_that_predict_further_tokens_are_not_further_layers() {
    let copy = Copy::of(DEEPSEEK);
    let extra = |name: &str| (format!("model.layers.3.{name}"), Dtype::F32, vec![1], vec![0; 4]);
    copy.edit(|tensors| tensors.extend(["mlp.gate.weight", "eh_proj.weight"].map(extra)));
    let names = ["eh_proj.weight", "mlp.gate.weight"].map(|name| format!("model.layers.3.{name}"));
    assert_eq!(copy.check(), Ok(names.into()));
    copy.edit(|tensors| tensors.retain(|(name, ..)| !name.ends_with("eh_proj.weight")));
    copy.check_refused(&["the files have 4 layers, and the configuration asks for 3"]);
}

#[test]
fn a_tied_model_with_another_head_in_the_file_is_refused() {
    let copy = Copy::of(TIED);
    let table = |tensors: &[Stored]| {
        let found = tensors.iter().find(|(name, ..)| name == "model.embed_tokens.weight");
        found.cloned().expect("it has embeddings")
    };
    copy.edit(|tensors| {
        let (_, dtype, shape, bytes) = table(tensors);
        tensors.push(("lm_head.weight".to_owned(), dtype, shape, bytes));
    });
    assert_eq!(copy.check(), Ok(Vec::new()), "an equal one is the same");
    assert!(values(&copy).is_ok());
    copy.edit(|tensors| {
        let head = tensors.iter_mut().find(|(name, ..)| name == "lm_head.weight").expect("it was added");
        *head.3.last_mut().expect("it has values") ^= 0x40;
    });
    copy.check_refused(&[
        "tensor `lm_head.weight` differs from `model.embed_tokens.weight`",
        "set it to false",
    ]);
    assert!(values(&copy).is_err());
    copy.configure(&json!({"tie_word_embeddings": false}));
    assert_eq!(copy.check(), Ok(Vec::new()));
}

#[test]
fn a_value_that_is_not_finite_is_named_with_its_tensor_and_file() {
    for (value, shown) in [(f32::NAN, "NaN"), (f32::INFINITY, "inf")] {
        let copy = Copy::of(LLAMA);
        copy.edit(|tensors| {
            let norm = tensors.iter_mut().find(|(name, ..)| name == "model.norm.weight").expect("it has one");
            norm.3[8..12].copy_from_slice(&value.to_le_bytes());
        });
        let error = values(&copy).expect_err("it is refused");
        let expected = format!("model.safetensors: tensor `model.norm.weight` has the value {shown}");
        assert!(error.contains(&expected), "{error}");
    }
}

#[test]
fn pointers_of_git_lfs_are_named() {
    let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4000\n";
    for name in ["model.safetensors", "config.json"] {
        let copy = Copy::of(LLAMA);
        copy.write(name, pointer);
        copy.check_refused(&[&format!("DIR/{name}: this is a Git LFS pointer"), "git lfs pull"]);
    }
}

#[test]
fn other_forms_of_a_model_have_their_own_sentence() {
    let check = |files: &[(&str, &str)], parts: &[&str]| {
        let copy = Copy::of(LLAMA);
        fs::remove_file(copy.path("model.safetensors")).expect("it is there");
        for (name, content) in files {
            match *content {
                "" => fs::remove_file(copy.path(name)).expect("it is there"),
                content => copy.write(name, content),
            }
        }
        copy.check_refused(parts);
        assert!(!hf::is_config_alone(copy.dir()), "{parts:?}");
    };
    check(&[("pytorch_model.bin", "PK")], &["Python pickle (`pytorch_model.bin`)", "save_pretrained"]);
    check(&[("consolidated.safetensors", "x")], &["consolidated"]);
    check(&[("consolidated.00.pth", "x")], &["consolidated"]);
    check(&[("tf_model.h5", "x")], &["another library (`tf_model.h5`)"]);
    check(&[("model.onnx", "x")], &["another library (`model.onnx`)"]);
    check(&[("optimizer.pt", "x"), ("pytorch_model.bin", "PK")], &["Python pickle (`pytorch_model.bin`)"]);
    check(&[("llama-q4.gguf", "GGUF")], &["llama-q4.gguf: the file has 4 bytes, and its header is longer"]);
    check(&[("llama-q4.gguf", "GGUF"), ("config.json", "")], &["its header is longer"]);
    let adapter = r#"{"base_model_name_or_path": "meta-llama/Llama-3.2-1B"}"#;
    let parts = ["PEFT adapter", "`meta-llama/Llama-3.2-1B`", "merge_and_unload"];
    check(
        &[("adapter_config.json", adapter), ("adapter_model.safetensors", "x"), ("config.json", "")],
        &parts,
    );
    check(&[("adapter_config.json", adapter), ("adapter_model.safetensors", "x")], &parts);
}

#[test]
fn quantised_weights_are_refused_with_what_transformers_can_do() {
    for (settings, method, advice) in [
        (
            json!({"quant_method": "fp8"}),
            "fp8",
            "`quantization_config=FineGrainedFP8Config(dequantize=True)`",
        ),
        (json!({"quant_method": "gptq", "bits": 4}), "gptq", "transformers cannot undo this quantisation"),
        (json!({"quant_method": "awq", "bits": 4}), "awq", "transformers cannot undo this quantisation"),
        (json!({"load_in_8bit": true}), "bitsandbytes", "`model.dequantize()` and `save_pretrained`"),
        (json!({"bits": 4}), "no method is named", "use the model from which the quantised one was made"),
    ] {
        let copy = Copy::of(LLAMA);
        copy.configure(&json!({"quantization_config": settings}));
        copy.check_refused(&["config.json:", &format!("quantised ({method})"), advice]);
    }
    // The configuration may not say so: older files of GPTQ and AWQ have one of their own.
    let proj = "model.layers.1.self_attn.q_proj";
    for (companion, has_matrix) in [
        ("qweight", false),
        ("weight_packed", false),
        ("weight_blocks", false),
        ("weight.absmax", true),
        ("SCB", true),
        ("weight_scale_inv", true),
        ("weight_scale", true),
    ] {
        let copy = Copy::of(LLAMA);
        let found = format!("{proj}.{companion}");
        copy.edit(|tensors| {
            let matrix = format!("{proj}.weight");
            let index = tensors.iter().position(|(name, ..)| *name == matrix).expect("it has one");
            let (_, dtype, shape, bytes) = tensors[index].clone();
            if !has_matrix {
                tensors.remove(index);
            }
            tensors.push((found.clone(), dtype, shape, bytes));
        });
        let expected = format!("tensor `{proj}.weight` is quantised, because there is `{found}` too");
        copy.check_refused(&["model.safetensors:", &expected, "use the model from which"]);
        assert!(values(&copy).expect_err("it is refused").contains(&expected));
    }
}

#[test]
fn paths_that_are_no_folder_of_a_model() {
    let check = |path: &Path, part: &str| {
        let error = ModelConfig::read(path).expect_err("there is no model").to_string();
        assert!(error.contains(part), "{error}");
    };
    check(Path::new("/nowhere/meta-llama/Llama-3.2-1B"), "hf download meta-llama/Llama-3.2-1B --local-dir");
    let folder = TempDir::new().expect("a temporary folder");
    check(folder.path(), "the folder has no `config.json`");
    for (name, part) in
        [("m.gguf", "its header is longer"), ("m.safetensors", "name its folder"), ("m.bin", "Python pickle")]
    {
        fs::write(folder.path().join(name), "x").expect("it is writable");
        check(&folder.path().join(name), part);
    }
}

#[test]
fn a_cache_folder_leads_to_its_snapshot() {
    let cache = TempDir::new().expect("a temporary folder");
    let repository = cache.path().join("models--meta-llama--Llama-3.2-1B");
    let add = |snapshot: &str| {
        let dir = repository.join("snapshots").join(snapshot);
        fs::create_dir_all(&dir).expect("a folder");
        for name in ["config.json", "model.safetensors"] {
            fs::copy(Path::new(LLAMA).join(name), dir.join(name)).expect("the file can be read");
        }
        dir
    };
    let first = add("0a1b");
    assert_eq!(hf::resolve(&repository).ok(), Some(first));
    assert_eq!(ModelConfig::read(&repository).ok(), ModelConfig::read(Path::new(LLAMA)).ok());
    let second = add("2c3d");
    let error = hf::resolve(&repository).expect_err("two of them").to_string();
    assert!(error.contains("has 2 snapshots"), "{error}");
    fs::create_dir_all(repository.join("refs")).expect("a folder");
    fs::write(repository.join("refs/main"), "2c3d\n").expect("it is writable");
    assert_eq!(hf::resolve(&repository).ok(), Some(second));
    assert_eq!(hf::resolve(Path::new(LLAMA)).ok(), Some(PathBuf::from(LLAMA)));
}

#[test]
fn a_configuration_alone_is_recognised() {
    let copy = Copy::of(LLAMA);
    assert!(!hf::is_config_alone(copy.dir()));
    let config = copy.path("config.json");
    assert!(!hf::is_config_alone(&config));
    assert_eq!(hf::resolve(&config).ok().as_deref(), Some(copy.dir()), "the weights are in its folder");
    for name in ["optimizer.pt", "scheduler.pt", "rng_state.pth", "rng_state_0.pth", "training_args.bin"] {
        copy.write(name, "x");
    }
    fs::remove_file(copy.path("model.safetensors")).expect("it is there");
    assert!(hf::is_config_alone(copy.dir()));
    assert!(hf::is_config_alone(&config));
    assert_eq!(hf::resolve(&config).ok(), Some(config));
    assert!(ModelConfig::read(&copy.path("config.json")).is_ok());
}

#[test]
fn unknown_keys_are_listed() {
    let copy = Copy::of(LLAMA);
    copy.configure(&json!({"my_note": "x", "other": 3, "nothing": null, "_private": 1, "off": false, "none": 0, "empty": []}));
    assert_eq!(
        ModelConfig::unknown_keys(copy.dir()).ok(),
        Some(vec!["my_note".to_owned(), "other".to_owned()])
    );
}

/// A run trains without dropout, and nothing else depends on it. The library refuses it elsewhere.
#[test]
fn a_published_file_is_read_without_its_dropout() {
    const GPT2: &str = "tests/data/gpt2-tiny";
    let check = |name: &str, change: Value, expected: &[&str]| {
        let copy = Copy::of(name);
        let plain = ModelConfig::read(copy.dir()).expect("it has no dropout");
        copy.configure(&change);
        assert_eq!(ModelConfig::read(copy.dir()).ok(), Some(plain), "{change}");
        let keys = ModelConfig::dropout_keys(copy.dir()).expect("the file can be read");
        assert_eq!(keys, expected, "{change}");
    };
    check(LLAMA, json!({"attention_dropout": 0.0, "classifier_dropout": 0.1}), &[]);
    check(
        LLAMA,
        json!({"attention_dropout": 0.1, "hidden_dropout_prob": 0.5}),
        &["attention_dropout", "hidden_dropout_prob"],
    );
    let published =
        json!({"attn_pdrop": 0.1, "embd_pdrop": 0.1, "resid_pdrop": 0.1, "summary_first_dropout": 0.1});
    check(GPT2, published, &["attn_pdrop", "embd_pdrop", "resid_pdrop"]);
    // transformers assumes 0.1 for a key that is absent.
    let copy = Copy::of(GPT2);
    let text = fs::read_to_string(copy.path("config.json")).expect("the file can be read");
    copy.write("config.json", text.replace("embd_pdrop", "embd_note"));
    assert_eq!(ModelConfig::dropout_keys(copy.dir()).ok(), Some(vec!["embd_pdrop".to_owned()]));
    assert!(ModelConfig::read(copy.dir()).is_ok());
    // A share of all elements is a mistake.
    copy.configure(&json!({"embd_pdrop": 1.0}));
    let error = ModelConfig::read(copy.dir()).expect_err("nothing is left");
    let reason = std::error::Error::source(&error).expect("a reason").to_string();
    assert!(reason.contains("`embd_pdrop = 1.0` is not supported"), "{reason}");
}

#[test]
fn a_byte_order_mark_is_skipped() {
    let copy = Copy::of(LLAMA);
    let text = fs::read_to_string(copy.path("config.json")).expect("the file can be read");
    copy.write("config.json", format!("\u{feff}{text}"));
    assert_eq!(copy.check(), Ok(Vec::new()));
    let tokens = json!({"added_tokens": [{"id": 7, "content": "<s>"}]});
    copy.write("tokenizer.json", format!("\u{feff}{tokens}"));
    copy.write("tokenizer_config.json", format!("\u{feff}{}", json!({"bos_token": "<s>"})));
    assert_eq!(hf::text_ends(&Tokenizer::File(copy.path("tokenizer.json"))).bos, Some(7));
}

/// The tokenizer's own end is the one that completions end with.
#[test]
fn texts_end_with_the_tokens_of_the_model_and_of_the_tokenizer() {
    let copy = Copy::of(LLAMA);
    copy.configure(&json!({"eos_token_id": [5, 3]}));
    let tokens = json!({"added_tokens": [{"id": 7, "content": "</s>"}, {"id": 3, "content": "<|end|>"}]});
    copy.write("tokenizer.json", tokens.to_string());
    assert_eq!(hf::end_tokens(copy.dir(), None).ok(), Some(vec![3, 5]));
    assert_eq!(hf::text_ends(&Tokenizer::File(copy.path("tokenizer.json"))).eos, Some(3));
    copy.write("special_tokens_map.json", json!({"eos_token": "</s>"}).to_string());
    assert_eq!(hf::end_tokens(copy.dir(), None).ok(), Some(vec![3, 5, 7]));
}

/// Keys that a file leaves out have the values that transformers assumes.
#[test]
fn absent_keys_have_the_defaults_of_transformers() {
    let copy = Copy::of(QWEN3);
    copy.write(
        "config.json",
        json!({"model_type": "qwen3", "vocab_size": 64, "hidden_size": 64, "intermediate_size": 8, "num_hidden_layers": 1,
            "num_attention_heads": 32})
        .to_string(),
    );
    let Ok(ModelConfig::Qwen3(config)) = ModelConfig::read(copy.dir()) else { panic!("it is a Qwen3") };
    assert_eq!((config.decoder.head_dim(), config.decoder.num_key_value_heads), (128, 32));
    // A model from sizes has the usual width, and its file says so.
    let fresh = Qwen3Config::from(DecoderConfig::new(16, 4));
    let stage = fresh.init_stage(0..4, 1, Device::flex()).expect("it has four layers");
    let dir = copy.path("fresh");
    hf::save(&dir, &fresh, &[&stage]).expect("it is written");
    let written: Value =
        serde_json::from_slice(&fs::read(dir.join("config.json")).expect("a file")).expect("JSON");
    assert_eq!(written["head_dim"], 16);
}

/// Writes a small model with this value in every place, in a type.
fn write_in(kind: WeightType, value: f32) -> Result<(TempDir, Value), ModelError> {
    let folder = TempDir::new().expect("a temporary folder");
    let config = LlamaConfig::from(DecoderConfig::new(16, 4));
    let stage = config.init_stage(0..1, 1, Device::flex()).expect("it has four layers");
    let dir = folder.path().join("m");
    let mut writer =
        hf::Writer::create_as(&dir, &config, parameter_specs(&stage), &WeightTypes::all(kind), u64::MAX)?;
    writer.write("model.embed_tokens.weight", &[value; 16 * 64])?;
    writer.finish()?;
    let json = fs::read(dir.join("config.json")).expect("a file");
    Ok((folder, serde_json::from_slice(&json).expect("JSON")))
}

#[test]
fn models_are_written_in_other_element_types() {
    for kind in WeightType::ALL {
        let (folder, json) = write_in(kind, 1.5).expect("it is written");
        assert_eq!((&json["dtype"], &json["torch_dtype"]), (&json!(kind.name()), &json!(kind.name())));
        let bytes = fs::read(folder.path().join("m/model.safetensors")).expect("a file");
        let file = SafeTensors::deserialize(&bytes).expect("it is sound");
        let width = if kind == WeightType::Float32 { 4 } else { 2 };
        assert_eq!(
            file.tensor("model.embed_tokens.weight").expect("it has one").data().len(),
            16 * 64 * width
        );
    }
    let error = write_in(WeightType::Float16, 1e6).expect_err("too large").to_string();
    assert!(
        error.contains("`model.embed_tokens.weight` has values that are too large for float16"),
        "{error}"
    );
}
