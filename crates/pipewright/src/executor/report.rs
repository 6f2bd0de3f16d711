//! What a rank says of a step that is done, and how ranks of several processes learn of each other's.
//!
//! Within one process the caller collects the reports. Across processes each rank sends its own to the first one
//! ([`Tag::Report`]); that one sends all of them, without their events, to every other ([`Tag::Summary`]). So a step
//! ends on no process before all ranks have done it, and losses and figures are the same everywhere.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use pipewright_schedule::{Action, Event, Rank};
use serde::{Deserialize, Serialize};

use super::machine::Executor;
use crate::failure::Cause;
use crate::message::{Payload, Tag, encoded};
use crate::tensor::Values;

/// What a rank has to say about a step that is done.
#[derive(Debug)]
pub(crate) struct RankReport {
    pub rank: Rank,
    /// Loss of each microbatch, on the rank of the last stage.
    pub losses: Vec<f64>,
    /// Auxiliary losses of this rank's stages by name, each the mean over the microbatches.
    pub auxiliary: BTreeMap<Arc<str>, f64>,
    /// The last stage's outputs of each microbatch; kept by forward-only programs, and where the step asks for them.
    pub outputs: Vec<Values>,
    /// Global norm of the mean gradient before clipping; none for forward-only programs.
    pub gradient_norm: Option<f64>,
    pub events: Vec<Event>,
    /// Time in which a message was there to be taken, or was being sent, and the rank did nothing else.
    pub exposed_communication: Duration,
    /// Time of the gradient scaling and the optimizer step.
    pub update: Duration,
    pub peak_bytes: u64,
    /// Whether this rank's process was asked to end.
    pub interrupted: bool,
}

/// A report as bytes: all but the outputs, which stay on their rank.
#[derive(Serialize, Deserialize)]
struct Figures {
    rank: Rank,
    losses: Vec<f64>,
    auxiliary: Vec<(String, f64)>,
    gradient_norm: Option<f64>,
    events: Vec<(String, f64, f64)>,
    exposed_communication: Duration,
    update: Duration,
    peak_bytes: u64,
    interrupted: bool,
}

impl RankReport {
    /// The report without its outputs; with its events only where they are asked for.
    fn figures(&self, with_events: bool) -> Figures {
        let events = self.events.iter().map(|event| (event.action.to_string(), event.start, event.end));
        Figures {
            rank: self.rank,
            losses: self.losses.clone(),
            auxiliary: self.auxiliary.iter().map(|(name, loss)| (name.to_string(), *loss)).collect(),
            gradient_norm: self.gradient_norm,
            events: if with_events { events.collect() } else { Vec::new() },
            exposed_communication: self.exposed_communication,
            update: self.update,
            peak_bytes: self.peak_bytes,
            interrupted: self.interrupted,
        }
    }
}

impl From<Figures> for RankReport {
    fn from(figures: Figures) -> Self {
        let rank = figures.rank;
        let event = |(action, start, end): (String, f64, f64)| {
            Some(Event { rank, action: action.parse::<Action>().ok()?, start, end })
        };
        Self {
            rank,
            losses: figures.losses,
            auxiliary: figures.auxiliary.into_iter().map(|(name, loss)| (name.into(), loss)).collect(),
            outputs: Vec::new(),
            gradient_norm: figures.gradient_norm,
            events: figures.events.into_iter().filter_map(event).collect(),
            exposed_communication: figures.exposed_communication,
            update: figures.update,
            peak_bytes: figures.peak_bytes,
            interrupted: figures.interrupted,
        }
    }
}

impl Executor {
    /// Puts this rank's report together; across processes it is sent to the first rank.
    pub(super) fn make_report(&mut self) {
        let last = self.stages.last_mut().expect("every rank owns a stage");
        let outputs: Vec<Values> = last.outputs.iter_mut().filter_map(Option::take).collect();
        let events = std::mem::take(&mut self.step.events);
        // What the step brought for all stages goes with it.
        self.step.side_inputs = Arc::default();
        self.memory.give_away(outputs.iter().flatten());
        self.memory.give_away_list(&events);
        let report = RankReport {
            rank: self.world_rank,
            losses: std::mem::take(&mut self.step.losses),
            auxiliary: std::mem::take(&mut self.step.auxiliary),
            outputs,
            gradient_norm: self.step.norm,
            events,
            exposed_communication: self.step.exposed,
            update: self.step.update,
            peak_bytes: self.memory.peak(),
            interrupted: self.interrupt.as_ref().is_some_and(|flag| flag.load(Ordering::Relaxed)),
        };
        let first = Rank::new(0);
        if self.endpoint.is_distributed() && self.world_rank != first {
            self.endpoint.send_world(first, Tag::Report, Payload::of(&report.figures(true)));
        }
        self.step.reports = vec![report];
    }

    /// Takes another rank's report; false while it has not arrived.
    pub(super) fn take_report(&mut self, from: Rank) -> Result<bool, Cause> {
        let Some(figures) = self.take_bytes::<Figures>(from, Tag::Report)? else { return Ok(false) };
        self.step.reports.push(figures.into());
        Ok(true)
    }

    /// Tells every other rank what all have reported.
    pub(super) fn send_summary(&mut self) {
        let figures: Vec<Figures> = self.step.reports.iter().map(|report| report.figures(false)).collect();
        let summary = encoded(&figures);
        for to in (1..self.endpoint.world_ranks()).map(Rank::new) {
            self.endpoint.send_world(to, Tag::Summary, Payload::Bytes(summary.clone()));
        }
    }

    /// Takes what all have reported; false while it has not arrived.
    pub(super) fn take_summary(&mut self) -> Result<bool, Cause> {
        let Some(figures) = self.take_bytes::<Vec<Figures>>(Rank::new(0), Tag::Summary)? else {
            return Ok(false);
        };
        let own = self.world_rank;
        let others = figures.into_iter().filter(|figures| figures.rank != own).map(RankReport::from);
        self.step.reports.extend(others);
        Ok(true)
    }

    fn take_bytes<T: for<'de> Deserialize<'de>>(&mut self, from: Rank, tag: Tag) -> Result<Option<T>, Cause> {
        let Some(message) = self.endpoint.try_take_world(from, tag) else { return Ok(None) };
        let unreadable = |error| Cause::Transport { message: format!("{tag} from rank {from}: {error}") };
        message.into_payload().read().map(Some).map_err(unreadable)
    }
}
