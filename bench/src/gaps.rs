//! Measures the gap between two steps: the time in which no rank runs an action of a program, as milliseconds
//! and as a share of the step, with its parts.

use std::error::Error;
use std::time::Duration;

use pipewright::pipeline::StepGap;
use pipewright::transport::World;

use crate::model::{Bench, Setup};
use crate::processes::mpirun;
use crate::statistics::Spread;

/// Size of the measurement.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Ranks of a pipeline.
    #[arg(long, value_delimiter = ',', default_values_t = [2, 4])]
    ranks: Vec<u32>,
    /// Schedules.
    #[arg(long, value_delimiter = ',', default_values_t = ["1f1b".to_owned(), "zb-h1".to_owned()])]
    schedules: Vec<String>,
    /// Microbatches of a step, each of 256 tokens.
    #[arg(long, default_value_t = 8)]
    microbatches: u32,
    /// Steps that count; the first two do not.
    #[arg(long, default_value_t = 20)]
    steps: usize,
    /// Two processes over MPI, instead of threads.
    #[arg(long)]
    processes: bool,
    /// Run as one of the processes.
    #[arg(long, hide = true)]
    child: bool,
}

pub(crate) fn run(options: &Options) -> Result<(), Box<dyn Error>> {
    for schedule in &options.schedules {
        if options.child {
            let world = World::mpi(Duration::from_secs(60))?;
            let speaks = world.own_ranks().any(|rank| rank.get() == 0);
            let text = measure(world, schedule, 2, options)?;
            if speaks {
                println!("{text}");
            }
        } else if options.processes {
            let (microbatches, steps) = (options.microbatches.to_string(), options.steps.to_string());
            let sizes = ["--microbatches", &microbatches, "--steps", &steps];
            let arguments = [&["gaps", "--child", "--schedules", schedule][..], &sizes].concat();
            print!("processes, {}", mpirun(&arguments)?);
        } else {
            for &ranks in &options.ranks {
                println!("{}", measure(World::local(ranks), schedule, ranks, options)?);
            }
        }
    }
    Ok(())
}

/// Returns a line with the gaps of steps of the bench model.
fn measure(world: World, schedule: &str, ranks: u32, options: &Options) -> Result<String, Box<dyn Error>> {
    let mut bench = Bench::over(world, &Setup::new(schedule, ranks, options.microbatches))?;
    let steps = bench.steps(2, options.steps)?;
    let gaps: Vec<(&StepGap, f64)> = steps
        .iter()
        .filter_map(|step| {
            let gap = step.gap.as_ref()?;
            Some((gap, step.timeline.makespan() + gap.critical.as_secs_f64()))
        })
        .collect();
    let of = |part: fn(&StepGap) -> Duration| {
        Spread::new(gaps.iter().map(|(gap, _)| part(gap).as_secs_f64() * 1e3).collect())
    };
    let shares = gaps.iter().map(|(gap, step)| 1e2 * gap.critical.as_secs_f64() / step).collect();
    Ok(format!(
        "{schedule} on {ranks} ranks: gap {:.2} ms, {:.1} % of a step; sums and norm {:.2} ms, update {:.2} ms, \
         between {:.2} ms",
        of(|gap| gap.critical),
        Spread::new(shares),
        of(|gap| gap.sums),
        of(|gap| gap.update),
        of(|gap| gap.between)
    ))
}
