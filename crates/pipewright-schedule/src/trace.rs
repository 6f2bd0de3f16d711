//! A timeline in the trace format that Perfetto and `chrome://tracing` open.
//!
//! Each rank is a process with a counter of its memory. Its first thread computes. Messages and collectives
//! that run during the computation are on further threads, because slices of a thread may not overlap. The
//! messages of skip connections, with the category `skip`, have threads of their own. So do the spans inside
//! of actions: the user's code has named those of the category `scope`, and the others have the category
//! `exchange` or `computation`. Slices have the name of their sort (`forward`, `send`), by which viewers group
//! and colour them; the action, its stage and its microbatch are arguments.
//! In a measured step, sends and receives also have the other rank, the bytes, and the element type and shape of each
//! tensor as arguments.
//! An arrow leads from each send to its receive. If the events come from several processes, the trace's
//! `otherData` says how well their clocks agree. If the actions number slices of microbatches, `otherData`
//! has the number of slices of each microbatch. The pictures that need no viewer are in [`crate::picture`].

use std::borrow::Cow;
use std::cell::Cell;
use std::collections::{BTreeSet, HashMap};

use serde::{Serialize, Serializer};

use crate::action::{Action, ActionKind};
use crate::ids::{Microbatch, Rank};
use crate::message_record::{MessageEnd, TensorForm};
use crate::simulate::{UNIT, memory_curve};
use crate::skip_event::{SkipAction, SkipEvent, SkipMessage};
use crate::timeline::{Event, Scope, ScopeKind, Timeline};
use crate::transfer::Transfer;

/// Viewers read process, thread and sort numbers as signed 32-bit numbers.
const LARGEST_NUMBER: u32 = i32::MAX as u32;

impl Timeline {
    /// The timeline as a JSON text in the Chrome trace format, which Perfetto opens. Memory is counted in
    /// activations of one stage and microbatch.
    pub fn chrome_trace(&self) -> String {
        let threads = threads(self);
        let skip_threads = skip_threads(self, &threads);
        let slices = self.events().iter().zip(&threads).map(|(event, &thread)| slice(self, event, thread));
        let skips =
            self.skips().iter().zip(&skip_threads).map(|(skip, &thread)| skip_slice(self, skip, thread));
        let scope_threads = scope_threads(self, threads.iter().chain(&skip_threads));
        let scopes = self.scopes().iter().zip(&scope_threads);
        let scopes = scopes.map(|(scope, &thread)| scope_slice(scope, thread));
        let memory = (0..self.ranks()).flat_map(|rank| counters(self, Rank::new(rank)));
        let names = names(self.ranks(), threads.iter().chain(&skip_threads).chain(&scope_threads));
        let arrows = arrows(self, &threads, &skip_threads);
        let events = names.into_iter().chain(slices).chain(skips).chain(scopes).chain(memory).chain(arrows);
        let slices = Some(self.slices().get()).filter(|_| !self.slices().is_one());
        let has_other = self.clock_skew().is_some() || slices.is_some();
        let other_data = has_other.then(|| OtherData {
            clock_uncertainty_us: self.clock_skew().map(|skew| skew.uncertainty * 1e6),
            clock_change_us: self.clock_skew().map(|skew| skew.change * 1e6),
            slices,
        });
        let trace =
            Trace { display_time_unit: "ms", other_data, trace_events: Once(Cell::new(Some(events))) };
        serde_json::to_string(&trace).expect("a trace holds numbers and texts alone, which JSON can express")
    }
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Trace<Events> {
    display_time_unit: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    other_data: Option<OtherData>,
    trace_events: Events,
}

/// A list that is written once, item by item: all entries of a trace at the same time would take more memory
/// than its text.
struct Once<Items>(Cell<Option<Items>>);

impl<Items: Iterator<Item = TraceEvent>> Serialize for Once<Items> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.0.take().into_iter().flatten())
    }
}

/// The metadata of the whole timeline.
#[derive(Serialize)]
struct OtherData {
    /// The accuracy of the times, in microseconds; see [`crate::timeline::ClockSkew`].
    #[serde(skip_serializing_if = "Option::is_none")]
    clock_uncertainty_us: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    clock_change_us: Option<f64>,
    /// The number of slices of each microbatch, if microbatches are cut.
    #[serde(skip_serializing_if = "Option::is_none")]
    slices: Option<u32>,
}

/// An entry of the format. `ph` is its kind: `M` is a name, `X` a slice, `C` a counter, and `s` and `f` are
/// the start and the end of an arrow.
#[derive(Serialize)]
struct TraceEvent {
    name: Cow<'static, str>,
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
        /// The message of a measured send or receive.
        #[serde(flatten, skip_serializing_if = "Option::is_none")]
        content: Option<MessageContent>,
    },
    Skip {
        action: String,
        stage: u32,
        microbatch: u32,
        /// The stage at the other end.
        peer_stage: u32,
        #[serde(flatten, skip_serializing_if = "Option::is_none")]
        content: Option<MessageContent>,
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

/// The content of a message.
#[derive(Serialize)]
struct MessageContent {
    /// The rank at the other end.
    peer_rank: u32,
    bytes: u64,
    tensors: Vec<TensorForm>,
}

/// One of a rank's threads. The first one computes; the others have the messages and collectives, then the
/// messages of skip connections, and the last ones the spans that the user's code has named.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Thread {
    rank: Rank,
    index: u32,
    content: Content,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Content {
    Actions,
    Skips,
    Scopes,
}

impl Thread {
    /// Returns the number of the process, from 1: some viewers treat process 0 as the idle process.
    fn process(self) -> u32 {
        self.rank.get().saturating_add(1).min(LARGEST_NUMBER)
    }

    /// Returns a number that no other thread of any process has.
    fn number(self, ranks: u32) -> u32 {
        self.index.saturating_mul(ranks).saturating_add(self.process()).min(LARGEST_NUMBER)
    }
}

/// A slice's thread, with the number of the thread.
type Numbered = (Thread, u32);

/// Returns the thread of each event.
fn threads(timeline: &Timeline) -> Vec<Numbered> {
    let ranks = timeline.ranks();
    let threads_of = |rank: Rank| {
        let events = timeline.events_of(rank);
        let is_sequential = events.windows(2).all(|pair| pair[0].end <= pair[1].start);
        let mut further = FreeThreads::default();
        let thread = move |event: &Event| {
            let index = if is_sequential || event.action.is_compute() {
                0
            } else {
                1 + further.take(event.start, event.end)
            };
            Thread { rank, index, content: Content::Actions }
        };
        events.iter().map(thread)
    };
    let numbered = |thread: Thread| (thread, thread.number(ranks));
    (0..ranks).map(Rank::new).flat_map(threads_of).map(numbered).collect()
}

/// Returns the thread of each message of a skip connection, after the threads of the rank's events.
fn skip_threads(timeline: &Timeline, used: &[Numbered]) -> Vec<Numbered> {
    let spans = timeline.skips().iter().map(|skip| (skip.rank, skip.start, skip.end));
    further_threads(timeline, used.iter(), Content::Skips, spans)
}

/// Returns the thread of each named span, after all other threads of the rank.
fn scope_threads<'a>(timeline: &Timeline, used: impl Iterator<Item = &'a Numbered>) -> Vec<Numbered> {
    let spans = timeline.scopes().iter().map(|scope| (scope.rank, scope.start, scope.end));
    further_threads(timeline, used, Content::Scopes, spans)
}

/// Returns a thread for each span, after the threads in use. A span has a rank, a start and an end; the spans
/// of a rank are in the order of their starts.
fn further_threads<'a>(
    timeline: &Timeline,
    used: impl Iterator<Item = &'a Numbered>,
    content: Content,
    spans: impl Iterator<Item = (Rank, f64, f64)>,
) -> Vec<Numbered> {
    let mut last: HashMap<Rank, u32> = HashMap::new();
    for (thread, _) in used {
        let most = last.entry(thread.rank).or_default();
        *most = thread.index.max(*most);
    }
    let mut further: HashMap<Rank, FreeThreads> = HashMap::new();
    let thread = |(rank, start, end): (Rank, f64, f64)| {
        let first = last.get(&rank).copied().unwrap_or(0) + 1;
        let index = first + further.entry(rank).or_default().take(start, end);
        let thread = Thread { rank, index, content };
        (thread, thread.number(timeline.ranks()))
    };
    spans.map(thread).collect()
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
    let first = |rank| Thread { rank: Rank::new(rank), index: 0, content: Content::Actions };
    let all: BTreeSet<Thread> = (0..ranks).map(first).chain(threads.map(|(thread, _)| *thread)).collect();
    let mut names = Vec::new();
    for thread in all {
        let rank = thread.rank;
        let named = (thread, thread.number(ranks));
        let mut push =
            |name, args| names.push(TraceEvent { args: Some(args), ..entry(name, "", "M", named, 0.0) });
        if thread.index == 0 {
            push("process_name", Arguments::Name { name: format!("rank {rank}") });
            push("process_sort_index", Arguments::SortIndex { sort_index: rank.get().min(LARGEST_NUMBER) });
        }
        let name = match (thread.index, thread.content) {
            (0, _) => format!("rank {rank}"),
            (index, Content::Actions) => format!("rank {rank}, messages {index}"),
            (_, Content::Skips) => format!("rank {rank}, skip connections"),
            (_, Content::Scopes) => format!("rank {rank}, scopes"),
        };
        push("thread_name", Arguments::Name { name });
        push("thread_sort_index", Arguments::SortIndex { sort_index: thread.index.min(LARGEST_NUMBER) });
    }
    names
}

/// Returns the content of a message, if it is known.
fn content(timeline: &Timeline, rank: Rank, end: MessageEnd) -> Option<MessageContent> {
    let message = timeline.message(rank, end)?;
    let (peer_rank, tensors) = (message.peer.get(), message.tensors.to_vec());
    Some(MessageContent { peer_rank, bytes: message.bytes, tensors })
}

fn slice(timeline: &Timeline, event: &Event, thread: Numbered) -> TraceEvent {
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
        content: content(timeline, event.rank, MessageEnd::Action(event.action)),
    };
    let dur = Some((event.end - event.start) * 1e6);
    TraceEvent { dur, args: Some(args), ..entry(name, category, "X", thread, event.start) }
}

fn skip_slice(timeline: &Timeline, skip: &SkipEvent, thread: Numbered) -> TraceEvent {
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
        content: content(timeline, skip.rank, MessageEnd::Skip(skip.action)),
    };
    let dur = Some((skip.end - skip.start) * 1e6);
    TraceEvent { dur, args: Some(args), ..entry(name, "skip", "X", thread, skip.start) }
}

fn scope_slice(scope: &Scope, thread: Numbered) -> TraceEvent {
    let category = match scope.kind {
        ScopeKind::User(_) => "scope",
        ScopeKind::Exchange(_) => "exchange",
        ScopeKind::Computation(_) => "computation",
    };
    let (name, dur) = (Cow::Owned(scope.kind.to_string()), Some((scope.end - scope.start) * 1e6));
    TraceEvent { name, dur, ..entry("", category, "X", thread, scope.start) }
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
        ActionKind::Offload => ("offload", "offload"),
        ActionKind::Reload => ("offload", "reload"),
    }
}

/// Returns the memory of a rank over time, as a counter of its process.
fn counters(timeline: &Timeline, rank: Rank) -> Vec<TraceEvent> {
    let thread = Thread { rank, index: 0, content: Content::Actions };
    let named = (thread, thread.number(timeline.ranks()));
    let counter = |time, activations| TraceEvent {
        args: Some(Arguments::Memory { activations }),
        ..entry("memory", "memory", "C", named, time)
    };
    memory_curve(timeline, rank, &[UNIT]).iter().map(|step| counter(step.time, step.held)).collect()
}

/// Returns the arrows from each send to its receive, if the timeline has both.
fn arrows<'a>(
    timeline: &'a Timeline,
    threads: &'a [Numbered],
    skip_threads: &'a [Numbered],
) -> impl Iterator<Item = TraceEvent> + 'a {
    let events = || timeline.events().iter().zip(threads);
    let sends = events().filter(|(event, _)| event.action.kind().is_send());
    let sends: HashMap<Action, (f64, Numbered)> =
        sends.map(|(send, &thread)| (send.action, (send.start, thread))).collect();
    let pairs = events().filter_map(move |(receive, &thread)| {
        Some((*sends.get(&Transfer::other_end(receive.action)?)?, ([receive.start, receive.end], thread)))
    });
    let skips = || timeline.skips().iter().zip(skip_threads);
    let skip_sends = skips().filter(|(skip, _)| matches!(skip.action, SkipAction::Send(_)));
    let skip_sends: HashMap<SkipMessage, (f64, Numbered)> =
        skip_sends.map(|(send, &thread)| (send.action.message(), (send.start, thread))).collect();
    let receives = skips().filter(|(skip, _)| matches!(skip.action, SkipAction::Receive(_)));
    let skip_pairs = receives.filter_map(move |(receive, &thread)| {
        Some((*skip_sends.get(&receive.action.message())?, ([receive.start, receive.end], thread)))
    });
    pairs.chain(skip_pairs).enumerate().flat_map(|(id, ((sent, from), ([start, end], to)))| {
        // The arrow ends inside the receive's slice, near its end, and never before the arrow's start.
        let arrival = (end - 0.01 * (end - start)).max(sent);
        let end = |ph, bp, thread, at| TraceEvent {
            id: Some(id),
            bp,
            ..entry("message", "message", ph, thread, at)
        };
        [end("s", None, from, sent), end("f", Some("e"), to, arrival)]
    })
}

fn entry(
    name: &'static str,
    cat: &'static str,
    ph: &'static str,
    (thread, tid): Numbered,
    at: f64,
) -> TraceEvent {
    TraceEvent {
        name: Cow::Borrowed(name),
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
mod tests;
