//! Checkpoints: a run resumes with the same bits under any cut, and with any optimizer.

mod buffers;
mod damage;
mod neighbours;
mod other_model;
mod owners;
mod ruined;
mod sent_parts;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use burn::module::ParamGroup;
use burn::optim::{
    AdamConfig, AdamWConfig, LionConfig, ModuleOptimizer, SgdConfig, momentum::MomentumConfig,
};
use burn::tensor::{Device, Tensor};
use pipewright::batch::Batch;
use pipewright::checkpoint::{
    Checkpoint, CheckpointError, CheckpointFolder, CheckpointWriter, TrainingState,
};
use pipewright::failure::Cause;
use pipewright::optimizer::AdamW;
use pipewright::pipeline::{Pipeline, PipelineConfig, PipelineError};
use pipewright::train::data::Cursor;
use pipewright::transport::World;
use tempfile::TempDir;

use crate::support::{self, Step, batch, config, program, stage};

const MICROBATCHES: u32 = 8;
const DEADLINE: Duration = Duration::from_secs(20);

fn folder() -> TempDir {
    tempfile::tempdir().expect("a scratch folder")
}

fn launch(schedule: &str, ranks: u32, optimizer: ModuleOptimizer) -> Pipeline {
    let config = PipelineConfig { optimizer: Some(optimizer), ..config() };
    support::launch(program(schedule, ranks, MICROBATCHES), &config)
}

fn take_steps(pipeline: &mut Pipeline, steps: std::ops::Range<u64>) -> Vec<Step> {
    let step = |step| {
        let (inputs, targets) = (batch(step, MICROBATCHES), batch(100 + step, MICROBATCHES));
        let report = pipeline.step(inputs, targets, 1e-2).expect("a step");
        (report.losses, report.gradient_norm)
    };
    steps.map(step).collect()
}

/// Returns the bits of all parameters by path.
fn parameters(pipeline: &mut Pipeline) -> Vec<(Arc<str>, Vec<u32>)> {
    let named = pipeline.parameters().expect("every rank answers");
    let bits = |parameter: pipewright::pipeline::NamedParameter| {
        (parameter.path, parameter.data.iter::<f32>().map(f32::to_bits).collect())
    };
    let mut all: Vec<_> = named.into_iter().map(bits).collect();
    all.sort_unstable();
    all
}

fn state(pipeline: &mut Pipeline, step: u64) -> TrainingState {
    let cursor = Cursor { epoch: 1, index: step };
    TrainingState { step, cursor, description: Default::default(), ranks: pipeline.state().expect("a state") }
}

fn save(pipeline: &mut Pipeline, step: u64, into: &Path, keep: usize) -> Result<PathBuf, CheckpointError> {
    let mut writer = CheckpointWriter::start(CheckpointFolder::own(into)?, keep, 1, DEADLINE)?;
    writer.save(state(pipeline, step))?;
    writer.wait().map(|path| path.expect("a checkpoint was under way"))
}

fn newest(folder: &Path) -> Arc<Checkpoint> {
    Arc::new(CheckpointFolder::newest(folder).expect("a sound checkpoint"))
}

fn check_resume(optimizer: &ModuleOptimizer, cuts: [(&str, u32); 2]) {
    let [(first, ranks), (second, other_ranks)] = cuts;
    let mut whole = launch("1f1b", 2, optimizer.clone());
    let expected = take_steps(&mut whole, 0..6);
    let scratch = folder();
    let mut before = launch(first, ranks, optimizer.clone());
    let mut found = take_steps(&mut before, 0..3);
    save(&mut before, 3, scratch.path(), 1).expect("it is saved");
    let mut after = launch(second, other_ranks, optimizer.clone());
    after.restore(&newest(scratch.path())).expect("it is restored");
    found.extend(take_steps(&mut after, 3..6));
    assert_eq!(found, expected, "losses and norms, {cuts:?}");
    assert_eq!(parameters(&mut after), parameters(&mut whole), "parameters, {cuts:?}");
}

fn adamw() -> ModuleOptimizer {
    AdamW { weight_decay: 0.1, ..AdamW::default() }.init()
}

#[test]
fn another_cut_and_schedule_go_on_with_the_same_bits() {
    for cuts in [
        [("1f1b", 2), ("1f1b", 2)],
        [("1f1b", 2), ("gpipe", 8)],
        [("1f1b", 8), ("1f1b", 1)],
        [("interleaved1f1b", 2), ("zbvzerobubble", 4)],
        [("zb-h1", 4), ("interleaved1f1b", 4)],
    ] {
        check_resume(&adamw(), cuts);
    }
}

#[test]
fn every_kind_of_optimizer_state_is_kept() {
    let momentum = MomentumConfig::new().with_momentum(0.9).with_nesterov(true);
    for optimizer in [
        AdamWConfig::new().init(),
        AdamConfig::new().with_amsgrad(true).init(),
        SgdConfig::new().init(),
        SgdConfig::new().with_momentum(Some(momentum)).init(),
        LionConfig::new().init(),
    ] {
        check_resume(&optimizer, [("1f1b", 4), ("gpipe", 2)]);
    }
}

#[test]
fn each_parameter_keeps_the_optimizer_of_its_group() {
    let group = ParamGroup::from_predicate("bias");
    let optimizer = adamw().with_group(group, LionConfig::new().build(), None);
    check_resume(&optimizer, [("1f1b", 4), ("gpipe", 2)]);
}

#[test]
fn a_taken_state_does_not_change_while_training_continues() {
    let scratch = folder();
    let mut pipeline = launch("1f1b", 2, adamw());
    take_steps(&mut pipeline, 0..2);
    let (taken, expected) = (state(&mut pipeline, 2), parameters(&mut pipeline));
    let after = take_steps(&mut pipeline, 2..4);
    let folder = CheckpointFolder::own(scratch.path()).expect("no other process owns it");
    let mut writer = CheckpointWriter::start(folder, 1, 1, DEADLINE).expect("a thread");
    writer.save(taken).and_then(|_| writer.wait()).expect("it is saved");
    let mut other = launch("gpipe", 1, adamw());
    other.restore(&newest(scratch.path())).expect("it is restored");
    assert_eq!(parameters(&mut other), expected);
    assert_eq!(take_steps(&mut other, 2..4), after, "optimizer state too");
}

#[test]
fn the_best_checkpoint_is_kept_and_linked() {
    let scratch = folder();
    let mut pipeline = launch("1f1b", 2, adamw());
    let folder = CheckpointFolder::own(scratch.path()).expect("nobody else has it");
    let mut writer = CheckpointWriter::start(folder, 1, 1, DEADLINE).expect("a thread");
    let steps = || -> Vec<u64> {
        CheckpointFolder::list(scratch.path()).expect("a folder").into_iter().map(|(step, _)| step).collect()
    };
    let best = || Checkpoint::open(&CheckpointFolder::best_of(scratch.path())).map(|best| best.step());
    for (step, is_best, kept) in
        [(1, true, &[1][..]), (2, false, &[1, 2]), (3, false, &[1, 3]), (4, true, &[4]), (5, false, &[4, 5])]
    {
        let state = state(&mut pipeline, step);
        let saved = if is_best { writer.save_best(state) } else { writer.save(state) };
        saved.and_then(|_| writer.wait()).expect("it is saved");
        assert_eq!(steps(), kept);
        assert_eq!(best().expect("there is one"), *kept.first().expect("one is kept"));
    }
    drop(writer);
    let folder = CheckpointFolder::own(scratch.path()).expect("nobody else has it");
    folder.set_best(Some(5)).expect("a link");
    assert_eq!(best().expect("there is one"), 5);
    folder.set_best(Some(3)).expect("no link, for it is gone");
    assert!(best().expect_err("it is gone").to_string().contains("the manifest is missing"));
    folder.set_best(None).expect("no link");
    assert_eq!(CheckpointFolder::newest(scratch.path()).expect("a checkpoint").step(), 5);
}

#[test]
fn a_checkpoint_lists_its_tensors() {
    let scratch = folder();
    let mut pipeline = launch("1f1b", 2, adamw());
    take_steps(&mut pipeline, 0..1);
    let path = save(&mut pipeline, 1, scratch.path(), 1).expect("it is saved");
    assert_eq!(path, scratch.path().join("step-00000001"));
    let checkpoint = Checkpoint::open(&path).expect("it is sound");
    assert_eq!((checkpoint.step(), checkpoint.manifest().cursor), (1, Cursor { epoch: 1, index: 1 }));
    let paths: Vec<_> = checkpoint.parameters().map(|parameter| parameter.path.to_owned()).collect();
    assert_eq!(paths.len(), 16);
    assert!(paths.contains(&"layers.7.weight".to_owned()), "{paths:?}");
    let names: Vec<_> = checkpoint.manifest().files.iter().map(|file| file.name.as_str()).collect();
    assert_eq!(names, ["rank-0000.safetensors", "rank-0001.safetensors"]);
}

/// Launches two replicas of two ranks.
fn launch_replicas() -> Pipeline {
    let config = PipelineConfig { optimizer: Some(adamw()), data_parallel: 2, ..config() };
    let program = program("1f1b", 2, MICROBATCHES / 2);
    Pipeline::launch(program, World::local(4), &config, |index| stage(index, 2)).expect("the pipeline starts")
}

#[test]
fn replicas_are_stored_once_and_all_restored() {
    let mut whole = launch_replicas();
    let expected = take_steps(&mut whole, 0..4);
    let scratch = folder();
    let mut before = launch_replicas();
    let mut found = take_steps(&mut before, 0..2);
    save(&mut before, 2, scratch.path(), 1).expect("it is saved");
    let checkpoint = newest(scratch.path());
    assert_eq!(checkpoint.manifest().files.len(), 2);
    let mut after = launch_replicas();
    after.restore(&checkpoint).expect("it is restored");
    found.extend(take_steps(&mut after, 2..4));
    assert_eq!(found, expected);
    assert_eq!(parameters(&mut after), parameters(&mut whole));
    let mut alone = launch("gpipe", 4, adamw());
    alone.restore(&checkpoint).expect("it is restored");
}

#[test]
fn two_processes_write_one_checkpoint() {
    let scratch = folder();
    let mut pipeline = launch("1f1b", 2, adamw());
    take_steps(&mut pipeline, 0..2);
    // The states of the processes of rank 0 and rank 1.
    let (mut first, mut second) = (state(&mut pipeline, 2), state(&mut pipeline, 2));
    first.ranks.remove(1);
    second.ranks.remove(0);
    let folder = CheckpointFolder::own(scratch.path()).expect("no other process owns it");
    let mut owner = CheckpointWriter::start(folder, 1, 2, DEADLINE).expect("a thread");
    let mut other = CheckpointWriter::join(scratch.path(), DEADLINE).expect("a thread");
    other.save(second).expect("nothing is under way");
    owner.save(first).expect("nothing is under way");
    owner.wait().and_then(|_| other.wait()).expect("it is saved");
    let checkpoint = newest(scratch.path());
    assert_eq!(checkpoint.manifest().files.len(), 2);
    let files = fs::read_dir(checkpoint.path()).expect("a folder").count();
    assert_eq!(files, 3, "two files and a manifest, and nothing of how they came together");
    let mut whole = launch("gpipe", 1, adamw());
    whole.restore(&checkpoint).expect("it is restored");
    assert_eq!(parameters(&mut whole), parameters(&mut pipeline));
}

#[test]
fn a_process_that_does_not_write_its_part_is_named() {
    let scratch = folder();
    let mut pipeline = launch("1f1b", 2, adamw());
    let folder = CheckpointFolder::own(scratch.path()).expect("no other process owns it");
    let mut owner = CheckpointWriter::start(folder, 1, 4, Duration::from_secs(2)).expect("a thread");
    let state = state(&mut pipeline, 0);
    let error = owner.save(state).and_then(|_| owner.wait()).expect_err("ranks 2 and 3 are nowhere");
    assert!(error.to_string().contains("ranks [2, 3]"), "{error}");
    assert_eq!(CheckpointFolder::list(scratch.path()).expect("a folder"), []);
}

#[test]
fn accumulated_gradients_are_not_left_behind_in_silence() {
    let mut pipeline = launch("1f1b", 2, adamw());
    let halves = || {
        let [inputs, targets] = [0, 100].map(|seed| support::split(batch(seed, MICROBATCHES), MICROBATCHES));
        Batch::new(inputs, targets)
    };
    pipeline.accumulate(halves()).expect("a step");
    let refused = pipeline.state().map(drop);
    assert!(matches!(refused, Err(PipelineError::GradientsPending)), "{refused:?}");
    pipeline.step_batch(halves(), 1e-2).expect("a step");
    pipeline.state().expect("nothing waits");
}

/// Restores in the middle of other work, successful or failed, which must not affect the following steps.
#[test]
fn a_restored_state_discards_later_steps() {
    let scratch = folder();
    let mut pipeline = launch("1f1b", 2, adamw());
    take_steps(&mut pipeline, 0..2);
    save(&mut pipeline, 2, scratch.path(), 1).expect("it is written");
    let expected = take_steps(&mut pipeline, 2..4);
    let parts = |seed| support::split(batch(seed, MICROBATCHES), MICROBATCHES);
    pipeline.accumulate(Batch::new(parts(7), parts(8))).expect("a step");
    let other_width = Tensor::<2>::zeros([24, 5], &Device::flex());
    pipeline.step(other_width, batch(0, MICROBATCHES), 1e-2).expect_err("inputs of another width");
    pipeline.accumulate(Batch::new(parts(7), parts(8))).expect("a step");
    pipeline.restore(&newest(scratch.path())).expect("it fits");
    assert_eq!(take_steps(&mut pipeline, 2..4), expected);
    state(&mut pipeline, 4);
}

#[test]
fn another_model_or_optimizer_is_refused() {
    let scratch = folder();
    let mut pipeline = launch("1f1b", 2, adamw());
    take_steps(&mut pipeline, 0..1);
    save(&mut pipeline, 1, scratch.path(), 1).expect("it is saved");
    let checkpoint = newest(scratch.path());
    let mut other = launch("gpipe", 2, LionConfig::new().init());
    let refused = other.restore(&checkpoint).expect_err("Lion has other moments");
    let PipelineError::Step(step) = &refused else { panic!("{refused:?}") };
    assert!(matches!(&step.cause, Cause::Restore { .. }), "{step:?}");
    assert!(refused.to_string().contains("optimizer"), "{refused}");
    let next = other.step(batch(0, MICROBATCHES), batch(1, MICROBATCHES), 1e-2).map(drop);
    assert!(matches!(next, Err(PipelineError::HalfRestored)), "{next:?}");
}
