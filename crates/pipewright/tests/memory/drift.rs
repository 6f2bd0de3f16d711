//! The reported memory of a rank does not grow with the number of steps.

use std::convert::Infallible;
use std::path::Path;
use std::time::Duration;

use burn::tensor::{Device, Tensor};
use pipewright::checkpoint::{CheckpointFolder, CheckpointWriter, TrainingState};
use pipewright::mesh::DataParallelMode::{self, Replicated, Sharded};
use pipewright::optimizer::AdamW;
use pipewright::pipeline::{Pipeline, PipelineConfig};
use pipewright::stage::Stage;
use pipewright::train::data::Cursor;
use pipewright::transport::World;
use pipewright_schedule::generate::catalogue;
use pipewright_schedule::{StageIndex, ValidatedProgram};

use crate::support::{Block, linear, loss, numbers, program};

const WIDTH: usize = 64;
/// Rows of a microbatch. The tensor of a boundary has 1024 bytes.
const ROWS: usize = 4;
/// Steps after which a run has allocated all that it keeps between steps.
const WARM_UP: u64 = 10;
/// The largest difference between the peaks of two steps. It comes from messages that wait for a rank, and
/// from their lists.
const SLACK: u64 = 32 << 10;

fn launch(program: ValidatedProgram, replicas: u32, mode: DataParallelMode) -> Pipeline {
    let (ranks, last) = (program.ranks(), program.placement().last_stage());
    let make = move |stage: StageIndex| -> Result<Stage, Infallible> {
        let layer = Block { linear: linear(u64::from(stage.get()), [WIDTH, WIDTH]) };
        let made = if stage == last { Stage::with_loss(layer, loss) } else { Stage::new(layer) };
        Ok(made.with_prefix(&format!("layers.{stage}")))
    };
    let config = PipelineConfig {
        optimizer: Some(AdamW::default().init()),
        data_parallel: replicas,
        data_parallel_mode: mode,
        ..PipelineConfig::default()
    };
    Pipeline::launch(program, World::local(ranks * replicas), &config, make).expect("it starts")
}

/// Checkpoints between the steps of a run.
struct Saves(CheckpointWriter);

impl Saves {
    fn into(folder: &Path, ranks: u32) -> Self {
        let folder = CheckpointFolder::own(folder).expect("nobody else has it");
        let writer = CheckpointWriter::start(folder, 1, ranks, Duration::from_secs(20)).expect("a thread");
        Self(writer)
    }

    fn save(&mut self, pipeline: &mut Pipeline, step: u64) {
        if step % (2 * WARM_UP) == WARM_UP {
            let ranks = pipeline.state().expect("a state");
            let state =
                TrainingState { step, cursor: Cursor::default(), description: Default::default(), ranks };
            self.0.save(state).expect("it is saved");
            self.0.wait().expect("it is written");
        }
    }
}

/// Compares each rank's peak in the step after the warm-up with its peak in the last of `steps`.
fn check(what: &str, mut pipeline: Pipeline, microbatches: usize, steps: u64, mut saves: Option<Saves>) {
    let batch = [0, 1].map(|seed| numbers(seed, [ROWS * microbatches, WIDTH]));
    let mut peaks_of = |step| {
        let [inputs, targets] = batch.clone().map(|data| Tensor::<2>::from_data(data, &Device::flex()));
        let summary = pipeline.step(inputs, targets, 1e-4).expect("a step");
        if let Some(saves) = &mut saves {
            saves.save(&mut pipeline, step);
        }
        summary.peak_bytes
    };
    let early: Vec<Vec<u64>> = (1..=2 * WARM_UP).map(&mut peaks_of).skip(WARM_UP as usize).collect();
    let middle = 2 * WARM_UP + 1..=steps - WARM_UP;
    middle.map(&mut peaks_of).for_each(drop);
    let late: Vec<Vec<u64>> = (steps - WARM_UP + 1..=steps).map(&mut peaks_of).collect();
    let greatest =
        |steps: &[Vec<u64>], rank: usize| steps.iter().map(|peaks| peaks[rank]).max().expect("a step");
    for rank in 0..early[0].len() {
        let (before, after) = (greatest(&early, rank), greatest(&late, rank));
        assert!(before > 4 * (WIDTH * WIDTH * 4) as u64, "{what}, rank {rank}: {before} bytes");
        assert!(
            before.abs_diff(after) <= SLACK,
            "{what}, rank {rank}: {before} bytes before, {after} in the end"
        );
    }
}

#[test]
fn no_schedule_drifts() {
    for generator in catalogue().iter().filter(|generator| generator.trains) {
        let name = generator.name;
        check(name, launch(program(name, 4, 8), 1, Replicated), 8, 80, None);
    }
}

#[test]
#[ignore = "takes long; `.ci/run nightly` runs it"]
fn ten_thousand_steps_hold_what_ten_do() {
    for (name, microbatches) in [("1f1b", 2), ("zbvzerobubble", 4)] {
        let program = program(name, 2, microbatches);
        check(name, launch(program, 1, Replicated), microbatches as usize, 10_000, None);
    }
}

#[test]
#[ignore = "takes half an hour"]
fn every_schedule_holds_after_ten_thousand_steps_what_it_holds_after_ten() {
    for generator in catalogue().iter().filter(|generator| generator.trains) {
        let name = generator.name;
        check(name, launch(program(name, 2, 4), 1, Replicated), 4, 10_000, None);
    }
}

#[test]
fn replicas_and_checkpoints_do_not_drift() {
    for (mode, shards) in [(Replicated, 2), (Sharded, 4)] {
        for name in ["1f1b", "interleaved1f1b"] {
            let folder = tempfile::tempdir().expect("a scratch folder");
            let saves = Saves::into(folder.path(), shards);
            let what = format!("{name}, {mode:?}");
            check(&what, launch(program(name, 2, 4), 2, mode), 8, 300, Some(saves));
        }
    }
}
