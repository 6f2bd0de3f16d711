//! Predictions next to what was measured, for all runs of a file, with the plans that the search chooses instead.
//! The tests and the bench `published` use it.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use pipewright_cluster::layout::Layout;
use pipewright_cluster::pipeline::Programs;
use pipewright_cluster::predict::{Prediction, predict};
use pipewright_cluster::published::{MeasuredMemory, Published, Run};
use pipewright_cluster::search::{ClusterPlan, Request, SearchError, search_from};
use pipewright_cluster::setting::Setting;
use pipewright_document::GIB;
use pipewright_schedule::error_text::with_causes;
use serde::Serialize;

/// All rows and their errors.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Comparison {
    /// One row per run, in the order of the file.
    pub(crate) rows: Vec<Row>,
    /// The mean of the errors without their signs, as a share.
    pub(crate) mean_error: f64,
    /// The largest error without its sign, as a share.
    pub(crate) largest_error: f64,
    /// The mean of the errors of memory without their signs; 0 without a measured one.
    pub(crate) mean_memory_error: f64,
    /// The errors of each kind of run.
    pub(crate) groups: BTreeMap<String, SourceErrors>,
    /// The errors of other models of costs over a source of the rows, as their authors publish them.
    pub(crate) other_models: Vec<OtherModel>,
    /// The keys of the file that no prediction uses, with their places. They are only in the table.
    #[serde(skip)]
    pub(crate) remarks: Vec<String>,
}

/// A prediction next to what was measured.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Row {
    /// The model.
    pub(crate) model: String,
    /// Where the run is published.
    pub(crate) source: String,
    /// The predicted seconds of a step.
    pub(crate) predicted_step_s: f64,
    /// The measured seconds of a step.
    pub(crate) measured_step_s: f64,
    /// The prediction divided by the measurement, minus 1.
    pub(crate) error: f64,
    /// The kind of run, such as `fsdp`; empty if the file does not say it.
    pub(crate) group: String,
    /// The stack.
    pub(crate) stack: &'static str,
    /// The share of the measured time that rounding leaves open.
    pub(crate) uncertainty: f64,
    /// The predicted memory in GiB, of the rank that was measured, or of the one that needs most. If what was
    /// measured is what the framework reserved, fragments are included.
    pub(crate) predicted_memory_gib: f64,
    /// The measured memory in GiB, if it is published.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) measured_memory_gib: Option<f64>,
    /// The predicted memory divided by the measured one, minus 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) memory_error: Option<f64>,
    /// Whether the run fits into the machine's memory by its prediction.
    pub(crate) fits: bool,
    /// The plan that the search chooses instead; `None` if nothing was searched or no plan was found.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) chosen: Option<Chosen>,
    /// Why the search found no plan.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) no_plan: Option<String>,
    /// Facts that are only in the table.
    #[serde(skip)]
    pub(crate) details: Details,
}

/// The errors of another model of costs.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct OtherModel {
    /// Its name and where its errors are published.
    pub(crate) name: &'static str,
    /// The source of the runs, as the start of the source of a row.
    pub(crate) source: &'static str,
    /// The number of runs.
    pub(crate) rows: usize,
    /// The mean error, as a share.
    pub(crate) mean_error: f64,
    /// The largest error, as a share.
    pub(crate) largest_error: f64,
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
pub(crate) struct Details {
    /// The prediction.
    pub(crate) prediction: Prediction,
}

/// Predicts all runs of a file.
///
/// # Errors
/// When a run's layout does not fit its model, or its schedule does not exist.
pub(crate) fn compare(published: &Published) -> Result<Comparison, String> {
    let mut programs = Programs::default();
    let row = |(index, run): (usize, &Run)| {
        let setting = Setting { model: &run.model, layout: &run.layout, machine: &run.machine };
        let prediction = predict(&setting, &mut programs);
        let prediction = prediction
            .map_err(|error| format!("run {} (`{}`): {}", index + 1, run.model.name, with_causes(&error)))?;
        Ok(Row::of(run, prediction))
    };
    let rows = published.runs.iter().enumerate().map(row).collect::<Result<Vec<_>, String>>()?;
    Ok(Comparison::of(rows, published.remarks.clone()))
}

/// Like [`compare`], with the plan that the search chooses instead of each run, or why it finds none.
///
/// # Errors
/// Like [`compare`].
pub(crate) fn compare_with_plans(published: &Published) -> Result<Comparison, String> {
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
        let held = match run.memory {
            Some(MeasuredMemory { of_last_rank: true, .. }) => prediction.memory.last().copied(),
            _ => Some(prediction.largest_rank().1),
        };
        let stack = run.layout.implementation.stack;
        let is_reserved = run.memory.is_some_and(|memory| memory.is_reserved);
        let fragments = if is_reserved { run.machine.stacks.of(stack).fragments } else { 0.0 };
        let predicted_memory_gib = held.unwrap_or_default().total() * (1.0 + fragments) / GIB;
        let measured_memory_gib = run.memory.map(|memory| memory.gib);
        let request = request_for(run);
        Self {
            model: run.model.name.clone(),
            source: run.source.clone(),
            predicted_step_s: prediction.seconds,
            measured_step_s: run.step_seconds,
            error: prediction.seconds / run.step_seconds - 1.0,
            group: run.group.clone(),
            stack: stack.name(),
            uncertainty: run.uncertainty,
            predicted_memory_gib,
            measured_memory_gib,
            memory_error: measured_memory_gib.map(|measured| predicted_memory_gib / measured - 1.0),
            fits: prediction.peak_memory() <= request.memory_limit(),
            chosen: None,
            no_plan: None,
            details: Details { prediction },
        }
    }
}

/// The errors of the rows of a source.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct SourceErrors {
    /// The number of rows.
    pub(crate) rows: usize,
    /// The mean of the errors without their signs.
    pub(crate) mean: f64,
    /// The largest of them.
    pub(crate) largest: f64,
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
        let memory: Vec<f64> = rows.iter().filter_map(|row| row.memory_error.map(f64::abs)).collect();
        let names: std::collections::BTreeSet<&String> = rows.iter().map(|row| &row.group).collect();
        let named = names.into_iter().filter(|name| !name.is_empty());
        let of_group = |name: &String| (name.clone(), errors(rows.iter().filter(|row| row.group == *name)));
        Self {
            mean_error: mean,
            largest_error: largest,
            mean_memory_error: memory.iter().sum::<f64>() / memory.len().max(1) as f64,
            groups: named.map(of_group).collect(),
            other_models,
            remarks,
            rows,
        }
    }

    /// Returns the errors of each source.
    pub(crate) fn by_source(&self) -> BTreeMap<&str, SourceErrors> {
        let sources: std::collections::BTreeSet<&str> =
            self.rows.iter().map(|row| row.source.as_str()).collect();
        let source_errors = |source| errors(self.rows.iter().filter(|row| row.source == source));
        sources.into_iter().map(|source| (source, source_errors(source))).collect()
    }

    /// Returns the table in Markdown: all rows, the errors of each source, the plans that were
    /// searched, and the keys that are not used.
    pub(crate) fn to_markdown(&self) -> String {
        let mut text = String::from(
            "| model | source | predicted s | measured s | error | memory GiB | products | attention | elementwise | launches | tensor | experts | context | data | bubble | optimizer |\n\
             |---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|\n",
        );
        self.rows.iter().for_each(|row| row.print(&mut text));
        text.push_str("\n| source | rows | mean error | largest error |\n|---|---|---|---|\n");
        let all = SourceErrors { rows: self.rows.len(), mean: self.mean_error, largest: self.largest_error };
        let groups = self.groups.iter().map(|(name, errors)| (name.as_str(), *errors));
        for (source, errors) in self.by_source().into_iter().chain(groups).chain([("all", all)]) {
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
        let memory = self.measured_memory_gib.map_or_else(String::new, |gib| format!(" (measured {gib:.1})"));
        let parts = &prediction.parts;
        let shares = [
            parts.products,
            parts.attention,
            parts.elementwise,
            parts.launches,
            parts.tensor,
            parts.experts,
            parts.context,
            parts.offload + parts.data,
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

/// Returns a request for the model, the machine and the batch of a published run, that fixes nothing.
pub(crate) fn request_for(run: &Run) -> Request {
    let Layout { gpus, batch, sequence, precision, scores, implementation, .. } = run.layout;
    let request = Request::new(run.model.clone(), run.machine.clone(), gpus, batch, sequence, precision);
    Request { scores, implementation, ..request }
}

/// The simulations of each search.
const SIMULATIONS: usize = 40;

/// The plan that the search chooses for the model, the machine and the batch of a row.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Chosen {
    /// The ranks of a tensor group.
    pub(crate) tp: u32,
    /// The ranks of a pipeline.
    pub(crate) pp: u32,
    /// The replicas.
    pub(crate) dp: u32,
    /// The ranks that divide each sequence.
    pub(crate) cp: u32,
    /// The groups of ranks that divide the experts.
    pub(crate) ep: u32,
    /// The ranks that divide each expert: a tensor group, or 1.
    pub(crate) etp: u32,
    /// The chunks of a rank.
    pub(crate) vp: u32,
    /// The rows of a microbatch.
    pub(crate) mbs: u32,
    /// The schedule.
    pub(crate) schedule: String,
    /// The blocks of each stage.
    pub(crate) cut: Vec<usize>,
    /// Whether the ranks of a tensor group divide the sequence between their products.
    pub(crate) sequence_parallel: bool,
    /// The part of the forward that is computed again: `none`, `selective` or `full`.
    pub(crate) recompute: &'static str,
    /// The tensors that replicas divide: `none`, `optimizer`, `gradients` or `parameters`.
    pub(crate) data_parallel: &'static str,
    /// The predicted seconds of a step.
    pub(crate) predicted_step_s: f64,
    /// The predicted seconds of the published run divided by these, minus 1.
    pub(crate) gain: f64,
}

impl Chosen {
    /// Searches the plan for a run whose step takes `published` seconds by its prediction. The plan is not slower
    /// than the run if the run fits into memory and its pipeline is not too large for the search to simulate.
    ///
    /// # Errors
    /// When the search fails, for example because no plan fits into memory.
    pub(crate) fn instead_of(run: &Run, published: f64) -> Result<Self, SearchError> {
        let request = Request { plans: 1, simulations: SIMULATIONS, ..request_for(run) };
        let found = search_from(&request, &run.layout)?;
        Ok(Self::new(&found.plans[0], published))
    }

    /// Makes the row's plan from a plan and the predicted seconds of the published run.
    fn new(plan: &ClusterPlan, published: f64) -> Self {
        let ClusterPlan { layout, prediction, .. } = plan;
        Self {
            tp: layout.tensor,
            pp: layout.pipeline,
            dp: layout.data(),
            cp: layout.context,
            ep: layout.expert,
            etp: layout.expert_tensor,
            vp: layout.chunks,
            mbs: layout.microbatch,
            schedule: layout.schedule_name().to_owned(),
            cut: prediction.blocks.clone(),
            sequence_parallel: layout.sequence_parallel,
            recompute: layout.recompute.name(),
            data_parallel: layout.sharding.name(),
            predicted_step_s: prediction.seconds,
            gain: published / prediction.seconds - 1.0,
        }
    }

    /// Returns the cells of a table, without the outer bars.
    pub(crate) fn cells(&self) -> String {
        let Self { tp, pp, dp, cp, ep, vp, mbs, schedule, recompute, data_parallel, .. } = self;
        let mut mesh = format!("t{tp} p{pp} d{dp}");
        for (letter, ranks) in [("c", cp), ("e", ep)] {
            if *ranks > 1 {
                let _ = write!(mesh, " {letter}{ranks}");
            }
        }
        let chunks = if *vp > 1 { format!(", {vp} chunks") } else { String::new() };
        format!(
            "{mesh} | {schedule}{chunks} | {mbs} | {recompute} | {data_parallel} | {:.2} | {:+.1}%",
            self.predicted_step_s,
            self.gain * 100.0
        )
    }
}
