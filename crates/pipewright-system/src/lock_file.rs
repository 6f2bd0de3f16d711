//! Files whose lock says that a process uses a folder.

use std::fs::{File, TryLockError};
use std::ops::{Deref, DerefMut};

/// An open file that may be locked. Its lock ends when this is dropped.
///
/// The lock of a plain [`File`] may end later: a child process that another thread starts has a copy of each open file
/// until its program begins, and with it the lock.
#[derive(Debug)]
pub struct LockFile(File);

impl LockFile {
    /// Locks a file for this process.
    ///
    /// # Errors
    /// Returns the file with [`TryLockError::WouldBlock`] if another process or another part of this one has locked it,
    /// and with the system's error otherwise.
    pub fn lock(file: File) -> Result<Self, (File, TryLockError)> {
        match file.try_lock() {
            Ok(()) => Ok(Self(file)),
            Err(error) => Err((file, error)),
        }
    }

    /// Returns the file as one that is not locked.
    pub fn unlocked(file: File) -> Self {
        Self(file)
    }
}

impl Drop for LockFile {
    fn drop(&mut self) {
        // The lock ends with the last copy of the file at the latest.
        let _ended = self.0.unlock();
    }
}

impl Deref for LockFile {
    type Target = File;

    fn deref(&self) -> &File {
        &self.0
    }
}

impl DerefMut for LockFile {
    fn deref_mut(&mut self) -> &mut File {
        &mut self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_ends_although_a_copy_of_the_file_is_open() {
        let scratch = tempfile::tempdir().expect("a folder");
        let path = scratch.path().join("lock");
        let open = || File::options().append(true).create(true).open(&path).expect("the file");
        let lock = LockFile::lock(open()).expect("nobody has it");
        // As in a child process that has not begun its program.
        let _copy = lock.try_clone().expect("a copy");
        assert!(matches!(LockFile::lock(open()), Err((_, TryLockError::WouldBlock))));
        drop(lock);
        assert!(LockFile::lock(open()).is_ok());
    }
}
