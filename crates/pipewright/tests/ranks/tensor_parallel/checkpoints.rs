//! A run that was saved under one mesh resumes under another.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use pipewright::checkpoint::{Checkpoint, CheckpointFolder, CheckpointWriter, TrainingState};
use pipewright::mesh::DataParallelMode;
use pipewright::pipeline::{Pipeline, PipelineConfig};
use pipewright::train::data::Cursor;

use super::model::{Sizes, assert_close, config_of, launch, sizes, take_steps, try_launch};

const DEADLINE: Duration = Duration::from_secs(20);

pub(super) fn save(pipeline: &mut Pipeline, ranks: u32, into: &Path) -> Arc<Checkpoint> {
    let folder = CheckpointFolder::own(into).expect("the folder is free");
    let mut writer = CheckpointWriter::start(folder, 1, ranks, DEADLINE).expect("a thread");
    let cursor = Cursor { epoch: 0, index: 3 };
    let ranks = pipeline.state().expect("a state");
    writer
        .save(TrainingState { step: 3, cursor, description: Default::default(), ranks })
        .expect("it is saved");
    writer.wait().expect("it is saved");
    Arc::new(CheckpointFolder::newest(into).expect("a sound checkpoint"))
}

/// Returns the parameters of the whole model, by path.
pub(super) fn stored(checkpoint: &Checkpoint) -> Vec<(String, Vec<f32>)> {
    let all = checkpoint.parameters().map(|found| {
        let data = checkpoint.parameter(&found.path.into(), found.shape, found.dtype).expect("it is there");
        (found.path.to_owned(), data.iter().collect())
    });
    all.collect()
}

fn launch_in(mode: DataParallelMode, sizes: Sizes) -> Pipeline {
    let config = PipelineConfig { data_parallel_mode: mode, ..config_of(sizes) };
    try_launch("1f1b", sizes, &config, None).expect("the pipeline starts")
}

#[test]
fn a_run_resumes_under_any_mesh() {
    let expected = take_steps(&mut launch("1f1b", sizes(1, 1, 1)), 0..6);
    let scratch = tempfile::tempdir().expect("a scratch folder");
    let mut before = launch("1f1b", sizes(2, 1, 2));
    take_steps(&mut before, 0..3);
    let checkpoint = save(&mut before, 4, scratch.path());
    let parameters = stored(&checkpoint);
    assert_eq!(parameters.len(), 8 * 5, "each parameter is stored once");
    for sizes in [sizes(2, 1, 2), sizes(1, 2, 1), sizes(4, 1, 1), sizes(1, 1, 4), sizes(1, 1, 3)] {
        let mut after = launch("1f1b", sizes);
        after.restore(&checkpoint).expect("it is restored");
        let scratch = tempfile::tempdir().expect("a scratch folder");
        let again = save(&mut after, sizes.pipeline * sizes.tensor, scratch.path());
        assert_eq!(stored(&again), parameters, "{sizes:?}: nothing is lost or reordered");
        assert_close(&take_steps(&mut after, 3..6), &expected[3..], &format!("{sizes:?}"));
    }
}

#[test]
fn replicas_with_rows_of_shards_resume_under_any_mesh() {
    use DataParallelMode::{Hybrid, Replicated, Sharded};
    let expected = take_steps(&mut launch("1f1b", sizes(1, 1, 1)), 0..6);
    let pairs = Hybrid { shards: 2 };
    for (mode, before) in [(Sharded, sizes(2, 2, 2)), (pairs, sizes(1, 4, 2)), (Sharded, sizes(1, 2, 3))] {
        let scratch = tempfile::tempdir().expect("a scratch folder");
        let mut first = launch_in(mode, before);
        take_steps(&mut first, 0..3);
        let checkpoint =
            save(&mut first, before.pipeline * mode.shards(before.data) * before.tensor, scratch.path());
        let parameters = stored(&checkpoint);
        assert_eq!(parameters.len(), 8 * 5, "each parameter is stored once");
        let meshes = [
            (Replicated, sizes(1, 1, 1)),
            (Sharded, sizes(2, 2, 1)),
            (Sharded, sizes(1, 4, 3)),
            (pairs, sizes(2, 4, 2)),
            (Replicated, sizes(1, 2, 4)),
        ];
        for (mode, sizes) in meshes {
            let mut after = launch_in(mode, sizes);
            after.restore(&checkpoint).expect("it is restored");
            let scratch = tempfile::tempdir().expect("a scratch folder");
            let files = sizes.pipeline * mode.shards(sizes.data) * sizes.tensor;
            let again = save(&mut after, files, scratch.path());
            assert_eq!(stored(&again), parameters, "{mode:?}, {sizes:?}: nothing is lost or reordered");
            let what = format!("{before:?} to {mode:?}, {sizes:?}");
            assert_close(&take_steps(&mut after, 3..6), &expected[3..], &what);
        }
    }
}

#[test]
fn the_same_mesh_goes_on_with_the_same_bits() {
    for mode in [DataParallelMode::Replicated, DataParallelMode::Sharded] {
        let sizes = sizes(2, 2, 2);
        let expected = take_steps(&mut launch_in(mode, sizes), 0..6);
        let scratch = tempfile::tempdir().expect("a scratch folder");
        let mut before = launch_in(mode, sizes);
        take_steps(&mut before, 0..3);
        let ranks = if mode == DataParallelMode::Sharded { 8 } else { 4 };
        let checkpoint = save(&mut before, ranks, scratch.path());
        let mut after = launch_in(mode, sizes);
        after.restore(&checkpoint).expect("it is restored");
        assert_eq!(take_steps(&mut after, 3..6), expected[3..], "{mode:?}");
    }
}
