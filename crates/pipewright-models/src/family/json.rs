//! The JSON of a `config.json`: what a family writes, and what is done with a file's keys before it reads them.

use pipewright_shapes::ShapeError;
use pipewright_shapes::family::{Family, SCORES};
use serde_json::{Value, json};

use crate::family::{Composition, ModelFamily};

/// Returns the keys of a configuration, and the keys that every `config.json` has.
pub(crate) fn family_json<F: Composition>(config: &F) -> Value {
    let mut json = json!(config);
    json["model_type"] = F::FAMILY.name().into();
    let class = F::FAMILY.scoring_class().filter(|_| !config.labels().is_empty());
    json["architectures"] = json!([class.as_deref().unwrap_or(F::FAMILY.class)]);
    json["dtype"] = "float32".into();
    json
}

/// Returns the content of a model's `config.json`, with the width of a head where readers of files assume another
/// one.
pub(crate) fn file_json<F: ModelFamily + ?Sized>(config: &F) -> Value {
    let mut json = config.to_json();
    let assumes_width = config.family().absent.iter().any(|(key, _)| *key == "head_dim");
    let sizes = (json["hidden_size"].as_u64(), json["num_attention_heads"].as_u64());
    if let (true, None, (Some(width), Some(heads))) = (assumes_width, json.get("head_dim"), sizes) {
        json["head_dim"] = (width / heads.max(1)).into();
    }
    json
}

/// Returns a file's keys under the names that the family reads.
pub(super) fn renamed(family: &Family, mut json: Value) -> Value {
    if let Some(keys) = json.as_object_mut() {
        for (older, name) in family.renamed {
            if let Some(value) = keys.remove(*older).filter(|value| !value.is_null()) {
                keys.insert((*name).to_owned(), value);
            }
        }
    }
    json
}

/// Removes keys without an effect from the tables of positions, and replaces the family's own names of the type
/// `longrope`.
pub(super) fn with_known_positions(family: &Family, mut json: Value) -> Value {
    for table in ["rope_parameters", "rope_scaling"] {
        let Some(entries) = json.get_mut(table).and_then(Value::as_object_mut) else { continue };
        entries.retain(|key, _| !family.ignored_positions.contains(&key.as_str()));
        for (_, name) in entries.iter_mut().filter(|(key, _)| *key == "rope_type" || *key == "type") {
            if name.as_str().is_some_and(|name| family.longrope_names.contains(&name)) {
                *name = "longrope".into();
            }
        }
    }
    json
}

/// Removes the keys that are `null`, which count as absent.
pub(super) fn without_nulls(mut json: Value) -> Value {
    if let Some(keys) = json.as_object_mut() {
        keys.retain(|_, value| !value.is_null());
    }
    json
}

/// Refuses a file whose `architectures` name a class of another family.
pub(super) fn check_class(family: &Family, json: &Value) -> Result<(), ShapeError> {
    let stem_of = |class: &str| {
        let stem = class.split("For").next().unwrap_or(class);
        let stem = stem.strip_suffix("Model").unwrap_or(stem);
        stem.strip_suffix("LMHead").unwrap_or(stem).to_lowercase()
    };
    let scoring = family.scoring_class();
    let classes = json.get("architectures").and_then(Value::as_array).into_iter().flatten();
    let mut classes =
        classes.filter(|class| class.as_str().is_none_or(|class| Some(class) != scoring.as_deref()));
    if let Some(class) = classes.clone().filter_map(Value::as_str).find(|class| class.ends_with(SCORES)) {
        let supported = scoring.as_deref().unwrap_or(family.class);
        return Err(ShapeError::not_supported("architectures", class, supported));
    }
    let other =
        classes.by_ref().filter_map(Value::as_str).find(|class| stem_of(class) != stem_of(family.class));
    other.map_or(Ok(()), |class| Err(ShapeError::not_supported("architectures", class, family.class)))
}
