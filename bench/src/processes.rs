//! Compares two processes over MPI with two threads: the throughput, and the exposed time of communication.
//!
//! Both alternate. The processes run this program under `mpirun`; the first prints its figures as JSON.

use pipewright::pipeline::StepSummary;
use pipewright::transport::World;
use serde::{Deserialize, Serialize};

use crate::harness::{Figures, Outcome, Spread, as_process, in_processes};
use crate::model::{Bench, Setup};

/// Size of the measurement.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// The schedule of both sides.
    #[arg(long, default_value = "1f1b")]
    schedule: String,
    /// Turns that count.
    #[arg(long, default_value_t = 5)]
    turns: usize,
    /// Steps of each turn; the first two do not count.
    #[arg(long, default_value_t = 6)]
    steps: usize,
    /// Run as one of the processes.
    #[arg(long, hide = true)]
    child: bool,
}

const RANKS: u32 = 2;
const MICROBATCHES: u32 = 8;

/// The median tokens per second, and the share of the time in which ranks waited for communication.
#[derive(Serialize, Deserialize)]
struct Measured {
    rate: f64,
    exposed: f64,
}

pub(crate) fn run(options: &Options) -> Outcome {
    if options.child {
        return as_process(|world| measure(world, options));
    }
    let mut figures = Figures::default();
    for turn in 1..=options.turns {
        let threads = measure(World::local(RANKS), options)?;
        let processes = of_processes(&options.schedule, options.steps)?;
        let ratio = processes.rate / threads.rate;
        println!(
            "turn {turn}: processes {:.0} tokens/s, threads {:.0}: {ratio:.3}; exposed {:.2}% and {:.2}%",
            processes.rate,
            threads.rate,
            1e2 * processes.exposed,
            1e2 * threads.exposed
        );
        figures.add("processes over threads", ratio);
        figures.add("exposed communication, % of a step", 1e2 * processes.exposed);
    }
    print!("{figures}");
    Ok(())
}

fn measure(world: World, options: &Options) -> Outcome<Measured> {
    let mut bench = Bench::over(world, &Setup::new(&options.schedule, RANKS, MICROBATCHES))?;
    let reports = bench.steps(2, options.steps.saturating_sub(2).max(1))?;
    let rates = reports.iter().map(|report| bench.tokens as f64 / report.wall.as_secs_f64()).collect();
    let exposed = reports.iter().map(StepSummary::exposed_communication_fraction).collect();
    Ok(Measured { rate: Spread::new(rates).median(), exposed: Spread::new(exposed).median() })
}

/// Returns the median tokens per second of the bench model in two processes.
pub(crate) fn rate(schedule: &str, steps: usize) -> Outcome<f64> {
    Ok(of_processes(schedule, steps)?.rate)
}

fn of_processes(schedule: &str, steps: usize) -> Outcome<Measured> {
    in_processes(&["processes", "--child", "--schedule", schedule, "--steps", &steps.to_string()])
}
