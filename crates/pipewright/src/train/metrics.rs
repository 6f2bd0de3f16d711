//! The metrics of a step, as `metrics.jsonl` has them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::Serialize;

use crate::pipeline::{ExchangeTime, StepSummary};
use crate::train::preference::{LABEL_ACCURACY, PREFERENCE, preference_values};
use crate::train::sample::Sample;
use crate::train::validation::SourceLoss;

/// The metrics of one step, named as in `metrics.jsonl`.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Metrics {
    /// Counted from 1.
    pub step: u64,
    /// Mean loss over the step's batch. Of text, it is the cross entropy per token in nats, over the targets that count in
    /// the loss.
    pub loss: f64,
    /// Global norm of the gradient before clipping; infinite, which is null in JSON, if the update was
    /// skipped.
    pub grad_norm: f64,
    /// The factor of the losses in their backward; left out if losses are not scaled.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub loss_scale: Option<f64>,
    /// Whether the update was skipped ([`StepSummary::skipped`]); left out if not.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub skipped: bool,
    /// The optimizer's learning rate in this step.
    pub learning_rate: f64,
    /// What `tokens` and `tokens_per_second` count, in the plural, such as `samples`; left out if they count tokens of
    /// text. The losses of other models have no unit. The caller sets it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unit: Option<String>,
    /// Input tokens of the batch over the step's wall time.
    pub tokens_per_second: f64,
    /// The rate of the model's matrix products on all ranks together, forward and backward, in 10¹²
    /// operations per second; what is computed again does not count. Left out if it is not known. The caller
    /// sets it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model_tflops: Option<f64>,
    /// `model_tflops` over the peak rate of the ranks' devices (model FLOPs utilization); left out if the
    /// peak is not known. The caller sets it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mfu: Option<f64>,
    /// Wall time in milliseconds; of a step that begins during the one before
    /// ([`Trainer::step_ahead`](crate::train::Trainer::step_ahead)), from the end of that one.
    pub step_ms: f64,
    /// Seconds since the run's first step began, without the time between a stop and the resumption.
    pub elapsed_s: f64,
    /// When the step ended, in seconds since 1970 by the clock of the machine; left out if that is not known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unix_s: Option<f64>,
    /// Input tokens of all the run's steps.
    pub tokens: u64,
    /// The number of passes over the data, with the fraction of the current epoch; left out if it is not
    /// known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub epoch: Option<f64>,
    /// The number of rows that each source of a mixture has given in all the run's steps, in the order of the
    /// sources; left out without a mixture.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub source_rows: Vec<u64>,
    /// Share of the ranks' time in which they did not compute, from the first action to the last. If a rank
    /// begins the step while another one still updates
    /// ([`Trainer::step_ahead`](crate::train::Trainer::step_ahead)), the rest of that update counts. If the step overlaps with the
    /// one before, it is the share of the time from the end of that one.
    pub bubble_fraction: f64,
    /// Share of the ranks' time in which they only communicated.
    pub exposed_comm_fraction: f64,
    /// The milliseconds in which tokens for each rank were under way from the replicas that hold the experts
    /// together with it ([`ExchangeTime`]); left out if each replica holds all experts.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub expert_exchange_ms: Vec<f64>,
    /// The part of `expert_exchange_ms` in which each rank waited and computed nothing; left out like it.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub exposed_expert_exchange_ms: Vec<f64>,
    /// The milliseconds in which each rank computed nothing and waited for tokens that another of these
    /// replicas had not sent yet; left out like `expert_exchange_ms`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub expert_wait_ms: Vec<f64>,
    /// Whether the step was begun while the one before ran
    /// ([`Trainer::step_ahead`](crate::train::Trainer::step_ahead)); left out if not.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub began_early: bool,
    /// Whether each rank began the step before it had updated with the one before
    /// ([`PipelineConfig::delayed`](crate::pipeline::PipelineConfig::delayed)); left out if not.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub overlaps: bool,
    /// The milliseconds from the start of the timeline of the step before to the start of this step's; left out if they do not
    /// overlap.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub start_after_ms: Option<f64>,
    /// The milliseconds in which each rank updated before it had the gradient norm
    /// ([`StepSummary::early_update`]); left out if none did.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub early_update_ms: Vec<f64>,
    /// Whether a rank has undone such an update because of the norm ([`StepSummary::repaired`]); left out if
    /// not.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub repaired: bool,
    /// The gap before this step ([`StepGap::critical`](crate::pipeline::StepGap::critical)), in milliseconds.
    /// This and its parts are left out in the first step of a process, and in a step that follows an evaluation
    /// or a failed step.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gap_ms: Option<f64>,
    /// The part of the gap in which gradients are summed and the gradient norm is computed, in milliseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gap_sums_ms: Option<f64>,
    /// The update's part of the gap, in milliseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gap_update_ms: Option<f64>,
    /// The part of the gap between the update and the first action, in milliseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gap_between_ms: Option<f64>,
    /// The gap of each rank, from the end of its last action to its next one, in milliseconds.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub gap_per_rank_ms: Vec<f64>,
    /// The share of the step's sequences whose label the model predicts. Left out if targets are not labels.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub accuracy: Option<f64>,
    /// The values of preference training by name: the rewards, their margins, the share of pairs whose chosen completion
    /// has the larger reward, and log-probabilities. Left out in other training.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub preference: BTreeMap<String, f64>,
    /// The same for the validation data after the step; left out if they were not computed.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub validation_preference: BTreeMap<String, f64>,
    /// Auxiliary losses by name, each the mean over the batch without its weight; left out if there is none.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub auxiliary: BTreeMap<String, f64>,
    /// The part of each layer in an auxiliary loss, by name and layer; the parts of a name add up to its
    /// loss. Left out if there is none.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub auxiliary_by_layer: BTreeMap<String, BTreeMap<String, f64>>,
    /// The share of each expert in the choices of the step's tokens, by layer; the shares of a layer add up
    /// to 1. Left out if no layer has experts.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub expert_load: BTreeMap<String, Vec<f64>>,
    /// The sum that is minimised: `loss` with the weighted auxiliary losses; left out if there is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub total: Option<f64>,
    /// Most bytes that each rank held at once.
    pub peak_bytes: Vec<u64>,
    /// Mean cross entropy per token of the validation data after the step, in nats; left out if it was not
    /// computed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub validation_loss: Option<f64>,
    /// The exponential of `validation_loss`; left out without it, and if the loss is not one of tokens. The caller
    /// sets it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub validation_perplexity: Option<f64>,
    /// The share of the targets of the validation data that the model predicts
    /// ([`ValidationLosses::accuracy`](crate::train::ValidationLosses::accuracy)); left out if it is not known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub validation_accuracy: Option<f64>,
    /// The validation loss of each source of a mixture
    /// ([`Trainer::evaluate_sources`](crate::train::Trainer::evaluate_sources)); left out without a mixture.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub validation_sources: Vec<SourceLoss>,
    /// Prompts with the texts by which the model continued them after the step; left out if there are none.
    /// The caller sets them.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub samples: Vec<Sample>,
    /// The `bubble_fraction` of each rank.
    pub bubble_per_rank: Vec<f64>,
    /// The wall time of a step that the run's plan predicts, in milliseconds; left out if the run has no
    /// plan. The caller sets it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub planned_step_ms: Option<f64>,
    /// The wall time that was predicted for this step from earlier ones, in milliseconds; left out without a
    /// prediction. The caller sets it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub predicted_step_ms: Option<f64>,
    /// The number of steps between two checkpoints that the run has chosen; left out if it is fixed. The
    /// caller sets it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub checkpoint_interval: Option<u64>,
    /// The time that a checkpoint adds to the run, in milliseconds, from which the interval was chosen; left
    /// out if it was not measured. The caller sets it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub checkpoint_cost_ms: Option<f64>,
}

/// The counts of runs of language models.
pub const TOKENS: &str = "tokens";

impl Metrics {
    /// Returns what `tokens` counts, in the plural.
    pub fn counted(&self) -> &str {
        self.unit.as_deref().unwrap_or(TOKENS)
    }

    /// Sets what `tokens` counts, in the plural.
    pub fn set_counted(&mut self, unit: &str) {
        self.unit = (unit != TOKENS).then(|| unit.to_owned());
    }

    /// Returns the metrics of a step, as if it were the first one of a run. `tokens` is the number of tokens
    /// of its batch.
    pub fn of(report: &StepSummary, learning_rate: f64, tokens: u64) -> Self {
        let seconds = report.wall.as_secs_f64();
        let (gap, bubbles) = (report.gap.as_ref(), report.bubble_per_rank());
        Self {
            step: report.step.get(),
            loss: report.loss(),
            grad_norm: report.gradient_norm,
            loss_scale: report.loss_scale,
            skipped: report.skipped,
            learning_rate,
            tokens_per_second: tokens as f64 / seconds,
            step_ms: seconds * 1e3,
            elapsed_s: seconds,
            unix_s: SystemTime::now().duration_since(UNIX_EPOCH).ok().map(|time| time.as_secs_f64()),
            tokens,
            bubble_fraction: bubbles.iter().sum::<f64>() / bubbles.len().max(1) as f64,
            exposed_comm_fraction: report.exposed_communication_fraction(),
            expert_exchange_ms: exchange_ms(report, |exchange| exchange.total),
            exposed_expert_exchange_ms: exchange_ms(report, |exchange| exchange.exposed),
            expert_wait_ms: exchange_ms(report, |exchange| exchange.waited),
            began_early: report.began_early,
            overlaps: report.overlaps,
            start_after_ms: gap.filter(|_| report.overlaps).map(|gap| milliseconds(gap.since_last)),
            early_update_ms: early_update_ms(report),
            repaired: report.repaired,
            gap_ms: gap.map(|gap| milliseconds(gap.critical)),
            gap_sums_ms: gap.map(|gap| milliseconds(gap.sums)),
            gap_update_ms: gap.map(|gap| milliseconds(gap.update)),
            gap_between_ms: gap.map(|gap| milliseconds(gap.between)),
            gap_per_rank_ms: gap
                .map_or_else(Vec::new, |gap| gap.per_rank.iter().copied().map(milliseconds).collect()),
            accuracy: report.auxiliary.get(LABEL_ACCURACY).copied(),
            preference: preference_values(&report.auxiliary),
            auxiliary: by_text(report.auxiliary.iter().filter(is_loss)),
            auxiliary_by_layer: report
                .auxiliary_by_layer
                .iter()
                .map(|(name, layers)| (name.to_string(), by_text(layers.iter())))
                .collect(),
            expert_load: report
                .expert_loads
                .iter()
                .map(|(layer, choices)| (layer.to_string(), shares(choices)))
                .collect(),
            total: report.auxiliary.iter().any(|named| is_loss(&named)).then(|| report.total()),
            peak_bytes: report.peak_bytes.clone(),
            bubble_per_rank: bubbles,
            ..Self::default()
        }
    }
}

/// Returns a time of the exchanges of each rank, in milliseconds; none if no rank exchanges tokens.
fn exchange_ms(report: &StepSummary, time: impl Fn(&ExchangeTime) -> Duration) -> Vec<f64> {
    let exchanges = &report.expert_exchange;
    if exchanges.iter().all(|exchange| *exchange == ExchangeTime::default()) {
        return Vec::new();
    }
    exchanges.iter().map(|exchange| milliseconds(time(exchange))).collect()
}

/// Returns the times of early updates of each rank, in milliseconds; none if no rank has updated early.
fn early_update_ms(report: &StepSummary) -> Vec<f64> {
    let times = &report.early_update;
    if times.iter().all(Duration::is_zero) {
        return Vec::new();
    }
    times.iter().copied().map(milliseconds).collect()
}

fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// Returns the losses with names that can be serialised.
fn by_text<'a>(losses: impl Iterator<Item = (&'a Arc<str>, &'a f64)>) -> BTreeMap<String, f64> {
    losses.map(|(name, &loss)| (name.to_string(), loss)).collect()
}

/// Returns whether an auxiliary loss is a loss, and not another value that a loss reports.
fn is_loss((name, _): &(&Arc<str>, &f64)) -> bool {
    !name.starts_with(PREFERENCE) && ***name != *LABEL_ACCURACY
}

/// Returns the share of each count in their sum; zeros if all are 0.
fn shares(counts: &[u64]) -> Vec<f64> {
    let all = counts.iter().sum::<u64>().max(1) as f64;
    counts.iter().map(|&count| count as f64 / all).collect()
}
