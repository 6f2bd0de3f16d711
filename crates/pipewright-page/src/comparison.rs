//! Compares schedules at one size and one cost of a rank's layers: the answer to `compare`.

use pipewright_schedule::comparison::Figures;
use pipewright_schedule::picture::{ComparedPicture, Comparison, TimeUnit, comparison};
use pipewright_schedule::words::counted;
use serde_json::{Value, json};

use crate::prediction::Prediction;
use crate::setup::{Setup, Texts};

/// The most schedules in one answer.
const MOST_SCHEDULES: usize = 32;

/// The most actions of all pictures together. A browser takes a second for more.
const MOST_DRAWN: usize = 50_000;

/// Returns the figures of each schedule or the sentence why it has none, and a page with their pictures on one scale.
pub(crate) fn compare(texts: &Texts, names: &[String]) -> Result<Value, String> {
    if names.len() > MOST_SCHEDULES {
        return Err(format!(
            "at most {} are compared at once; remove some",
            counted(MOST_SCHEDULES as u32, "schedule")
        ));
    }
    let of = |name: &String| {
        let mut texts = texts.clone();
        texts.insert("schedule".to_owned(), name.clone());
        let setup = Setup::read(&texts)?;
        Prediction::of(&setup).map(|it| {
            let figures = Figures::of(it.summary, &it.program, &it.schedule, &it.timeline);
            (setup.generator.name, figures)
        })
    };
    let outcomes: Vec<_> = names.iter().map(of).collect();
    let made: Vec<_> = outcomes.iter().filter_map(|outcome| outcome.as_ref().ok()).collect();
    let events: usize = made.iter().map(|(_, figures)| figures.timeline.events().len()).sum();
    let note = (events > MOST_DRAWN).then(|| {
        format!("Pictures of {events} actions are too large; compare fewer schedules, or fewer microbatches.")
    });
    let picture = (!made.is_empty() && note.is_none()).then(|| drawn(&made));
    let longest = made.iter().map(|(_, figures)| figures.summary.makespan).fold(0.0, f64::max);
    let rows = names.iter().zip(&outcomes).map(|(name, outcome)| match outcome {
        Ok((name, figures)) => row(name, figures, longest),
        Err(error) => json!({ "name": name, "error": error }),
    });
    Ok(json!({ "rows": rows.collect::<Vec<_>>(), "picture": picture, "note": note }))
}

/// Returns a page with the pictures of runs by their names.
fn drawn(runs: &[&(&str, Figures)]) -> String {
    let pictures = runs.iter().map(|(name, figures)| ComparedPicture { name, timeline: &figures.timeline });
    comparison(&Comparison {
        title: "On one scale of time",
        head: &[],
        rows: &[],
        note: "",
        pictures: &pictures.collect::<Vec<_>>(),
        unit: TimeUnit::Costs,
    })
}

/// Returns the figures of a schedule, by the keys of `pipewright compare --format json`, and texts for the table. `peak` is the
/// memory of the rank that holds the most: its bytes, or activations of all layers of a rank for one microbatch.
fn row(name: &str, figures: &Figures, longest: f64) -> Value {
    let summary = &figures.summary;
    let peak = figures.peak_bytes().map_or_else(|| figures.peak_share(), |bytes| bytes as f64);
    json!({
        "name": name,
        "makespan": summary.makespan,
        "bubble_fraction": summary.bubble_fraction,
        "peak_activations": summary.peak_activations,
        "messages": figures.messages,
        "stages_per_rank": figures.stages_per_rank,
        "time": TimeUnit::Costs.format(summary.makespan, longest),
        "peak": peak,
        "memory": figures.memory_text(),
    })
}
