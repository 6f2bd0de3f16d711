//! Schedules side by side: their figures as a table, as JSON, and as a page.
//!
//! The schedules train the same model. A schedule with several stages on a rank divides the rank's share of the model among
//! them, so that its costs are [`Costs::shared`](crate::Costs::shared).

use serde::Serialize;

use crate::action::Action;
use crate::bytes::bytes_text;
use crate::picture::{ComparedPicture, Comparison, TimeUnit, comparison, computation_of};
use crate::schedule::{Program, Schedule};
use crate::simulate::Summary;
use crate::timeline::Timeline;
use crate::words::counted;

/// A schedule in the comparison: its figures, or the reason why there are no figures.
#[derive(Debug, Clone)]
pub struct Compared {
    /// The schedule's name.
    pub name: String,
    /// The figures, or a sentence.
    pub outcome: Result<Figures, String>,
}

/// The figures of a schedule that can run.
#[derive(Debug, Clone)]
pub struct Figures {
    /// The figures of the predicted run.
    pub summary: Summary,
    /// The number of ranks.
    pub ranks: u32,
    /// The number of stages on each rank.
    pub stages_per_rank: u32,
    /// The number of microbatches of a step.
    pub microbatches: u32,
    /// The number of messages in a step, over all ranks.
    pub messages: usize,
    /// The schedule's computations in the predicted run.
    pub timeline: Timeline,
}

impl Figures {
    /// Returns the figures of the predicted `run` of the program of a schedule.
    pub fn of(summary: Summary, program: &Program, schedule: &Schedule, run: &Timeline) -> Self {
        let sends = |action: &&Action| action.kind().is_send();
        Self {
            summary,
            ranks: program.ranks(),
            stages_per_rank: schedule.placement().stages_per_rank(),
            microbatches: program.microbatches() / program.slices().get(),
            messages: program.rows().iter().flatten().filter(sends).count(),
            timeline: computation_of(schedule, run),
        }
    }

    /// Returns the most activations that a rank holds, in units of the activations of all layers of a rank for one
    /// microbatch.
    pub fn peak_share(&self) -> f64 {
        let parts = self.stages_per_rank.max(1) * self.summary.slices.unwrap_or(1);
        most(&self.summary.peak_activations) as f64 / f64::from(parts)
    }

    /// Returns the memory of the rank that holds the most: its bytes if they are known, otherwise [`Self::peak_share`].
    pub fn memory_text(&self) -> String {
        match self.peak_bytes() {
            Some(bytes) => bytes_text(bytes),
            None => ((self.peak_share() * 100.0).round() / 100.0).to_string(),
        }
    }

    /// Returns the most bytes that a rank holds; `None` if they are not known.
    pub fn peak_bytes(&self) -> Option<u64> {
        self.summary.peak_bytes.as_deref().map(most)
    }
}

fn most(peaks: &[u64]) -> u64 {
    peaks.iter().max().copied().unwrap_or(0)
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
pub fn json(compared: &[Compared]) -> String {
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

/// The titles of the columns of the table.
pub const HEAD: [&str; 6] = ["schedule", "stages per rank", "time", "bubble", "memory", "messages"];

/// Returns the cells of a schedule that can run. `longest` is the longest time of the table.
fn cells(name: &str, figures: &Figures, unit: TimeUnit, longest: f64) -> [String; 6] {
    [
        name.to_owned(),
        figures.stages_per_rank.to_string(),
        unit.format(figures.summary.makespan, longest),
        format!("{:.1}%", figures.summary.bubble_fraction * 100.0),
        figures.memory_text(),
        figures.messages.to_string(),
    ]
}

fn longest(compared: &[Compared]) -> f64 {
    let times = compared.iter().filter_map(|it| Some(it.outcome.as_ref().ok()?.summary.makespan));
    times.fold(0.0, f64::max)
}

/// Returns the sentence that says what the columns count.
pub fn note(compared: &[Compared], unit: TimeUnit) -> &'static str {
    let has_bytes =
        compared.iter().any(|it| it.outcome.as_ref().is_ok_and(|it| it.summary.peak_bytes.is_some()));
    match (unit, has_bytes) {
        (TimeUnit::Seconds, _) | (_, true) => {
            "memory: of the rank that holds the most; messages: of all ranks in a step"
        }
        (TimeUnit::Costs, false) => {
            "time: in the unit of the costs; memory: activations of a rank's layers for one microbatch, of the rank \
             that holds the most; messages: of all ranks in a step"
        }
    }
}

/// Returns the comparison as a table.
pub fn text(compared: &[Compared], unit: TimeUnit) -> String {
    let longest = longest(compared);
    let row = |it: &Compared| it.outcome.as_ref().ok().map(|figures| cells(&it.name, figures, unit, longest));
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

/// Returns the rows of the table below [`HEAD`]. The row of a schedule that cannot run has its name and the reason.
pub fn rows(compared: &[Compared], unit: TimeUnit) -> Vec<Vec<String>> {
    let longest = longest(compared);
    let row = |it: &Compared| match &it.outcome {
        Ok(figures) => cells(&it.name, figures, unit, longest).to_vec(),
        Err(reason) => vec![it.name.clone(), reason.clone()],
    };
    compared.iter().map(row).collect()
}

/// Returns the page of the comparison.
pub fn page(compared: &[Compared], unit: TimeUnit) -> String {
    let pictures = compared.iter().filter_map(|it| {
        let timeline = &it.outcome.as_ref().ok()?.timeline;
        Some(ComparedPicture { name: &it.name, timeline })
    });
    let ranks = compared.iter().find_map(|it| Some(it.outcome.as_ref().ok()?.ranks)).unwrap_or(0);
    let title = format!("{} on {}", counted(compared.len(), "schedule"), counted(ranks, "rank"));
    let rows = rows(compared, unit);
    comparison(&Comparison {
        title: &title,
        head: &HEAD,
        rows: &rows,
        note: note(compared, unit),
        pictures: &pictures.collect::<Vec<_>>(),
        unit,
    })
}
