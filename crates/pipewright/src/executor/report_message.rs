//! A rank's report as a message between processes; `report_exchange.rs` has the exchange.
//!
//! A report's times count from the start of the step in the rank's own process. As a message they are on the
//! clock that all processes share, so that the process that merges them can subtract the start of its own
//! step.

use std::sync::Arc;
use std::time::Duration;

use pipewright_schedule::{
    Action, ClockSkew, Event, Microbatch, Rank, Scope, ScopeKind, SkipAction, SkipEvent, SkipMessage,
    StageIndex,
};
use serde::{Deserialize, Serialize};

use super::exchange_time::ExchangeTime;
use super::recorder::AuxiliaryPart;
use super::report::{RankReport, UndeferredParameter};
use crate::ids::WorldRank;
use crate::stage::ExpertLoad;

/// A report as a message. It does not contain the outputs, which stay on their rank.
#[derive(Serialize, Deserialize)]
pub(super) struct ReportMessage {
    pub(super) rank: WorldRank,
    losses: Vec<f64>,
    auxiliary: Vec<PackedAuxiliary>,
    /// Layer, and choices of each expert.
    loads: Vec<(String, Vec<u64>)>,
    gradient_norm: Option<f64>,
    exposed_communication: Duration,
    /// The fields of [`ExchangeTime`] in order; `None` without exchanges.
    expert_exchange: Option<[Duration; 3]>,
    sums: Duration,
    update: Duration,
    early_update: Duration,
    repaired: bool,
    peak_bytes: u64,
    sends_in_flight: u32,
    boundary_bytes: u64,
    /// Stage, path and elements.
    undeferred: Vec<(StageIndex, String, usize)>,
    interrupted: bool,
    announced: u64,
    pub(super) times: Times,
}

/// The part of a report that only the process needs that merges the reports.
#[derive(Default, Serialize, Deserialize)]
pub(super) struct Times {
    skew: Option<PackedSkew>,
    /// Each with its start and its end.
    events: Vec<(PackedAction, f64, f64)>,
    skips: Vec<(PackedSkip, f64, f64)>,
    scopes: Vec<(PackedScope, f64, f64)>,
    /// The digest of the next batch of the rank's process.
    pub(super) next_batch: Option<u64>,
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

/// Name, layer, stage, microbatch, weight and loss of an auxiliary loss.
type PackedAuxiliary = (String, Option<String>, u32, u32, f64, f64);

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

fn packed_auxiliary(part: &AuxiliaryPart) -> PackedAuxiliary {
    let AuxiliaryPart { name, layer, stage, microbatch, weight, loss } = part;
    let layer = layer.as_ref().map(ToString::to_string);
    (name.to_string(), layer, stage.get(), microbatch.get(), *weight, *loss)
}

fn unpacked_auxiliary((name, layer, stage, microbatch, weight, loss): PackedAuxiliary) -> AuxiliaryPart {
    let (stage, microbatch) = (StageIndex::new(stage), Microbatch::new(microbatch));
    AuxiliaryPart { name: name.into(), layer: layer.map(Arc::from), stage, microbatch, weight, loss }
}

fn packed_load(load: &ExpertLoad) -> (String, Vec<u64>) {
    (load.layer.to_string(), load.choices.clone())
}

fn unpacked_load((layer, choices): (String, Vec<u64>)) -> ExpertLoad {
    ExpertLoad { layer: layer.into(), choices }
}

fn packed_undeferred(found: &UndeferredParameter) -> (StageIndex, String, usize) {
    (found.stage, found.path.to_string(), found.elements)
}

fn unpacked_undeferred((stage, path, elements): (StageIndex, String, usize)) -> UndeferredParameter {
    UndeferredParameter { stage, path: path.into(), elements }
}

fn packed_exchange(time: ExchangeTime) -> Option<[Duration; 3]> {
    let ExchangeTime { total, exposed, waited } = time;
    (time != ExchangeTime::default()).then_some([total, exposed, waited])
}

fn unpacked_exchange(packed: Option<[Duration; 3]>) -> ExchangeTime {
    packed.map(|[total, exposed, waited]| ExchangeTime { total, exposed, waited }).unwrap_or_default()
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
        let skew = report.clock_skew.map(|skew| (skew.uncertainty, skew.change));
        Self {
            rank: report.rank,
            losses: report.losses.clone(),
            auxiliary: report.auxiliary.iter().map(packed_auxiliary).collect(),
            loads: report.loads.iter().map(packed_load).collect(),
            gradient_norm: report.gradient_norm,
            exposed_communication: report.exposed_communication,
            expert_exchange: packed_exchange(report.expert_exchange),
            sums: report.sums,
            update: report.update,
            early_update: report.early_update,
            repaired: report.repaired,
            peak_bytes: report.peak_bytes,
            sends_in_flight: report.sends_in_flight,
            boundary_bytes: report.boundary_bytes,
            undeferred: report.undeferred.iter().map(packed_undeferred).collect(),
            interrupted: report.interrupted,
            announced: report.announced,
            times: Times {
                skew,
                events: events.collect(),
                skips: skips.collect(),
                scopes: scopes.collect(),
                next_batch: report.next_batch,
            },
        }
    }

    /// Returns the report of the rank with this row of the timeline; its times count from `origin`, a time on
    /// the common clock.
    pub(super) fn into_report(self, row: Rank, origin: f64) -> RankReport {
        let rank = self.rank;
        let Times { skew, events, skips, scopes, .. } = self.times;
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
            losses: self.losses,
            auxiliary: self.auxiliary.into_iter().map(unpacked_auxiliary).collect(),
            loads: self.loads.into_iter().map(unpacked_load).collect(),
            outputs: Vec::new(),
            stage_outputs: Vec::new(),
            input_gradients: Vec::new(),
            gradient_norm: self.gradient_norm,
            events: events.into_iter().map(event).collect(),
            skips: skips.into_iter().map(skip).collect(),
            scopes: scopes.into_iter().map(scope).collect(),
            clock_skew: skew.map(unpacked_skew),
            exposed_communication: self.exposed_communication,
            expert_exchange: unpacked_exchange(self.expert_exchange),
            sums: self.sums,
            update: self.update,
            early_update: self.early_update,
            repaired: self.repaired,
            peak_bytes: self.peak_bytes,
            sends_in_flight: self.sends_in_flight,
            boundary_bytes: self.boundary_bytes,
            undeferred: self.undeferred.into_iter().map(unpacked_undeferred).collect(),
            // Every process has it from its own ranks.
            difference: None,
            next_batch: None,
            interrupted: self.interrupted,
            announced: self.announced,
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
    use super::*;
    use crate::message::{Tag, decoded, encoded};

    fn report() -> RankReport {
        RankReport {
            rank: WorldRank::new(2),
            losses: vec![0.5],
            auxiliary: vec![AuxiliaryPart {
                name: "balance".into(),
                layer: Some("layers.1".into()),
                stage: StageIndex::new(3),
                microbatch: Microbatch::new(4),
                weight: 0.01,
                loss: 0.25,
            }],
            loads: vec![ExpertLoad { layer: "layers.1".into(), choices: vec![3, 1 << 40] }],
            outputs: Vec::new(),
            stage_outputs: Vec::new(),
            input_gradients: Vec::new(),
            gradient_norm: Some(f64::NAN),
            events: Vec::new(),
            skips: Vec::new(),
            scopes: Vec::new(),
            clock_skew: Some(ClockSkew { uncertainty: 2e-5, change: 1e-6 }),
            exposed_communication: Duration::from_nanos(7),
            expert_exchange: ExchangeTime::default(),
            sums: Duration::from_nanos(6),
            update: Duration::from_nanos(8),
            early_update: Duration::from_nanos(5),
            repaired: true,
            peak_bytes: 9,
            sends_in_flight: 3,
            boundary_bytes: 4,
            undeferred: vec![UndeferredParameter {
                stage: StageIndex::new(5),
                path: "norm.weight".into(),
                elements: 64,
            }],
            difference: None,
            next_batch: Some(5),
            interrupted: true,
            announced: 300,
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
        let expert_exchange = ExchangeTime { total, exposed, waited };
        let report = RankReport {
            events: events.to_vec(),
            skips: skips.to_vec(),
            scopes,
            expert_exchange,
            ..report()
        };
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
        assert_eq!((found.losses, found.auxiliary), (report.losses, report.auxiliary));
        assert_eq!((found.loads, found.expert_exchange), (report.loads, expert_exchange));
        assert_eq!(found.undeferred, report.undeferred);
        assert_eq!((found.clock_skew, found.sends_in_flight), (report.clock_skew, 3));
        assert_eq!((found.interrupted, found.announced), (true, 300));
        assert_eq!((found.sums, found.update), (report.sums, report.update));
        assert_eq!((found.early_update, found.repaired), (report.early_update, report.repaired));
        assert!(bytes.len() < 220 + (texts.len() + 3) * 26, "{} bytes", bytes.len());
    }

    /// Every process gets this part of every rank's report.
    #[test]
    fn messages_without_times_are_small() {
        let typical = RankReport {
            peak_bytes: 1 << 34,
            auxiliary: Vec::new(),
            loads: Vec::new(),
            losses: Vec::new(),
            undeferred: Vec::new(),
            ..report()
        };
        let messages: Vec<ReportMessage> = (0..1024)
            .map(|_| ReportMessage { times: Times::default(), ..ReportMessage::of(&typical, |at| at) })
            .collect();
        let bytes = encoded(&messages).len();
        assert!(bytes <= 40 * messages.len(), "{bytes} bytes for {} ranks", messages.len());
    }
}
