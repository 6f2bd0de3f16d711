//! Folders that only their user can enter, in places where all users can make folders, such as `/dev/shm`.
//!
//! In such a place, another user may have made a folder or a symbolic link before this program comes there. That user
//! would choose the content that is read, and a link would change a file elsewhere. So a private folder must belong to
//! the user of this process, and no one else may enter it. Each folder on the way to it must belong to that user or to
//! root, and other users must not be able to rename its entries; each symbolic link on the way must belong to that user
//! or to root too.
//!
//! A path that passes the check stays valid: no other user can replace a part of it, or make a file in the folder.
//! So what follows the check needs no check of its own.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

pub use crate::folder_error::PrivateFolderError;
#[cfg(unix)]
use crate::folder_owners as owners;
#[cfg(not(unix))]
use crate::other_folders as owners;

/// Creates a private folder, and the folders on the way that do not exist. A private folder that exists is used.
///
/// # Errors
/// When other users could have made or could change the folder, or when the system reports an error.
pub fn create(path: &Path) -> Result<(), PrivateFolderError> {
    owners::create(path)
}

/// Checks that a path leads to a private folder.
///
/// # Errors
/// When it does not exist, when other users could have made or could change it, or when the system reports an error.
pub fn require(path: &Path) -> Result<(), PrivateFolderError> {
    owners::require(path)
}

/// Checks that no other user can change the private folders that are created in this folder.
///
/// # Errors
/// When it does not exist, when other users can replace what is in it, or when the system reports an error.
pub fn require_place(folder: &Path) -> Result<(), PrivateFolderError> {
    owners::require_place(folder)
}

/// Creates a folder for files without names, unless it exists. It may be one that all users write to, such as `/tmp`,
/// but not one of another user: the links on the way, and the folder itself, must belong to this user or to root.
///
/// # Errors
/// When the folder or a link belongs to another user, or when the system reports an error.
pub fn create_for_scratch(path: &Path) -> Result<(), PrivateFolderError> {
    owners::create_for_scratch(path)
}

/// A private folder in the folder for temporary files, which is removed when this is dropped.
#[derive(Debug)]
pub struct TemporaryFolder(PathBuf);

impl TemporaryFolder {
    /// Creates the folder, under a name that nothing has.
    ///
    /// # Errors
    /// When the system reports an error, or when other users can replace what is in the folder for temporary files.
    pub fn create() -> Result<Self, PrivateFolderError> {
        let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let name = format!("pipewright-{}-{}", std::process::id(), since_1970.as_nanos());
        let path = std::env::temp_dir().join(name);
        create(&path).map(|()| Self(path))
    }

    /// Returns its path.
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for TemporaryFolder {
    fn drop(&mut self) {
        // Best effort: no program reads the files that remain.
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[cfg(unix)]
#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, lchown, symlink};

    use super::*;

    /// A user that is neither root nor the user of the tests.
    const OTHER: u32 = 65534;

    fn mode(path: &Path, mode: u32) {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("an own file");
    }

    /// Gives what is at a path to another user; `false`, with a line that says so, if this user may not.
    #[expect(clippy::print_stdout, reason = "a test that cannot run says so")]
    fn give_away(path: &Path) -> bool {
        let is_given = lchown(path, Some(OTHER), Some(OTHER)).is_ok();
        if !is_given {
            println!("only root can give files to another user, so this case is left out");
        }
        is_given
    }

    /// Checks that a folder is neither created nor found, with these words.
    fn refused(path: &Path, words: &str) {
        for result in [create(path), require(path)] {
            let message = result.expect_err("another user could have made it").to_string();
            assert!(message.contains(words), "`{words}` in: {message}");
        }
    }

    #[test]
    fn a_private_folder_is_created_and_found_again() {
        let scratch = tempfile::tempdir().expect("a scratch folder");
        let path = scratch.path().join("a/b");
        assert!(require(&path).expect_err("it does not exist").is_missing());
        create(&path).and_then(|()| create(&path)).expect("the folder is ours");
        require(&path).expect("it is private");
        assert_eq!(fs::metadata(&path).expect("a folder").permissions().mode() & 0o777, 0o700);
        // A user's own link on the way leads to the user's own folder.
        symlink("a", scratch.path().join("link")).expect("a link");
        require(&scratch.path().join("link/../link/./b")).expect("the link is ours");
    }

    #[test]
    fn a_folder_that_others_can_enter_is_refused() {
        let scratch = tempfile::tempdir().expect("a scratch folder");
        let path = scratch.path().join("a");
        create(&path).expect("a folder");
        for open in [0o750, 0o720, 0o701, 0o1777] {
            mode(&path, open);
            refused(&path, &format!("(its mode is {open:04o})"));
        }
    }

    #[test]
    fn what_is_not_a_folder_is_refused() {
        let scratch = tempfile::tempdir().expect("a scratch folder");
        let at = |name| scratch.path().join(name);
        create(&at("own")).expect("a folder");
        fs::write(at("file"), "").expect("a file");
        symlink("own", at("link")).expect("a link");
        symlink("missing", at("dangling")).expect("a link");
        symlink("circle", at("circle")).expect("a link");
        refused(&at("file"), "this is not a folder");
        refused(&at("link"), "this is a symbolic link");
        refused(&at("dangling"), "this is a symbolic link");
        assert!(!at("missing").exists(), "nothing is made behind the link");
        refused(&at("file/below"), "this is not a folder");
        refused(&at("circle/below"), "too many symbolic links");
    }

    #[test]
    fn a_folder_in_which_others_can_rename_is_refused_on_the_way() {
        let scratch = tempfile::tempdir().expect("a scratch folder");
        let (way, path) = (scratch.path().join("way"), scratch.path().join("way/a"));
        create(&path).expect("folders");
        mode(&way, 0o1777);
        require(&path).expect("the sticky bit keeps the name");
        mode(&way, 0o777);
        refused(&path, "(its mode is 0777, without the sticky bit)");
        require_place(&way).expect_err("others can replace what is made in it");
        require_place(scratch.path()).expect("only its user can write to it");
        mode(&way, 0o770);
        let found = fs::metadata(&way).expect("a folder");
        assert_eq!(require(&path).is_ok(), found.gid() == found.uid(), "the user's own group may write");
        if chown(&way, None, Some(OTHER)).is_ok() {
            refused(&path, "(its mode is 0770, without the sticky bit)");
        }
    }

    #[test]
    fn what_another_user_has_planted_is_refused() {
        let scratch = tempfile::tempdir().expect("a scratch folder");
        let at = |name| scratch.path().join(name);
        for name in ["planted", "way", "way/a", "own"] {
            create(&at(name)).expect("a folder");
        }
        symlink("own", at("link")).expect("a link");
        if !["planted", "way", "link"].into_iter().all(|name| give_away(&at(name))) {
            return;
        }
        refused(&at("planted"), &format!("belongs to the user with the number {OTHER}"));
        refused(&at("way/a"), &format!("the number {OTHER}, who can replace what is in it"));
        refused(&at("link/a"), &format!("the number {OTHER}, who can change where it leads"));
        for name in ["planted", "link", "link/a"] {
            create_for_scratch(&at(name)).expect_err("it belongs to another user");
        }
        create_for_scratch(&at("own/b")).expect("the folder is ours");
        create_for_scratch(Path::new("/tmp")).expect("it belongs to root");
    }

    #[test]
    fn a_temporary_folder_is_private_and_removed() {
        let folder = TemporaryFolder::create().expect("a folder");
        require(folder.path()).expect("it is private");
        fs::write(folder.path().join("a"), "").expect("a file");
        let path = folder.path().to_owned();
        drop(folder);
        assert!(!path.exists());
    }
}
