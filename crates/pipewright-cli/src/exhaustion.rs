//! Says on standard error where a run has come to the end of its memory, and ends the process.
//!
//! Nothing here allocates: the text is put together on the stack.

use std::fmt::{self, Write as _};
use std::io::Write as _;

use pipewright::memory::{Exhaustion, on_exhaustion};

use crate::failure::Exit;

/// Bytes of the longest message.
const LONGEST: usize = 1024;

/// Has a run that gets no more memory end with a report.
pub(crate) fn watch() {
    on_exhaustion(end);
}

fn end(exhaustion: &Exhaustion) -> ! {
    let mut text = Text { bytes: [0; LONGEST], length: 0 };
    let way_out = "make `pipeline.microbatch_size` or the model smaller, take more ranks, or give the process more memory";
    // What does not fit is left out.
    let _ = writeln!(text, "error: {exhaustion}; {way_out}");
    // Nobody is left to tell when standard error is closed.
    let _ = std::io::stderr().write_all(&text.bytes[..text.length]);
    // Without the process's exit handlers, which may need memory or wait for other threads.
    signal_hook::low_level::exit(Exit::RankFailed as i32)
}

/// Text on the stack.
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
