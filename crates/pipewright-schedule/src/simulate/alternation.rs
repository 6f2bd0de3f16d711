//! An overlap of a forward and a backward in a program whose stages exchange tokens. Here are the rules of its
//! time, which the timed simulation and the search for plans share. The executor of `pipewright` runs such an
//! overlap by the same rules.
//!
//! 1. Both halves begin when the tensors of both have arrived.
//! 2. A half alternates between computations and exchanges ([`Exchanges`]). Computations take one resource of
//!    the rank, and exchanges the other. Each resource takes one piece at a time, and a piece that has begun is
//!    not interrupted. The next piece of a half begins as soon as the piece before it has ended and its
//!    resource is free. So one half computes while the other one exchanges. If both could begin at the same
//!    time, the first half does.
//! 3. If the backward computes its forward again, it does so in its half. In a run, a rank does it before both
//!    halves, while it waits for tensors, if the halves are of one stage or neither stage exchanges tokens.
//! 4. If both halves are of one stage, they run one after the other, because a stage computes one thing at a
//!    time.
//! 5. The outputs of both halves leave when both have ended.
//!
//! One exchange at a time is an assumption about the bandwidth: exchanges of both halves share a link. A run
//! has no such queue. It sends the rows of a half at once, also while those of the other half are on their way.

use crate::costs::Exchanges;

/// An action of a half.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Work {
    /// The seconds of computation, without the exchanges.
    pub(crate) compute: f64,
    pub(crate) exchanges: Exchanges,
}

/// The halves of an overlap, the forward first.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Halves<'a> {
    /// The actions of each half.
    pub(crate) works: [&'a [Work]; 2],
    /// Whether both are of one stage.
    pub(crate) are_of_one_stage: bool,
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
    pub(crate) fn pieces(&self) -> u32 {
        2 * self.exchanges.count() + 1
    }

    /// Returns the time of the piece at a position.
    pub(crate) fn seconds(&self, position: u32) -> f64 {
        let count = f64::from(self.exchanges.count());
        if is_exchange(position) { self.exchanges.seconds() / count } else { self.compute / (count + 1.0) }
    }

    /// Returns the time of all pieces, one after the other.
    pub(crate) fn total(&self) -> f64 {
        self.compute + self.exchanges.seconds()
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

/// Runs two halves whose tensors have arrived at `start`, and calls `note` with each piece. Returns the end of
/// the last one.
pub(crate) fn alternate(start: f64, halves: Halves<'_>, mut note: impl FnMut(Piece)) -> f64 {
    let Halves { works, are_of_one_stage } = halves;
    let mut next = [Next { work: 0, position: 0, ready: start }; 2];
    // The times from which the rank is free to compute, and to exchange.
    let mut free = [start; 2];
    loop {
        let start_of = |half: usize| {
            let Next { work, position, ready } = next[half];
            (work < works[half].len()).then(|| ready.max(free[usize::from(is_exchange(position))]))
        };
        let (half, start) = match (start_of(0), start_of(1)) {
            (Some(first), Some(second)) if second < first && !are_of_one_stage => (1, second),
            (Some(first), _) => (0, first),
            (None, Some(second)) => (1, second),
            (None, None) => return free[0],
        };
        let Next { work, position, .. } = next[half];
        let current = &works[half][work];
        let resource = usize::from(is_exchange(position));
        let idle = if resource == 0 { start - free[0] } else { 0.0 };
        let end = start + current.seconds(position);
        free[resource] = end;
        note(Piece { half, work, position, start, end, idle });
        let is_last = position + 1 == current.pieces();
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

    fn work(compute: f64, count: u32, seconds: f64) -> Work {
        Work { compute, exchanges: Exchanges::new(count, seconds) }
    }

    /// Returns the pieces as `HALF:POSITION@START-END`, with each half's end, and the idle time.
    fn run(start: f64, halves: Halves<'_>) -> (String, [f64; 2], f64) {
        let (mut pieces, mut ends, mut idle) = (Vec::new(), [start; 2], 0.0);
        let end = alternate(start, halves, |piece| {
            pieces.push(format!("{}:{}@{}-{}", piece.half, piece.position, piece.start, piece.end));
            ends[piece.half] = piece.end;
            idle += piece.idle;
        });
        assert_eq!(end, ends[0].max(ends[1]));
        (pieces.join(" "), ends, idle)
    }

    /// Checks the pieces, the ends and the idle time of two actions of different stages.
    fn check(start: f64, [first, second]: [Work; 2], pieces: &str, ends: [f64; 2], idle: f64) {
        let halves = Halves { works: [&[first], &[second]], are_of_one_stage: false };
        assert_eq!(run(start, halves), (pieces.to_owned(), ends, idle));
    }

    #[test]
    fn one_half_computes_while_the_other_exchanges() {
        let pieces = "0:0@1-3 0:1@3-5 1:0@3-5 0:2@5-7 1:1@5-7 1:2@7-9";
        check(1.0, [work(4.0, 1, 2.0); 2], pieces, [7.0, 9.0], 0.0);
    }

    #[test]
    fn exchanges_of_both_halves_follow_each_other() {
        let pieces = "0:0@0-1 0:1@1-6 1:0@1-2 0:2@6-7 1:1@6-11 1:2@11-12";
        // The rank is idle from 2 to 6 and from 7 to 11.
        check(0.0, [work(2.0, 1, 5.0); 2], pieces, [7.0, 12.0], 8.0);
    }

    #[test]
    fn a_half_without_exchanges_fills_one_wait() {
        let pieces = "0:0@0-1 0:1@1-3 1:0@1-10 0:2@10-11 0:3@11-13 0:4@13-14";
        check(0.0, [work(3.0, 2, 4.0), work(9.0, 0, 0.0)], pieces, [14.0, 10.0], 2.0);
    }

    #[test]
    fn halves_of_one_stage_follow_each_other() {
        let works = [&[work(4.0, 1, 2.0)][..], &[work(4.0, 1, 2.0)]];
        let (pieces, ends, idle) = run(1.0, Halves { works, are_of_one_stage: true });
        assert_eq!(pieces, "0:0@1-3 0:1@3-5 0:2@5-7 1:0@7-9 1:1@9-11 1:2@11-13");
        assert_eq!((ends, idle), ([7.0, 13.0], 4.0));
    }

    /// Runs both halves in steps of one unit of time, without looking ahead: the checker. All times are
    /// whole.
    fn in_unit_steps(start: u32, Halves { works, are_of_one_stage }: Halves<'_>) -> [f64; 2] {
        // The pieces of each half: whether it is an exchange, and the units that are left.
        let mut left: [Vec<(bool, u32)>; 2] = works.map(|works| {
            let pieces = works.iter().flat_map(|work| {
                (0..work.pieces()).map(|position| (is_exchange(position), work.seconds(position) as u32))
            });
            pieces.collect()
        });
        let (mut ends, mut holders) = ([f64::from(start); 2], [None, None]);
        let mut time = start;
        while !(left[0].is_empty() && left[1].is_empty()) {
            assert!(time < 100_000, "an endless run");
            // Pieces of no time end at once, so more than one may begin in a unit.
            loop {
                let mut changed = false;
                for half in [0, 1] {
                    let Some(&(is_exchange, units)) = left[half].first() else { continue };
                    let resource = usize::from(is_exchange);
                    let is_later = half == 1 && are_of_one_stage && !left[0].is_empty();
                    if holders[resource].is_some() || holders.contains(&Some(half)) || is_later {
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
                left[half][0].1 -= 1;
                if left[half][0].1 == 0 {
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
        (0..6u32, 0..4u32, 0..6u32).prop_map(|(compute, count, exchange)| {
            let (compute, exchange) = (compute * (count + 1), exchange * count);
            work(compute.into(), count, exchange.into())
        })
    }

    proptest! {
        #[test]
        fn halves_end_as_in_unit_steps(
            first in prop::collection::vec(any_work(), 1..3),
            second in prop::collection::vec(any_work(), 1..3),
            are_of_one_stage: bool,
            start in 0..20u32,
        ) {
            let halves = Halves { works: [&first, &second], are_of_one_stage };
            prop_assert_eq!(run(start.into(), halves).1, in_unit_steps(start, halves));
        }

        #[test]
        fn an_overlap_takes_no_longer_than_its_halves(first in any_work(), second in any_work()) {
            let halves = Halves { works: [&[first], &[second]], are_of_one_stage: false };
            let end = alternate(0.0, halves, |_| {});
            let compute = first.compute + second.compute;
            let exchange = first.exchanges.seconds() + second.exchanges.seconds();
            prop_assert!(end >= compute.max(exchange).max(first.total()).max(second.total()));
            prop_assert!(end <= compute + exchange);
        }

        #[test]
        fn without_exchanges_the_halves_follow_each_other(
            seconds in prop::array::uniform2(0..50u32),
            are_of_one_stage: bool,
            start in 0..100u32,
        ) {
            let [first, second] = seconds.map(|seconds| [work(seconds.into(), 0, 0.0)]);
            let halves = Halves { works: [&first, &second], are_of_one_stage };
            let end = f64::from(start + seconds[0]);
            prop_assert_eq!(run(start.into(), halves).1, [end, end + f64::from(seconds[1])]);
        }
    }
}
