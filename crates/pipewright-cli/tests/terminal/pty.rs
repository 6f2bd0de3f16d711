//! Runs the command in a pseudo-terminal, and emulates the screen that a person sees.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::fs::{Mode, OFlags};
use rustix::process::{ioctl_tiocsctty, setsid};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};

use crate::emulator::Emulator;

/// The longest time that a test waits.
const PATIENCE: Duration = Duration::from_secs(60);
/// The number of rows of the terminal: enough for all output of a test.
pub(crate) const ROWS: u16 = 40;

/// A command in its own terminal.
pub(crate) struct Terminal {
    child: Child,
    /// The side of the pseudo-terminal that a terminal emulator holds.
    outside: File,
    seen: Arc<Mutex<Seen>>,
}

/// The output of the command so far.
struct Seen {
    emulator: Emulator,
    bytes: Vec<u8>,
    is_over: bool,
}

impl Terminal {
    /// Starts the command with these environment variables, and without others that affect colour.
    pub(crate) fn start(mut command: Command, columns: u16, variables: &[(&str, &str)]) -> Self {
        let outside = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).expect("a pseudo-terminal");
        grantpt(&outside).and_then(|()| unlockpt(&outside)).expect("the terminal is ours");
        let name = ptsname(&outside, Vec::new()).expect("it has a name");
        let inside =
            rustix::fs::open(name, OFlags::RDWR | OFlags::NOCTTY, Mode::empty()).expect("its inside");
        set_size(&outside, columns);
        let end = || inside.try_clone().expect("a descriptor");
        command.stdin(end()).stdout(end()).stderr(end());
        command.env("TERM", "xterm-256color").env_remove("NO_COLOR").envs(variables.iter().copied());
        // SAFETY: both functions are system calls, which a child process may make between fork and exec.
        unsafe {
            command.pre_exec(|| {
                setsid()?;
                ioctl_tiocsctty(rustix::stdio::stdin())?;
                Ok(())
            });
        }
        let child = command.spawn().expect("the binary starts");
        drop((command, inside));
        let emulator = Emulator::new(ROWS, columns);
        let seen = Arc::new(Mutex::new(Seen { emulator, bytes: Vec::new(), is_over: false }));
        let outside = File::from(outside);
        let (reader, shared) = (outside.try_clone().expect("a descriptor"), seen.clone());
        std::thread::spawn(move || read(reader, &shared));
        Self { child, outside, seen }
    }

    /// Changes the width of the terminal, as if a person resized its window.
    pub(crate) fn resize(&self, columns: u16) {
        let mut seen = self.seen();
        seen.emulator.resize(ROWS, columns);
        set_size(&self.outside, columns);
    }

    /// Returns the number of the process.
    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Returns whether the command has not ended.
    pub(crate) fn is_running(&mut self) -> bool {
        self.child.try_wait().expect("it is ours to wait for").is_none()
    }

    /// Presses Ctrl-C.
    pub(crate) fn interrupt(&mut self) {
        self.outside.write_all(b"\x03").expect("the terminal takes keys");
    }

    /// Returns the lines of the screen, without the empty lines at the end.
    pub(crate) fn lines(&self) -> Vec<String> {
        let text = self.seen().emulator.screen().contents();
        text.trim_end().lines().map(|line| line.trim_end().to_owned()).collect()
    }

    /// Returns the row and the column of the cursor.
    pub(crate) fn cursor(&self) -> (u16, u16) {
        self.seen().emulator.screen().cursor_position()
    }

    /// Returns all output, including escape sequences.
    pub(crate) fn written(&self) -> String {
        String::from_utf8_lossy(&self.seen().bytes).into_owned()
    }

    /// Waits until the screen meets a condition. Returns its lines.
    pub(crate) fn wait_until(&self, is_so: impl Fn(&[String]) -> bool) -> Vec<String> {
        let start = Instant::now();
        loop {
            let lines = self.lines();
            if is_so(&lines) {
                return lines;
            }
            assert!(start.elapsed() < PATIENCE, "the screen does not come to this:\n{}", lines.join("\n"));
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits for the command to end. Returns the exit code and the lines of the screen.
    pub(crate) fn wait_for_end(&mut self) -> (Option<i32>, Vec<String>) {
        let start = Instant::now();
        loop {
            let ended = self.child.try_wait().expect("it is ours to wait for");
            if let Some(status) = ended.filter(|_| self.seen().is_over) {
                return (status.code(), self.lines());
            }
            assert!(start.elapsed() < PATIENCE, "it does not end:\n{}", self.lines().join("\n"));
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn seen(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        // The process must also end if the test fails.
        let _ = self.child.kill().and_then(|()| self.child.wait());
    }
}

/// Returns the command `pipewright` with a working folder.
pub(crate) fn pipewright(folder: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(assert_cmd::cargo::cargo_bin!("pipewright"));
    command.current_dir(folder).args(arguments);
    command
}

fn set_size(terminal: &impl AsFd, columns: u16) {
    let size = Winsize { ws_row: ROWS, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
    tcsetwinsize(terminal, size).expect("the terminal takes a size");
}

fn read(mut outside: File, seen: &Mutex<Seen>) {
    let mut bytes = [0; 4096];
    // Reading fails after the command has ended.
    while let Ok(count @ 1..) = outside.read(&mut bytes) {
        let mut seen = seen.lock().unwrap_or_else(PoisonError::into_inner);
        seen.emulator.process(&bytes[..count]);
        seen.bytes.extend_from_slice(&bytes[..count]);
    }
    seen.lock().unwrap_or_else(PoisonError::into_inner).is_over = true;
}
