//! Draws a step of 1F1B on four ranks, as the timed simulation predicts it: the picture in the README.
//!
//! ```text
//! cargo run -p pipewright-schedule --example picture > docs/images/1f1b.svg
//! ```

use std::error::Error;
use std::io::Write;

use pipewright_schedule::picture::{PictureSettings, svg};
use pipewright_schedule::simulate::timed;
use pipewright_schedule::{Costs, Level, LowerConfig, ScheduleSpec, generate, lower};

fn main() -> Result<(), Box<dyn Error>> {
    let spec = ScheduleSpec { ranks: 4, microbatches: 8, ..ScheduleSpec::default() };
    let program = lower(&generate("1f1b", &spec)?, &LowerConfig::from(Level::Comms))?;
    let run = timed(&program, &Costs::default())?;
    let settings = PictureSettings { title: "1f1b: 4 ranks, 8 microbatches", ..PictureSettings::default() };
    std::io::stdout().write_all(svg(run.timeline(), &settings).as_bytes())?;
    Ok(())
}
