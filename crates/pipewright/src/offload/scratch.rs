//! A file for one microbatch, whose space is free when it is dropped or its process ends. Its folder may be one that
//! all users write to, so the file has no name if possible, and only its user can open it.

use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::process;

/// A file of this process alone.
pub(super) struct ScratchFile {
    file: File,
    pub(super) path: PathBuf,
    /// Whether the file still has its name, which the system needs as long as the file is open.
    is_named: bool,
}

impl ScratchFile {
    /// The most names that are tried. Files of other processes may have the same ones.
    const NAMES: u32 = 1000;

    /// Makes an empty file in `folder`. `name` is a part of its name, for error messages.
    pub(super) fn create(folder: &Path, name: &str) -> io::Result<Self> {
        if let Some(file) = without_name(folder) {
            return Ok(Self { file, path: folder.join(name), is_named: false });
        }
        Self::create_named(folder, name)
    }

    fn create_named(folder: &Path, name: &str) -> io::Result<Self> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create_new(true);
        #[cfg(unix)]
        std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
        let process = process::id();
        let mut last = None;
        for number in 0..Self::NAMES {
            let path = folder.join(format!("offload-{process}-{name}-{number}.tmp"));
            match options.open(&path) {
                Ok(file) => {
                    // Unix keeps the contents of a file without a name until it is closed. Elsewhere the name is
                    // removed when the file is dropped.
                    let is_named = std::fs::remove_file(&path).is_err();
                    return Ok(Self { file, path, is_named });
                }
                Err(error) if error.kind() == ErrorKind::AlreadyExists => last = Some(error),
                Err(error) => return Err(error),
            }
        }
        Err(last.unwrap_or_else(|| ErrorKind::AlreadyExists.into()))
    }

    /// Adds bytes to the end.
    pub(super) fn write_all(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all(bytes)
    }

    /// Goes to the start.
    pub(super) fn rewind(&mut self) -> io::Result<()> {
        self.file.seek(SeekFrom::Start(0)).map(drop)
    }

    /// Reads the next bytes.
    pub(super) fn read_exact(&mut self, bytes: &mut [u8]) -> io::Result<()> {
        self.file.read_exact(bytes)
    }
}

/// Makes a file that never has a name; `None` if the system or the file system has no such files, or reports another
/// error, which a file with a name then has too.
#[cfg(target_os = "linux")]
fn without_name(folder: &Path) -> Option<File> {
    use rustix::fs::{Mode, OFlags};

    // With `EXCL`, it cannot get a name later.
    let flags = OFlags::TMPFILE | OFlags::EXCL | OFlags::RDWR | OFlags::CLOEXEC;
    rustix::fs::open(folder, flags, Mode::RUSR | Mode::WUSR).ok().map(File::from)
}

#[cfg(not(target_os = "linux"))]
fn without_name(_folder: &Path) -> Option<File> {
    None
}

impl Drop for ScratchFile {
    fn drop(&mut self) {
        if self.is_named {
            // Nothing can be done about a file that cannot be removed.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_leaves_nothing_behind() {
        check(ScratchFile::create);
        check(ScratchFile::create_named);
    }

    fn check(create: impl Fn(&Path, &str) -> io::Result<ScratchFile>) {
        let folder = tempfile::tempdir().expect("a folder");
        let files = || std::fs::read_dir(folder.path()).expect("a folder").count();
        let mut made: Vec<ScratchFile> =
            (0..3).map(|_| create(folder.path(), "a").expect("a file")).collect();
        #[cfg(unix)]
        for file in &made {
            use std::os::unix::fs::PermissionsExt;

            let mode = file.file.metadata().expect("an open file").permissions().mode();
            assert_eq!(mode & 0o777, 0o600, "no other user can open it");
        }
        for (number, file) in (0..).zip(&mut made) {
            file.write_all(&[number; 5]).expect("space");
        }
        if cfg!(unix) {
            assert_eq!(files(), 0, "a process that is killed leaves no file");
        }
        for (number, file) in (0..).zip(&mut made) {
            let mut bytes = [9; 5];
            file.rewind().and_then(|()| file.read_exact(&mut bytes)).expect("bytes");
            assert_eq!(bytes, [number; 5]);
        }
        drop(made);
        assert_eq!(files(), 0);
    }
}
