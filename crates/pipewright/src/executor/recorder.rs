//! The events and figures of a rank's step, for its report.

use std::sync::Arc;
use std::time::{Duration, Instant};

use pipewright_schedule::{
    Action, Event, MessageEnd, MessageRecord, Microbatch, Rank, Scope, ScopeKind, SkipAction, SkipEvent,
    StageIndex, TensorForm,
};
use serde::{Deserialize, Serialize};

use super::exchange_time::ExchangeTime;
use super::group_link::{ExchangeSpan, ExchangeTimes};
use super::turns::ComputingSpan;
use crate::memory::RankMemory;
use crate::message::Direction;
use crate::offload::Transfer;
use crate::stage::ExpertLoad;
use crate::tensor::{OptionalTensor, Value};

/// The largest number of lists of tensors that a rank keeps for its next messages.
const MOST_FORMS: usize = 64;

/// An auxiliary loss of one stage and microbatch. The ranks report them one by one, because their sum has the
/// same bits for every cut only if they are added in an order that does not depend on the cut.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
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

/// The events of a step, and the losses and loads that its forwards have reported.
#[derive(Debug, Default)]
pub(super) struct Records {
    pub(super) events: Vec<Event>,
    /// The messages of skip connections.
    pub(super) skips: Vec<SkipEvent>,
    /// The spans that hooks have named, and the spans of exchanges of tokens and of halves of overlaps.
    pub(super) scopes: Vec<Scope>,
    /// The messages of boundaries and of skip connections, at this rank's end.
    pub(super) messages: Vec<MessageRecord>,
    /// The loss of each microbatch.
    pub(super) losses: Vec<f64>,
    pub(super) auxiliary: Vec<AuxiliaryPart>,
    pub(super) loads: Vec<ExpertLoad>,
    /// The time in which the rank only waited for a message that had been sent.
    pub(super) waited: Duration,
    /// The time of the exchanges of tokens.
    pub(super) exchange: ExchangeTime,
}

/// Records the events and figures of a rank's step.
pub(super) struct Recorder {
    /// The rank's row of the timeline.
    row: Rank,
    /// The time at which the timeline starts.
    pub(super) origin: Instant,
    /// The time at which the current action was first tried; a waiting action is tried again.
    entered: Option<Instant>,
    /// When the message of the current action had arrived, if it is taken later.
    arrived: Option<Instant>,
    /// The time at which the program ended; `None` before its end.
    program_end: Option<Instant>,
    records: Records,
    /// The lists of tensors that messages had, of this step and of earlier ones. Most messages share a few of them.
    forms: Vec<Arc<[TensorForm]>>,
}

impl Recorder {
    pub(super) fn new(row: Rank) -> Self {
        Self {
            row,
            origin: Instant::now(),
            entered: None,
            arrived: None,
            program_end: None,
            records: Records::default(),
            forms: Vec::new(),
        }
    }

    /// Starts the records of a step that has about this many events and messages.
    pub(super) fn begin(&mut self, origin: Instant, events: usize, messages: usize) {
        (self.origin, self.entered, self.records) = (origin, None, Records::default());
        (self.arrived, self.program_end) = (None, None);
        self.records.events.reserve(events);
        self.records.messages.reserve(messages);
    }

    /// Notes that the program has ended.
    pub(super) fn end_program(&mut self) {
        self.program_end = Some(Instant::now());
    }

    /// Returns the time from the end of the program until `at`.
    pub(super) fn since_program(&self, at: Instant) -> Duration {
        self.program_end.map_or(Duration::ZERO, |end| at.saturating_duration_since(end))
    }

    /// Notes that an action is tried. Returns whether it is the first time.
    pub(super) fn enter(&mut self) -> bool {
        let is_first = self.entered.is_none();
        self.entered.get_or_insert_with(Instant::now);
        is_first
    }

    /// Notes that the current action is done.
    pub(super) fn leave(&mut self) {
        (self.entered, self.arrived) = (None, None);
    }

    /// Notes that the message of the current action has arrived, if it has one. It is taken later.
    pub(super) fn note_arrived(&mut self) {
        self.arrived = Some(Instant::now());
    }

    /// Returns the time since the current action was first tried.
    fn since_entered(&self) -> Duration {
        self.entered.map_or(Duration::ZERO, |entered| entered.elapsed())
    }

    /// Adds the event of an action that has just ended: from its first attempt until the current time.
    pub(super) fn note(&mut self, action: Action) {
        self.note_until(action, Instant::now());
    }

    fn note_until(&mut self, action: Action, end: Instant) {
        let start = self.seconds(self.entered.unwrap_or(end));
        let end = self.seconds(end);
        self.records.events.push(Event { rank: self.row, action, start, end });
    }

    /// Adds the event of a receive whose message has just been taken. The computation that uses it begins at
    /// the current time.
    pub(super) fn note_received(&mut self, action: Action) {
        let arrived = self.arrived.take().unwrap_or_else(Instant::now);
        self.note_until(action, arrived);
        self.entered = Some(Instant::now());
    }

    /// Adds the event of a transfer out of memory or back.
    pub(super) fn note_transfer(&mut self, Transfer { action, start, end }: Transfer) {
        let (start, end) = (self.seconds(start), self.seconds(end));
        self.records.events.push(Event { rank: self.row, action, start, end });
    }

    /// Counts the time in which the rank was idle while tensors came back into memory, from `start` on. The
    /// computation that uses them begins at the current time.
    pub(super) fn note_reloaded(&mut self, start: Instant) {
        self.note_exposed(start);
        self.entered = Some(Instant::now());
    }

    /// Adds the event of a forward that a backward computed again from `start` on. The event of the backward
    /// begins after it, so that the two do not overlap. Blocks are recomputed alternately with their
    /// backwards, and the event has their times together.
    pub(super) fn note_recomputed(&mut self, forward: Action, start: Instant, recomputed: Duration) {
        let begin = start.saturating_duration_since(self.origin);
        self.records.events.push(Event {
            rank: self.row,
            action: forward,
            start: begin.as_secs_f64(),
            end: (begin + recomputed).as_secs_f64(),
        });
        self.entered = Some(start + recomputed);
    }

    /// Adds the event of a message of a skip connection that was sent from `start` until the current time.
    pub(super) fn note_skip_sent(&mut self, action: SkipAction, start: Instant) {
        let (start, end) = (self.seconds(start), self.origin.elapsed().as_secs_f64());
        self.records.skips.push(SkipEvent { rank: self.row, action, start, end });
    }

    /// Adds the event of a message of a skip connection that has just been taken. The computation that uses
    /// it begins at the earliest at the current time.
    pub(super) fn note_skip_received(&mut self, action: SkipAction) {
        self.note_skip_sent(action, self.entered.unwrap_or_else(Instant::now));
        self.entered = Some(Instant::now());
    }

    /// Adds the record of a message; `peer` is the row of the other rank. Returns the record.
    pub(super) fn note_message(
        &mut self,
        end: MessageEnd,
        peer: Rank,
        tensors: &[OptionalTensor],
    ) -> &MessageRecord {
        let bytes = tensors.iter().flatten().map(|tensor| tensor.bytes() as u64).sum();
        let tensors = self.form_of(tensors);
        let messages = &mut self.records.messages;
        messages.push(MessageRecord { rank: self.row, end, peer, bytes, tensors });
        &messages[messages.len() - 1]
    }

    /// Returns the forms of tensors, in the list of an earlier message if one has the same.
    fn form_of(&mut self, tensors: &[OptionalTensor]) -> Arc<[TensorForm]> {
        let known = self.forms.iter().find(|forms| have_forms(tensors, forms)).cloned();
        known.unwrap_or_else(|| {
            let form = |tensor: &Value| TensorForm {
                dtype: tensor.dtype().name().into(),
                shape: tensor.shape().to_vec(),
            };
            let forms: Arc<[TensorForm]> = tensors.iter().flatten().map(form).collect();
            // Microbatches whose sizes always change would fill the list.
            if self.forms.len() == MOST_FORMS {
                self.forms.remove(0);
            }
            self.forms.push(forms.clone());
            forms
        })
    }

    /// Adds a span that a hook names.
    pub(super) fn note_scope(&mut self, name: &str, start: Instant, end: Instant) {
        self.add_scope(ScopeKind::User(Arc::from(name)), start, end);
    }

    fn add_scope(&mut self, kind: ScopeKind, start: Instant, end: Instant) {
        let (start, end) = (self.seconds(start), self.seconds(end));
        self.records.scopes.push(Scope { rank: self.row, kind, start, end });
    }

    /// Adds the spans of the exchanges of an action, and counts their time. `action_of` returns the action of
    /// an exchange, which may be a half of an overlap.
    pub(super) fn note_exchanges(
        &mut self,
        ExchangeTimes { exchanges, messages, waits }: ExchangeTimes,
        action_of: impl Fn(Option<Direction>) -> Action,
    ) {
        for ExchangeSpan { half, start, end } in exchanges {
            self.add_scope(ScopeKind::Exchange(action_of(half)), start, end);
        }
        self.records.exchange += ExchangeTime::of(messages, waits);
    }

    /// Adds the spans in which the halves of an overlap computed.
    pub(super) fn note_halves(
        &mut self,
        spans: Vec<ComputingSpan>,
        action_of: impl Fn(Option<Direction>) -> Action,
    ) {
        for ComputingSpan { half, start, end } in spans {
            self.add_scope(ScopeKind::Computation(action_of(Some(half))), start, end);
        }
    }

    /// Counts the time in which the rank was idle while a message was in transit. This time starts when the
    /// message was sent or when the rank began to wait, whichever is later, and ends when it had arrived, or else at the current
    /// time. Waiting for a message that is not sent yet is a bubble.
    pub(super) fn note_exposed(&mut self, sent: Instant) {
        let arrived = self.arrived.unwrap_or_else(Instant::now);
        let waiting_since = self.entered.unwrap_or(arrived);
        self.records.waited += arrived.saturating_duration_since(waiting_since.max(sent));
    }

    /// Counts the time in which the rank waited until a message that it had sent left.
    pub(super) fn note_sent(&mut self) {
        self.records.waited += self.since_entered();
    }

    /// Adds the loss of a slice. Only the first slice of a microbatch begins a new loss.
    pub(super) fn add_loss(&mut self, loss: f64, is_first_slice: bool) {
        match self.records.losses.last_mut() {
            Some(sum) if !is_first_slice => *sum += loss,
            _ => self.records.losses.push(loss),
        }
    }

    pub(super) fn add_auxiliary(&mut self, part: AuxiliaryPart) {
        self.records.auxiliary.push(part);
    }

    /// Adds the loads of experts that a forward has reported.
    pub(super) fn add_loads(&mut self, loads: Vec<ExpertLoad>) {
        self.records.loads.extend(loads);
    }

    /// Takes out the records. `memory` no longer counts them on this rank.
    pub(super) fn take(&mut self, memory: &RankMemory) -> Records {
        let records = std::mem::take(&mut self.records);
        memory.give_away_list(&records.events);
        memory.give_away_list(&records.skips);
        memory.give_away_list(&records.scopes);
        memory.give_away_list(&records.messages);
        memory.give_away_list(&records.auxiliary);
        records
    }

    fn seconds(&self, at: Instant) -> f64 {
        at.saturating_duration_since(self.origin).as_secs_f64()
    }
}

/// Returns whether tensors have these element types and shapes.
fn have_forms(tensors: &[OptionalTensor], forms: &[TensorForm]) -> bool {
    let has = |(tensor, form): (&Value, &TensorForm)| {
        tensor.dtype().name() == form.dtype && tensor.shape().as_slice() == form.shape
    };
    tensors.iter().flatten().count() == forms.len() && tensors.iter().flatten().zip(forms).all(has)
}
