//! The data of the page.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use pipewright::train::{Sample, TOKENS};
use pipewright_schedule::Timeline;
use serde::Serialize;

use crate::run_record::{RunEvent, StepMetrics, median, median_of};
use crate::run_report::differences::{SettingDifference, differences};
use crate::run_report::goodput::Goodput;
use crate::run_report::groups::{Series, groups, series};

/// The most evaluations whose samples the page has.
const MOST_SAMPLES: usize = 20;

/// A run as its folder shows it.
pub struct RunSource {
    /// The name by which the user refers to the run.
    pub name: String,
    /// The metrics of its steps.
    pub steps: Vec<StepMetrics>,
    /// The events between its steps.
    pub events: Vec<RunEvent>,
    /// The text of the configuration.
    pub config: String,
    /// The timeline of the last step.
    pub timeline: Option<Timeline>,
    /// The files that the page refers to.
    pub links: RunLinks,
}

/// The files of a run that the page refers to, relative to the page.
#[derive(Clone, Debug, Default, Serialize)]
pub struct RunLinks {
    /// The page that `pipewright view` made, if it is in the run's folder.
    pub view: Option<String>,
    /// The timelines for Perfetto, each with its step.
    pub timelines: Vec<(u64, String)>,
    /// The command that makes the page of the timelines.
    pub command: String,
}

#[derive(Serialize)]
pub(super) struct ReportData {
    pub(super) runs: Vec<RunData>,
    pub(super) differences: Vec<SettingDifference>,
    /// The milliseconds after which the page loads itself again.
    reload: Option<f64>,
}

#[derive(Serialize)]
pub(super) struct RunData {
    pub(super) name: String,
    /// What `tokens` counts.
    unit: String,
    /// The last step of each group, the seconds and the tokens until its end.
    steps: Vec<u64>,
    seconds: Vec<Option<f64>>,
    tokens: Vec<Option<f64>>,
    series: BTreeMap<String, Series>,
    /// The bubble and the peak memory of each rank.
    bubble: Vec<Series>,
    memory: Vec<Series>,
    pub(super) figures: Figures,
    /// The events, each at the group that has the last step before it.
    pub(super) events: Vec<EventData>,
    /// The texts by which the model continued prompts, each time with the step.
    samples: Vec<(u64, Vec<Sample>)>,
    config: String,
    links: RunLinks,
}

/// An event between two steps of the run, such as a restart.
#[derive(Serialize)]
pub(super) struct EventData {
    /// The index of the group after whose steps the event occurred; none if it was before the first step.
    group: Option<usize>,
    /// The step in which the reason for the event occurred.
    pub(super) step: u64,
    pub(super) text: String,
}

/// The figures of the whole run.
#[derive(Serialize)]
pub(super) struct Figures {
    pub(super) steps: u64,
    pub(super) first_loss: Option<f64>,
    pub(super) best_loss: Option<LossAtStep>,
    pub(super) last_loss: Option<f64>,
    pub(super) validation_loss: Option<f64>,
    pub(super) best_validation_loss: Option<LossAtStep>,
    pub(super) validation_perplexity: Option<f64>,
    pub(super) validation_accuracy: Option<f64>,
    pub(super) tokens: Option<f64>,
    pub(super) seconds: Option<f64>,
    pub(super) goodput: Option<Goodput>,
    /// Medians.
    pub(super) tokens_per_second: Option<f64>,
    pub(super) model_tflops: Option<f64>,
    pub(super) mfu: Option<f64>,
    pub(super) step_ms: Option<f64>,
    pub(super) planned_step_ms: Option<f64>,
    pub(super) predicted_step_ms: Option<f64>,
    /// The share of the time in which ranks do not compute, a mean over the ranks.
    pub(super) bubble: Option<f64>,
    pub(super) exposed: Option<f64>,
    /// The milliseconds of a step in which tokens of experts are under way, the part of it in which ranks
    /// compute nothing, and the time in which they wait for a replica that has not sent yet: means over the
    /// ranks.
    pub(super) expert_exchange_ms: Option<f64>,
    pub(super) exposed_expert_exchange_ms: Option<f64>,
    pub(super) expert_wait_ms: Option<f64>,
    /// The gap between two steps, in milliseconds.
    pub(super) gap_ms: Option<f64>,
    /// The number of steps whose updates before the gradient norm were repaired, and of all steps with such
    /// updates.
    pub(super) repaired: Option<[usize; 2]>,
    /// The share of the time in which each rank computes: the median over the run, or the share in the last
    /// step.
    pub(super) utilisation: Vec<f64>,
    pub(super) peak_bytes: Vec<f64>,
}

/// A loss and the step that it is of.
#[derive(Serialize)]
pub(super) struct LossAtStep {
    pub(super) loss: f64,
    pub(super) step: u64,
}

impl RunSource {
    /// Returns the configuration; empty if it is not TOML.
    pub(super) fn settings(&self) -> toml::Table {
        self.config.parse().unwrap_or_default()
    }

    /// Returns whether the run has taken all the steps that its configuration asks for.
    pub fn is_complete(&self) -> bool {
        let steps = self.settings();
        let steps = steps.get("run").and_then(|run| run.get("steps")?.as_integer());
        let done = self.steps.last().map_or(0, |step| step.step);
        steps.is_none_or(|steps| i64::try_from(done).unwrap_or(i64::MAX) >= steps)
    }
}

impl ReportData {
    pub(super) fn of(runs: &[RunSource], interval: Option<Duration>) -> Self {
        let settings: Vec<_> = runs.iter().map(RunSource::settings).collect();
        Self {
            runs: runs.iter().map(RunData::of).collect(),
            differences: differences(&settings),
            reload: interval.map(|interval| interval.as_secs_f64() * 1e3),
        }
    }
}

impl RunData {
    fn of(run: &RunSource) -> Self {
        let steps = &run.steps;
        let groups = groups(steps.len());
        let at_end = |value: fn(&StepMetrics) -> Option<f64>| -> Vec<Option<f64>> {
            groups.iter().map(|&(_, last)| value(&steps[last])).collect()
        };
        let all_ranks = |values: fn(&StepMetrics) -> &[Option<f64>]| -> Vec<Series> {
            let ranks = steps.iter().map(|step| values(step).len()).max().unwrap_or(0);
            let rank_series =
                |rank| series(&groups, |step| values(&steps[step]).get(rank).copied().flatten());
            (0..ranks).map(rank_series).collect()
        };
        Self {
            name: run.name.clone(),
            unit: steps.last().and_then(|step| step.unit.clone()).unwrap_or_else(|| TOKENS.to_owned()),
            steps: groups.iter().map(|&(_, last)| steps[last].step).collect(),
            seconds: at_end(|step| step.elapsed_s),
            tokens: at_end(|step| step.tokens),
            series: all_series(steps, &groups),
            bubble: all_ranks(|step| &step.bubble_per_rank),
            memory: all_ranks(|step| &step.peak_bytes),
            events: run.events.iter().map(|event| EventData::of(event, &groups, steps)).collect(),
            samples: samples(steps),
            figures: Figures::of(run),
            config: run.config.clone(),
            links: run.links.clone(),
        }
    }
}

/// Returns the samples of the first evaluation and of the last ones.
fn samples(steps: &[StepMetrics]) -> Vec<(u64, Vec<Sample>)> {
    let all = steps.iter().filter(|step| !step.samples.is_empty());
    let mut all: Vec<_> = all.map(|step| (step.step, step.samples.clone())).collect();
    if all.len() > MOST_SAMPLES {
        all.drain(1..all.len() + 1 - MOST_SAMPLES);
    }
    all
}

impl EventData {
    fn of(event: &RunEvent, groups: &[(usize, usize)], steps: &[StepMetrics]) -> Self {
        let is_before = |&(_, last): &(usize, usize)| steps[last].step < event.last_step();
        // The group that has the step, or the last one.
        let group =
            groups.iter().take_while(|group| is_before(group)).count().min(groups.len().saturating_sub(1));
        let group = (event.last_step() > 0 && !groups.is_empty()).then_some(group);
        Self { group, step: event.step(), text: event.sentence() }
    }
}

/// Returns every value that occurs in the steps, by its name.
fn all_series(steps: &[StepMetrics], groups: &[(usize, usize)]) -> BTreeMap<String, Series> {
    type Value = fn(&StepMetrics) -> Option<f64>;
    let named: [(&str, Value); 15] = [
        ("loss", |step| step.loss),
        ("total", |step| step.total),
        ("validation_loss", |step| step.validation_loss),
        ("accuracy", |step| step.accuracy),
        ("validation_accuracy", |step| step.validation_accuracy),
        ("grad_norm", |step| step.grad_norm),
        ("learning_rate", |step| step.learning_rate),
        ("tokens_per_second", |step| step.tokens_per_second),
        ("step_ms", |step| step.step_ms),
        ("planned_step_ms", |step| step.planned_step_ms),
        ("predicted_step_ms", |step| step.predicted_step_ms),
        ("bubble_fraction", |step| step.bubble_fraction),
        ("exposed_comm_fraction", |step| step.exposed_comm_fraction),
        ("gap_ms", |step| step.gap_ms),
        ("gap_sums_and_update_ms", |step| Some(step.gap_sums_ms? + step.gap_update_ms?)),
    ];
    let named = named.map(|(name, value)| (name.to_owned(), series(groups, |step| value(&steps[step]))));
    type Named = fn(&StepMetrics) -> &BTreeMap<String, Option<f64>>;
    let tables: [(&str, Named); 3] = [
        ("auxiliary", |step| &step.auxiliary),
        ("preference", |step| &step.preference),
        ("preference_validation", |step| &step.validation_preference),
    ];
    let by_name = tables.into_iter().flat_map(|(table, values)| {
        let names: BTreeSet<&String> = steps.iter().flat_map(|step| values(step).keys()).collect();
        let of_name = move |name: &String| {
            (
                format!("{table} {name}"),
                series(groups, |step| values(&steps[step]).get(name).copied().flatten()),
            )
        };
        names.into_iter().map(of_name)
    });
    let loss_of = |step: usize, name: &String| {
        let source = steps[step].validation_sources.iter().find(|source| source.name == *name);
        source.and_then(|source| source.loss)
    };
    let names: BTreeSet<&String> =
        steps.iter().flat_map(|step| &step.validation_sources).map(|source| &source.name).collect();
    let sources = names
        .into_iter()
        .map(|name| (format!("validation {name}"), series(groups, |step| loss_of(step, name))));
    named.into_iter().chain(by_name).chain(sources).filter(|(_, series)| series.has_values()).collect()
}

impl Figures {
    fn of(run: &RunSource) -> Self {
        let steps = &run.steps;
        let last_of = |value: fn(&StepMetrics) -> Option<f64>| steps.iter().rev().find_map(value);
        let losses = steps.iter().filter_map(|step| Some(LossAtStep { loss: step.loss?, step: step.step }));
        let validation =
            steps.iter().filter_map(|step| Some(LossAtStep { loss: step.validation_loss?, step: step.step }));
        let smaller = |one: &LossAtStep, other: &LossAtStep| one.loss.total_cmp(&other.loss);
        // The first steps are slower than all others, so medians describe the run better than means.
        let median_of = |value: fn(&StepMetrics) -> Option<f64>| median_of(steps, value);
        Self {
            steps: steps.last().map_or(0, |step| step.step),
            first_loss: steps.iter().find_map(|step| step.loss),
            best_loss: losses.min_by(smaller),
            last_loss: last_of(|step| step.loss),
            validation_loss: last_of(|step| step.validation_loss),
            best_validation_loss: validation.min_by(smaller),
            validation_perplexity: last_of(|step| step.validation_perplexity),
            validation_accuracy: last_of(|step| step.validation_accuracy),
            tokens: last_of(|step| step.tokens),
            seconds: last_of(|step| step.elapsed_s),
            goodput: Goodput::of(steps, &run.events),
            tokens_per_second: median_of(|step| step.tokens_per_second),
            model_tflops: median_of(|step| step.model_tflops),
            mfu: median_of(|step| step.mfu),
            step_ms: median_of(|step| step.step_ms),
            planned_step_ms: last_of(|step| step.planned_step_ms),
            predicted_step_ms: median_of(|step| step.predicted_step_ms),
            bubble: median_of(|step| step.bubble_fraction)
                .or_else(|| Some(run.timeline.as_ref()?.bubble_fraction())),
            exposed: median_of(|step| step.exposed_comm_fraction),
            expert_exchange_ms: median_of(|step| mean_of_ranks(&step.expert_exchange_ms)),
            exposed_expert_exchange_ms: median_of(|step| mean_of_ranks(&step.exposed_expert_exchange_ms)),
            expert_wait_ms: median_of(|step| mean_of_ranks(&step.expert_wait_ms)),
            gap_ms: median_of(|step| step.gap_ms),
            repaired: repaired(steps),
            utilisation: utilisation(run),
            peak_bytes: peaks(steps),
        }
    }
}

/// Returns the number of steps with a repaired update, and of steps with an update before the gradient norm;
/// `None` if there is none.
fn repaired(steps: &[StepMetrics]) -> Option<[usize; 2]> {
    let early = steps.iter().filter(|step| !step.early_update_ms.is_empty());
    let counts = [early.clone().filter(|step| step.repaired).count(), early.count()];
    (counts[1] > 0).then_some(counts)
}

/// Returns the mean of a value of the ranks; `None` without ranks.
fn mean_of_ranks(values: &[Option<f64>]) -> Option<f64> {
    let known: Vec<f64> = values.iter().copied().flatten().collect();
    (!known.is_empty()).then(|| known.iter().sum::<f64>() / known.len() as f64)
}

fn utilisation(run: &RunSource) -> Vec<f64> {
    let last = run.steps.last().map_or(&[][..], |step| &step.bubble_per_rank);
    let rank_utilisation = |rank| {
        let bubbles = run.steps.iter().filter_map(|step| step.bubble_per_rank.get(rank).copied().flatten());
        median(bubbles.collect()).map_or(0.0, |bubble| 1.0 - bubble)
    };
    match &run.timeline {
        Some(timeline) if last.is_empty() => {
            timeline.bubble_per_rank().iter().map(|bubble| 1.0 - bubble).collect()
        }
        _ => (0..last.len()).map(rank_utilisation).collect(),
    }
}

/// Returns the most bytes that each rank of the last step held in any step with as many ranks.
fn peaks(steps: &[StepMetrics]) -> Vec<f64> {
    let ranks = steps.last().map_or(0, |step| step.peak_bytes.len());
    let comparable = || steps.iter().filter(move |step| step.peak_bytes.len() == ranks);
    let peak = |rank: usize| comparable().filter_map(|step| step.peak_bytes[rank]).fold(0.0, f64::max);
    (0..ranks).map(peak).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fault::Fault;
    use crate::recovery::Restart;

    #[test]
    fn a_run_is_summarized() {
        let line = |text: &str| serde_json::from_str(text).expect("metrics");
        let steps = vec![
            line(
                "{\"step\":1,\"loss\":4.0,\"step_ms\":90,\"peak_bytes\":[1,9],\"bubble_per_rank\":[0.5,0.25]}",
            ),
            line(
                "{\"step\":2,\"loss\":2.0,\"step_ms\":30,\"early_update_ms\":[0,1],\"repaired\":true,\"samples\":[{\"prompt\":\"a\",\"text\":\"b\"}],\"validation_loss\":3.0,\"validation_perplexity\":20.0,\"validation_accuracy\":0.25,\"validation_sources\":[{\"name\":\"a.txt\",\"loss\":2.5},{\"name\":\"b\",\"loss\":null}],\"peak_bytes\":[2,8],\"bubble_per_rank\":[0.25,0.5]}",
            ),
            line(
                "{\"step\":3,\"loss\":3.0,\"step_ms\":31,\"early_update_ms\":[0,2],\"expert_exchange_ms\":[4,2],\"exposed_expert_exchange_ms\":[1,0],\"expert_wait_ms\":[0,9],\"auxiliary\":{\"moe_z\":0.5},\"peak_bytes\":[2,8],\"bubble_per_rank\":[0.25,0.5]}",
            ),
        ];
        let fault = Fault {
            step: 3,
            rank: Some(1),
            cause: "lost".to_owned(),
            summary: "step 3: rank 1: lost".to_owned(),
            ..Fault::default()
        };
        let source = RunSource {
            name: "a".to_owned(),
            steps,
            events: vec![RunEvent::Restart(Restart { step: 2, ..Restart::after(&fault, 1, 3) })],
            config: String::new(),
            timeline: None,
            links: RunLinks::default(),
        };
        let data = serde_json::to_value(ReportData::of(&[source], None)).expect("JSON");
        let run = &data["runs"][0];
        assert_eq!(run["figures"]["best_loss"], serde_json::json!({ "loss": 2.0, "step": 2 }));
        assert_eq!(
            (run["figures"]["step_ms"].as_f64(), run["figures"]["validation_loss"].as_f64()),
            (Some(31.0), Some(3.0))
        );
        assert_eq!(run["figures"]["validation_perplexity"], 20.0);
        assert_eq!(run["figures"]["validation_accuracy"], 0.25);
        assert_eq!(run["series"]["validation_accuracy"]["mean"], serde_json::json!([null, 0.25, null]));
        assert_eq!(run["figures"]["best_validation_loss"], serde_json::json!({ "loss": 3.0, "step": 2 }));
        let exchange = ["expert_exchange_ms", "exposed_expert_exchange_ms", "expert_wait_ms"]
            .map(|key| run["figures"][key].as_f64());
        assert_eq!(exchange, [Some(3.0), Some(0.5), Some(4.5)]);
        assert_eq!(run["figures"]["repaired"], serde_json::json!([1, 2]));
        assert_eq!(run["figures"]["utilisation"], serde_json::json!([0.75, 0.5]));
        assert_eq!(run["figures"]["peak_bytes"], serde_json::json!([2.0, 9.0]));
        assert_eq!(run["series"]["auxiliary moe_z"]["mean"], serde_json::json!([null, null, 0.5]));
        assert!(run["series"].get("total").is_none(), "{run}");
        assert_eq!(run["series"]["validation a.txt"]["mean"], serde_json::json!([null, 2.5, null]));
        assert!(run["series"].get("validation b").is_none(), "it has no loss: {run}");
        let samples = serde_json::json!([[2, [{"prompt": "a", "text": "b"}]]]);
        assert_eq!(run["samples"], samples);
        let restart = &run["events"][0];
        assert_eq!((restart["group"].as_u64(), restart["step"].as_u64()), (Some(1), Some(3)));
    }

    #[test]
    fn a_run_without_metrics_has_the_bubble_of_its_timeline() {
        let event = |rank, end| pipewright_schedule::Event {
            rank: pipewright_schedule::Rank::new(rank),
            action: "0F0".parse().expect("an action"),
            start: 0.0,
            end,
        };
        let source = RunSource {
            name: "a".to_owned(),
            steps: Vec::new(),
            events: Vec::new(),
            config: String::new(),
            timeline: Some(Timeline::new(2, vec![event(0, 4.0), event(1, 2.0)])),
            links: RunLinks::default(),
        };
        let figures = Figures::of(&source);
        assert_eq!((figures.bubble, figures.utilisation), (Some(0.25), vec![1.0, 0.5]));
    }
}
