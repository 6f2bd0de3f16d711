//! Opens a file in the user's browser.
//!
//! The variable `BROWSER` names the commands to try, separated by colons; `%s` in a command is replaced by
//! the file. Without the variable, the desktop's command is used.

use std::ffi::{OsStr, OsString};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::failure::Failure;

const VARIABLE: &str = "BROWSER";

/// The time after which a command that has not ended counts as a browser that shows the file.
const PATIENCE: Duration = Duration::from_secs(3);

/// A program with its arguments.
type Words = Vec<OsString>;

/// Opens a file.
///
/// # Errors
/// When the session has no desktop, or when no command can open the file.
pub(crate) fn open(file: &Path) -> Result<(), Failure> {
    let unopened = |why: &str| {
        let file = file.display();
        Failure::input(format!(
            "{file}: is written, but cannot be opened: {why}; open the file yourself, or set {VARIABLE} to a command that opens it"
        ))
    };
    let path = std::path::absolute(file).map_err(|error| unopened(&error.to_string()))?;
    let named = std::env::var(VARIABLE).ok().filter(|named| !named.trim().is_empty());
    let commands = match named {
        Some(named) => named_commands(&named, path.as_os_str()),
        None if has_desktop() => vec![desktop_command(path.as_os_str())],
        None => return Err(unopened("neither DISPLAY nor WAYLAND_DISPLAY is set, so there is no desktop")),
    };
    let mut why = format!("{VARIABLE} names no command");
    for words in commands {
        match run(&words) {
            Ok(()) => return Ok(()),
            Err(reason) => why = reason,
        }
    }
    Err(unopened(&why))
}

/// Returns whether the session has a desktop. Only X11 and Wayland name theirs in variables.
fn has_desktop() -> bool {
    let is_set = |name: &str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    cfg!(any(target_os = "macos", windows)) || is_set("DISPLAY") || is_set("WAYLAND_DISPLAY")
}

/// Returns the command of the desktop that opens a file.
fn desktop_command(file: &OsStr) -> Words {
    let words: &[&str] = if cfg!(target_os = "macos") {
        &["open"]
    } else if cfg!(windows) {
        // The empty word is the title of a window.
        &["cmd", "/C", "start", ""]
    } else {
        &["xdg-open"]
    };
    words.iter().map(OsString::from).chain([file.to_owned()]).collect()
}

/// Returns the commands that the variable names.
fn named_commands(variable: &str, file: &OsStr) -> Vec<Words> {
    let entries = variable.split(':').map(str::trim).filter(|entry| !entry.is_empty());
    entries.map(|entry| named_command(entry, file)).collect()
}

fn named_command(entry: &str, file: &OsStr) -> Words {
    // The path of a program may contain spaces.
    if Path::new(entry).is_file() {
        return vec![entry.into(), file.to_owned()];
    }
    let word = |word: &str| if word == "%s" { file.to_owned() } else { OsString::from(word) };
    let mut words: Words = entry.split_whitespace().map(word).collect();
    if !entry.split_whitespace().any(|word| word == "%s") {
        words.push(file.to_owned());
    }
    words
}

/// Runs a command until it ends, or until it has run so long that it must be the browser itself.
fn run(words: &[OsString]) -> Result<(), String> {
    let Some((program, arguments)) = words.split_first() else {
        return Err("the command is empty".to_owned());
    };
    let name = program.to_string_lossy();
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let child = command.spawn().map_err(|error| format!("{name} cannot be started: {error}"))?;
    wait(child).map_err(|reason| format!("{name} {reason}"))
}

fn wait(mut child: Child) -> Result<(), String> {
    let start = Instant::now();
    while start.elapsed() < PATIENCE {
        match child.try_wait() {
            Ok(Some(status)) if status.success() => return Ok(()),
            Ok(Some(status)) => return Err(format!("failed ({status})")),
            Ok(None) => std::thread::sleep(Duration::from_millis(10)),
            Err(error) => return Err(format!("cannot be watched: {error}")),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_variable_names_commands() {
        let check = |variable: &str, expected: &[&[&str]]| {
            assert_eq!(named_commands(variable, OsStr::new("/a b.html")), expected, "{variable}");
        };
        check("firefox", &[&["firefox", "/a b.html"]]);
        check("one --new: two", &[&["one", "--new", "/a b.html"], &["two", "/a b.html"]]);
        check("see %s --quiet", &[&["see", "/a b.html", "--quiet"]]);
        check(":", &[]);
    }
}
