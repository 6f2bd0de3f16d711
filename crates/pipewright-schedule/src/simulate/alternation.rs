//! Two sequences of work that a rank runs together: the halves of an overlap whose stages exchange tokens.
//!
//! A half alternates between computations and exchanges ([`Exchanges`]). Computations take one resource of
//! the rank, and exchanges the other; each resource takes one piece at a time, and a piece that has begun is
//! not interrupted. The next piece of a half begins as soon as the piece before it has ended, its tensors
//! have arrived and its resource is free. So one half computes while the other one exchanges. If both could
//! begin at the same time, the first half does, and the second half never begins before the first one.
//! Without exchanges, the halves therefore run one after the other.

use crate::costs::Exchanges;

/// An action of a half.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Work {
    /// The time at which its last tensor arrives.
    pub(crate) arrival: f64,
    /// The seconds of computation, without the exchanges.
    pub(crate) compute: f64,
    pub(crate) exchanges: Exchanges,
}

/// A computation or an exchange, in the order in which they begin.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Piece {
    /// 0 or 1.
    pub(crate) half: usize,
    /// The index of the action in its half.
    pub(crate) work: usize,
    /// The position in the action; exchanges have odd positions.
    pub(crate) position: u32,
    pub(crate) start: f64,
    pub(crate) end: f64,
    /// How long the rank has not computed before this computation; 0 for an exchange.
    pub(crate) idle: f64,
}

impl Work {
    /// Returns the number of computations and exchanges.
    fn pieces(&self) -> u32 {
        2 * self.exchanges.count + 1
    }

    /// Returns the time of the piece at a position.
    pub(crate) fn seconds(&self, position: u32) -> f64 {
        let count = f64::from(self.exchanges.count);
        if is_exchange(position) { self.exchanges.seconds / count } else { self.compute / (count + 1.0) }
    }

    /// Returns the time of all pieces, one after the other.
    pub(crate) fn total(&self) -> f64 {
        self.compute + self.exchanges.total()
    }
}

/// Returns whether the piece at a position is an exchange.
pub(crate) fn is_exchange(position: u32) -> bool {
    position % 2 == 1
}

/// The next piece of a half.
#[derive(Clone, Copy)]
struct Next {
    work: usize,
    position: u32,
    /// The end of the piece before it.
    ready: f64,
}

/// Runs two halves from `now` on, and calls `note` with each piece. Returns the end of the last one.
pub(crate) fn alternate(now: f64, halves: [&[Work]; 2], mut note: impl FnMut(Piece)) -> f64 {
    let mut next = [Next { work: 0, position: 0, ready: now }; 2];
    // The times from which the rank is free to compute, and to exchange.
    let mut free = [now; 2];
    // The second half does not begin before the first one.
    if let Some(first) = halves[0].first() {
        next[1].ready = now.max(first.arrival);
    }
    loop {
        let start_of = |half: usize| {
            let Next { work, position, ready } = next[half];
            let arrival = halves[half].get(work)?.arrival;
            let ready = if position == 0 { ready.max(arrival) } else { ready };
            Some(ready.max(free[usize::from(is_exchange(position))]))
        };
        let (half, start) = match (start_of(0), start_of(1)) {
            (Some(first), Some(second)) if second < first => (1, second),
            (Some(first), _) => (0, first),
            (None, Some(second)) => (1, second),
            (None, None) => return free[0],
        };
        let Next { work, position, .. } = next[half];
        let of = &halves[half][work];
        let resource = usize::from(is_exchange(position));
        let idle = if resource == 0 { start - free[0] } else { 0.0 };
        let end = start + of.seconds(position);
        free[resource] = end;
        note(Piece { half, work, position, start, end, idle });
        let is_last = position + 1 == of.pieces();
        next[half] = if is_last {
            Next { work: work + 1, position: 0, ready: end }
        } else {
            Next { work, position: position + 1, ready: end }
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn work(arrival: f64, compute: f64, count: u32, seconds: f64) -> Work {
        Work { arrival, compute, exchanges: Exchanges { count, seconds } }
    }

    /// Returns the pieces as `HALF:POSITION@START-END`, with each half's end, and the idle time.
    fn run(now: f64, halves: [&[Work]; 2]) -> (String, [f64; 2], f64) {
        let (mut pieces, mut ends, mut idle) = (Vec::new(), [now; 2], 0.0);
        let end = alternate(now, halves, |piece| {
            pieces.push(format!("{}:{}@{}-{}", piece.half, piece.position, piece.start, piece.end));
            ends[piece.half] = piece.end;
            idle += piece.idle;
        });
        assert_eq!(end, ends[0].max(ends[1]));
        (pieces.join(" "), ends, idle)
    }

    #[test]
    fn one_half_computes_while_the_other_exchanges() {
        let halves = [&[work(0.0, 4.0, 1, 2.0)][..], &[work(0.0, 4.0, 1, 2.0)]];
        let expected = "0:0@1-3 0:1@3-5 1:0@3-5 0:2@5-7 1:1@5-7 1:2@7-9";
        assert_eq!(run(1.0, halves), (expected.to_owned(), [7.0, 9.0], 0.0));
    }

    #[test]
    fn exchanges_of_both_halves_follow_each_other() {
        let halves = [&[work(0.0, 2.0, 1, 5.0)][..], &[work(0.0, 2.0, 1, 5.0)]];
        let expected = "0:0@0-1 0:1@1-6 1:0@1-2 0:2@6-7 1:1@6-11 1:2@11-12";
        // The rank is idle from 2 to 6 and from 7 to 11.
        assert_eq!(run(0.0, halves), (expected.to_owned(), [7.0, 12.0], 8.0));
    }

    #[test]
    fn a_half_without_exchanges_fills_one_wait() {
        let halves = [&[work(0.0, 3.0, 2, 4.0)][..], &[work(0.0, 9.0, 0, 0.0)]];
        assert_eq!(
            run(0.0, halves),
            ("0:0@0-1 0:1@1-3 1:0@1-10 0:2@10-11 0:3@11-13 0:4@13-14".into(), [14.0, 10.0], 2.0)
        );
    }

    #[test]
    fn the_second_half_does_not_begin_before_the_first_one() {
        let halves = [&[work(5.0, 1.0, 0, 0.0)][..], &[work(2.0, 1.0, 0, 0.0)]];
        assert_eq!(run(0.0, halves).1, [6.0, 7.0]);
        let late = [&[work(0.0, 1.0, 0, 0.0)][..], &[work(0.0, 1.0, 0, 0.0), work(9.0, 2.0, 0, 0.0)]];
        assert_eq!(run(0.0, late).1, [1.0, 11.0]);
    }

    /// Runs both halves in steps of one unit of time, without looking ahead: the checker. All times are
    /// whole.
    fn in_unit_steps(now: u32, halves: [&[Work]; 2]) -> [f64; 2] {
        // The pieces of each half: whether it is an exchange, the earliest start, and the units that are
        // left.
        let mut left: [Vec<(bool, u32, u32)>; 2] = halves.map(|works| {
            let pieces = works.iter().flat_map(|work| {
                (0..work.pieces()).map(move |at| {
                    let arrival = if at == 0 { work.arrival as u32 } else { 0 };
                    (is_exchange(at), arrival, work.seconds(at) as u32)
                })
            });
            pieces.collect()
        });
        left[1][0].1 = left[1][0].1.max(halves[0][0].arrival as u32);
        let (mut ends, mut holders) = ([f64::from(now); 2], [None, None]);
        let mut time = now;
        while !(left[0].is_empty() && left[1].is_empty()) {
            assert!(time < 100_000, "an endless run");
            // Pieces of no time end at once, so more than one may begin in a unit.
            loop {
                let mut changed = false;
                for half in [0, 1] {
                    let Some(&(is_exchange, earliest, units)) = left[half].first() else { continue };
                    let resource = usize::from(is_exchange);
                    if holders[resource].is_some() || holders.contains(&Some(half)) || time < earliest {
                        continue;
                    }
                    changed = true;
                    if units == 0 {
                        left[half].remove(0);
                        ends[half] = f64::from(time);
                    } else {
                        holders[resource] = Some(half);
                    }
                    // The first half is asked first again.
                    break;
                }
                if !changed {
                    break;
                }
            }
            time += 1;
            for holder in &mut holders {
                let Some(half) = *holder else { continue };
                left[half][0].2 -= 1;
                if left[half][0].2 == 0 {
                    left[half].remove(0);
                    ends[half] = f64::from(time);
                    *holder = None;
                }
            }
        }
        ends
    }

    fn any_work() -> impl Strategy<Value = Work> {
        // Whole times of all pieces.
        (0..30u32, 0..6u32, 0..4u32, 0..6u32).prop_map(|(arrival, compute, count, exchange)| {
            let (compute, exchange) = (compute * (count + 1), exchange * count);
            work(arrival.into(), compute.into(), count, exchange.into())
        })
    }

    proptest! {
        #[test]
        fn halves_end_as_in_unit_steps(
            first in any_work(),
            second in prop::collection::vec(any_work(), 1..3),
            now in 0..20u32,
        ) {
            let halves = [&[first][..], &second];
            prop_assert_eq!(run(now.into(), halves).1, in_unit_steps(now, halves));
        }

        #[test]
        fn an_overlap_takes_no_longer_than_its_halves(first in any_work(), second in any_work()) {
            let halves = [&[Work { arrival: 0.0, ..first }][..], &[Work { arrival: 0.0, ..second }]];
            let end = alternate(0.0, halves, |_| {});
            let compute = first.compute + second.compute;
            let exchange = first.exchanges.total() + second.exchanges.total();
            prop_assert!(end >= compute.max(exchange).max(first.total()).max(second.total()));
            prop_assert!(end <= compute + exchange);
        }

        #[test]
        fn without_exchanges_the_halves_follow_each_other(
            arrivals: [u8; 2],
            seconds in prop::array::uniform2(0..50u32),
            now in 0..100u32,
        ) {
            let of = |half: usize| work(arrivals[half].into(), seconds[half].into(), 0, 0.0);
            let first = f64::from(now).max(arrivals[0].into()) + f64::from(seconds[0]);
            let second = first.max(arrivals[1].into()) + f64::from(seconds[1]);
            // If the gradient of the second half arrives first, that half waits for the first one all the
            // same.
            prop_assert_eq!(run(now.into(), [&[of(0)], &[of(1)]]).1, [first, second]);
        }
    }
}
