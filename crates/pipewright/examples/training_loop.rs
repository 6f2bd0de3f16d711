//! A training loop of your own: batches, a checkpoint every few steps, and a run that resumes under another cut.
//!
//! The run is stopped after six steps. A second pipeline, with other ranks and another schedule, resumes from the
//! newest checkpoint and ends with the same loss as a run that was never stopped.
//!
//! ```text
//! cargo run -p pipewright --example training_loop
//! ```

use std::error::Error;
use std::io::{Write, stdout};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::AdamWConfig;
use burn::tensor::{Device, Tensor};
use pipewright::checkpoint::{CheckpointFolder, CheckpointWriter, Cursor, TrainingState};
use pipewright::pipeline::{BuildError, Layers, Pipeline};
use pipewright::stage::{StageContext, StageModule};

const STEPS: u64 = 12;

/// A layer of the model.
#[derive(Module, Debug)]
struct Block {
    linear: Linear,
}

impl StageModule for Block {
    type Input = Tensor<2>;
    type Output = Tensor<2>;

    fn forward(&self, input: Tensor<2>, _context: &StageContext) -> Tensor<2> {
        self.linear.forward(input).tanh()
    }
}

fn launch(ranks: u32, schedule: &str) -> Result<Pipeline, BuildError> {
    let block = |_layer| Block { linear: LinearConfig::new(8, 8).init(&Device::flex().autodiff()) };
    Pipeline::builder(Layers::new(4, block))
        .ranks(ranks)
        .schedule(schedule)
        .microbatches(4)
        .loss(|output: Tensor<2>, target: Tensor<2>| (output - target).square().mean())
        .optimizer(AdamWConfig::new().init())
        .launch()
}

/// Returns the rows of a step. They depend on the step's number alone, so that a run can resume at any step.
fn rows(step: u64) -> Tensor<2> {
    let angles = Tensor::<1>::from_data([step as f32], &Device::flex()).unsqueeze::<2>();
    let places = Tensor::arange(0..128, &Device::flex()).float().reshape([16, 8]);
    (places * 0.7 + angles).sin()
}

/// Takes steps from `first` to `last`, and saves every third step. Returns the last loss.
fn train(
    pipeline: &mut Pipeline,
    first: u64,
    last: u64,
    checkpoints: &Path,
    out: &mut impl Write,
) -> Result<f64, Box<dyn Error>> {
    // A thread writes the files while training continues. One rank's part of the state is one file.
    let (keep, ranks) = (2, pipeline.program().ranks());
    let folder = CheckpointFolder::own(checkpoints)?;
    let mut writer = CheckpointWriter::start(folder, keep, ranks, Duration::from_secs(60))?;
    let mut loss = f64::NAN;
    for step in first..=last {
        let summary = pipeline.step(rows(step), rows(step) * 0.5, 1e-2)?;
        loss = summary.loss();
        writeln!(out, "step {step:2}  loss {loss:.6}")?;
        if step % 3 == 0 {
            // The data's place after this step, and your own entries for the manifest.
            let cursor = Cursor { epoch: 0, index: step };
            let (description, ranks) = (Default::default(), pipeline.state()?);
            writer.save(TrainingState { step, cursor, description, ranks })?;
        }
    }
    writer.wait()?;
    Ok(loss)
}

pub(crate) fn run(out: &mut impl Write) -> Result<(), Box<dyn Error>> {
    let folder = tempfile::tempdir()?;
    let (stopped, whole) = (folder.path().join("stopped"), folder.path().join("whole"));

    writeln!(out, "two ranks, 1f1b:")?;
    train(&mut launch(2, "1f1b")?, 1, 6, &stopped, out)?;

    let checkpoint = Arc::new(CheckpointFolder::newest(&stopped)?);
    writeln!(out, "one rank, zbvzerobubble, from the checkpoint of step {}:", checkpoint.step())?;
    let mut pipeline = launch(1, "zbvzerobubble")?;
    pipeline.restore(&checkpoint)?;
    let resumed = train(&mut pipeline, checkpoint.step() + 1, STEPS, &stopped, out)?;

    writeln!(out, "never stopped:")?;
    let expected = train(&mut launch(2, "1f1b")?, 1, STEPS, &whole, out)?;
    writeln!(out, "the last losses differ by {}", (resumed - expected).abs())?;
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    run(&mut stdout())
}
