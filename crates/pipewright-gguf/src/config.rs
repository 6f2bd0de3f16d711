//! The `config.json` of a model in GGUF, and the metadata in GGUF of a `config.json`.

use std::f64::consts::TAU;

use pipewright_shapes::family;
use serde_json::{Map, Value, json};

use crate::container::Gguf;
use crate::error::GgufError;
use crate::names::{Architecture, OF_POSITIONS, architecture_of};
use crate::write::Entry;

/// Keys of the metadata, after the name of the architecture, with the keys of `config.json` that are the same numbers.
const COUNTS: [(&str, &str); 12] = [
    ("block_count", "num_hidden_layers"),
    ("context_length", "max_position_embeddings"),
    ("embedding_length", "hidden_size"),
    ("feed_forward_length", "intermediate_size"),
    ("attention.head_count", "num_attention_heads"),
    ("attention.head_count_kv", "num_key_value_heads"),
    ("attention.key_length", "head_dim"),
    ("attention.value_length", "head_dim"),
    ("attention.sliding_window", "sliding_window"),
    ("expert_count", "num_experts"),
    ("expert_used_count", "num_experts_per_tok"),
    ("expert_feed_forward_length", "moe_intermediate_size"),
];
/// The same for numbers that are not counts.
const NUMBERS: [(&str, &str); 5] = [
    ("attention.layer_norm_rms_epsilon", "rms_norm_eps"),
    ("attention.layer_norm_epsilon", "rms_norm_eps"),
    ("rope.freq_base", "rope_theta"),
    ("attn_logit_softcapping", "attn_logit_softcapping"),
    ("final_logit_softcapping", "final_logit_softcapping"),
];
/// The ids of special tokens.
const TOKENS: [(&str, &str); 3] = [
    ("tokenizer.ggml.bos_token_id", "bos_token_id"),
    ("tokenizer.ggml.eos_token_id", "eos_token_id"),
    ("tokenizer.ggml.padding_token_id", "pad_token_id"),
];
/// In Gemma 3, the layers whose number, counted from 1, is a multiple of this see all tokens.
const PATTERN: u64 = 6;
/// The base of the positions of its other layers.
const LOCAL_BASE: f64 = 10_000.0;
/// The positions of Llama 3.1 and later, whose factors a file has as a tensor.
const LLAMA3: [f64; 3] = [1.0, 4.0, 8192.0];

/// Returns the `config.json` of a model.
///
/// # Errors
/// When the architecture or its positions are not known, a number is missing, or the model has parts that no family has.
pub fn config_json(gguf: &Gguf) -> Result<Value, GgufError> {
    let known = Architecture::of(gguf)?;
    let fault = |fault: String| GgufError::at(&gguf.path, fault);
    let of_architecture = |key: &str| gguf.metadata.get(&format!("{}.{key}", known.name));
    let mut config = Map::new();
    config.insert("model_type".to_owned(), known.model_type.into());
    for (key, name) in COUNTS.into_iter().chain(NUMBERS) {
        // A window of 0 is none.
        let value = of_architecture(key).filter(|value| name != "sliding_window" || **value != 0);
        let Some(value) = value else { continue };
        let other = config.insert(name.to_owned(), value.clone());
        if !value.is_number() || other.is_some_and(|other| other != *value) {
            let key = format!("{}.{key}", known.name);
            return Err(fault(format!("`{key}` is not one number: models whose layers differ are not read")));
        }
    }
    let number =
        |config: &Map<String, Value>, key: &str| config.get(key).and_then(Value::as_u64).unwrap_or(0);
    let heads = number(&config, "num_attention_heads");
    if heads == 0 || number(&config, "hidden_size") == 0 || number(&config, "num_hidden_layers") == 0 {
        return Err(fault(format!(
            "the metadata has no numbers of layers, heads and features of `{}`: copy or download the file again",
            known.name
        )));
    }
    config.entry("num_key_value_heads").or_insert(heads.into());
    let width = number(&config, "hidden_size") / heads;
    let width = config.entry("head_dim").or_insert(width.into()).as_u64().unwrap_or(0);
    let rotated = of_architecture("rope.dimension_count").and_then(Value::as_u64).unwrap_or(width);
    if known.name != "phi3" && rotated != width {
        return Err(fault(format!(
            "{rotated} of {width} features of a head have positions, which is not read: use it as safetensors"
        )));
    }
    if known.name == "llama" && config.remove("num_experts").and_then(|count| count.as_u64()).unwrap_or(0) > 0
    {
        return Err(fault(
            "the model has experts under the name of llama, which is not read: use it as safetensors"
                .to_owned(),
        ));
    }
    let Some(table) = gguf.tensor("token_embd.weight") else {
        return Err(fault(
            "tensor `token_embd.weight` is missing: copy or download the file again".to_owned(),
        ));
    };
    config.insert("vocab_size".to_owned(), table.shape[0].into());
    config.insert("tie_word_embeddings".to_owned(), gguf.tensor("output.weight").is_none().into());
    for (key, name) in TOKENS {
        if let Some(id) = gguf.metadata.get(key).filter(|id| id.is_u64()) {
            config.insert(name.to_owned(), id.clone());
        }
    }
    match known.name {
        "llama" => {
            config.remove("num_experts_per_tok");
            // Other programs do not compute the windows of such a file.
            config.remove("sliding_window");
            for (key, tensor) in
                [("attention_bias", "blk.0.attn_q.bias"), ("mlp_bias", "blk.0.ffn_gate.bias")]
            {
                config.insert(key.to_owned(), gguf.tensor(tensor).is_some().into());
            }
        }
        "qwen3moe" => {
            config.insert("norm_topk_prob".to_owned(), true.into());
            config.insert("decoder_sparse_step".to_owned(), 1.into());
        }
        "gemma2" | "gemma3" => {
            let layers = number(&config, "num_hidden_layers");
            let scalar = score_scalar(known.name, layers, number(&config, "hidden_size") / heads, width);
            config.insert("query_pre_attn_scalar".to_owned(), scalar.into());
            if known.name == "gemma3" {
                config.insert("sliding_window_pattern".to_owned(), PATTERN.into());
                config.insert("rope_local_base_freq".to_owned(), LOCAL_BASE.into());
            }
        }
        "phi3" if rotated != width => {
            // Readers multiply by the width and drop what follows the point.
            let share = rotated as f64 / width.max(1) as f64;
            let is_less = ((width as f64 * share) as u64) < rotated;
            let share = if is_less { share.next_up() } else { share };
            config.insert("partial_rotary_factor".to_owned(), json!(share));
        }
        _ => {}
    }
    if let Some(scaling) = positions(gguf, known, &config)? {
        config.insert("rope_scaling".to_owned(), scaling);
    }
    if known.name == "gpt2" {
        config.retain(|key, _| !["head_dim", "num_key_value_heads"].contains(&key.as_str()));
        for (in_files, name) in family::GPT2.renamed {
            if let Some(value) = config.remove(*name) {
                config.insert((*in_files).to_owned(), value);
            }
        }
        // Readers assume dropout where a file does not say otherwise.
        for key in ["resid_pdrop", "embd_pdrop", "attn_pdrop"] {
            config.insert(key.to_owned(), 0.0.into());
        }
    }
    Ok(config.into())
}

/// Returns the number by whose root the scores of Gemma 2 and 3 are divided. Files do not say it: the largest models of both
/// families have the width of the hidden states for each head, and the others the width of a head.
fn score_scalar(architecture: &str, layers: u64, hidden: u64, width: u64) -> u64 {
    if [("gemma2", 46), ("gemma3", 62)].contains(&(architecture, layers)) { hidden } else { width }
}

/// Returns the scaling of the positions.
fn positions(
    gguf: &Gguf,
    known: &Architecture,
    config: &Map<String, Value>,
) -> Result<Option<Value>, GgufError> {
    let scaling = |key: &str| gguf.metadata.get(&format!("{}.rope.scaling.{key}", known.name));
    let fault =
        |fault: &str| Err(GgufError::at(&gguf.path, format!("{fault}: use the model as safetensors")));
    let [frequencies, longs, _] = OF_POSITIONS;
    if gguf.tensor(longs).is_some() {
        return fault("the positions have factors for long and short texts, which are not read from GGUF");
    }
    if let Some(factors) = gguf.numbers(frequencies)? {
        let largest = factors.iter().fold(1f32, |largest, factor| largest.max(*factor));
        let base = config.get("rope_theta").and_then(Value::as_f64).unwrap_or(10_000.0);
        let expected = llama3_factors(base, f64::from(largest), 2 * factors.len());
        let is_close = |(own, expected): (&f32, f32)| (own - expected).abs() <= 1e-4 * expected;
        if !factors.iter().zip(expected).all(is_close) {
            return fault(
                "the factors of the positions (`rope_freqs.weight`) are not the factors of Llama 3",
            );
        }
        let [low, high, length] = LLAMA3;
        return Ok(Some(json!({
            "rope_type": "llama3", "factor": largest, "low_freq_factor": low, "high_freq_factor": high,
            "original_max_position_embeddings": length as u64,
        })));
    }
    let factor = scaling("factor").and_then(Value::as_f64);
    Ok(match (scaling("type").and_then(Value::as_str), factor) {
        (None | Some("none"), _) => None,
        (Some("linear"), Some(factor)) => Some(json!({"rope_type": "linear", "factor": factor})),
        (Some("yarn"), Some(factor)) => {
            let mut yarn = json!({"rope_type": "yarn", "factor": factor});
            if let Some(length) = scaling("original_context_length") {
                yarn["original_max_position_embeddings"] = length.clone();
            }
            Some(yarn)
        }
        _ => return fault("the scaling of the positions is not known"),
    })
}

/// Returns the factors of Llama 3.1 for a head of this width: 1 for short waves, `factor` for long ones, and a
/// transition between them.
fn llama3_factors(base: f64, factor: f64, width: usize) -> Vec<f32> {
    let [low, high, length] = LLAMA3;
    let of_pair = |pair: usize| {
        let wave = TAU * libm::pow(base, 2.0 * pair as f64 / width as f64);
        if wave < length / high {
            1.0
        } else if wave > length / low {
            factor
        } else {
            let share = (length / wave - low) / (high - low);
            1.0 / ((1.0 - share) / factor + share)
        }
    };
    (0..width / 2).map(|pair| of_pair(pair) as f32).collect()
}

/// The contents of the header of a model in GGUF.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelMetadata {
    /// The name of the architecture.
    pub architecture: &'static str,
    /// The metadata.
    pub entries: Vec<(String, Entry)>,
    /// The factors of the positions, if they are a tensor.
    pub frequencies: Option<Vec<f32>>,
}

/// Returns the metadata of a model with this `config.json`.
///
/// # Errors
/// When GGUF has no such model, as a sentence.
pub fn metadata(config: &Value) -> Result<ModelMetadata, String> {
    let model_type = config["model_type"].as_str().unwrap_or_default();
    let config = &renamed(config, model_type);
    let refused =
        |what: &str| format!("models with {what} are not written as GGUF: write a Hugging Face directory");
    let Some(architecture) = architecture_of(model_type) else {
        return Err(refused(&format!("`model_type = {model_type:?}`")));
    };
    let is_set = |key: &str| !matches!(&config[key], Value::Null | Value::Bool(false));
    let is_windowed = is_set("use_sliding_window") || (model_type == "mistral" && is_set("sliding_window"));
    let has_dense_layers = config["mlp_only_layers"].as_array().is_some_and(|layers| !layers.is_empty())
        || config["decoder_sparse_step"].as_u64().is_some_and(|step| step != 1);
    let cases = [
        (is_windowed, "windows"),
        (has_dense_layers, "experts in some layers only"),
        (is_set("attention_bias") && architecture != "llama", "`attention_bias`"),
        (is_set("mlp_bias"), "`mlp_bias`"),
        (architecture == "qwen3moe" && config["norm_topk_prob"] == false, "`norm_topk_prob = false`"),
        (config["scale_attn_weights"] == false, "`scale_attn_weights = false`"),
        (is_set("scale_attn_by_inverse_layer_idx"), "`scale_attn_by_inverse_layer_idx`"),
    ];
    let is_gemma = architecture.starts_with("gemma");
    let of_gemma = is_gemma.then(|| fault_of_gemma(architecture, config)).flatten();
    let found = cases.into_iter().find(|(is_refused, _)| *is_refused).map(|(_, what)| what);
    if let Some(what) = found.or(of_gemma) {
        return Err(refused(what));
    }
    let tables = &config["rope_parameters"];
    // Gemma 3 has a table for each kind of layers.
    let parameters = tables.get("full_attention").unwrap_or(tables);
    let scaling = if parameters.is_object() { parameters } else { &config["rope_scaling"] };
    let base = parameters["rope_theta"].as_f64().or(config["rope_theta"].as_f64()).unwrap_or(10_000.0);
    let mut entries = vec![("general.architecture".to_owned(), Entry::Text(architecture.to_owned()))];
    let mut add = |key: &str, entry| entries.push((format!("{architecture}.{key}"), entry));
    for (key, name) in COUNTS {
        let has_windows = is_gemma || architecture == "phi3";
        let is_skipped = (name == "sliding_window" && !has_windows)
            || (name.contains("expert") && architecture != "qwen3moe");
        if let Some(count) =
            config[name].as_u64().and_then(|count| u32::try_from(count).ok()).filter(|_| !is_skipped)
        {
            add(key, Entry::U32(count));
        }
    }
    let is_gpt2 = architecture == "gpt2";
    for (key, name) in NUMBERS {
        if is_gpt2 != (key == "attention.layer_norm_epsilon") {
            continue;
        }
        let value = if name == "rope_theta" { Some(base) } else { config[name].as_f64() };
        if let Some(number) = value {
            add(key, Entry::F32(number as f32));
        }
    }
    let count = |key: &str| config[key].as_u64().unwrap_or(0);
    let width =
        config["head_dim"].as_u64().unwrap_or(count("hidden_size") / count("num_attention_heads").max(1));
    let share = parameters["partial_rotary_factor"].as_f64().unwrap_or(1.0);
    if !is_gpt2 {
        add("rope.dimension_count", Entry::U32((width as f64 * share) as u32));
    }
    if architecture == "phi3" {
        let length = config["original_max_position_embeddings"].as_u64();
        let length = length.unwrap_or(count("max_position_embeddings"));
        add("rope.scaling.original_context_length", Entry::U32(length as u32));
        if !is_set("sliding_window") {
            add("attention.sliding_window", Entry::U32(0));
        }
    }
    if let Some(size) = config["vocab_size"].as_u64() {
        add("vocab_size", Entry::U32(size as u32));
    }
    let factor = scaling["factor"].as_f64().unwrap_or(1.0);
    let kind = scaling["rope_type"].as_str().or(scaling["type"].as_str()).unwrap_or("default");
    let mut frequencies = None;
    match kind {
        "default" => {}
        "linear" => {
            add("rope.scaling.type", Entry::Text("linear".to_owned()));
            add("rope.scaling.factor", Entry::F32(factor as f32));
        }
        "llama3" if !is_gemma => {
            let names = ["low_freq_factor", "high_freq_factor", "original_max_position_embeddings"];
            if names.map(|name| scaling[name].as_f64()) != LLAMA3.map(Some) {
                return Err(refused("positions that differ from Llama 3.1"));
            }
            frequencies = Some(llama3_factors(base, factor, width as usize));
        }
        other => return Err(refused(&format!("positions of the type `{other}`"))),
    }
    Ok(ModelMetadata { architecture, entries, frequencies })
}

/// Returns a `config.json` with the names of keys that most families have.
fn renamed(config: &Value, model_type: &str) -> Value {
    let mut config = config.clone();
    if let (Some(keys), true) = (config.as_object_mut(), model_type == "gpt2") {
        for (in_files, name) in family::GPT2.renamed {
            if let Some(value) = keys.remove(*in_files) {
                keys.insert((*name).to_owned(), value);
            }
        }
    }
    config
}

/// Returns the part of a model of Gemma 2 or 3 that files in GGUF do not say and that differs from what programs assume.
fn fault_of_gemma(architecture: &str, config: &Value) -> Option<&'static str> {
    let count = |key: &str| config[key].as_u64().unwrap_or(0);
    let (layers, of_head) =
        (count("num_hidden_layers"), count("hidden_size") / count("num_attention_heads").max(1));
    let scalar = score_scalar(architecture, layers, of_head, config["head_dim"].as_u64().unwrap_or(of_head));
    let (is_gemma2, pattern) = if architecture == "gemma2" { (true, 2) } else { (false, PATTERN) };
    let sees_all =
        |(layer, kind): (u64, &Value)| (*kind == "full_attention") == layer.is_multiple_of(pattern);
    let has_usual_types = match config["layer_types"].as_array() {
        Some(types) => (1..).zip(types).all(sees_all),
        None => is_gemma2 || count("sliding_window_pattern") == PATTERN,
    };
    let base = config["rope_local_base_freq"].as_f64();
    let caps = ["attn_logit_softcapping", "final_logit_softcapping"];
    let cases = [
        (count("query_pre_attn_scalar") != scalar, "this `query_pre_attn_scalar`"),
        (!has_usual_types, "these `layer_types`"),
        (config["sliding_window"].is_null(), "no `sliding_window`"),
        (!is_gemma2 && base != Some(LOCAL_BASE), "this `rope_local_base_freq`"),
        (is_gemma2 && caps.iter().any(|key| config[*key].is_null()), "scores or logits without a bound"),
        (is_gemma2 && config["tie_word_embeddings"] == false, "a head that is not tied"),
    ];
    cases.into_iter().find(|(is_refused, _)| *is_refused).map(|(_, what)| what)
}
