//! The progress bar of `pipewright tokenize`, on a terminal.

use std::time::{Duration, Instant};

use pipewright::train::data::TokenizeProgress;
use pipewright_planning::numbers::bytes;
use pipewright_planning::screen::{self, Size, is_quiet};

use crate::display::figures::{clock, grouped, remaining};

/// The time between two drawings.
const PAUSE: Duration = Duration::from_millis(100);

/// A bar, which is not drawn if standard error is not a terminal.
pub(crate) struct TokenizeBar {
    began: Instant,
    drawn: Option<Instant>,
    last: Option<TokenizeProgress>,
    is_shown: bool,
}

impl TokenizeBar {
    /// Returns a bar without progress.
    pub(crate) fn new() -> Self {
        let is_shown = screen::is_terminal() && !is_quiet();
        if is_shown {
            screen::open();
        }
        Self { began: Instant::now(), drawn: None, last: None, is_shown }
    }

    /// Shows the progress, a few times per second.
    pub(crate) fn show(&mut self, progress: TokenizeProgress) {
        self.last = Some(progress);
        if self.drawn.is_none_or(|drawn| drawn.elapsed() >= PAUSE) {
            self.draw();
        }
    }

    fn draw(&mut self) {
        let Some(progress) = self.last.filter(|_| self.is_shown) else { return };
        let elapsed = self.began.elapsed();
        screen::draw(|size| vec![line(progress, elapsed, size)]);
        self.drawn = Some(Instant::now());
    }

    /// Leaves the last state of the bar on the terminal.
    pub(crate) fn finish(&mut self) {
        self.draw();
        if self.is_shown {
            screen::close();
        }
    }
}

/// Returns the line of the bar, which is shorter than the terminal is wide.
fn line(progress: TokenizeProgress, elapsed: Duration, size: Size) -> String {
    const BAR: usize = 20;
    let TokenizeProgress { read, bytes: all, tokens } = progress;
    let read = read.min(all);
    let share = if all == 0 { 1.0 } else { read as f64 / all as f64 };
    let full = (share * BAR as f64) as usize;
    let bar = format!("[{}{}]", "#".repeat(full), "-".repeat(BAR - full));
    let mut line = format!(
        "{bar} {:3.0}%  {} of {}  {} tokens",
        (share * 100.0).floor(),
        bytes(read),
        bytes(all),
        grouped(tokens)
    );
    if let Some(left) = remaining(elapsed, read, all - read) {
        line.push_str(&format!("  {} left", clock(left)));
    }
    line.chars().take(size.columns.saturating_sub(1)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bar_shows_what_is_read() {
        let progress = TokenizeProgress { read: 3 << 20, bytes: 4 << 20, tokens: 1_234_567 };
        let shown = |columns| line(progress, Duration::from_secs(30), Size { columns, rows: 24 });
        let whole = shown(120);
        assert!(whole.starts_with("[###############-----]  75%  3"), "{whole}");
        assert!(whole.contains("1,234,567 tokens  "), "{whole}");
        assert_eq!(shown(30), whole[..29]);
        let empty = TokenizeProgress { read: 0, bytes: 0, tokens: 0 };
        assert!(line(empty, Duration::ZERO, Size { columns: 80, rows: 24 }).contains("100%"));
    }
}
