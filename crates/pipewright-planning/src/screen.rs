//! The only writer of standard error. It writes permanent text and, on a terminal, a frame of a few lines
//! below the text. The frame is redrawn in place.
//!
//! Between two writes the cursor is in the first column of the frame's first line. Erasing everything from
//! the cursor on therefore erases the frame. This also works after the terminal is resized: some terminals
//! cut off long lines and others wrap them, so the number of rows of the frame is unknown, but all of them
//! keep the cursor at the same character.
//!
//! Names in texts may come from files, so control characters other than this program's colours are shown as
//! escapes.
//!
//! The screen is global because standard error belongs to the whole process. When an error is printed, the
//! frame stays on the terminal, and no frame is drawn after it.

use std::fmt::Write as _;
use std::io::{IsTerminal, Write as _};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use pipewright_document::text::{escape, escape_all_but_colours};

use crate::wrap::wrap;

/// The size if the terminal does not report its own.
const STANDARD: Size = Size { columns: 80, rows: 24 };
/// Erases the cursor's line, then everything from its second column to the end of the screen, and returns to
/// the first column. A terminal that erases everything from its first character may move the text to its
/// scrollback first, as tmux does (`scroll-on-clear`); each frame would then stay there.
const CLEAR: &str = "\r\x1b[K\x1b[C\x1b[J\r";
/// While a frame is written, the terminal cuts off long lines instead of wrapping them. A terminal that has become narrower
/// since the frame was composed would otherwise show more rows than the frame has lines.
const CUT_LINES: &str = "\x1b[?7l";
const WRAP_LINES: &str = "\x1b[?7h";
/// The most lines of a frame.
const MOST_LINES: usize = 16;

static SCREEN: Mutex<Screen> = Mutex::new(Screen { frame: Vec::new(), takes_frames: false });
/// The number of lines of the frame on the terminal, for the signal handler, which must not take a lock.
static LINES_DRAWN: AtomicUsize = AtomicUsize::new(0);

/// Whether the process ends, and no frame follows.
static ENDS: AtomicBool = AtomicBool::new(false);

/// The size of a terminal in characters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size {
    /// The number of characters in a line.
    pub columns: usize,
    /// The number of lines.
    pub rows: usize,
}

struct Screen {
    /// The lines that are drawn, without line ends.
    frame: Vec<String>,
    /// Whether frames are drawn.
    takes_frames: bool,
}

/// Writes text on separate lines above the frame, unless `--quiet` was given. Control characters are shown as
/// escapes. On a terminal, long lines are broken between words.
pub fn say(words: &str) {
    if is_quiet() {
        return;
    }
    let words = escape(words);
    let text = if is_terminal() { wrap(&words, size().columns) } else { words.into_owned() };
    screen().write_above(&format!("{text}\n"));
}

/// Returns the width of the terminal, or the usual width elsewhere.
pub fn columns() -> usize {
    if is_terminal() { size().columns } else { STANDARD.columns }
}

/// Writes a library's log messages above the frame. `text` must end with a line end.
pub fn log(text: &str) {
    screen().write_above(&escape_all_but_colours(text));
}

/// Writes an error. The frame stays on the terminal, and no frames follow it. `text` must end with a line
/// end.
pub fn print_error(text: &str) {
    let mut screen = screen();
    screen.leave_frame();
    screen.takes_frames = false;
    write(&escape_all_but_colours(text));
}

/// Allows frames to be drawn.
pub fn open() {
    screen().takes_frames = true;
}

/// Replaces the frame. `compose` returns its lines for the terminal's size. Each line must be shorter than
/// the terminal's width.
pub fn draw(compose: impl FnOnce(Size) -> Vec<String>) {
    let mut screen = screen();
    if !screen.takes_frames || ENDS.load(Ordering::Relaxed) {
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

/// Leaves the last frame on the terminal, moves the cursor below it, and draws no further frames.
pub fn close() {
    let mut screen = screen();
    screen.leave_frame();
    screen.takes_frames = false;
}

/// Returns whether standard error is a terminal that frames can be drawn on.
pub fn is_terminal() -> bool {
    std::io::stderr().is_terminal() && std::env::var_os("TERM").is_none_or(|term| term != "dumb")
}

/// Returns whether text may be coloured.
pub fn has_colour() -> bool {
    is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
}

/// Moves the cursor below the frame, which is the last one. Does not lock or allocate, so a signal handler
/// may call it before it ends the process.
#[cfg(unix)]
pub fn leave_from_signal_handler() {
    ENDS.store(true, Ordering::Relaxed);
    const LINE_ENDS: [u8; MOST_LINES] = [b'\n'; MOST_LINES];
    let lines = LINES_DRAWN.load(Ordering::Relaxed).min(MOST_LINES);
    // The process ends even if this write fails.
    let _ = rustix::io::write(rustix::stdio::stderr(), &LINE_ENDS[..lines]);
}

fn screen() -> MutexGuard<'static, Screen> {
    SCREEN.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Screen {
    /// Writes text at the start of the frame, and the frame below the text.
    fn write_above(&self, text: &str) {
        if self.frame.is_empty() {
            write(text);
        } else {
            write(&format!("{CLEAR}{text}{}", frame_text(&self.frame)));
        }
    }

    fn leave_frame(&mut self) {
        let frame = std::mem::take(&mut self.frame);
        if !frame.is_empty() {
            write(&format!("{CLEAR}{CUT_LINES}{}{WRAP_LINES}\n", frame.join("\n")));
            LINES_DRAWN.store(0, Ordering::Relaxed);
        }
    }
}

/// Returns the lines, followed by the codes that move the cursor back to the first line.
fn frame_text(lines: &[String]) -> String {
    let mut text = format!("{CUT_LINES}{}{WRAP_LINES}\r", lines.join("\n"));
    if lines.len() > 1 {
        write!(text, "\x1b[{}A", lines.len() - 1).expect("a string takes all text");
    }
    text
}

#[cfg(unix)]
fn size() -> Size {
    use rustix::termios::{Winsize, tcgetwinsize};
    match tcgetwinsize(rustix::stdio::stderr()) {
        Ok(Winsize { ws_col: columns @ 1.., ws_row: rows @ 1.., .. }) => {
            Size { columns: columns.into(), rows: rows.into() }
        }
        _ => STANDARD,
    }
}

#[cfg(not(unix))]
fn size() -> Size {
    STANDARD
}

/// Writes everything at once, so that the terminal never shows a part of a frame.
fn write(text: &str) {
    // If standard error is closed, the error cannot be reported anywhere.
    let _ = std::io::stderr().lock().write_all(text.as_bytes());
}

/// The flag `--quiet`: only errors are written to standard error. It is global because standard error belongs
/// to the whole process.
static IS_QUIET: AtomicBool = AtomicBool::new(false);

/// Sets the flag.
pub fn set_quiet(is_quiet: bool) {
    IS_QUIET.store(is_quiet, Ordering::Relaxed);
}

/// Returns the flag.
pub fn is_quiet() -> bool {
    IS_QUIET.load(Ordering::Relaxed)
}
