//! Parts of checkpoints from a host that does not see the folder of the checkpoints, and a copy there with the parameters of
//! one rank.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use pipewright::checkpoint::{
    Checkpoint, CheckpointError, CheckpointFolder, CheckpointWriter, MANIFEST, PartPiece, PartReceiver,
    PartSender,
};
use pipewright::ids::WorldRank;

use super::ruined::ruin;
use super::{DEADLINE, adamw, folder, launch, state, take_steps};

/// Gives the files to the receiver in small pieces.
struct Sender(Arc<Mutex<PartReceiver>>);

impl PartSender for Sender {
    fn send(&self, step: u64, file: &Path, _: &AtomicU64) -> Result<(), CheckpointError> {
        let bytes = fs::read(file).expect("the file of the part");
        let name = file.file_name().expect("a file").to_string_lossy();
        (0..).zip(bytes.chunks(1000)).try_for_each(|(index, piece)| {
            let (offset, of) = (index * 1000, bytes.len() as u64);
            let piece = PartPiece { step, name: &name, offset, of, bytes: piece };
            self.0.lock().expect("no thread has panicked").keep(WorldRank::new(1), piece)
        })
    }
}

#[test]
fn a_checkpoint_is_complete_with_the_part_of_another_host() {
    let (own, other) = (folder(), folder());
    let receiver = Arc::new(Mutex::new(PartReceiver::new(own.path().to_owned(), DEADLINE)));
    let arrivals = receiver.lock().expect("no thread has panicked").arrivals();
    let open = |path: &Path| CheckpointFolder::own(path).expect("a folder");
    let first = CheckpointWriter::start_receiving(open(own.path()), 2, 2, DEADLINE, arrivals);
    let second = CheckpointWriter::send(open(other.path()), Sender(receiver), DEADLINE);
    let mut writers = [first.expect("a thread"), second.expect("a thread")];
    let mut pipeline = launch("1f1b", 2, adamw());
    take_steps(&mut pipeline, 0..2);
    for (index, writer) in writers.iter_mut().enumerate() {
        let mut part = state(&mut pipeline, 2);
        part.ranks = vec![part.ranks.remove(index)];
        writer.save(part).expect("nothing is under way");
    }
    for writer in &mut writers {
        writer.wait().expect("it is written and sent");
    }
    let whole = Checkpoint::open(&own.path().join("step-00000002")).expect("a sound checkpoint");
    assert_eq!(whole.manifest().files.len(), 2);
    let left = fs::read_dir(other.path()).expect("a folder").flatten();
    let left: Vec<_> = left.map(|entry| entry.file_name()).filter(|name| name != "lock").collect();
    assert!(left.is_empty(), "{left:?}");

    // The other host gets the headers, and the tensors of its own rank.
    let mirror = other.path().join("step-00000002");
    fs::create_dir(&mirror).expect("a folder");
    fs::copy(whole.path().join(MANIFEST), mirror.join(MANIFEST)).expect("the manifest");
    let part = &whole.manifest().files[1];
    let own: Vec<_> = Checkpoint::ranges_of(&whole.path().join(&part.name), |_| true)
        .expect("a header")
        .into_iter()
        .collect();
    let paths: Vec<String> = whole.parameters().map(|parameter| parameter.path.to_owned()).collect();
    let is_own = |path: &str| {
        let name = &part.name;
        let ranges =
            Checkpoint::ranges_of(&whole.path().join(name), |other| other == path).expect("a header");
        !ranges.is_empty() && ranges.iter().all(|range| own.contains(range))
    };
    for file in &whole.manifest().files {
        let bytes = fs::read(whole.path().join(&file.name)).expect("a file");
        let copy = File::create_new(mirror.join(&file.name)).expect("a file");
        copy.set_len(bytes.len() as u64).expect("space");
        let length = u64::from_le_bytes(*bytes.first_chunk().expect("a length")) as usize + 8;
        copy.write_all_at(&bytes[..length], 0).expect("space");
        for range in Checkpoint::ranges_of(&mirror.join(&file.name), is_own).expect("a header") {
            copy.write_all_at(&bytes[range.start as usize..range.end as usize], range.start).expect("space");
        }
    }
    assert!(Checkpoint::open(&mirror).is_err(), "the hashes are of the whole files");
    let copy = Checkpoint::open_part(&mirror).expect("it has the headers");
    assert_eq!((copy.manifest(), copy.parameters().count()), (whole.manifest(), whole.parameters().count()));
    let (mut same, mut holes) = (0, 0);
    for path in &paths {
        let parameter = whole.parameters().find(|parameter| parameter.path == path).expect("it exists");
        let name = Arc::from(path.as_str());
        let read = |checkpoint: &Checkpoint| {
            checkpoint.parameter(&name, parameter.shape, parameter.dtype).expect("it exists")
        };
        if is_own(path) {
            assert_eq!(read(&copy), read(&whole), "{path}");
            same += 1;
        } else {
            assert!(read(&copy).iter::<f32>().all(|value| value == 0.0), "{path}");
            holes += 1;
        }
    }
    assert!(same > 0 && holes > 0, "{same} {holes}");
}

#[test]
fn only_parts_of_checkpoints_are_kept_in_any_order_of_their_pieces() {
    let scratch = folder();
    let _own = CheckpointFolder::own(scratch.path()).expect("a folder");
    let mut receiver = PartReceiver::new(scratch.path().to_owned(), DEADLINE);
    let mut keep = |name: &str, offset: u64| {
        let piece = PartPiece { step: 7, name, offset, of: 4, bytes: &[1, 2] };
        receiver.keep(WorldRank::new(1), piece).is_ok()
    };
    for name in [
        "lock",
        "manifest.json",
        "../rank-0001.safetensors",
        "rank-1/../../x.note",
        "rank-x.note",
        "rank-0001",
    ] {
        assert!(!keep(name, 0), "{name}");
    }
    let name = "rank-0001.safetensors";
    assert!(keep(name, 2) && keep(name, 0), "the second piece comes first");
    let path = scratch.path().join(".saving-00000007").join(name);
    assert_eq!(fs::read(path).expect("the file"), [1, 2, 1, 2]);
    for wrong in [2, 3, 0x100, u64::MAX] {
        let name = format!("rank-{wrong}.safetensors");
        assert!(keep(&name, 2) && !keep(&name, wrong), "it has come before, or is not one of the file");
    }
    assert_eq!(receiver.arrivals().bytes(), 12);
}

#[test]
fn a_part_that_was_given_up_is_refused_and_so_is_its_note() {
    let scratch = folder();
    let _own = CheckpointFolder::own(scratch.path()).expect("a folder");
    let mut receiver = PartReceiver::new(scratch.path().to_owned(), DEADLINE);
    let mut keep = |step, name: &str, offset| {
        let piece = PartPiece { step, name, offset, of: 4, bytes: b"{}" };
        receiver.keep(WorldRank::new(1), piece).map_err(|error| error.to_string())
    };
    let (tensors, note) = ("rank-0001.safetensors", "rank-0001.note");
    assert_eq!(keep(7, tensors, 0), Ok(()));
    let refusal = keep(7, note, 0).expect_err("a piece is missing");
    assert!(refusal.ends_with("its note has come, and a part of the file is missing"), "{refusal}");
    assert!(keep(7, tensors, 3).is_err(), "it is not one of the file");
    let refusal = keep(7, tensors, 2).expect_err("it was given up");
    assert!(refusal.ends_with("an earlier piece of the file could not be kept"), "{refusal}");
    assert!(keep(7, note, 0).is_err(), "it was given up");
    assert_eq!([keep(8, tensors, 0), keep(8, tensors, 2), keep(8, note, 0)], [(); 3].map(Ok));
    assert!(scratch.path().join(".saving-00000008").join(note).is_file());
}

#[test]
fn a_checkpoint_that_was_given_up_takes_no_later_part() {
    let own = folder();
    let mut receiver = PartReceiver::new(own.path().to_owned(), DEADLINE);
    let owned = CheckpointFolder::own(own.path()).expect("a folder");
    let brief = Duration::from_secs(2);
    let writer = CheckpointWriter::start_receiving(owned, 2, 2, brief, receiver.arrivals());
    let mut writer = writer.expect("a thread");
    let mut keep = |step, offset| {
        let piece = PartPiece { step, name: "rank-0001.safetensors", offset, of: 4, bytes: &[1, 2] };
        receiver.keep(WorldRank::new(1), piece).map_err(|error| error.to_string())
    };
    assert_eq!(keep(2, 0), Ok(()));
    let mut pipeline = launch("1f1b", 2, adamw());
    let mut part = state(&mut pipeline, 2);
    part.ranks.truncate(1);
    writer.save(part).expect("nothing is under way");
    let since = Instant::now();
    let missing = loop {
        if let Err(error) = writer.poll() {
            break error.to_string();
        }
        assert!(since.elapsed() < DEADLINE, "the other part does not come");
        std::thread::sleep(Duration::from_millis(1));
    };
    assert!(missing.contains("the files of ranks [1] are missing"), "{missing}");
    assert_eq!(keep(2, 2), Err("the checkpoint of step 2 was given up".to_owned()));
    assert!(!own.path().join(".saving-00000002").exists());
    assert_eq!(keep(3, 0), Ok(()));
}

/// Notes the names of the files that a process sends.
struct Names(Arc<Mutex<Vec<String>>>);

impl PartSender for Names {
    fn send(&self, _: u64, file: &Path, _: &AtomicU64) -> Result<(), CheckpointError> {
        let name = file.file_name().expect("a file").to_string_lossy().into_owned();
        self.0.lock().expect("no thread has panicked").push(name);
        Ok(())
    }
}

#[test]
fn only_parts_with_a_note_are_sent() {
    let scratch = folder();
    let sent = Arc::default();
    let owned = CheckpointFolder::own(scratch.path()).expect("a folder");
    let writer = CheckpointWriter::send(owned, Names(Arc::clone(&sent)), DEADLINE);
    let mut writer = writer.expect("a thread");
    let mut pipeline = launch("1f1b", 2, adamw());
    let mut check = |pipeline: &mut _, step, is_saved, expected: &[&str]| {
        let mut part = state(pipeline, step);
        part.ranks.truncate(1);
        writer.save(part).expect("nothing is under way");
        assert_eq!(writer.wait().is_ok(), is_saved, "{step}");
        assert_eq!(std::mem::take(&mut *sent.lock().expect("no thread has panicked")), expected, "{step}");
    };
    check(&mut pipeline, 2, true, &["rank-0000.safetensors", "rank-0000.note"]);
    // A folder takes the place of the file.
    fs::create_dir_all(scratch.path().join(".saving-00000003/rank-0000.safetensors")).expect("a folder");
    check(&mut pipeline, 3, false, &[]);
    ruin(&mut pipeline);
    check(&mut pipeline, 4, false, &["rank-0000.note"]);
}
