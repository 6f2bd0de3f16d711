//! Predictions against published runs.

use serde_json::Value;

use crate::data::{WITH_PLANS, comparison};
use crate::second_runs;

#[test]
fn step_times_are_near_the_published_ones() {
    let comparison = comparison();
    let table = comparison.to_markdown();
    assert_eq!(comparison.rows.len(), 12);
    assert!(comparison.mean_error <= 0.05, "{table}");
    assert!(comparison.largest_error <= 0.12, "{table}");
}

#[test]
fn errors_are_means_of_the_rows_and_of_each_source() {
    let comparison = comparison();
    let errors: Vec<f64> = comparison.rows.iter().map(|row| row.error.abs()).collect();
    assert!((comparison.mean_error - errors.iter().sum::<f64>() / 12.0).abs() < 1e-12);
    assert_eq!(comparison.largest_error, errors.iter().copied().fold(0.0, f64::max));
    let sources = comparison.by_source();
    let rows: Vec<usize> = sources.values().map(|errors| errors.rows).collect();
    assert_eq!(rows, [1, 5, 4, 2], "{:?}", sources.keys());
    let weighted: f64 = sources.values().map(|errors| errors.mean * errors.rows as f64).sum();
    assert!((weighted / 12.0 - comparison.mean_error).abs() < 1e-12);
}

#[test]
fn json_has_these_keys() {
    let json = serde_json::to_value(comparison()).expect("JSON");
    let keys = |value: &Value| value.as_object().expect("an object").keys().cloned().collect::<Vec<_>>();
    assert_eq!(
        keys(&json),
        ["groups", "largest_error", "mean_error", "mean_memory_error", "other_models", "rows"]
    );
    let row = &json["rows"][0];
    let expected = [
        "error",
        "fits",
        "group",
        "measured_step_s",
        "model",
        "predicted_memory_gib",
        "predicted_step_s",
        "source",
        "stack",
        "uncertainty",
    ];
    assert_eq!(keys(row), expected);
    let ratio = row["predicted_step_s"].as_f64().unwrap() / row["measured_step_s"].as_f64().unwrap();
    assert!((ratio - 1.0 - row["error"].as_f64().unwrap()).abs() < 1e-12);
}

#[test]
fn json_of_plans_has_the_mesh_and_the_gain() {
    let json = serde_json::to_value(&*WITH_PLANS).expect("JSON");
    let chosen = &json["rows"][0]["chosen"];
    for key in ["tp", "pp", "dp", "cp", "ep", "vp", "mbs", "predicted_step_s", "gain"] {
        assert!(chosen[key].is_number(), "{key}: {chosen}");
    }
    for key in ["schedule", "recompute", "data_parallel"] {
        assert!(chosen[key].is_string(), "{key}: {chosen}");
    }
    let calculon = &json["other_models"][0];
    assert_eq!((calculon["rows"].as_u64(), calculon["mean_error"].as_f64()), (Some(8), Some(0.0365)));
}

#[test]
fn parts_of_a_step_sum_to_it() {
    for row in comparison().rows {
        let prediction = &row.details.prediction;
        let sum = prediction.parts.total() + prediction.bubble + prediction.optimizer;
        assert!((sum / prediction.seconds - 1.0).abs() < 1e-9, "{}", row.model);
        assert!(prediction.bubble >= 0.0, "{}: {}", row.model, prediction.bubble);
    }
}

#[test]
fn the_page_of_the_book_has_the_table() {
    let page = include_str!("../../../../docs/published-runs.md");
    let (start, end) = ("| model | source |", "\n## The cost model");
    let (start, end) = (page.find(start).expect("tables"), page.find(end).expect("a section"));
    let [first, second] = [WITH_PLANS.to_markdown(), second_runs::comparison().to_markdown()];
    let tables =
        format!("{first}\n## Experts, sharded parameters, long sequences and fine-tuning\n\n{second}");
    if std::env::var_os("PIPEWRIGHT_WRITE_PAGES").is_some() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/published-runs.md");
        std::fs::write(path, format!("{}{tables}{}", &page[..start], &page[end..])).expect("a file");
        return;
    }
    assert_eq!(page[start..end], tables, "write the page anew with PIPEWRIGHT_WRITE_PAGES=1");
}
