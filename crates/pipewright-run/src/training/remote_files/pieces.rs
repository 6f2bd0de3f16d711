//! Brings files of the first process to the folder of another one ([`Mirror`](super::mirror::Mirror)), in pieces.

use std::collections::VecDeque;
use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use pipewright::bounded_file::create_fresh;
use serde::{Deserialize, Serialize};

use crate::error::{ErrorKind, RunError};
use crate::training::remote_files::client::Client;
use crate::training::remote_files::message::{Answer, Folder, PIECE, Request};

/// The most questions without an answer.
const WINDOW: usize = 4;

/// The length of the length of the header of a file of tensors, and the longest header.
const LENGTH: u64 = 8;
const LONGEST_HEADER: u64 = 100_000_000;

/// The slowest network that is waited for, in bytes per second.
const SLOWEST: u64 = 200_000;

/// Returns the time that bytes may take on their way. Processes that wait for others add it to their deadline. A process
/// that sends or gets the bytes gives up when none move.
pub(crate) fn time_to_send(bytes: u64) -> Duration {
    Duration::from_secs(bytes / SLOWEST)
}

/// A file of the first process.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Entry {
    pub(crate) name: String,
    pub(crate) bytes: u64,
}

impl Entry {
    /// Returns whether the file has tensors.
    pub(crate) fn has_tensors(&self) -> bool {
        self.name.ends_with(".safetensors")
    }

    /// Returns the files in a folder that `is_needed`.
    pub(crate) fn list(folder: &Path, is_needed: impl Fn(&str) -> bool) -> Vec<Self> {
        let entries = fs::read_dir(folder).into_iter().flatten().flatten();
        let entry = |entry: fs::DirEntry| {
            // A model in a cache has links to its files.
            let found = fs::metadata(entry.path()).ok().filter(fs::Metadata::is_file)?;
            Some(Self { name: entry.file_name().into_string().ok()?, bytes: found.len() })
        };
        let mut entries: Vec<Self> =
            entries.filter_map(entry).filter(|entry| is_needed(&entry.name)).collect();
        entries.sort_unstable_by(|a, b| a.name.cmp(&b.name));
        entries
    }
}

/// Ranges of a file in a folder of the first process, for a file of the same name.
#[derive(Clone, Debug)]
pub(crate) struct Wanted {
    pub(crate) folder: Folder,
    /// The file here, which exists.
    pub(crate) path: PathBuf,
    pub(crate) ranges: Vec<Range<u64>>,
}

impl Wanted {
    /// Returns the number of bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.ranges.iter().map(|range| range.end - range.start).sum()
    }

    /// Returns ranges that are as long as one message at most.
    fn pieces(&self) -> impl Iterator<Item = Range<u64>> {
        let split = |range: &Range<u64>| {
            let end = range.end;
            range.clone().step_by(PIECE as usize).map(move |start| start..end.min(start + PIECE))
        };
        self.ranges.iter().flat_map(split)
    }
}

/// Brings files of the first process into a folder: files of tensors without their tensors, unless `whole`, and other files
/// whole.
///
/// # Errors
/// Fails if a file does not come or cannot be written.
pub(crate) fn bring(
    client: &Client,
    from: Folder,
    entries: &[Entry],
    to: &Path,
    whole: bool,
) -> Result<(), RunError> {
    fs::create_dir_all(to).map_err(|error| unwritten(to, &error))?;
    for entry in entries {
        let path = to.join(&entry.name);
        let created = create_fresh(&path).and_then(|file| file.set_len(entry.bytes));
        created.map_err(|error| unwritten(&path, &error))?;
    }
    // A file that is too short for a header is whole with its first bytes.
    let is_part = |entry: &&Entry| entry.has_tensors() && !whole;
    let first = |entry: &Entry| if is_part(&entry) { LENGTH.min(entry.bytes) } else { entry.bytes };
    let wanted =
        |entry: &Entry, range| Wanted { folder: from, path: to.join(&entry.name), ranges: vec![range] };
    let begins: Vec<Wanted> = entries.iter().map(|entry| wanted(entry, 0..first(entry))).collect();
    bring_pieces(client, &begins)?;
    let headers = entries.iter().filter(is_part).filter(|entry| entry.bytes > LENGTH).map(|entry| {
        let path = to.join(&entry.name);
        let mut length = [0; LENGTH as usize];
        let read = File::open(&path).and_then(|file| file.read_exact_at(&mut length, 0));
        read.map_err(|error| RunError::input(format!("{}: cannot be read: {error}", path.display())))?;
        let end = u64::from_le_bytes(length).min(LONGEST_HEADER) + LENGTH;
        Ok(wanted(entry, LENGTH..end.min(entry.bytes)))
    });
    bring_pieces(client, &headers.collect::<Result<Vec<_>, RunError>>()?)
}

/// Brings ranges of files. Questions about the next range, or the next file, do not wait for the answers to the ones before.
///
/// # Errors
/// Fails if they do not come or cannot be written.
pub(crate) fn bring_pieces(client: &Client, wanted: &[Wanted]) -> Result<(), RunError> {
    let mut pieces = wanted.iter().flat_map(|file| file.pieces().map(move |piece| (file, piece)));
    let mut waiting = VecDeque::new();
    let mut open: Option<(&Path, File)> = None;
    loop {
        while waiting.len() < WINDOW
            && let Some((file, piece)) = pieces.next()
        {
            let name = file.path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let length = piece.end - piece.start;
            let request = Request::Read { folder: file.folder, name, offset: piece.start, length };
            waiting.push_back((file, piece, client.send(request, &[])));
        }
        let Some((Wanted { path, .. }, piece, number)) = waiting.pop_front() else { return Ok(()) };
        let failed =
            |reason: &dyn std::fmt::Display| RunError::input(format!("{}: {reason}", path.display()));
        let (answer, bytes) = client.wait(number).map_err(|error| failed(&error))?;
        if !matches!(answer, Answer::Bytes) || bytes.len() as u64 != piece.end - piece.start {
            return Err(failed(&"the first process has sent something else than the bytes"));
        }
        let file = match open.take().filter(|(opened, _)| opened == path) {
            Some((_, file)) => Ok(file),
            None => File::options().write(true).open(path),
        };
        let file = file.map_err(|error| unwritten(path, &error))?;
        file.write_all_at(&bytes, piece.start).map_err(|error| unwritten(path, &error))?;
        open = Some((path, file));
    }
}

/// Returns the failure of a host whose disk takes no files.
pub(crate) fn unwritten(path: &Path, error: &io::Error) -> RunError {
    let path = path.display();
    RunError::new(
        ErrorKind::WrongInput,
        format!("{path}: cannot be written on this host: {error}; make room in its home folder"),
    )
}
