//! Reads what a run has written into its folder: metrics, configuration and timelines.
//!
//! The run may still be under way, and other versions may have written it: unknown members of a line are
//! ignored, and missing ones are `None` or empty. [`crate::run_folder`] writes the folder.

use std::collections::BTreeMap;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use pipewright::bounded_file::{SMALL_TEXT, read_regular, read_regular_text};
use pipewright::train::{Metrics, Sample, SourceLoss};
use pipewright_schedule::Timeline;
use pipewright_schedule::measured::read_trace;
use serde::Deserialize;

use crate::error::RunError;
use crate::recovery::{LayerMove, Restart, SlowRank, VerifiedStep};
use crate::run_folder::{CONFIG, LARGEST, METRICS, TIMELINE, kept_timelines};

/// The metrics of a step, as far as the line has them. JSON has no infinite numbers, so they may be null.
#[derive(Clone, Debug, Deserialize)]
pub struct StepMetrics {
    /// The number of the step, from 1.
    pub step: u64,
    /// The kind of the event, if the line is an event between two steps.
    event: Option<String>,
    /// The mean loss of the targets.
    pub loss: Option<f64>,
    /// The loss with all auxiliary losses.
    pub total: Option<f64>,
    /// The loss of the validation data, after an evaluation.
    pub validation_loss: Option<f64>,
    /// The exponential of the validation loss of tokens.
    pub validation_perplexity: Option<f64>,
    /// The share of the targets of the validation data that the model predicts.
    pub validation_accuracy: Option<f64>,
    /// The validation loss of each source of a mixture.
    #[serde(default)]
    pub validation_sources: Vec<SourceLoss>,
    /// The norm of all gradients.
    pub grad_norm: Option<f64>,
    /// The factor of the losses in their backward, if losses are scaled.
    pub loss_scale: Option<f64>,
    /// Whether the update was skipped.
    #[serde(default)]
    pub skipped: bool,
    /// The learning rate.
    pub learning_rate: Option<f64>,
    /// What `tokens` counts, if the run is not one of text.
    pub unit: Option<String>,
    /// The input tokens per second.
    pub tokens_per_second: Option<f64>,
    /// The rate of the model's matrix products, in 10¹² operations per second.
    pub model_tflops: Option<f64>,
    /// The share of the peak rate.
    pub mfu: Option<f64>,
    /// The time of the step in milliseconds.
    pub step_ms: Option<f64>,
    /// The time that the plan of the run predicts.
    pub planned_step_ms: Option<f64>,
    /// The time that earlier steps predict.
    pub predicted_step_ms: Option<f64>,
    /// The time of the run until the end of the step, in seconds.
    pub elapsed_s: Option<f64>,
    /// The time at the end of the step, in seconds since 1970.
    pub unix_s: Option<f64>,
    /// The input tokens of the run until the end of the step.
    pub tokens: Option<f64>,
    /// The share of their time that the ranks are idle.
    pub bubble_fraction: Option<f64>,
    /// The share of their time that the ranks wait for messages.
    pub exposed_comm_fraction: Option<f64>,
    /// The time from the start of the timeline of the step before to the start of this step's, if they overlap.
    pub start_after_ms: Option<f64>,
    /// The time between the schedule of this step and the schedule of the one before, in milliseconds.
    pub gap_ms: Option<f64>,
    /// The part of the gap in which gradients are summed.
    pub gap_sums_ms: Option<f64>,
    /// The part of the gap in which parameters are updated.
    pub gap_update_ms: Option<f64>,
    /// The time of each rank from its update to the gradient norm, if it updates before.
    #[serde(default)]
    pub early_update_ms: Vec<Option<f64>>,
    /// Whether ranks have repaired an update before the norm.
    #[serde(default)]
    pub repaired: bool,
    /// The time of each rank for the exchange of tokens.
    #[serde(default)]
    pub expert_exchange_ms: Vec<Option<f64>>,
    /// The part of that time in which the rank computes nothing.
    #[serde(default)]
    pub exposed_expert_exchange_ms: Vec<Option<f64>>,
    /// The time that each rank waits for others before an exchange.
    #[serde(default)]
    pub expert_wait_ms: Vec<Option<f64>>,
    /// The texts that the model has written after an evaluation.
    #[serde(default)]
    pub samples: Vec<Sample>,
    /// The auxiliary losses by name.
    #[serde(default)]
    pub auxiliary: BTreeMap<String, Option<f64>>,
    /// The share of the sequences of the step whose label the model predicts.
    pub accuracy: Option<f64>,
    /// The values of preference training by name.
    #[serde(default)]
    pub preference: BTreeMap<String, Option<f64>>,
    /// The same for the validation data.
    #[serde(default)]
    pub validation_preference: BTreeMap<String, Option<f64>>,
    /// The share of its time that each rank is idle.
    #[serde(default)]
    pub bubble_per_rank: Vec<Option<f64>>,
    /// The most bytes that each rank has held.
    #[serde(default)]
    pub peak_bytes: Vec<Option<f64>>,
}

impl StepMetrics {
    /// Returns the figures that a display shows. A loss that the line lacks is not a number.
    pub fn shown(&self) -> Metrics {
        let known = |value: Option<f64>| value.unwrap_or(f64::NAN);
        let shares = self.bubble_per_rank.iter().map(|share| known(*share)).collect();
        let auxiliary = self.auxiliary.iter().map(|(name, loss)| (name.clone(), known(*loss)));
        Metrics {
            step: self.step,
            loss: known(self.loss),
            total: self.total,
            auxiliary: auxiliary.collect(),
            validation_loss: self.validation_loss,
            validation_perplexity: self.validation_perplexity,
            validation_accuracy: self.validation_accuracy,
            accuracy: self.accuracy,
            validation_sources: self.validation_sources.clone(),
            // JSON has no infinite number.
            grad_norm: self.grad_norm.unwrap_or(f64::INFINITY),
            loss_scale: self.loss_scale,
            skipped: self.skipped,
            learning_rate: known(self.learning_rate),
            unit: self.unit.clone(),
            tokens_per_second: known(self.tokens_per_second),
            tokens: self.tokens.unwrap_or_default() as u64,
            model_tflops: self.model_tflops,
            mfu: self.mfu,
            step_ms: known(self.step_ms),
            planned_step_ms: self.planned_step_ms,
            predicted_step_ms: self.predicted_step_ms,
            elapsed_s: self.elapsed_s.unwrap_or_default(),
            bubble_fraction: known(self.bubble_fraction),
            bubble_per_rank: shares,
            peak_bytes: self.peak_bytes.iter().map(|bytes| bytes.unwrap_or_default() as u64).collect(),
            ..Metrics::default()
        }
    }
}

/// A line of the metrics.
#[derive(Clone, Debug)]
pub enum MetricsLine {
    /// The metrics of a step.
    Step(Box<StepMetrics>),
    /// An event between two steps.
    Event(RunEvent),
}

/// An event between two steps, as a line of the metrics has it.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
pub enum RunEvent {
    /// The run has continued after a fault, or on more processes.
    Restart(Restart),
    /// A rank has become slow, or is no longer slow.
    SlowRank(SlowRank),
    /// Layers have moved to other ranks.
    LayerMove(LayerMove),
    /// A suspicious step was computed again.
    VerifiedStep(VerifiedStep),
}

impl RunEvent {
    /// Returns the last step before the event whose result counts.
    pub fn last_step(&self) -> u64 {
        match self {
            Self::Restart(restart) => restart.step,
            Self::SlowRank(slow) => slow.step,
            Self::LayerMove(moved) => moved.step,
            Self::VerifiedStep(verified) => verified.step,
        }
    }

    /// Returns the step in which the reason for the event occurred.
    pub fn step(&self) -> u64 {
        match self {
            // The first step with more processes.
            Self::Restart(restart) => restart.failed_step.unwrap_or(restart.step + 1),
            Self::SlowRank(slow) => slow.step,
            Self::LayerMove(moved) => moved.step,
            Self::VerifiedStep(verified) => verified.step,
        }
    }

    /// Returns the sentence that the display has shown.
    pub fn sentence(&self) -> String {
        match self {
            Self::Restart(restart) => restart.sentence(),
            Self::SlowRank(slow) => slow.sentence(),
            Self::LayerMove(moved) => moved.sentence(),
            Self::VerifiedStep(verified) => verified.sentence(),
        }
    }
}

/// The timeline of a step.
pub struct RecordedTimeline {
    /// The number of the step.
    pub step: u64,
    /// The timeline.
    pub timeline: Timeline,
}

/// Returns the median of a value over the steps that have it.
pub fn median_of(steps: &[StepMetrics], value: fn(&StepMetrics) -> Option<f64>) -> Option<f64> {
    median(steps.iter().filter_map(value).collect())
}

/// Returns the median, the upper of two.
pub(crate) fn median(mut values: Vec<f64>) -> Option<f64> {
    let middle = values.len() / 2;
    (!values.is_empty()).then(|| *values.select_nth_unstable_by(middle, f64::total_cmp).1)
}

/// Checks that a path is the folder of a run.
pub fn require_run(run: &Path) -> Result<(), RunError> {
    let is_run = [METRICS, TIMELINE].iter().any(|name| run.join(name).is_file());
    if is_run {
        return Ok(());
    }
    Err(RunError::input(format!(
        "{}: not the folder of a run: it has neither {METRICS} nor {TIMELINE}; name the folder that `run.out` named",
        run.display()
    )))
}

/// Returns the metrics of all steps in the order of the file. A last line without a line end is being
/// written, so it is left out if it is incomplete.
pub fn metrics(run: &Path) -> Result<Vec<StepMetrics>, RunError> {
    let (path, text) = (run.join(METRICS), metrics_text(run)?);
    let mut steps = Vec::new();
    for (line, content) in (1..).zip(text.split_inclusive('\n')) {
        match record_of(&path, line, content) {
            Ok(Some(MetricsLine::Step(step))) => steps.push(*step),
            Ok(_) => {}
            Err(_incomplete) if !content.ends_with('\n') => {}
            Err(broken) => return Err(broken),
        }
    }
    Ok(steps)
}

/// Reads a line of the metrics in the file `path`; `None` if it is empty, or an event that this version does not know.
pub(crate) fn record_of(path: &Path, line: usize, content: &str) -> Result<Option<MetricsLine>, RunError> {
    if content.trim().is_empty() {
        return Ok(None);
    }
    match serde_json::from_str(content) {
        Ok(StepMetrics { event: Some(_), .. }) => {
            Ok(serde_json::from_str(content).ok().map(MetricsLine::Event))
        }
        Ok(step) => Ok(Some(MetricsLine::Step(Box::new(step)))),
        Err(error) => Err(RunError::input(format!(
            "{}:{line}: not the metrics of a step: {error}; correct or remove the line",
            path.display()
        ))),
    }
}

/// Returns the events of the run, in their order.
pub fn events(run: &Path) -> Result<Vec<RunEvent>, RunError> {
    let text = metrics_text(run)?;
    let lines = text.lines().filter(|line| line.contains("\"event\""));
    Ok(lines.filter_map(|line| serde_json::from_str(line).ok()).collect())
}

/// Returns the text of the metrics; nothing if there are none.
fn metrics_text(run: &Path) -> Result<String, RunError> {
    let path = run.join(METRICS);
    match read_regular(&path, LARGEST) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(String::new()),
        read => Ok(String::from_utf8_lossy(&read.map_err(read_error(&path))?).into_owned()),
    }
}

/// Returns the text of the run's configuration; nothing if there is none.
pub fn config_text(run: &Path) -> Result<String, RunError> {
    let path = run.join(CONFIG);
    match read_regular_text(&path, SMALL_TEXT) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(String::new()),
        read => read.map_err(read_error(&path)),
    }
}

/// Returns the files of all recorded timelines with their steps, in their order. The last step's file may be
/// there twice, and is then listed once.
pub fn timeline_files(run: &Path) -> Result<Vec<(u64, PathBuf)>, RunError> {
    let mut files = kept_timelines(run).map_err(read_error(run))?;
    let last = run.join(TIMELINE);
    if last.is_file() {
        let newest = files.last().map_or(0, |(step, _)| *step);
        let step = metrics(run)?.last().map_or(newest + 1, |metrics| metrics.step);
        files.retain(|(other, _)| *other != step);
        files.push((step, last));
        files.sort_unstable();
    }
    Ok(files)
}

/// Reads all recorded timelines, in the order of their steps.
pub fn timelines(run: &Path) -> Result<Vec<RecordedTimeline>, RunError> {
    let files = timeline_files(run)?;
    if files.is_empty() {
        return Err(RunError::input(format!(
            "{}: the run has no timeline: {TIMELINE} is missing, which a run writes at its end; let it finish, or resume it",
            run.display()
        )));
    }
    files
        .into_iter()
        .map(|(step, path)| Ok(RecordedTimeline { step, timeline: read_timeline(&path)? }))
        .collect()
}

/// Reads one timeline.
pub fn read_timeline(path: &Path) -> Result<Timeline, RunError> {
    let text = read_regular_text(path, LARGEST).map_err(read_error(path))?;
    read_trace(&text)
        .map_err(|error| RunError::input(format!("{}: {error}; remove the file", path.display())))
}

/// Returns a function for `map_err` that adds the path to a failed read.
pub(crate) fn read_error(path: &Path) -> impl FnOnce(io::Error) -> RunError {
    move |error| RunError::input(format!("{}: cannot be read: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn run(metrics: &str) -> tempfile::TempDir {
        let folder = tempfile::tempdir().expect("a scratch folder");
        fs::write(folder.path().join(METRICS), metrics).expect("it takes files");
        folder
    }

    #[test]
    fn lines_may_have_more_or_fewer_members() {
        let folder =
            run("{\"step\":1,\"loss\":2.5,\"unknown\":[{}],\"auxiliary\":{\"moe_aux\":0.5},\"host_ms\":1}\n\
             {\"step\":2,\"loss\":null,\"validation_loss\":3.5,\"peak_bytes\":[1,2]}\n{\"step\":3,\"lo");
        let steps = metrics(folder.path()).expect("two lines and a part of one");
        assert_eq!(steps.len(), 2);
        assert_eq!(
            (steps[0].loss, steps[0].auxiliary["moe_aux"], steps[0].grad_norm),
            (Some(2.5), Some(0.5), None)
        );
        assert_eq!((steps[1].loss, steps[1].validation_loss), (None, Some(3.5)));
        assert_eq!(steps[1].peak_bytes, [Some(1.0), Some(2.0)]);
    }

    #[test]
    fn events_are_not_steps() {
        let restart =
            r#"{"event":"restart","step":1,"failed_step":3,"rank":1,"cause":"lost","restart":1,"of":3}"#;
        let slow = r#"{"event":"slow_rank","step":2,"ranks":[1],"slowdown":2.5}"#;
        let other = r#"{"event":"unknown","step":2}"#;
        let growth = r#"{"event":"growth","step":2,"rank":null,"cause":"b answers","restart":1,"growths":1}"#;
        let lines = ["{\"step\":1}", restart, "{\"step\":2}", slow, other, growth, ""].join("\n");
        let folder = run(&lines);
        let steps: Vec<u64> = metrics(folder.path()).expect("lines").iter().map(|step| step.step).collect();
        assert_eq!(steps, [1, 2]);
        let events = events(folder.path()).expect("lines");
        let places: Vec<_> = events.iter().map(|event| (event.last_step(), event.step())).collect();
        assert_eq!(places, [(1, 3), (2, 2), (2, 3)], "{events:?}");
        let [RunEvent::Restart(_), RunEvent::SlowRank(_), RunEvent::Restart(growth)] = &events[..] else {
            panic!("{events:?}")
        };
        assert_eq!(growth.sentence(), "b answers; the run continues from step 2");
    }

    #[test]
    fn a_broken_line_is_named() {
        let folder = run("{\"step\":1}\n\n{\"step\":}\n{\"step\":3}\n");
        let message = metrics(folder.path()).expect_err("a broken line").to_string();
        assert!(message.contains("metrics.jsonl:3: not the metrics of a step: expected value"), "{message}");
    }

    #[test]
    fn a_folder_without_results_is_not_a_run() {
        let folder = tempfile::tempdir().expect("a scratch folder");
        let error = require_run(folder.path()).expect_err("an empty folder").to_string();
        assert!(error.contains(": not the folder of a run"), "{error}");
        let folder = run("");
        assert!(require_run(folder.path()).is_ok());
        let error = timelines(folder.path()).err().expect("no timeline").to_string();
        assert!(error.contains("the run has no timeline: timeline.json is missing"), "{error}");
    }
}
