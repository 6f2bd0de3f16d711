//! Writes the libraries' log messages to standard error. The variable `PIPEWRIGHT_LOG` selects the messages,
//! as in `PIPEWRIGHT_LOG=pipewright=debug`.

use std::io::{self, Write};

use pipewright_planning::screen;
use pipewright_planning::screen::is_quiet;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

/// The default filter: warnings, except for warnings that a command's own error repeats.
const STANDARD: &str = "warn,pipewright::failure=off";

/// Starts to write log messages.
pub(crate) fn start() {
    // With `--quiet`, warnings are not written, because they are not errors.
    let standard = if is_quiet() { "error,pipewright::failure=off" } else { STANDARD };
    let chosen = std::env::var("PIPEWRIGHT_LOG").ok().and_then(|chosen| chosen.parse::<Targets>().ok());
    let filter = chosen.unwrap_or_else(|| standard.parse().expect("the standard filter is sound"));
    let lines = tracing_subscriber::fmt::layer()
        .with_writer(|| Line(Vec::new()))
        .with_ansi(screen::has_colour())
        .without_time();
    // This fails only if a log was started before. That log is used then.
    let _ = tracing_subscriber::registry().with(filter).with(lines).try_init();
}

/// Collects an event's text, and writes it above the live display at once.
struct Line(Vec<u8>);

impl Write for Line {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        screen::log(&String::from_utf8_lossy(&self.0));
    }
}
