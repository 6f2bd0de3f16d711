//! The source of each row of a mixture.
//!
//! Rows are drawn by the algorithm in R. Tijdeman, *The chairman assignment problem*, Discrete Mathematics 32
//! (1980), pages 323 to 330. After any number of rows, the rows that each of `k` sources has given differ
//! from its share by at most `1 - 1 / (2 k - 2)`. The difference of random draws grows with the
//! square root of their number. If the source that is furthest behind always gives the row, the difference
//! can be above one row.
//!
//! For row `n`, a source may be drawn if its share of `n` rows is at least `1 / (2 k - 2)` above the number
//! of rows that it has given. Without being drawn, each of these sources leaves the range of the theorem some
//! rows later. The source that leaves it first gives the row.
//!
//! Shares are whole numbers, so the order is the same on every machine, and repeats after as many rows as
//! their sum.

use pipewright_schedule::divisor::greatest_common_divisor;

use crate::settings::mix::MixWeight;

/// The sum of the shares of weights, before these are rounded. [`Interleave::seek`] draws up to as many rows.
const RESOLUTION: f64 = (1u64 << 20) as f64;

/// The state of the draws from a mixture.
#[derive(Clone, Debug)]
pub(crate) struct Interleave {
    sources: Vec<Drawn>,
    /// The sum of all shares.
    total: i128,
}

/// The draws from a source.
#[derive(Clone, Debug)]
struct Drawn {
    share: u64,
    /// The number of rows that it has given.
    given: u64,
    /// The share of all rows that it has not given yet, times the sum of all shares; below 0 if it has given
    /// more than its share.
    owed: i128,
}

impl Interleave {
    /// Draws by weight. The share of a source is rounded to a multiple of 2^-20, and is at least that.
    pub(crate) fn by_weight(weights: &[MixWeight]) -> Self {
        let weights: Vec<f64> = weights.iter().copied().map(f64::from).collect();
        // The sum of large weights could be infinite.
        let largest = weights.iter().copied().fold(0.0, f64::max);
        let sum: f64 = weights.iter().map(|weight| weight / largest).sum();
        let share = |weight: &f64| (weight / largest / sum * RESOLUTION).round().max(1.0) as u64;
        Self::by_share(weights.iter().map(share))
    }

    /// Draws by number of rows, so that the first as many rows as there are have each row of each source
    /// once.
    pub(crate) fn by_share(shares: impl IntoIterator<Item = u64>) -> Self {
        let shares: Vec<u64> = shares.into_iter().collect();
        // A common divisor does not change the order, and the order repeats earlier without it.
        let divisor = shares.iter().copied().fold(0, greatest_common_divisor).max(1);
        let drawn = |share: &u64| Drawn { share: share / divisor, given: 0, owed: 0 };
        let sources: Vec<Drawn> = shares.iter().map(drawn).collect();
        let total = sources.iter().map(|source| i128::from(source.share)).sum();
        Self { sources, total }
    }

    /// Returns the share of each source, a whole number ([`Interleave::by_share`]).
    pub(crate) fn shares(&self) -> impl Iterator<Item = u64> {
        self.sources.iter().map(|source| source.share)
    }

    /// Returns the number of rows that each source has given.
    pub(crate) fn given(&self) -> impl ExactSizeIterator<Item = u64> {
        self.sources.iter().map(|source| source.given)
    }

    /// Returns the part of each source in all rows.
    pub(crate) fn parts(&self) -> impl Iterator<Item = f64> {
        self.sources.iter().map(|source| source.share as f64 / self.total.max(1) as f64)
    }

    /// Returns the source of the next row. There is at least one row.
    pub(crate) fn next_source(&self) -> usize {
        let [_, _, ..] = self.sources.as_slice() else { return 0 };
        let bound = 2 * self.sources.len() as i128 - 2;
        let due = |source: &Drawn| bound * (source.owed + i128::from(source.share));
        let may_give = |(_, source): &(usize, &Drawn)| due(source) >= self.total;
        // The rows until a source leaves the range are its distance to the end of the range over its share.
        // The fractions are compared by their products.
        let distance = |source: &Drawn| (bound - 1) * self.total - due(source);
        let earlier = |first: &Drawn, second: &Drawn| {
            (distance(first) * i128::from(second.share)).cmp(&(distance(second) * i128::from(first.share)))
        };
        let candidates = self.sources.iter().enumerate().filter(may_give);
        // What is due adds up to `bound` times the total, and `bound` is at least the number of sources: not
        // all of them can be below the total.
        candidates.min_by(|(_, first), (_, second)| earlier(first, second)).map_or(0, |(index, _)| index)
    }

    /// Draws the next row. Returns its source, and the number of rows that the source has given before.
    pub(crate) fn draw(&mut self) -> (usize, u64) {
        let index = self.next_source();
        for source in &mut self.sources {
            source.owed += i128::from(source.share);
        }
        let source = &mut self.sources[index];
        source.owed -= self.total;
        source.given += 1;
        (index, source.given - 1)
    }

    /// Draws as if `rows` rows had been drawn from the beginning. Takes as long as to draw them, or one
    /// repetition of the order.
    pub(crate) fn seek(&mut self, rows: u64) {
        let total = u64::try_from(self.total.max(1)).unwrap_or(u64::MAX);
        let (repetitions, rest) = (rows / total, rows % total);
        for source in &mut self.sources {
            (source.given, source.owed) = (repetitions * source.share, 0);
        }
        if let [only] = self.sources.as_mut_slice() {
            only.given = rows;
            return;
        }
        for _ in 0..rest {
            self.draw();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn by_weight(weights: &[f64]) -> Interleave {
        let weight = |weight: &f64| MixWeight::try_from(*weight).expect("a weight");
        Interleave::by_weight(&weights.iter().map(weight).collect::<Vec<_>>())
    }

    fn order(draws: &mut Interleave, rows: usize) -> Vec<usize> {
        (0..rows).map(|_| draws.draw().0).collect()
    }

    /// Checks every beginning of the order against the bound of the theorem, that a source's rows are
    /// counted, and that the shares are those of the weights but for a multiple of the resolution per source.
    fn check(weights: &[f64], rows: u64) {
        let sum: f64 = weights.iter().sum();
        let bound = 1.0 - 1.0 / (2.0 * weights.len() as f64 - 2.0);
        let (mut draws, mut given) = (by_weight(weights), vec![0u64; weights.len()]);
        let parts: Vec<f64> = draws.parts().collect();
        for (weight, part) in weights.iter().zip(&parts) {
            let error = (weight / sum - part).abs();
            assert!(
                error <= weights.len() as f64 / RESOLUTION,
                "{weights:?}: {part} is {error} away from its share"
            );
        }
        for row in 1..=rows {
            let (source, before) = draws.draw();
            assert_eq!(before, given[source]);
            given[source] += 1;
            for (part, given) in parts.iter().zip(&given) {
                let difference = (part * row as f64 - *given as f64).abs();
                assert!(difference <= bound + 1e-9, "{weights:?}: {difference} after {row} rows");
            }
        }
        assert!(draws.given().eq(given));
    }

    #[test]
    fn no_source_is_a_row_away_from_its_share() {
        check(&[0.7, 0.3], 5000);
        check(&[1.0, 1.0, 1.0], 5000);
        check(&[0.5, 0.25, 0.125, 0.0625, 0.0625], 5000);
        check(&[1e-9, 1.0, 1e9], 2000);
        check(&[f64::MAX / 4.0, f64::MAX / 4.0], 100);
        // Weights without a pattern, from a generator with these constants (Knuth, MMIX).
        let mut state = 7u64;
        let mut number = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f64 + 1.0
        };
        for sources in 2..12 {
            check(&(0..sources).map(|_| number()).collect::<Vec<_>>(), 1000);
            check(&(0..sources).map(|_| number().powi(4)).collect::<Vec<_>>(), 1000);
        }
    }

    #[test]
    fn the_order_is_pinned() {
        // A change here would give resumed runs another order.
        assert_eq!(order(&mut by_weight(&[3.0, 1.0]), 8), [0, 0, 1, 0, 0, 0, 1, 0]);
        assert_eq!(order(&mut by_weight(&[0.5, 0.3, 0.2]), 10), [0, 1, 0, 2, 0, 1, 0, 2, 1, 0]);
        assert_eq!(order(&mut by_weight(&[2.0]), 3), [0, 0, 0]);
    }

    #[test]
    fn draws_continue_from_any_row() {
        let shares = || Interleave::by_share([5, 0, 3, 9]);
        for mut draws in [by_weight(&[0.7, 0.2, 0.1]), by_weight(&[1.0]), shares()] {
            let beginning = draws.clone();
            for row in 0..100 {
                let mut resumed = beginning.clone();
                resumed.seek(row);
                assert!(resumed.given().eq(draws.given()), "row {row}");
                assert_eq!(order(&mut resumed, 40), order(&mut draws.clone(), 40), "row {row}");
                draws.draw();
            }
        }
        let mut far = shares();
        far.seek(17 * (1 << 50) + 2);
        assert_eq!(far.given().sum::<u64>(), 17 * (1 << 50) + 2);
    }

    /// A resume draws the rows of the unfinished repetition one by one.
    #[test]
    fn the_order_repeats_early() {
        let repeats_after = |draws: Interleave| draws.total;
        assert_eq!(repeats_after(by_weight(&[1.0, 1.0, 2.0])), 4);
        assert_eq!(repeats_after(by_weight(&[0.125, 0.75, 0.125])), 8);
        assert_eq!(repeats_after(by_weight(&[2.0])), 1);
        assert_eq!(repeats_after(Interleave::by_share([6, 0, 9])), 5);
        assert_eq!(repeats_after(Interleave::by_share([0, 0])), 0);
        let rounded = repeats_after(by_weight(&[0.7, 0.2, 0.1]));
        assert!(((1 << 20) - 3..=(1 << 20) + 3).contains(&rounded), "{rounded}");
        assert_eq!(
            order(&mut Interleave::by_share([600, 0, 900]), 50),
            order(&mut Interleave::by_share([2, 0, 3]), 50)
        );
    }
}
