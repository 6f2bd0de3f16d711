//! Formats numbers for people.

use std::time::Duration;

use pipewright::train::Metrics;
use pipewright_planning::numbers::{below_1000, decimals};

/// The largest number of ranks that are shown one by one. For more ranks, the range is shown.
pub(super) const RANKS_SHOWN: usize = 8;

/// Returns one word per rank, or the range of all values if there are many ranks.
pub(super) fn per_rank<T: Copy + PartialOrd>(values: &[T], word: impl Fn(T) -> String) -> String {
    if values.len() <= RANKS_SHOWN {
        return values.iter().map(|value| word(*value)).collect::<Vec<_>>().join("  ");
    }
    let least = values.iter().copied().reduce(|a, b| if b < a { b } else { a });
    let most = values.iter().copied().reduce(|a, b| if b > a { b } else { a });
    let range = least.zip(most).map(|(least, most)| format!("{} to {}", word(least), word(most)));
    range.unwrap_or_default()
}

/// Returns the words for the auxiliary losses by name, and for the sum that is minimised; none if there is no
/// auxiliary loss.
pub(super) fn loss_parts(metrics: &Metrics) -> Vec<String> {
    let parts = metrics.auxiliary.iter().map(|(name, loss)| format!("{name} {loss:.4}"));
    parts.chain(metrics.total.map(|total| format!("total {total:.4}"))).collect()
}

/// Returns the words for the perplexity and the accuracy of an evaluation, as far as they are known.
pub(super) fn token_figures(metrics: &Metrics) -> Vec<String> {
    let perplexity = metrics.validation_perplexity.map(|perplexity| format!("perplexity {perplexity:.2}"));
    let accuracy = metrics.validation_accuracy.map(|share| format!("accuracy {}", percent(share)));
    perplexity.into_iter().chain(accuracy).collect()
}

/// Returns the words for the loss scale, if there is one; they say if the update was skipped.
pub(super) fn loss_scale(metrics: &Metrics) -> Option<String> {
    let skipped = if metrics.skipped { ", update skipped" } else { "" };
    metrics.loss_scale.map(|scale| format!("loss scale {scale}{skipped}"))
}

/// Returns the time that a step was expected to take, in milliseconds, after a word for it: the time of the
/// plan, or else the time that is predicted from earlier steps.
pub(super) fn expected_step(metrics: &Metrics) -> Option<(&'static str, f64)> {
    let planned = metrics.planned_step_ms.map(|planned| ("planned", planned));
    planned.or_else(|| metrics.predicted_step_ms.map(|predicted| ("predicted", predicted)))
}

/// Returns the words for the rate of the model's matrix products and their share of the peak, if they are
/// known.
pub(super) fn computed(metrics: &Metrics) -> Option<String> {
    let share = metrics.mfu.map(|mfu| format!(" (MFU {})", percent(mfu))).unwrap_or_default();
    metrics.model_tflops.map(|rate| operations_per_second(rate) + &share)
}

/// Formats a rate in 10¹² operations per second with three significant digits in a suitable unit.
fn operations_per_second(teraflops: f64) -> String {
    const UNITS: [&str; 4] = ["MFLOP/s", "GFLOP/s", "TFLOP/s", "PFLOP/s"];
    let (size, unit) = below_1000(teraflops * 1e6, UNITS.len());
    format!("{size:.*} {}", decimals(size), UNITS[unit])
}

/// Formats how much longer a time is than another one, as a percentage with its sign.
pub(super) fn longer_by(time: f64, other: f64) -> String {
    format!("{:+.0}%", (time / other - 1.0) * 100.0)
}

/// Formats a fraction as a percentage.
pub(super) fn percent(share: f64) -> String {
    format!("{:.1}%", share * 100.0)
}

/// Formats a count with commas between groups of three digits.
pub(super) fn grouped(count: u64) -> String {
    let digits = count.to_string();
    let groups: Vec<&str> = digits
        .as_bytes()
        .rchunks(3)
        .rev()
        .map(|group| std::str::from_utf8(group).expect("digits are ASCII"))
        .collect();
    groups.join(",")
}

/// Formats a number of milliseconds in a suitable unit.
pub(crate) fn milliseconds(milliseconds: f64) -> String {
    match milliseconds {
        ..9.95 => format!("{milliseconds:.2} ms"),
        ..999.5 => format!("{milliseconds:.0} ms"),
        _ => format!("{:.2} s", milliseconds / 1e3),
    }
}

/// Formats a duration, such as `1:02:03` or `2:03`.
pub(super) fn clock(span: Duration) -> String {
    let seconds = span.as_secs();
    let (hours, minutes, seconds) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    if hours > 0 { format!("{hours}:{minutes:02}:{seconds:02}") } else { format!("{minutes}:{seconds:02}") }
}

/// Returns the expected time of the `left` remaining steps, from the average time of the `taken` finished
/// steps. Returns `None` before the first step.
pub(super) fn remaining(elapsed: Duration, taken: u64, left: u64) -> Option<Duration> {
    let seconds = elapsed.as_secs_f64() / taken as f64 * left as f64;
    (taken > 0).then(|| Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX))
}

#[cfg(test)]
mod tests {
    use pipewright_planning::numbers::{bytes, short_count};

    use super::*;

    #[test]
    fn sizes() {
        let check = |size: u64, expected: &str| assert_eq!(bytes(size), expected);
        check(0, "0 B");
        check(999, "999 B");
        check(1024, "1.0 KiB");
        check(1000 * 1024, "1.0 MiB");
        check(u64::MAX, "16777216.0 TiB");
    }

    #[test]
    fn rates_of_computation() {
        let check = |teraflops: f64, mfu: Option<f64>, expected: &str| {
            let metrics = Metrics { model_tflops: Some(teraflops), mfu, ..Metrics::default() };
            assert_eq!(computed(&metrics).as_deref(), Some(expected));
        };
        check(1.234e-6, None, "1.23 MFLOP/s");
        check(0.081_17, Some(0.343), "81.2 GFLOP/s (MFU 34.3%)");
        check(0.9996, None, "1.00 TFLOP/s");
        check(431.6, Some(0.436), "432 TFLOP/s (MFU 43.6%)");
        check(12_345.0, None, "12.3 PFLOP/s");
        assert_eq!(computed(&Metrics::default()), None);
    }

    #[test]
    fn counts() {
        let check = |count: u64, short: &str, long: &str| {
            assert_eq!([short_count(count), grouped(count)], [short, long]);
        };
        check(0, "0", "0");
        check(999, "999", "999");
        check(1000, "1.00k", "1,000");
        check(1_049_600, "1.05M", "1,049,600");
        check(26_494_464, "26.5M", "26,494,464");
        check(999_600, "1.00M", "999,600");
        check(70_553_706_496, "70.6B", "70,553,706,496");
        check(15_600_000_000_000, "15.6T", "15,600,000,000,000");
    }

    #[test]
    fn times() {
        assert_eq!(clock(Duration::from_millis(62_900)), "1:02");
        assert_eq!(clock(Duration::from_secs(3723)), "1:02:03");
        assert_eq!([0.5, 131.4, 1310.0].map(milliseconds), ["0.50 ms", "131 ms", "1.31 s"]);
        let second = Duration::from_secs(1);
        assert_eq!(remaining(second, 0, 3), None, "nothing is known before the first step");
        assert_eq!(remaining(second * 3, 2, 8), Some(second * 12));
    }

    #[test]
    fn ranks() {
        assert_eq!(per_rank(&[0.125, 0.25], percent), "12.5%  25.0%");
        assert_eq!(per_rank(&[3, 4, 3, 3, 3, 3, 3, 3, 3], bytes), "3 B to 4 B");
        assert_eq!(per_rank(&[], percent), "");
    }
}
