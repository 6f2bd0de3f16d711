//! Reads the trace format that [`Timeline::chrome_trace`] writes.
//!
//! Only slices with an action, spans inside of actions, the accuracy of the clocks and the number of slices
//! of each microbatch are read. Counters, names and arrows follow from them.

use std::num::NonZeroU32;

use serde::Deserialize;
use thiserror::Error;

use crate::action::Action;
use crate::ids::{Microbatch, Rank, StageIndex};
use crate::message_record::{MessageEnd, MessageRecord, TensorForm};
use crate::skip_event::{SkipAction, SkipEvent, SkipMessage};
use crate::slices::Slices;
use crate::timeline::{ClockSkew, Event, Scope, ScopeKind, Timeline};

/// The largest number of ranks. A larger process number is a mistake, and a timeline has room for every rank.
const MOST_RANKS: u32 = 1 << 20;

/// Why a text is not the trace of a timeline.
#[derive(Error)]
pub enum TraceError {
    /// The text is not JSON, or its members differ from a trace's. The source names the line and the column.
    #[error("not a trace of Pipewright: {0}")]
    Json(#[from] serde_json::Error),
    /// A slice names an action that does not exist.
    #[error("slice {index} of the trace: `{action}` is not an action")]
    Action {
        /// The slice's index in the list of the trace, from 0.
        index: usize,
        /// The text.
        action: String,
    },
    /// A slice has a process number that no rank has.
    #[error(
        "slice {index} of the trace: process {process} is not a rank; ranks are processes 1 to {MOST_RANKS}"
    )]
    Process {
        /// The slice's index in the list of the trace, from 0.
        index: usize,
        /// The number of the process.
        process: u32,
    },
    /// The trace has no slice with an action.
    #[error("the trace contains no action of a rank")]
    Empty,
}

crate::error_text::message_as_debug!(TraceError);

#[derive(Deserialize)]
struct Trace {
    #[serde(rename = "traceEvents")]
    events: Vec<TraceEntry>,
    #[serde(rename = "otherData")]
    other: Option<Other>,
}

#[derive(Deserialize)]
struct Other {
    clock_uncertainty_us: Option<f64>,
    clock_change_us: Option<f64>,
    slices: Option<NonZeroU32>,
}

#[derive(Deserialize)]
struct TraceEntry {
    ph: String,
    #[serde(default)]
    cat: String,
    #[serde(default)]
    name: String,
    #[serde(default)]
    ts: f64,
    #[serde(default)]
    dur: f64,
    #[serde(default)]
    pid: u32,
    args: Option<Arguments>,
}

#[derive(Deserialize)]
struct Arguments {
    action: Option<String>,
    stage: Option<u32>,
    microbatch: Option<u32>,
    /// The other end of a message of a skip connection.
    peer_stage: Option<u32>,
    /// The content of a message, in measured steps.
    peer_rank: Option<u32>,
    bytes: Option<u64>,
    tensors: Option<Vec<TensorForm>>,
}

/// Reads the timeline of a trace.
///
/// # Errors
/// When the text is not JSON, is not a trace, or contains no action.
pub fn read_trace(text: &str) -> Result<Timeline, TraceError> {
    let trace: Trace = serde_json::from_str(text)?;
    let (mut events, mut skips, mut scopes, mut ranks) = (Vec::new(), Vec::new(), Vec::new(), 0);
    let mut messages = Vec::new();
    for (index, entry) in trace.events.into_iter().enumerate().filter(|(_, entry)| entry.ph == "X") {
        let kind = scope_kind(&entry);
        if kind.is_none() && entry.args.is_none() {
            continue;
        }
        let rank = entry.pid.checked_sub(1).filter(|rank| *rank < MOST_RANKS);
        let rank = rank.ok_or(TraceError::Process { index, process: entry.pid })?;
        ranks = ranks.max(rank + 1);
        let (rank, start, end) = (Rank::new(rank), entry.ts / 1e6, (entry.ts + entry.dur) / 1e6);
        scopes.extend(kind.map(|kind| Scope { rank, kind, start, end }));
        let Some(mut arguments) = entry.args else { continue };
        if entry.cat == "skip" {
            if let Some(action) = skip(&entry.name, &arguments) {
                skips.push(SkipEvent { rank, action, start, end });
                messages.extend(message(rank, MessageEnd::Skip(action), &mut arguments));
            }
            continue;
        }
        let Some(action) = arguments.action.take() else { continue };
        let parsed = action.parse::<Action>();
        let action = parsed.map_err(|_not_an_action| TraceError::Action { index, action })?;
        events.push(Event { rank, action, start, end });
        messages.extend(message(rank, MessageEnd::Action(action), &mut arguments));
    }
    if events.is_empty() {
        return Err(TraceError::Empty);
    }
    let slices = trace.other.as_ref().and_then(|other| other.slices);
    let slices = slices.and_then(|count| Slices::new(count.get())).unwrap_or_default();
    let skew = trace.other.and_then(|other| {
        let (uncertainty, change) = (other.clock_uncertainty_us?, other.clock_change_us?);
        Some(ClockSkew { uncertainty: uncertainty / 1e6, change: change / 1e6 })
    });
    let timeline = Timeline::new(ranks, events).with_skips(skips).with_scopes(scopes);
    Ok(timeline.with_messages(messages).with_clock_skew(skew).with_slices(slices))
}

/// Returns what happens in a span inside of actions; nothing if the entry is not such a span.
fn scope_kind(entry: &TraceEntry) -> Option<ScopeKind> {
    let action = |before: &str| entry.name.strip_prefix(before)?.parse().ok();
    match entry.cat.as_str() {
        "scope" => Some(ScopeKind::User(entry.name.as_str().into())),
        "exchange" => action("exchange of ").map(ScopeKind::Exchange),
        "computation" => action("computation of ").map(ScopeKind::Computation),
        _ => None,
    }
}

/// Returns what a rank does with a message of a skip connection; nothing if an argument is missing.
fn skip(name: &str, arguments: &Arguments) -> Option<SkipAction> {
    let own = StageIndex::new(arguments.stage?);
    let (peer, microbatch) = (StageIndex::new(arguments.peer_stage?), Microbatch::new(arguments.microbatch?));
    Some(match name {
        "send skip" => SkipAction::Send(SkipMessage { from: own, to: peer, microbatch }),
        _ => SkipAction::Receive(SkipMessage { from: peer, to: own, microbatch }),
    })
}

/// Returns the message of a send or a receive from its arguments; nothing if one of them is missing.
fn message(rank: Rank, end: MessageEnd, arguments: &mut Arguments) -> Option<MessageRecord> {
    let (peer, bytes) = (Rank::new(arguments.peer_rank?), arguments.bytes?);
    Some(MessageRecord { rank, end, peer, bytes, tensors: arguments.tensors.take()?.into() })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::costs::Costs;
    use crate::csv::parse_program;
    use crate::simulate::timed;

    #[test]
    fn a_trace_is_read_as_it_was_written() {
        let program =
            parse_program("0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n").expect("a program");
        let run = timed(&program, &"F=1,hop=0.25".parse().expect("costs")).expect("no deadlock");
        let read = read_trace(&run.timeline().chrome_trace()).expect("its own trace");
        assert_eq!(read.ranks(), 2);
        for (found, expected) in read.events().iter().zip(run.timeline().events()) {
            assert_eq!((found.rank, found.action), (expected.rank, expected.action));
            assert!((found.start - expected.start).abs() < 1e-9 && (found.end - expected.end).abs() < 1e-9);
        }
        assert_eq!(read.events().len(), run.timeline().events().len());
    }

    #[test]
    fn skip_connections_and_the_accuracy_of_clocks_are_read() {
        let message =
            SkipMessage { from: StageIndex::new(0), to: StageIndex::new(2), microbatch: Microbatch::new(3) };
        let event =
            Event { rank: Rank::new(0), action: "0F3".parse().expect("an action"), start: 0.0, end: 1.0 };
        let skip = |rank, action| SkipEvent { rank: Rank::new(rank), action, start: 1.0, end: 2.0 };
        let skips = vec![skip(0, SkipAction::Send(message)), skip(2, SkipAction::Receive(message))];
        let skew = ClockSkew { uncertainty: 0.25, change: 0.5 };
        let timeline = Timeline::new(3, vec![event]).with_skips(skips).with_clock_skew(Some(skew));
        assert_eq!(read_trace(&timeline.chrome_trace()).expect("its own trace"), timeline);
    }

    #[test]
    fn messages_are_read() {
        let (send, receive): (Action, Action) =
            ("0SEND_F3".parse().expect("an action"), "1RECV_F3".parse().expect("an action"));
        let event = |rank, action| Event { rank: Rank::new(rank), action, start: 0.0, end: 1.0 };
        let skip = SkipAction::Receive(SkipMessage {
            from: StageIndex::new(0),
            to: StageIndex::new(2),
            microbatch: Microbatch::new(3),
        });
        let message = |rank, end, peer, shape: &[usize]| MessageRecord {
            rank: Rank::new(rank),
            end,
            peer: Rank::new(peer),
            bytes: 1 << 40,
            tensors: Arc::from([TensorForm { dtype: "bf16".into(), shape: shape.to_vec() }]),
        };
        let messages = vec![
            message(0, MessageEnd::Action(send), 1, &[1, 2]),
            message(1, MessageEnd::Action(receive), 0, &[1, 2]),
            message(2, MessageEnd::Skip(skip), 0, &[]),
        ];
        let timeline = Timeline::new(3, vec![event(0, send), event(1, receive)])
            .with_skips(vec![SkipEvent { rank: Rank::new(2), action: skip, start: 1.0, end: 2.0 }])
            .with_messages(messages.clone());
        let read = read_trace(&timeline.chrome_trace()).expect("its own trace");
        assert_eq!(read.messages(), messages);
        assert_eq!(read, timeline);
    }

    #[test]
    fn spans_inside_of_actions_are_read() {
        let action: Action = "0F3".parse().expect("an action");
        let event = Event { rank: Rank::new(0), action, start: 0.0, end: 4.0 };
        let kinds = [
            ScopeKind::User("exchange of 0F3".into()),
            ScopeKind::Exchange(action),
            ScopeKind::Computation(action),
        ];
        let scopes = (0u8..).zip(kinds).map(|(at, kind)| {
            let start = f64::from(at);
            Scope { rank: Rank::new(0), kind, start, end: start + 1.5 }
        });
        let timeline = Timeline::new(1, vec![event]).with_scopes(scopes.collect());
        assert_eq!(timeline.scopes().len(), 3);
        assert_eq!(read_trace(&timeline.chrome_trace()).expect("its own trace"), timeline);
    }

    #[test]
    fn the_number_of_slices_is_read() {
        let program = parse_program("0F0,0F1,0B1,0B0\n").expect("a program");
        for slices in [1, 2] {
            let slices = Slices::new(slices).expect("not 0");
            let program = program.clone().with_slices(slices).expect("whole microbatches");
            let trace = timed(&program, &Costs::default()).expect("no deadlock").timeline().chrome_trace();
            assert_eq!(read_trace(&trace).expect("its own trace").slices(), slices);
            assert_eq!(trace.contains("otherData"), !slices.is_one(), "{trace}");
        }
    }

    #[test]
    fn mistakes_are_located() {
        let check = |text: &str, expected: &str| {
            let message = read_trace(text).expect_err(text).to_string();
            assert!(message.contains(expected), "{message}");
        };
        check("{\"traceEvents\":[\n{]}", "line 2 column 2");
        check(
            "{\"traceEvents\":[],\"otherData\":{\"slices\":0}}",
            "not a trace of Pipewright: invalid value",
        );
        check("[]", "not a trace of Pipewright");
        check("{\"traceEvents\":[]}", "no action of a rank");
        let slice = |pid: u32, action: &str| {
            format!(
                "{{\"traceEvents\":[{{\"ph\":\"X\",\"pid\":{pid},\"args\":{{\"action\":\"{action}\"}}}}]}}"
            )
        };
        check(&slice(1, "0X0"), "slice 0 of the trace: `0X0` is not an action");
        check(&slice(0, "0F0"), "process 0 is not a rank");
        check(&slice(u32::MAX, "0F0"), "is not a rank");
    }
}
