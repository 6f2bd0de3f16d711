//! Draws a step of 1F1B on four ranks, as the timed simulation predicts it: the picture in the README.
//!
//! ```text
//! cargo run -p pipewright-schedule --example picture > docs/images/1f1b.svg
//! ```

use std::error::Error;
use std::io::Write;

use pipewright_schedule::lower::{TrainingLowering, for_training};
use pipewright_schedule::picture::{PictureSettings, TimeUnit, computation_of, svg};
use pipewright_schedule::simulate::timed;
use pipewright_schedule::{Costs, ScheduleSpec, generate};

fn main() -> Result<(), Box<dyn Error>> {
    let spec = ScheduleSpec { ranks: 4, microbatches: 8, ..ScheduleSpec::default() };
    let schedule = generate("1f1b", &spec)?;
    let program = for_training(&schedule, &TrainingLowering::default())?;
    let run = timed(program.as_program(), &Costs::default())?;
    let title = "1f1b: 4 ranks, 8 microbatches";
    let settings = PictureSettings { title, unit: TimeUnit::Costs, ..PictureSettings::default() };
    std::io::stdout().write_all(svg(&computation_of(&schedule, run.timeline()), &settings).as_bytes())?;
    Ok(())
}
