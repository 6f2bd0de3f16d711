//! Compares schedules at one size and one cost of a rank's layers: the answer to `compare`.

use pipewright_schedule::Timeline;
use pipewright_schedule::bytes::bytes_text;
use pipewright_schedule::picture::{ComparedPicture, Comparison, TimeUnit, comparison, computation_of};
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
        Prediction::of(&setup).map(|prediction| (setup, prediction))
    };
    let outcomes: Vec<_> = names.iter().map(of).collect();
    let made: Vec<_> = outcomes.iter().filter_map(|outcome| outcome.as_ref().ok()).collect();
    let runs: Vec<_> = made
        .iter()
        .map(|(setup, it)| (setup.generator.name, computation_of(&it.schedule, &it.timeline)))
        .collect();
    let events: usize = runs.iter().map(|(_, timeline)| timeline.events().len()).sum();
    let note = (events > MOST_DRAWN).then(|| {
        format!("Pictures of {events} actions are too large; compare fewer schedules, or fewer microbatches.")
    });
    let picture = (!runs.is_empty() && note.is_none()).then(|| drawn(&runs));
    let longest = made.iter().map(|(_, it)| it.summary.makespan).fold(0.0, f64::max);
    let rows = names.iter().zip(&outcomes).map(|(name, outcome)| match outcome {
        Ok((setup, prediction)) => row(setup, prediction, longest),
        Err(error) => json!({ "name": name, "error": error }),
    });
    Ok(json!({ "rows": rows.collect::<Vec<_>>(), "picture": picture, "note": note }))
}

/// Returns a page with the pictures of runs by their names.
fn drawn(runs: &[(&str, Timeline)]) -> String {
    let pictures = runs.iter().map(|(name, timeline)| ComparedPicture { name, timeline });
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
fn row(setup: &Setup, Prediction { program, summary, .. }: &Prediction, longest: f64) -> Value {
    let parts = setup.stages_per_rank * summary.slices.unwrap_or(1);
    let most = |peaks: &[u64]| peaks.iter().max().copied().unwrap_or(0);
    let (peak, memory) = match &summary.peak_bytes {
        Some(peaks) => (most(peaks) as f64, bytes_text(most(peaks))),
        None => {
            let peak = most(&summary.peak_activations) as f64 / f64::from(parts);
            (peak, ((peak * 100.0).round() / 100.0).to_string())
        }
    };
    json!({
        "name": setup.generator.name,
        "makespan": summary.makespan,
        "bubble_fraction": summary.bubble_fraction,
        "peak_activations": summary.peak_activations,
        "messages": program.rows().iter().flatten().filter(|action| action.kind().is_send()).count(),
        "stages_per_rank": setup.stages_per_rank,
        "time": TimeUnit::Costs.format(summary.makespan, longest),
        "peak": peak,
        "memory": memory,
    })
}
