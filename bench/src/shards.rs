//! Compares the memory of a rank if parameters are sharded over replicas with its memory if they are
//! replicated.
//!
//! Short rows keep activations small, so the peak of a rank is parameters, gradients and optimizer state
//! (AdamW: four numbers a parameter). With sharded parameters a rank needs `1 / replicas` of that, and the
//! parameters and gradients of the stages that are gathered at once. Under looped BFS a stage runs all its
//! microbatches consecutively, so only one stage has gradients at a time; other schedules hold the gradients
//! of all stages of a rank until they are reduced.

use std::num::NonZeroU32;

use pipewright::mesh::DataParallelMode;
use pipewright::transport::World;

use crate::harness::{Outcome, Spread};
use crate::model::{Bench, Setup, parameters};

/// Size of the measurement.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// The schedule.
    #[arg(long, default_value = "loopedbfs")]
    schedule: String,
    /// Ranks of one pipeline.
    #[arg(long, default_value_t = 1)]
    ranks: u32,
    /// Stages of a rank.
    #[arg(long, default_value_t = 8)]
    stages_per_rank: u32,
    /// Replicas.
    #[arg(long, value_delimiter = ',', default_value = "2,4")]
    replicas: Vec<u32>,
    /// The number of stages of a rank that are gathered at once.
    #[arg(long, default_value = "1")]
    window: NonZeroU32,
    /// Microbatches of one pipeline.
    #[arg(long, default_value_t = 4)]
    microbatches: u32,
    /// Tokens of a row.
    #[arg(long, default_value_t = 8)]
    sequence: usize,
}

const MIB: f64 = (1 << 20) as f64;
/// Bytes of a single-precision number.
const NUMBER: f64 = 4.0;

pub(crate) fn run(options: &Options) -> Outcome {
    for &replicas in &options.replicas {
        let (whole, whole_time) = measure(options, replicas, DataParallelMode::Replicated)?;
        let (parts, parts_time) = measure(options, replicas, DataParallelMode::Sharded)?;
        let of_stages = parameters(options.ranks * options.stages_per_rank)?;
        let largest = of_stages.iter().copied().max().ok_or("a model has stages")? as f64;
        let state = 4.0 * NUMBER * of_stages.iter().sum::<u64>() as f64 / f64::from(options.ranks);
        // Other memory is the same in both modes.
        let beside = whole - state;
        let held = parts - beside;
        // The parameters and gradients of the gathered stages.
        let window = 2.0 * NUMBER * largest * f64::from(options.window.get());
        let limit = state / f64::from(replicas) + window;
        println!(
            "{}, {replicas} replicas: {:.1} MiB of parameters, gradients and optimizer state replicated, {:.1} MiB \
             sharded: {:.3} of it, {:.3} of 1/{replicas} and the window; {:.1} MiB of other memory; {:.2} x the time",
            options.schedule,
            state / MIB,
            held / MIB,
            held / state,
            held / limit,
            beside / MIB,
            parts_time / whole_time
        );
    }
    Ok(())
}

/// Returns the largest peak of any rank in bytes, and the median time of a step in seconds.
fn measure(options: &Options, replicas: u32, mode: DataParallelMode) -> Outcome<(f64, f64)> {
    let setup = Setup {
        stages_per_rank: Some(options.stages_per_rank),
        sequence: options.sequence,
        replicas,
        mode,
        window: options.window,
        ..Setup::new(&options.schedule, options.ranks, options.microbatches)
    };
    let mut bench = Bench::over(World::local(options.ranks * replicas), &setup)?;
    let reports = bench.steps(2, 3)?;
    let peaks = reports.iter().flat_map(|report| &report.peak_bytes).copied();
    let times = reports.iter().map(|report| report.wall.as_secs_f64()).collect();
    Ok((peaks.max().unwrap_or_default() as f64, Spread::new(times).median()))
}
