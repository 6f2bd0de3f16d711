//! Two processes without MPI: one with files, and one that asks for them.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use pipewright::byte_channel::ByteChannel;
use pipewright::checkpoint::{CheckpointFolder, PartSender};
use pipewright::train::data::{DataConfig, RowPlace, TokenRows};
use tempfile::TempDir;

use super::client::{Client, Upload};
use super::message::{Folder, PIECE, Request, RowSet};
use super::mirror::{Entry, bring, bring_ranges};
use super::remote_rows::reader_of;
use super::service::{FileService, Offer};

const DEADLINE: Duration = Duration::from_secs(20);

/// The first process with its files, and the client of another process.
struct Pair {
    first: TempDir,
    other: TempDir,
    service: FileService,
    client: Arc<Client>,
}

fn pair() -> Pair {
    let [first, other] = [(); 2].map(|()| tempfile::tempdir().expect("a scratch folder"));
    let mut channels = ByteChannel::group(2).into_iter();
    let mut channel = || channels.next().expect("one of two");
    let offer = Offer { model: Some(first.path().to_owned()), ..Offer::default() };
    let service = FileService::start(channel(), offer, first.path().join("checkpoints"), DEADLINE);
    let client = Arc::new(Client::new(channel(), DEADLINE));
    Pair { first, other, service: service.expect("a thread"), client }
}

/// Returns a file of tensors with so many bytes after its header.
fn tensors(bytes: usize) -> Vec<u8> {
    let header = b"{\"a\":1}         ";
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(header);
    file.extend((0..bytes).map(|index| (index % 251) as u8 + 1));
    file
}

#[test]
fn a_mirror_has_small_files_whole_and_holes_in_files_of_tensors() {
    let Pair { first, other, service: _service, client } = pair();
    let large = tensors(3 * PIECE as usize);
    fs::write(first.path().join("config.json"), "{}").expect("a file");
    fs::write(first.path().join("model.safetensors"), &large).expect("a file");
    fs::write(first.path().join("notes.txt"), "for people").expect("a file");
    let entries = Entry::list(first.path(), |name| name != "notes.txt");
    let to = other.path().join("model");
    bring(&client, Folder::Model, &entries, &to, false).expect("all files exist");
    assert_eq!(fs::read_to_string(to.join("config.json")).expect("a file"), "{}");
    assert_eq!(fs::read_dir(&to).expect("a folder").count(), 2);
    let path = to.join("model.safetensors");
    let found = fs::read(&path).expect("a file");
    assert_eq!((found.len(), &found[..24]), (large.len(), &large[..24]));
    assert!(found[24..].iter().all(|byte| *byte == 0));
    assert!(fs::metadata(&path).expect("a file").blocks() * 512 < PIECE, "it has a hole");

    let range = 100..PIECE + 200;
    bring_ranges(&client, Folder::Model, &path, &[range.clone(), 0..0]).expect("the bytes exist");
    let found = fs::read(&path).expect("a file");
    let range = range.start as usize..range.end as usize;
    assert_eq!(found[range.clone()], large[range.clone()]);
    assert!(found[range.end..].iter().all(|byte| *byte == 0));
    bring(&client, Folder::Model, &entries, &to, true).expect("all files exist");
    assert_eq!(fs::read(&path).expect("a file"), large);
}

#[test]
fn only_files_of_the_offered_folders_are_read() {
    let Pair { first, service: _service, client, .. } = pair();
    fs::write(first.path().join("a"), "abc").expect("a file");
    let ask = |folder, name: &str, length| {
        let request = Request::Read { folder, name: name.to_owned(), offset: 0, length };
        let number = client.send(request, &[]);
        client.wait(number).map(|(_, bytes)| bytes)
    };
    assert_eq!(ask(Folder::Model, "a", 3), Ok(b"abc".to_vec()));
    let refuse = |folder, name: &str, length, part: &str| {
        let refusal = ask(folder, name, length).expect_err("it is refused");
        assert!(refusal.contains(part), "{refusal}");
    };
    refuse(Folder::Model, "../a", 3, "is not the name of a file");
    refuse(Folder::Model, "/etc/passwd", 3, "is not the name of a file");
    refuse(Folder::Model, "a", PIECE + 1, "are too many");
    refuse(Folder::Model, "a", 4, "cannot be read");
    refuse(Folder::Adapter, "a", 3, "no such folder");
}

#[test]
fn a_process_that_gets_no_answer_gives_up() {
    let mut channels = ByteChannel::group(2);
    let client = Client::new(channels.remove(1), Duration::from_millis(50));
    let number = client.send(Request::Rows { set: RowSet::Training, places: Vec::new() }, &[]);
    let reason = client.wait(number).expect_err("nothing answers");
    assert!(reason.contains("has not answered") && reason.contains("run.deadline_seconds"), "{reason}");
}

#[test]
fn rows_come_early_and_in_any_order() {
    let Pair { service, client, .. } = pair();
    let config = DataConfig { seq_len: 4, shuffle: true, seed: 1, ..DataConfig::default() };
    let rows = config.open_text("to be or not to be, that is the question", 256, 1).expect("a text");
    let reader = reader_of(&client, RowSet::Training);
    let place = |row| RowPlace::new(0, row);
    assert!(reader.batch(&[place(0)], &[]).is_err(), "the data is not open yet");
    service.change(|offer| offer.training = Some(rows.clone()));
    let check = |own: &[RowPlace], next: &[RowPlace]| {
        assert_eq!(reader.batch(own, next).expect("rows"), rows.batch(own).expect("rows"));
    };
    check(&[place(0), place(1)], &[place(2)]);
    check(&[place(2)], &[place(3)]);
    // A run that resumes takes other rows than it has asked for early.
    check(&[place(1)], &[]);
    assert!(reader.batch(&[place(rows.rows())], &[]).is_err(), "there is no such row");
    let mut own = rows.clone();
    let mut remote = TokenRows::remote(rows.outline().expect("readable"), &config, reader);
    for _ in 0..2 * rows.rows() {
        assert_eq!(remote.next_batch(2).expect("rows"), own.next_batch(2).expect("rows"));
    }
}

#[test]
fn a_part_of_a_checkpoint_goes_to_the_first_process() {
    let Pair { first, other, service, client } = pair();
    let folder = first.path().join("checkpoints");
    let _own = CheckpointFolder::own(&folder).expect("a folder");
    let part = tensors(2 * PIECE as usize + 5);
    let path = other.path().join("rank-0001.safetensors");
    fs::write(&path, &part).expect("a file");
    let sent = AtomicU64::new(0);
    let send = |path: &Path| Upload(client.clone()).send(7, path, &sent);
    send(&path).expect("the first process keeps it");
    let kept = fs::read(folder.join(".saving-00000007/rank-0001.safetensors")).expect("the file");
    assert!(kept == part, "the bytes are the same");
    let counted = [&sent, &*service.arrived()].map(|count| count.load(std::sync::atomic::Ordering::Relaxed));
    assert_eq!(counted, [part.len() as u64; 2]);
    let wrong = other.path().join("lock");
    fs::write(&wrong, "x").expect("a file");
    let refusal = send(&wrong).expect_err("it is not a part").to_string();
    assert!(refusal.contains("`lock` is not the name of a part"), "{refusal}");
}
