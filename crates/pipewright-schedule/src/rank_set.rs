//! Visits to ranks in rounds, each in ascending order of the ranks.
//!
//! A round's visits are a bit for each rank: adding one is setting a bit, and idle ranks cost a bit each. A
//! visit may be added to the current round for ranks behind the one that is visited, and to later rounds for
//! any.

use crate::ids::Rank;

/// A set of ranks that is emptied in ascending order.
#[derive(Debug, Clone)]
pub(crate) struct RankSet {
    words: Vec<u64>,
}

impl RankSet {
    /// No rank, of so many.
    pub(crate) fn none(ranks: usize) -> Self {
        Self { words: vec![0; ranks.div_ceil(64)] }
    }

    /// All ranks.
    pub(crate) fn all(ranks: usize) -> Self {
        let mut set = Self::none(ranks);
        (0..ranks as u32).for_each(|rank| set.insert(Rank::new(rank)));
        set
    }

    pub(crate) fn insert(&mut self, rank: Rank) {
        self.words[rank.index() / 64] |= 1 << (rank.index() % 64);
    }

    /// Takes the lowest rank out that is not below the word `from`, and moves `from` to its word. Ranks behind
    /// the taken one may be added meanwhile.
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
