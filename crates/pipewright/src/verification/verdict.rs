//! [`judge`]: compares the computations of a step.

use std::collections::BTreeMap;

use super::checksum::{RankChecksums, ResultKey};
use super::difference::{Content, Difference};
use crate::ids::WorldRank;

/// Whether the last computation of a step counts.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Verdict {
    /// It does. If results differ, the first one is known.
    Counts(Option<Difference>),
    /// Some of its results are not confirmed by another computation.
    IsOpen(Difference),
}

/// A result in one computation.
#[derive(Clone, Copy, Debug)]
struct Computed {
    computation: usize,
    rank: WorldRank,
    sum: u64,
}

/// Compares the checksums of all ranks.
pub(crate) fn judge(ranks: &[RankChecksums]) -> Verdict {
    let mut results: BTreeMap<ResultKey, Vec<Computed>> = BTreeMap::new();
    for RankChecksums { rank, sums } in ranks {
        for (computation, result, sum) in sums.iter() {
            results.entry(result).or_default().push(Computed { computation, rank: *rank, sum });
        }
    }
    let last = results.values().flatten().map(|computed| computed.computation).max().unwrap_or(0);
    let mut differing =
        results.iter().filter(|(_, computed)| computed.iter().any(|one| one.sum != computed[0].sum));
    let Some((first, _)) = differing.next() else { return Verdict::Counts(None) };
    let group = results.iter().filter(|(result, _)| result.is_of_group(first));
    let difference = difference(first, group.map(|(_, computed)| &computed[..]));
    let counts = first.content != Content::Parameters
        && results.values().flat_map(|computed| computed.iter().map(move |one| (one, computed))).all(
            |(one, computed)| {
                one.computation < last || computed.len() == 1 || right_sum(computed) == Some(one.sum)
            },
        );
    if counts { Verdict::Counts(Some(difference)) } else { Verdict::IsOpen(difference) }
}

/// Returns whether another computation has the same bits: on another rank, if several ranks have computed the
/// result.
fn is_confirmed(one: &Computed, all: &[Computed]) -> bool {
    let is_on_one_rank = all.iter().all(|other| other.rank == one.rank);
    all.iter().any(|other| {
        let is_other =
            if is_on_one_rank { other.computation != one.computation } else { other.rank != one.rank };
        is_other && other.sum == one.sum
    })
}

/// Returns the only checksum that is confirmed; `None` if there are several or none.
fn right_sum(computed: &[Computed]) -> Option<u64> {
    let mut confirmed = computed.iter().filter(|one| is_confirmed(one, computed)).map(|one| one.sum);
    let first = confirmed.next()?;
    confirmed.all(|sum| sum == first).then_some(first)
}

/// Returns the ranks that have computed wrong bits of a result, or if they are not known, all ranks that have
/// computed it. `group` has the computations of each rank of a tensor group.
fn difference<'a>(result: &ResultKey, group: impl Iterator<Item = &'a [Computed]>) -> Difference {
    let ResultKey { content, stage, microbatch, .. } = *result;
    let (mut wrong, mut undecided) = (Vec::new(), Vec::new());
    for computed in group {
        let right = right_sum(computed);
        let is_wrong = |one: &&Computed| match right {
            Some(right) => one.sum != right,
            None => computed.iter().any(|other| other.rank == one.rank && other.sum != one.sum),
        };
        wrong.extend(computed.iter().filter(is_wrong).map(|one| one.rank));
        undecided.extend(computed.iter().map(|one| one.rank));
    }
    for ranks in [&mut wrong, &mut undecided] {
        ranks.sort_unstable();
        ranks.dedup();
    }
    if !wrong.is_empty() {
        undecided.clear();
    }
    Difference { content, stage, microbatch, wrong, undecided }
}

#[cfg(test)]
mod tests {
    use pipewright_schedule::{Microbatch, StageIndex};

    use super::super::checksum::Checksums;
    use super::*;

    /// A forward, backward, sum of weight gradients or the parameters of a stage, from a text such as `F2`.
    fn key(text: &str) -> ResultKey {
        let (content, stage) = text.split_at(1);
        let content = match content {
            "P" => Content::Parameters,
            "F" => Content::Forward,
            "B" => Content::Backward,
            _ => Content::Weights,
        };
        let stage = StageIndex::new(stage.parse().expect("a stage"));
        ResultKey {
            content,
            stage,
            earlier: 0,
            microbatch: Microbatch::new(0),
            slices: 1,
            exchange: None,
            share: 0,
            tensor: 0,
        }
    }

    /// Judges computations, each a list such as `5:F0=1 5:F1=2`: rank 5 has computed the forward of stage 0
    /// with the checksum 1. Returns whether the last one counts, what differs first, and the ranks.
    fn check(computations: &[&str], expected: &str) {
        let mut ranks: BTreeMap<u32, Checksums> = BTreeMap::new();
        for (number, computation) in (0..).zip(computations) {
            for entry in computation.split_whitespace() {
                let (rank, rest) = entry.split_once(':').expect("a rank");
                let (result, sum) = rest.split_once('=').expect("a checksum");
                let sums = ranks.entry(rank.parse().expect("a rank")).or_default();
                sums.begin(number, false);
                sums.note(key(result), sum.parse().expect("a number"));
            }
        }
        let ranks: Vec<_> = ranks
            .into_iter()
            .map(|(rank, sums)| RankChecksums { rank: WorldRank::new(rank), sums })
            .collect();
        let (start, difference) = match judge(&ranks) {
            Verdict::Counts(difference) => ("counts", difference),
            Verdict::IsOpen(difference) => ("is open", Some(difference)),
        };
        let ranks = |ranks: &[WorldRank]| ranks.iter().map(|rank| rank.get()).collect::<Vec<_>>();
        let found = difference.map_or(start.to_owned(), |found| {
            let Difference { content, stage, wrong, undecided, .. } = &found;
            format!("{start}: {content:?} {stage}, {:?} of {:?}", ranks(wrong), ranks(undecided))
        });
        assert_eq!(found, expected, "{computations:?}");
    }

    #[test]
    fn equal_bits_count_without_a_difference() {
        check(&["0:F0=1 1:F1=2 1:B1=3", "0:F0=1 1:F1=2 1:B1=3"], "counts");
        check(&["0:F0=1", "0:F0=1 1:F1=2"], "counts");
        check(&["0:F0=1 2:F1=2", "2:F0=1 0:F1=2"], "counts");
    }

    #[test]
    fn the_only_rank_of_a_result_is_wrong_if_its_bits_differ() {
        let [right, wrong] = ["0:F0=1 1:F1=2 0:B0=5", "0:F0=1 1:F1=9 0:B0=8"];
        check(&[wrong, right], "is open: Forward 1, [1] of []");
        check(&[wrong, right, right], "counts: Forward 1, [1] of []");
        check(&[right, wrong, right], "counts: Forward 1, [1] of []");
        check(&[right, wrong, "0:F0=1 1:F1=7 0:B0=4"], "is open: Forward 1, [1] of []");
    }

    #[test]
    fn of_two_ranks_the_one_with_two_results_is_wrong_and_not_the_first_one() {
        check(&["0:F0=9", "2:F0=1"], "is open: Forward 0, [] of [0, 2]");
        check(&["0:F0=9", "2:F0=1", "0:F0=1"], "counts: Forward 0, [0] of []");
        check(&["0:F0=1", "2:F0=9", "0:F0=1"], "is open: Forward 0, [] of [0, 2]");
        check(&["0:F0=1", "2:F0=9", "0:F0=1", "2:F0=1"], "counts: Forward 0, [2] of []");
        check(&["0:F0=9", "2:F0=1", "0:F0=9", "2:F0=1"], "is open: Forward 0, [] of [0, 2]");
        check(&["0:F0=9", "2:F0=1", "0:F0=8"], "is open: Forward 0, [0] of []");
    }

    #[test]
    fn of_three_ranks_two_agree() {
        check(&["0:F0=9", "2:F0=1", "4:F0=1"], "counts: Forward 0, [0] of []");
        check(&["0:F0=1", "2:F0=9", "4:F0=1"], "counts: Forward 0, [2] of []");
        check(&["0:F0=1", "2:F0=1", "4:F0=9"], "is open: Forward 0, [4] of []");
        check(&["0:F0=1", "2:F0=2", "4:F0=3"], "is open: Forward 0, [] of [0, 2, 4]");
        check(&["0:F0=1", "2:F0=2", "4:F0=1", "6:F0=2"], "is open: Forward 0, [] of [0, 2, 4, 6]");
    }

    #[test]
    fn the_first_result_is_the_one_that_others_are_computed_from() {
        check(&["0:B0=1 1:B1=2 0:W0=3", "0:B0=9 1:B1=8 0:W0=7"], "is open: Backward 1, [1] of []");
        check(&["0:F0=1 1:B1=2 0:W0=3", "0:F0=1 1:B1=2 0:W0=7"], "is open: Weights 0, [0] of []");
    }

    #[test]
    fn backwards_are_ordered_from_the_last_slice_of_a_microbatch_to_its_first() {
        let sorted = |result: &str| {
            let of = |number| ResultKey { microbatch: Microbatch::new(number), slices: 3, ..key(result) };
            let mut results: Vec<_> = (0..6).map(of).collect();
            results.sort_unstable();
            results.into_iter().map(|result| result.microbatch.get()).collect::<Vec<_>>()
        };
        assert_eq!(sorted("B0"), [2, 1, 0, 5, 4, 3]);
        assert_eq!(sorted("F0"), [0, 1, 2, 3, 4, 5]);
    }

    #[test]
    fn replicas_with_other_parameters_never_count() {
        let first = "0:F0=9";
        check(&[first, "0:P0=5 2:P0=6 2:F0=1"], "is open: Parameters 0, [] of [0, 2]");
        check(&[first, "0:P0=5 2:P0=6 4:P0=6 2:F0=9"], "is open: Parameters 0, [0] of []");
    }
}
