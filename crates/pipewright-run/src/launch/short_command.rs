//! Waits for commands that end soon, and returns what they print.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::fs::{OFlags, fcntl_setfl};

/// The time between two looks at a command.
const PAUSE: Duration = Duration::from_millis(50);

/// The number of looks at a command that was killed.
const LOOKS_AFTER_KILL: u32 = 100;

/// The output of a command before its end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Printed {
    pub(super) is_success: bool,
    pub(super) stdout: String,
    pub(super) stderr: String,
}

impl Printed {
    /// Returns the line of the errors that says most: the error of a process, or the first one with words.
    pub(super) fn telling_line(&self) -> &str {
        let lines =
            || self.stderr.lines().map(str::trim).filter(|line| line.chars().any(char::is_alphanumeric));
        let error = lines().find(|line| line.starts_with("error"));
        error.or_else(|| lines().next()).unwrap_or("it prints nothing")
    }
}

/// Runs a command, and ends it if it still runs after the time `limit`, or when `is_stopped` is true.
///
/// # Errors
/// Fails if the command cannot be started, or was ended.
pub(super) fn run(
    command: &mut Command,
    limit: Duration,
    is_stopped: impl Fn() -> bool,
) -> io::Result<Printed> {
    let command = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let since = Instant::now();
    let printed = wait(command.spawn()?, || since.elapsed() > limit || is_stopped());
    printed
        .ok_or_else(|| io::Error::new(io::ErrorKind::TimedOut, format!("it has not ended within {limit:?}")))
}

/// Waits for the end of a command, and returns what it has printed into its pipes. If `is_over` is true
/// first, the command is ended.
pub(super) fn wait(mut child: Child, is_over: impl Fn() -> bool) -> Option<Printed> {
    let mut stdout = Pipe::new(child.stdout.take().map(OwnedFd::from)).ok()?;
    let mut stderr = Pipe::new(child.stderr.take().map(OwnedFd::from)).ok()?;
    let status = loop {
        // A full pipe would hold up the command.
        stdout.read();
        stderr.read();
        if let Some(status) = child.try_wait().ok()? {
            break status;
        }
        if is_over() {
            // It may have ended meanwhile. The system may not end it at once if it waits for a file system.
            let _ = child.kill();
            let _ = (0..LOOKS_AFTER_KILL).find(|_| {
                std::thread::sleep(PAUSE);
                child.try_wait().is_ok_and(|status| status.is_some())
            });
            return None;
        }
        std::thread::sleep(PAUSE);
    };
    Some(Printed { is_success: status.success(), stdout: stdout.into_text(), stderr: stderr.into_text() })
}

/// A pipe of a command, and what was read from it.
struct Pipe {
    pipe: Option<File>,
    read: Vec<u8>,
}

impl Pipe {
    fn new(pipe: Option<OwnedFd>) -> io::Result<Self> {
        // A process that the command has left behind may keep the pipe open, so no read waits.
        pipe.iter().try_for_each(|pipe| fcntl_setfl(pipe, OFlags::NONBLOCK))?;
        Ok(Self { pipe: pipe.map(File::from), read: Vec::new() })
    }

    /// Reads what is in the pipe.
    fn read(&mut self) {
        if let Some(pipe) = &mut self.pipe {
            // The error says that the pipe is empty.
            let _ = pipe.read_to_end(&mut self.read);
        }
    }

    fn into_text(mut self) -> String {
        self.read();
        String::from_utf8_lossy(&self.read).into_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(text: &str, limit: Duration) -> Option<Printed> {
        run(Command::new("sh").args(["-c", text]), limit, || false).ok()
    }

    #[test]
    fn a_command_has_a_status_and_two_texts() {
        let printed = |is_success, [stdout, stderr]: [&str; 2]| {
            Some(Printed { is_success, stdout: stdout.to_owned(), stderr: stderr.to_owned() })
        };
        let limit = Duration::from_secs(60);
        assert_eq!(shell("echo a; echo b >&2", limit), printed(true, ["a\n", "b\n"]));
        assert_eq!(shell("echo c >&2; exit 3", limit), printed(false, ["", "c\n"]));
        let long = shell("head -c 300000 /dev/zero", limit).expect("more than a pipe holds");
        assert_eq!(long.stdout.len(), 300_000);
        let missing =
            run(&mut Command::new("./no-such-program"), limit, || false).expect_err("it is missing");
        assert_eq!(missing.kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn the_line_that_says_most_is_the_error_of_a_process() {
        let check = |stderr: &str, expected: &str| {
            let printed = Printed { is_success: false, stdout: String::new(), stderr: stderr.to_owned() };
            assert_eq!(printed.telling_line(), expected);
        };
        check("-----\nmpirun has found this\nerror: no such option\n-----\n", "error: no such option");
        check("-----\n  mpirun has found this\nand that\n", "mpirun has found this");
        check("-----\n", "it prints nothing");
    }

    #[test]
    fn the_text_is_read_while_another_process_keeps_the_pipe_open() {
        let printed = shell("sleep 60 & echo $!", Duration::from_secs(30)).expect("a text");
        let mut kill = Command::new("kill");
        let killed = kill.arg(printed.stdout.trim()).status().expect("kill is everywhere");
        assert!(killed.success(), "`sleep` has ended");
    }

    #[test]
    fn a_command_ends_when_its_time_is_over() {
        assert_eq!(shell("exec sleep 600", Duration::ZERO), None);
        let sleep = &mut Command::new("sleep");
        let ended = run(sleep.arg("600"), Duration::from_secs(600), || true).expect_err("it is ended");
        assert_eq!(ended.kind(), io::ErrorKind::TimedOut);
    }
}
