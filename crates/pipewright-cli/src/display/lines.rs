//! Plain lines for logs: the first step, the last step, steps whose update was skipped, and at most one other
//! step per second between them.
//!
//! `metrics.jsonl` contains every step, so the log does not need to repeat them all.

use std::time::{Duration, Instant};

use pipewright::train::Metrics;
use pipewright_planning::numbers::bytes;

use crate::display::figures::{
    clock, computed, expected_step, loss_parts, loss_scale, milliseconds, per_rank, percent, remaining,
    token_figures,
};

/// The shortest time between two lines.
const PAUSE: Duration = Duration::from_secs(1);

/// The lines of one run.
pub(crate) struct Lines {
    steps: u64,
    /// The number of steps that were finished when the display started.
    done: u64,
    start: Instant,
    last: Option<Instant>,
}

impl Lines {
    /// Returns the lines for a run of `steps` steps whose first `done` steps are finished.
    pub(super) fn new(done: u64, steps: u64) -> Self {
        Self { steps, done, start: Instant::now(), last: None }
    }

    /// Returns the line of the last one of the steps that another process has finished before.
    pub(super) fn recall(&mut self, steps: &[Metrics]) -> Option<String> {
        let last = steps.last()?;
        let elapsed = Duration::try_from_secs_f64(last.elapsed_s).unwrap_or_default();
        (self.done, self.start) = (0, self.start.checked_sub(elapsed).unwrap_or(self.start));
        self.last = Some(Instant::now());
        Some(line(last, 0, self.steps, elapsed))
    }

    /// Returns the line for a step if one is due.
    pub(super) fn step(&mut self, metrics: &Metrics) -> Option<String> {
        let now = Instant::now();
        // An evaluation is rare and takes time, so its loss is always shown.
        let is_due = self.last.is_none_or(|last| now - last >= PAUSE) || metrics.validation_loss.is_some();
        if !is_due && !metrics.skipped && metrics.step < self.steps {
            return None;
        }
        self.last = Some(now);
        Some(line(metrics, self.done, self.steps, now - self.start))
    }
}

fn line(metrics: &Metrics, done: u64, steps: u64, elapsed: Duration) -> String {
    let (taken, left) = (metrics.step.saturating_sub(done), steps.saturating_sub(metrics.step));
    let left = remaining(elapsed, taken, left).map(|left| format!("  remaining {}", clock(left)));
    format!(
        "step {}/{steps}  loss {:.4}{}{}  grad norm {:.3}{}  lr {:.2e}  {:.0} {}/s{}  {}  bubble {}  memory {}  \
         elapsed {}{}",
        metrics.step,
        metrics.loss,
        loss_parts(metrics).iter().map(|part| format!("  {part}")).collect::<String>(),
        metrics.validation_loss.map(|loss| format!("  validation {loss:.4}")).unwrap_or_default()
            + &source_losses(metrics)
            + &token_figures(metrics).iter().map(|figure| format!("  {figure}")).collect::<String>(),
        metrics.grad_norm,
        loss_scale(metrics).map(|scale| format!("  {scale}")).unwrap_or_default(),
        metrics.learning_rate,
        metrics.tokens_per_second,
        metrics.counted(),
        computed(metrics).map(|rate| format!("  {rate}")).unwrap_or_default(),
        step_time(metrics),
        percent(metrics.bubble_fraction),
        per_rank(&metrics.peak_bytes, bytes),
        clock(elapsed),
        left.unwrap_or_default(),
    )
}

/// Returns the validation losses of the sources of a mixture in parentheses, with `-` for a source without
/// one; nothing without a mixture.
fn source_losses(metrics: &Metrics) -> String {
    let sources = &metrics.validation_sources;
    if sources.is_empty() {
        return String::new();
    }
    let loss = |loss: Option<f64>| loss.map_or_else(|| "-".to_owned(), |loss| format!("{loss:.4}"));
    let losses: Vec<String> = sources.iter().map(|source| loss(source.loss)).collect();
    format!(" ({})", losses.join(", "))
}

/// Returns the time of the step, and the planned or predicted time if there is one.
fn step_time(metrics: &Metrics) -> String {
    let time = milliseconds(metrics.step_ms);
    match expected_step(metrics) {
        Some((word, expected)) => format!("{time} ({word} {})", milliseconds(expected)),
        None => time,
    }
}

#[cfg(test)]
mod tests {
    use pipewright::train::SourceLoss;

    use super::*;

    fn metrics(step: u64) -> Metrics {
        Metrics {
            step,
            loss: 2.5,
            grad_norm: 1.25,
            learning_rate: 1e-3,
            tokens_per_second: 1024.4,
            step_ms: 20.0,
            bubble_fraction: 0.125,
            peak_bytes: vec![2048, 4096],
            ..Metrics::default()
        }
    }

    #[test]
    fn what_a_line_says() {
        let expected = "step 2/10  loss 2.5000  grad norm 1.250  lr 1.00e-3  1024 tokens/s  20 ms  \
                        bubble 12.5%  memory 2.0 KiB  4.0 KiB  elapsed 0:03  remaining 0:12";
        assert_eq!(line(&metrics(2), 0, 10, Duration::from_secs(3)), expected);
        let predicted = Metrics { predicted_step_ms: Some(18.4), ..metrics(2) };
        let text = line(&predicted, 0, 10, Duration::from_secs(3));
        assert!(text.contains("  20 ms (predicted 18 ms)  bubble "), "{text}");
        let planned = Metrics { planned_step_ms: Some(19.4), ..predicted };
        let text = line(&planned, 0, 10, Duration::from_secs(3));
        assert!(text.contains("  20 ms (planned 19 ms)  bubble "), "{text}");
        let rate = Metrics { model_tflops: Some(0.123_45), mfu: Some(0.614), ..metrics(2) };
        let text = line(&rate, 0, 10, Duration::from_secs(3));
        assert!(text.contains(" tokens/s  123 GFLOP/s (MFU 61.4%)  20 ms "), "{text}");
        let unknown = Metrics { mfu: None, ..rate };
        let text = line(&unknown, 0, 10, Duration::from_secs(3));
        assert!(text.contains(" tokens/s  123 GFLOP/s  20 ms "), "{text}");
        let bytes = Metrics { unit: Some("bytes".to_owned()), ..metrics(2) };
        let text = line(&bytes, 0, 10, Duration::from_secs(3));
        assert!(text.contains(" 1024 bytes/s  20 ms "), "{text}");
        let resumed = line(&metrics(2), 1, 10, Duration::from_secs(3));
        assert!(resumed.ends_with("remaining 0:24"), "{resumed}");
    }

    #[test]
    fn auxiliary_losses_are_named() {
        let auxiliary =
            std::collections::BTreeMap::from([("moe_aux".to_owned(), 2.25), ("z".to_owned(), 0.5)]);
        let metrics = Metrics { auxiliary, total: Some(2.5275), ..metrics(2) };
        let line = line(&metrics, 0, 10, Duration::from_secs(3));
        assert!(
            line.starts_with("step 2/10  loss 2.5000  moe_aux 2.2500  z 0.5000  total 2.5275  grad"),
            "{line}"
        );
    }

    #[test]
    fn every_evaluation_has_a_line() {
        let mut lines = Lines::new(0, 9);
        let evaluated = Metrics { validation_loss: Some(2.75), ..metrics(2) };
        lines.step(&metrics(1)).expect("the first step");
        let line = lines.step(&evaluated).expect("an evaluation");
        assert!(line.starts_with("step 2/9  loss 2.5000  validation 2.7500  grad norm"), "{line}");
        assert_eq!(lines.step(&metrics(3)), None);
        let of_tokens = Metrics {
            validation_perplexity: Some(15.6426),
            validation_accuracy: Some(0.4567),
            ..evaluated.clone()
        };
        let line = lines.step(&of_tokens).expect("an evaluation");
        assert!(line.contains("validation 2.7500  perplexity 15.64  accuracy 45.7%  grad norm"), "{line}");
        let source = |loss| SourceLoss { name: "a.txt".to_owned(), loss };
        let validation_sources = vec![source(Some(2.5)), source(None)];
        let line = lines.step(&Metrics { validation_sources, ..evaluated }).expect("an evaluation");
        assert!(line.contains("  validation 2.7500 (2.5000, -)  grad norm"), "{line}");
    }

    #[test]
    fn a_skipped_update_always_has_a_line() {
        let scaled = |step, skipped| Metrics { loss_scale: Some(1024.0), skipped, ..metrics(step) };
        let mut lines = Lines::new(0, 9);
        let shown =
            [(1, false), (2, false), (3, true)].map(|(step, skipped)| lines.step(&scaled(step, skipped)));
        assert!(shown[1].is_none());
        let [first, _, skipped] = shown.map(Option::unwrap_or_default);
        assert!(first.contains("grad norm 1.250  loss scale 1024  lr"), "{first}");
        assert!(skipped.contains("  loss scale 1024, update skipped  lr"), "{skipped}");
    }

    #[test]
    fn the_first_and_the_last_step_have_lines() {
        let mut lines = Lines::new(0, 3);
        let shown = [1, 2, 3].map(|step| lines.step(&metrics(step)).is_some());
        assert_eq!(shown, [true, false, true]);
    }
}
