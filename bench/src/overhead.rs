//! Measures the overhead of the runtime per action, with stages that return their input.

use pipewright_schedule::Rank;

use crate::epilogue::Idle;
use crate::harness::{Outcome, Spread};
use crate::model::Setup;

/// Size of the measurement.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Ranks.
    #[arg(long, default_value_t = 2)]
    ranks: u32,
    /// Microbatches of a step.
    #[arg(long, default_value_t = 512)]
    microbatches: u32,
    /// Steps that count.
    #[arg(long, default_value_t = 20)]
    steps: usize,
}

pub(crate) fn run(options: &Options) -> Outcome {
    for schedule in ["1f1b", "gpipe"] {
        measure(schedule, options)?;
    }
    Ok(())
}

fn measure(schedule: &str, &Options { ranks, microbatches, steps }: &Options) -> Outcome {
    // The program has the actions of the schedule. With split backwards, each half would count as an action.
    let setup = Setup { send_early: false, ..Setup::new(schedule, ranks, microbatches) };
    let mut idle = Idle::launch(setup, 0)?;
    let program = idle.pipeline.program();
    let longest = (0..ranks).map(|rank| program.row(Rank::new(rank)).len()).max().unwrap_or(0);
    let mut times = Vec::new();
    for _ in 0..3 + steps {
        times.push(idle.step()?.wall.as_secs_f64() * 1e6 / longest as f64);
    }
    println!(
        "{schedule}, {ranks} ranks, {longest} actions per rank: {} microseconds per action",
        Spread::new(times.split_off(3))
    );
    Ok(())
}
