//! A rank's report as a message between processes; `report_exchange.rs` has the exchange.
//!
//! A report's times count from the start of the step in the rank's own process. As a message they are on the
//! clock that all processes share, so that the process that merges them can subtract the start of its own
//! step.

use std::sync::Arc;

use pipewright_schedule::{
    Action, ClockSkew, Event, MessageEnd, MessageRecord, Microbatch, Rank, Scope, ScopeKind, SkipAction,
    SkipEvent, SkipMessage, StageIndex, TensorForm,
};
use serde::{Deserialize, Serialize};

use super::report::{RankReport, RankResults};
use crate::checkpoint::StageLeaves;
use crate::ids::WorldRank;

/// A report as a message. It does not contain the outputs, which stay on their rank.
#[derive(Serialize, Deserialize)]
pub(super) struct ReportMessage {
    pub(super) rank: WorldRank,
    results: RankResults,
    pub(super) times: Times,
}

/// The part of a report that only the process needs that merges the reports.
#[derive(Default, Serialize, Deserialize)]
pub(super) struct Times {
    skew: Option<PackedSkew>,
    /// `None` in the summary that every process gets.
    lists: Option<Lists>,
    /// See [`RankReport::fingerprint`].
    fingerprint: Option<StageLeaves>,
    /// The digest of the next batch of the rank's process.
    pub(super) next_batch: Option<u64>,
}

/// The events of a rank, and the rest of its part of the timeline.
#[derive(Default, Serialize, Deserialize)]
struct Lists {
    /// Each with its start and its end.
    events: Vec<(PackedAction, f64, f64)>,
    skips: Vec<(PackedSkip, f64, f64)>,
    scopes: Vec<(PackedScope, f64, f64)>,
    messages: Vec<PackedMessage>,
    /// The lists of tensors of the messages, each once.
    forms: Vec<Vec<TensorForm>>,
}

/// The uncertainty and the change of [`ClockSkew`].
pub(super) type PackedSkew = (f64, f64);

/// An action as a number.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "u64", into = "u64")]
struct PackedAction(Action);

/// A [`ScopeKind`].
#[derive(Serialize, Deserialize)]
enum PackedScope {
    User(String),
    Exchange(PackedAction),
    Computation(PackedAction),
}

/// The end of a message at the rank, the rank at the other end, the bytes, and the index of its list of tensors.
type PackedMessage = (PackedEnd, Rank, u64, u32);

/// A [`MessageEnd`].
#[derive(Serialize, Deserialize)]
enum PackedEnd {
    Action(PackedAction),
    Skip(PackedSkip),
}

/// Whether a message of a skip connection is sent, its stages, and its microbatch.
type PackedSkip = (bool, StageIndex, StageIndex, Microbatch);

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

fn packed_skip(action: SkipAction) -> PackedSkip {
    let SkipMessage { from, to, microbatch } = action.message();
    (matches!(action, SkipAction::Send(_)), from, to, microbatch)
}

fn unpacked_skip((is_send, from, to, microbatch): PackedSkip) -> SkipAction {
    let message = SkipMessage { from, to, microbatch };
    if is_send { SkipAction::Send(message) } else { SkipAction::Receive(message) }
}

fn packed_scope(kind: &ScopeKind) -> PackedScope {
    match kind {
        ScopeKind::User(name) => PackedScope::User(name.to_string()),
        ScopeKind::Exchange(action) => PackedScope::Exchange(PackedAction(*action)),
        ScopeKind::Computation(action) => PackedScope::Computation(PackedAction(*action)),
    }
}

fn unpacked_scope(packed: PackedScope) -> ScopeKind {
    match packed {
        PackedScope::User(name) => ScopeKind::User(name.into()),
        PackedScope::Exchange(PackedAction(action)) => ScopeKind::Exchange(action),
        PackedScope::Computation(PackedAction(action)) => ScopeKind::Computation(action),
    }
}

/// Returns messages, and their lists of tensors, each once.
fn packed_messages(messages: &[MessageRecord]) -> (Vec<PackedMessage>, Vec<Vec<TensorForm>>) {
    let mut lists: Vec<&Arc<[TensorForm]>> = Vec::new();
    let packed = messages.iter().map(|MessageRecord { end, peer, bytes, tensors, .. }| {
        let end = match *end {
            MessageEnd::Action(action) => PackedEnd::Action(PackedAction(action)),
            MessageEnd::Skip(action) => PackedEnd::Skip(packed_skip(action)),
        };
        let known = lists.iter().position(|list| Arc::ptr_eq(list, tensors));
        let index = known.unwrap_or_else(|| {
            lists.push(tensors);
            lists.len() - 1
        });
        (end, *peer, *bytes, index as u32)
    });
    let packed = packed.collect();
    (packed, lists.into_iter().map(|list| list.to_vec()).collect())
}

/// Returns the messages of the rank with this row of the timeline. A message without a list of tensors, which no
/// process sends, is left out.
fn unpacked_messages(
    row: Rank,
    messages: Vec<PackedMessage>,
    forms: Vec<Vec<TensorForm>>,
) -> Vec<MessageRecord> {
    let forms: Vec<Arc<[TensorForm]>> = forms.into_iter().map(Arc::from).collect();
    let unpack = |(end, peer, bytes, index): PackedMessage| {
        let end = match end {
            PackedEnd::Action(PackedAction(action)) => MessageEnd::Action(action),
            PackedEnd::Skip(skip) => MessageEnd::Skip(unpacked_skip(skip)),
        };
        let tensors = forms.get(index as usize)?.clone();
        Some(MessageRecord { rank: row, end, peer, bytes, tensors })
    };
    messages.into_iter().filter_map(unpack).collect()
}

impl ReportMessage {
    /// Makes the message of a report; `common` converts its times to the common clock.
    pub(super) fn of(report: &RankReport, common: impl Fn(f64) -> f64) -> Self {
        let events = report.events.iter();
        let events = events.map(|event| (PackedAction(event.action), common(event.start), common(event.end)));
        let skips = report.skips.iter();
        let skips = skips.map(|skip| (packed_skip(skip.action), common(skip.start), common(skip.end)));
        let scopes = report.scopes.iter();
        let scopes = scopes.map(|scope| (packed_scope(&scope.kind), common(scope.start), common(scope.end)));
        let (messages, forms) = packed_messages(&report.messages);
        let lists = Lists {
            events: events.collect(),
            skips: skips.collect(),
            scopes: scopes.collect(),
            messages,
            forms,
        };
        let skew = report.clock_skew.map(|skew| (skew.uncertainty, skew.change));
        Self {
            rank: report.rank,
            results: report.results.clone(),
            times: Times {
                skew,
                lists: Some(lists),
                fingerprint: report.fingerprint.clone(),
                next_batch: report.next_batch,
            },
        }
    }

    /// Returns the report of the rank with this row of the timeline; its times count from `origin`, a time on
    /// the common clock.
    pub(super) fn into_report(self, row: Rank, origin: f64) -> RankReport {
        let Self { rank, results, times: Times { skew, lists, fingerprint, .. } } = self;
        let Lists { events, skips, scopes, messages, forms } = lists.unwrap_or_default();
        let event = |(PackedAction(action), start, end)| Event {
            rank: row,
            action,
            start: start - origin,
            end: end - origin,
        };
        let skip = |(skip, start, end)| SkipEvent {
            rank: row,
            action: unpacked_skip(skip),
            start: start - origin,
            end: end - origin,
        };
        let scope = |(kind, start, end): (PackedScope, f64, f64)| Scope {
            rank: row,
            kind: unpacked_scope(kind),
            start: start - origin,
            end: end - origin,
        };
        RankReport {
            rank,
            results,
            events: events.into_iter().map(event).collect(),
            skips: skips.into_iter().map(skip).collect(),
            scopes: scopes.into_iter().map(scope).collect(),
            messages: unpacked_messages(row, messages, forms),
            clock_skew: skew.map(unpacked_skew),
            fingerprint,
            ..RankReport::default()
        }
    }
}

/// Returns the largest skew of several ranks.
pub(super) fn largest_skew<'a>(times: impl IntoIterator<Item = &'a Times>) -> Option<PackedSkew> {
    let skews = times.into_iter().filter_map(|times| times.skew.map(unpacked_skew));
    skews.reduce(ClockSkew::max).map(|skew| (skew.uncertainty, skew.change))
}

pub(super) fn unpacked_skew((uncertainty, change): PackedSkew) -> ClockSkew {
    ClockSkew { uncertainty, change }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::executor::exchange_time::ExchangeTime;
    use crate::executor::recorder::AuxiliaryPart;
    use crate::executor::report::UndeferredParameter;
    use crate::message::{Tag, decoded, encoded};
    use crate::stage::ExpertLoad;

    fn report() -> RankReport {
        let auxiliary = AuxiliaryPart {
            name: "balance".into(),
            layer: Some("layers.1".into()),
            stage: StageIndex::new(3),
            microbatch: Microbatch::new(4),
            weight: 0.01,
            loss: 0.25,
        };
        let undeferred =
            UndeferredParameter { stage: StageIndex::new(5), path: "norm.weight".into(), elements: 64 };
        RankReport {
            rank: WorldRank::new(2),
            results: RankResults {
                losses: vec![0.5],
                auxiliary: vec![auxiliary],
                loads: vec![ExpertLoad { layer: "layers.1".into(), choices: vec![3, 1 << 40] }],
                gradient_norm: Some(f64::NAN),
                exposed_communication: Duration::from_nanos(7),
                expert_exchange: None,
                sums: Duration::from_nanos(6),
                update: Duration::from_nanos(8),
                early_update: Duration::from_nanos(5),
                repaired: true,
                peak_bytes: 9,
                sends_in_flight: 3,
                boundary_bytes: 4,
                undeferred: vec![undeferred],
                interrupted: true,
                announced: 300,
            },
            clock_skew: Some(ClockSkew { uncertainty: 2e-5, change: 1e-6 }),
            next_batch: Some(5),
            ..RankReport::default()
        }
    }

    #[test]
    fn events_travel_as_numbers() {
        let row = Rank::new(2);
        let texts = ["0F3", "(1F7;2B3)OVERLAP_F_B", "4UNSHARD", "2RECV_B9"];
        let events = texts.map(|text| {
            let action = text.parse().expect("an action");
            Event { rank: row, action, start: 0.5, end: 0.75 }
        });
        let message = SkipMessage { from: StageIndex::new(4), to: StageIndex::new(1), microbatch: 3.into() };
        let skips = [SkipAction::Send(message), SkipAction::Receive(message)];
        let skips = skips.map(|action| SkipEvent { rank: row, action, start: 0.25, end: 0.5 });
        let half = texts[0].parse().expect("an action");
        let kinds = [ScopeKind::User("name".into()), ScopeKind::Exchange(half), ScopeKind::Computation(half)];
        let scopes = kinds.map(|kind| Scope { rank: row, kind, start: 0.5, end: 0.625 }).to_vec();
        let [total, exposed, waited] = [30, 10, 20].map(Duration::from_nanos);
        let results = RankResults {
            gradient_norm: Some(0.75),
            expert_exchange: Some(ExchangeTime { total, exposed, waited }),
            ..report().results
        };
        let (events_here, skips_here) = (events.to_vec(), skips.to_vec());
        let forms: [Arc<[TensorForm]>; 2] = [("f32", vec![4, 1 << 20]), ("i64", Vec::new())]
            .map(|(dtype, shape)| Arc::from([TensorForm { dtype: dtype.into(), shape }]));
        let receive = MessageEnd::Action(texts[3].parse().expect("an action"));
        let ends = [receive, MessageEnd::Skip(skips[0].action), MessageEnd::Skip(skips[1].action)];
        let messages = ends.into_iter().zip([0, 1, 0]).map(|(end, index): (_, usize)| {
            let (peer, tensors) = (Rank::new(7), forms[index].clone());
            MessageRecord { rank: row, end, peer, bytes: 1 << 24, tensors }
        });
        let messages: Vec<MessageRecord> = messages.collect();
        let report =
            RankReport { events: events_here, skips: skips_here, scopes, messages, results, ..report() };
        // The step began at 100 s on the common clock here, and at 99 s in the process that merges.
        let bytes = encoded(&ReportMessage::of(&report, |seconds| 100.0 + seconds));
        let found: ReportMessage = decoded(report.rank, Tag::Report, &bytes).expect("a report");
        let found = found.into_report(row, 99.0);
        let later = |event: Event| Event { start: event.start + 1.0, end: event.end + 1.0, ..event };
        assert_eq!(found.events, events.map(later));
        let later = |skip: SkipEvent| SkipEvent { start: skip.start + 1.0, end: skip.end + 1.0, ..skip };
        assert_eq!(found.skips, skips.map(later));
        let later = |scope: Scope| Scope { start: scope.start + 1.0, end: scope.end + 1.0, ..scope };
        assert_eq!(found.scopes, report.scopes.into_iter().map(later).collect::<Vec<_>>());
        assert_eq!(found.messages, report.messages);
        assert_eq!(format!("{:?}", found.results), format!("{:?}", report.results));
        assert_eq!(found.clock_skew, report.clock_skew);
        let most = 220 + (texts.len() + 3) * 26 + ends.len() * 16 + 20;
        assert!(bytes.len() < most, "{} bytes", bytes.len());
    }

    /// Every process gets this part of every rank's report.
    #[test]
    fn messages_without_times_are_small() {
        let results = RankResults {
            peak_bytes: 1 << 34,
            auxiliary: Vec::new(),
            loads: Vec::new(),
            losses: Vec::new(),
            undeferred: Vec::new(),
            ..report().results
        };
        let typical = RankReport { results, ..report() };
        let messages: Vec<ReportMessage> = (0..1024)
            .map(|_| ReportMessage { times: Times::default(), ..ReportMessage::of(&typical, |at| at) })
            .collect();
        let bytes = encoded(&messages).len();
        assert!(bytes <= 40 * messages.len(), "{bytes} bytes for {} ranks", messages.len());
    }
}
