//! Measures the gap between two steps: the time in which no rank runs an action of a program, as milliseconds
//! and as a share of the step, with its parts. Steps that begin after the results of the one before are
//! written, with the metrics and a timeline, are compared with steps that begin during it
//! (`Trainer::step_ahead`).

use std::error::Error;
use std::time::Duration;

use pipewright::pipeline::{StepGap, StepSummary};
use pipewright::train::data::DataConfig;
use pipewright::train::{RunLog, Trainer};
use pipewright::transport::World;

use crate::model::{Bench, SEQUENCE, Setup, VOCABULARY, random_numbers};
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
    /// Steps that count, over all turns; the first two of each turn do not.
    #[arg(long, default_value_t = 20)]
    steps: usize,
    /// Two processes over MPI, instead of threads.
    #[arg(long, conflicts_with = "ranks")]
    processes: bool,
    /// Run as one of the processes.
    #[arg(long, hide = true)]
    child: bool,
}

pub(crate) fn run(options: &Options) -> Result<(), Box<dyn Error>> {
    for schedule in &options.schedules {
        if options.child {
            let world = World::mpi(Duration::from_secs(60))?;
            let is_first = world.own_ranks().any(|rank| rank.get() == 0);
            let text = measure(world, schedule, 2, options)?;
            if is_first {
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

/// The turns of steps alone and of steps ahead, one after the other.
const TURNS: usize = 5;

/// Returns lines with the gaps between steps of the bench model. Their metrics and timelines are written, as
/// in a run. The turns alternate, so that a drift of the machine affects both.
fn measure(world: World, schedule: &str, ranks: u32, options: &Options) -> Result<String, Box<dyn Error>> {
    let bench = Bench::over(world, &Setup::new(schedule, ranks, options.microbatches))?;
    let data = DataConfig { seq_len: SEQUENCE, ..DataConfig::default() };
    let text: String =
        random_numbers().take(1 << 20).map(|number| char::from(b'a' + (number % 26) as u8)).collect();
    let rows = data.open_text(&text, VOCABULARY, options.microbatches as usize)?;
    let (mut trainer, folder) = (bench.into_trainer(rows), tempfile::tempdir()?);
    let mut log = RunLog::open(folder.path(), 0)?;
    let (mut alone, mut ahead) = (Vec::new(), Vec::new());
    for _ in 0..TURNS {
        alone.extend(steps(&mut trainer, &mut log, options.steps.div_ceil(TURNS), false)?);
        ahead.extend(steps(&mut trainer, &mut log, options.steps.div_ceil(TURNS), true)?);
    }
    let [(alone, before), (ahead, after)] = [gaps_of(&alone), gaps_of(&ahead)];
    Ok(format!(
        "{schedule} on {ranks} ranks\n  after the results: {alone}\n  during the step:   {ahead}\n  \
         ratio of the medians: {:.2}",
        after / before
    ))
}

/// Takes steps, each after the results of the one before are written, or during it. Returns all but the first
/// two.
fn steps(
    trainer: &mut Trainer,
    log: &mut RunLog,
    count: usize,
    ahead: bool,
) -> Result<Vec<StepSummary>, Box<dyn Error>> {
    let mut summaries = Vec::new();
    for step in 1..=count + 2 {
        let (metrics, summary) =
            if ahead && step < count + 2 { trainer.step_ahead()? } else { trainer.step()? };
        log.step(&metrics, &summary)?;
        log.keep_timeline(&summary)?;
        summaries.push(summary);
    }
    Ok(summaries.split_off(2))
}

/// Describes the gaps before steps, and returns their median in milliseconds.
fn gaps_of(steps: &[StepSummary]) -> (String, f64) {
    let gaps: Vec<(&StepGap, f64)> =
        steps.iter().filter_map(|step| Some((step.gap.as_ref()?, step.wall.as_secs_f64()))).collect();
    let of = |part: fn(&StepGap) -> Duration| {
        Spread::new(gaps.iter().map(|(gap, _)| part(gap).as_secs_f64() * 1e3).collect())
    };
    let shares = gaps.iter().map(|(gap, step)| 1e2 * gap.critical.as_secs_f64() / step).collect();
    let gap = of(|gap| gap.critical);
    let text = format!(
        "gap {gap:.2} ms, {:.1} % of a step; sums and norm {:.2} ms, update {:.2} ms, between {:.2} ms",
        Spread::new(shares),
        of(|gap| gap.sums),
        of(|gap| gap.update),
        of(|gap| gap.between)
    );
    (text, gap.median())
}
