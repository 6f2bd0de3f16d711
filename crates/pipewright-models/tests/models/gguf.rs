//! Models in GGUF: what is written and read again, and files that were changed or cut short.

use std::fs;
use std::path::{Path, PathBuf};

use burn::tensor::{Device, Int, Tensor, TensorData, bf16};
use pipewright::tensor::{pack, unpack};
use pipewright_models::hf::{GgufForm, WeightType};
use pipewright_models::{ModelConfig, ModelError, ModelSource, hf};
use pipewright_schedule::error_text::with_causes;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::model_copy::Copy;

const GGUF: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/llama-gguf/tiny.gguf");

fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name)
}

/// Writes a model in a form, and returns the file.
fn write(from: &Path, form: GgufForm, folder: &TempDir) -> PathBuf {
    let config = ModelConfig::read(from).expect("a model");
    let out = folder.path().join(format!("{}.gguf", form.name()));
    hf::quantise_gguf(from, &*config, form, &out).expect("it is written").path
}

/// Parameters with their names.
type Parameters = Vec<(String, Vec<f32>)>;

/// Returns the parameters of a model, and its configuration.
fn parameters(path: &Path) -> Result<(Value, Parameters), String> {
    let error = |error: ModelError| with_causes(&error);
    let config = ModelConfig::read(path).map_err(error)?;
    let specs = config.parameters().map_err(error)?;
    hf::check_weights(path, &specs).map_err(error)?;
    let stage = hf::load_stage(path, &*config, 0..config.layers(), Device::flex()).map_err(error)?;
    let folder = TempDir::new().expect("a folder");
    let dir = folder.path().join("written");
    hf::save(&dir, &*config, &[&stage]).map_err(error)?;
    let bytes = fs::read(dir.join("model.safetensors")).expect("weights");
    let file = safetensors::SafeTensors::deserialize(&bytes).expect("it is sound");
    let floats = |bytes: &[u8]| bytes.as_chunks().0.iter().copied().map(f32::from_le_bytes).collect();
    let tensors = file.tensors().into_iter().map(|(name, view)| (name, floats(view.data())));
    let mut tensors: Parameters = tensors.collect();
    tensors.sort_by(|(one, _), (other, _)| one.cmp(other));
    let mut config = config.to_json();
    // Models here have no windows in all forms of these keys, and the usual width of heads may be left out.
    for key in [
        "max_position_embeddings",
        "initializer_range",
        "head_dim",
        "sliding_window",
        "layer_types",
        "max_window_layers",
    ] {
        config.as_object_mut().expect("a table").remove(key);
    }
    Ok((config, tensors))
}

#[test]
fn families_in_gguf_are_the_models_that_were_written() {
    let families =
        ["llama-tiny", "llama-tied-tiny", "llama31-tiny", "qwen2-tiny", "qwen3-tiny", "qwen3-moe-tiny"];
    for family in families {
        let folder = TempDir::new().expect("a folder");
        let from = data(family);
        let form = GgufForm::Plain(WeightType::Float32);
        let config = ModelConfig::read(&from).expect("a model");
        let written = match hf::quantise_gguf(&from, &*config, form, &folder.path().join("out")) {
            Ok(written) => written,
            Err(error) => {
                // Positions of another length than Llama's, and experts in some layers, have no form in GGUF.
                assert!(
                    ["llama31-tiny", "qwen3-moe-tiny"].contains(&family),
                    "{family}: {}",
                    with_causes(&error)
                );
                continue;
            }
        };
        assert_eq!(written.path, folder.path().join("out/model.gguf"));
        let (found, expected) =
            (parameters(&written.path).expect("it is read"), parameters(&from).expect("a model"));
        assert_eq!(found.0, expected.0, "{family}");
        assert!(found.1 == expected.1, "{family}");
        // The folder is the model too.
        assert!(parameters(&folder.path().join("out")).expect("it is read") == found, "{family}");
    }
}

/// The norms of Gemma have 1 added in GGUF. Its metadata do not say the scale of the scores of these tiny models.
#[test]
fn the_weights_of_gemma_are_those_of_the_folder() {
    for family in ["gemma2-tiny", "gemma3-tiny"] {
        let (config, found) = parameters(&data(&format!("{family}.gguf"))).expect("it is read");
        let (_, expected) = parameters(&data(family)).expect("a model");
        assert_eq!(config["query_pre_attn_scalar"].as_f64(), Some(8.0));
        assert_eq!(found.len(), expected.len());
        for ((name, found), (expected_name, expected)) in found.iter().zip(&expected) {
            let is_close = found.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-6);
            assert!(name == expected_name && found.len() == expected.len() && is_close, "{family}: {name}");
        }
    }
}

#[test]
fn eight_and_four_bits_are_close_to_the_model() {
    let folder = TempDir::new().expect("a folder");
    let (_, expected) = parameters(&data("llama-tiny")).expect("a model");
    for (form, bound) in [(GgufForm::Q8_0, 0.01), (GgufForm::Q4K, 0.01)] {
        // The rows of the tiny model are shorter than 256 elements.
        let file = write(&data("llama-tiny"), form, &folder);
        let (_, found) = parameters(&file).expect("it is read");
        let error = |tensor: &(String, Vec<f32>), other: &(String, Vec<f32>)| {
            let squares = tensor.1.iter().zip(&other.1).map(|(a, b)| (a - b).powi(2)).sum::<f32>();
            (squares / tensor.1.iter().map(|a| a * a).sum::<f32>()).sqrt()
        };
        for (tensor, other) in expected.iter().zip(&found) {
            assert!(tensor.0 == other.0 && error(tensor, other) < bound, "{}", tensor.0);
        }
    }
    // A model whose rows are whole blocks: what is decoded is quantised again.
    let decoded = folder.path().join("decoded");
    let config = ModelConfig::read(Path::new(GGUF)).expect("a model");
    let stage = hf::load_stage(Path::new(GGUF), &*config, 0..config.layers(), Device::flex());
    hf::save(&decoded, &*config, &[&stage.expect("it loads")]).expect("it is written");
    let written =
        hf::quantise_gguf(&decoded, &*config, GgufForm::Q4K, &folder.path().join("four")).expect("written");
    // Of each layer, the outputs and the last matrix have shorter rows.
    assert_eq!((written.quantised.matrices, written.others), (30, 8));
    assert!(written.quantised.error > 0.01 && written.quantised.error < 0.09, "{}", written.quantised.error);
    assert!(written.quantised.after < written.quantised.before / 4);
    let specs = config.parameters().expect("layers");
    let sizes = hf::quantised_sizes(&written.path, &specs).expect("it is read");
    assert!(!sizes.is_empty());
    let error = hf::quantise_gguf(&written.path, &*config, GgufForm::Q8_0, &folder.path().join("again"));
    assert!(error.expect_err("it is quantised").to_string().contains("quantised already"));
}

/// Returns the logits of a row.
fn logits(path: &Path) -> Vec<f32> {
    let config = ModelConfig::read(path).expect("a model");
    let stage = config.whole(ModelSource::Directory(path), &Device::flex()).expect("it loads");
    let length = config.positions().unwrap_or(64) as i32;
    let ids: Vec<i32> = (0..length).map(|index| index * 37 % 48).collect();
    let ids = Tensor::<2, Int>::from_data(TensorData::new(ids, [1, length as usize]), &Device::flex());
    let logits: Tensor<3> = unpack(stage.compute(pack(ids)).expect("ids")).expect("logits");
    logits.into_data().iter().collect()
}

/// Writes the decoded model of a path into a folder.
fn decoded(path: &Path, dir: &Path) {
    let config = ModelConfig::read(path).expect("a model");
    let stage = hf::load_stage(path, &*config, 0..config.layers(), Device::flex()).expect("it loads");
    hf::save(dir, &*config, &[&stage]).expect("it is written");
}

#[test]
fn a_model_in_gguf_generates_with_the_bits_of_the_decoded_one() {
    for path in [PathBuf::from(GGUF), data("gpt2-gguf/tiny.gguf")] {
        let folder = TempDir::new().expect("a folder");
        let dir = folder.path().join("decoded");
        decoded(&path, &dir);
        assert!(logits(&path) == logits(&dir));
    }
}

/// Returns a copy of a model with changes of its configuration, with its head tied to its table if the copy says so.
fn changed(name: &str, changes: &Value) -> Copy {
    let copy = Copy::of(&data(name).display().to_string());
    copy.configure(changes);
    if changes["tie_word_embeddings"] == true {
        copy.edit(|tensors| tensors.retain(|(name, ..)| name != "lm_head.weight"));
    }
    copy
}

/// Returns the changes that make the tiny models such that files in GGUF can describe them.
fn described(name: &str) -> Value {
    match name {
        "gemma2-tiny" => json!({"query_pre_attn_scalar": 8, "tie_word_embeddings": true}),
        "gemma3-tiny" => json!({
            "query_pre_attn_scalar": 8, "layer_types": vec!["sliding_attention"; 3],
            "rope_parameters": {
                "full_attention": {"factor": 4.0, "rope_theta": 1000.0, "rope_type": "linear"},
                "sliding_attention": {"rope_theta": 10_000.0, "rope_type": "default"},
            },
        }),
        "phi3-tiny" => json!({
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.5},
        }),
        _ => json!({}),
    }
}

#[test]
fn gemma_phi_and_gpt2_are_written_and_read_again() {
    let families = ["gemma2-tiny", "gemma3-tiny", "phi3-tiny", "gpt2-tiny"];
    for family in families {
        let (folder, from) = (TempDir::new().expect("a folder"), changed(family, &described(family)));
        let file = write(from.dir(), GgufForm::Plain(WeightType::Float32), &folder);
        let [mut found, mut expected] = [&*file, from.dir()].map(|path| parameters(path).expect("a model"));
        for (config, _) in [&mut found, &mut expected] {
            // A window of Gemma is in each file, and this is said in another way.
            config.as_object_mut().expect("a table").remove("sliding_window_pattern");
        }
        assert_eq!(found.0, expected.0, "{family}");
        assert_eq!(found.1.len(), expected.1.len());
        for ((name, found), (expected_name, expected)) in found.1.iter().zip(&expected.1) {
            // A norm of Gemma has lost its last bits where 1 was added.
            let is_close = found.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-7);
            assert!(name == expected_name && found.len() == expected.len() && is_close, "{family}: {name}");
        }
        let (found, expected) = (logits(&file), logits(from.dir()));
        assert!(found.iter().zip(&expected).all(|(a, b)| (a - b).abs() < 1e-5), "{family}");
        // Some matrices of the tiny models have rows of 16 elements, which no block of 32 divides.
        let file = write(from.dir(), GgufForm::Q8_0, &folder);
        assert!(logits(&file).iter().all(|logit| logit.is_finite()), "{family}");
    }
    // The converter of llama.cpp writes the same tensors.
    let (found, expected) = (parameters(&data("gpt2-tiny.gguf")), parameters(&data("gpt2-tiny")));
    assert!(found.expect("it is read") == expected.expect("a model"));
}

#[test]
fn what_gguf_does_not_say_of_gemma_and_gpt2_is_refused() {
    let check = |name: &str, changes: Value, part: &str| {
        let mut all = described(name);
        all.as_object_mut().expect("a table").extend(changes.as_object().expect("a table").clone());
        let (folder, from) = (TempDir::new().expect("a folder"), changed(name, &all));
        let config = ModelConfig::read(from.dir()).expect("a model");
        let form = GgufForm::Plain(WeightType::Float32);
        let error =
            hf::quantise_gguf(from.dir(), &*config, form, &folder.path().join("out")).expect_err("refused");
        assert!(error.to_string().contains(part), "{error}");
    };
    for name in ["gemma2-tiny", "gemma3-tiny"] {
        check(name, json!({"query_pre_attn_scalar": 12}), "this `query_pre_attn_scalar`");
        check(name, json!({"layer_types": vec!["full_attention"; 3]}), "these `layer_types`");
        check(name, json!({"sliding_window": null}), "no `sliding_window`");
    }
    check("gemma2-tiny", json!({"attn_logit_softcapping": null}), "without a bound");
    check("gemma2-tiny", json!({"tie_word_embeddings": false}), "a head that is not tied");
    let local = json!({
        "rope_theta": 1000.0, "rope_local_base_freq": 500.0, "rope_parameters": null,
    });
    check("gemma3-tiny", local, "this `rope_local_base_freq`");
    check("gpt2-tiny", json!({"scale_attn_weights": false}), "`scale_attn_weights = false`");
    check("gpt2-tiny", json!({"scale_attn_by_inverse_layer_idx": true}), "`scale_attn_by_inverse_layer_idx`");
}

/// The matrices of a file are quantised from their decoded elements, and its other tensors are decoded.
#[test]
fn a_model_in_gguf_is_quantised_as_nf4() {
    for (path, matrices) in [
        (PathBuf::from(GGUF), 28),
        (data("gpt2-gguf/tiny.gguf"), 8),
        (data("gemma2-tiny.gguf"), 21),
        (data("gpt2-tiny.gguf"), 9),
    ] {
        let folder = TempDir::new().expect("a folder");
        let [plain, expected, found] = ["plain", "expected", "found"].map(|name| folder.path().join(name));
        decoded(&path, &plain);
        let config = ModelConfig::read(&path).expect("a model");
        let [of_plain, of_gguf] = [(&plain, &expected), (&path, &found)]
            .map(|(from, to)| hf::quantise(from, &*config, to).expect("it is written"));
        assert_eq!((of_gguf.matrices, of_gguf.error), (matrices, of_plain.error), "{}", path.display());
        let [found, expected] = [&found, &expected].map(|dir| parameters(dir).expect("a model"));
        assert_eq!(found.0, expected.0);
        for ((name, found), (expected_name, expected)) in found.1.iter().zip(&expected.1) {
            let is_table = ["model.embed_tokens.weight", "lm_head.weight"].contains(&name.as_str());
            let is_rounded = path == Path::new(GGUF) && is_table;
            let round = |value: &f32| if is_rounded { bf16::from_f32(*value).to_f32() } else { *value };
            assert!(
                name == expected_name && *found == expected.iter().map(round).collect::<Vec<_>>(),
                "{name}"
            );
        }
    }
}

/// Returns the place of bytes in a file.
fn place_of(file: &[u8], part: &[u8]) -> usize {
    file.windows(part.len()).position(|window| window == part).expect("the file has it")
}

#[test]
fn changed_files_are_refused_with_a_sentence() {
    let whole = fs::read(GGUF).expect("a file");
    let check = |change: &dyn Fn(&mut Vec<u8>), part: &str| {
        let folder = TempDir::new().expect("a folder");
        let path = folder.path().join("m.gguf");
        let mut bytes = whole.clone();
        change(&mut bytes);
        fs::write(&path, bytes).expect("it is writable");
        let error = parameters(&path).expect_err("it is refused");
        assert!(error.contains(part) && error.contains("m.gguf"), "{error}\nhas not: {part}");
    };
    let set = |place: usize, new: Vec<u8>| {
        move |bytes: &mut Vec<u8>| bytes[place..place + new.len()].copy_from_slice(&new)
    };
    check(&set(0, b"GGML".to_vec()), "does not begin with `GGUF`");
    check(&set(4, vec![1]), "version 1 of GGUF");
    check(&set(4, vec![0, 0, 0, 3]), "version 50331648 of GGUF");
    for length in [0, 3, 7, 20, 24, 31, 200, 2000] {
        check(&|bytes| bytes.truncate(length), "its header is longer");
    }
    check(&|bytes| bytes.truncate(bytes.len() - 100), "tensor `");
    check(&set(8, u64::MAX.to_le_bytes().to_vec()), "too many");
    check(&set(16, (1u64 << 40).to_le_bytes().to_vec()), "too many");
    check(&set(16, 9u64.to_le_bytes().to_vec()), "");
    // The length of the first key.
    check(&set(24, (1u64 << 40).to_le_bytes().to_vec()), "its header is longer");
    let embedding = place_of(&whole, b"token_embd.weight") + b"token_embd.weight".len();
    let sizes = embedding + 4;
    check(&set(embedding, vec![9]), "has 9 sizes");
    check(&set(sizes, (1u64 << 62).to_le_bytes().to_vec()), "not whole blocks");
    check(&set(sizes, 255u64.to_le_bytes().to_vec()), "not whole blocks");
    check(&set(sizes, 0u64.to_le_bytes().to_vec()), "not whole blocks");
    check(&set(sizes, 512u64.to_le_bytes().to_vec()), "have the same bytes");
    check(&set(sizes + 8, 40u64.to_le_bytes().to_vec()), "its shape is [48, 256], and [40, 256] is needed");
    check(&set(sizes + 16, vec![77]), "the element type 77");
    check(&set(sizes + 20, vec![1]), "from byte 1 of the tensors on");
    check(&set(sizes + 20, (u64::MAX - 31).to_le_bytes().to_vec()), "the file has");
    let name = place_of(&whole, b"blk.1.attn_q.weight");
    check(&set(name, b"blk.0".to_vec()), "exists twice");
    check(&set(name + b"blk.1.attn_q.weight".len() + 24, vec![0; 8]), "have the same bytes");
    check(&set(name, b"blk.9".to_vec()), "model.layers.1.self_attn.q_proj.weight` is missing");
    check(&set(name, vec![0xff]), "is not UTF-8");
    let heads = place_of(&whole, b"llama.attention.head_count_kv");
    check(&set(heads, b"llama.attention.head_countxkv".to_vec()), "");
    check(
        &set(place_of(&whole, b"llama.block_count"), b"llama.block_counx".to_vec()),
        "no numbers of layers",
    );
    check(
        &set(place_of(&whole, b"general.architecture") + 32, b"lambda".to_vec()[..5].to_vec()),
        "is not read from GGUF",
    );
}

#[test]
fn scales_that_are_not_finite_are_refused() {
    let whole = fs::read(GGUF).expect("a file");
    let gguf = pipewright_gguf::Gguf::open(Path::new(GGUF)).expect("it is sound");
    for (name, place) in
        [("token_embd.weight", 208), ("blk.0.attn_q.weight", 2), ("blk.0.attn_output.weight", 0)]
    {
        let start = gguf.tensor(name).expect("a tensor").start as usize + place;
        let folder = TempDir::new().expect("a folder");
        let path = folder.path().join("m.gguf");
        let mut bytes = whole.clone();
        bytes[start..start + 2].copy_from_slice(&[0, 0x7c]);
        fs::write(&path, bytes).expect("it is writable");
        let error = parameters(&path).expect_err("it is refused");
        assert!(error.contains("is not finite"), "{error}");
    }
}

#[test]
fn a_folder_with_several_models_is_refused() {
    let folder = TempDir::new().expect("a folder");
    for name in ["a.gguf", "b.gguf"] {
        fs::copy(GGUF, folder.path().join(name)).expect("a copy");
    }
    let error = parameters(folder.path()).expect_err("it is not clear");
    assert!(error.contains("GGUF files of several models"), "{error}");
    fs::remove_file(folder.path().join("b.gguf")).expect("a file");
    assert!(parameters(folder.path()).is_ok());
    // Parts of a model are read by their first one.
    fs::rename(folder.path().join("a.gguf"), folder.path().join("a-00001-of-00002.gguf")).expect("a name");
    let error = parameters(folder.path()).expect_err("a part is missing");
    assert!(error.contains("a-00002-of-00002.gguf"), "{error}");
}
