//! Tables in HTML, as notebooks show plans.

use pipewright_cluster::accuracy::Accuracy;
use pipewright_cluster::search::{ClusterPlan, Request};
use pipewright_schedule::bytes::bytes_text;
use pipewright_schedule::picture::html_table;

/// The most ranks whose memory is shown.
const MOST_RANKS: usize = 64;

/// Returns a plan for a cluster: its layout, its figures, and the memory of each rank by its parts.
pub(crate) fn plan(plan: &ClusterPlan, request: &Request, limit: f64, accuracy: &Accuracy) -> String {
    let prediction = &plan.prediction;
    let shares = plan.shares.named().into_iter().filter(|(_, share)| *share >= 0.0005);
    let shares: Vec<String> = shares.map(|(name, share)| format!("{name} {:.1}%", share * 100.0)).collect();
    let row = |title: &str, text: String| vec![title.to_owned(), text];
    let figures = [
        row("step", format!("{:.4} s", prediction.seconds)),
        row("tokens per second of a GPU", format!("{:.0}", prediction.tokens_per_gpu)),
        row("share of the peak", format!("{:.1}%", plan.mfu * 100.0)),
        row("above the bound", format!("{:.1}%", plan.gap * 100.0)),
        row("the step is spent on", shares.join(", ")),
        row(
            "memory",
            format!("{} of {}", bytes_text(prediction.peak_memory() as u64), bytes_text(limit as u64)),
        ),
        row("accuracy", accuracy.to_string()),
    ];
    let layout = plan.layout.text(&request.model);
    html_table(&["layout", &layout], &figures) + &memory(plan, limit)
}

/// Returns the memory of each rank by its parts.
fn memory(plan: &ClusterPlan, limit: f64) -> String {
    let ranks = &plan.prediction.memory;
    let Some(first) = ranks.first() else { return String::new() };
    let head: Vec<&str> =
        ["rank", "of the limit"].into_iter().chain(first.named().map(|(name, _)| name)).collect();
    let row = |(rank, held): (usize, &pipewright_schedule::held_bytes::HeldBytes<f64>)| {
        let share = format!("{:.0}%", held.total() / limit * 100.0);
        let parts = held.named().map(|(_, bytes)| bytes_text(bytes as u64));
        [rank.to_string(), share].into_iter().chain(parts).collect()
    };
    let mut rows: Vec<Vec<String>> = ranks.iter().enumerate().take(MOST_RANKS).map(row).collect();
    if ranks.len() > MOST_RANKS {
        rows.push(vec!["...".to_owned(), format!("{} more ranks", ranks.len() - MOST_RANKS)]);
    }
    html_table(&head, &rows)
}
