//! Two processes without MPI: one with files, and one that asks for them.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use pipewright::byte_channel::ByteChannel;
use pipewright::checkpoint::{CheckpointFolder, PartSender};
use pipewright::ids::WorldRank;
use pipewright::train::data::{DataConfig, RowPlace, TokenRows};
use tempfile::TempDir;

use super::client::{Client, Upload};
use super::message::{Answer, Folder, PIECE, Question, Reply, Request, RowSet, decoded, encoded};
use super::mirror::Mirror;
use super::pieces::{Entry, Wanted, bring, bring_pieces};
use super::remote_rows::reader_of;
use super::service::{FileService, Offer, OfferedFolder};

const DEADLINE: Duration = Duration::from_secs(20);

/// The first process with its files, and the client of another process.
struct Pair {
    first: TempDir,
    other: TempDir,
    service: FileService,
    client: Arc<Client>,
    /// The channel of the client.
    channel: ByteChannel,
}

impl Pair {
    /// Offers the files in the folder of the first process as its model.
    fn offer(&self) -> Vec<Entry> {
        let entries = Entry::list(self.first.path(), |name| name != "notes.txt");
        let folder = OfferedFolder::new(self.first.path().to_owned(), &entries);
        self.service.change(|offer| offer.model = Some(folder));
        entries
    }

    /// Asks for the first bytes of a file.
    fn read(&self, folder: Folder, name: &str, length: u64) -> Result<Vec<u8>, String> {
        let request = Request::Read { folder, name: name.to_owned(), offset: 0, length };
        let answer = self.client.wait(self.client.send(request, &[]));
        answer.map(|(_, bytes)| bytes).map_err(|error| error.to_string())
    }
}

fn pair() -> Pair {
    let [first, other] = [(); 2].map(|()| tempfile::tempdir().expect("a scratch folder"));
    let mut channels = ByteChannel::group(2).into_iter();
    let mut channel = || channels.next().expect("one of two");
    let checkpoints = first.path().join("checkpoints");
    let service = FileService::start(channel(), Offer::default(), checkpoints, DEADLINE);
    let channel = channel();
    let client = Arc::new(Client::new(channel.clone(), DEADLINE));
    Pair { first, other, service: service.expect("a thread"), client, channel }
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
    let pair = pair();
    let Pair { first, other, client, .. } = &pair;
    let large = tensors(3 * PIECE as usize);
    fs::write(first.path().join("config.json"), "{}").expect("a file");
    fs::write(first.path().join("model.safetensors"), &large).expect("a file");
    fs::write(first.path().join("notes.txt"), "for people").expect("a file");
    for (name, content) in [("empty.safetensors", ""), ("short.safetensors", "x")] {
        fs::write(first.path().join(name), content).expect("a file");
    }
    let entries = pair.offer();
    let to = other.path().join("model");
    bring(client, Folder::Model, &entries, &to, false).expect("all files exist");
    assert_eq!(fs::read_to_string(to.join("config.json")).expect("a file"), "{}");
    assert_eq!(fs::read_dir(&to).expect("a folder").count(), 4);
    let read = |name| fs::read_to_string(to.join(name)).expect("a file");
    assert_eq!(["empty.safetensors", "short.safetensors"].map(read), ["", "x"]);
    let path = to.join("model.safetensors");
    let found = fs::read(&path).expect("a file");
    assert_eq!((found.len(), &found[..24]), (large.len(), &large[..24]));
    assert!(found[24..].iter().all(|byte| *byte == 0));
    assert!(fs::metadata(&path).expect("a file").blocks() * 512 < PIECE, "it has a hole");

    let range = 100..PIECE + 200;
    let wanted =
        Wanted { folder: Folder::Model, path: path.clone(), ranges: vec![range.clone(), 0..0, 0..1] };
    bring_pieces(client, &[wanted]).expect("the bytes exist");
    let found = fs::read(&path).expect("a file");
    let range = range.start as usize..range.end as usize;
    assert_eq!(found[range.clone()], large[range.clone()]);
    assert!(found[range.end..].iter().all(|byte| *byte == 0));
    bring(client, Folder::Model, &entries, &to, true).expect("all files exist");
    assert_eq!(fs::read(&path).expect("a file"), large);
}

/// Takes the next question to the first process, and returns its number; `None` if none comes in time.
fn next_question(first: &ByteChannel, patience: Duration) -> Option<u64> {
    let (_, message) = first.incoming().recv_timeout(patience).ok()?;
    decoded::<Question>(&message).map(|(question, _)| question.number)
}

#[test]
fn small_ranges_of_several_files_are_under_way_together() {
    let [first, other] = ByteChannel::group(2).try_into().expect("two channels");
    let scratch = tempfile::tempdir().expect("a scratch folder");
    let wanted = |name: &str| {
        let path = scratch.path().join(name);
        fs::write(&path, "...").expect("a file");
        Wanted { folder: Folder::Model, path, ranges: vec![0..1, 2..3] }
    };
    let wanted = ["a", "b", "c"].map(wanted);
    let client = Client::new(other, DEADLINE);
    std::thread::scope(|scope| {
        let bringing = scope.spawn(|| bring_pieces(&client, &wanted));
        let next = || next_question(&first, DEADLINE).expect("a question");
        let numbers = [next(), next(), next(), next()];
        assert_eq!(next_question(&first, Duration::from_millis(50)), None, "four questions have no answer");
        let answer = |number| {
            let answer = encoded(&Reply { number, answer: Answer::Bytes }, number.to_string().as_bytes());
            first.send(WorldRank::new(1), answer);
        };
        // The answers come in another order than the questions.
        numbers.into_iter().rev().for_each(answer);
        (4..6).for_each(|_| answer(next()));
        bringing.join().expect("no panic").expect("all ranges come");
    });
    let found = ["a", "b", "c"].map(|name| fs::read_to_string(scratch.path().join(name)).expect("a file"));
    assert_eq!(found, ["0.1", "2.3", "4.5"]);
}

#[test]
fn only_the_declared_files_are_read_while_they_stay_the_same() {
    let pair = pair();
    let path = |name: &str| pair.first.path().join(name);
    for name in ["a", "b", "notes.txt"] {
        fs::write(path(name), "abc").expect("a file");
    }
    fs::create_dir(path("folder")).expect("a folder");
    let made = std::process::Command::new("mkfifo").arg(path("pipe")).status();
    assert!(made.is_ok_and(|status| status.success()));
    std::os::unix::fs::symlink("/dev/zero", path("device")).expect("a link");
    std::os::unix::fs::symlink("a", path("link")).expect("a link");
    let refuse = |folder, name: &str, length, part: &str| {
        let refusal = pair.read(folder, name, length).expect_err("it is refused");
        assert!(refusal.contains(part), "{name}: {refusal}");
    };
    refuse(Folder::Model, "a", 3, "no such folder");
    let names: Vec<String> = pair.offer().into_iter().map(|entry| entry.name).collect();
    // The files of a model in a cache are links.
    assert_eq!(names, ["a", "b", "link"]);
    assert_eq!(
        ["a", "link"].map(|name| pair.read(Folder::Model, name, 3)),
        [(); 2].map(|()| Ok(b"abc".to_vec()))
    );
    std::os::unix::fs::symlink("notes.txt", path("later")).expect("a link");
    for name in ["../a", "/etc/passwd", "folder", "pipe", "device", "later", "notes.txt"] {
        refuse(Folder::Model, name, 3, "is not a file of the run");
    }
    refuse(Folder::Model, "a", PIECE + 1, "are too many");
    refuse(Folder::Model, "a", 4, "cannot be read");
    refuse(Folder::Adapter, "a", 3, "no such folder");
    fs::write(path("a"), "abcd").expect("a file");
    refuse(Folder::Model, "a", 3, "the file has changed since the run has begun");
    fs::remove_file(path("b")).expect("the file");
    let made = std::process::Command::new("mkfifo").arg(path("b")).status();
    assert!(made.is_ok_and(|status| status.success()));
    refuse(Folder::Model, "b", 3, "cannot be read");
}

#[test]
fn a_process_that_gets_no_answer_gives_up() {
    let mut channels = ByteChannel::group(2);
    let client = Client::new(channels.remove(1), Duration::from_millis(50));
    let number = client.send(Request::Rows { set: RowSet::Training, places: Vec::new() }, &[]);
    let reason = client.wait(number).expect_err("nothing answers").to_string();
    assert!(reason.contains("has not answered") && reason.contains("run.deadline_seconds"), "{reason}");
}

#[test]
fn answers_to_other_questions_are_kept() {
    let [first, other] = ByteChannel::group(2).try_into().expect("two channels");
    let client = Client::new(other, DEADLINE);
    let ask = || client.send(Request::Rows { set: RowSet::Training, places: Vec::new() }, &[]);
    let numbers: Vec<u64> = (0..4).map(|_| ask()).collect();
    for &number in numbers.iter().rev() {
        first.send(WorldRank::new(1), encoded(&Reply { number, answer: Answer::Kept }, &[]));
    }
    assert!(numbers.iter().all(|&number| matches!(client.wait(number), Ok((Answer::Kept, _)))));
}

#[test]
fn rows_are_requested_early() {
    let Pair { service, client, channel, first: _first, .. } = pair();
    let config = DataConfig { seq_len: 4, shuffle: true, seed: 1, ..DataConfig::default() };
    let rows = config.open_text("to be or not to be, that is the question", 256, 1).expect("a text");
    let reader = reader_of(&client, RowSet::Training);
    let place = |row| RowPlace::new(0, row);
    service.change(|offer| offer.training = Some(rows.clone()));
    let check = |own: &[RowPlace], next: &[RowPlace]| {
        assert_eq!(reader.batch(own, next).expect("rows"), rows.batch(own).expect("rows"));
    };
    check(&[place(0)], &[place(1)]);
    let since = std::time::Instant::now();
    while channel.incoming().is_empty() {
        assert!(since.elapsed() < DEADLINE, "the next rows were not requested");
        std::thread::sleep(Duration::from_millis(1));
    }
    // No further question is answered.
    drop(service);
    check(&[place(1)], &[]);
}

#[test]
fn rows_come_in_any_order() {
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
    let Pair { first, other, service, client, .. } = pair();
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
    let counted = [sent.load(std::sync::atomic::Ordering::Relaxed), service.arrivals().bytes()];
    assert_eq!(counted, [part.len() as u64; 2]);
    let empty = other.path().join("rank-0002.safetensors");
    fs::write(&empty, "").expect("a file");
    send(&empty).expect("the first process keeps it");
    assert_eq!(fs::read(folder.join(".saving-00000007/rank-0002.safetensors")).expect("the file"), b"");
    // The first process cannot keep the note, and says so to the sender.
    let note = other.path().join("rank-0001.note");
    fs::write(&note, "{}").expect("a file");
    fs::create_dir(folder.join(".saving-00000007/rank-0001.note")).expect("a folder");
    let refusal = send(&note).expect_err("a folder has its name").to_string();
    assert!(refusal.contains("the first process: ") && refusal.contains("rank-0001.note"), "{refusal}");
    let wrong = other.path().join("lock");
    fs::write(&wrong, "x").expect("a file");
    let refusal = send(&wrong).expect_err("it is not a part").to_string();
    assert!(refusal.contains("`lock` is not the name of a part"), "{refusal}");
}

#[test]
fn a_folder_is_left_over_if_no_process_has_locked_it() {
    let scratch = tempfile::tempdir().expect("a scratch folder");
    let runs = scratch.path().join("runs");
    let count = || fs::read_dir(&runs).expect("a folder").count();
    let create = || Mirror::create_in(scratch.path(), Duration::from_secs(20)).expect("a folder");
    let first = create();
    // The number of its process says nothing: a process that lives does not use it, and one in another container may.
    for name in [std::process::id().to_string(), "1".to_owned(), "x".to_owned()] {
        fs::create_dir_all(runs.join(&name).join("run")).expect("a folder");
    }
    fs::write(runs.join("x/lock"), "").expect("a file");
    let second = create();
    assert_eq!(count(), 2);
    assert!(first.run().is_dir() && second.run().is_dir() && first.run() != second.run());
    drop(first);
    assert_eq!(count(), 1);
    let all = fs::File::open(scratch.path().join("lock")).expect("the lock of all");
    all.lock().expect("no other process uses it");
    let error = Mirror::create_in(scratch.path(), Duration::ZERO).err().expect("it is locked").to_string();
    assert!(error.contains("another process has locked"), "{error}");
    drop(all);
    drop(second);
    assert_eq!(count(), 0);
}
