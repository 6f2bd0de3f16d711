//! The file in the folder of a run that names the folder of its copies in memory.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use pipewright::bounded_file::{SMALL_TEXT, read_regular, write_fresh};
use pipewright::checkpoint::CopyFolder;
use serde::{Deserialize, Serialize};

use crate::error::RunError;
use crate::run_folder::COPIES as LINK;

/// The beginning of the name of each folder of copies, and the number of hexadecimal digits after it.
const PREFIX: &str = "pipewright-";
const DIGITS: usize = 16;

/// The content of the file.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Link {
    /// The folder of the run. The copies do not belong to a folder that was copied or moved.
    run: PathBuf,
    pub(crate) copies: PathBuf,
    /// The series of the copies that the run makes. A host that was away may have copies of steps that the
    /// run has abandoned.
    series: String,
    /// The copy from which the run has resumed. It counts until the run has made its first one.
    origin: Option<Origin>,
}

/// A copy from which a run resumes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Origin {
    pub(crate) series: String,
    pub(crate) step: u64,
}

impl Link {
    /// Returns whether a copy belongs to the run as it has continued.
    pub(crate) fn accepts(&self, series: &str, step: u64) -> bool {
        let is_before = |origin: &Origin| origin.series == series && step <= origin.step;
        self.series == series || self.origin.as_ref().is_some_and(is_before)
    }
}

/// Returns the name of the folder of a run's copies, which no other run has.
pub(crate) fn unique_name(run: &Path) -> String {
    let parts = format!("{} {} {:?}", run.display(), std::process::id(), SystemTime::now());
    format!("{PREFIX}{}", &blake3::hash(parts.as_bytes()).to_hex()[..DIGITS])
}

/// Returns a name for a series of a run's copies, which no other one has.
pub(crate) fn unique_series(run: &Path) -> String {
    unique_name(run).split_off(PREFIX.len())
}

/// Writes the file that names the folder of the copies, and the series that the run makes after `origin`.
pub(crate) fn write_link(
    run: &Path,
    copies: &Path,
    series: &str,
    origin: Option<Origin>,
) -> Result<(), RunError> {
    let (path, draft) = (run.join(LINK), run.join(format!(".{LINK}")));
    let written = fs::canonicalize(run).and_then(|run| {
        let link = Link { run, copies: copies.to_owned(), series: series.to_owned(), origin };
        write_fresh(&draft, &serde_json::to_vec(&link)?)?;
        fs::rename(&draft, &path)
    });
    written.map_err(|error| RunError::unwritten(&path, &error, "choose another run.out"))
}

/// Removes the file that names the folder of the copies. It may already be gone.
pub(crate) fn remove_link(run: &Path) {
    let _ = fs::remove_file(run.join(LINK));
}

/// Returns the folder of the copies of the run in a folder, if a file names it. The folder may be gone, or
/// may have copies that the run has left behind.
pub(crate) fn link_of(run: &Path) -> Option<PathBuf> {
    read_link(run).map(|link| link.copies)
}

/// Returns whether the run in a folder has copies, or had some.
pub(crate) fn has_copies(run: &Path) -> bool {
    link_of(run).is_some()
}

/// Reads the file of a run. A path that cannot be a folder of copies does not count, because the folder is
/// removed later.
pub(crate) fn read_link(run: &Path) -> Option<Link> {
    let link: Link = serde_json::from_slice(&read_regular(&run.join(LINK), SMALL_TEXT).ok()?).ok()?;
    let digits = link.copies.file_name()?.to_str()?.strip_prefix(PREFIX)?;
    let is_name = digits.len() == DIGITS && digits.bytes().all(|byte| byte.is_ascii_hexdigit());
    (is_name && link.run == fs::canonicalize(run).ok()?).then_some(link)
}

/// Identifies the memory that a folder of copies is in: the machine since it was started, and the file
/// system, because each container of a machine has one of its own. Returns `None` if the folder around it
/// does not exist.
pub(crate) fn memory_of(copies: &Path) -> Option<String> {
    let device = fs::metadata(copies.parent()?).ok()?.dev();
    Some(format!("{} {device}", machine()))
}

/// Identifies this machine since it was started.
pub(crate) fn machine() -> String {
    let boot = read_regular(Path::new("/proc/sys/kernel/random/boot_id"), SMALL_TEXT).unwrap_or_default();
    String::from_utf8_lossy(&boot).trim().to_owned()
}

/// Removes a folder of copies that a run does not need, if it is one and no other user could have made it.
pub(crate) fn remove_copies(copies: &Path) {
    if CopyFolder::find(copies).is_ok() {
        // Best effort: files that remain are never used.
        let _ = CopyFolder::remove(copies);
    }
}

/// Returns the bytes that the copies of the run in a folder take, if they are in the file system of `folder` and can be
/// removed.
pub(crate) fn earlier_bytes(run: &Path, folder: &Path) -> u64 {
    let device = |path: &Path| fs::metadata(path).ok().map(|found| found.dev());
    let copies = link_of(run).filter(|copies| device(copies).is_some() && device(copies) == device(folder));
    let copies = copies.filter(|copies| CopyFolder::find(copies).is_ok());
    copies.map_or(0, |copies| bytes_below(&copies))
}

/// Returns the bytes that the files below a folder take; 0 if it does not exist.
pub(crate) fn bytes_below(folder: &Path) -> u64 {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let bytes = entries.filter_map(|entry| {
        let found = entry.metadata().ok()?;
        Some(if found.is_dir() { bytes_below(&entry.path()) } else { found.blocks() * 512 })
    });
    bytes.fold(0, u64::saturating_add)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A run in a scratch folder, with a folder of copies that has a file of 64 KiB.
    struct Linked {
        scratch: tempfile::TempDir,
        run: PathBuf,
        copies: PathBuf,
    }

    fn linked() -> Linked {
        let scratch = tempfile::tempdir().expect("a scratch folder");
        let run = scratch.path().join("run");
        fs::create_dir(&run).expect("a folder");
        let copies = scratch.path().join(unique_name(&run));
        CopyFolder::create(&copies).expect("a folder");
        fs::create_dir(copies.join("copy")).expect("a folder");
        fs::write(copies.join("copy/file"), vec![1; 64 << 10]).expect("a file");
        write_link(&run, &copies, "first", None).expect("the folder takes files");
        Linked { scratch, run, copies }
    }

    #[test]
    fn the_copies_of_a_run_do_not_belong_to_its_folder_elsewhere() {
        let Linked { scratch, run, copies } = linked();
        assert_eq!(link_of(&run), Some(copies));
        let moved = scratch.path().join("moved");
        fs::rename(&run, &moved).expect("a free name");
        assert_eq!([link_of(&run), link_of(&moved)], [None, None]);
    }

    #[test]
    fn copies_of_steps_that_the_run_has_abandoned_are_not_accepted() {
        let Linked { scratch: _scratch, run, copies } = linked();
        let origin = Origin { series: "first".to_owned(), step: 40 };
        write_link(&run, &copies, "second", Some(origin)).expect("the folder takes files");
        let link = read_link(&run).expect("the link");
        let accepts = |series, step| link.accepts(series, step);
        assert!(accepts("first", 40) && accepts("first", 39) && accepts("second", 41));
        assert!(!accepts("first", 41) && !accepts("third", 40));
        assert_ne!(unique_series(&run), unique_series(&run));
    }

    #[test]
    fn a_folder_that_is_not_one_of_copies_is_not_removed() {
        let Linked { scratch, run, copies } = linked();
        let foreign = scratch.path().join("mine");
        fs::create_dir(&foreign).expect("a folder");
        write_link(&run, &foreign, "first", None).expect("the folder takes files");
        assert_eq!(link_of(&run), None, "the name of a folder of copies is different");
        let named = scratch.path().join("pipewright-0123456789abcdef");
        fs::rename(&foreign, &named).expect("a free name");
        remove_copies(&named);
        assert!(named.exists(), "it has no lock of a folder of copies");
        remove_copies(&copies);
        assert!(!copies.exists());
    }

    #[test]
    fn the_bytes_of_earlier_copies_count_in_their_own_file_system() {
        let Linked { scratch, run, .. } = linked();
        assert!(earlier_bytes(&run, scratch.path()) >= 64 << 10);
        assert_eq!(earlier_bytes(&run, Path::new("/proc")), 0);
        assert_eq!(earlier_bytes(scratch.path(), scratch.path()), 0, "no run is here");
    }
}
