//! The events and figures of a rank's step, for its report.

use std::sync::Arc;
use std::time::{Duration, Instant};

use pipewright_schedule::{
    Action, Event, Microbatch, Rank, Scope, ScopeKind, SkipAction, SkipEvent, StageIndex,
};

use super::group_link::{ExchangeSpan, ExchangeTimes};
use super::turns::ComputingSpan;
use crate::memory::RankMemory;
use crate::message::Direction;
use crate::offload::Transfer;
use crate::stage::ExpertLoad;

/// An auxiliary loss of one stage and microbatch. The ranks report them one by one, because their sum has the
/// same bits for every cut only if they are added in an order that does not depend on the cut.
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

/// The events of a step, and the losses and loads that its forwards have reported.
#[derive(Debug, Default)]
pub(super) struct Records {
    pub(super) events: Vec<Event>,
    /// The messages of skip connections.
    pub(super) skips: Vec<SkipEvent>,
    /// The spans that hooks have named, and the spans of exchanges of tokens and of halves of overlaps.
    pub(super) scopes: Vec<Scope>,
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
    origin: Instant,
    /// The time at which the current action was first tried; a waiting action is tried again.
    entered: Option<Instant>,
    /// The time at which the program ended; `None` before its end.
    program_end: Option<Instant>,
    records: Records,
}

impl Recorder {
    pub(super) fn new(row: Rank) -> Self {
        Self { row, origin: Instant::now(), entered: None, program_end: None, records: Records::default() }
    }

    /// Starts the records of a step that has about this many events.
    pub(super) fn begin(&mut self, origin: Instant, events: usize) {
        (self.origin, self.entered, self.records) = (origin, None, Records::default());
        self.program_end = None;
        self.records.events.reserve(events);
    }

    /// Returns the time at which the timeline starts.
    pub(super) fn origin(&self) -> Instant {
        self.origin
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
        self.entered = None;
    }

    /// Returns the time since the current action was first tried.
    fn since_entered(&self) -> Duration {
        self.entered.map_or(Duration::ZERO, |entered| entered.elapsed())
    }

    /// Adds the event of an action that has just ended: from its first attempt until the current time.
    pub(super) fn note(&mut self, action: Action) {
        let start = self.seconds(self.entered.unwrap_or_else(Instant::now));
        let end = self.origin.elapsed().as_secs_f64();
        self.records.events.push(Event { rank: self.row, action, start, end });
    }

    /// Adds the event of a receive whose message has just been taken. The computation that uses it begins at
    /// the current time.
    pub(super) fn note_received(&mut self, action: Action) {
        self.note(action);
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
    /// message was sent or when the rank began to wait, whichever is later, and ends at the current time.
    /// Waiting for a message that is not sent yet is a bubble.
    pub(super) fn note_exposed(&mut self, sent: Instant) {
        let waiting_since = self.entered.unwrap_or_else(Instant::now);
        self.records.waited += waiting_since.max(sent).elapsed();
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
        memory.give_away_list(&records.auxiliary);
        records
    }

    fn seconds(&self, at: Instant) -> f64 {
        at.saturating_duration_since(self.origin).as_secs_f64()
    }
}

/// The time in which a rank exchanged tokens with the replicas that hold the experts together with it, and in
/// which it waited for them. `exposed` and `waited` together are the time in which it waited inside its actions
/// and computed nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExchangeTime {
    /// The time in which rows for this rank were under way: from the moment at which another replica sent them
    /// until they had arrived. Rows that travel at the same time count once. If the rank waits when rows
    /// arrive, the moment until it goes on counts too.
    pub total: Duration,
    /// The part of `total` in which the rank waited and computed nothing.
    pub exposed: Duration,
    /// The time in which the rank computed nothing and waited for rows that another replica had not sent yet,
    /// because that replica still computed, or waited itself.
    pub waited: Duration,
}

impl std::ops::AddAssign for ExchangeTime {
    fn add_assign(&mut self, other: Self) {
        self.total += other.total;
        self.exposed += other.exposed;
        self.waited += other.waited;
    }
}

/// The start and the end of a time.
pub(super) type Span = (Instant, Instant);

impl ExchangeTime {
    /// Counts the exchanges of an action. `messages` are the times from the sending of each message to its
    /// arrival. `waits` are the times in which the rank computed nothing, in order; they do not overlap.
    pub(super) fn of(mut messages: Vec<Span>, waits: Vec<Span>) -> Self {
        for (_, arrival) in &mut messages {
            // A wait ends a moment after its message has arrived.
            let next = waits.get(waits.partition_point(|(_, end)| end < arrival));
            *arrival = next.filter(|(start, _)| start <= arrival).map_or(*arrival, |&(_, end)| end);
        }
        let total = length_of_union(messages.clone());
        messages.extend_from_slice(&waits);
        let waited = length_of_union(messages) - total;
        Self { total, exposed: length_of_union(waits) - waited, waited }
    }
}

/// Returns the time in which at least one of the spans lasts.
fn length_of_union(mut spans: Vec<Span>) -> Duration {
    spans.sort_unstable();
    let Some(&(mut until, _)) = spans.first() else { return Duration::ZERO };
    let mut length = Duration::ZERO;
    for (start, end) in spans {
        length += end.saturating_duration_since(start.max(until));
        until = until.max(end);
    }
    length
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns spans of these seconds.
    fn spans(seconds: &[(u64, u64)], origin: Instant) -> Vec<Span> {
        let at = |seconds| origin + Duration::from_secs(seconds);
        seconds.iter().map(|&(start, end)| (at(start), at(end))).collect()
    }

    #[test]
    fn spans_at_the_same_time_count_once() {
        let check = |seconds: &[(u64, u64)], expected| {
            let found = length_of_union(spans(seconds, Instant::now()));
            assert_eq!(found, Duration::from_secs(expected), "{seconds:?}");
        };
        check(&[], 0);
        check(&[(5, 7), (1, 3)], 4);
        check(&[(1, 4), (2, 3), (3, 6)], 5);
        check(&[(1, 2), (2, 4), (9, 9)], 3);
    }

    /// Checks the total, the exposed and the waited seconds.
    fn check(messages: &[(u64, u64)], waits: &[(u64, u64)], expected: [u64; 3]) {
        let origin = Instant::now();
        let [total, exposed, waited] = expected.map(Duration::from_secs);
        let found = ExchangeTime::of(spans(messages, origin), spans(waits, origin));
        assert_eq!(found, ExchangeTime { total, exposed, waited }, "{messages:?} {waits:?}");
    }

    #[test]
    fn a_wait_is_exposed_only_while_rows_are_under_way() {
        check(&[], &[], [0, 0, 0]);
        // The rank computes meanwhile.
        check(&[(2, 5)], &[], [3, 0, 0]);
        check(&[(2, 5)], &[(5, 6)], [4, 1, 0]);
        check(&[(2, 5)], &[(6, 7)], [3, 0, 1]);
        // The rows were sent before the rank waits, at the same time, and later.
        check(&[(2, 5)], &[(3, 5)], [3, 2, 0]);
        check(&[(2, 5)], &[(2, 5)], [3, 3, 0]);
        check(&[(2, 5)], &[(0, 5)], [3, 3, 2]);
        // The wait ends before they arrive, and the other half computes.
        check(&[(2, 5)], &[(0, 1), (1, 3)], [3, 1, 2]);
    }

    #[test]
    fn a_wait_is_exposed_until_the_rank_goes_on() {
        check(&[(2, 5)], &[(3, 7)], [5, 4, 0]);
        check(&[(2, 5)], &[(0, 7), (7, 9)], [5, 5, 4]);
        check(&[(2, 5)], &[(0, 5), (5, 9)], [3, 3, 6]);
    }

    #[test]
    fn a_wait_for_several_replicas_is_exposed_while_any_rows_are_under_way() {
        check(&[(6, 9), (1, 3), (2, 4)], &[(0, 3), (3, 4), (4, 9)], [6, 6, 3]);
        // The rows of both halves of an overlap; the rank computes from 3 to 5.
        check(&[(1, 6), (2, 4)], &[(0, 3), (5, 8)], [7, 5, 1]);
    }
}
