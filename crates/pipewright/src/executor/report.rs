//! The report of a rank on a finished step, and the exchange of reports between processes.
//!
//! Within one process the caller collects the reports. Across processes they go up a tree of all ranks
//! ([`Tag::Report`]). Its root, the first rank, sends all of them, without their events, down the tree
//! ([`Tag::Summary`]). So no process ends a step before all ranks have finished it, and losses and figures are the same
//! everywhere.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use pipewright_schedule::{ClockSkew, Event, Microbatch, Scope, SkipEvent, StageIndex};

use super::figures::{Figures, PackedSkew, Times, largest_skew, unpacked_skew};
use super::local_stage::LocalStage;
use super::machine::Executor;
use super::step::{Outcome, Phase};
use crate::collective::Exchange;
use crate::device::held_on;
use crate::ids::WorldRank;
use crate::message::{MessageError, Payload, Tag, decoded, encoded};
use crate::stage::ExpertLoad;
use crate::tensor::{OptionalTensors, Values};

/// A rank's report on a finished step. In a tensor group the first rank reports losses, outputs and events for all.
#[derive(Debug)]
pub(crate) struct RankReport {
    pub rank: WorldRank,
    /// Loss of each microbatch, on the rank of the last stage.
    pub losses: Vec<f64>,
    /// Auxiliary losses of this rank's stages.
    pub auxiliary: Vec<AuxiliaryPart>,
    /// How many choices each expert of this rank's mixtures has got, one entry per layer.
    pub loads: Vec<ExpertLoad>,
    /// The last stage's outputs of each microbatch; kept in forward-only programs, and if the step asks for them.
    pub outputs: Vec<Values>,
    /// The outputs of each microbatch, of the stages that were asked for.
    pub stage_outputs: Vec<(StageIndex, Vec<Values>)>,
    /// The gradients of the model's inputs of each microbatch, on the rank of the first stage, if the step asks for them.
    /// Every rank of a tensor group has them.
    pub input_gradients: Vec<OptionalTensors>,
    /// Global norm of the gradient before clipping; `None` for forward-only programs. It is infinite if the update was
    /// skipped.
    pub gradient_norm: Option<f64>,
    pub events: Vec<Event>,
    /// The messages of skip connections.
    pub skips: Vec<SkipEvent>,
    /// The spans that hooks have named.
    pub scopes: Vec<Scope>,
    /// How well the clocks of the processes agree; `None` within one process. A process sends its own, and gets the
    /// largest of all.
    pub clock_skew: Option<ClockSkew>,
    /// The time in which the rank only waited for a message that had been sent, or sent one.
    pub exposed_communication: Duration,
    /// Time of the gradient scaling and the optimizer step.
    pub update: Duration,
    /// Most bytes that the rank held at once in this step; on a device other than the processor, the bytes that its
    /// back end has reserved there for the rank.
    pub peak_bytes: u64,
    /// The largest number of boundary messages that were in flight at once.
    pub sends_in_flight: u32,
    /// The bytes of the boundaries' tensors that the rank has sent.
    pub boundary_bytes: u64,
    /// See [`UndeferredParameter`]. Empty except in the first report after a `W`.
    pub undeferred: Vec<UndeferredParameter>,
    /// Whether the interrupt flag was raised in this rank's process.
    pub interrupted: bool,
}

impl RankReport {
    /// Returns the report without the results and events that all ranks of a tensor group have, because they compute the
    /// same at the same time.
    fn without_those_of_its_group(self) -> Self {
        Self {
            losses: Vec::new(),
            auxiliary: Vec::new(),
            loads: Vec::new(),
            outputs: Vec::new(),
            stage_outputs: Vec::new(),
            events: Vec::new(),
            skips: Vec::new(),
            scopes: Vec::new(),
            undeferred: Vec::new(),
            ..self
        }
    }
}

/// A parameter whose gradient `I` computes because its layer cannot defer it to `W`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct UndeferredParameter {
    /// The stage that has the parameter.
    pub stage: StageIndex,
    /// The parameter's path.
    pub path: Arc<str>,
    /// The number of the parameter's elements.
    pub elements: usize,
}

/// An auxiliary loss of one stage and microbatch. The ranks report them one by one, because their sum has the same bits
/// for every cut only if they are added in an order that does not depend on the cut.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct AuxiliaryPart {
    pub name: Arc<str>,
    /// The layer that added it, if it said so.
    pub layer: Option<Arc<str>>,
    pub stage: StageIndex,
    /// Numbered over all replicas, by slices if microbatches are cut.
    pub microbatch: Microbatch,
    /// The weight of the loss in the sum that is minimised.
    pub weight: f64,
    /// The loss times the microbatch's share in the mean over the microbatches.
    pub loss: f64,
}

/// Adds the loads of each layer, in the order in which the layers first occur. A layer has as many experts in every
/// forward; one that has not keeps its longest list.
pub(crate) fn sums_of(loads: impl IntoIterator<Item = ExpertLoad>) -> Vec<ExpertLoad> {
    let mut sums: Vec<ExpertLoad> = Vec::new();
    for load in loads {
        match sums.iter_mut().find(|sum| sum.layer == load.layer) {
            Some(sum) => {
                sum.choices.resize(sum.choices.len().max(load.choices.len()), 0);
                sum.choices.iter_mut().zip(load.choices).for_each(|(sum, count)| *sum += count);
            }
            None => sums.push(load),
        }
    }
    sums
}

impl Executor {
    /// Makes this rank's report.
    pub(super) fn report(&mut self, gradient_norm: Option<f64>, update: Duration) -> RankReport {
        let last = self.stages.last_mut().expect("every rank owns a stage");
        let held_on_device = held_on(last.runner.device());
        let peak_bytes = held_on_device.unwrap_or_else(|| self.memory.peak());
        let outputs: Vec<Values> = last.outputs.iter_mut().filter_map(Option::take).collect();
        let stage_outputs = self.kept_outputs();
        let input_gradients = self.input_gradients();
        let (events, skips) = (std::mem::take(&mut self.step.events), std::mem::take(&mut self.step.skips));
        let scopes = std::mem::take(&mut self.step.scopes);
        let auxiliary = std::mem::take(&mut self.step.auxiliary);
        let loads = sums_of(std::mem::take(&mut self.step.loads));
        let undeferred = self.undeferred();
        // The side inputs are dropped when the step ends.
        self.step.input.side_inputs = Arc::default();
        self.memory.give_away(outputs.iter().flatten());
        self.memory.give_away(stage_outputs.iter().flat_map(|(_, outputs)| outputs).flatten());
        self.memory.give_away(input_gradients.iter().flatten().flatten());
        self.memory.give_away_list(&events);
        self.memory.give_away_list(&skips);
        self.memory.give_away_list(&scopes);
        self.memory.give_away_list(&auxiliary);
        self.memory.give_away_list(&undeferred);
        let report = RankReport {
            rank: self.world_rank,
            losses: std::mem::take(&mut self.step.losses),
            auxiliary,
            loads,
            outputs,
            stage_outputs,
            input_gradients,
            gradient_norm,
            events,
            skips,
            scopes,
            clock_skew: None,
            exposed_communication: self.step.exposed,
            update,
            peak_bytes,
            sends_in_flight: self.endpoint.sends_in_flight(),
            boundary_bytes: self.step.boundary_bytes,
            undeferred,
            interrupted: self.interrupt.as_ref().is_some_and(|flag| flag.load(Ordering::Relaxed)),
        };
        match self.endpoint.tensor_rank().index {
            0 => report,
            _ => report.without_those_of_its_group(),
        }
    }

    /// Takes out the outputs of the stages that were asked for.
    fn kept_outputs(&mut self) -> Vec<(StageIndex, Vec<Values>)> {
        let wanted = self.step.input.kept_stages.clone();
        let stages = self.stages.iter_mut().filter(|stage| wanted.contains(&stage.index));
        stages.map(|stage| (stage.index, stage.kept.iter_mut().filter_map(Option::take).collect())).collect()
    }

    /// Takes out the gradients of the model's inputs. A stage that is not the first one has sent those of its own.
    fn input_gradients(&mut self) -> Vec<OptionalTensors> {
        let first = self.stages.first_mut().expect("every rank owns a stage");
        first.input_gradients.iter_mut().filter_map(Option::take).collect()
    }

    /// Returns the parameters of the stages whose report on them is due.
    fn undeferred(&mut self) -> Vec<UndeferredParameter> {
        let due = self.stages.iter_mut().filter_map(|stage| stage.undeferred.take().then_some(&*stage));
        let of_stage = |stage: &LocalStage| {
            let index = stage.index;
            let found = stage.runner.undeferred().into_iter();
            found.map(move |(path, elements)| UndeferredParameter { stage: index, path, elements })
        };
        due.flat_map(of_stage).collect()
    }

    /// Ends the rank's part of the step. Across processes the rank then waits for the reports of its subtree; within
    /// one process the step is done.
    pub(super) fn finish(&mut self, mut outcome: Outcome) -> Phase {
        if !self.endpoint.is_distributed() {
            return Phase::Done(outcome);
        }
        let (start, end) = (self.step.input.origin, Instant::now());
        for report in &mut outcome.reports {
            let skews = [start, end].map(|at| self.endpoint.clock_skew(at));
            report.clock_skew = skews.into_iter().flatten().reduce(ClockSkew::max);
        }
        let common = |seconds| self.common_seconds(start + Duration::from_secs_f64(seconds));
        let own = outcome.reports.iter().map(|report| Figures::of(report, common)).collect();
        let reports = Exchange::gather(own, Tag::Report, self.endpoint.world_tree().children());
        Phase::Reports { outcome, reports }
    }

    /// Passes on the reports of this rank's subtree. The root then has all reports, and sends the summary.
    pub(super) fn pass_reports(&mut self, mut outcome: Outcome, mut figures: Vec<Figures>) -> Phase {
        let tree = self.endpoint.world_tree().clone();
        if let Some(parent) = tree.parent() {
            self.endpoint.send_world(parent, Tag::Report, Payload::of(&figures));
            return Phase::Summary { outcome, message: Exchange::one(parent, Tag::Summary) };
        }
        let times: Vec<Times> =
            figures.iter_mut().map(|figures| std::mem::take(&mut figures.times)).collect();
        let skew = largest_skew(&times);
        self.send_bytes(tree.children(), Tag::Summary, &encoded(&(&figures, skew)));
        figures.iter_mut().zip(times).for_each(|(figures, times)| figures.times = times);
        self.add_reports(&mut outcome, figures, skew);
        Phase::Done(outcome)
    }

    /// Passes on the summary and adds it to the outcome.
    pub(super) fn pass_summary(
        &mut self,
        mut outcome: Outcome,
        summary: &Arc<[u8]>,
    ) -> Result<Phase, MessageError> {
        let tree = self.endpoint.world_tree().clone();
        self.send_bytes(tree.children(), Tag::Summary, summary);
        let from = tree.parent().unwrap_or(self.world_rank);
        let (figures, skew): (Vec<Figures>, Option<PackedSkew>) = decoded(from, Tag::Summary, summary)?;
        self.add_reports(&mut outcome, figures, skew);
        Ok(Phase::Done(outcome))
    }

    /// Adds the reports of the other ranks, with the start of the step in this process as the origin of their times.
    fn add_reports(&self, outcome: &mut Outcome, figures: Vec<Figures>, skew: Option<PackedSkew>) {
        for own in &mut outcome.reports {
            own.clock_skew = skew.map(unpacked_skew);
        }
        let origin = self.common_seconds(self.step.input.origin);
        let others = figures.into_iter().filter(|figures| figures.rank != self.world_rank);
        let report = |figures: Figures| {
            let row = self.endpoint.row_of(figures.rank);
            figures.into_report(row, origin)
        };
        outcome.reports.extend(others.map(report));
    }

    /// Returns an instant on the clock that all processes share.
    fn common_seconds(&self, at: Instant) -> f64 {
        self.endpoint.common_seconds(at).unwrap_or_default()
    }
}
