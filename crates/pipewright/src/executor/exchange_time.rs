//! The time of a rank's exchanges of tokens, and of its waits in them. A rank waits for rows that travel, which a
//! faster link makes shorter, or for a replica that has not sent yet, which usually has more to compute. So the
//! two are counted apart.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

/// The time in which a rank exchanged tokens with the replicas that hold the experts together with it, and in
/// which it waited for them. `exposed` and `waited` together are the time in which it waited inside its actions
/// and computed nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExchangeTime {
    /// The time in which rows for this rank were under way: from the moment at which another replica sent them
    /// until they had arrived. Rows that travel at the same time count once. If the rank waits when rows
    /// arrive, the moment until it continues counts too.
    pub total: Duration,
    /// The part of `total` in which the rank waited and computed nothing.
    pub exposed: Duration,
    /// The time in which the rank computed nothing and waited for rows that another replica had not sent yet,
    /// because that replica still computed, or waited itself.
    pub waited: Duration,
}

impl std::ops::AddAssign for ExchangeTime {
    fn add_assign(&mut self, other: Self) {
        self.total += other.total;
        self.exposed += other.exposed;
        self.waited += other.waited;
    }
}

/// The start and the end of a time.
pub(super) type Span = (Instant, Instant);

impl ExchangeTime {
    /// Counts the exchanges of an action. `messages` are the times from the sending of each message to its
    /// arrival. `waits` are the times in which the rank computed nothing, in order; they do not overlap.
    pub(super) fn of(mut messages: Vec<Span>, waits: Vec<Span>) -> Self {
        for (_, arrival) in &mut messages {
            // A wait ends a moment after its message has arrived.
            let next = waits.get(waits.partition_point(|(_, end)| end < arrival));
            *arrival = next.filter(|(start, _)| start <= arrival).map_or(*arrival, |&(_, end)| end);
        }
        let total = length_of_union(messages.clone());
        messages.extend_from_slice(&waits);
        let waited = length_of_union(messages) - total;
        Self { total, exposed: length_of_union(waits) - waited, waited }
    }
}

/// Returns the time in which at least one of the spans lasts.
fn length_of_union(mut spans: Vec<Span>) -> Duration {
    spans.sort_unstable();
    let Some(&(mut until, _)) = spans.first() else { return Duration::ZERO };
    let mut length = Duration::ZERO;
    for (start, end) in spans {
        length += end.saturating_duration_since(start.max(until));
        until = until.max(end);
    }
    length
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns spans of these seconds.
    fn spans(seconds: &[(u64, u64)], origin: Instant) -> Vec<Span> {
        let at = |seconds| origin + Duration::from_secs(seconds);
        seconds.iter().map(|&(start, end)| (at(start), at(end))).collect()
    }

    #[test]
    fn spans_at_the_same_time_count_once() {
        let check = |seconds: &[(u64, u64)], expected| {
            let found = length_of_union(spans(seconds, Instant::now()));
            assert_eq!(found, Duration::from_secs(expected), "{seconds:?}");
        };
        check(&[], 0);
        check(&[(5, 7), (1, 3)], 4);
        check(&[(1, 4), (2, 3), (3, 6)], 5);
        check(&[(1, 2), (2, 4), (9, 9)], 3);
    }

    /// Checks the total, the exposed and the waited seconds.
    fn check(messages: &[(u64, u64)], waits: &[(u64, u64)], expected: [u64; 3]) {
        let origin = Instant::now();
        let [total, exposed, waited] = expected.map(Duration::from_secs);
        let found = ExchangeTime::of(spans(messages, origin), spans(waits, origin));
        assert_eq!(found, ExchangeTime { total, exposed, waited }, "{messages:?} {waits:?}");
    }

    #[test]
    fn a_wait_is_exposed_only_while_rows_are_under_way() {
        check(&[], &[], [0, 0, 0]);
        // The rank computes meanwhile.
        check(&[(2, 5)], &[], [3, 0, 0]);
        check(&[(2, 5)], &[(5, 6)], [4, 1, 0]);
        check(&[(2, 5)], &[(6, 7)], [3, 0, 1]);
        // The rows were sent before the rank waits, at the same time, and later.
        check(&[(2, 5)], &[(3, 5)], [3, 2, 0]);
        check(&[(2, 5)], &[(2, 5)], [3, 3, 0]);
        check(&[(2, 5)], &[(0, 5)], [3, 3, 2]);
        // The wait ends before they arrive, and the other half computes.
        check(&[(2, 5)], &[(0, 1), (1, 3)], [3, 1, 2]);
    }

    #[test]
    fn a_wait_is_exposed_until_the_rank_goes_on() {
        check(&[(2, 5)], &[(3, 7)], [5, 4, 0]);
        check(&[(2, 5)], &[(0, 7), (7, 9)], [5, 5, 4]);
        check(&[(2, 5)], &[(0, 5), (5, 9)], [3, 3, 6]);
    }

    #[test]
    fn a_wait_for_several_replicas_is_exposed_while_any_rows_are_under_way() {
        check(&[(6, 9), (1, 3), (2, 4)], &[(0, 3), (3, 4), (4, 9)], [6, 6, 3]);
        // The rows of both halves of an overlap; the rank computes from 3 to 5.
        check(&[(1, 6), (2, 4)], &[(0, 3), (5, 8)], [7, 5, 1]);
    }
}
