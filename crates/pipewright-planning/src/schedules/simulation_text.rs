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
    let mut text = timed_program.title() + "\n";
    let mut line = |what: &str, words: String| {
        text.push_str(&format!("{what:10} {words}\n"));
    };
    let percent = |fraction: f64| format!("{:.1}%", fraction * 100.0);
    let (barrier, span) = (percent(summary.bubble_fraction), percent(summary.span_bubble_fraction));
    let time = |time: f64| match timed_program.unit {
        TimeUnit::Costs => format!("{} units", rounded(time)),
        TimeUnit::Seconds => format!("{} s", rounded(time)),
    };
    line(
        "makespan",
        match summary.steps {
            steps if counts_ticks => format!("{steps} ticks"),
            0 => time(summary.makespan),
            steps => format!("{}, {steps} logical steps", time(summary.makespan)),
        },
    );
    if let Some(price) = price {
        line("transport", price.text(time));
    }
    line("bubble", format!("{barrier} barrier to barrier, {span} from a rank's first action to its last"));
    line("by rank", list(summary.bubble_per_rank.iter().map(|&fraction| percent(fraction)), " "));
    line("exposed", format!("{} of the time in messages", percent(summary.exposed_comm_fraction)));
    if let (Some(exchanges), Some(share)) = (&summary.exchanges, summary.exposed_exchange_fraction()) {
        let ranks =
            exchanges.iter().map(|rank| format!("{} of {}", rounded(rank.exposed), rounded(rank.seconds)));
        let words = format!("{} exposed, by rank: {}", percent(share), list(ranks, ", "));
        line("exchanges", words + if timed_program.unit == TimeUnit::Seconds { " s" } else { "" });
    }
    let held = match summary.slices {
        None => " activations at most, by rank".to_owned(),
        Some(slices) => format!(" activations of slices at most, by rank; {slices} slices make a microbatch"),
    };
    line("memory", list(summary.peak_activations.iter().map(u64::to_string), " ") + &held);
    if let Some(peaks) = &summary.peak_bytes {
        let held = " at most, by rank: parameters, optimizer state, gradients and activations";
        line("", list(peaks.iter().map(|&peak| bytes(peak)), "  ") + held);
    }
    if let Some(hint) = slice_hint(&timed_program.program) {
        line("slices", hint);
    }
    let EngineTimes { generate, lower, validate, simulate } = timed_program.times;
    let ms = |duration: Duration| format!("{:.2}", duration.as_secs_f64() * 1e3);
    let (all, generate, lower) = (ms(timed_program.times.total()), ms(generate), ms(lower));
    let (validate, simulate) = (ms(validate), ms(simulate));
    line(
        "engine",
        format!("{all} ms: generate {generate}, lower {lower}, validate {validate}, simulate {simulate}"),
    );
    text
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
