//! Checks folders by their owners and modes, for [`private_folder`](crate::private_folder).

use std::ffi::OsString;
use std::fs::{self, DirBuilder, Metadata};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Component, Path, PathBuf};
use std::sync::LazyLock;

use rustix::process::geteuid;

use crate::folder_error::{PrivateFolderError, Problem};

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

pub(crate) fn create(path: &Path) -> Result<(), PrivateFolderError> {
    let path = private_path(path, Some(PRIVATE))?;
    match DirBuilder::new().mode(PRIVATE).create(&path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => require_private(&path),
        created => created.map_err(|error| Problem::System(error).at(&path)),
    }
}

pub(crate) fn require(path: &Path) -> Result<(), PrivateFolderError> {
    require_private(&private_path(path, None)?)
}

pub(crate) fn require_place(folder: &Path) -> Result<(), PrivateFolderError> {
    follow(folder, None, require_way).map(drop)
}

pub(crate) fn create_for_scratch(path: &Path) -> Result<(), PrivateFolderError> {
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
    let problem = if found.is_symlink() {
        Problem::Link
    } else if !found.is_dir() {
        Problem::NotAFolder
    } else if owner != own {
        Problem::OtherOwner { owner, own }
    } else if mode & OTHERS != 0 {
        Problem::Open { mode }
    } else {
        return Ok(());
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

/// Returns whether the folders and links of a user are trusted: the user is the one of this process, or root, which may
/// have the number [`UNMAPPED`] in a container.
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
mod tests {
    use super::*;

    #[test]
    fn a_number_of_a_user_is_mapped_in_the_ranges_of_a_container() {
        assert!(is_mapped("         0          0 4294967295\n", 65534));
        assert!(is_mapped("0 1000 1\n1 100000 65536\n", 65534));
        assert!(!is_mapped("1000 1000 1\n", 65534));
        assert!(!is_mapped("", 65534));
    }
}
