//! Measures the cost of saving a checkpoint, in percent of a step.
//!
//! There are two figures: how long the call blocks the training loop, and how much longer the steps take
//! while the checkpoint is being written than after that. The second contains the processor time that the
//! writing thread takes from the ranks, if no processor is idle, and the copies of the update. If a
//! checkpoint is not written after `--every` steps, the bench waits for it and does not count that time. Some
//! steps always follow the write.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use pipewright::checkpoint::{CheckpointFolder, CheckpointWriter, TrainingState};

use crate::model::{Bench, Size};
use crate::statistics::Spread;

/// The fewest steps that are taken after a checkpoint was written: their median is the time of a step without
/// a write.
const FEWEST_AFTER: usize = 3;

/// Size of the measurement.
#[derive(clap::Args)]
pub(crate) struct Options {
    #[command(flatten)]
    size: Size,
    /// The fewest steps between two checkpoints.
    #[arg(long, default_value_t = 10)]
    every: usize,
    /// Checkpoints that count.
    #[arg(long, default_value_t = 6)]
    checkpoints: u64,
    /// The folder to write to; the system's folder for temporary files by default.
    #[arg(long)]
    folder: Option<PathBuf>,
}

pub(crate) fn run(options: &Options) -> Result<(), Box<dyn Error>> {
    let parent = options.folder.clone().unwrap_or_else(std::env::temp_dir);
    std::fs::create_dir_all(&parent)?;
    let folder = tempfile::tempdir_in(parent)?;
    let outcome = measure(options, folder.path());
    folder.close()?;
    outcome
}

fn measure(options: &Options, folder: &Path) -> Result<(), Box<dyn Error>> {
    let Options { size: Size { ranks, microbatches }, every, checkpoints, .. } = *options;
    let mut bench = Bench::new("1f1b", ranks, microbatches)?;
    let deadline = Duration::from_secs(60);
    let mut writer = CheckpointWriter::start(CheckpointFolder::own(folder)?, 1, ranks, deadline)?;
    // The first checkpoint allocates memory that the later ones reuse.
    bench.steps(2, 0)?;
    save(&mut bench, &mut writer, 0)?;
    bench.steps(every, 0)?;
    let (mut held_up, mut cost, mut written) = (Vec::new(), Vec::new(), Vec::new());
    for number in 1..=checkpoints {
        let start = Instant::now();
        save(&mut bench, &mut writer, number)?;
        let call = start.elapsed().as_secs_f64();
        let (mut beside, mut after) = (Vec::new(), Vec::new());
        let mut is_written = false;
        for taken in 0.. {
            if taken >= every && !is_written {
                writer.wait()?;
                is_written = true;
            }
            if taken >= every && after.len() >= FEWEST_AFTER {
                break;
            }
            let wall = bench.step()?.wall.as_secs_f64();
            if is_written { &mut after } else { &mut beside }.push(wall);
            is_written |= writer.poll()?.is_some();
        }
        let step = Spread::new(after).median();
        held_up.push(100.0 * call / step);
        cost.push(100.0 * (call + beside.iter().sum::<f64>() - step * beside.len() as f64) / step);
        written.push(beside.len() as f64);
    }
    println!("1f1b, {ranks} ranks, {microbatches} microbatches, a checkpoint every {every} steps or later:");
    println!("  the call blocks training for            {} % of a step", Spread::new(held_up));
    println!("  with slower steps during the write, for {} % of a step", Spread::new(cost));
    println!("  steps until it is written               {}", Spread::new(written));
    Ok(())
}

/// Saves the state of the ranks as the state after `step` steps.
pub(crate) fn save(
    bench: &mut Bench,
    writer: &mut CheckpointWriter,
    step: u64,
) -> Result<(), Box<dyn Error>> {
    let ranks = bench.state()?;
    let state = TrainingState { step, cursor: Default::default(), description: Default::default(), ranks };
    writer.save(state)?;
    Ok(())
}
