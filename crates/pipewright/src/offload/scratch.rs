//! A file for one microbatch, whose space is free when it is dropped or its process ends.

use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::process;

/// A file of this process alone.
pub(super) struct ScratchFile {
    file: File,
    path: PathBuf,
    /// Whether the file still has its name, which the system needs as long as the file is open.
    is_named: bool,
}

impl ScratchFile {
    /// The most names that are tried. Files of other processes may have the same ones.
    const NAMES: u32 = 1000;

    /// Makes an empty file in `folder`. `name` is a part of its name, for error messages.
    pub(super) fn create(folder: &Path, name: &str) -> io::Result<Self> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create_new(true);
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

    pub(super) fn path(&self) -> &Path {
        &self.path
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
        let folder = tempfile::tempdir().expect("a folder");
        let files = || std::fs::read_dir(folder.path()).expect("a folder").count();
        let mut made: Vec<ScratchFile> =
            (0..3).map(|_| ScratchFile::create(folder.path(), "a").expect("a file")).collect();
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
