//! Timelines: when each rank ran each action, in a predicted or a measured run.
//!
//! Simulations and the executor emit the same [`Event`]s, so that measures and pictures work for both.
//! Nothing here reads a clock.

use std::fmt;
use std::sync::Arc;

use crate::action::Action;
use crate::communicator::Communicator;
use crate::ids::Rank;
use crate::message_record::{MessageEnd, MessageRecord};
use crate::skip_event::SkipEvent;
use crate::slices::Slices;

/// An action of a rank with its start and its end, in seconds since a common origin.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Event {
    /// The rank.
    pub rank: Rank,
    /// The action.
    pub action: Action,
    /// The start, in seconds.
    pub start: f64,
    /// The end, in seconds; not before `start`.
    pub end: f64,
}

/// A span of time inside actions. Spans of a rank may overlap each other and the rank's actions.
#[derive(Debug, Clone, PartialEq)]
pub struct Scope {
    /// The rank.
    pub rank: Rank,
    /// What happens in this time.
    pub kind: ScopeKind,
    /// The start, in seconds.
    pub start: f64,
    /// The end, in seconds; not before `start`.
    pub end: f64,
}

/// What happens in the time of a [`Scope`]. The text is the name of the span, such as `exchange of 0F1`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ScopeKind {
    /// A span that the user's code has named.
    User(Arc<str>),
    /// The rank exchanges tokens of experts: it has sent its own, and those of others have not arrived. They may
    /// not be sent yet. In an overlap, the action is the half that exchanges.
    Exchange(Action),
    /// A half of an overlap computes. The other half waits for an exchange, has ended, or has not begun.
    Computation(Action),
}

impl fmt::Display for ScopeKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::User(name) => f.write_str(name),
            Self::Exchange(action) => write!(f, "exchange of {action}"),
            Self::Computation(action) => write!(f, "computation of {action}"),
        }
    }
}

impl Scope {
    /// Returns whether the tokens of experts are exchanged in this time.
    pub fn is_exchange(&self) -> bool {
        matches!(self.kind, ScopeKind::Exchange(_))
    }
}

/// A send or a receive that was given to the communicator, and did not run at once because an operation
/// before it in its queue had not ended.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct QueueWait {
    /// The rank.
    pub rank: Rank,
    /// The send or the receive that waited.
    pub action: Action,
    /// The operation in front of it that ended last.
    pub behind: Action,
    /// The time at which the rank gave it to the communicator, in seconds.
    pub from: f64,
    /// The time at which it began to run, in seconds.
    pub until: f64,
}

/// The events of one step on every rank.
#[derive(Debug, Clone, PartialEq)]
pub struct Timeline {
    ranks: u32,
    events: Vec<Event>,
    skips: Vec<SkipEvent>,
    scopes: Vec<Scope>,
    messages: Vec<MessageRecord>,
    clock_skew: Option<ClockSkew>,
    slices: Slices,
    communicator: Communicator,
    queue_waits: Vec<QueueWait>,
}

/// How well the clocks of several processes agree in a timeline that is merged from all of them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ClockSkew {
    /// The largest error of a time, in seconds: the clock of a process is known to half of the shortest round
    /// trip between it and the first process.
    pub uncertainty: f64,
    /// The largest change of the difference between two clocks since the start of the run, in seconds. The
    /// timeline is corrected for it.
    pub change: f64,
}

impl ClockSkew {
    /// Returns the larger of both figures, for two processes.
    #[must_use]
    pub fn max(self, other: Self) -> Self {
        Self { uncertainty: self.uncertainty.max(other.uncertainty), change: self.change.max(other.change) }
    }
}

impl Timeline {
    /// Makes a timeline of `ranks` ranks. It omits events of other ranks, and events whose times are not
    /// finite or end before they start.
    pub fn new(ranks: u32, events: Vec<Event>) -> Self {
        Self {
            ranks,
            events: sorted(ranks, events, |event| (event.rank, event.start, event.end)),
            skips: Vec::new(),
            scopes: Vec::new(),
            messages: Vec::new(),
            clock_skew: None,
            slices: Slices::ONE,
            communicator: Communicator::default(),
            queue_waits: Vec::new(),
        }
    }

    /// Returns the timeline with the messages of skip connections. Events are left out as in
    /// [`Timeline::new`].
    #[must_use]
    pub fn with_skips(self, skips: Vec<SkipEvent>) -> Self {
        Self { skips: sorted(self.ranks, skips, |skip| (skip.rank, skip.start, skip.end)), ..self }
    }

    /// Returns the timeline with spans inside actions. Spans are left out as in [`Timeline::new`].
    #[must_use]
    pub fn with_scopes(self, scopes: Vec<Scope>) -> Self {
        Self { scopes: sorted(self.ranks, scopes, |scope| (scope.rank, scope.start, scope.end)), ..self }
    }

    /// Returns the timeline with the records of its messages. Records of ranks that the timeline does not have are
    /// left out.
    #[must_use]
    pub fn with_messages(self, mut messages: Vec<MessageRecord>) -> Self {
        messages.retain(|message| message.rank.get() < self.ranks && message.peer.get() < self.ranks);
        messages.sort_by_key(|message| (message.rank, message.end));
        Self { messages, ..self }
    }

    /// Returns the timeline with the accuracy of its times, for events of several processes.
    #[must_use]
    pub fn with_clock_skew(mut self, skew: Option<ClockSkew>) -> Self {
        self.clock_skew = skew;
        self
    }

    /// Returns the timeline of a program whose actions number slices ([`crate::slices`]).
    #[must_use]
    pub fn with_slices(self, slices: Slices) -> Self {
        Self { slices, ..self }
    }

    /// Returns the timeline of a simulation on a communicator with queues, with what waited in line there.
    #[must_use]
    pub fn with_communicator(mut self, communicator: Communicator, mut waits: Vec<QueueWait>) -> Self {
        waits.sort_by(|a, b| a.rank.cmp(&b.rank).then(a.until.total_cmp(&b.until)));
        (self.communicator, self.queue_waits) = (communicator, waits);
        self
    }

    /// Returns the same timeline with other actions.
    pub(crate) fn with_events(&self, events: Vec<Event>) -> Self {
        let Self { events, .. } = Self::new(self.ranks, events);
        Self { events, ..self.clone() }
    }

    /// The number of slices of each microbatch.
    pub fn slices(&self) -> Slices {
        self.slices
    }

    /// The number of ranks.
    pub fn ranks(&self) -> u32 {
        self.ranks
    }

    /// All events, by rank and then by start.
    pub fn events(&self) -> &[Event] {
        &self.events
    }

    /// The events of one rank, by start.
    pub fn events_of(&self, rank: Rank) -> &[Event] {
        of_rank(&self.events, rank, |event| event.rank)
    }

    /// The messages of skip connections, by rank and then by start. No other figure of a timeline counts
    /// them.
    pub fn skips(&self) -> &[SkipEvent] {
        &self.skips
    }

    /// The messages of skip connections that one rank sends or receives, by start.
    pub fn skips_of(&self, rank: Rank) -> &[SkipEvent] {
        of_rank(&self.skips, rank, |skip| skip.rank)
    }

    /// The spans inside actions, by rank and then by start. No figure of a timeline counts them.
    pub fn scopes(&self) -> &[Scope] {
        &self.scopes
    }

    /// The spans inside actions of one rank, by start.
    pub fn scopes_of(&self, rank: Rank) -> &[Scope] {
        of_rank(&self.scopes, rank, |scope| scope.rank)
    }

    /// The messages that ranks have sent and received, by rank and then by action; none in a prediction.
    pub fn messages(&self) -> &[MessageRecord] {
        &self.messages
    }

    /// The messages that one rank has sent and received, by action.
    pub fn messages_of(&self, rank: Rank) -> &[MessageRecord] {
        of_rank(&self.messages, rank, |message| message.rank)
    }

    /// Returns the message that an action of a rank sends or receives, if it is known.
    pub fn message(&self, rank: Rank, end: MessageEnd) -> Option<&MessageRecord> {
        let messages = self.messages_of(rank);
        let index = messages.binary_search_by_key(&end, |message| message.end).ok()?;
        messages.get(index)
    }

    /// The communicator on which the step was simulated. Measured steps have the default one.
    pub fn communicator(&self) -> &Communicator {
        &self.communicator
    }

    /// The sends and receives that waited in line, by rank and time; none if messages are buffered, and in
    /// measured steps. A receive whose message is not sent yet holds all operations after it in its queue
    /// (head-of-line blocking).
    pub fn queue_waits(&self) -> &[QueueWait] {
        &self.queue_waits
    }

    /// Returns the accuracy of the times; `None` if all of them come from one clock.
    pub fn clock_skew(&self) -> Option<ClockSkew> {
        self.clock_skew
    }

    /// Returns the start of the first event of any rank, in seconds; 0 without events.
    pub fn start(&self) -> f64 {
        self.events.iter().map(|event| event.start).reduce(f64::min).unwrap_or(0.0)
    }

    /// Returns the time from the start of the first event to the end of the last, over all ranks, in seconds.
    pub fn makespan(&self) -> f64 {
        self.events.iter().map(|event| event.end).reduce(f64::max).map_or(0.0, |end| end - self.start())
    }

    /// Returns how long `rank` runs actions that compute, in seconds. Time in which two of them run counts
    /// once. Communication does not count, except the exchanges inside the actions.
    pub fn busy(&self, rank: Rank) -> f64 {
        let compute = self.events_of(rank).iter().filter(|event| event.action.is_compute());
        let own_time = compute.scan(f64::NEG_INFINITY, |busy_until, event| {
            let start = event.start.max(*busy_until);
            *busy_until = busy_until.max(event.end);
            Some((event.end - start).max(0.0))
        });
        // `+ 0.0`, because an empty sum of floats is -0.
        own_time.sum::<f64>() + 0.0
    }

    /// Returns the share of the makespan in which each rank does not compute, from barrier to barrier:
    /// `1 - busy / makespan`.
    pub fn bubble_per_rank(&self) -> Vec<f64> {
        let makespan = self.makespan();
        (0..self.ranks).map(|rank| idle_share(self.busy(Rank::new(rank)), makespan)).collect()
    }

    /// Returns the mean of [`Timeline::bubble_per_rank`] over the ranks: the bubble of a step that begins and
    /// ends with a barrier.
    pub fn bubble_fraction(&self) -> f64 {
        mean(&self.bubble_per_rank())
    }

    /// Returns the mean share of a rank's own span in which it does not compute. The span is the time from
    /// its first event to its last. This bubble remains if neighbouring steps fill the idle time at the ends.
    pub fn span_bubble_fraction(&self) -> f64 {
        let share = |rank| {
            let events = self.events_of(rank);
            let start = events.first().map_or(0.0, |event| event.start);
            let end = events.iter().map(|event| event.end).reduce(f64::max).unwrap_or(0.0);
            idle_share(self.busy(rank), end - start)
        };
        mean(&(0..self.ranks).map(Rank::new).map(share).collect::<Vec<_>>())
    }
}

/// Returns what is on these ranks and has finite times in ascending order, by rank and then by start. `place` returns
/// the rank, the start and the end.
fn sorted<T>(ranks: u32, mut all: Vec<T>, place: impl Fn(&T) -> (Rank, f64, f64)) -> Vec<T> {
    all.retain(|one| {
        let (rank, start, end) = place(one);
        rank.get() < ranks && start.is_finite() && end.is_finite() && start <= end
    });
    all.sort_by(|one, other| {
        let ((rank, start, _), (other_rank, other_start, _)) = (place(one), place(other));
        rank.cmp(&other_rank).then(start.total_cmp(&other_start))
    });
    all
}

/// Returns the part of a list that is on a rank. The list is sorted by rank.
fn of_rank<T>(all: &[T], rank: Rank, rank_of: impl Fn(&T) -> Rank) -> &[T] {
    let start = all.partition_point(|one| rank_of(one) < rank);
    let end = all.partition_point(|one| rank_of(one) <= rank);
    &all[start..end]
}

/// Returns `1 - busy / span`, and 0 for an empty span.
fn idle_share(busy: f64, span: f64) -> f64 {
    if span > 0.0 { 1.0 - busy / span } else { 0.0 }
}

/// The arithmetic mean; 0 for no values.
fn mean(values: &[f64]) -> f64 {
    if values.is_empty() { 0.0 } else { values.iter().sum::<f64>() / values.len() as f64 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::StageIndex;
    use crate::skip_event::{SkipAction, SkipMessage};

    fn timeline(ranks: u32, events: &[(u32, &str, f64, f64)]) -> Timeline {
        let event = |&(rank, action, start, end): &(u32, &str, f64, f64)| Event {
            rank: Rank::new(rank),
            action: action.parse().expect("an action"),
            start,
            end,
        };
        Timeline::new(ranks, events.iter().map(event).collect())
    }

    #[test]
    fn bubbles_of_a_staircase() {
        let steps = [
            (0, "0F0", 1.0, 2.0),
            (0, "0SEND_F0", 2.0, 2.5),
            (1, "1RECV_F0", 1.0, 2.5),
            (1, "1F0", 2.5, 3.0),
        ];
        let timeline = timeline(2, &steps);
        assert_eq!(timeline.makespan(), 2.0);
        assert_eq!(timeline.busy(Rank::new(0)), 1.0);
        assert_eq!(timeline.bubble_per_rank(), [0.5, 0.75]);
        assert_eq!(timeline.bubble_fraction(), 0.625);
        // Rank 0 spans 1.5 s and computes 1 s of it; rank 1 spans 2 s and computes 0.5 s.
        assert!((timeline.span_bubble_fraction() - (1.0 / 3.0 + 0.75) / 2.0).abs() < 1e-12);
    }

    #[test]
    fn time_of_two_actions_counts_once() {
        let halves = [(0, "0F1", 0.0, 4.0), (0, "0B0", 1.0, 3.0), (0, "0F2", 3.0, 5.0), (0, "0B1", 7.0, 8.0)];
        assert_eq!(timeline(1, &halves).busy(Rank::new(0)), 6.0);
    }

    #[test]
    fn an_empty_timeline_loses_nothing() {
        let timeline = timeline(2, &[]);
        assert_eq!(
            (timeline.makespan(), timeline.bubble_fraction(), timeline.span_bubble_fraction()),
            (0.0, 0.0, 0.0)
        );
    }

    #[test]
    fn skips_are_sorted_and_counted_apart() {
        let message = |microbatch: u32| SkipMessage {
            from: StageIndex::new(0),
            to: StageIndex::new(2),
            microbatch: microbatch.into(),
        };
        let skip = |rank: u32, action, start, end| SkipEvent { rank: rank.into(), action, start, end };
        let (late, early) = (
            skip(1, SkipAction::Receive(message(1)), 5.0, 9.0),
            skip(0, SkipAction::Send(message(1)), 4.0, 5.0),
        );
        let misplaced = [
            skip(7, SkipAction::Send(message(0)), 0.0, 1.0),
            skip(0, SkipAction::Send(message(0)), 1.0, 0.0),
        ];
        let timeline = timeline(2, &[(0, "0F1", 0.0, 1.0)]);
        let with_skips = timeline.clone().with_skips([vec![late, early], misplaced.to_vec()].concat());
        assert_eq!(with_skips.skips(), [early, late]);
        assert_eq!(
            (with_skips.skips_of(Rank::new(0)), with_skips.skips_of(Rank::new(1))),
            (&[early][..], &[late][..])
        );
        assert_eq!(with_skips.makespan(), timeline.makespan());
    }

    #[test]
    fn scopes_are_sorted_and_counted_apart() {
        let scope = |rank: u32, name: &str, start, end| {
            let kind = ScopeKind::User(name.into());
            Scope { rank: rank.into(), kind, start, end }
        };
        let (late, early) = (scope(1, "exchange", 5.0, 9.0), scope(0, "exchange", 4.0, 5.0));
        let misplaced = [scope(7, "elsewhere", 0.0, 1.0), scope(0, "reversed", 1.0, 0.0)];
        let timeline = timeline(2, &[(0, "0F1", 0.0, 1.0)]);
        let with_scopes =
            timeline.clone().with_scopes([vec![late.clone(), early.clone()], misplaced.to_vec()].concat());
        assert_eq!(with_scopes.scopes(), [early, late]);
        assert_eq!(with_scopes.makespan(), timeline.makespan());
    }

    #[test]
    fn spans_have_names() {
        let action: Action = "0F1".parse().expect("an action");
        assert_eq!(ScopeKind::User("exchange".into()).to_string(), "exchange");
        assert_eq!(ScopeKind::Exchange(action).to_string(), "exchange of 0F1");
        assert_eq!(ScopeKind::Computation(action).to_string(), "computation of 0F1");
    }

    #[test]
    fn events_without_a_place_are_left_out() {
        let events =
            [(7, "0F0", 0.0, 1.0), (0, "0F0", 0.0, f64::NAN), (0, "0F0", 2.0, 1.0), (0, "0F1", 0.0, 1.0)];
        assert_eq!(timeline(1, &events).events().len(), 1);
    }
}
