//! Prints a comparison of schedules as a table, as JSON, or as a page.

use pipewright_schedule::Timeline;
use pipewright_schedule::picture::{ComparedPicture, Comparison, TimeUnit, comparison};
use pipewright_schedule::simulate::Summary;
use pipewright_schedule::words::counted;
use serde::Serialize;

use crate::display::bytes;

/// A schedule in the comparison: its figures, or the reason why there are no figures.
pub(crate) struct Compared {
    pub(crate) name: &'static str,
    pub(crate) outcome: Result<Figures, String>,
}

/// The figures of a schedule that can run.
pub(crate) struct Figures {
    pub(crate) summary: Summary,
    pub(crate) ranks: u32,
    pub(crate) stages_per_rank: u32,
    /// The number of messages in a step, over all ranks.
    pub(crate) messages: usize,
    /// The schedule's computations in the predicted run.
    pub(crate) timeline: Timeline,
}

/// The output of `--format json`.
#[derive(Serialize)]
struct Report<'a> {
    schedules: Vec<ScheduleJson<'a>>,
}

/// A schedule's figures, or its error.
#[derive(Serialize)]
#[serde(untagged)]
enum ScheduleJson<'a> {
    Runs {
        name: &'a str,
        makespan: f64,
        bubble_fraction: f64,
        peak_activations: &'a [u64],
        messages: usize,
        stages_per_rank: u32,
        /// The number of slices of each microbatch, if microbatches are cut.
        #[serde(skip_serializing_if = "Option::is_none")]
        slices: Option<u32>,
        #[serde(skip_serializing_if = "Option::is_none")]
        peak_bytes: Option<&'a [u64]>,
    },
    Refused {
        name: &'a str,
        error: &'a str,
    },
}

/// Returns the comparison as JSON.
pub(crate) fn json(compared: &[Compared]) -> String {
    let report = Report { schedules: compared.iter().map(schedule_json).collect() };
    serde_json::to_string(&report).expect("numbers can be written as JSON") + "\n"
}

fn schedule_json(Compared { name, outcome }: &Compared) -> ScheduleJson<'_> {
    match outcome {
        Ok(figures) => ScheduleJson::Runs {
            name,
            makespan: figures.summary.makespan,
            bubble_fraction: figures.summary.bubble_fraction,
            peak_activations: &figures.summary.peak_activations,
            messages: figures.messages,
            stages_per_rank: figures.stages_per_rank,
            slices: figures.summary.slices,
            peak_bytes: figures.summary.peak_bytes.as_deref(),
        },
        Err(error) => ScheduleJson::Refused { name, error },
    }
}

/// The columns of the table.
const HEAD: [&str; 6] = ["schedule", "stages per rank", "time", "bubble", "memory", "messages"];

/// Returns the cells of a schedule that can run. `longest` is the longest time of the table.
fn cells(name: &str, figures: &Figures, unit: TimeUnit, longest: f64) -> [String; 6] {
    [
        name.to_owned(),
        figures.stages_per_rank.to_string(),
        unit.format(figures.summary.makespan, longest),
        format!("{:.1}%", figures.summary.bubble_fraction * 100.0),
        memory(figures),
        figures.messages.to_string(),
    ]
}

/// Returns the peak of the rank that holds the most: its bytes if they are known, otherwise its activations,
/// in units of the activations of all layers of a rank for one microbatch.
fn memory(figures: &Figures) -> String {
    let most = |peaks: &[u64]| peaks.iter().max().copied().unwrap_or(0);
    match &figures.summary.peak_bytes {
        Some(peaks) => bytes(most(peaks)),
        None => {
            let parts = figures.stages_per_rank.max(1) * figures.summary.slices.unwrap_or(1);
            let peak = most(&figures.summary.peak_activations) as f64 / f64::from(parts);
            ((peak * 100.0).round() / 100.0).to_string()
        }
    }
}

fn longest(compared: &[Compared]) -> f64 {
    let times = compared.iter().filter_map(|it| Some(it.outcome.as_ref().ok()?.summary.makespan));
    times.fold(0.0, f64::max)
}

/// Returns what the columns count.
fn note(compared: &[Compared], unit: TimeUnit) -> &'static str {
    let has_bytes =
        compared.iter().any(|it| it.outcome.as_ref().is_ok_and(|it| it.summary.peak_bytes.is_some()));
    match (unit, has_bytes) {
        (TimeUnit::Seconds, _) | (_, true) => {
            "memory: of the rank that holds the most; messages: of all ranks in a step"
        }
        (TimeUnit::Costs, false) => {
            "time: in the unit of the costs of a rank; memory: activations of a rank's layers for one microbatch, of the rank \
             that holds the most; messages: of all ranks in a step"
        }
    }
}

/// Returns the comparison as a table.
pub(crate) fn text(compared: &[Compared], unit: TimeUnit) -> String {
    let longest = longest(compared);
    let row = |it: &Compared| it.outcome.as_ref().ok().map(|figures| cells(it.name, figures, unit, longest));
    let rows: Vec<Option<[String; 6]>> = compared.iter().map(row).collect();
    let mut widths = HEAD.map(str::len);
    widths[0] = compared.iter().map(|it| it.name.len()).max().unwrap_or(0).max(widths[0]);
    for row in rows.iter().flatten() {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = cell.len().max(*width);
        }
    }
    let mut text = String::new();
    let mut line = |cells: [&str; 6]| {
        let cells = cells.iter().zip(widths).enumerate().map(|(index, (cell, width))| match index {
            0 => format!("{cell:width$}"),
            _ => format!("{cell:>width$}"),
        });
        text.push_str(&format!("{}\n", cells.collect::<Vec<_>>().join("  ")));
    };
    line(HEAD);
    for row in rows.iter().flatten() {
        line(row.each_ref().map(String::as_str));
    }
    for Compared { name, outcome } in compared {
        if let Err(reason) = outcome {
            text.push_str(&format!("{name:width$}  {reason}\n", width = widths[0]));
        }
    }
    text + note(compared, unit) + "\n"
}

/// Returns the page of the comparison.
pub(crate) fn page(compared: &[Compared], unit: TimeUnit) -> String {
    let longest = longest(compared);
    let row = |it: &Compared| match &it.outcome {
        Ok(figures) => cells(it.name, figures, unit, longest).to_vec(),
        Err(reason) => vec![it.name.to_owned(), reason.clone()],
    };
    let pictures = compared.iter().filter_map(|it| {
        let timeline = &it.outcome.as_ref().ok()?.timeline;
        Some(ComparedPicture { name: it.name, timeline })
    });
    let ranks = compared.iter().find_map(|it| Some(it.outcome.as_ref().ok()?.ranks)).unwrap_or(0);
    let title = format!("{} on {}", counted(compared.len(), "schedule"), counted(ranks, "rank"));
    let rows: Vec<Vec<String>> = compared.iter().map(row).collect();
    comparison(&Comparison {
        title: &title,
        head: &HEAD,
        rows: &rows,
        note: note(compared, unit),
        pictures: &pictures.collect::<Vec<_>>(),
        unit,
    })
}
