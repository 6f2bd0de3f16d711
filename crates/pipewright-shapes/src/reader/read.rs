//! Reads a `config.json`.

use std::borrow::Cow;

use serde::Deserialize;
use serde_json::{Map, Value};

use super::blocks::{blocks, predictors};
use super::hybrid;
use super::keys::{Keys, MAX_VOCABULARY, wrong};
use crate::decoder::labels_in;
use crate::error::ShapeError;
use crate::family::{Family, HYBRID};
use crate::hybrid::HybridConfig;
use crate::key_table::is_off;
use crate::model::Model;
use crate::vectors::{Biases, QueryKeyNorm, Vectors};

/// The largest file that is read, in bytes.
pub const MAX_FILE: usize = 1 << 20;

/// A model, and what is assumed about it.
#[derive(Debug, Clone, PartialEq)]
pub struct Described {
    /// The model.
    pub model: Model,
    /// Assumptions about parts that the file does not state, and parts that are left out, as sentences.
    pub assumed: Vec<String>,
}

/// Reads the text of a `config.json`.
///
/// # Errors
/// When it is not JSON, a size is missing, out of range or contradicts another one, a kind of block has no cost, or a
/// key is not known and may change the parameters or the computation.
pub fn read(text: &str) -> Result<Described, ShapeError> {
    if text.len() > MAX_FILE {
        let message = format!("the file has more than {MAX_FILE} bytes; a configuration is smaller");
        return Err(ShapeError::new(&[], message));
    }
    let not_an_object = |at| ShapeError::new(&[], format!("the file is not a JSON object{at}"));
    let text = with_null_for_infinity(text);
    let value: Value = serde_json::from_str(&text).map_err(|error| not_an_object(format!(": {error}")))?;
    let object = value.as_object().ok_or_else(|| not_an_object(String::new()))?;
    // Models of text and images keep the decoder's keys in a part of their own.
    let inner = object.get("text_config").and_then(Value::as_object);
    let mut keys = Keys::new(inner.unwrap_or(object));
    let given_type = model_type(&mut keys, inner.and(Some(object)))?;
    let model_type = given_type.clone().unwrap_or_else(|| UNNAMED.to_owned());
    let family = Family::named(&model_type);
    if let Some(why) = family.and_then(|family| family.refused) {
        let message = format!(
            "`model_type` is {model_type}: {why}; plan it from a profile (`pipewright plan --profile`)"
        );
        return Err(ShapeError::new(&["model_type"], message));
    }
    if HYBRID.names.contains(&model_type.as_str()) {
        keys.set_family(&HYBRID);
        let own = Value::Object(inner.unwrap_or(object).clone());
        let config = <HybridConfig as Deserialize>::deserialize(&own)
            .map_err(|source| ShapeError::of_parser::<HybridConfig>(&own, source))?;
        let filled = hybrid::usual_sizes(&config).into_iter().filter(|(key, _)| own.get(key).is_none());
        let filled = filled.map(|size| filled_sentence(size, HYBRID.names[0]));
        let assumed = filled.chain(hybrid::assumed(&config)).chain(keys.left_out(None)).collect();
        check_known(&keys, &text)?;
        return Ok(Described { model: hybrid::shape(&config), assumed });
    }
    let model =
        model(&mut keys, &model_type, &family.unwrap_or_else(Family::unknown), inner.and(Some(object)))?;
    check_known(&keys, &text)?;
    let mut assumed: Vec<String> = keys.filled().map(|key| filled_sentence(key, &model.name)).collect();
    match (&given_type, family) {
        (None, _) => assumed
            .push("`model_type` is missing: the norms, biases and gates are read as Llama's".to_owned()),
        (Some(name), None) => assumed.push(format!(
            "`model_type` {name} is not known: its norms, biases and gates are read as Llama's"
        )),
        (Some(_), Some(_)) => {}
    }
    assumed.extend(keys.left_out(inner.and(Some(object))));
    Ok(Described { model, assumed })
}

/// Returns the line of a decoder's key, counted from 1.
fn line_of(key: &str, text: &str) -> usize {
    // The decoder's keys come after the name of their part.
    let part = text.find("\"text_config\"").unwrap_or(0);
    let name = format!("\"{}\"", key.rsplit('.').next().unwrap_or(key));
    let at = text[part..].find(&name).map_or(0, |at| part + at);
    1 + text[..at].matches('\n').count()
}

/// Returns an error if a file has keys that no table knows, or turns off a part that all models of its family have.
fn check_known(keys: &Keys<'_>, text: &str) -> Result<(), ShapeError> {
    if let Some((key, value, expected)) = keys.turned_off() {
        let place = line_of(key, text);
        return Err(wrong(key.to_owned(), value, &expected).at_line(place));
    }
    let unknown = keys.unknown();
    let Some(first) = unknown.first() else { return Ok(()) };
    let line = line_of(first, text);
    let (are, they) = if unknown.len() == 1 { ("key", "is") } else { ("keys", "are") };
    let named = unknown.iter().map(|key| format!("`{key}`")).collect::<Vec<_>>().join(", ");
    let message = format!(
        "line {line}: the {are} {named} {they} not known, and may change the parameters or the computation; remove what \
         changes neither"
    );
    let keys: Vec<&str> = unknown.iter().map(String::as_str).collect();
    Err(ShapeError::new(&keys, message))
}

/// The name of a model whose file has no `model_type`.
const UNNAMED: &str = "decoder";

/// Says that a key has the value of its family.
fn filled_sentence((key, value): (&str, u64), family: &str) -> String {
    format!("`{key}` is missing: it is {value}, as in other models of the family {family}")
}

/// Returns the family of the decoder, if the file names it. `outside` is the object around it, if there is one.
fn model_type(
    keys: &mut Keys<'_>,
    outside: Option<&Map<String, Value>>,
) -> Result<Option<String>, ShapeError> {
    let own = keys.text(&["model_type"])?;
    let outer = outside.and_then(|object| object.get("model_type")).and_then(Value::as_str);
    Ok(own.or(outer).map(|name| name.chars().take(64).collect()))
}

fn model(
    keys: &mut Keys<'_>,
    model_type: &str,
    family: &Family,
    outside: Option<&Map<String, Value>>,
) -> Result<Model, ShapeError> {
    keys.set_family(family);
    let hidden = keys.needed(&["hidden_size", "n_embd", "d_model"])?;
    let vocabulary = keys.needed_up_to(&["vocab_size", "padded_vocab_size"], MAX_VOCABULARY)?;
    let outer = outside.and_then(|object| object.get("tie_word_embeddings")).and_then(Value::as_bool);
    let tied = keys.flag("tie_word_embeddings")?.or(outer).unwrap_or(family.is_tied());
    let further_embedding = match family.more_positions {
        Some(more) => {
            let given = keys.size(&["n_positions", "max_position_embeddings"], 1, MAX_VOCABULARY)?;
            given.map_or(0, |rows| (rows + more) * hidden)
        }
        None => 0,
    };
    let blocks = blocks(keys, family, hidden)?;
    let (predictors, predictor) = predictors(keys, family, hidden)?;
    let vectors = vectors(keys, family, model_type)?;
    let labels = labels_in(outside.unwrap_or(keys.object()))?.map(|labels| labels.len() as u64);
    let cap = keys.value(&["final_logit_softcapping"]).map(|(_, value)| value).filter(|_| labels.is_none());
    Ok(Model {
        name: model_type.to_owned(),
        hidden,
        vocabulary,
        labels,
        tied: tied && labels.is_none(),
        blocks,
        predictors,
        predictor,
        counts_predictors: false,
        shares_predictors: false,
        further_embedding,
        vectors,
        gpt: family.gpt,
        caps_logits: cap.is_some_and(|cap| !is_off("final_logit_softcapping", cap)),
    })
}

/// Reads which products have biases, and which norms there are.
fn vectors(keys: &mut Keys<'_>, family: &Family, model_type: &str) -> Result<Vectors, ShapeError> {
    let mut vectors = family.vectors;
    for name in ["attention_bias", "use_qkv_bias", "add_qkv_bias", "qkv_bias"] {
        if let Some(has_bias) = keys.flag(name)? {
            vectors.biases.query_key_value = has_bias;
            vectors.biases.output = has_bias && family.output_bias_is_given && name == "attention_bias";
        }
    }
    for name in ["use_conv_bias", "mamba_conv_bias"] {
        if let Some(has_bias) = keys.flag(name)? {
            vectors.biases.convolution = has_bias;
        }
    }
    if let Some(has_bias) = keys.flag("attention_out_bias")? {
        vectors.biases.output = has_bias;
    }
    if let Some(has_bias) = keys.flag("mlp_bias")? {
        vectors.biases.feed_forward = has_bias;
    }
    if let Some(has_bias) = keys.flag("bias")? {
        let biases = &mut vectors.biases;
        (biases.query_key_value, biases.output, biases.feed_forward) = (has_bias, has_bias, has_bias);
    }
    if let Some(has_bias) = keys.flag("use_bias")? {
        if family.gpt {
            vectors.biases = if has_bias { Biases::DENSE } else { Biases::NONE };
        } else {
            vectors.biases.mamba = has_bias && ["nemotron_h", "mamba2"].contains(&model_type);
        }
    }
    // In Llama 4, these norms have no parameters.
    let has_norm = keys.flag("use_qk_norm")? == Some(true) && model_type != "llama4_text";
    if has_norm && vectors.query_key_norm == QueryKeyNorm::None {
        vectors.query_key_norm = QueryKeyNorm::Head;
    }
    match keys.value(&["qk_norm_type"]).map(|(key, value)| (key, value, value.as_str())) {
        Some((.., Some("per_layer"))) => vectors.query_key_norm = QueryKeyNorm::All,
        Some((.., Some("per_head"))) => vectors.query_key_norm = QueryKeyNorm::Head,
        Some((key, value, _)) => return Err(wrong(key, value, "per_layer or per_head")),
        None => {}
    }
    // The first Falcon has one norm for both parts, the second two.
    let is_parallel = keys.flag("parallel_attn")? == Some(true);
    let norms = keys.size(&["num_ln_in_parallel_attn"], 1, 2)?;
    if is_parallel {
        let is_second = keys.flag("new_decoder_architecture")? == Some(true);
        vectors.shares_norm = norms.map_or(!is_second, |norms| norms == 1);
    }
    Ok(vectors)
}

/// Replaces bare `Infinity` and `NaN`, which Python writes and JSON does not have, by `null`. Texts in quotes stay
/// as they are.
fn with_null_for_infinity(text: &str) -> Cow<'_, str> {
    if !text.contains("Infinity") && !text.contains("NaN") {
        return Cow::Borrowed(text);
    }
    let mut replaced = String::with_capacity(text.len());
    let mut rest = text;
    while !rest.is_empty() {
        let (bare, quoted) = rest.split_at(rest.find('"').unwrap_or(rest.len()));
        replaced
            .push_str(&bare.replace("-Infinity", "null").replace("Infinity", "null").replace("NaN", "null"));
        let (quoted, behind) = quoted.split_at(quoted_bytes(quoted));
        replaced.push_str(quoted);
        rest = behind;
    }
    Cow::Owned(replaced)
}

/// Returns the bytes of the text in quotes at the start of `text`, with its quotes, or all bytes if it does not
/// end.
fn quoted_bytes(text: &str) -> usize {
    let mut is_escaped = false;
    let ends = |&(_, letter): &(usize, char)| {
        let ends = letter == '"' && !is_escaped;
        is_escaped = letter == '\\' && !is_escaped;
        ends
    };
    text.char_indices().skip(1).find(ends).map_or(text.len(), |(end, _)| end + 1)
}
