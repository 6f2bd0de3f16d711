//! Checkpoints: a run resumes with the same bits under any cut, and damage is reported by file.

mod support;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use burn::module::ParamGroup;
use burn::module::{Module, Param, ParamId};
use burn::nn::{BatchNorm, BatchNormConfig};
use burn::optim::{
    AdamConfig, AdamWConfig, LionConfig, ModuleOptimizer, SgdConfig, momentum::MomentumConfig,
};
use burn::tensor::{Bool, Device, Int, Tensor, TensorData};
use pipewright::batch::Batch;
use pipewright::checkpoint::{
    Checkpoint, CheckpointError, CheckpointFolder, CheckpointWriter, Manifest, RankState, Saving,
    TrainingState,
};
use pipewright::failure::Cause;
use pipewright::mesh::DataParallelMode;
use pipewright::optimizer::AdamW;
use pipewright::pipeline::{Pipeline, PipelineConfig, PipelineError};
use pipewright::stage::{Stage, StageContext, StageModule};
use pipewright::train::data::Cursor;
use pipewright::transport::World;
use pipewright_schedule::StageIndex;
use support::{Mlp, Step, batch, config, loss, program, stage};
use tempfile::TempDir;

const MICROBATCHES: u32 = 8;
const DEADLINE: Duration = Duration::from_secs(20);

fn folder() -> TempDir {
    tempfile::tempdir().expect("a scratch folder")
}

fn launch(schedule: &str, ranks: u32, optimizer: ModuleOptimizer) -> Pipeline {
    let program = program(schedule, ranks, MICROBATCHES);
    let stages = program.placement().stages();
    let config = PipelineConfig { optimizer: Some(optimizer), ..config() };
    Pipeline::launch(program, World::local(ranks), &config, move |index| stage(index, stages))
        .expect("the pipeline starts")
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
    after.restore(&newest(scratch.path())).expect("it is taken over");
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
    let folder = CheckpointFolder::own(scratch.path()).expect("nobody else has it");
    let mut writer = CheckpointWriter::start(folder, 1, 1, DEADLINE).expect("a thread");
    writer.save(taken).and_then(|_| writer.wait()).expect("it is saved");
    let mut other = launch("gpipe", 1, adamw());
    other.restore(&newest(scratch.path())).expect("it is taken over");
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
    assert!(matches!(best(), Err(CheckpointError::NoManifest { .. })));
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
    let names: Vec<_> = checkpoint.manifest().shards.iter().map(|shard| shard.name.as_str()).collect();
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
    assert_eq!(checkpoint.manifest().shards.len(), 2);
    let mut after = launch_replicas();
    after.restore(&checkpoint).expect("it is taken over");
    found.extend(take_steps(&mut after, 2..4));
    assert_eq!(found, expected);
    assert_eq!(parameters(&mut after), parameters(&mut whole));
    let mut alone = launch("gpipe", 4, adamw());
    alone.restore(&checkpoint).expect("it is taken over");
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
    let folder = CheckpointFolder::own(scratch.path()).expect("nobody else has it");
    let mut owner = CheckpointWriter::start(folder, 1, 2, DEADLINE).expect("a thread");
    let mut other = CheckpointWriter::join(scratch.path(), DEADLINE).expect("a thread");
    other.save(second).expect("nothing is under way");
    owner.save(first).expect("nothing is under way");
    owner.wait().and_then(|_| other.wait()).expect("it is saved");
    let checkpoint = newest(scratch.path());
    assert_eq!(checkpoint.manifest().shards.len(), 2);
    let files = fs::read_dir(checkpoint.path()).expect("a folder").count();
    assert_eq!(files, 3, "two shards and a manifest, and nothing of how they came together");
    let mut whole = launch("gpipe", 1, adamw());
    whole.restore(&checkpoint).expect("it is taken over");
    assert_eq!(parameters(&mut whole), parameters(&mut pipeline));
}

#[test]
fn a_process_that_does_not_write_its_part_is_named() {
    let scratch = folder();
    let mut pipeline = launch("1f1b", 2, adamw());
    let folder = CheckpointFolder::own(scratch.path()).expect("nobody else has it");
    let mut owner = CheckpointWriter::start(folder, 1, 4, Duration::from_millis(200)).expect("a thread");
    let state = state(&mut pipeline, 0);
    let told = owner.save(state).and_then(|_| owner.wait()).expect_err("ranks 2 and 3 are nowhere");
    assert!(matches!(told, CheckpointError::SilentRanks { .. }), "{told}");
    assert!(told.to_string().contains("ranks [2, 3]"), "{told}");
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

/// Makes two checkpoints of one pipeline, applies `damage` to the newer one's folder, and checks the error.
fn check_damage(
    damage: impl FnOnce(&Path, &Path),
    expected: impl Fn(&CheckpointError) -> bool,
    words: &[&str],
) {
    let scratch = folder();
    let mut pipeline = launch("1f1b", 2, adamw());
    take_steps(&mut pipeline, 0..1);
    let older = save(&mut pipeline, 1, scratch.path(), 2).expect("it is saved");
    take_steps(&mut pipeline, 1..2);
    let newer = save(&mut pipeline, 2, scratch.path(), 2).expect("it is saved");
    damage(&newer, &older);
    let error = CheckpointFolder::newest(scratch.path()).expect_err("the newest is damaged");
    assert!(expected(&error), "{error:?}");
    let told = error.to_string();
    assert!(words.iter().all(|word| told.contains(word)), "{told}");
    Checkpoint::open(&older).expect("the older one is sound");
}

fn edit(path: &Path, change: impl FnOnce(&mut Vec<u8>)) {
    let mut bytes = fs::read(path).expect("a file");
    change(&mut bytes);
    fs::write(path, bytes).expect("a file");
}

const SHARD: &str = "rank-0001.safetensors";

#[test]
fn a_flipped_bit_is_found_wherever_it_is() {
    for place in [0, 3, 40, 900, 4000] {
        let flip = |newer: &Path, _: &Path| edit(&newer.join(SHARD), |bytes| bytes[place] ^= 16);
        let is_damage = |error: &CheckpointError| matches!(error, CheckpointError::DamagedShard { .. });
        check_damage(flip, is_damage, &["step-00000002/rank-0001.safetensors", "damaged"]);
    }
    let flip = |newer: &Path, _: &Path| edit(&newer.join("manifest.json"), |bytes| bytes[30] ^= 1);
    let is_damage = |error: &CheckpointError| matches!(error, CheckpointError::DamagedManifest { .. });
    check_damage(flip, is_damage, &["step-00000002/manifest.json", "damaged"]);
}

#[test]
fn a_truncated_file_is_reported() {
    for left in [0, 5, 200, 4000] {
        let cut = |newer: &Path, _: &Path| edit(&newer.join(SHARD), |bytes| bytes.truncate(left));
        let is_cut = |error: &CheckpointError| matches!(error, CheckpointError::ShardLength { .. });
        check_damage(cut, is_cut, &[SHARD, &format!("has {left} bytes of ")]);
    }
}

#[test]
fn a_missing_shard_is_reported() {
    let remove = |newer: &Path, _: &Path| fs::remove_file(newer.join(SHARD)).expect("a file");
    let is_missing = |error: &CheckpointError| matches!(error, CheckpointError::MissingShard { .. });
    check_damage(remove, is_missing, &["step-00000002/rank-0001.safetensors", "missing"]);
}

#[test]
fn a_shard_of_another_step_is_reported() {
    let swap = |newer: &Path, older: &Path| {
        fs::copy(older.join(SHARD), newer.join(SHARD)).expect("a file");
    };
    let is_foreign = |error: &CheckpointError| matches!(error, CheckpointError::ForeignShard { .. });
    check_damage(swap, is_foreign, &[SHARD, "is of step 1", "of step 2"]);
}

#[test]
fn a_missing_manifest_is_reported() {
    let remove = |newer: &Path, _: &Path| fs::remove_file(newer.join("manifest.json")).expect("a file");
    let is_missing = |error: &CheckpointError| matches!(error, CheckpointError::NoManifest { .. });
    check_damage(remove, is_missing, &["manifest.json", "missing"]);
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

#[test]
fn the_newest_are_kept_and_leftovers_removed() {
    let scratch = folder();
    let mut pipeline = launch("1f1b", 2, adamw());
    let leftovers = [".saving-00000009", ".removing-step-00000001"].map(|name| scratch.path().join(name));
    for leftover in &leftovers {
        fs::create_dir(leftover).and_then(|()| fs::write(leftover.join(SHARD), "half")).expect("a folder");
    }
    for step in 1..=4 {
        take_steps(&mut pipeline, step - 1..step);
        save(&mut pipeline, step, scratch.path(), 2).expect("it is saved");
    }
    let all = CheckpointFolder::list(scratch.path()).expect("a folder");
    assert_eq!(all.iter().map(|(step, _)| *step).collect::<Vec<_>>(), [3, 4]);
    assert!(leftovers.iter().all(|leftover| !leftover.exists()));
    save(&mut pipeline, 4, scratch.path(), 2).expect("the same step again takes the place of the first");
    assert_eq!(newest(scratch.path()).step(), 4);
}

#[test]
fn a_checkpoint_that_lacks_only_its_final_name_gets_it_from_the_next_owner() {
    let scratch = folder();
    let mut pipeline = launch("1f1b", 2, adamw());
    let path = save(&mut pipeline, 7, scratch.path(), 1).expect("it is saved");
    fs::rename(&path, scratch.path().join(".saving-00000007")).expect("a folder");
    CheckpointFolder::own(scratch.path()).expect("nobody has it");
    assert_eq!(newest(scratch.path()).step(), 7);
}

#[test]
fn a_folder_has_one_owner() {
    let scratch = folder();
    let owner = CheckpointFolder::own(scratch.path()).expect("nobody else has it");
    let error = CheckpointFolder::own(scratch.path()).expect_err("it is taken");
    assert!(error.to_string().contains(&format!("process {} ", std::process::id())), "{error}");
    drop(owner);
    CheckpointFolder::own(scratch.path()).expect("nobody has it");
}

/// A mounted file system of limited size, where mounting is allowed.
struct SmallDisk(TempDir);

impl SmallDisk {
    fn mount(size: &str) -> Option<Self> {
        let disk = Self(folder());
        let mut mount = std::process::Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", &format!("size={size}"), "tmpfs"]).arg(disk.0.path());
        mount.output().is_ok_and(|output| output.status.success()).then_some(disk)
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = std::process::Command::new("umount").arg(self.0.path()).output();
    }
}

#[test]
#[expect(clippy::print_stderr, reason = "a test that cannot run says so")]
fn a_full_disk_is_reported_and_loses_nothing() {
    let Some(disk) = SmallDisk::mount("64k") else {
        eprintln!("skipped: mounting a small file system is not allowed here");
        return;
    };
    let mut pipeline = launch("1f1b", 2, adamw());
    let path = disk.0.path().join("checkpoints");
    let mut step = 0;
    let (error, told) = loop {
        take_steps(&mut pipeline, step..step + 1);
        step += 1;
        assert!(step < 100, "the disk is never full");
        if let Err(error) = save(&mut pipeline, step, &path, 100) {
            break (error.to_string(), error);
        }
    };
    assert!(matches!(told, CheckpointError::Io { .. }), "{error}");
    assert!(error.contains("No space left"), "{error}");
    assert_eq!(newest(&path).step(), step - 1, "the one before is the newest complete one");
    let left = fs::read_dir(&path).expect("a folder").filter(|entry| {
        entry.as_ref().is_ok_and(|entry| entry.file_name().to_string_lossy().starts_with('.'))
    });
    assert_eq!(left.count(), 0, "what was half-written gives its room back");
    fs::remove_dir_all(path.join("step-00000001")).expect("a folder");
    save(&mut pipeline, step, &path, 100).expect("there is room again");
    assert_eq!(newest(&path).step(), step);
}

/// Returns rank 0 of a pipeline that holds all layers, and rank 1 of another that has taken `steps` steps and holds
/// half of them.
fn overlapping_ranks(steps: u64) -> [RankState; 2] {
    let (mut whole, mut halves) = (launch("1f1b", 1, adamw()), launch("1f1b", 2, adamw()));
    take_steps(&mut halves, 0..steps);
    let mut taken = [&mut whole, &mut halves].map(|pipeline| pipeline.state().expect("a state"));
    taken.each_mut().map(|ranks| ranks.pop().expect("a rank"))
}

#[test]
fn two_parameters_of_one_path_are_not_written() {
    let scratch = folder();
    let folder = CheckpointFolder::own(scratch.path()).expect("nobody else has it");
    let mut writer = CheckpointWriter::start(folder, 1, 2, DEADLINE).expect("a thread");
    let ranks = overlapping_ranks(1).into();
    let state = TrainingState { step: 1, cursor: Cursor::default(), description: Default::default(), ranks };
    let refused = writer.save(state).and_then(|_| writer.wait()).expect_err("layers 4 to 7 are there twice");
    let expected = "two parameters have the path `layers.4.weight`";
    assert!(refused.to_string().starts_with(expected), "{refused}");
    assert_eq!(CheckpointFolder::list(scratch.path()).expect("a folder"), []);
}

/// Writes the states as two processes do that do not know each other's parameters.
fn written_apart(scratch: &Path, ranks: [RankState; 2]) -> Result<Checkpoint, CheckpointError> {
    let saving = Saving::begin(scratch, 1).expect("a scratch folder");
    let shards = ranks.map(|rank| saving.write_shard(rank).expect("it is written"));
    let manifest = Manifest::new(1, Cursor::default(), Default::default(), shards.into());
    Checkpoint::open(&saving.commit(&manifest).expect("it is committed"))
}

#[test]
fn two_tensors_of_one_path_are_not_read() {
    let scratch = folder();
    written_apart(scratch.path(), overlapping_ranks(0)).expect("equal copies are one tensor");
    let refused = written_apart(scratch.path(), overlapping_ranks(1)).expect_err("they differ");
    assert!(matches!(refused, CheckpointError::Ambiguous { .. }), "{refused:?}");
    let told = refused.to_string();
    let words =
        ["step-00000001: `layers.4.bias` differs between rank-0000.safetensors and rank-0001.safetensors"];
    assert!(words.iter().all(|word| told.contains(word)), "{told}");
}

/// Layers with a running statistic, and with buffers that are not floats.
#[derive(Module, Debug)]
struct Buffers {
    norm: BatchNorm,
    layers: Mlp,
    order: Param<Tensor<1, Int>>,
    mask: Param<Tensor<2, Bool>>,
}

impl StageModule for Buffers {
    type Input = Tensor<2>;
    type Output = Tensor<2>;

    fn forward(&self, input: Tensor<2>, context: &StageContext) -> Tensor<2> {
        let input = input.select(1, self.order.val());
        let input = input.clone().mask_fill(self.mask.val().expand(input.dims()), 0.0);
        self.layers.forward(self.norm.forward(input), context)
    }

    fn parameter_path(&self, local: &str) -> String {
        match local.strip_prefix("layers.") {
            Some(layer) => self.layers.parameter_path(layer),
            None => format!("{local}.{}", self.layers.parameter_path("layers.0.place")),
        }
    }
}

/// Launches two stages of such layers, with buffers that depend on `seed`.
fn with_buffers(seed: i32, replicas: u32, mode: DataParallelMode) -> Pipeline {
    let make = move |index: StageIndex| -> Result<Stage, std::convert::Infallible> {
        let device = Device::flex().autodiff();
        let width = support::WIDTH as i32;
        let order: Vec<i32> = (0..width).map(|place| (place + seed) % width).collect();
        let mask: Vec<bool> = (0..width).map(|place| place == seed).collect();
        let module = Buffers {
            norm: BatchNormConfig::new(support::WIDTH).init(&device),
            layers: Mlp::of_stage(index, 2),
            order: Param::initialized(ParamId::new(), Tensor::from_data(TensorData::from(&*order), &device)),
            mask: Param::initialized(
                ParamId::new(),
                Tensor::<1, Bool>::from_data(TensorData::from(&*mask), &device).unsqueeze(),
            ),
        };
        Ok(if index.get() == 1 { Stage::with_loss(module, loss) } else { Stage::new(module) })
    };
    let config = PipelineConfig {
        optimizer: Some(adamw()),
        data_parallel: replicas,
        data_parallel_mode: mode,
        ..config()
    };
    let program = program("1f1b", 2, MICROBATCHES / replicas);
    Pipeline::launch(program, World::local(2 * replicas), &config, make).expect("it starts")
}

#[test]
fn buffers_of_every_kind_come_back() {
    for (replicas, mode) in [(1, DataParallelMode::Replicated), (2, DataParallelMode::Sharded)] {
        let scratch = folder();
        let mut before = with_buffers(1, replicas, mode);
        take_steps(&mut before, 0..3);
        let folder = CheckpointFolder::own(scratch.path()).expect("nobody else has it");
        let mut writer = CheckpointWriter::start(folder, 1, 2 * replicas, DEADLINE).expect("a thread");
        writer.save(state(&mut before, 3)).and_then(|_| writer.wait()).expect("it is saved");
        let mut after = with_buffers(4, replicas, mode);
        let evaluate = |pipeline: &mut Pipeline| {
            let evaluated = pipeline.eval(batch(9, MICROBATCHES), Some(batch(10, MICROBATCHES)));
            // Each replica has running statistics of its own, and the first one's are stored.
            let own = (MICROBATCHES / replicas) as usize;
            evaluated.expect("an evaluation").losses[..own].to_vec()
        };
        assert_ne!(evaluate(&mut after), evaluate(&mut before), "the buffers differ");
        after.restore(&newest(scratch.path())).expect("it fits");
        assert_eq!(evaluate(&mut after), evaluate(&mut before), "running statistics and buffers");
        assert_eq!(take_steps(&mut after, 3..5), take_steps(&mut before, 3..5));
    }
}
