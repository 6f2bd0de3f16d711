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

use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use pipewright_schedule::message_as_debug;
use thiserror::Error;

/// A folder that cannot be used, because other users could have changed it, or for a reason of the system.
#[derive(Error)]
#[error("{}: {problem}", .path.display())]
pub struct PrivateFolderError {
    path: PathBuf,
    #[source]
    problem: Problem,
}

message_as_debug!(PrivateFolderError);

impl PrivateFolderError {
    /// Returns whether nothing has this path.
    pub fn is_missing(&self) -> bool {
        matches!(&self.problem, Problem::System(error) if error.kind() == io::ErrorKind::NotFound)
    }
}

#[derive(Error)]
enum Problem {
    #[error(
        "the folder belongs to the user with the number {owner}, and this process to the one with the number {own}, so the \
         files in it are not used; remove it, or use another folder"
    )]
    OtherOwner { owner: u32, own: u32 },
    #[error("the folder belongs to the user with the number {owner}, and not to you or root")]
    OtherScratch { owner: u32 },
    #[error(
        "other users can enter or change this folder (its mode is {mode:04o}), so the files in it are not used; if they are \
         yours, run `chmod 700` on it, and otherwise remove it"
    )]
    Open { mode: u32 },
    #[error("this is a symbolic link, and a folder is expected; remove the link, or use another folder")]
    Link,
    #[error(
        "the symbolic link belongs to the user with the number {owner}, who may lead it anywhere; name the folder without it"
    )]
    OtherLink { owner: u32 },
    #[error(
        "the folder belongs to the user with the number {owner}, who can replace what is in it; use a folder that is below no \
         other user's folders"
    )]
    OtherWay { owner: u32 },
    #[error(
        "other users can replace what is in this folder (its mode is {mode:04o}, without the sticky bit); use a folder below \
         folders that only you can write to, or run `chmod go-w` on this one"
    )]
    OpenWay { mode: u32 },
    #[error("this is not a folder; use another path")]
    NotAFolder,
    #[error("too many symbolic links are on the way; name the folder without them")]
    ManyLinks,
    #[error("{0}")]
    System(#[source] io::Error),
}

message_as_debug!(Problem);

impl Problem {
    fn at(self, path: &Path) -> PrivateFolderError {
        PrivateFolderError { path: path.to_owned(), problem: self }
    }
}

/// Creates a private folder, and the folders on the way that do not exist. A private folder that exists is used.
///
/// # Errors
/// When other users could have made or could change the folder, or when the system reports an error.
pub fn create(path: &Path) -> Result<(), PrivateFolderError> {
    system::create(path)
}

/// Checks that a path leads to a private folder.
///
/// # Errors
/// When it does not exist, when other users could have made or could change it, or when the system reports an error.
pub fn require(path: &Path) -> Result<(), PrivateFolderError> {
    system::require(path)
}

/// Checks that no other user can change the private folders that are created in this folder.
///
/// # Errors
/// When it does not exist, when other users can replace what is in it, or when the system reports an error.
pub fn require_place(folder: &Path) -> Result<(), PrivateFolderError> {
    system::require_place(folder)
}

/// Creates a folder for files without names, unless it exists. It may be one that all users write to, such as `/tmp`,
/// but not one of another user: the links on the way, and the folder itself, must belong to this user or to root.
///
/// # Errors
/// When the folder or a link belongs to another user, or when the system reports an error.
pub fn create_for_scratch(path: &Path) -> Result<(), PrivateFolderError> {
    system::create_for_scratch(path)
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
        // Best effort: nobody reads what remains.
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[cfg(unix)]
mod system {
    //! The checks by owners and modes.

    use std::fs::{DirBuilder, Metadata};
    use std::os::unix::fs::{DirBuilderExt, MetadataExt};
    use std::path::Component;
    use std::sync::LazyLock;

    use rustix::process::geteuid;

    use super::{OsString, Path, PathBuf, PrivateFolderError, Problem, fs, io};

    /// The most symbolic links on a way, as on Linux.
    const MOST_LINKS: u32 = 40;

    /// The bits of a mode with which users other than the owner can do something.
    const OTHERS: u32 = 0o077;
    const GROUP_WRITES: u32 = 0o020;
    const ALL_WRITE: u32 = 0o002;
    /// In a folder with this bit, a name can be changed only by the owner of the file and of the folder.
    const STICKY: u32 = 0o1000;
    const PRIVATE: u32 = 0o700;
    /// The mode of a folder before the umask is applied.
    const USUAL: u32 = 0o777;

    pub(super) fn create(path: &Path) -> Result<(), PrivateFolderError> {
        let path = private_path(path, Some(PRIVATE))?;
        match DirBuilder::new().mode(PRIVATE).create(&path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => require_private(&path),
            created => created.map_err(|error| Problem::System(error).at(&path)),
        }
    }

    pub(super) fn require(path: &Path) -> Result<(), PrivateFolderError> {
        require_private(&private_path(path, None)?)
    }

    pub(super) fn require_place(folder: &Path) -> Result<(), PrivateFolderError> {
        follow(folder, None, require_way).map(drop)
    }

    pub(super) fn create_for_scratch(path: &Path) -> Result<(), PrivateFolderError> {
        let path = follow(path, Some(USUAL), |_| Ok(()))?;
        let owner = metadata(&path)?.uid();
        if is_trusted(owner) { Ok(()) } else { Err(Problem::OtherScratch { owner }.at(&path)) }
    }

    /// Checks each folder on the way to a path, and returns the path without links there. The last part is as it is.
    fn private_path(path: &Path, create: Option<u32>) -> Result<PathBuf, PrivateFolderError> {
        let path = std::path::absolute(path).map_err(|error| Problem::System(error).at(path))?;
        let (Some(folder), Some(name)) = (path.parent(), path.file_name()) else {
            return Err(Problem::NotAFolder.at(&path));
        };
        Ok(follow(folder, create, require_way)?.join(name))
    }

    /// Checks the folder itself, which may have been made by another user.
    fn require_private(path: &Path) -> Result<(), PrivateFolderError> {
        let found = metadata(path)?;
        let (owner, own, mode) = (found.uid(), own_user(), found.mode() & 0o7777);
        let problem = match () {
            () if found.is_symlink() => Problem::Link,
            () if !found.is_dir() => Problem::NotAFolder,
            () if owner != own => Problem::OtherOwner { owner, own },
            () if mode & OTHERS != 0 => Problem::Open { mode },
            () => return Ok(()),
        };
        Err(problem.at(path))
    }

    /// Checks a folder on the way to a private one.
    fn require_way(found: &Metadata) -> Result<(), Problem> {
        let (owner, mode) = (found.uid(), found.mode() & 0o7777);
        if !is_trusted(owner) {
            return Err(Problem::OtherWay { owner });
        }
        // Many systems give each user a group with the number of the user, and let it write to the user's folders.
        let is_own_group = found.gid() == owner;
        let is_open = mode & ALL_WRITE != 0 || mode & GROUP_WRITES != 0 && !is_own_group;
        if is_open && mode & STICKY == 0 { Err(Problem::OpenWay { mode }) } else { Ok(()) }
    }

    /// Returns the path to which `path` leads, without links. The owner of each link is checked, and each folder with
    /// `check`. A folder that is missing is created with the mode `create`, if there is one.
    fn follow(
        path: &Path,
        create: Option<u32>,
        check: impl Fn(&Metadata) -> Result<(), Problem>,
    ) -> Result<PathBuf, PrivateFolderError> {
        let path = std::path::absolute(path).map_err(|error| Problem::System(error).at(path))?;
        let (mut reached, mut links) = (PathBuf::from("/"), 0);
        // The parts that are left, the next one at the end.
        let mut left = parts(&path);
        while let Some(part) = left.pop() {
            if part == ".." {
                reached.pop();
                continue;
            }
            let next = reached.join(&part);
            let found = match (metadata(&next), create) {
                (Err(error), Some(mode)) if error.is_missing() => {
                    // Another process may create it at the same time; what is found then is checked.
                    let _ = DirBuilder::new().mode(mode).create(&next);
                    metadata(&next)?
                }
                (found, _) => found?,
            };
            if found.is_symlink() {
                if !is_trusted(found.uid()) {
                    return Err(Problem::OtherLink { owner: found.uid() }.at(&next));
                }
                links += 1;
                if links > MOST_LINKS {
                    return Err(Problem::ManyLinks.at(&path));
                }
                let target = fs::read_link(&next).map_err(|error| Problem::System(error).at(&next))?;
                if target.is_absolute() {
                    reached = PathBuf::from("/");
                }
                left.extend(parts(&target));
            } else if found.is_dir() {
                check(&found).map_err(|problem| problem.at(&next))?;
                reached = next;
            } else {
                return Err(Problem::NotAFolder.at(&next));
            }
        }
        Ok(reached)
    }

    /// Returns the names in a path, the last one first.
    fn parts(path: &Path) -> Vec<OsString> {
        let name = |component| match component {
            Component::Normal(name) => Some(OsString::from(name)),
            Component::ParentDir => Some("..".into()),
            Component::RootDir | Component::CurDir | Component::Prefix(_) => None,
        };
        path.components().rev().filter_map(name).collect()
    }

    fn metadata(path: &Path) -> Result<Metadata, PrivateFolderError> {
        fs::symlink_metadata(path).map_err(|error| Problem::System(error).at(path))
    }

    fn own_user() -> u32 {
        geteuid().as_raw()
    }

    /// Returns whether what a user owns is as this process or the administrator wants it.
    fn is_trusted(user: u32) -> bool {
        user == 0 || user == own_user() || Some(user) == *UNMAPPED
    }

    /// The number that the system shows for all users without a number in this container, among them the root of the
    /// machine, who owns its folders; `None` if a user of the container has it.
    static UNMAPPED: LazyLock<Option<u32>> = LazyLock::new(|| {
        let number: u32 = fs::read_to_string("/proc/sys/kernel/overflowuid").ok()?.trim().parse().ok()?;
        let map = fs::read_to_string("/proc/self/uid_map").ok()?;
        (!is_mapped(&map, number)).then_some(number)
    });

    /// Returns whether a map of users, with the first number and the count of users in each line, has a number.
    fn is_mapped(map: &str, number: u32) -> bool {
        let range = |line: &str| {
            let mut words = line.split_whitespace().map(|word| word.parse::<u64>().ok());
            let (first, count) = (words.next()??, words.nth(1)??);
            Some(first..first + count)
        };
        map.lines().filter_map(range).any(|range| range.contains(&number.into()))
    }

    #[cfg(test)]
    #[test]
    fn a_number_of_a_user_is_mapped_in_the_ranges_of_a_container() {
        assert!(is_mapped("         0          0 4294967295\n", 65534));
        assert!(is_mapped("0 1000 1\n1 100000 65536\n", 65534));
        assert!(!is_mapped("1000 1000 1\n", 65534));
        assert!(!is_mapped("", 65534));
    }
}

#[cfg(not(unix))]
mod system {
    //! Other systems keep the folders of users apart, and have no folder of files in memory.

    use super::{Path, PrivateFolderError, Problem, fs, io};

    pub(super) fn create(path: &Path) -> Result<(), PrivateFolderError> {
        fs::create_dir_all(path).map_err(|error| Problem::System(error).at(path))
    }

    pub(super) fn require(path: &Path) -> Result<(), PrivateFolderError> {
        match fs::metadata(path) {
            Ok(found) if found.is_dir() => Ok(()),
            Ok(_) => Err(Problem::NotAFolder.at(path)),
            Err(error) => Err(Problem::System(error).at(path)),
        }
    }

    pub(super) fn require_place(folder: &Path) -> Result<(), PrivateFolderError> {
        require(folder)
    }

    pub(super) fn create_for_scratch(path: &Path) -> Result<(), PrivateFolderError> {
        create(path)
    }
}

#[cfg(all(test, unix))]
mod tests {
    use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, lchown, symlink};

    use super::*;

    /// A user that is neither root nor the one of the tests.
    const OTHER: u32 = 65534;

    fn mode(path: &Path, mode: u32) {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("an own file");
    }

    /// Gives what is at a path to another user; `false`, with a line that says so, if this user may not.
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
        refused(&at("link/a"), &format!("the number {OTHER}, who may lead it anywhere"));
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
