//! Measures the gap between two steps: the time in which no rank runs an action of a program, as milliseconds
//! and as a share of the step, with its parts. Steps that begin after the results of the one before are
//! written, with the metrics and a timeline, are compared with steps that begin during it
//! (`Trainer::step_ahead`), and with `--post-validation` both with updates before the gradient norm.

use std::time::Duration;

use pipewright::pipeline::{StepGap, StepSummary};
use pipewright::train::data::DataConfig;
use pipewright::train::{RunLog, Trainer};
use pipewright::transport::World;
use tempfile::TempDir;

use crate::harness::{Outcome, Spread, as_process, in_processes};
use crate::model::{Bench, SEQUENCE, Setup, VOCABULARY, random_numbers};

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
    /// Also measure pipelines whose ranks update while the gradient norm is computed.
    #[arg(long)]
    post_validation: bool,
    /// Run as one of the processes.
    #[arg(long, hide = true)]
    child: bool,
}

/// A gradient norm that no step of the bench model reaches, so that no update is repaired.
const CLIP_NORM: f64 = 1e6;

pub(crate) fn run(options: &Options) -> Outcome {
    for schedule in &options.schedules {
        if options.child {
            as_process(|world| {
                let measured = Measured::launch(world, schedule, 2, options, options.post_validation)?;
                measure(vec![measured], schedule, 2, options)
            })?;
        } else if options.processes {
            let (microbatches, steps) = (options.microbatches.to_string(), options.steps.to_string());
            let sizes = ["--microbatches", &microbatches, "--steps", &steps];
            let arguments = [&["gaps", "--child", "--schedules", schedule][..], &sizes].concat();
            println!("processes, {}", in_processes::<String>(&arguments)?);
            if options.post_validation {
                let early = [&arguments[..], &["--post-validation"]].concat();
                println!("processes, {}", in_processes::<String>(&early)?);
            }
        } else {
            for &ranks in &options.ranks {
                let launch = |early| Measured::launch(World::local(ranks), schedule, ranks, options, early);
                let mut measured = vec![launch(false)?];
                if options.post_validation {
                    measured.push(launch(true)?);
                }
                println!("{}", measure(measured, schedule, ranks, options)?);
            }
        }
    }
    Ok(())
}

/// The turns of steps alone and of steps ahead, one after the other.
const TURNS: usize = 5;

/// A pipeline, and its steps that count.
struct Measured {
    trainer: Trainer,
    log: RunLog,
    /// The folder of the log.
    _folder: TempDir,
    /// Whether ranks update while the gradient norm is computed.
    post_validation: bool,
    alone: Vec<StepSummary>,
    ahead: Vec<StepSummary>,
}

impl Measured {
    fn launch(
        world: World,
        schedule: &str,
        ranks: u32,
        options: &Options,
        post_validation: bool,
    ) -> Outcome<Self> {
        let setup = Setup::new(schedule, ranks, options.microbatches);
        let bench = Bench::over(world, &Setup { clip_norm: CLIP_NORM, post_validation, ..setup })?;
        let data = DataConfig { seq_len: SEQUENCE, ..DataConfig::default() };
        let text: String =
            random_numbers().take(1 << 20).map(|number| char::from(b'a' + (number % 26) as u8)).collect();
        let rows = data.open_text(&text, VOCABULARY, options.microbatches as usize)?;
        let folder = tempfile::tempdir()?;
        Ok(Self {
            trainer: bench.into_trainer(rows),
            log: RunLog::open(folder.path(), 0)?,
            _folder: folder,
            post_validation,
            alone: Vec::new(),
            ahead: Vec::new(),
        })
    }

    /// Describes the gaps, and returns the median of those before steps that begin ahead, in milliseconds.
    fn text(&self) -> (String, f64) {
        let [(alone, before), (ahead, after)] = [gaps_of(&self.alone), gaps_of(&self.ahead)];
        let early = if self.post_validation { early_updates_of(&self.ahead) } else { String::new() };
        let text = format!(
            "\n  after the results: {alone}\n  during the step:   {ahead}\n  ratio of the medians: {:.2}{early}",
            after / before
        );
        (text, after)
    }
}

/// Returns lines with the gaps between steps of the bench model. Their metrics and timelines are written, as
/// in a run. The turns alternate, also between pipelines, so that a drift of the machine affects all.
fn measure(mut measured: Vec<Measured>, schedule: &str, ranks: u32, options: &Options) -> Outcome<String> {
    let count = options.steps.div_ceil(TURNS);
    for _ in 0..TURNS {
        for Measured { trainer, log, alone, ahead, .. } in &mut measured {
            alone.extend(steps(trainer, log, count, false)?);
            ahead.extend(steps(trainer, log, count, true)?);
        }
    }
    let mut text = format!("{schedule} on {ranks} ranks");
    let mut medians = Vec::new();
    for measured in &measured {
        let (lines, median) = measured.text();
        text += if measured.post_validation { "\n with post-validation" } else { "\n the norm first" };
        text += &lines;
        medians.push(median);
    }
    if let [first, early] = medians[..] {
        text += &format!("\n ratio of the gaps during the step: {:.2}", early / first);
    }
    Ok(text)
}

/// Describes the updates before the norm, and how many steps have repaired them.
fn early_updates_of(steps: &[StepSummary]) -> String {
    let milliseconds = |step: &StepSummary| {
        step.early_update.iter().map(|time| time.as_secs_f64() * 1e3).fold(0.0, f64::max)
    };
    let longest = Spread::new(steps.iter().map(milliseconds).collect());
    let repaired = steps.iter().filter(|step| step.repaired).count();
    format!(
        "\n  longest update before the norm: {longest:.2} ms; {repaired} of {} steps repaired",
        steps.len()
    )
}

/// Takes steps, each after the results of the one before are written, or during it. Returns all but the first
/// two.
fn steps(trainer: &mut Trainer, log: &mut RunLog, count: usize, ahead: bool) -> Outcome<Vec<StepSummary>> {
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
