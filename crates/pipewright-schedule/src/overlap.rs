//! A forward and a backward that run together, packed so that every [`crate::Action`] stays as small as one that
//! names a single stage.
//!
//! An overlap names two stages and two microbatches. As four numbers they would make each of a large program's
//! hundred million actions two thirds larger, for the sake of the few that overlap. So each has 22 bits.

use std::fmt;

use crate::ids::{Microbatch, StageIndex};

/// The largest stage and microbatch of an overlap.
pub const MAX_OVERLAPPED: u32 = (1 << 22) - 1;

/// The stage and microbatch that run forward, and those that run backward: `(0F7;7B3)OVERLAP_F_B`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Overlap([u8; 11]);

impl Overlap {
    /// Joins a forward and a backward; `None` where a number is above [`MAX_OVERLAPPED`].
    pub fn new(forward: (StageIndex, Microbatch), backward: (StageIndex, Microbatch)) -> Option<Self> {
        let numbers = [forward.0.get(), forward.1.get(), backward.0.get(), backward.1.get()];
        if numbers.iter().any(|&number| number > MAX_OVERLAPPED) {
            return None;
        }
        let bits = numbers.iter().fold(0, |bits, &number| bits << 22 | u128::from(number));
        let mut bytes = [0; 11];
        bytes.copy_from_slice(&bits.to_be_bytes()[5..]);
        Some(Self(bytes))
    }

    /// The stage and microbatch that run forward.
    pub fn forward(self) -> (StageIndex, Microbatch) {
        (StageIndex::new(self.number(3)), Microbatch::new(self.number(2)))
    }

    /// The stage and microbatch that run backward.
    pub fn backward(self) -> (StageIndex, Microbatch) {
        (StageIndex::new(self.number(1)), Microbatch::new(self.number(0)))
    }

    /// The number that `behind` others follow.
    fn number(self, behind: u32) -> u32 {
        let bits = self.0.iter().fold(0, |bits, &byte| bits << 8 | u128::from(byte));
        (bits >> (22 * behind)) as u32 & MAX_OVERLAPPED
    }
}

impl fmt::Debug for Overlap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (forward, backward) = (self.forward(), self.backward());
        f.debug_struct("Overlap").field("forward", &forward).field("backward", &backward).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn joined([a, b, c, d]: [u32; 4]) -> Option<Overlap> {
        Overlap::new((a.into(), b.into()), (c.into(), d.into()))
    }

    proptest! {
        #[test]
        fn numbers_come_back(numbers in prop::array::uniform4(0..=MAX_OVERLAPPED)) {
            let overlap = joined(numbers).expect("in range");
            let ((a, b), (c, d)) = (overlap.forward(), overlap.backward());
            prop_assert_eq!([a.get(), b.get(), c.get(), d.get()], numbers);
        }

        #[test]
        fn order_is_that_of_the_numbers(a in prop::array::uniform4(0..3u32), b in prop::array::uniform4(0..3u32)) {
            prop_assert_eq!(joined(a).cmp(&joined(b)), a.cmp(&b));
        }
    }

    #[test]
    fn numbers_have_a_limit() {
        assert!(joined([MAX_OVERLAPPED; 4]).is_some());
        for place in 0..4 {
            let mut numbers = [0; 4];
            numbers[place] = MAX_OVERLAPPED + 1;
            assert_eq!(joined(numbers), None);
        }
    }
}
