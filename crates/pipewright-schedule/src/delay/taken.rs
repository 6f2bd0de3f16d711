//! The times of a rank within a period, for batches that repeat.

use std::collections::BTreeMap;

/// The times in which a rank computes, the same in each period.
#[derive(Debug, Clone)]
pub(super) struct Taken {
    period: u64,
    /// The start and the end of each span within a period. No two of them touch.
    spans: BTreeMap<u64, u64>,
}

impl Taken {
    /// Returns a period in which all time is free.
    pub(super) fn of(period: u64) -> Self {
        Self { period, spans: BTreeMap::new() }
    }

    /// Takes the first free time of a length from `since` on, and returns its start; `None` if there is none.
    pub(super) fn take(&mut self, since: u64, length: u64) -> Option<u64> {
        if length == 0 {
            return Some(since);
        }
        if length > self.period {
            return None;
        }
        let mut start = since;
        while let Some(end) = self.end_of_conflict(start % self.period, length) {
            start += end - start % self.period;
            if start > since + 2 * self.period {
                return None;
            }
        }
        let first = start % self.period;
        let end = (first + length).min(self.period);
        self.insert(first, end);
        if end - first < length {
            self.insert(0, length - (end - first));
        }
        Some(start)
    }

    /// Returns where a span ends that overlaps with `length` from `start` on, counted from the same beginning of a
    /// period.
    fn end_of_conflict(&self, start: u64, length: u64) -> Option<u64> {
        let before = |limit: u64| self.spans.range(..limit).next_back().map(|(_, end)| *end);
        let here = before((start + length).min(self.period)).filter(|end| *end > start);
        let wrapped = (start + length).checked_sub(self.period).and_then(before).map(|end| self.period + end);
        here.or(wrapped)
    }

    /// Adds a span that overlaps with no other one, and joins it with the spans that it touches.
    fn insert(&mut self, mut first: u64, mut end: u64) {
        if let Some((&before, _)) = self.spans.range(..first).next_back().filter(|(_, it)| **it == first) {
            first = before;
        }
        if let Some(after) = self.spans.remove(&end) {
            end = after;
        }
        self.spans.insert(first, end);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_span_takes_the_first_free_time_of_a_period() {
        let mut taken = Taken::of(10);
        assert_eq!(taken.take(8, 4), Some(8));
        assert_eq!(taken.take(0, 3), Some(2));
        assert_eq!(taken.take(11, 2), Some(15), "from 5 to 7 in a period");
        assert_eq!(taken.take(0, 2), None, "one unit is left from 7 to 8");
        assert_eq!(taken.take(0, 1), Some(7));
        assert_eq!(taken.take(3, 0), Some(3));
        assert_eq!(taken.spans, BTreeMap::from([(0, 10)]));
    }
}
