//! Folders of checkpoints: the newest are kept, one process owns a folder, and a full disk loses nothing.

use std::fs;
use std::path::Path;

use pipewright::checkpoint::{CheckpointError, CheckpointFolder, CheckpointWriter, Manifest, Saving};
use pipewright::train::data::Cursor;
use tempfile::TempDir;

use super::{DEADLINE, adamw, folder, launch, newest, save, state, take_steps};

#[test]
fn the_newest_are_kept_and_leftovers_removed() {
    let scratch = folder();
    let mut pipeline = launch("1f1b", 2, adamw());
    let leftovers = [".saving-00000009", ".removing-step-00000001"].map(|name| scratch.path().join(name));
    for leftover in &leftovers {
        fs::create_dir(leftover)
            .and_then(|()| fs::write(leftover.join("rank-0001.safetensors"), "half"))
            .expect("a folder");
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
    CheckpointFolder::own(scratch.path()).expect("no process owns it");
    assert_eq!(newest(scratch.path()).step(), 7);
}

#[test]
fn a_folder_has_one_owner() {
    let scratch = folder();
    let owner = CheckpointFolder::own(scratch.path()).expect("no other process owns it");
    let error = CheckpointFolder::own(scratch.path()).expect_err("it is taken");
    assert!(error.to_string().contains(&format!("process {} ", std::process::id())), "{error}");
    drop(owner);
    CheckpointFolder::own(scratch.path()).expect("no process owns it");
}

/// Saves step 1, then changes the folder with `change` and saves step 2. Returns the error and the scratch
/// folder.
fn save_into_a_changed_folder(change: impl Fn(&Path, &Path)) -> (CheckpointError, TempDir) {
    let scratch = folder();
    let [path, aside] = ["checkpoints", "aside"].map(|name| scratch.path().join(name));
    let mut pipeline = launch("1f1b", 2, adamw());
    let owned = CheckpointFolder::own(&path).expect("no process owns it");
    let mut writer = CheckpointWriter::start(owned, 1, 1, DEADLINE).expect("a thread");
    writer.save(state(&mut pipeline, 1)).and_then(|_| writer.wait()).expect("it is saved");
    change(&path, &aside);
    let saved = writer.save(state(&mut pipeline, 2)).and_then(|_| writer.wait());
    (saved.expect_err("another folder"), scratch)
}

#[test]
fn a_folder_that_vanishes_is_not_created_again() {
    let changes: [fn(&Path, &Path); 2] = [
        |path, aside| fs::rename(path, aside).expect("a move"),
        |path, _| fs::remove_dir_all(path).expect("a folder"),
    ];
    for change in changes {
        let (error, scratch) = save_into_a_changed_folder(change);
        assert!(matches!(error, CheckpointError::FolderGone { .. }), "{error}");
        assert!(!scratch.path().join("checkpoints").exists());
    }
}

#[test]
fn checkpoints_of_another_owner_are_neither_written_nor_removed() {
    let (error, scratch) = save_into_a_changed_folder(|path, aside| {
        fs::rename(path, aside).expect("a move");
        let mut other = launch("gpipe", 1, adamw());
        for step in 5..8 {
            save(&mut other, step, path, 9).expect("it is saved");
        }
    });
    assert!(matches!(error, CheckpointError::FolderReplaced { .. }), "{error}");
    let steps = |name: &str| {
        let all = CheckpointFolder::list(&scratch.path().join(name)).expect("a folder");
        all.into_iter().map(|(step, _)| step).collect::<Vec<_>>()
    };
    assert_eq!((steps("checkpoints"), steps("aside")), (vec![5, 6, 7], vec![1]));
}

#[test]
fn every_write_of_an_owner_looks_at_the_folder() {
    let scratch = folder();
    let path = scratch.path().join("checkpoints");
    let owned = CheckpointFolder::own(&path).expect("no process owns it");
    let saving = Saving::begin(&owned, 1).expect("the folder");
    fs::rename(&path, scratch.path().join("aside")).expect("a move");
    let _other = CheckpointFolder::own(&path).expect("no process owns it");
    let manifest = Manifest::new(1, Cursor::default(), Default::default(), Vec::new());
    let refusals = [
        saving.commit(&manifest).map(drop),
        owned.keep_newest(1),
        owned.set_best(None),
        Saving::begin(&owned, 2).map(drop),
        Saving::join(owned.identity(), 2).map(drop),
        owned.identity().require(),
    ];
    for (index, refused) in refusals.into_iter().enumerate() {
        assert!(matches!(refused, Err(CheckpointError::FolderReplaced { .. })), "{index}: {refused:?}");
    }
    assert_eq!(fs::read_dir(&path).expect("a folder").count(), 1, "only the lock of the other owner");
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
    let (text, error) = loop {
        take_steps(&mut pipeline, step..step + 1);
        step += 1;
        assert!(step < 100, "the disk is never full");
        if let Err(error) = save(&mut pipeline, step, &path, 100) {
            break (error.to_string(), error);
        }
    };
    assert!(matches!(error, CheckpointError::Io { .. }), "{text}");
    assert!(text.contains("No space left"), "{text}");
    assert_eq!(newest(&path).step(), step - 1, "the one before is the newest complete one");
    let left = fs::read_dir(&path).expect("a folder").filter(|entry| {
        entry.as_ref().is_ok_and(|entry| entry.file_name().to_string_lossy().starts_with('.'))
    });
    assert_eq!(left.count(), 0, "an unfinished checkpoint frees its space");
    fs::remove_dir_all(path.join("step-00000001")).expect("a folder");
    save(&mut pipeline, step, &path, 100).expect("there is room again");
    assert_eq!(newest(&path).step(), step);
}
