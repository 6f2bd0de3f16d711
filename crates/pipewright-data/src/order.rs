//! The order of rows in an epoch: a permutation that depends only on the seed, the number of the source and
//! the number of the epoch.
//!
//! The shuffle of Fisher and Yates (Knuth, The Art of Computer Programming, volume 2, algorithm P) over
//! ChaCha8. The shuffle is written out here, because a resumed run must find the same order with any version
//! of any library.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

/// Returns the rows `0..rows` of the source with this number in the order of that epoch.
pub(crate) fn permutation((seed, source): (u64, u64), epoch: u64, rows: u32) -> Vec<u32> {
    let mut key = [0; 32];
    key[..8].copy_from_slice(&seed.to_le_bytes());
    key[8..16].copy_from_slice(&epoch.to_le_bytes());
    // Distinguishes this stream from other streams of the same seed.
    key[16..24].copy_from_slice(b"data row");
    key[24..].copy_from_slice(&source.to_le_bytes());
    let mut random = ChaCha8Rng::from_seed(key);
    let mut order: Vec<u32> = (0..rows).collect();
    for last in (1..rows).rev() {
        order.swap(last as usize, below(&mut random, last + 1) as usize);
    }
    order
}

/// Returns a number below `bound`, each equally likely. Draws of the incomplete last round of `bound` numbers
/// are discarded.
fn below(random: &mut impl Rng, bound: u32) -> u32 {
    let round = u32::MAX - u32::MAX % bound;
    loop {
        let draw = random.next_u32();
        if draw < round {
            return draw % bound;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_order_is_pinned() {
        // A change here would give resumed runs another order.
        assert_eq!(permutation((42, 0), 0, 8), [1, 0, 6, 7, 2, 3, 5, 4]);
    }

    #[test]
    fn every_order_is_equally_likely() {
        let mut counts = std::collections::BTreeMap::new();
        for epoch in 0..6000 {
            *counts.entry(permutation((5, 0), epoch, 3)).or_insert(0) += 1;
        }
        // 1,000 are expected of each of the six; five standard deviations are 144.
        assert_eq!(counts.len(), 6);
        assert!(counts.values().all(|count| (856..1144).contains(count)), "{counts:?}");
    }
}
