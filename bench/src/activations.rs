//! Measured peaks of activations against the simulator's, rank by rank.
//!
//! What a microbatch's activations of a stage take is measured first: GPipe with one stage a rank holds all of them at
//! once, so its peak grows by one activation for each microbatch more. What its peak has beside them is the stage's
//! parameters, gradients and optimizer state (16 bytes a parameter) and passing memory of the operations. A schedule's
//! peak less those two (passing memory once a rank) is its peak of activations; the prediction is the simulator's, at
//! the measured sizes, an activation held from `F` until its last backward has ended.

use std::error::Error;

use pipewright_schedule::costs::StageSizes;
use pipewright_schedule::simulate::summarize;
use pipewright_schedule::{Costs, StageIndex};

use crate::model::{Bench, parameters};
use crate::statistics::Spread;

/// Size of the measurement.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Ranks.
    #[arg(long, default_value_t = 2)]
    ranks: u32,
    /// Microbatches of a step.
    #[arg(long, default_value_t = 8)]
    microbatches: u32,
    /// The schedules.
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "gpipe,1f1b,zb-h1,zb-h2,interleaved1f1b,zbvzerobubble,dualpipev,v-half,v-min"
    )]
    schedules: Vec<String>,
}

/// Bytes of one parameter with its gradient and both moments.
const STATIC: f64 = 16.0;
const MIB: f64 = (1 << 20) as f64;

/// What one stage takes, in bytes.
#[derive(Clone, Copy)]
struct StageBytes {
    /// Parameters, gradients, optimizer state.
    fixed: f64,
    /// Beside them and the activations, while an operation runs.
    passing: f64,
    /// One microbatch's activations.
    activation: f64,
}

pub(crate) fn run(options: &Options) -> Result<(), Box<dyn Error>> {
    for schedule in &options.schedules {
        let mut bench = Bench::new(schedule, options.ranks, options.microbatches)?;
        let placement = bench.program().placement().clone();
        let stages = measure_stages(placement.stages())?;
        let size = |stage: &StageBytes| {
            let activation = stage.activation as u64;
            StageSizes { activation, stash: activation, ..StageSizes::default() }
        };
        let costs = Costs { sizes: stages.iter().map(size).collect(), ..Costs::default() };
        let predicted = summarize(bench.program().as_program(), &costs)?.peak_bytes.unwrap_or_default();
        let report = bench.steps(2, 1)?.pop().ok_or("a step was taken")?;
        for rank in placement.all_ranks() {
            let own = |stage: &StageIndex| stages[stage.index()];
            let own: Vec<StageBytes> = placement.stages_of(rank).iter().map(own).collect();
            let fixed: f64 = own.iter().map(|stage| stage.fixed).sum();
            let passing = own.iter().map(|stage| stage.passing).fold(0.0, f64::max);
            let measured = report.peak_bytes[rank.index()] as f64 - fixed - passing;
            let predicted = predicted[rank.index()] as f64;
            println!(
                "{schedule}, rank {rank}: {:.1} MiB of activations, {:.1} predicted: {:.3}",
                measured / MIB,
                predicted / MIB,
                measured / predicted
            );
        }
    }
    Ok(())
}

/// What each stage of so many takes.
fn measure_stages(stages: u32) -> Result<Vec<StageBytes>, Box<dyn Error>> {
    let few = peaks(stages, stages)?;
    let many = peaks(stages, 3 * stages)?;
    let fixed = parameters(stages)?.into_iter().map(|count| STATIC * count as f64);
    let of_stage = |((few, many), fixed): ((f64, f64), f64)| {
        let activation = (many - few) / f64::from(2 * stages);
        StageBytes { fixed, passing: few - f64::from(stages) * activation - fixed, activation }
    };
    Ok(few.into_iter().zip(many).zip(fixed).map(of_stage).collect())
}

/// Peak bytes of each rank under GPipe with one stage a rank.
fn peaks(ranks: u32, microbatches: u32) -> Result<Vec<f64>, Box<dyn Error>> {
    let reports = Bench::new("gpipe", ranks, microbatches)?.steps(2, 2)?;
    let of_rank = |rank| {
        let peaks = reports.iter().map(|report| report.peak_bytes[rank] as f64).collect();
        Spread::new(peaks).median()
    };
    Ok((0..ranks as usize).map(of_rank).collect())
}
