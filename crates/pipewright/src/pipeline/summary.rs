//! The results of one step, merged from the reports of all ranks.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use burn::tensor::Tensor;
use pipewright_schedule::{ClockSkew, Rank, StageIndex, Timeline};

use super::setup::Setup;
use super::step_gap::StepGap;
use super::step_plan::StepPlan;
use crate::batch::{LossFactors, ReplicaGradients, SideSums, SplitError, add_side, joined_slices};
use crate::checkpoint::Fingerprint;
use crate::executor::{AuxiliaryPart, ExchangeTime, RankReport, UndeferredParameter, sums_of};
use crate::ids::StepNumber;
use crate::mesh::RankGroups;
use crate::stage::ExpertLoad;
use crate::tensor::{BoundaryError, OptionalTensors, Values, unpack};
use crate::verification::Verification;

/// The results of a training step.
#[derive(Debug)]
pub struct StepSummary {
    /// Counted from 1.
    pub step: StepNumber,
    /// Loss of each microbatch, in microbatch order.
    pub losses: Vec<f64>,
    /// The weight of each microbatch's loss, times their number: 1 unless microbatches differ in rows, or the
    /// batch says otherwise ([`Batch::weighted`](crate::batch::Batch::weighted),
    /// [`Batch::summed`](crate::batch::Batch::summed)).
    pub loss_weights: Vec<f64>,
    /// Auxiliary losses by name, without their weights. The microbatches count as for the loss.
    pub auxiliary: BTreeMap<Arc<str>, f64>,
    /// The part of each layer in the auxiliary losses of a name, for losses whose layers are known
    /// ([`StageContext::auxiliary_loss_of`](crate::stage::StageContext::auxiliary_loss_of)). The parts of a
    /// name add up to its loss, within rounding.
    pub auxiliary_by_layer: BTreeMap<Arc<str>, BTreeMap<Arc<str>, f64>>,
    /// How many choices of the step's tokens each expert has got, by layer, over all microbatches and
    /// replicas ([`StageContext::expert_load`](crate::stage::StageContext::expert_load)).
    pub expert_loads: BTreeMap<Arc<str>, Vec<u64>>,
    /// The sum of all auxiliary losses, each with its weight.
    pub weighted_auxiliary: f64,
    /// The last stage's outputs, of each microbatch in order; empty unless the batch asked for them
    /// ([`Batch::keep_outputs`](crate::batch::Batch::keep_outputs)), and in processes without the last stage.
    /// [`merge_by`](crate::batch::merge_by) joins them.
    pub outputs: Vec<Values>,
    /// The outputs of the stages that the batch asked for
    /// ([`Batch::keep_outputs_of`](crate::batch::Batch::keep_outputs_of)), of each microbatch in order. A
    /// process has the outputs of its own stages. Tensors of skip connections follow the tensors for the next
    /// stage.
    pub stage_outputs: BTreeMap<StageIndex, Vec<Values>>,
    /// The gradient of each input with respect to [`StepSummary::total`], if the batch asked for it
    /// ([`Batch::keep_input_gradients`](crate::batch::Batch::keep_input_gradients)); empty in processes
    /// without the first stage. Each has the shape of the whole input; if the input is the same for all
    /// microbatches, the gradient is the sum over them. It is not clipped. It is absent if the loss does not
    /// depend on the input. A process with some of the replicas has the rows of their microbatches. Multiply
    /// the gradients of accumulated batches by the batch's share in the sum of their
    /// [`StepSummary::weight`]s.
    pub input_gradients: OptionalTensors,
    /// The gradients of the side inputs with a tensor that requires one
    /// ([`Tensor::require_grad`]), by name, with an entry for each tensor. They have the shapes and the scale of
    /// [`StepSummary::input_gradients`], and are the sums over all stages that have looked the tensor up. One
    /// that no stage has used is absent. A process has the sums over its own stages and replicas; add the
    /// gradients of the processes. As for inputs, ranks of a tensor group that use a tensor for their shards
    /// enter it first ([`TensorParallel::enter`](crate::nn::TensorParallel::enter)).
    pub side_gradients: BTreeMap<Arc<str>, OptionalTensors>,
    /// The weight of the batch among batches whose gradients are accumulated: its rows, or the sum of its
    /// weights. If losses are added, it is the number of microbatches.
    pub weight: f64,
    /// Global norm of the gradient of the loss, before clipping; infinite if the update was skipped.
    pub gradient_norm: f64,
    /// The factor of the losses in the backwards of this step; `None` if losses are not scaled, as in any
    /// precision but f16.
    pub loss_scale: Option<f64>,
    /// Whether all ranks skipped the update, because the scaled gradients were too large for f16. Parameters
    /// and optimizer state do not change, and the next step has half the scale.
    pub skipped: bool,
    /// The result of the repetitions of a suspicious step
    /// ([`PipelineConfig::verify`](crate::pipeline::PipelineConfig::verify)); `None` if the step was not
    /// repeated. It is the same in every process, except for the reason if several ranks had one.
    pub verification: Option<Verification>,
    /// If this call has repeated the step: the summaries of the step's earlier batches in the computation
    /// that counts, in order. They replace the summaries that
    /// [`Pipeline::accumulate`](crate::pipeline::Pipeline::accumulate) has returned for these batches. Empty
    /// otherwise.
    pub repeated: Vec<StepSummary>,
    /// The hashes of the trained parameters and their optimizer state after the update, if they are due
    /// ([`PipelineConfig::fingerprint_every`](crate::pipeline::PipelineConfig::fingerprint_every)). They do not depend
    /// on the cut or the schedule. `None` in other steps, and in all processes but the first.
    pub fingerprint: Option<Fingerprint>,
    /// The parameters of that fingerprint for which replicas have different hashes. The hash of the first replica counts.
    pub unlike_replicas: Vec<Arc<str>>,
    /// The actions of each rank with their times, in seconds since the first rank of this process began the
    /// step. A rank that begins later, because it still ends the step before
    /// ([`Pipeline::begin`](super::Pipeline::begin)), is idle until then. If ranks are processes, the first
    /// one has the events of all, on one clock ([`Timeline::clock_skew`]), and each other one has its own.
    /// Ranks that compute stages together have one row, with the events of the first of them. A forward that
    /// a backward computes again has an event before the backward's. If the halves of an overlap run by
    /// turns, the overlap is one event, and the recomputation is a part of it; scopes have the times in which
    /// each half computed and exchanged.
    pub timeline: Timeline,
    /// The time of each rank from the end of its program until it has the gradient norm: it sums gradients
    /// over replicas, waits for the norm, and may update meanwhile. 0 without an update.
    pub sums: Vec<Duration>,
    /// The time of each rank's optimizer step, from the gradient norm on.
    pub update: Vec<Duration>,
    /// The part of `sums` in which each rank updated before it had the gradient norm
    /// ([`PipelineConfig::post_validation`](crate::pipeline::PipelineConfig::post_validation)). It is 0 for a
    /// rank that did not need to wait for the norm.
    pub early_update: Vec<Duration>,
    /// Whether a rank has undone such an update, because gradients were clipped or the update was skipped.
    /// The results are the same as without it.
    pub repaired: bool,
    /// The gap between the step before and this one. `None` in the first step, and if an evaluation, a step
    /// that failed or a restore was in between.
    pub gap: Option<StepGap>,
    /// Whether the batch was begun while the one before ran ([`Pipeline::begin`](super::Pipeline::begin)).
    pub began_early: bool,
    /// Whether a rank began the batch before it had updated with the one before, because parameters are delayed
    /// ([`PipelineConfig::delayed`](crate::pipeline::PipelineConfig::delayed)).
    pub overlaps: bool,
    /// The time in which each rank only waited for a message that had been sent, or sent one.
    pub exposed_communication: Vec<Duration>,
    /// The time in which each rank exchanged tokens with the replicas that hold the experts together with it,
    /// and waited for them ([`PipelineConfig::expert_parallel`](crate::pipeline::PipelineConfig::expert_parallel)); zero without
    /// such replicas.
    pub expert_exchange: Vec<ExchangeTime>,
    /// The most bytes that each rank held at once; 0 without [`crate::memory::TrackingAllocator`].
    pub peak_bytes: Vec<u64>,
    /// The largest number of boundary messages that each rank had in flight at once: sent, with a buffer that
    /// the transport still used. 0 within one process, where messages are moved. Waits in the program bound
    /// it ([`limit_sends`](pipewright_schedule::lower::limit_sends)).
    pub sends_in_flight: Vec<u32>,
    /// The bytes of the tensors that each rank has sent to neighbouring stages on other ranks: activations
    /// and gradients. Of ranks that compute a stage together, each sends its part.
    pub boundary_bytes: Vec<u64>,
    /// The parameters whose gradients `I` computed because their layers cannot defer them, in the order of
    /// the stages. The first step that does not fail lists them if its program has `W`, and so do the batches
    /// that it accumulates; later ones list none. A zero-bubble schedule gains little if most elements are in
    /// such parameters: use layers of [`crate::nn`], or make your own a
    /// [`SplitBackward`](crate::nn::SplitBackward).
    pub undeferred: Vec<UndeferredParameter>,
    /// Whether [`PipelineConfig::interrupt`](crate::pipeline::PipelineConfig::interrupt) was raised on any
    /// rank at the end of the step. It is the same in every process.
    pub interrupted: bool,
    /// The number that the first rank's process had announced at the end of the step
    /// ([`Pipeline::announce`](crate::pipeline::Pipeline::announce)); 0 if it announced none. It is the same
    /// in every process.
    pub announced: u64,
    /// Time from the call to its return. If the batch was begun while another one ran
    /// ([`Pipeline::begin`](super::Pipeline::begin)), from the end of that one.
    pub wall: Duration,
}

/// The results of a forward-only step.
#[derive(Debug)]
pub struct EvalSummary {
    /// Loss of each microbatch, in microbatch order; empty without targets.
    pub losses: Vec<f64>,
    /// The weight of each microbatch's loss, times their number: 1 unless microbatches differ in rows, or the
    /// batch says otherwise ([`Batch::weighted`](crate::batch::Batch::weighted),
    /// [`Batch::summed`](crate::batch::Batch::summed)).
    pub loss_weights: Vec<f64>,
    /// Auxiliary losses by name, without their weights. The microbatches count as for the loss.
    pub auxiliary: BTreeMap<Arc<str>, f64>,
    /// As in [`StepSummary`].
    pub auxiliary_by_layer: BTreeMap<Arc<str>, BTreeMap<Arc<str>, f64>>,
    /// The sum of all auxiliary losses, each with its weight.
    pub weighted_auxiliary: f64,
    /// The sums over all forwards of what they have counted
    /// ([`StageContext::count_in_evaluation`](crate::stage::StageContext::count_in_evaluation)), by name, and of the
    /// loads of experts, by layer. Each of the ranks that compute a stage together has counted.
    pub counts: BTreeMap<Arc<str>, Vec<u64>>,
    /// The last stage's outputs, of each microbatch in order; empty in a process that does not have that
    /// stage, and if only losses were asked for.
    pub outputs: Vec<Values>,
    /// As in [`StepSummary`].
    pub stage_outputs: BTreeMap<StageIndex, Vec<Values>>,
    /// As in [`StepSummary`], at the end of the evaluation.
    pub interrupted: bool,
    /// The actions of each rank with their times, in seconds since the step began.
    pub timeline: Timeline,
}

/// The parameters that are in a model or in a checkpoint, but not in both
/// ([`Pipeline::restore_matching`](crate::pipeline::Pipeline::restore_matching)).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Unmatched {
    /// The paths of the model that the checkpoint does not have, of the ranks of this process, in
    /// alphabetical order.
    pub missing: Vec<Arc<str>>,
    /// The paths of the checkpoint that the model does not have, in alphabetical order; `None` if other
    /// processes have a part of the model.
    pub unused: Option<Vec<Arc<str>>>,
}

impl StepSummary {
    /// Returns the share of the step in which each rank does not compute: of the time of its program, which ends before the
    /// update, or if the batch overlaps with the one before, of the time from the end of that one without the rank's update.
    pub fn bubble_per_rank(&self) -> Vec<f64> {
        if !self.overlaps || self.wall.is_zero() {
            return self.timeline.bubble_per_rank();
        }
        let share = |(rank, update): (u32, &Duration)| {
            let time = self.wall.saturating_sub(*update).as_secs_f64();
            (1.0 - self.timeline.busy(Rank::new(rank)) / time).max(0.0)
        };
        (0..self.timeline.ranks()).zip(&self.update).map(share).collect()
    }

    /// Returns the gradient of an input ([`StepSummary::input_gradients`]), counted from 0. It is off the
    /// tape.
    ///
    /// # Errors
    /// When the summary does not have it, or it has another number of dimensions.
    pub fn input_gradient<const D: usize>(&self, input: usize) -> Result<Tensor<D>, BoundaryError> {
        let gradient = self.input_gradients.get(input).cloned().flatten();
        unpack(vec![gradient.ok_or(BoundaryError::Missing { index: input })?])
    }

    /// Returns the gradient of a tensor of a side input ([`StepSummary::side_gradients`]), counted from 0. It is
    /// off the tape.
    ///
    /// # Errors
    /// When the summary does not have it, or it has another number of dimensions.
    pub fn side_gradient<const D: usize>(
        &self,
        name: &str,
        tensor: usize,
    ) -> Result<Tensor<D>, BoundaryError> {
        let gradient = self.side_gradients.get(name).and_then(|tensors| tensors.get(tensor).cloned());
        unpack(vec![gradient.flatten().ok_or(BoundaryError::Missing { index: tensor })?])
    }

    /// Returns the loss of the step: the mean of the losses, in which each microbatch counts by its weight,
    /// or their sum.
    pub fn loss(&self) -> f64 {
        mean(&self.losses, &self.loss_weights)
    }

    /// Returns the sum that training minimises: the loss with the weighted auxiliary losses.
    pub fn total(&self) -> f64 {
        self.loss() + self.weighted_auxiliary
    }

    /// Returns the share of the program's time in which ranks only communicated, as a mean over ranks.
    pub fn exposed_communication_fraction(&self) -> f64 {
        let whole = self.timeline.makespan() * self.exposed_communication.len() as f64;
        let exposed: f64 = self.exposed_communication.iter().map(Duration::as_secs_f64).sum();
        if whole > 0.0 { exposed / whole } else { 0.0 }
    }
}

impl EvalSummary {
    /// Returns the loss of the batch, like [`StepSummary::loss`]; not a number without targets.
    pub fn loss(&self) -> f64 {
        mean(&self.losses, &self.loss_weights)
    }
}

/// Returns the mean of the losses of a step's microbatches, or their sum if each has the weight of all.
fn mean(losses: &[f64], weights: &[f64]) -> f64 {
    let counted = losses.iter().zip(weights).map(|(loss, share)| loss * share);
    counted.sum::<f64>() / losses.len() as f64
}

/// The gradients that a training step returns.
pub(super) struct BatchGradients {
    inputs: OptionalTensors,
    sides: BTreeMap<Arc<str>, OptionalTensors>,
}

/// Merges the reports of all ranks into the results of a training step. `gradients` were taken out of them.
pub(super) fn training(
    setup: &Setup,
    plan: StepPlan,
    mut reports: Vec<RankReport>,
    gradients: BatchGradients,
    wall: Duration,
) -> StepSummary {
    // Microbatches are in the order of the shares, which other replicas have in a repetition of the step.
    reports.sort_unstable_by_key(|report| (share_of(setup, &plan, report), report.rank));
    let losses = reports.iter_mut().flat_map(|report| std::mem::take(&mut report.results.losses)).collect();
    let outputs = reports.iter_mut().flat_map(|report| std::mem::take(&mut report.outputs)).collect();
    let stage_outputs = stage_outputs(&mut reports);
    reports.sort_unstable_by_key(|report| report.rank);
    let Auxiliaries { sums: auxiliary, by_layer: auxiliary_by_layer, weighted: weighted_auxiliary } =
        auxiliary(&mut reports);
    let gradient_norm = reports.iter().find_map(|report| report.results.gradient_norm).unwrap_or(0.0);
    let (step, loss_scale) = (plan.at.step, plan.loss_scale);
    let LossFactors { shares: loss_weights, weight, .. } = plan.into_factors();
    let holders = setup.mesh.shards.max(setup.mesh.experts);
    let group_of = |report: &RankReport| setup.mesh.coord(report.rank).replica / holders;
    let parts = reports.iter_mut().map(|report| Some((group_of(report), report.fingerprint.take()?)));
    let (fingerprint, unlike_replicas) = Fingerprint::of_replicas(parts.collect());
    StepSummary {
        step,
        fingerprint,
        unlike_replicas,
        losses,
        loss_weights,
        auxiliary,
        auxiliary_by_layer,
        expert_loads: expert_loads(&mut reports),
        weighted_auxiliary,
        outputs,
        stage_outputs,
        input_gradients: gradients.inputs,
        side_gradients: gradients.sides,
        weight,
        gradient_norm,
        loss_scale,
        skipped: !gradient_norm.is_finite(),
        verification: None,
        repeated: Vec::new(),
        sums: reports.iter().map(|report| report.results.sums).collect(),
        update: reports.iter().map(|report| report.results.update).collect(),
        early_update: reports.iter().map(|report| report.results.early_update).collect(),
        repaired: reports.iter().any(|report| report.results.repaired),
        gap: None,
        began_early: false,
        overlaps: false,
        exposed_communication: reports.iter().map(|report| report.results.exposed_communication).collect(),
        expert_exchange: reports
            .iter()
            .map(|report| report.results.expert_exchange.unwrap_or_default())
            .collect(),
        peak_bytes: reports.iter().map(|report| report.results.peak_bytes).collect(),
        sends_in_flight: reports.iter().map(|report| report.results.sends_in_flight).collect(),
        boundary_bytes: reports.iter().map(|report| report.results.boundary_bytes).collect(),
        undeferred: undeferred(&mut reports),
        interrupted: is_interrupted(&reports),
        announced: reports.first().map_or(0, |report| report.results.announced),
        timeline: timeline(setup, &mut reports),
        wall,
    }
}

/// Returns whether the interrupt flag was raised on a rank.
pub(super) fn is_interrupted(reports: &[RankReport]) -> bool {
    reports.iter().any(|report| report.results.interrupted)
}

/// Merges the reports of all ranks into the results of an evaluation. The outputs of the slices of a
/// microbatch are joined.
///
/// # Errors
/// When outputs of slices cannot be joined.
pub(super) fn evaluation(
    setup: &Setup,
    plan: StepPlan,
    mut reports: Vec<RankReport>,
) -> Result<EvalSummary, SplitError> {
    reports.sort_unstable_by_key(|report| report.rank);
    for report in &mut reports {
        let lists = report.stage_outputs.iter_mut().map(|(_, outputs)| outputs);
        for outputs in lists.chain([&mut report.outputs]) {
            *outputs = joined_slices(std::mem::take(outputs), setup.slices())?;
        }
    }
    let Auxiliaries { sums: auxiliary, by_layer: auxiliary_by_layer, weighted: weighted_auxiliary } =
        auxiliary(&mut reports);
    Ok(EvalSummary {
        loss_weights: plan.into_factors().shares,
        auxiliary,
        auxiliary_by_layer,
        weighted_auxiliary,
        counts: expert_loads(&mut reports),
        losses: reports.iter_mut().flat_map(|report| std::mem::take(&mut report.results.losses)).collect(),
        outputs: reports.iter_mut().flat_map(|report| std::mem::take(&mut report.outputs)).collect(),
        stage_outputs: stage_outputs(&mut reports),
        interrupted: is_interrupted(&reports),
        timeline: timeline(setup, &mut reports),
    })
}

/// Takes the gradients of the inputs and the side inputs out of the reports of a training step and joins them.
///
/// # Errors
/// When the gradients do not make up a whole. Without such gradients, it does not fail.
pub(super) fn batch_gradients(
    setup: &Setup,
    plan: &StepPlan,
    reports: &mut [RankReport],
) -> Result<BatchGradients, SplitError> {
    let inputs = input_gradients(setup, plan, reports)?;
    let mut sums: Vec<_> = Vec::new();
    for report in reports {
        let first = share_of(setup, plan, report) as usize * setup.program.microbatches() as usize;
        let parts = std::mem::take(&mut report.side_gradients).into_iter();
        sums.extend(parts.map(|(stage, microbatch, part)| (first, stage, microbatch, part)));
    }
    // The order of the stages, whatever ranks they are on.
    sums.sort_by_key(|&(first, stage, microbatch, _)| (first, stage, microbatch));
    let mut replicas: BTreeMap<usize, Vec<SideSums>> = BTreeMap::new();
    for (first, _, microbatch, part) in sums {
        let count = setup.program.microbatches() as usize;
        let of_replica = replicas.entry(first).or_insert_with(|| vec![SideSums::new(); count]);
        part.into_iter().for_each(|(side, sum)| add_side(&mut of_replica[microbatch], side, sum));
    }
    Ok(BatchGradients { inputs, sides: plan.side_gradients.join(&replicas)? })
}

/// Takes the gradients of the inputs out of the reports of a training step and joins them. The ranks of a
/// tensor group have the same gradients, so the first one of this process counts.
fn input_gradients(
    setup: &Setup,
    plan: &StepPlan,
    reports: &mut [RankReport],
) -> Result<OptionalTensors, SplitError> {
    let mut replicas = BTreeMap::new();
    for report in reports {
        let parts = std::mem::take(&mut report.input_gradients);
        if !parts.is_empty() {
            replicas.entry(share_of(setup, plan, report)).or_insert(parts);
        }
    }
    if replicas.is_empty() {
        return Ok(OptionalTensors::new());
    }
    let microbatches = (setup.program.microbatches() / setup.slices().get()) as usize;
    let replicas = replicas.into_iter();
    let replicas =
        replicas.map(|(replica, parts)| ReplicaGradients { first: replica as usize * microbatches, parts });
    plan.input_gradients.join(&replicas.collect::<Vec<_>>(), setup.slices())
}

/// Returns the share of the batch that a rank's replica had.
fn share_of(setup: &Setup, plan: &StepPlan, report: &RankReport) -> u32 {
    setup.mesh.share_of(setup.mesh.coord(report.rank).replica, plan.repetition())
}

/// The auxiliary losses of a step.
#[derive(Default)]
struct Auxiliaries {
    /// The sums by name.
    sums: BTreeMap<Arc<str>, f64>,
    /// The parts by name and layer.
    by_layer: BTreeMap<Arc<str>, BTreeMap<Arc<str>, f64>>,
    /// The sum of all, each with its weight.
    weighted: f64,
}

/// Returns the sums of the auxiliary losses. They are added microbatch by microbatch in the order of the
/// layers, which does not depend on the cut or the schedule.
fn auxiliary(reports: &mut [RankReport]) -> Auxiliaries {
    let mut parts: Vec<AuxiliaryPart> =
        reports.iter_mut().flat_map(|report| std::mem::take(&mut report.results.auxiliary)).collect();
    // The sort is stable: a stage adds its losses in the order of its layers.
    parts.sort_by_key(|part| (part.microbatch, part.stage));
    let mut all = Auxiliaries::default();
    for AuxiliaryPart { name, layer, weight, loss, .. } in parts {
        if let Some(layer) = layer {
            *all.by_layer.entry(name.clone()).or_default().entry(layer).or_default() += loss;
        }
        *all.sums.entry(name).or_default() += loss;
        all.weighted += weight * loss;
    }
    all
}

/// Returns the loads of experts over all ranks, by layer.
fn expert_loads(reports: &mut [RankReport]) -> BTreeMap<Arc<str>, Vec<u64>> {
    let loads = reports.iter_mut().flat_map(|report| std::mem::take(&mut report.results.loads));
    sums_of(loads).into_iter().map(|ExpertLoad { layer, choices }| (layer, choices)).collect()
}

/// Returns the outputs by stage. Reports are in the order of the replicas, and so are their microbatches.
fn stage_outputs(reports: &mut [RankReport]) -> BTreeMap<StageIndex, Vec<Values>> {
    let mut all: BTreeMap<StageIndex, Vec<Values>> = BTreeMap::new();
    for (stage, outputs) in reports.iter_mut().flat_map(|report| std::mem::take(&mut report.stage_outputs)) {
        all.entry(stage).or_default().extend(outputs);
    }
    all
}

/// Returns the parameters that the ranks report. All replicas report the same.
fn undeferred(reports: &mut [RankReport]) -> Vec<UndeferredParameter> {
    let mut all: Vec<_> =
        reports.iter_mut().flat_map(|report| std::mem::take(&mut report.results.undeferred)).collect();
    all.sort_unstable();
    all.dedup();
    all
}

/// Returns the timeline of a step, with one row for each tensor group.
fn timeline(setup: &Setup, reports: &mut [RankReport]) -> Timeline {
    let skew = reports.iter().filter_map(|report| report.clock_skew).reduce(ClockSkew::max);
    let skips = reports.iter_mut().flat_map(|report| std::mem::take(&mut report.skips)).collect();
    let events = reports.iter_mut().flat_map(|report| std::mem::take(&mut report.events)).collect();
    let scopes = reports.iter_mut().flat_map(|report| std::mem::take(&mut report.scopes)).collect();
    let messages = reports.iter_mut().flat_map(|report| std::mem::take(&mut report.messages)).collect();
    let rows = setup.mesh.pipeline * setup.mesh.data;
    let timeline = Timeline::new(rows, events).with_slices(setup.slices());
    timeline.with_skips(skips).with_scopes(scopes).with_messages(messages).with_clock_skew(skew)
}
