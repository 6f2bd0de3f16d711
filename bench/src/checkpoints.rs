//! Measures the cost of saving a checkpoint, in percent of a step.
//!
//! There are two figures: how long the call blocks the training loop, and how much longer the steps take
//! while the checkpoint is being written than after that. The second contains the processor time that the
//! writing thread takes from the ranks, if no processor is idle, and the copies of the update. If a
//! checkpoint is not written after `--every` steps, the bench waits for it and does not count that time. Some
//! steps always follow the write.

use std::path::{Path, PathBuf};

use pipewright::checkpoint::{CheckpointFolder, CheckpointWriter, TrainingState};

use crate::harness::{Figures, Outcome, PATIENCE, Spread, seconds};
use crate::model::{Bench, Size};

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

pub(crate) fn run(options: &Options) -> Outcome {
    let parent = options.folder.clone().unwrap_or_else(std::env::temp_dir);
    std::fs::create_dir_all(&parent)?;
    let folder = tempfile::tempdir_in(parent)?;
    let outcome = measure(options, folder.path());
    folder.close()?;
    outcome
}

fn measure(options: &Options, folder: &Path) -> Outcome {
    let Options { size: Size { ranks, microbatches }, every, checkpoints, .. } = *options;
    let mut bench = Bench::new("1f1b", ranks, microbatches)?;
    let mut writer = CheckpointWriter::start(CheckpointFolder::own(folder)?, 1, ranks, PATIENCE)?;
    // The first checkpoint allocates memory that the later ones reuse.
    bench.steps(2, 0)?;
    save(&mut bench, &mut writer, 0)?;
    bench.steps(every, 0)?;
    let mut figures = Figures::default();
    for number in 1..=checkpoints {
        let call = seconds(|| save(&mut bench, &mut writer, number))?;
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
        figures.add("% of a step for which the call blocks training", 100.0 * call / step);
        let slower = beside.iter().sum::<f64>() - step * beside.len() as f64;
        figures.add("% of a step with slower steps during the write", 100.0 * (call + slower) / step);
        figures.add("steps until it is written", beside.len() as f64);
    }
    println!("1f1b, {ranks} ranks, {microbatches} microbatches, a checkpoint every {every} steps or later:");
    print!("{figures}");
    Ok(())
}

/// Saves the state of the ranks as the state after `step` steps.
pub(crate) fn save(bench: &mut Bench, writer: &mut CheckpointWriter, step: u64) -> Outcome {
    let ranks = bench.state()?;
    let state = TrainingState { step, cursor: Default::default(), description: Default::default(), ranks };
    writer.save(state)?;
    Ok(())
}
