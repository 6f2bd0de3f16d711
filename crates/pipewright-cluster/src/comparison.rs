//! Predictions next to what was measured, for all runs of a file.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use pipewright_document::GIB;
use pipewright_schedule::error_text::with_causes;
use serde::Serialize;

pub use crate::chosen::Chosen;
use crate::pipeline::Programs;
use crate::predict::{PredictError, Prediction, predict};
use crate::published::{Published, Run};
use crate::setting::Setting;

/// All rows and their errors.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Comparison {
    /// One row per run, in the order of the file.
    pub rows: Vec<Row>,
    /// The mean of the errors without their signs, as a share.
    pub mean_error: f64,
    /// The largest error without its sign, as a share.
    pub largest_error: f64,
    /// The errors of other models of costs over a source of the rows, as their authors publish them.
    pub other_models: Vec<OtherModel>,
    /// The keys of the file that no prediction uses, with their places. They are only in the table.
    #[serde(skip)]
    pub remarks: Vec<String>,
}

/// A prediction next to what was measured.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Row {
    /// The model.
    pub model: String,
    /// Where the run is published.
    pub source: String,
    /// The predicted seconds of a step.
    pub predicted_step_s: f64,
    /// The measured seconds of a step.
    pub measured_step_s: f64,
    /// The prediction divided by the measurement, minus 1.
    pub error: f64,
    /// The predicted memory of the rank that needs most, in GiB.
    pub predicted_memory_gib: f64,
    /// The plan that the search chooses instead; `None` if nothing was searched or no plan was found.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub chosen: Option<Chosen>,
    /// Why the search found no plan.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub no_plan: Option<String>,
    /// Facts that are only in the table.
    #[serde(skip)]
    pub details: Details,
}

/// The errors of another model of costs.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct OtherModel {
    /// Its name and where its errors are published.
    pub name: &'static str,
    /// The source of the runs, as the start of the source of a row.
    pub source: &'static str,
    /// The number of runs.
    pub rows: usize,
    /// The mean error, as a share.
    pub mean_error: f64,
    /// The largest error, as a share.
    pub largest_error: f64,
}

/// The errors that authors of other models publish. Calculon's efficiencies are fitted to the machine of these
/// runs. Its paper has the mean and the largest error; the files of published runs have four of the eight runs.
const OTHER_MODELS: [OtherModel; 1] = [OtherModel {
    name: "Calculon (SC 2023)",
    source: "arXiv 2205.05198",
    rows: 8,
    mean_error: 0.0365,
    largest_error: 0.089,
}];

/// A row's facts that are only in the table.
#[derive(Debug, Clone, PartialEq)]
pub struct Details {
    /// The measured memory in GiB, if it is published.
    pub measured_memory_gib: Option<f64>,
    /// The prediction.
    pub prediction: Prediction,
}

/// A run that cannot be predicted.
#[derive(Clone, PartialEq, thiserror::Error)]
#[error("run {number} (`{model}`)")]
pub struct ComparisonError {
    /// The number of the run, from 1.
    pub number: usize,
    /// Its model.
    pub model: String,
    /// Why.
    #[source]
    pub error: Box<PredictError>,
}

pipewright_schedule::message_as_debug!(ComparisonError);

/// Predicts all runs of a file.
///
/// # Errors
/// When a run's layout does not fit its model, or its schedule does not exist.
pub fn compare(published: &Published) -> Result<Comparison, ComparisonError> {
    let mut programs = Programs::default();
    let row = |(index, run): (usize, &Run)| {
        let setting = Setting { model: &run.model, layout: &run.layout, machine: &run.machine };
        let prediction = predict(&setting, &mut programs);
        let prediction = prediction.map_err(|error| ComparisonError {
            number: index + 1,
            model: run.model.name.clone(),
            error: Box::new(error),
        })?;
        Ok(Row::of(run, prediction))
    };
    let rows = published.runs.iter().enumerate().map(row).collect::<Result<Vec<_>, _>>()?;
    Ok(Comparison::of(rows, published.remarks.clone()))
}

/// Like [`compare`], with the plan that the search chooses instead of each run, or why it finds none.
///
/// # Errors
/// Like [`compare`].
pub fn compare_with_plans(published: &Published) -> Result<Comparison, ComparisonError> {
    let mut comparison = compare(published)?;
    for (run, row) in published.runs.iter().zip(&mut comparison.rows) {
        match Chosen::instead_of(run, row.predicted_step_s) {
            Ok(chosen) => row.chosen = Some(chosen),
            Err(error) => row.no_plan = Some(with_causes(&error)),
        }
    }
    Ok(comparison)
}

impl Row {
    fn of(run: &Run, prediction: Prediction) -> Self {
        Self {
            model: run.model.name.clone(),
            source: run.source.clone(),
            predicted_step_s: prediction.seconds,
            measured_step_s: run.step_seconds,
            error: prediction.seconds / run.step_seconds - 1.0,
            predicted_memory_gib: prediction.peak_memory() / GIB,
            chosen: None,
            no_plan: None,
            details: Details { measured_memory_gib: run.memory_gib, prediction },
        }
    }
}

/// The errors of the rows of a source.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SourceErrors {
    /// The number of rows.
    pub rows: usize,
    /// The mean of the errors without their signs.
    pub mean: f64,
    /// The largest of them.
    pub largest: f64,
}

fn errors<'a>(rows: impl Iterator<Item = &'a Row>) -> SourceErrors {
    let errors: Vec<f64> = rows.map(|row| row.error.abs()).collect();
    let mean = errors.iter().sum::<f64>() / errors.len().max(1) as f64;
    SourceErrors { rows: errors.len(), mean, largest: errors.into_iter().fold(0.0, f64::max) }
}

impl Comparison {
    fn of(rows: Vec<Row>, remarks: Vec<String>) -> Self {
        let SourceErrors { mean, largest, .. } = errors(rows.iter());
        let is_of = |other: &OtherModel| rows.iter().any(|row| row.source.starts_with(other.source));
        let other_models = OTHER_MODELS.into_iter().filter(is_of).collect();
        Self { rows, mean_error: mean, largest_error: largest, other_models, remarks }
    }

    /// Returns the errors of each source.
    pub fn by_source(&self) -> BTreeMap<&str, SourceErrors> {
        let sources: std::collections::BTreeSet<&str> =
            self.rows.iter().map(|row| row.source.as_str()).collect();
        let source_errors = |source| errors(self.rows.iter().filter(|row| row.source == source));
        sources.into_iter().map(|source| (source, source_errors(source))).collect()
    }

    /// Returns the table in Markdown: all rows, the errors of each source, the plans that were
    /// searched, and the keys that are not used.
    pub fn to_markdown(&self) -> String {
        let mut text = String::from(
            "| model | source | predicted s | measured s | error | memory GiB | products | attention | elementwise | tensor | experts | context | data | bubble | optimizer |\n\
             |---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|\n",
        );
        self.rows.iter().for_each(|row| row.print(&mut text));
        text.push_str("\n| source | rows | mean error | largest error |\n|---|---|---|---|\n");
        let all = SourceErrors { rows: self.rows.len(), mean: self.mean_error, largest: self.largest_error };
        for (source, errors) in self.by_source().into_iter().chain([("all", all)]) {
            let SourceErrors { rows, mean, largest } = errors;
            let _ = writeln!(text, "| {source} | {rows} | {:.1}% | {:.1}% |", mean * 100.0, largest * 100.0);
        }
        for OtherModel { name, source, rows, mean_error, largest_error } in &self.other_models {
            let (mean, largest) = (mean_error * 100.0, largest_error * 100.0);
            let _ = writeln!(
                text,
                "| for comparison, {name} on {source} | {rows} | {mean:.1}% | {largest:.1}% |"
            );
        }
        text.push_str(&self.plans_to_markdown());
        if !self.remarks.is_empty() {
            let _ = writeln!(text, "\nNot used: {}.", self.remarks.join(", "));
        }
        text
    }
}

impl Comparison {
    /// The table of the plans that the search chooses, or why there is none; empty if nothing was searched.
    fn plans_to_markdown(&self) -> String {
        if self.rows.iter().all(|row| row.chosen.is_none() && row.no_plan.is_none()) {
            return String::new();
        }
        let mut text = String::from(
            "\n| model | source | chosen mesh | schedule | microbatch | recomputed | divided by replicas | predicted s | gain |\n\
             |---|---|---|---|---|---|---|---|---|\n",
        );
        for Row { model, source, chosen, no_plan, .. } in &self.rows {
            let _ = match chosen {
                Some(chosen) => writeln!(text, "| {model} | {source} | {} |", chosen.cells()),
                None => {
                    let reason = no_plan.as_deref().unwrap_or_default();
                    writeln!(text, "| {model} | {source} | no plan: {reason} | | | | | | |")
                }
            };
        }
        text
    }
}

impl Row {
    fn print(&self, text: &mut String) {
        let Self { model, source, predicted_step_s, measured_step_s, error, .. } = self;
        let prediction = &self.details.prediction;
        let share = |seconds: f64| format!("{:.1}%", seconds / prediction.seconds * 100.0);
        let measured = self.details.measured_memory_gib;
        let memory = measured.map_or_else(String::new, |gib| format!(" (measured {gib:.1})"));
        let parts = &prediction.parts;
        let shares = [
            parts.products,
            parts.attention,
            parts.elementwise,
            parts.tensor,
            parts.experts,
            parts.context,
            parts.data,
            prediction.bubble,
            prediction.optimizer,
        ]
        .map(share)
        .join(" | ");
        let _ = writeln!(
            text,
            "| {model} | {source} | {predicted_step_s:.2} | {measured_step_s:.2} | {:+.1}% | {:.1}{memory} | {shares} |",
            error * 100.0,
            self.predicted_memory_gib
        );
    }
}
