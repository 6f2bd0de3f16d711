//! What the libraries log, on standard error. `PIPEWRIGHT_LOG` chooses what, as in `PIPEWRIGHT_LOG=pipewright=debug`.

use std::io::IsTerminal;

use tracing_subscriber::EnvFilter;

use crate::quiet::is_quiet;

/// Warnings, without those that a command's own error repeats.
const STANDARD: &str = "warn,pipewright::failure=off";

/// Starts to show the log.
pub(crate) fn start() {
    // Warnings are not errors.
    let standard = if is_quiet() { "error,pipewright::failure=off" } else { STANDARD };
    let filter = EnvFilter::try_from_env("PIPEWRIGHT_LOG").unwrap_or_else(|_| EnvFilter::new(standard));
    let has_colour =
        std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    let subscriber = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(has_colour)
        .without_time();
    // It fails only where somebody started a log before, which then serves as well.
    let _ = subscriber.try_init();
}
