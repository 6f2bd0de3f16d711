//! Ends the process if a command cannot allocate memory, with a report on standard error of where that
//! happened.
//!
//! This code does not allocate: it composes the text on the stack.

use std::fmt::{self, Write as _};
use std::io::Write as _;
use std::sync::atomic::{AtomicBool, Ordering};

use pipewright::memory::{Exhaustion, limit_memory, on_exhaustion};
use pipewright_planning::failure::Exit;
use pipewright_planning::screen;

/// The length of the longest message in bytes.
const LONGEST: usize = 1024;

/// Whether ranks run in this process, or are about to.
static IS_RUN: AtomicBool = AtomicBool::new(false);

/// Installs the handler that reports a failed allocation and ends the process.
pub(crate) fn watch() {
    on_exhaustion(end);
}

/// Tells the handler that ranks are about to run. Allocations fail beyond `limit` bytes, because the system
/// kills a process that outgrows the machine without a report.
pub(crate) fn watch_run(limit: Option<u64>) {
    IS_RUN.store(true, Ordering::Relaxed);
    if let Some(bytes) = limit {
        limit_memory(bytes);
    }
}

fn end(exhaustion: &Exhaustion) -> ! {
    let mut text = Text { bytes: [0; LONGEST], length: 0 };
    let (advice, exit) = if IS_RUN.load(Ordering::Relaxed) {
        let advice = "make `pipeline.microbatch_size` or the model smaller, use more ranks or give the process more memory";
        (advice, Exit::RankFailed)
    } else {
        ("use fewer microbatches, stages or ranks, or give the process more memory", Exit::CheckFailed)
    };
    // Text that does not fit is cut off.
    let _ = writeln!(text, "error: {exhaustion}; {advice}");
    // The report must not be in the frame of the display, which is drawn over.
    screen::leave_from_signal_handler();
    // If standard error is closed, the error cannot be reported anywhere.
    let _ = std::io::stderr().write_all(&text.bytes[..text.length]);
    // The process's exit handlers are skipped, because they may need memory or wait for other threads.
    signal_hook::low_level::exit(exit.exit_code().into())
}

/// A text on the stack.
struct Text {
    bytes: [u8; LONGEST],
    length: usize,
}

impl fmt::Write for Text {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let room = &mut self.bytes[self.length..];
        let fits = text.len().min(room.len());
        room[..fits].copy_from_slice(&text.as_bytes()[..fits]);
        self.length += fits;
        Ok(())
    }
}
