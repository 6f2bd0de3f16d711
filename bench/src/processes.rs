//! Compares two processes over MPI with two threads: the throughput, and the exposed time of communication.
//!
//! Both alternate. The processes run this program under `mpirun`; the first prints its figures as JSON.

use std::error::Error;
use std::process::Command;
use std::time::Duration;

use pipewright::pipeline::StepSummary;
use pipewright::transport::World;

use crate::model::{Bench, Setup};
use crate::statistics::Spread;

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
struct Figures {
    rate: f64,
    exposed: f64,
}

pub(crate) fn run(options: &Options) -> Result<(), Box<dyn Error>> {
    if options.child {
        return run_child(options);
    }
    let (mut ratios, mut exposed) = (Vec::new(), Vec::new());
    for turn in 1..=options.turns {
        let threads = measure(World::local(RANKS), options)?;
        let processes = run_processes(&options.schedule, options.steps)?;
        let ratio = processes.rate / threads.rate;
        println!(
            "turn {turn}: processes {:.0} tokens/s, threads {:.0}: {ratio:.3}; exposed {:.2}% and {:.2}%",
            processes.rate,
            threads.rate,
            1e2 * processes.exposed,
            1e2 * threads.exposed
        );
        ratios.push(ratio);
        exposed.push(1e2 * processes.exposed);
    }
    println!("processes over threads: {}", Spread::new(ratios));
    println!("exposed communication:  {} % of a step", Spread::new(exposed));
    Ok(())
}

fn measure(world: World, options: &Options) -> Result<Figures, Box<dyn Error>> {
    let mut bench = Bench::over(world, &Setup::new(&options.schedule, RANKS, MICROBATCHES))?;
    let reports = bench.steps(2, options.steps.saturating_sub(2).max(1))?;
    let rates = reports.iter().map(|report| bench.tokens as f64 / report.wall.as_secs_f64()).collect();
    let exposed = reports.iter().map(StepSummary::exposed_communication_fraction).collect();
    Ok(Figures { rate: Spread::new(rates).median(), exposed: Spread::new(exposed).median() })
}

fn run_child(options: &Options) -> Result<(), Box<dyn Error>> {
    let world = World::mpi(Duration::from_secs(60))?;
    let speaks = world.own_ranks().any(|rank| rank.get() == 0);
    let Figures { rate, exposed } = measure(world, options)?;
    if speaks {
        println!("{}", serde_json::json!({ "rate": rate, "exposed": exposed }));
    }
    Ok(())
}

/// Returns the median tokens per second of the bench model in two processes.
pub(crate) fn rate(schedule: &str, steps: usize) -> Result<f64, Box<dyn Error>> {
    Ok(run_processes(schedule, steps)?.rate)
}

fn run_processes(schedule: &str, steps: usize) -> Result<Figures, Box<dyn Error>> {
    let steps = steps.to_string();
    let figures = mpirun(&["processes", "--child", "--schedule", schedule, "--steps", &steps])?;
    let figures: serde_json::Value = serde_json::from_str(&figures)?;
    let figure = |name: &str| figures[name].as_f64().ok_or_else(|| format!("no `{name}` in {figures}"));
    Ok(Figures { rate: figure("rate")?, exposed: figure("exposed")? })
}

/// Runs this program in two processes, and returns what they print.
pub(crate) fn mpirun(arguments: &[&str]) -> Result<String, Box<dyn Error>> {
    let output = Command::new("mpirun")
        .args(["-n", &RANKS.to_string()])
        .arg(std::env::current_exe()?)
        .args(arguments)
        // In a container the only user is often root.
        .env("OMPI_ALLOW_RUN_AS_ROOT", "1")
        .env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
        .output()
        .map_err(|error| format!("mpirun: {error}; install MPI first"))?;
    if !output.status.success() {
        return Err(format!("the processes failed: {}", String::from_utf8_lossy(&output.stderr)).into());
    }
    Ok(String::from_utf8(output.stdout)?)
}
