//! What a step amounted to, put together from what each rank has to say.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use pipewright_schedule::Timeline;

use crate::executor::RankReport;
use crate::tensor::Values;

/// A training step that is done.
#[derive(Debug)]
pub struct StepSummary {
    /// Counted from 1.
    pub step: u64,
    /// Loss of each microbatch, in microbatch order.
    pub losses: Vec<f64>,
    /// What each microbatch counts for, times their number: 1 unless they differ in rows.
    pub loss_weights: Vec<f64>,
    /// Auxiliary losses by name, each the mean over the microbatches, without its weight.
    pub auxiliary: BTreeMap<Arc<str>, f64>,
    /// The last stage's outputs, of each microbatch in order; empty unless the batch asked for them
    /// ([`Batch::keep_outputs`](crate::batch::Batch::keep_outputs)), and in processes without the last stage.
    /// [`merge_by`](crate::batch::merge_by) joins them.
    pub outputs: Vec<Values>,
    /// Global norm of the gradient of the mean loss, before clipping.
    pub gradient_norm: f64,
    /// What each rank did and when, in seconds since the step began.
    pub timeline: Timeline,
    /// Time that each rank spent with the optimizer.
    pub update: Vec<Duration>,
    /// Time in which each rank stood idle for a message that had been sent, or was sending one.
    pub exposed_communication: Vec<Duration>,
    /// Most bytes that each rank held at once; 0 without [`crate::memory::TrackingAllocator`].
    pub peak_bytes: Vec<u64>,
    /// Whether any rank found [`PipelineConfig::interrupt`](crate::pipeline::PipelineConfig::interrupt) raised at the
    /// end of the step: the same in every process.
    pub interrupted: bool,
    /// From the call to its return.
    pub wall: Duration,
}

/// A forward-only step that is done.
#[derive(Debug)]
pub struct EvalSummary {
    /// Loss of each microbatch, in microbatch order; empty without targets.
    pub losses: Vec<f64>,
    /// What each microbatch counts for, times their number: 1 unless they differ in rows.
    pub loss_weights: Vec<f64>,
    /// Auxiliary losses by name, each the mean over the microbatches, without its weight.
    pub auxiliary: BTreeMap<Arc<str>, f64>,
    /// The last stage's outputs, of each microbatch in order; empty in a process that does not have that stage.
    pub outputs: Vec<Values>,
    /// What each rank did and when, in seconds since the step began.
    pub timeline: Timeline,
}

impl StepSummary {
    /// Mean over the microbatches, each as much as its rows.
    pub fn loss(&self) -> f64 {
        let counted = self.losses.iter().zip(&self.loss_weights).map(|(loss, share)| loss * share);
        counted.sum::<f64>() / self.losses.len() as f64
    }

    /// Share of the program's time in which ranks were held up by communication alone, as a mean over ranks.
    pub fn exposed_communication_fraction(&self) -> f64 {
        let whole = self.timeline.makespan() * self.exposed_communication.len() as f64;
        let exposed: f64 = self.exposed_communication.iter().map(Duration::as_secs_f64).sum();
        if whole > 0.0 { exposed / whole } else { 0.0 }
    }
}

/// The reports of all ranks of this process, in rank order.
pub(crate) fn training(
    step: u64,
    loss_weights: Vec<f64>,
    mut reports: Vec<RankReport>,
    wall: Duration,
) -> StepSummary {
    let ranks = reports.len() as u32;
    reports.sort_unstable_by_key(|report| report.rank);
    StepSummary {
        step,
        losses: reports.iter_mut().flat_map(|report| std::mem::take(&mut report.losses)).collect(),
        loss_weights,
        auxiliary: auxiliary(&reports),
        outputs: reports.iter_mut().flat_map(|report| std::mem::take(&mut report.outputs)).collect(),
        gradient_norm: reports.iter().find_map(|report| report.gradient_norm).unwrap_or(0.0),
        update: reports.iter().map(|report| report.update).collect(),
        exposed_communication: reports.iter().map(|report| report.exposed_communication).collect(),
        peak_bytes: reports.iter().map(|report| report.peak_bytes).collect(),
        interrupted: reports.iter().any(|report| report.interrupted),
        timeline: timeline(ranks, &mut reports),
        wall,
    }
}

/// As [`training`], for a forward-only program.
pub(crate) fn evaluation(loss_weights: Vec<f64>, mut reports: Vec<RankReport>) -> EvalSummary {
    let ranks = reports.len() as u32;
    reports.sort_unstable_by_key(|report| report.rank);
    EvalSummary {
        loss_weights,
        auxiliary: auxiliary(&reports),
        losses: reports.iter_mut().flat_map(|report| std::mem::take(&mut report.losses)).collect(),
        outputs: reports.iter_mut().flat_map(|report| std::mem::take(&mut report.outputs)).collect(),
        timeline: timeline(ranks, &mut reports),
    }
}

/// Losses of one name are added, in rank order.
fn auxiliary(reports: &[RankReport]) -> BTreeMap<Arc<str>, f64> {
    let mut sums = BTreeMap::new();
    for (name, loss) in reports.iter().flat_map(|report| &report.auxiliary) {
        *sums.entry(name.clone()).or_default() += loss;
    }
    sums
}

fn timeline(ranks: u32, reports: &mut [RankReport]) -> Timeline {
    Timeline::new(ranks, reports.iter_mut().flat_map(|report| std::mem::take(&mut report.events)).collect())
}
