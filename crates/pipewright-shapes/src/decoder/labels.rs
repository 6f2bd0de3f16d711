//! The labels of a model that scores sequences: transformers' `*ForSequenceClassification`, whose head has an output for
//! each label in place of each token id.

use serde_json::{Map, Value, json};

use crate::error::ShapeError;
use crate::family::SCORES;

/// The key of the names of the labels by their numbers.
const NAMES: &str = "id2label";
/// The number of labels that transformers assumes if a file does not say it.
const USUAL: u64 = 2;

/// Returns the name that transformers gives a label.
pub fn usual_label(number: u64) -> String {
    format!("LABEL_{number}")
}

/// Returns the labels in a `config.json`; `None` if its class does not score sequences.
///
/// # Errors
/// When the labels are not numbered from 0 on, or their number is 0, or more than one label may be true at once.
pub fn labels_in(keys: &Map<String, Value>) -> Result<Option<Vec<String>>, ShapeError> {
    let class = keys.get("architectures").and_then(|classes| classes.get(0)?.as_str());
    if !class.is_some_and(|class| class.ends_with(SCORES)) {
        return Ok(None);
    }
    let wrong = |key: &str, value: &Value, expected: &str| {
        Err(ShapeError::not_supported(key, &value.to_string(), expected))
    };
    if let Some(kind) = keys.get("problem_type").filter(|kind| !kind.is_null())
        && kind != "single_label_classification"
    {
        return wrong("problem_type", kind, "single_label_classification");
    }
    let given = keys.get(NAMES).or_else(|| keys.get("num_labels")).filter(|given| !given.is_null());
    let labels: Option<Vec<String>> = match given {
        Some(Value::Object(names)) => (0..names.len())
            .map(|number| Some(names.get(&number.to_string())?.as_str()?.to_owned()))
            .collect(),
        given => given
            .map_or(Some(USUAL), Value::as_u64)
            .map(|count| (0..count.min(MOST)).map(usual_label).collect()),
    };
    match (labels, given) {
        (Some(labels), _) if !labels.is_empty() => Ok(Some(labels)),
        (_, given) => wrong(NAMES, given.unwrap_or(&Value::Null), "a table of names by numbers from 0 on"),
    }
}

/// The most labels of a file without their names.
const MOST: u64 = 1 << 20;

/// Adds the keys of these labels to a configuration.
pub fn add_labels(json: &mut Value, labels: &[String]) {
    let names: Map<String, Value> =
        labels.iter().enumerate().map(|(number, label)| (number.to_string(), json!(label))).collect();
    let numbers: Map<String, Value> =
        labels.iter().enumerate().map(|(number, label)| (label.clone(), json!(number))).collect();
    (json[NAMES], json["label2id"]) = (names.into(), numbers.into());
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(keys: Value) -> Result<Option<Vec<String>>, String> {
        labels_in(keys.as_object().expect("a table")).map_err(|error| error.to_string())
    }

    #[test]
    fn labels_are_read_in_each_form_and_written() {
        let class = json!(["LlamaForSequenceClassification"]);
        let names =
            |names: &[&str]| Ok(Some(names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>()));
        assert_eq!(read(json!({"architectures": ["LlamaForCausalLM"], "num_labels": 3})), Ok(None));
        assert_eq!(read(json!({"architectures": class})), names(&["LABEL_0", "LABEL_1"]));
        assert_eq!(read(json!({"architectures": class, "num_labels": 1})), names(&["LABEL_0"]));
        let mut json = json!({"architectures": class});
        let labels: Vec<String> = (0..12).map(|number| format!("kind {number}")).collect();
        add_labels(&mut json, &labels);
        assert_eq!(read(json), Ok(Some(labels)));
    }

    #[test]
    fn other_labels_are_refused() {
        let refused = |keys: Value| read(keys).expect_err("it is refused");
        let class = json!(["LlamaForSequenceClassification"]);
        assert!(refused(json!({"architectures": class, "id2label": {"1": "a"}})).contains("`id2label = "));
        assert!(refused(json!({"architectures": class, "num_labels": 0})).contains("`id2label = 0`"));
        let kind = refused(json!({"architectures": class, "problem_type": "regression"}));
        assert!(kind.contains("only single_label_classification is"), "{kind}");
    }
}
