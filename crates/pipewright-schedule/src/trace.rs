//! A timeline in the trace format that Perfetto and `chrome://tracing` open.
//!
//! One thread a rank, one slice an event, and an arrow from each send to its receive. The pictures that need
//! no viewer are in [`crate::picture`].

use std::collections::HashMap;

use serde::Serialize;

use crate::action::{Action, ActionKind};
use crate::ids::{Microbatch, Rank, StageIndex};
use crate::timeline::{Event, Timeline};

impl Timeline {
    /// The timeline as a JSON text in the Chrome trace format, which Perfetto opens.
    pub fn chrome_trace(&self) -> String {
        let names = (0..self.ranks()).map(thread_name);
        let slices = self.events().iter().map(slice);
        let events = names.chain(slices).chain(arrows(self)).collect();
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
    name: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    stage: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    microbatch: Option<u32>,
}

impl Arguments {
    fn is_empty(&self) -> bool {
        self.name.is_none() && self.stage.is_none() && self.microbatch.is_none()
    }
}

fn thread_name(rank: u32) -> TraceEvent {
    let args = Arguments { name: Some(format!("rank {rank}")), ..Arguments::default() };
    entry("thread_name".to_owned(), "", "M", Rank::new(rank), 0.0, args)
}

fn slice(event: &Event) -> TraceEvent {
    let args = Arguments {
        name: None,
        stage: Some(event.action.stage().get()),
        microbatch: event.action.microbatch().map(Microbatch::get),
    };
    let dur = Some((event.end - event.start) * 1e6);
    let category = category(event.action);
    TraceEvent { dur, ..entry(event.action.to_string(), category, "X", event.rank, event.start, args) }
}

/// The arrows from each send to its receive, where the timeline has both.
fn arrows(timeline: &Timeline) -> Vec<TraceEvent> {
    let is_send = |kind| matches!(kind, ActionKind::SendForward | ActionKind::SendBackward);
    let sends = timeline.events().iter().filter(|event| is_send(event.action.kind()));
    let sends: HashMap<Action, &Event> = sends.map(|event| (event.action, event)).collect();
    let pairs = timeline.events().iter().filter_map(|receive| {
        let send = sends.get(&sender_of(receive.action)?)?;
        Some((*send, receive))
    });
    let ends = pairs.enumerate().flat_map(|(id, (send, receive))| {
        // Inside the receive's slice, near its end, and never before the arrow's start.
        let arrival = (receive.end - 0.01 * (receive.end - receive.start)).max(send.start);
        let end = |ph, bp, event: &Event, at| {
            let arrow = entry("message".to_owned(), "message", ph, event.rank, at, Arguments::default());
            TraceEvent { id: Some(id), bp, ..arrow }
        };
        [end("s", None, send, send.start), end("f", Some("e"), receive, arrival)]
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
    rank: Rank,
    at: f64,
    args: Arguments,
) -> TraceEvent {
    TraceEvent { name, cat, ph, ts: at * 1e6, dur: None, pid: 0, tid: rank.get(), id: None, bp: None, args }
}

#[cfg(test)]
mod tests {
    use crate::csv::parse_program;
    use crate::simulate::logical;

    #[test]
    fn slices_threads_and_arrows() {
        let program = parse_program("0F0,0SEND_F0\n1RECV_F0,1F0\n").expect("a program");
        let trace = logical(&program).expect("no deadlock").timeline(1.0).chrome_trace();
        let trace: serde_json::Value = serde_json::from_str(&trace).expect("JSON");
        let events = trace["traceEvents"].as_array().expect("a list");
        let of = |ph: &str| events.iter().filter(|event| event["ph"] == ph).collect::<Vec<_>>();
        assert_eq!((of("M").len(), of("X").len(), of("s").len(), of("f").len()), (2, 4, 1, 1));
        assert_eq!(of("M")[1]["args"]["name"], "rank 1");
        assert_eq!((of("X")[3]["name"].as_str(), of("X")[3]["tid"].as_u64()), (Some("1F0"), Some(1)));
        assert_eq!(of("X")[3]["dur"], 1e6);
        assert_eq!((of("s")[0]["tid"].as_u64(), of("f")[0]["tid"].as_u64()), (Some(0), Some(1)));
        let at = |event: &serde_json::Value| event["ts"].as_f64().expect("a time");
        assert!(at(of("s")[0]) <= at(of("f")[0]) && at(of("f")[0]) < 2e6);
    }
}
