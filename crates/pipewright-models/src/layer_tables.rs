//! The tables of positions in the files of models with windows: `rope_parameters` has one for the layers that see all
//! tokens, and one for the others, whose positions are not scaled. Files of version 4 of transformers have one table.

use pipewright_shapes::ShapeError;
use serde_json::{Map, Value, json};

use crate::decoder::DecoderConfig;

/// The names of the tables.
const TABLES: [&str; 2] = ["full_attention", "sliding_attention"];
/// The base of the rotary frequencies in layers with a window, in files of version 4.
pub(crate) const LOCAL_THETA: &str = "rope_local_base_freq";

/// Returns the keys of a configuration, with both tables.
pub(crate) fn with_tables(decoder: &DecoderConfig, local_theta: f64) -> Value {
    let mut keys = json!(decoder);
    let local = json!({"rope_type": "default", "rope_theta": local_theta});
    let tables = TABLES.iter().map(|&name| name.to_owned()).zip([keys["rope_parameters"].take(), local]);
    keys["rope_parameters"] = tables.collect::<Map<_, _>>().into();
    keys
}

/// Replaces the tables of both kinds of layers by the keys of version 4.
pub(crate) fn join_tables(keys: &mut Map<String, Value>) -> Result<(), ShapeError> {
    let tables = keys.get("rope_parameters").and_then(Value::as_object);
    let Some(tables) = tables.filter(|tables| TABLES.iter().any(|name| tables.contains_key(*name))) else {
        return Ok(());
    };
    if let Some((other, _)) = tables.iter().find(|(name, _)| !TABLES.contains(&name.as_str())) {
        let (key, supported) = ("rope_parameters", "a table for each kind of layers");
        return Err(ShapeError::not_supported(key, other, supported));
    }
    let [global, local] = TABLES.map(|name| tables.get(name).cloned().unwrap_or_default());
    let not_default = |(name, value): &(&String, &Value)| {
        *name != "rope_theta" && !(*name == "rope_type" && *value == "default") && !value.is_null()
    };
    if let Some((name, value)) = local.as_object().and_then(|local| local.iter().find(not_default)) {
        return Err(ShapeError::not_supported(
            "rope_parameters.sliding_attention",
            &format!("{name} {value}"),
            "the type default with a rope_theta",
        ));
    }
    if let Some(theta) = local.get("rope_theta") {
        keys.insert(LOCAL_THETA.to_owned(), theta.clone());
    }
    keys.insert("rope_parameters".to_owned(), global);
    Ok(())
}
