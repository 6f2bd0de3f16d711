//! Damaged checkpoints, and checkpoints with two parameters of one path, are reported by file.

use std::fs;
use std::path::Path;

use pipewright::checkpoint::{
    Checkpoint, CheckpointError, CheckpointFolder, CheckpointWriter, Manifest, RankState, Saving,
    TrainingState,
};
use pipewright::train::data::Cursor;

use super::{DEADLINE, adamw, folder, launch, save, take_steps};

/// Makes two checkpoints of one pipeline, applies `damage` to the newer one's folder, and checks the error.
fn check_damage(damage: impl FnOnce(&Path, &Path), words: &[&str]) {
    let scratch = folder();
    let mut pipeline = launch("1f1b", 2, adamw());
    take_steps(&mut pipeline, 0..1);
    let older = save(&mut pipeline, 1, scratch.path(), 2).expect("it is saved");
    take_steps(&mut pipeline, 1..2);
    let newer = save(&mut pipeline, 2, scratch.path(), 2).expect("it is saved");
    damage(&newer, &older);
    let error = CheckpointFolder::newest(scratch.path()).expect_err("the newest is damaged");
    let text = error.to_string();
    assert!(words.iter().all(|word| text.contains(word)), "{text}");
    Checkpoint::open(&older).expect("the older one is sound");
}

fn edit(path: &Path, change: impl FnOnce(&mut Vec<u8>)) {
    let mut bytes = fs::read(path).expect("a file");
    change(&mut bytes);
    fs::write(path, bytes).expect("a file");
}

const FILE: &str = "rank-0001.safetensors";

#[test]
fn a_flipped_bit_is_found_wherever_it_is() {
    for place in [0, 3, 40, 900, 4000] {
        let flip = |newer: &Path, _: &Path| edit(&newer.join(FILE), |bytes| bytes[place] ^= 16);
        check_damage(flip, &["step-00000002/rank-0001.safetensors", "damaged"]);
    }
    let flip = |newer: &Path, _: &Path| edit(&newer.join("manifest.json"), |bytes| bytes[30] ^= 1);
    check_damage(flip, &["step-00000002/manifest.json", "damaged"]);
}

#[test]
fn a_truncated_file_is_reported() {
    for left in [0, 5, 200, 4000] {
        let cut = |newer: &Path, _: &Path| edit(&newer.join(FILE), |bytes| bytes.truncate(left));
        check_damage(cut, &[FILE, &format!("has {left} bytes of ")]);
    }
}

#[test]
fn a_missing_file_is_reported() {
    let remove = |newer: &Path, _: &Path| fs::remove_file(newer.join(FILE)).expect("a file");
    check_damage(remove, &["step-00000002/rank-0001.safetensors", "missing"]);
}

#[test]
fn a_file_of_another_step_is_reported() {
    let swap = |newer: &Path, older: &Path| {
        fs::copy(older.join(FILE), newer.join(FILE)).expect("a file");
    };
    check_damage(swap, &[FILE, "is of step 1", "of step 2"]);
}

#[test]
fn a_missing_manifest_is_reported() {
    let remove = |newer: &Path, _: &Path| fs::remove_file(newer.join("manifest.json")).expect("a file");
    check_damage(remove, &["manifest.json", "missing"]);
}

/// Returns rank 0 of a pipeline that holds all layers, and rank 1 of another that has taken `steps` steps and
/// holds half of them.
fn overlapping_ranks(steps: u64) -> [RankState; 2] {
    let (mut whole, mut halves) = (launch("1f1b", 1, adamw()), launch("1f1b", 2, adamw()));
    take_steps(&mut halves, 0..steps);
    let mut taken = [&mut whole, &mut halves].map(|pipeline| pipeline.state().expect("a state"));
    taken.each_mut().map(|ranks| ranks.pop().expect("a rank"))
}

#[test]
fn two_parameters_of_one_path_are_not_written() {
    let scratch = folder();
    let folder = CheckpointFolder::own(scratch.path()).expect("no other process owns it");
    let mut writer = CheckpointWriter::start(folder, 1, 2, DEADLINE).expect("a thread");
    let ranks = overlapping_ranks(1).into();
    let state = TrainingState { step: 1, cursor: Cursor::default(), description: Default::default(), ranks };
    let refused = writer.save(state).and_then(|_| writer.wait()).expect_err("layers 4 to 7 occur twice");
    let expected = "two parameters have the path `layers.4.weight`";
    assert!(refused.to_string().starts_with(expected), "{refused}");
    assert_eq!(CheckpointFolder::list(scratch.path()).expect("a folder"), []);
}

/// Writes the states as two processes do that do not know each other's parameters.
fn written_apart(scratch: &Path, ranks: [RankState; 2]) -> Result<Checkpoint, CheckpointError> {
    let folder = CheckpointFolder::own(scratch).expect("no other process owns it");
    let saving = Saving::begin(&folder, 1).expect("a scratch folder");
    let files = ranks.map(|rank| saving.write_file(rank).expect("it is written"));
    let manifest = Manifest::new(1, Cursor::default(), Default::default(), files.into());
    Checkpoint::open(&saving.commit(&manifest).expect("it is committed"))
}

#[test]
fn two_tensors_of_one_path_are_not_read() {
    let scratch = folder();
    written_apart(scratch.path(), overlapping_ranks(0)).expect("equal copies are one tensor");
    let refused = written_apart(scratch.path(), overlapping_ranks(1)).expect_err("they differ");
    let words =
        "step-00000001: `layers.4.bias` differs between rank-0000.safetensors and rank-0001.safetensors";
    assert!(refused.to_string().contains(words), "{refused}");
}
