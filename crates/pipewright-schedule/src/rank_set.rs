//! A set of ranks that is emptied in ascending order, for algorithms that visit ranks in rounds.
//!
//! The set has a bit for each rank. During a round, ranks above the visited one may be added to the set of
//! the current round, and any rank to the set of the next round.

use crate::ids::Rank;

/// A set of ranks that is emptied in ascending order.
#[derive(Debug, Clone)]
pub(crate) struct RankSet {
    words: Vec<u64>,
}

impl RankSet {
    /// Makes the empty set for so many ranks.
    pub(crate) fn none(ranks: usize) -> Self {
        Self { words: vec![0; ranks.div_ceil(64)] }
    }

    /// Makes the set of all ranks.
    pub(crate) fn all(ranks: usize) -> Self {
        let mut set = Self::none(ranks);
        (0..ranks as u32).for_each(|rank| set.insert(Rank::new(rank)));
        set
    }

    pub(crate) fn insert(&mut self, rank: Rank) {
        self.words[rank.index() / 64] |= 1 << (rank.index() % 64);
    }

    /// Removes and returns the lowest rank that is not below the word `from`, and moves `from` to its word.
    /// Ranks above the removed one may be added between calls.
    pub(crate) fn take_next(&mut self, from: &mut usize) -> Option<Rank> {
        while let Some(word) = self.words.get_mut(*from) {
            if *word != 0 {
                let bit = word.trailing_zeros();
                *word &= *word - 1;
                return Some(Rank::new(*from as u32 * 64 + bit));
            }
            *from += 1;
        }
        None
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.words.iter().all(|&word| word == 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_come_in_order_even_those_added_on_the_way() {
        let mut set = RankSet::none(200);
        for rank in [130, 3, 64] {
            set.insert(Rank::new(rank));
        }
        let (mut from, mut taken) = (0, Vec::new());
        while let Some(rank) = set.take_next(&mut from) {
            taken.push(rank.get());
            if rank.get() == 64 {
                set.insert(Rank::new(65));
                set.insert(Rank::new(199));
            }
        }
        assert_eq!(taken, [3, 64, 65, 130, 199]);
        assert!(set.is_empty());
    }

    #[test]
    fn all_are_all() {
        let (mut set, mut from) = (RankSet::all(65), 0);
        let taken = std::iter::from_fn(|| set.take_next(&mut from)).count();
        assert_eq!(taken, 65);
    }
}
