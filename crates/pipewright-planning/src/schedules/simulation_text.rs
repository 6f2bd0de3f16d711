//! Prints a simulation as text, as JSON, or as a list of events.

use std::time::Duration;

use pipewright_schedule::picture::TimeUnit;
use pipewright_schedule::simulate::{LifetimeOf, Lifetimes, Summary, all_lifetimes};
use pipewright_schedule::{Program, Timeline};
use pipewright_system::schedule_file::slice_hint;
use serde::Serialize;

use crate::numbers::bytes;
use crate::schedules::timed_program::{EngineTimes, TimedProgram};
use crate::schedules::transport_price::Price;

/// The output of `--format json`: the keys of the summary, the buffers for activations, and the times of the
/// engine.
#[derive(Serialize)]
struct Report<'a> {
    #[serde(flatten)]
    summary: &'a Summary,
    #[serde(flatten)]
    price: Option<&'a Price>,
    /// The buffers for activations on each rank.
    activation_buffers: Vec<Lifetimes>,
    engine_ms: &'a EngineTimes,
}

/// Returns the summary as JSON.
pub(crate) fn json(summary: &Summary, timed_program: &TimedProgram, price: Option<&Price>) -> String {
    let activation_buffers = all_lifetimes(&timed_program.program, LifetimeOf::StageAndMicrobatch);
    let report = Report { summary, price, activation_buffers, engine_ms: &timed_program.times };
    serde_json::to_string(&report).expect("numbers can be written as JSON") + "\n"
}

/// Returns the summary as text. The makespan is in ticks if the simulation counts ticks.
pub(crate) fn text(
    summary: &Summary,
    timed_program: &TimedProgram,
    price: Option<&Price>,
    counts_ticks: bool,
) -> String {
    let mut lines = Lines::of(timed_program);
    let (barrier, span) = (percent(summary.bubble_fraction), percent(summary.span_bubble_fraction));
    lines.add(
        "makespan",
        match summary.steps {
            steps if counts_ticks => format!("{steps} ticks"),
            0 => lines.time(summary.makespan),
            steps => format!("{}, {steps} logical steps", lines.time(summary.makespan)),
        },
    );
    if let Some(price) = price {
        lines.add("transport", price.text(|seconds| lines.time(seconds)));
    }
    lines.add(
        "bubble",
        format!("{barrier} barrier to barrier, {span} from a rank's first action to its last"),
    );
    lines.add("by rank", list(summary.bubble_per_rank.iter().map(|&fraction| percent(fraction)), " "));
    lines.add("exposed", format!("{} of the time in messages", percent(summary.exposed_comm_fraction)));
    if let (Some(exchanges), Some(share)) = (&summary.exchanges, summary.exposed_exchange_fraction()) {
        let ranks =
            exchanges.iter().map(|rank| format!("{} of {}", rounded(rank.exposed), rounded(rank.seconds)));
        let words = format!("{} exposed, by rank: {}", percent(share), list(ranks, ", "));
        lines.add("exchanges", words + if timed_program.unit == TimeUnit::Seconds { " s" } else { "" });
    }
    let held = match summary.slices {
        None => " activations at most, by rank".to_owned(),
        Some(slices) => format!(" activations of slices at most, by rank; {slices} slices make a microbatch"),
    };
    lines.add("memory", list(summary.peak_activations.iter().map(u64::to_string), " ") + &held);
    if let Some(peaks) = &summary.peak_bytes {
        let held = " at most, by rank: parameters, optimizer state, gradients and activations";
        lines.add("", list(peaks.iter().map(|&peak| bytes(peak)), "  ") + held);
    }
    if let Some(hint) = slice_hint(&timed_program.program) {
        lines.add("slices", hint);
    }
    lines.add_engine(&timed_program.times);
    lines.into_text()
}

/// The lines of a simulation's text, each with a name in front.
pub(crate) struct Lines {
    text: String,
    unit: TimeUnit,
}

impl Lines {
    /// Returns the title of a program.
    pub(crate) fn of(timed_program: &TimedProgram) -> Self {
        Self { text: timed_program.title() + "\n", unit: timed_program.unit }
    }

    /// Adds a line.
    pub(crate) fn add(&mut self, what: &str, words: String) {
        self.text.push_str(&format!("{what:10} {words}\n"));
    }

    /// Adds the times of the engine.
    pub(crate) fn add_engine(&mut self, times: &EngineTimes) {
        let ms = |duration: Duration| format!("{:.2}", duration.as_secs_f64() * 1e3);
        let [all, generate, lower, validate, simulate] =
            [times.total(), times.generate, times.lower, times.validate, times.simulate].map(ms);
        self.add(
            "engine",
            format!("{all} ms: generate {generate}, lower {lower}, validate {validate}, simulate {simulate}"),
        );
    }

    /// Returns a time in its unit.
    pub(crate) fn time(&self, time: f64) -> String {
        match self.unit {
            TimeUnit::Costs => format!("{} units", rounded(time)),
            TimeUnit::Seconds => format!("{} s", rounded(time)),
        }
    }

    /// Returns the text.
    pub(crate) fn into_text(self) -> String {
        self.text
    }
}

/// Returns a share in percent.
pub(crate) fn percent(fraction: f64) -> String {
    format!("{:.1}%", fraction * 100.0)
}

/// Returns one line for each event: rank, action, start and end.
pub(crate) fn events(timeline: &Timeline) -> String {
    let mut text = "rank,action,start,end\n".to_owned();
    for event in timeline.events() {
        text.push_str(&format!("{},{},{},{}\n", event.rank, event.action, event.start, event.end));
    }
    text
}

/// Returns one line for each forward: rank, stage, microbatch, the first and the last action of the rank's row
/// that uses its activations, and their buffer.
pub(crate) fn activations(program: &Program) -> String {
    let mut text = "rank,stage,microbatch,first,last,slot\n".to_owned();
    for (rank, lifetimes) in all_lifetimes(program, LifetimeOf::StageAndMicrobatch).iter().enumerate() {
        for range in lifetimes.ranges() {
            let stage = range.stage.map_or_else(String::new, |stage| stage.to_string());
            let (microbatch, first, last, slot) = (range.microbatch, range.first, range.last, range.slot);
            text.push_str(&format!("{rank},{stage},{microbatch},{first},{last},{slot}\n"));
        }
    }
    text
}

/// Joins entries with `gap`. A long list is shortened.
pub(crate) fn list(entries: impl ExactSizeIterator<Item = String>, gap: &str) -> String {
    const SHOWN: usize = 16;
    let more = entries.len().saturating_sub(SHOWN);
    let mut shown: Vec<String> = entries.take(SHOWN).collect();
    if more > 0 {
        shown.push(format!("(and {more} more)"));
    }
    shown.join(gap)
}

/// Rounds a number to six decimals.
fn rounded(value: f64) -> f64 {
    let scaled = (value * 1e6).round() / 1e6;
    if scaled.is_finite() { scaled } else { value }
}
