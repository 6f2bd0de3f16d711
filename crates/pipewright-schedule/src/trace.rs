//! A timeline in the trace format that Perfetto and `chrome://tracing` open.
//!
//! Each rank is a process with a counter of its memory. Its first thread computes. Messages and collectives that run
//! during the computation are on further threads, because slices of a thread may not overlap. Slices have the name of
//! their sort (`forward`, `send`), by which viewers group and colour them; the action, its stage and its microbatch are
//! arguments. An arrow leads from each send to its receive. The pictures that need no viewer are in [`crate::picture`].

use std::collections::{BTreeSet, HashMap};

use serde::Serialize;

use crate::action::{Action, ActionKind};
use crate::ids::{Microbatch, Rank, StageIndex};
use crate::simulate::{UNIT, memory_curve};
use crate::timeline::{Event, Timeline};

/// Viewers read process, thread and sort numbers as signed 32-bit numbers.
const LARGEST_NUMBER: u32 = i32::MAX as u32;

impl Timeline {
    /// The timeline as a JSON text in the Chrome trace format, which Perfetto opens. Memory is counted in
    /// activations of one stage and microbatch.
    pub fn chrome_trace(&self) -> String {
        let threads = threads(self);
        let slices = self.events().iter().zip(&threads).map(|(event, &thread)| slice(event, thread));
        let memory = (0..self.ranks()).flat_map(|rank| counters(self, Rank::new(rank)));
        let names = names(self.ranks(), &threads).into_iter();
        let events = names.chain(slices).chain(memory).chain(arrows(self, &threads)).collect();
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

/// An entry of the format. `ph` is its kind: `M` is a name, `X` a slice, `C` a counter, and `s` and `f` are the start
/// and the end of an arrow.
#[derive(Serialize)]
struct TraceEvent {
    name: &'static str,
    #[serde(skip_serializing_if = "str::is_empty")]
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
    /// The slice that an arrow's end belongs to: `e` is the enclosing one.
    #[serde(skip_serializing_if = "Option::is_none")]
    bp: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    args: Option<Arguments>,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Arguments {
    Name {
        name: String,
    },
    SortIndex {
        sort_index: u32,
    },
    Action {
        action: String,
        stage: u32,
        #[serde(skip_serializing_if = "Option::is_none")]
        microbatch: Option<u32>,
        /// The second half of an overlap.
        #[serde(flatten, skip_serializing_if = "Option::is_none")]
        backward: Option<Backward>,
    },
    Memory {
        activations: u64,
    },
}

#[derive(Serialize)]
struct Backward {
    backward_stage: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    backward_microbatch: Option<u32>,
}

/// One of a rank's threads. The first one computes; the others have the messages and collectives.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Thread {
    rank: Rank,
    place: u32,
}

impl Thread {
    /// Returns the number of the process, from 1: some viewers treat process 0 as the idle process.
    fn process(self) -> u32 {
        self.rank.get().saturating_add(1).min(LARGEST_NUMBER)
    }

    /// Returns a number that no other thread of any process has.
    fn number(self, ranks: u32) -> u32 {
        self.place.saturating_mul(ranks).saturating_add(self.process()).min(LARGEST_NUMBER)
    }
}

/// A slice's thread, with the number of the thread.
type Numbered = (Thread, u32);

/// Returns the thread of each event.
fn threads(timeline: &Timeline) -> Vec<Numbered> {
    let ranks = timeline.ranks();
    let of_rank = |rank: Rank| {
        let events = timeline.events_of(rank);
        let is_sequential = events.windows(2).all(|pair| pair[0].end <= pair[1].start);
        // The time at which the last slice of each further thread ends.
        let mut ends: Vec<f64> = Vec::new();
        let thread = move |event: &Event| {
            if is_sequential || event.action.is_compute() {
                return Thread { rank, place: 0 };
            }
            let free = ends.iter().position(|&end| end <= event.start).unwrap_or(ends.len());
            ends.resize(ends.len().max(free + 1), event.end);
            ends[free] = event.end;
            Thread { rank, place: free as u32 + 1 }
        };
        events.iter().map(thread)
    };
    let numbered = |thread: Thread| (thread, thread.number(ranks));
    (0..ranks).map(Rank::new).flat_map(of_rank).map(numbered).collect()
}

/// Returns the names of processes and threads, and their order in the viewer.
fn names(ranks: u32, threads: &[Numbered]) -> Vec<TraceEvent> {
    let first = |rank| Thread { rank: Rank::new(rank), place: 0 };
    let all: BTreeSet<Thread> =
        (0..ranks).map(first).chain(threads.iter().map(|(thread, _)| *thread)).collect();
    let mut names = Vec::new();
    for thread in all {
        let rank = thread.rank;
        let named = (thread, thread.number(ranks));
        let mut push =
            |name, args| names.push(TraceEvent { args: Some(args), ..entry(name, "", "M", named, 0.0) });
        if thread.place == 0 {
            push("process_name", Arguments::Name { name: format!("rank {rank}") });
            push("process_sort_index", Arguments::SortIndex { sort_index: rank.get().min(LARGEST_NUMBER) });
        }
        let name = match thread.place {
            0 => format!("rank {rank}"),
            place => format!("rank {rank}, messages {place}"),
        };
        push("thread_name", Arguments::Name { name });
        push("thread_sort_index", Arguments::SortIndex { sort_index: thread.place.min(LARGEST_NUMBER) });
    }
    names
}

fn slice(event: &Event, thread: Numbered) -> TraceEvent {
    let (category, name) = category_and_name(event.action.kind());
    let backward = event.action.parts().nth(1).map(|part| Backward {
        backward_stage: part.stage().get(),
        backward_microbatch: part.microbatch().map(Microbatch::get),
    });
    let args = Arguments::Action {
        action: event.action.to_string(),
        stage: event.action.stage().get(),
        microbatch: event.action.microbatch().map(Microbatch::get),
        backward,
    };
    let dur = Some((event.end - event.start) * 1e6);
    TraceEvent { dur, args: Some(args), ..entry(name, category, "X", thread, event.start) }
}

/// Returns the category and the name of a slice.
fn category_and_name(kind: ActionKind) -> (&'static str, &'static str) {
    match kind {
        ActionKind::Forward => ("forward", "forward"),
        ActionKind::InputBackward => ("backward input", "backward input"),
        ActionKind::WeightBackward => ("backward weight", "backward weight"),
        ActionKind::Backward => ("backward", "backward"),
        ActionKind::Overlap => ("overlap", "forward and backward"),
        ActionKind::SendForward | ActionKind::SendBackward => ("send", "send"),
        ActionKind::RecvForward | ActionKind::RecvBackward => ("receive", "receive"),
        ActionKind::WaitSendForward | ActionKind::WaitSendBackward => ("send", "wait for send"),
        ActionKind::Unshard => ("collective", "unshard"),
        ActionKind::Reshard => ("collective", "reshard"),
        ActionKind::ReduceGrad => ("collective", "reduce gradients"),
        ActionKind::WaitReduceGrad => ("collective", "wait for reduced gradients"),
    }
}

/// Returns the memory of a rank over time, as a counter of its process.
fn counters(timeline: &Timeline, rank: Rank) -> Vec<TraceEvent> {
    let thread = Thread { rank, place: 0 };
    let named = (thread, thread.number(timeline.ranks()));
    let counter = |time, activations| TraceEvent {
        args: Some(Arguments::Memory { activations }),
        ..entry("memory", "memory", "C", named, time)
    };
    memory_curve(timeline, rank, &[UNIT]).iter().map(|step| counter(step.time, step.held)).collect()
}

/// Returns the arrows from each send to its receive, if the timeline has both.
fn arrows(timeline: &Timeline, threads: &[Numbered]) -> Vec<TraceEvent> {
    let is_send = |kind| matches!(kind, ActionKind::SendForward | ActionKind::SendBackward);
    let events = || timeline.events().iter().zip(threads);
    let sends = events().filter(|(event, _)| is_send(event.action.kind()));
    let sends: HashMap<Action, (&Event, &Numbered)> = sends.map(|send| (send.0.action, send)).collect();
    let pairs = events().filter_map(|receive| Some((*sends.get(&sender_of(receive.0.action)?)?, receive)));
    let ends = pairs.enumerate().flat_map(|(id, ((send, &from), (receive, &to)))| {
        // The arrow ends inside the receive's slice, near its end, and never before the arrow's start.
        let arrival = (receive.end - 0.01 * (receive.end - receive.start)).max(send.start);
        let end = |ph, bp, thread, at| TraceEvent {
            id: Some(id),
            bp,
            ..entry("message", "message", ph, thread, at)
        };
        [end("s", None, from, send.start), end("f", Some("e"), to, arrival)]
    });
    ends.collect()
}

/// Returns the send that a receive belongs to.
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

fn entry(
    name: &'static str,
    cat: &'static str,
    ph: &'static str,
    (thread, tid): Numbered,
    at: f64,
) -> TraceEvent {
    TraceEvent {
        name,
        cat,
        ph,
        ts: at * 1e6,
        dur: None,
        pid: thread.process(),
        tid,
        id: None,
        bp: None,
        args: None,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::csv::parse_program;
    use crate::simulate::{logical, timed};

    /// Returns the entries of a trace.
    fn entries(timeline: &Timeline) -> Vec<Value> {
        let trace: Value = serde_json::from_str(&timeline.chrome_trace()).expect("JSON");
        trace["traceEvents"].as_array().expect("a list").clone()
    }

    fn of_rows(rows: &str) -> Vec<Value> {
        let program = parse_program(rows).expect("a program");
        entries(&logical(&program).expect("no deadlock").timeline(1.0))
    }

    fn of<'a>(entries: &'a [Value], ph: &str) -> Vec<&'a Value> {
        entries.iter().filter(|entry| entry["ph"] == ph).collect()
    }

    #[test]
    fn slices_processes_and_arrows() {
        let entries = of_rows("0F0,0SEND_F0\n1RECV_F0,1F0\n");
        assert_eq!(["M", "X", "s", "f"].map(|ph| of(&entries, ph).len()), [8, 4, 1, 1]);
        let names: Vec<(&Value, &Value)> =
            of(&entries, "M").iter().map(|entry| (&entry["name"], &entry["args"])).collect();
        assert_eq!(names[4], (&json!("process_name"), &json!({"name": "rank 1"})));
        assert_eq!(names[5], (&json!("process_sort_index"), &json!({"sort_index": 1})));
        assert_eq!(names[6], (&json!("thread_name"), &json!({"name": "rank 1"})));
        let expected = json!({
            "name": "forward", "cat": "forward", "ph": "X", "ts": 2e6, "dur": 1e6, "pid": 2, "tid": 2,
            "args": {"action": "1F0", "stage": 1, "microbatch": 0},
        });
        assert_eq!(*of(&entries, "X")[3], expected);
        let (start, end) = (of(&entries, "s")[0], of(&entries, "f")[0]);
        assert_eq!((&start["pid"], &end["pid"]), (&json!(1), &json!(2)));
        let at = |entry: &Value| entry["ts"].as_f64().expect("a time");
        assert!(at(start) <= at(end) && at(end) < 2e6);
    }

    #[test]
    fn names_and_categories_group_slices() {
        let entries = of_rows("0F0,0SEND_F0,0RECV_B0,0I0,0W0\n1RECV_F0,1F0,1B0,1SEND_B0\n");
        let found: BTreeSet<(&str, &str)> = of(&entries, "X")
            .iter()
            .map(|slice| (slice["cat"].as_str().expect("a text"), slice["name"].as_str().expect("a text")))
            .collect();
        let names = ["backward", "backward input", "backward weight", "forward", "receive", "send"];
        assert_eq!(found, names.map(|name| (name, name)).into());
    }

    #[test]
    fn an_overlap_has_both_places_as_arguments() {
        let entries = of_rows("0F0,(0F1;0B0)OVERLAP_F_B,0B1\n");
        let expected = json!({
            "action": "(0F1;0B0)OVERLAP_F_B", "stage": 0, "microbatch": 1,
            "backward_stage": 0, "backward_microbatch": 0,
        });
        assert_eq!(of(&entries, "X")[1]["args"], expected);
    }

    #[test]
    fn memory_is_counted_for_each_rank() {
        let entries = of_rows("0F0,0F1,0B0,0B1\n");
        let counted: Vec<(f64, u64)> = of(&entries, "C")
            .iter()
            .map(|entry| {
                (entry["ts"].as_f64().unwrap_or(-1.0), entry["args"]["activations"].as_u64().unwrap_or(9))
            })
            .collect();
        assert_eq!(counted, [(0.0, 1), (1e6, 2), (3e6, 1), (4e6, 0)]);
    }

    #[test]
    fn numbers_fit_31_bits() {
        let thread = Thread { rank: Rank::new(u32::MAX), place: u32::MAX };
        assert_eq!((thread.process(), thread.number(u32::MAX)), (LARGEST_NUMBER, LARGEST_NUMBER));
        let rows: String = (0..300).map(|stage| format!("{stage}F0\n")).collect();
        let program = parse_program(&rows).expect("a program");
        for entry in entries(&Timeline::new(300, events_at_once(&program))) {
            for number in [&entry["pid"], &entry["tid"], &entry["args"]["sort_index"]] {
                assert!(number.is_null() || number.as_u64().is_some_and(|it| it < 1 << 31), "{entry}");
            }
        }
    }

    /// Returns every action of a program as an event in the first second.
    fn events_at_once(program: &crate::Program) -> Vec<Event> {
        let rows = (0..).map(Rank::new).zip(program.rows());
        let event = |rank, action| Event { rank, action, start: 0.0, end: 1.0 };
        rows.flat_map(|(rank, row)| row.iter().map(move |&action| event(rank, action))).collect()
    }

    #[test]
    fn slices_of_a_thread_do_not_overlap() {
        let program =
            parse_program("0F0,0SEND_F0,0F1,0SEND_F1\n1RECV_F0,1RECV_F1,1F0,1F1\n").expect("a program");
        let costs = "hop=0.5".parse().expect("costs");
        let entries = entries(timed(&program, &costs).expect("no deadlock").timeline());
        let mut ends = std::collections::BTreeMap::new();
        for slice in of(&entries, "X") {
            let [start, length] = [&slice["ts"], &slice["dur"]].map(|it| it.as_f64().expect("a time"));
            let end = ends.insert(slice["tid"].to_string(), start + length);
            assert!(end.is_none_or(|end| end <= start), "{slice}");
        }
        assert!(ends.len() > 2, "messages run beside computation");
    }
}
