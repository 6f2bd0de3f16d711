//! The figures of runs as JSON or CSV, for scripts and spreadsheets.

use std::time::Duration;

use serde_json::{Value, json};

use crate::run_report::data::{EventData, Figures, ReportData, RunSource};

/// A figure of a run; `None` if the run does not have it.
type Figure = fn(&Figures) -> Option<f64>;

/// The columns of the CSV, after the columns of the settings that differ.
const COLUMNS: [(&str, Figure); 28] = [
    ("steps", |figures| Some(figures.steps as f64)),
    ("first_loss", |figures| figures.first_loss),
    ("best_loss", |figures| Some(figures.best_loss.as_ref()?.loss)),
    ("best_loss_step", |figures| Some(figures.best_loss.as_ref()?.step as f64)),
    ("last_loss", |figures| figures.last_loss),
    ("best_validation_loss", |figures| Some(figures.best_validation_loss.as_ref()?.loss)),
    ("best_validation_loss_step", |figures| Some(figures.best_validation_loss.as_ref()?.step as f64)),
    ("validation_loss", |figures| figures.validation_loss),
    ("validation_perplexity", |figures| figures.validation_perplexity),
    ("validation_accuracy", |figures| figures.validation_accuracy),
    ("tokens", |figures| figures.tokens),
    ("seconds", |figures| figures.seconds),
    ("goodput", |figures| figures.goodput.as_ref()?.share),
    ("restarts", |figures| Some(figures.goodput.as_ref()?.restarts as f64)),
    ("growths", |figures| Some(figures.goodput.as_ref()?.growths as f64)),
    ("tokens_per_second", |figures| figures.tokens_per_second),
    ("model_tflops", |figures| figures.model_tflops),
    ("mfu", |figures| figures.mfu),
    ("step_ms", |figures| figures.step_ms),
    ("planned_step_ms", |figures| figures.planned_step_ms),
    ("predicted_step_ms", |figures| figures.predicted_step_ms),
    ("bubble", |figures| figures.bubble),
    ("exposed", |figures| figures.exposed),
    ("expert_exchange_ms", |figures| figures.expert_exchange_ms),
    ("exposed_expert_exchange_ms", |figures| figures.exposed_expert_exchange_ms),
    ("expert_wait_ms", |figures| figures.expert_wait_ms),
    ("gap_ms", |figures| figures.gap_ms),
    ("peak_bytes", |figures| figures.peak_bytes.iter().copied().reduce(f64::max)),
];

/// Returns `{"runs": [..], "differences": [..]}`: the settings, the figures and the events of each run, and the keys
/// whose values differ, with the value of each run.
pub fn json(runs: &[RunSource]) -> Value {
    let data = ReportData::of(runs, None::<Duration>);
    let all = runs.iter().zip(&data.runs).map(|(source, run)| {
        let events =
            run.events.iter().map(|EventData { step, text, .. }| json!({ "step": step, "text": text }));
        json!({
            "name": run.name,
            "settings": source.settings(),
            "figures": run.figures,
            "events": events.collect::<Value>(),
        })
    });
    json!({ "runs": all.collect::<Value>(), "differences": data.differences })
}

/// Returns a header and a row for each run: its name, the settings that differ, and its figures. A figure that a run
/// lacks is empty.
pub fn csv(runs: &[RunSource]) -> String {
    let data = ReportData::of(runs, None);
    let mut writer = csv::Writer::from_writer(Vec::new());
    let keys = data.differences.iter().map(|found| found.key.clone());
    let names = COLUMNS.iter().map(|(name, _)| (*name).to_owned());
    let mut rows = vec![std::iter::once("run".to_owned()).chain(keys).chain(names).collect::<Vec<_>>()];
    for (index, run) in data.runs.iter().enumerate() {
        let values = data.differences.iter().map(|found| found.text(index));
        let figure =
            |(_, value): &(_, Figure)| value(&run.figures).map(|value| value.to_string()).unwrap_or_default();
        rows.push(
            std::iter::once(run.name.clone()).chain(values).chain(COLUMNS.iter().map(figure)).collect(),
        );
    }
    rows.iter()
        .for_each(|row| writer.write_record(row).expect("memory takes all rows, which are equally long"));
    let bytes = writer.into_inner().expect("memory takes all rows");
    String::from_utf8(bytes).expect("the fields are text")
}
