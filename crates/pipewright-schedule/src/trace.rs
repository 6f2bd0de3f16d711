//! A timeline in the trace format that Perfetto and `chrome://tracing` open.
//!
//! Each rank is a process with a counter of its memory. Its first thread computes. Messages and collectives that run
//! during the computation are on further threads, because slices of a thread may not overlap. The messages of skip
//! connections, with the category `skip`, have threads of their own. Slices have the name of their sort (`forward`,
//! `send`), by which viewers group and colour them; the action, its stage and its microbatch are arguments. An arrow
//! leads from each send to its receive. If the events come from several processes, the trace's `otherData` says how well
//! their clocks agree. The pictures that need no viewer are in [`crate::picture`].

use std::collections::{BTreeSet, HashMap};

use serde::Serialize;

use crate::action::{Action, ActionKind};
use crate::ids::{Microbatch, Rank, StageIndex};
use crate::simulate::{UNIT, memory_curve};
use crate::skip_event::{SkipAction, SkipEvent, SkipMessage};
use crate::timeline::{Event, Timeline};

/// Viewers read process, thread and sort numbers as signed 32-bit numbers.
const LARGEST_NUMBER: u32 = i32::MAX as u32;

impl Timeline {
    /// The timeline as a JSON text in the Chrome trace format, which Perfetto opens. Memory is counted in
    /// activations of one stage and microbatch.
    pub fn chrome_trace(&self) -> String {
        let threads = threads(self);
        let skip_threads = skip_threads(self, &threads);
        let slices = self.events().iter().zip(&threads).map(|(event, &thread)| slice(event, thread));
        let skips = self.skips().iter().zip(&skip_threads).map(|(skip, &thread)| skip_slice(skip, thread));
        let memory = (0..self.ranks()).flat_map(|rank| counters(self, Rank::new(rank)));
        let names = names(self.ranks(), threads.iter().chain(&skip_threads)).into_iter();
        let arrows = arrows(self, &threads, &skip_threads);
        let events = names.chain(slices).chain(skips).chain(memory).chain(arrows).collect();
        let other_data = self.clock_skew().map(|skew| OtherData {
            clock_uncertainty_us: skew.uncertainty * 1e6,
            clock_change_us: skew.change * 1e6,
        });
        let trace = Trace { display_time_unit: "ms", other_data, trace_events: events };
        serde_json::to_string(&trace).expect("a trace holds numbers and texts alone, which JSON can express")
    }
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Trace {
    display_time_unit: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    other_data: Option<OtherData>,
    trace_events: Vec<TraceEvent>,
}

/// The accuracy of the times, in microseconds; see [`crate::timeline::ClockSkew`].
#[derive(Serialize)]
struct OtherData {
    clock_uncertainty_us: f64,
    clock_change_us: f64,
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
    Skip {
        action: String,
        stage: u32,
        microbatch: u32,
        /// The stage at the other end.
        peer_stage: u32,
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

/// One of a rank's threads. The first one computes; the others have the messages and collectives, and the last ones
/// the messages of skip connections.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Thread {
    rank: Rank,
    place: u32,
    has_skips: bool,
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
        let mut further = FreeThreads::default();
        let thread = move |event: &Event| {
            let place = match is_sequential || event.action.is_compute() {
                true => 0,
                false => 1 + further.take(event.start, event.end),
            };
            Thread { rank, place, has_skips: false }
        };
        events.iter().map(thread)
    };
    let numbered = |thread: Thread| (thread, thread.number(ranks));
    (0..ranks).map(Rank::new).flat_map(of_rank).map(numbered).collect()
}

/// Returns the thread of each message of a skip connection, after the threads of the rank's events.
fn skip_threads(timeline: &Timeline, threads: &[Numbered]) -> Vec<Numbered> {
    let ranks = timeline.ranks();
    let mut used: HashMap<Rank, u32> = HashMap::new();
    for (thread, _) in threads {
        let places = used.entry(thread.rank).or_default();
        *places = thread.place.max(*places);
    }
    let of_rank = |rank: Rank| {
        let first = used.get(&rank).copied().unwrap_or(0) + 1;
        let mut further = FreeThreads::default();
        timeline.skips_of(rank).iter().map(move |skip| {
            let thread = Thread { rank, place: first + further.take(skip.start, skip.end), has_skips: true };
            (thread, thread.number(ranks))
        })
    };
    (0..ranks).map(Rank::new).flat_map(of_rank).collect()
}

/// The threads of a rank whose slices are added in the order of their starts.
#[derive(Default)]
struct FreeThreads {
    /// The time at which the last slice of each thread ends.
    ends: Vec<f64>,
}

impl FreeThreads {
    /// Returns the first thread that is free for a slice, from 0.
    fn take(&mut self, start: f64, end: f64) -> u32 {
        let free = self.ends.iter().position(|&end| end <= start).unwrap_or(self.ends.len());
        self.ends.resize(self.ends.len().max(free + 1), end);
        self.ends[free] = end;
        free as u32
    }
}

/// Returns the names of processes and threads, and their order in the viewer.
fn names<'a>(ranks: u32, threads: impl Iterator<Item = &'a Numbered>) -> Vec<TraceEvent> {
    let first = |rank| Thread { rank: Rank::new(rank), place: 0, has_skips: false };
    let all: BTreeSet<Thread> = (0..ranks).map(first).chain(threads.map(|(thread, _)| *thread)).collect();
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
        let name = match (thread.place, thread.has_skips) {
            (0, _) => format!("rank {rank}"),
            (place, false) => format!("rank {rank}, messages {place}"),
            (_, true) => format!("rank {rank}, skip connections"),
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

fn skip_slice(skip: &SkipEvent, thread: Numbered) -> TraceEvent {
    let SkipMessage { from, to, microbatch } = skip.action.message();
    let (name, peer) = match skip.action {
        SkipAction::Send(_) => ("send skip", to),
        SkipAction::Receive(_) => ("receive skip", from),
    };
    let args = Arguments::Skip {
        action: skip.action.to_string(),
        stage: skip.action.stage().get(),
        microbatch: microbatch.get(),
        peer_stage: peer.get(),
    };
    let dur = Some((skip.end - skip.start) * 1e6);
    TraceEvent { dur, args: Some(args), ..entry(name, "skip", "X", thread, skip.start) }
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
    let thread = Thread { rank, place: 0, has_skips: false };
    let named = (thread, thread.number(timeline.ranks()));
    let counter = |time, activations| TraceEvent {
        args: Some(Arguments::Memory { activations }),
        ..entry("memory", "memory", "C", named, time)
    };
    memory_curve(timeline, rank, &[UNIT]).iter().map(|step| counter(step.time, step.held)).collect()
}

/// Returns the arrows from each send to its receive, if the timeline has both.
fn arrows(timeline: &Timeline, threads: &[Numbered], skip_threads: &[Numbered]) -> Vec<TraceEvent> {
    let is_send = |kind| matches!(kind, ActionKind::SendForward | ActionKind::SendBackward);
    let events = || timeline.events().iter().zip(threads);
    let sends = events().filter(|(event, _)| is_send(event.action.kind()));
    let sends: HashMap<Action, (f64, Numbered)> =
        sends.map(|(send, &thread)| (send.action, (send.start, thread))).collect();
    let pairs = events().filter_map(|(receive, &thread)| {
        Some((*sends.get(&sender_of(receive.action)?)?, ([receive.start, receive.end], thread)))
    });
    let skips = || timeline.skips().iter().zip(skip_threads);
    let skip_sends = skips().filter(|(skip, _)| matches!(skip.action, SkipAction::Send(_)));
    let skip_sends: HashMap<SkipMessage, (f64, Numbered)> =
        skip_sends.map(|(send, &thread)| (send.action.message(), (send.start, thread))).collect();
    let receives = skips().filter(|(skip, _)| matches!(skip.action, SkipAction::Receive(_)));
    let skip_pairs = receives.filter_map(|(receive, &thread)| {
        Some((*skip_sends.get(&receive.action.message())?, ([receive.start, receive.end], thread)))
    });
    let ends = pairs.chain(skip_pairs).enumerate().flat_map(|(id, ((sent, from), ([start, end], to)))| {
        // The arrow ends inside the receive's slice, near its end, and never before the arrow's start.
        let arrival = (end - 0.01 * (end - start)).max(sent);
        let end = |ph, bp, thread, at| TraceEvent {
            id: Some(id),
            bp,
            ..entry("message", "message", ph, thread, at)
        };
        [end("s", None, from, sent), end("f", Some("e"), to, arrival)]
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
    use crate::costs::{Costs, Link, SkipTransfer};
    use crate::csv::parse_program;
    use crate::simulate::{logical, timed};
    use crate::timeline::ClockSkew;

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
    fn skip_connections_have_a_category_and_threads() {
        let program = parse_program(
            "0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1SEND_F0,1RECV_B0,1B0,1SEND_B0\n2RECV_F0,2F0,2B0,2SEND_B0\n",
        );
        let skips = vec![SkipTransfer { from: StageIndex::new(0), to: StageIndex::new(2), bytes: 2 }];
        let link = Link { latency: 0.0, bandwidth: 1.0 };
        let run = timed(&program.expect("a program"), &Costs { skips, link, ..Costs::default() });
        let skew = ClockSkew { uncertainty: 25e-6, change: 1e-6 };
        let timeline = run.expect("no deadlock").timeline().clone().with_clock_skew(Some(skew));
        let trace: Value = serde_json::from_str(&timeline.chrome_trace()).expect("JSON");
        assert_eq!(trace["otherData"], json!({"clock_uncertainty_us": 25.0, "clock_change_us": 1.0}));
        let entries = entries(&timeline);
        let skips: Vec<&Value> = entries.iter().filter(|entry| entry["cat"] == "skip").collect();
        assert_eq!(skips.len(), 4, "{skips:?}");
        let expected = json!({
            "name": "receive skip", "cat": "skip", "ph": "X", "ts": 1e6, "dur": 2e6, "pid": 3, "tid": 6,
            "args": {"action": "2RECV_SKIP_F0 from stage 0", "stage": 2, "microbatch": 0, "peer_stage": 0},
        });
        assert!(skips.contains(&&expected), "{skips:?}");
        assert_eq!(["s", "f"].map(|ph| of(&entries, ph).len()), [6, 6]);
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
        let thread = Thread { rank: Rank::new(u32::MAX), place: u32::MAX, has_skips: true };
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
