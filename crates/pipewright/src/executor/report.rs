//! The report of a rank on a finished step.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use pipewright_schedule::{ClockSkew, Event, MessageRecord, Scope, SkipEvent, StageIndex};
use serde::{Deserialize, Serialize};

use super::connection::Connection;
use super::context::RankContext;
use super::early_updates::EarlyUpdates;
use super::exchange_time::ExchangeTime;
use super::recorder::{AuxiliaryPart, Recorder, Records};
use super::stages::{LocalStage, LocalStages};
use crate::batch::SideSums;
use crate::checkpoint::StageLeaves;
use crate::device::held_on;
use crate::ids::WorldRank;
use crate::stage::ExpertLoad;
use crate::tensor::{OptionalTensors, Values};
use crate::verification::Difference;

/// A rank's report on a finished step. In a tensor group the first rank reports losses, outputs and events
/// for all.
#[derive(Debug, Default)]
pub(crate) struct RankReport {
    pub rank: WorldRank,
    pub results: RankResults,
    /// The last stage's outputs of each microbatch; kept in forward-only programs, and if the step asks for
    /// them.
    pub outputs: Vec<Values>,
    /// The outputs of each microbatch, of the stages that were asked for.
    pub stage_outputs: Vec<(StageIndex, Vec<Values>)>,
    /// The gradients of the model's inputs of each microbatch, on the rank of the first stage, if the step
    /// asks for them. Every rank of a tensor group has them.
    pub input_gradients: Vec<OptionalTensors>,
    /// The gradients of side inputs that require one, by stage and microbatch.
    pub side_gradients: Vec<(StageIndex, usize, SideSums)>,
    pub events: Vec<Event>,
    /// The messages of skip connections.
    pub skips: Vec<SkipEvent>,
    /// The spans that hooks have named, and the spans of exchanges of tokens and of halves of overlaps.
    pub scopes: Vec<Scope>,
    /// The messages of boundaries and of skip connections, at this rank's end.
    pub messages: Vec<MessageRecord>,
    /// How well the clocks of the processes agree; `None` within one process. A process sends its own, and
    /// gets the largest of all.
    pub clock_skew: Option<ClockSkew>,
    /// In a repetition: the first result that has other bits in another computation of the step. Every process
    /// has it from its own ranks.
    pub difference: Option<Difference>,
    /// The hashes of the trained parameters that the rank holds, if the fingerprint of the step is due. A process has
    /// the hashes of its own ranks, and the first process has all.
    pub fingerprint: Option<StageLeaves>,
    /// In several processes, the digest of the next batch, if all of them have begun it. Only a rank's own
    /// report has it.
    pub next_batch: Option<u64>,
}

/// The part of a rank's report that every process gets.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct RankResults {
    /// Loss of each microbatch, on the rank of the last stage.
    pub losses: Vec<f64>,
    /// Auxiliary losses of this rank's stages.
    pub auxiliary: Vec<AuxiliaryPart>,
    /// How many choices each expert of this rank's mixtures has got, one entry per layer.
    pub loads: Vec<ExpertLoad>,
    /// Global norm of the gradient before clipping; `None` for forward-only programs. It is infinite if the
    /// update was skipped.
    pub gradient_norm: Option<f64>,
    /// The time in which the rank only waited for a message that had been sent, or sent one.
    pub exposed_communication: Duration,
    /// The time of the rank's exchanges of tokens; `None` if its replica holds all experts.
    pub expert_exchange: Option<ExchangeTime>,
    /// Time from the end of the program until the rank has the gradient norm.
    pub sums: Duration,
    /// Time of the gradient scaling and the optimizer step, from the norm on.
    pub update: Duration,
    /// The part of `sums` in which the rank has updated early.
    pub early_update: Duration,
    /// Whether it has undone an early update because of the norm.
    pub repaired: bool,
    /// Most bytes that the rank held at once in this step; on a device other than the processor, the bytes
    /// that its back end has reserved there for the rank.
    pub peak_bytes: u64,
    /// The largest number of boundary messages that were in flight at once.
    pub sends_in_flight: u32,
    /// The bytes of the boundaries' tensors that the rank has sent.
    pub boundary_bytes: u64,
    /// See [`UndeferredParameter`]. Empty before the first `W` and after the first update.
    pub undeferred: Vec<UndeferredParameter>,
    /// Whether the interrupt flag was raised in this rank's process.
    pub interrupted: bool,
    /// The number that this rank's process announces.
    pub announced: u64,
}

/// A parameter whose gradient `I` computes because its layer cannot defer it to `W`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct UndeferredParameter {
    /// The stage that has the parameter.
    pub stage: StageIndex,
    /// The parameter's path.
    pub path: Arc<str>,
    /// The number of the parameter's elements.
    pub elements: usize,
}

/// Adds the loads of each layer, in the order in which the layers first occur. A layer has as many experts in
/// every forward; one that has not keeps its longest list.
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

/// The results of an update, for the report.
#[derive(Default)]
pub(super) struct Update {
    /// See [`RankResults::gradient_norm`].
    pub(super) gradient_norm: Option<f64>,
    /// Time from the end of the program until the rank has the gradient norm.
    pub(super) sums: Duration,
    /// Time of the gradient scaling and the optimizer step, from the norm on.
    pub(super) time: Duration,
    pub(super) early: EarlyUpdates,
    /// See [`RankReport::fingerprint`].
    pub(super) fingerprint: Option<StageLeaves>,
}

impl RankReport {
    /// Makes a rank's report. Takes the results out of its stages and its recorder.
    pub(super) fn new(
        context: &RankContext,
        connection: &Connection,
        stages: &mut LocalStages,
        recorder: &mut Recorder,
        update: Update,
    ) -> Self {
        let memory = &connection.memory;
        let last = stages.last_mut();
        let peak_bytes = held_on(last.runner().device()).unwrap_or_else(|| memory.peak());
        let outputs: Vec<Values> = last.batch.outputs.take_all().map(|(_, outputs)| outputs).collect();
        let kept = stages.iter_mut().map(|stage| {
            let outputs: Vec<Values> = stage.batch.kept.take_all().map(|(_, outputs)| outputs).collect();
            (stage.index, outputs)
        });
        let stage_outputs: Vec<_> = kept.filter(|(_, outputs)| !outputs.is_empty()).collect();
        // The gradients of the model's inputs. A stage that is not the first one has sent its own.
        let input_gradients: Vec<OptionalTensors> =
            stages.first_mut().batch.input_gradients.take_all().map(|(_, gradients)| gradients).collect();
        let of_stage = |stage: &mut LocalStage| {
            let (index, all) = (stage.index, stage.batch.side_gradients.take_all());
            all.map(|(microbatch, sums)| (index, microbatch, sums)).collect::<Vec<_>>()
        };
        let side_gradients: Vec<_> = stages.iter_mut().flat_map(of_stage).collect();
        let undeferred = undeferred(stages, update.gradient_norm.is_some());
        memory.give_away(outputs.iter().flatten());
        memory.give_away(stage_outputs.iter().flat_map(|(_, outputs)| outputs).flatten());
        memory.give_away(input_gradients.iter().flatten().flatten());
        memory.give_away(side_gradients.iter().flat_map(|(_, _, sums)| sums.values()));
        memory.give_away_list(&undeferred);
        let Records { events, skips, scopes, messages, losses, auxiliary, loads, waited, exchange } =
            recorder.take(memory);
        let report = Self {
            rank: context.world_rank,
            results: RankResults {
                losses,
                auxiliary,
                loads: sums_of(loads),
                gradient_norm: update.gradient_norm,
                exposed_communication: connection.sending + waited,
                expert_exchange: Some(exchange).filter(|time| *time != ExchangeTime::default()),
                sums: update.sums,
                update: update.time,
                early_update: update.early.time,
                repaired: update.early.undone,
                peak_bytes,
                sends_in_flight: connection.sends_in_flight(),
                boundary_bytes: connection.boundary_bytes,
                undeferred,
                interrupted: context.is_interrupted(),
                announced: context.config.announcement.load(Ordering::Relaxed),
            },
            outputs,
            stage_outputs,
            input_gradients,
            side_gradients,
            events,
            skips,
            scopes,
            messages,
            clock_skew: None,
            difference: None,
            fingerprint: update.fingerprint,
            next_batch: context.next_batch(),
        };
        if context.tensor_rank().index == 0 { report } else { report.without_results_of_group() }
    }

    /// Returns the report without the results and events that all ranks of a tensor group have, because they
    /// compute the same at the same time.
    fn without_results_of_group(self) -> Self {
        let Self { rank, results, input_gradients, clock_skew, difference, fingerprint, next_batch, .. } =
            self;
        let results = RankResults {
            losses: Vec::new(),
            auxiliary: Vec::new(),
            loads: Vec::new(),
            undeferred: Vec::new(),
            ..results
        };
        Self {
            rank,
            results,
            input_gradients,
            clock_skew,
            difference,
            fingerprint,
            next_batch,
            ..Self::default()
        }
    }
}

/// Returns the parameters of the stages whose report on them is due. `updates` says that the batch ends with an
/// update.
fn undeferred(stages: &mut LocalStages, updates: bool) -> Vec<UndeferredParameter> {
    let due = stages.iter_mut().filter_map(|stage| stage.undeferred.take(updates).then_some(&*stage));
    let parameters = due.flat_map(|stage| {
        let index = stage.index;
        let parameters = stage.runner().undeferred().into_iter();
        parameters.map(move |(path, elements)| UndeferredParameter { stage: index, path, elements })
    });
    parameters.collect()
}
