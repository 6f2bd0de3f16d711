//! The random numbers of the search, which are the same in each run.

/// A generator of pseudo-random numbers: SplitMix64 of Steele, Lea and Flood, 2014.
#[derive(Debug, Clone)]
pub(super) struct Numbers(pub(super) u64);

impl Numbers {
    /// Returns a number below `bound`.
    pub(super) fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ (mixed >> 31)) % bound as u64) as usize
    }
}
