//! Parameters of public models, from the facts of their `config.json`.
//!
//! `public_models.json` has for each model the number of parameters that transformers 5.23 or 5.24 makes for the same
//! configuration (on its `meta` device, without predictors), and the numbers that its authors publish, rounded as they
//! round them. Authors count different tables of tokens as active: `tables` is 2 for the embedding and the head, 1 for one of
//! them, and 0 for none, which then is also not in the total.

use pipewright_shapes::model::Model;
use pipewright_shapes::reader::read;
use serde_json::Value;

/// The public models.
fn rows() -> Vec<Value> {
    serde_json::from_str(include_str!("public_models.json")).expect("the public models")
}

fn described(row: &Value) -> Model {
    let described = read(&row["config"].to_string()).expect("a model");
    // GPT-2 and Falcon leave out the width of feed-forward parts.
    let config = &row["config"];
    let is_given =
        ["intermediate_size", "n_inner", "ffn_hidden_size", "ffn_dim"].iter().any(|key| config[key].is_u64());
    let has_usual_width = described.model.gpt || config["model_type"] == "falcon";
    let width = format!("`intermediate_size` is missing: it is {}, as in", 4 * described.model.hidden);
    // Some were trained with dropout.
    let dropout =
        config.as_object().into_iter().flatten().filter(|(key, value)| {
            key.contains("dropout") && value.as_f64().is_some_and(|share| share > 0.0)
        });
    let is_expected = |sentence: &String| sentence.starts_with(&width) || sentence.contains("counts as 0");
    let expected = usize::from(has_usual_width && !is_given) + dropout.count();
    assert_eq!(described.assumed.len(), expected, "{}: {:?}", row["name"], described.assumed);
    assert!(described.assumed.iter().all(is_expected), "{}: {:?}", row["name"], described.assumed);
    described.model
}

/// Checks that `found` is a published number such as `30.5B`, which may be rounded or cut off.
fn check(row: &Value, key: &str, found: u128) {
    let Some(published) = row[key].as_str() else { return };
    let (digits, unit) = published.split_at(published.len() - 1);
    let unit = match unit {
        "M" => 1e6,
        "B" => 1e9,
        "T" => 1e12,
        other => panic!("unit {other}"),
    };
    let decimals = digits.split_once('.').map_or(0, |(_, decimals)| decimals.len() as i32);
    let number: f64 = digits.parse().expect("a number");
    let digits_off = (found as f64 / unit - number) * 10f64.powi(decimals);
    assert!((-0.5..1.0).contains(&digits_off), "{} {key}: {found}, published {published}", row["name"]);
}

#[test]
fn parameters_are_those_of_the_same_model_in_transformers() {
    let rows = rows();
    assert!(rows.len() >= 60, "{}", rows.len());
    let mut without = Vec::new();
    for row in &rows {
        let model = described(row);
        let found = model.parameters() - model.predictor_parameters();
        match row["exact"].as_u64() {
            Some(exact) => assert_eq!(found, u128::from(exact), "{}", row["name"]),
            None => without.push(row["name"].as_str()),
        }
    }
    // transformers does not have this family.
    assert_eq!(without, [Some("Ling-flash-2.0"), Some("Ring-1T")]);
}

#[test]
fn parameters_are_those_that_authors_publish() {
    for row in &rows() {
        let model = described(row);
        let tables = u128::from(row["tables"].as_u64().unwrap_or(2));
        let without = if model.tied { 0 } else { (2 - tables) * model.table_parameters() };
        let (all, predictors) = (model.parameters(), model.predictor_parameters());
        check(row, "total", if tables == 0 { all - without } else { all - predictors });
        check(row, "active", model.active_parameters() - without);
    }
}

/// Gemma 2 (arXiv 2408.00118, table 2) outside of the embedding, and the predictor of DeepSeek V3
/// (README_WEIGHTS.md of its repository: 11.5B) outside of the tables that it shares.
#[test]
fn parts_of_models_have_the_published_parameters() {
    let check = |name: &str, part: fn(&Model) -> u128, low: u128, high: u128| {
        let rows = rows();
        let row = rows.iter().find(|row| row["name"] == name).expect(name);
        let found = part(&described(row));
        assert!((low..=high).contains(&found), "{name}: {found}");
    };
    let without_table = |model: &Model| model.parameters() - model.table_parameters();
    check("Gemma 2 2B", without_table, 2_024_517_888, 2_024_517_888);
    check("Gemma 2 9B", without_table, 8_324_201_984, 8_324_201_984);
    check("Gemma 2 27B", without_table, 26_047_480_320, 26_047_480_320);
    check("DeepSeek V3", Model::predictor_parameters, 11_500_000_000, 11_650_000_000);
}
