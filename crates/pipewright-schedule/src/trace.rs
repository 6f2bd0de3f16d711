//! A timeline in the trace format that Perfetto and `chrome://tracing` open.
//!
//! One slice an event, and an arrow from each send to its receive. Each rank is a thread. Slices of a thread
//! may not overlap, so where messages run beside the computation, they are on further threads of their rank.
//! The pictures that need no viewer are in [`crate::picture`].

use std::collections::{BTreeSet, HashMap};

use serde::Serialize;

use crate::action::{Action, ActionKind};
use crate::ids::{Microbatch, Rank, StageIndex};
use crate::timeline::{Event, Timeline};

impl Timeline {
    /// The timeline as a JSON text in the Chrome trace format, which Perfetto opens.
    pub fn chrome_trace(&self) -> String {
        let threads = threads(self);
        let names = names(self.ranks(), &threads);
        let slices = self.events().iter().zip(&threads).map(|(event, &thread)| slice(event, thread));
        let events = names.into_iter().chain(slices).chain(arrows(self, &threads)).collect();
        let trace = Trace { display_time_unit: "ms", trace_events: events };
        serde_json::to_string(&trace).expect("a trace holds numbers and texts alone, which JSON can express")
    }
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Trace {
    display_time_unit: &'static str,
    trace_events: Vec<TraceEvent>,
}

/// An entry of the format. `ph` says what it is: `M` a name, `X` a slice, `s` and `f` an arrow's start and
/// end.
#[derive(Serialize)]
struct TraceEvent {
    name: String,
    cat: &'static str,
    ph: &'static str,
    /// The start, in microseconds.
    ts: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    dur: Option<f64>,
    pid: u32,
    tid: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<usize>,
    /// To which slice an arrow's end belongs: `e`, the one around it.
    #[serde(skip_serializing_if = "Option::is_none")]
    bp: Option<&'static str>,
    #[serde(skip_serializing_if = "Arguments::is_empty")]
    args: Arguments,
}

#[derive(Serialize, Default)]
struct Arguments {
    #[serde(skip_serializing_if = "Option::is_none")]
    sort_index: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    stage: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    microbatch: Option<u32>,
}

impl Arguments {
    fn is_empty(&self) -> bool {
        self.name.is_none() && self.sort_index.is_none() && self.stage.is_none() && self.microbatch.is_none()
    }
}

/// The thread of each event: `rank`, or for messages beside a rank's computation, a multiple of the number of
/// ranks further.
fn threads(timeline: &Timeline) -> Vec<u32> {
    let ranks = timeline.ranks();
    let of_rank = |rank: u32| {
        let events = timeline.events_of(Rank::new(rank));
        let is_sequential = events.windows(2).all(|pair| pair[0].end <= pair[1].start);
        // When the last slice of each further thread ends.
        let mut ends: Vec<f64> = Vec::new();
        let thread = move |event: &Event| {
            if is_sequential || event.action.is_compute() {
                return rank;
            }
            let free = ends.iter().position(|&end| end <= event.start).unwrap_or(ends.len());
            ends.resize(ends.len().max(free + 1), event.end);
            ends[free] = event.end;
            rank.saturating_add(ranks.saturating_mul(free as u32 + 1))
        };
        events.iter().map(thread)
    };
    (0..ranks).flat_map(of_rank).collect()
}

fn names(ranks: u32, threads: &[u32]) -> Vec<TraceEvent> {
    let beside: BTreeSet<u32> = threads.iter().copied().filter(|&thread| thread >= ranks).collect();
    (0..ranks).chain(beside).flat_map(|thread| name(thread, ranks)).collect()
}

/// The name of a thread, and its place among the others: that of its rank.
fn name(thread: u32, ranks: u32) -> [TraceEvent; 2] {
    let (rank, further) = (thread % ranks, thread / ranks);
    let name = if further == 0 { format!("rank {rank}") } else { format!("rank {rank}, messages {further}") };
    let place = u64::from(rank) * (1 + u64::from(u32::MAX / ranks)) + u64::from(further);
    let named = Arguments { name: Some(name), ..Arguments::default() };
    let sorted = Arguments { sort_index: Some(place), ..Arguments::default() };
    [("thread_name", named), ("thread_sort_index", sorted)]
        .map(|(name, args)| entry(name.to_owned(), "", "M", thread, 0.0, args))
}

fn slice(event: &Event, thread: u32) -> TraceEvent {
    let args = Arguments {
        name: None,
        sort_index: None,
        stage: Some(event.action.stage().get()),
        microbatch: event.action.microbatch().map(Microbatch::get),
    };
    let dur = Some((event.end - event.start) * 1e6);
    let category = category(event.action);
    TraceEvent { dur, ..entry(event.action.to_string(), category, "X", thread, event.start, args) }
}

/// The arrows from each send to its receive, where the timeline has both.
fn arrows(timeline: &Timeline, threads: &[u32]) -> Vec<TraceEvent> {
    let is_send = |kind| matches!(kind, ActionKind::SendForward | ActionKind::SendBackward);
    let events = || timeline.events().iter().zip(threads);
    let sends = events().filter(|(event, _)| is_send(event.action.kind()));
    let sends: HashMap<Action, (&Event, &u32)> = sends.map(|send| (send.0.action, send)).collect();
    let pairs = events().filter_map(|receive| Some((*sends.get(&sender_of(receive.0.action)?)?, receive)));
    let ends = pairs.enumerate().flat_map(|(id, ((send, &from), (receive, &to)))| {
        // Inside the receive's slice, near its end, and never before the arrow's start.
        let arrival = (receive.end - 0.01 * (receive.end - receive.start)).max(send.start);
        let end = |ph, bp, thread, at| {
            let arrow = entry("message".to_owned(), "message", ph, thread, at, Arguments::default());
            TraceEvent { id: Some(id), bp, ..arrow }
        };
        [end("s", None, from, send.start), end("f", Some("e"), to, arrival)]
    });
    ends.collect()
}

/// The send that a receive belongs to.
fn sender_of(action: Action) -> Option<Action> {
    match action {
        Action::RecvForward { stage, microbatch } => {
            Some(Action::SendForward { stage: StageIndex::new(stage.get().checked_sub(1)?), microbatch })
        }
        Action::RecvBackward { stage, microbatch } => {
            Some(Action::SendBackward { stage: StageIndex::new(stage.get().checked_add(1)?), microbatch })
        }
        _ => None,
    }
}

fn category(action: Action) -> &'static str {
    match action.kind() {
        kind if kind.is_compute() => "compute",
        kind if kind.is_communication() => "communication",
        _ => "sharding",
    }
}

fn entry(
    name: String,
    cat: &'static str,
    ph: &'static str,
    thread: u32,
    at: f64,
    args: Arguments,
) -> TraceEvent {
    TraceEvent { name, cat, ph, ts: at * 1e6, dur: None, pid: 0, tid: thread, id: None, bp: None, args }
}

#[cfg(test)]
mod tests {
    use crate::csv::parse_program;
    use crate::simulate::{logical, timed};

    #[test]
    fn slices_threads_and_arrows() {
        let program = parse_program("0F0,0SEND_F0\n1RECV_F0,1F0\n").expect("a program");
        let trace = logical(&program).expect("no deadlock").timeline(1.0).chrome_trace();
        let trace: serde_json::Value = serde_json::from_str(&trace).expect("JSON");
        let events = trace["traceEvents"].as_array().expect("a list");
        let of = |ph: &str| events.iter().filter(|event| event["ph"] == ph).collect::<Vec<_>>();
        assert_eq!((of("M").len(), of("X").len(), of("s").len(), of("f").len()), (4, 4, 1, 1));
        assert_eq!(of("M")[2]["args"]["name"], "rank 1");
        assert_eq!((of("X")[3]["name"].as_str(), of("X")[3]["tid"].as_u64()), (Some("1F0"), Some(1)));
        assert_eq!(of("X")[3]["dur"], 1e6);
        assert_eq!((of("s")[0]["tid"].as_u64(), of("f")[0]["tid"].as_u64()), (Some(0), Some(1)));
        let at = |event: &serde_json::Value| event["ts"].as_f64().expect("a time");
        assert!(at(of("s")[0]) <= at(of("f")[0]) && at(of("f")[0]) < 2e6);
    }

    #[test]
    fn slices_of_a_thread_do_not_overlap() {
        let program =
            parse_program("0F0,0SEND_F0,0F1,0SEND_F1\n1RECV_F0,1RECV_F1,1F0,1F1\n").expect("a program");
        let costs = "hop=0.5".parse().expect("costs");
        let trace = timed(&program, &costs).expect("no deadlock").timeline().chrome_trace();
        let trace: serde_json::Value = serde_json::from_str(&trace).expect("JSON");
        let mut ends = std::collections::BTreeMap::new();
        for slice in
            trace["traceEvents"].as_array().expect("a list").iter().filter(|event| event["ph"] == "X")
        {
            let [start, length] = [&slice["ts"], &slice["dur"]].map(|it| it.as_f64().expect("a time"));
            let end = ends.insert(slice["tid"].to_string(), start + length);
            assert!(end.is_none_or(|end| end <= start), "{slice}");
        }
        assert!(ends.len() > 2, "messages run beside computation");
    }
}
