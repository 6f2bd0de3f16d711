//! Figures as people read them.

use std::time::Duration;

/// How many ranks are shown one by one; of more, the range is shown.
const RANKS_SHOWN: usize = 8;

/// One word a rank, or the range of all where there are many.
pub(super) fn per_rank<T: Copy + PartialOrd>(values: &[T], word: impl Fn(T) -> String) -> String {
    if values.len() <= RANKS_SHOWN {
        return values.iter().map(|value| word(*value)).collect::<Vec<_>>().join("  ");
    }
    let least = values.iter().copied().reduce(|a, b| if b < a { b } else { a });
    let most = values.iter().copied().reduce(|a, b| if b > a { b } else { a });
    let range = least.zip(most).map(|(least, most)| format!("{} to {}", word(least), word(most)));
    range.unwrap_or_default()
}

/// A share of one in percent.
pub(super) fn percent(share: f64) -> String {
    format!("{:.1}%", share * 100.0)
}

/// Bytes in the unit that leaves one to three digits in front of the point.
pub(crate) fn bytes(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let (mut size, mut unit) = (bytes as f64, 0);
    while size >= 1000.0 && unit + 1 < UNITS.len() {
        size /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{bytes} B") } else { format!("{size:.1} {}", UNITS[unit]) }
}

/// A span of time, as `1:02:03` or `2:03`.
pub(super) fn clock(span: Duration) -> String {
    let seconds = span.as_secs();
    let (hours, minutes, seconds) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    if hours > 0 { format!("{hours}:{minutes:02}:{seconds:02}") } else { format!("{minutes}:{seconds:02}") }
}

#[cfg(test)]
mod tests {
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
    fn times() {
        assert_eq!(clock(Duration::from_millis(62_900)), "1:02");
        assert_eq!(clock(Duration::from_secs(3723)), "1:02:03");
    }

    #[test]
    fn ranks() {
        assert_eq!(per_rank(&[0.125, 0.25], percent), "12.5%  25.0%");
        assert_eq!(per_rank(&[3, 4, 3, 3, 3, 3, 3, 3, 3], bytes), "3 B to 4 B");
        assert_eq!(per_rank(&[], percent), "");
    }
}
