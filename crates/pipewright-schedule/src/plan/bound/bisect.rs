//! The bisection with which bounds find the longest time that is proved too short.

/// Returns the longest time that `is_enough` proves too short, within the share `accuracy`; at least `low`,
/// which is a bound.
pub(super) fn bisect(low: f64, accuracy: f64, mut is_enough: impl FnMut(f64) -> bool) -> f64 {
    let (mut low, mut high) = (low, low);
    while !is_enough(high) {
        low = high;
        high = high * 1.25 + f64::MIN_POSITIVE;
        if !high.is_finite() {
            return low;
        }
    }
    while high - low > accuracy * high {
        let middle = low + (high - low) / 2.0;
        if is_enough(middle) { high = middle } else { low = middle }
    }
    low
}
