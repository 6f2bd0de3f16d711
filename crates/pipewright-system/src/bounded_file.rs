//! Reads whole files up to a limit: a path may lead to an endless device, to a pipe without a writer, or to a
//! file that is larger than the memory.
//!
//! A file that the user names on the command line may be a pipe: [`read`] and [`read_text`]. Any other path
//! must lead to a regular file: [`read_regular`], [`read_regular_text`] and [`open_regular`], and for writing
//! [`create_regular`]. These check the path before they open it, and the open file again: another file may
//! have taken the path in between. They never wait for the other end of a pipe.
//!
//! A file under a name that only this program gives is not reached through a link: [`create_fresh`] for drafts,
//! [`open_lock`] for locks, and [`open_unlinked`]. A link of another user under this name would decide which file is
//! changed.

use std::fmt;
use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, ErrorKind, Read, Write};
use std::path::Path;

/// The limit for text files that people write or that describe a model, such as configurations.
pub const SMALL_TEXT: u64 = 16 << 20;

/// The first bytes of the small text file that points to a large file until Git LFS downloads it.
pub const LFS_POINTER: &[u8] = b"version https://git-lfs.github.com/spec/";

/// Returns the content of a regular file of at most `limit` bytes.
///
/// # Errors
/// When the path does not lead to a regular file, when the file is larger, or when the system reports an
/// error.
pub fn read_regular(path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    read_open(open_regular(path)?, limit)
}

/// Like [`read_regular`], for text in UTF-8.
///
/// # Errors
/// The errors of [`read_regular`], and when the content is not UTF-8.
pub fn read_regular_text(path: &Path, limit: u64) -> io::Result<String> {
    text_of(read_regular(path, limit)?)
}

/// Opens a regular file for reading.
///
/// # Errors
/// When the path does not lead to a regular file, or when the system reports an error.
pub fn open_regular(path: &Path) -> io::Result<File> {
    open_regular_with(path, File::options().read(true))
}

/// Opens a regular file in another way, for example for appending.
///
/// # Errors
/// When the path does not lead to a regular file, or when the system reports an error.
pub fn open_regular_with(path: &Path, options: &OpenOptions) -> io::Result<File> {
    refuse_special(path)?;
    open_checked(path, options, 0)
}

/// Opens a regular file for reading with further flags of the system, which have no effect where it has no such flags.
///
/// # Errors
/// When the path does not lead to a regular file, or when the system reports an error.
pub(crate) fn open_regular_with_flags(path: &Path, flags: i32) -> io::Result<File> {
    refuse_special(path)?;
    open_checked(path, File::options().read(true), flags)
}

/// Like [`open_regular_with`], but refuses a path that is a symbolic link.
///
/// # Errors
/// When something else than a regular file has this path, or when the system reports an error.
pub fn open_unlinked(path: &Path, options: &OpenOptions) -> io::Result<File> {
    match std::fs::symlink_metadata(path) {
        Ok(found) if found.is_symlink() => {
            // A device says more than the link to it.
            refuse_special(path)?;
            return Err(link());
        }
        Ok(found) => require_file(&found)?,
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    let file = open_without_waiting(path, options, NO_LINK)?;
    require_file(&file.metadata()?)?;
    Ok(file)
}

/// Opens a file that a process locks and then writes to, and creates it if it does not exist. A file with a second
/// name is refused, because it could be a file of another kind: both names would have what is written.
///
/// # Errors
/// When something else than a regular file with one name has this path, or when the system reports an error.
pub fn open_lock(path: &Path) -> io::Result<File> {
    let file = open_unlinked(path, File::options().read(true).write(true).create(true).truncate(false))?;
    if names(&file.metadata()?) > 1 {
        let message = "the file has a second name (a hard link), under which its content would change too; remove this one";
        return Err(io::Error::new(ErrorKind::InvalidInput, message));
    }
    Ok(file)
}

/// Creates an empty file under a name that only this program gives. A file of this name, for example one that an earlier
/// process has left incomplete, is removed first. A link is removed and not followed.
///
/// # Errors
/// When a folder has this path, or when the system reports an error.
pub fn create_fresh(path: &Path) -> io::Result<File> {
    match std::fs::symlink_metadata(path) {
        Ok(found) if found.is_dir() => return Err(folder()),
        Ok(_) => std::fs::remove_file(path)?,
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    File::create_new(path)
}

/// Writes a whole file like [`create_fresh`].
///
/// # Errors
/// When a folder has this path, or when the system reports an error.
pub fn write_fresh(path: &Path, content: &[u8]) -> io::Result<()> {
    create_fresh(path)?.write_all(content)
}

/// Opens a file without waiting for the other end of a pipe, and refuses it if it is not a regular file.
fn open_checked(path: &Path, options: &OpenOptions, flags: i32) -> io::Result<File> {
    let file = open_without_waiting(path, options, flags)?;
    require_file(&file.metadata()?)?;
    Ok(file)
}

/// The flag with which a symbolic link is not opened.
#[cfg(unix)]
const NO_LINK: i32 = libc::O_NOFOLLOW;
#[cfg(not(unix))]
const NO_LINK: i32 = 0;

#[cfg(unix)]
fn open_without_waiting(path: &Path, options: &OpenOptions, flags: i32) -> io::Result<File> {
    use std::os::unix::fs::OpenOptionsExt;

    // The first flag has no effect on regular files. These flags replace the ones that the options already have.
    let opened = options.clone().custom_flags(libc::O_NONBLOCK | flags).open(path);
    opened.map_err(|error| match error.raw_os_error() {
        // A pipe that nobody reads.
        Some(libc::ENXIO) => special_file(),
        Some(libc::ELOOP) if flags & NO_LINK != 0 => link(),
        _ => error,
    })
}

#[cfg(not(unix))]
fn open_without_waiting(path: &Path, options: &OpenOptions, _flags: i32) -> io::Result<File> {
    options.open(path)
}

/// Returns the number of names of a file.
#[cfg(unix)]
fn names(file: &Metadata) -> u64 {
    std::os::unix::fs::MetadataExt::nlink(file)
}

#[cfg(not(unix))]
fn names(_file: &Metadata) -> u64 {
    1
}

/// Creates a file, or empties a regular file. Opening a pipe for writing would wait for its reader.
///
/// # Errors
/// When something else than a regular file has this path, or when the system reports an error.
pub fn create_regular(path: &Path) -> io::Result<File> {
    let file = open_regular_with(path, File::options().write(true).create(true).truncate(false))?;
    file.set_len(0)?;
    Ok(file)
}

/// Writes a whole file. Like [`create_regular`], it never writes to a device or a pipe.
///
/// # Errors
/// When something else than a regular file has this path, or when the system reports an error.
pub fn write_regular(path: &Path, content: &[u8]) -> io::Result<()> {
    create_regular(path)?.write_all(content)
}

/// Checks that a path leads to a regular file or to nothing.
///
/// # Errors
/// When something else has this path, or when the system reports an error.
pub fn refuse_special(path: &Path) -> io::Result<()> {
    match require_regular(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Returns a text without the byte-order mark that some editors write at its beginning.
pub fn without_mark(text: &[u8]) -> &[u8] {
    text.strip_prefix(b"\xef\xbb\xbf").unwrap_or(text)
}

/// Returns the content of a file or pipe, up to `limit` bytes. Waits for a pipe to be closed.
///
/// # Errors
/// When there are more bytes, or when the system reports an error.
pub fn read(path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    read_open(File::open(path)?, limit)
}

/// Returns the content of an open file, up to `limit` bytes.
fn read_open(file: File, limit: u64) -> io::Result<Vec<u8>> {
    let length = file.metadata()?.len();
    if length > limit {
        return Err(too_large(limit));
    }
    let mut content = Vec::new();
    content.try_reserve_exact(usize::try_from(length).unwrap_or(usize::MAX))?;
    append_to_end(&mut content, file, limit)?;
    Ok(content)
}

/// Appends what is left to read, up to `limit` bytes. The length of a device or of a file in /proc is not the number of
/// bytes that can be read.
fn append_to_end(content: &mut Vec<u8>, from: impl Read, limit: u64) -> io::Result<()> {
    from.take(limit.saturating_add(1)).read_to_end(content)?;
    if content.len() as u64 > limit { Err(too_large(limit)) } else { Ok(()) }
}

/// Like [`read`], for text in UTF-8.
///
/// # Errors
/// The errors of [`read`], and when the content is not UTF-8.
pub fn read_text(path: &Path, limit: u64) -> io::Result<String> {
    text_of(read(path, limit)?)
}

/// Returns the text that is left to read, such as standard input, up to `limit` bytes of UTF-8.
///
/// # Errors
/// As for [`read_text`].
pub fn read_text_from(from: impl Read, limit: u64) -> io::Result<String> {
    let mut content = Vec::new();
    append_to_end(&mut content, from, limit)?;
    text_of(content)
}

fn text_of(content: Vec<u8>) -> io::Result<String> {
    if let [0xff, 0xfe, ..] | [0xfe, 0xff, ..] = content.as_slice() {
        let message = "the file is UTF-16; save it as UTF-8";
        return Err(io::Error::new(ErrorKind::InvalidData, message));
    }
    String::from_utf8(content).map_err(|error| {
        let byte = error.utf8_error().valid_up_to();
        io::Error::new(
            ErrorKind::InvalidData,
            format!("byte {byte} is not valid UTF-8; save the file as UTF-8"),
        )
    })
}

/// Returns the metadata of a regular file, without opening it: opening a pipe waits for its writer.
///
/// # Errors
/// When the path does not lead to a regular file, or when the system reports an error.
pub fn require_regular(path: &Path) -> io::Result<Metadata> {
    let metadata = std::fs::metadata(path)?;
    require_file(&metadata)?;
    Ok(metadata)
}

/// Refuses what is not a regular file.
fn require_file(metadata: &Metadata) -> io::Result<()> {
    if metadata.is_dir() {
        return Err(folder());
    }
    if metadata.is_file() { Ok(()) } else { Err(special_file()) }
}

fn folder() -> io::Error {
    io::Error::new(ErrorKind::IsADirectory, "this is a folder; name a file")
}

fn link() -> io::Error {
    io::Error::new(ErrorKind::InvalidInput, "this is a symbolic link, which is not followed here; remove it")
}

fn special_file() -> io::Error {
    let message = "this is a device or a pipe; copy its content to a regular file";
    io::Error::new(ErrorKind::InvalidInput, message)
}

fn too_large(limit: u64) -> io::Error {
    let message = format!("it has more than {}, the limit for such a file; check the path", Size(limit));
    io::Error::new(ErrorKind::FileTooLarge, message)
}

/// A number of bytes, in the largest binary unit that leaves at least 1.
pub struct Size(pub u64);

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [(u32, &str); 4] = [(40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")];
        match UNITS.into_iter().find(|(shift, _)| self.0 >> shift > 0) {
            Some((shift, unit)) => {
                let tenths = (u128::from(self.0) * 10) >> shift;
                match tenths % 10 {
                    0 => write!(f, "{} {unit}", tenths / 10),
                    tenth => write!(f, "{}.{tenth} {unit}", tenths / 10),
                }
            }
            None => write!(f, "{} bytes", self.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_of_the_limit_is_read_and_a_larger_one_is_refused() {
        let folder = tempfile::tempdir().expect("a scratch folder");
        let path = folder.path().join("a");
        std::fs::write(&path, "four").expect("a file");
        assert_eq!(read(&path, 4).ok().as_deref(), Some(b"four".as_slice()));
        let error = read(&path, 3).expect_err("four bytes");
        assert_eq!(error.to_string(), "it has more than 3 bytes, the limit for such a file; check the path");
    }

    #[test]
    #[cfg(unix)]
    fn a_file_without_an_end_is_refused() {
        let error = read(Path::new("/dev/zero"), 1 << 20).expect_err("it has no end");
        assert_eq!(error.kind(), ErrorKind::FileTooLarge);
        let error = read_regular(Path::new("/dev/zero"), 1 << 20).expect_err("a device");
        assert_eq!(error.to_string(), "this is a device or a pipe; copy its content to a regular file");
        let error = read_regular(Path::new("/dev"), 1 << 20).expect_err("a folder");
        assert_eq!(error.to_string(), "this is a folder; name a file");
    }

    #[test]
    #[cfg(unix)]
    fn only_regular_files_are_opened_and_written() {
        let folder = tempfile::tempdir().expect("a scratch folder");
        let path = folder.path().join("a");
        assert_eq!(open_regular(&path).expect_err("no file").kind(), ErrorKind::NotFound);
        write_regular(&path, b"one").expect("a new file");
        write_regular(&path, b"two").expect("the same file");
        assert_eq!(read_regular_text(&path, 3).ok().as_deref(), Some("two"));
        let device = folder.path().join("device");
        std::os::unix::fs::symlink("/dev/zero", &device).expect("a link");
        let refusals = [
            open_regular(&device).map(drop),
            create_regular(&device).map(drop),
            write_regular(&device, b""),
            read_regular_text(&device, 3).map(drop),
        ];
        for refused in refusals {
            assert_eq!(refused.expect_err("a device").kind(), ErrorKind::InvalidInput);
        }
    }

    /// A pipe that takes the path after the check is refused without waiting for its other end.
    #[test]
    #[cfg(unix)]
    fn a_pipe_in_the_place_of_a_checked_file_is_refused_at_once() {
        let folder = tempfile::tempdir().expect("a scratch folder");
        let path = folder.path().join("pipe");
        let made = std::process::Command::new("mkfifo").arg(&path).status().expect("mkfifo");
        assert!(made.success());
        let ways = [
            File::options().read(true).clone(),
            File::options().write(true).create(true).truncate(false).clone(),
            File::options().append(true).create(true).clone(),
            File::options().read(true).write(true).clone(),
        ];
        for way in ways {
            let error = open_checked(&path, &way, 0).expect_err("a pipe");
            assert_eq!(error.kind(), ErrorKind::InvalidInput, "{way:?}: {error}");
        }
    }

    /// A link that is planted under a name that only this program gives changes no other file.
    #[test]
    #[cfg(unix)]
    fn files_of_this_program_are_not_reached_through_links() {
        let folder = tempfile::tempdir().expect("a scratch folder");
        let at = |name: &str| folder.path().join(name);
        let plant = |name: &str| {
            std::os::unix::fs::symlink("mine", at(name)).expect("a link");
            at(name)
        };
        std::fs::write(at("mine"), "mine").expect("a file");
        std::os::unix::fs::symlink("nothing", at("dangling")).expect("a link");
        std::fs::hard_link(at("mine"), at("second")).expect("a second name");
        std::fs::create_dir(at("folder")).expect("a folder");
        assert!(std::process::Command::new("mkfifo").arg(at("pipe")).status().expect("mkfifo").success());
        for name in [plant("link"), at("dangling"), at("second"), at("folder"), at("pipe")] {
            open_lock(&name).expect_err("it is not a file with one name");
        }
        let read = File::options().read(true).clone();
        for name in [at("link"), at("dangling"), at("folder"), at("pipe")] {
            open_unlinked(&name, &read).expect_err("it is not a file");
        }
        assert_eq!(open_unlinked(&at("none"), &read).expect_err("nothing").kind(), ErrorKind::NotFound);
        drop([open_lock(&at("lock")), open_lock(&at("lock"))].map(|lock| lock.expect("a file")));
        for name in [at("link"), at("dangling"), at("second"), at("pipe"), at("fresh"), at("fresh")] {
            write_fresh(&name, b"ours").expect("the name is free");
            assert_eq!(read_regular_text(&name, 9).ok().as_deref(), Some("ours"));
        }
        write_fresh(&at("folder"), b"").expect_err("a folder");
        assert_eq!(std::fs::read_to_string(at("mine")).ok().as_deref(), Some("mine"));
        assert!(!at("nothing").exists(), "nothing is made behind a link");
    }

    #[test]
    fn text_in_another_encoding_is_named() {
        let folder = tempfile::tempdir().expect("a scratch folder");
        let path = folder.path().join("a");
        let check = |content: &[u8], message: &str| {
            std::fs::write(&path, content).expect("a file");
            assert_eq!(read_text(&path, 99).expect_err("not UTF-8").to_string(), message);
        };
        check(b"\xff\xfe0\0", "the file is UTF-16; save it as UTF-8");
        check(b"na\xefve", "byte 2 is not valid UTF-8; save the file as UTF-8");
    }

    #[test]
    fn sizes_have_one_decimal() {
        let check = |bytes: u64, text: &str| assert_eq!(Size(bytes).to_string(), text);
        check(1023, "1023 bytes");
        check(1 << 30, "1 GiB");
        check(3 << 29, "1.5 GiB");
        check(u64::MAX, "16777215.9 TiB");
    }
}
