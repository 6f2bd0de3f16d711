//! Predicts a setup: the answer to `simulate`, with the figures, the page of the picture, and the commands.

use pipewright_schedule::bytes::bytes_text;
use pipewright_schedule::lower::ProgramSource;
use pipewright_schedule::picture::{PictureSettings, TimeUnit, View, title, view, with_whole_overlaps};
use pipewright_schedule::simulate::{Summary, few_microbatches, logical, timed};
use pipewright_schedule::{LowerConfig, Program, Rank, Schedule, Timeline, generate};
use serde_json::{Value, json};

use crate::commands::{command, python};
use crate::setup::Setup;

/// A predicted run.
pub(crate) struct Prediction {
    pub(crate) schedule: Schedule,
    pub(crate) program: Program,
    pub(crate) timeline: Timeline,
    pub(crate) summary: Summary,
}

impl Prediction {
    /// Predicts the program that `pipewright train` runs, like `pipewright simulate`.
    pub(crate) fn of(setup: &Setup) -> Result<Self, String> {
        let schedule = generate(setup.generator.name, &setup.spec).map_err(|error| error.to_string())?;
        let source = ProgramSource::Schedule(schedule.clone());
        let program =
            source.program(&LowerConfig::training_at(&setup.costs)).map_err(|error| error.to_string())?;
        let program = program.into_program();
        let run = timed(&program, &setup.costs).map_err(|error| error.to_string())?;
        let steps = logical(&program).map_err(|error| error.to_string())?.steps();
        let summary = Summary::of(&run, steps, &setup.costs);
        Ok(Self { schedule, program, timeline: run.timeline().clone(), summary })
    }

    /// Returns the time that the busiest rank computes. No order of the same actions takes less.
    fn busiest(&self) -> f64 {
        let ranks = (0..self.timeline.ranks()).map(Rank::new);
        ranks.map(|rank| self.timeline.busy(rank)).fold(0.0, f64::max)
    }
}

/// Returns the answer for a setup.
pub(crate) fn simulate(setup: &Setup) -> Result<Value, String> {
    let prediction = Prediction::of(setup)?;
    let Prediction { schedule, program, timeline, summary } = &prediction;
    // Halves that alternate are one cell.
    let drawn =
        if setup.costs.has_exchanges() { with_whole_overlaps(timeline, program) } else { timeline.clone() };
    let title = title(setup.generator.name, program);
    let unit = TimeUnit::Costs;
    let picture = view(&View {
        settings: PictureSettings {
            title: &title,
            sizes: &setup.costs.sizes,
            unit,
            ..PictureSettings::default()
        },
        predicted: &drawn,
        program,
        costs: &setup.costs,
        steps: &[],
        left_out: 0,
        whole_step: None,
        other_programs: &[],
        reads_base: false,
    });
    let format = |time: f64| unit.format(time, summary.makespan);
    Ok(json!({
        "title": title,
        "summary": summary,
        "time": format(summary.makespan),
        "busiest": format(prediction.busiest()),
        "memory": summary.peak_bytes.as_ref().map(|peaks| peaks.iter().copied().map(bytes_text).collect::<Vec<_>>()),
        "note": few_microbatches(schedule).map(|note| note.to_string()),
        "command": command(setup),
        "python": python(setup),
        "picture": picture,
    }))
}
