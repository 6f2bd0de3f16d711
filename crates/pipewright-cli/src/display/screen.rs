//! The one writer of standard error: words that stay, and on a terminal a frame of a few lines that is drawn again in
//! place, always below the words.
//!
//! Between two writes the cursor stands in the first column of the frame's first line. The frame is then erased by
//! clearing from the cursor to the end of the screen. That is right after any resizing: some terminals cut long lines
//! off and others wrap them, so how many rows the frame takes up cannot be known, but all of them keep the cursor at
//! its character.
//!
//! The screen belongs to the process, as standard error does. A frame is left where it is when an error is printed,
//! and nothing is drawn over the error afterwards.

use std::fmt::Write as _;
use std::io::{IsTerminal, Write as _};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::termios::{Winsize, tcgetwinsize};

use crate::quiet::is_quiet;

/// The size where the terminal does not tell its own.
const STANDARD: Size = Size { columns: 80, rows: 24 };
/// Clears from the cursor to the end of the screen.
const CLEAR: &str = "\r\x1b[J";
/// The most lines of a frame.
const MOST_LINES: usize = 16;

static SCREEN: Mutex<Screen> = Mutex::new(Screen { frame: Vec::new(), takes_frames: false });
/// The lines of the frame on the terminal, for the handler of a signal, which must not take a lock.
static LINES_DRAWN: AtomicUsize = AtomicUsize::new(0);

/// The size of a terminal in characters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Size {
    /// Characters of a line.
    pub(crate) columns: usize,
    /// Lines.
    pub(crate) rows: usize,
}

struct Screen {
    /// The lines that are drawn, without line ends.
    frame: Vec<String>,
    /// Whether frames are drawn at all.
    takes_frames: bool,
}

/// Writes words on lines of their own, above the frame, unless `--quiet` was given.
pub(crate) fn say(words: &str) {
    if !is_quiet() {
        screen().write_above(&format!("{words}\n"));
    }
}

/// Writes what a library logs, above the frame. `text` ends its lines itself.
pub(crate) fn log(text: &str) {
    screen().write_above(text);
}

/// Writes an error. The frame stays where it is, and there are no frames after it. `text` ends its lines itself.
pub(crate) fn print_error(text: &str) {
    let mut screen = screen();
    screen.leave_frame();
    screen.takes_frames = false;
    write(text);
}

/// Lets frames be drawn.
pub(crate) fn open() {
    screen().takes_frames = true;
}

/// Draws a frame in place of the one before. `compose` makes its lines for the terminal's size; a line must be shorter
/// than the terminal is wide.
pub(crate) fn draw(compose: impl FnOnce(Size) -> Vec<String>) {
    let mut screen = screen();
    if !screen.takes_frames {
        return;
    }
    let size = size();
    let mut lines = compose(size);
    lines.truncate(size.rows.saturating_sub(1).min(MOST_LINES));
    let text = format!("{CLEAR}{}", frame_text(&lines));
    screen.frame = lines;
    write(&text);
    LINES_DRAWN.store(screen.frame.len(), Ordering::Relaxed);
}

/// Leaves the last frame on the terminal, with the cursor below it, and draws no more.
pub(crate) fn close() {
    let mut screen = screen();
    screen.leave_frame();
    screen.takes_frames = false;
}

/// Whether standard error is a terminal that frames can be drawn on.
pub(crate) fn is_terminal() -> bool {
    std::io::stderr().is_terminal() && std::env::var_os("TERM").is_none_or(|term| term != "dumb")
}

/// Whether text may be coloured.
pub(crate) fn has_colour() -> bool {
    is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
}

/// Moves the cursor below the frame. It takes no lock and no memory, so the handler of a signal may call it before it
/// ends the process.
pub(crate) fn leave_from_signal_handler() {
    const LINE_ENDS: [u8; MOST_LINES] = [b'\n'; MOST_LINES];
    let lines = LINES_DRAWN.load(Ordering::Relaxed).min(MOST_LINES);
    // The process ends in any case.
    let _ = rustix::io::write(rustix::stdio::stderr(), &LINE_ENDS[..lines]);
}

fn screen() -> MutexGuard<'static, Screen> {
    SCREEN.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Screen {
    /// Writes text where the frame begins, and the frame below it.
    fn write_above(&self, text: &str) {
        match self.frame.is_empty() {
            true => write(text),
            false => write(&format!("{CLEAR}{text}{}", frame_text(&self.frame))),
        }
    }

    fn leave_frame(&mut self) {
        let frame = std::mem::take(&mut self.frame);
        if !frame.is_empty() {
            write(&format!("{CLEAR}{}\n", frame.join("\n")));
            LINES_DRAWN.store(0, Ordering::Relaxed);
        }
    }
}

/// The lines, and the way back to the first of them.
fn frame_text(lines: &[String]) -> String {
    let mut text = lines.join("\n");
    text.push('\r');
    if lines.len() > 1 {
        write!(text, "\x1b[{}A", lines.len() - 1).expect("a string takes all text");
    }
    text
}

fn size() -> Size {
    match tcgetwinsize(rustix::stdio::stderr()) {
        Ok(Winsize { ws_col: columns @ 1.., ws_row: rows @ 1.., .. }) => {
            Size { columns: columns.into(), rows: rows.into() }
        }
        _ => STANDARD,
    }
}

/// Writes everything in one piece, so that no half of a frame is shown.
fn write(text: &str) {
    // Nobody is left to tell when standard error is closed.
    let _ = std::io::stderr().lock().write_all(text.as_bytes());
}
