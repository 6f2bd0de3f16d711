//! The report of a rank on a finished step, and the exchange of reports between processes.
//!
//! Within one process the caller collects the reports. Across processes they go up a tree of all ranks
//! ([`Tag::Report`]). Its root, the first rank, sends all of them, without their events, down the tree
//! ([`Tag::Summary`]). So no process ends a step before all ranks have finished it, and losses and figures are the same
//! everywhere.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use pipewright_schedule::{Action, Event, Microbatch, Rank, StageIndex};
use serde::{Deserialize, Serialize};

use super::machine::Executor;
use super::step::{Outcome, Phase};
use crate::collective::Exchange;
use crate::message::{MessageError, Payload, Tag, decoded, encoded};
use crate::tensor::Values;

/// A rank's report on a finished step.
#[derive(Debug)]
pub(crate) struct RankReport {
    pub rank: Rank,
    /// Loss of each microbatch, on the rank of the last stage.
    pub losses: Vec<f64>,
    /// Auxiliary losses of this rank's stages.
    pub auxiliary: Vec<AuxiliaryPart>,
    /// The last stage's outputs of each microbatch; kept in forward-only programs, and if the step asks for them.
    pub outputs: Vec<Values>,
    /// Global norm of the mean gradient before clipping; `None` for forward-only programs.
    pub gradient_norm: Option<f64>,
    pub events: Vec<Event>,
    /// The time in which the rank only waited for a message that had been sent, or sent one.
    pub exposed_communication: Duration,
    /// Time of the gradient scaling and the optimizer step.
    pub update: Duration,
    pub peak_bytes: u64,
    /// Whether the interrupt flag was raised in this rank's process.
    pub interrupted: bool,
}

/// An auxiliary loss of one stage and microbatch. The ranks report them one by one, because their sum has the same bits
/// for every cut only if they are added in an order that does not depend on the cut.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct AuxiliaryPart {
    pub name: Arc<str>,
    pub stage: StageIndex,
    /// Numbered over all replicas.
    pub microbatch: Microbatch,
    /// The weight of the loss in the sum that is minimised.
    pub weight: f64,
    /// The loss times the microbatch's share in the mean over the microbatches.
    pub loss: f64,
}

/// A report as a message. It does not contain the outputs, which stay on their rank.
#[derive(Serialize, Deserialize)]
pub(super) struct Figures {
    rank: Rank,
    losses: Vec<f64>,
    /// Name, stage, microbatch, weight and loss of each.
    auxiliary: Vec<(String, u32, u32, f64, f64)>,
    gradient_norm: Option<f64>,
    /// Each with its start and its end.
    events: Vec<(PackedAction, f64, f64)>,
    exposed_communication: Duration,
    update: Duration,
    peak_bytes: u64,
    interrupted: bool,
}

/// An action as a number.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "u64", into = "u64")]
struct PackedAction(Action);

impl From<PackedAction> for u64 {
    fn from(PackedAction(action): PackedAction) -> Self {
        action.to_bits()
    }
}

impl TryFrom<u64> for PackedAction {
    type Error = String;

    fn try_from(bits: u64) -> Result<Self, String> {
        Action::from_bits(bits).map(Self).ok_or_else(|| format!("{bits:#x} is not an action"))
    }
}

impl AuxiliaryPart {
    fn packed(&self) -> (String, u32, u32, f64, f64) {
        (self.name.to_string(), self.stage.get(), self.microbatch.get(), self.weight, self.loss)
    }

    fn unpacked((name, stage, microbatch, weight, loss): (String, u32, u32, f64, f64)) -> Self {
        let (stage, microbatch) = (StageIndex::new(stage), Microbatch::new(microbatch));
        Self { name: name.into(), stage, microbatch, weight, loss }
    }
}

impl From<&RankReport> for Figures {
    fn from(report: &RankReport) -> Self {
        let events = report.events.iter().map(|event| (PackedAction(event.action), event.start, event.end));
        Self {
            rank: report.rank,
            losses: report.losses.clone(),
            auxiliary: report.auxiliary.iter().map(AuxiliaryPart::packed).collect(),
            gradient_norm: report.gradient_norm,
            events: events.collect(),
            exposed_communication: report.exposed_communication,
            update: report.update,
            peak_bytes: report.peak_bytes,
            interrupted: report.interrupted,
        }
    }
}

impl From<Figures> for RankReport {
    fn from(figures: Figures) -> Self {
        let rank = figures.rank;
        let event = |(PackedAction(action), start, end)| Event { rank, action, start, end };
        Self {
            rank,
            losses: figures.losses,
            auxiliary: figures.auxiliary.into_iter().map(AuxiliaryPart::unpacked).collect(),
            outputs: Vec::new(),
            gradient_norm: figures.gradient_norm,
            events: figures.events.into_iter().map(event).collect(),
            exposed_communication: figures.exposed_communication,
            update: figures.update,
            peak_bytes: figures.peak_bytes,
            interrupted: figures.interrupted,
        }
    }
}

impl Executor {
    /// Makes this rank's report.
    pub(super) fn report(&mut self, gradient_norm: Option<f64>, update: Duration) -> RankReport {
        let last = self.stages.last_mut().expect("every rank owns a stage");
        let outputs: Vec<Values> = last.outputs.iter_mut().filter_map(Option::take).collect();
        let events = std::mem::take(&mut self.step.events);
        let auxiliary = std::mem::take(&mut self.step.auxiliary);
        // The side inputs are dropped when the step ends.
        self.step.input.side_inputs = Arc::default();
        self.memory.give_away(outputs.iter().flatten());
        self.memory.give_away_list(&events);
        self.memory.give_away_list(&auxiliary);
        RankReport {
            rank: self.world_rank,
            losses: std::mem::take(&mut self.step.losses),
            auxiliary,
            outputs,
            gradient_norm,
            events,
            exposed_communication: self.step.exposed,
            update,
            peak_bytes: self.memory.peak(),
            interrupted: self.interrupt.as_ref().is_some_and(|flag| flag.load(Ordering::Relaxed)),
        }
    }

    /// Ends the rank's part of the step. Across processes the rank then waits for the reports of its subtree; within
    /// one process the step is done.
    pub(super) fn finish(&mut self, outcome: Outcome) -> Phase {
        if !self.endpoint.is_distributed() {
            return Phase::Done(outcome);
        }
        let own = outcome.reports.iter().map(Figures::from).collect();
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
        let events: Vec<_> = figures.iter_mut().map(|figures| std::mem::take(&mut figures.events)).collect();
        self.send_bytes(tree.children(), Tag::Summary, &encoded(&figures));
        figures.iter_mut().zip(events).for_each(|(figures, events)| figures.events = events);
        self.add_reports(&mut outcome, figures);
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
        self.add_reports(&mut outcome, decoded(from, Tag::Summary, summary)?);
        Ok(Phase::Done(outcome))
    }

    fn add_reports(&self, outcome: &mut Outcome, figures: Vec<Figures>) {
        let others = figures.into_iter().filter(|figures| figures.rank != self.world_rank);
        outcome.reports.extend(others.map(RankReport::from));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_travel_as_numbers() {
        let texts = ["0F3", "(1F7;2B3)OVERLAP_F_B", "4UNSHARD", "2RECV_B9"];
        let events = texts.map(|text| {
            let action = text.parse().expect("an action");
            Event { rank: Rank::new(2), action, start: 0.1 + 0.2, end: f64::MIN_POSITIVE }
        });
        let report = RankReport {
            rank: Rank::new(2),
            losses: vec![0.5],
            auxiliary: vec![AuxiliaryPart {
                name: "balance".into(),
                stage: StageIndex::new(3),
                microbatch: Microbatch::new(4),
                weight: 0.01,
                loss: 0.25,
            }],
            outputs: Vec::new(),
            gradient_norm: Some(f64::NAN),
            events: events.to_vec(),
            exposed_communication: Duration::from_nanos(7),
            update: Duration::from_nanos(8),
            peak_bytes: 9,
            interrupted: true,
        };
        let bytes = encoded(&Figures::from(&report));
        let found: Figures = decoded(report.rank, Tag::Report, &bytes).expect("a report");
        let found = RankReport::from(found);
        assert_eq!(found.events, events);
        assert_eq!((found.losses, found.auxiliary), (report.losses, report.auxiliary));
        assert!(bytes.len() < 130 + texts.len() * 26, "{} bytes", bytes.len());
    }
}
